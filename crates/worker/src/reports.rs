//! This process's last reports about postponed images, for `trommel jobs why`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use trommel_types::Role;

/// Jobs and stages with a stored report; beyond this, the oldest report is dropped.
const KEPT: usize = 64;
/// Longest stored error text, in bytes.
const TEXT: usize = 512;

/// A worker's report about a postponed image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutOff {
    /// The stage.
    pub stage: Role,
    /// The job.
    pub job: String,
    /// The image.
    pub uri: String,
    /// The number of attempts.
    pub attempt: u32,
    /// The problem.
    pub error: String,
    /// When, in microseconds since the Unix epoch, UTC.
    pub at: i64,
}

/// The latest report of each job and stage.
#[derive(Clone, Default)]
pub(crate) struct Reports(Arc<Mutex<BTreeMap<(String, Role), PutOff>>>);

impl Reports {
    pub(crate) fn put_off(&self, mut report: PutOff) {
        for text in [&mut report.error, &mut report.uri] {
            let end = text.floor_char_boundary(TEXT);
            text.truncate(end);
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.insert((report.job.clone(), report.stage), report);
        if kept.len() > KEPT
            && let Some(oldest) = kept.iter().min_by_key(|(_, report)| report.at)
        {
            let oldest = oldest.0.clone();
            kept.remove(&oldest);
        }
    }

    pub(crate) fn latest(&self) -> Vec<PutOff> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_report_of_each_job_is_kept_and_memory_is_bounded() {
        let reports = Reports::default();
        for number in 0..2 * KEPT {
            for attempt in 1..3 {
                reports.put_off(PutOff {
                    stage: Role::Infer,
                    job: format!("job-{number:03}"),
                    uri: "ä".repeat(TEXT),
                    attempt,
                    error: "x".repeat(10_000),
                    at: number as i64,
                });
            }
        }
        let latest = reports.latest();
        assert_eq!(latest.len(), KEPT);
        assert_eq!(latest[0].job, format!("job-{KEPT:03}"));
        assert!(latest.iter().all(|report| report.attempt == 2));
        assert!(
            latest
                .iter()
                .all(|report| report.error.len() + report.uri.len() <= 2 * TEXT)
        );
    }
}
