use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How urgent work is. Workers take work from the most urgent lane first.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    /// A client waits for the answer. No job is in this lane, and no message has it.
    #[serde(skip)]
    Live,
    /// Before other jobs.
    High,
    /// The default.
    #[default]
    Normal,
    /// Only if nothing else waits.
    Low,
}

impl Lane {
    /// All lanes, the most urgent first.
    pub const ALL: [Self; 4] = [Self::Live, Self::High, Self::Normal, Self::Low];

    /// The lanes of jobs, the most urgent first.
    pub const OF_JOBS: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// The name used in subjects, such as `trommel.tasks.high`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }

    /// The lane's position in [`Lane::OF_JOBS`]. Live work, which is not among them, has the
    /// position of the most urgent.
    pub fn place_of_job(self) -> usize {
        match self {
            Self::Live | Self::High => 0,
            Self::Normal => 1,
            Self::Low => 2,
        }
    }

    /// The lanes of jobs in the order for take number `take`: the most urgent first, but every
    /// sixteenth take begins with another lane, in turn, so that none starves.
    pub fn order(take: usize) -> [Self; 3] {
        const FAIR: usize = 16;
        let mut lanes = Self::OF_JOBS;
        if take % FAIR == FAIR - 1 {
            lanes.rotate_left(1 + take / FAIR % 2);
        }
        lanes
    }

    pub(crate) fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Reads the lane of a job.
impl FromStr for Lane {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::OF_JOBS
            .into_iter()
            .find(|lane| lane.as_str() == text)
            .ok_or_else(|| format!("lane {text:?} is invalid; give high, normal or low"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_read_what_they_write() {
        for (place, lane) in Lane::OF_JOBS.into_iter().enumerate() {
            assert_eq!(lane.to_string().parse(), Ok(lane));
            assert_eq!(lane.place_of_job(), place);
        }
        assert!("urgent".parse::<Lane>().unwrap_err().contains("high"));
    }

    #[test]
    fn no_job_is_live() {
        assert!("live".parse::<Lane>().is_err());
        let live = rmp_serde::to_vec_named("live").unwrap();
        assert!(rmp_serde::from_slice::<Lane>(&live).is_err());
        let high = rmp_serde::to_vec_named("high").unwrap();
        assert_eq!(rmp_serde::from_slice::<Lane>(&high).unwrap(), Lane::High);
        assert!(rmp_serde::to_vec_named(&Lane::Live).is_err());
    }
}
