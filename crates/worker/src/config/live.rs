use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

/// Classifying frames of live sources.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct LiveConfig {
    /// Live sources whose frames are classified, by name; `*` for all. Read by `trommel serve` and
    /// by workers that answer requests. Default: none.
    pub sources: Vec<String>,
    /// The model that classifies them. Default: the only one that answers requests.
    pub model: Option<String>,
    /// Frames of one source that are processed at once. Default: 1.
    pub max_in_flight: NonZeroUsize,
    /// Take every Nth frame of a source. Default: 1.
    pub stride: NonZeroUsize,
    /// Most frames per second taken from a source. Default: no limit.
    pub max_rate: Option<f64>,
    /// Sources that are known at once; frames of further ones are dropped. Default: 1024.
    pub max_sources: NonZeroUsize,
}

impl Default for LiveConfig {
    fn default() -> Self {
        Self {
            sources: Vec::new(),
            model: None,
            max_in_flight: NonZeroUsize::MIN,
            stride: NonZeroUsize::MIN,
            max_rate: None,
            max_sources: NonZeroUsize::new(1024).expect("1024 is not 0"),
        }
    }
}

impl LiveConfig {
    /// Names every invalid setting, with its remedy.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for source in &self.sources {
            if source != "*" && !is_source_name(source) {
                problems.push(format!(
                    "live.sources: {source:?} is not a valid source name; give letters, digits, - and _, or *"
                ));
            }
        }
        if self
            .max_rate
            .is_some_and(|rate| !(rate.is_finite() && rate > 0.0))
        {
            problems.push("live.max-rate: give a number above 0, or leave it out".to_owned());
        }
        problems
    }
}

/// Whether a live source may be called so: one token of a subject, at most 64 letters, digits, `-` and `_`.
pub fn is_source_name(name: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(is_valid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_named() {
        assert!(LiveConfig::default().problems().is_empty());
        let broken = LiveConfig {
            sources: vec!["cam.1".to_owned(), "*".to_owned()],
            max_rate: Some(0.0),
            ..LiveConfig::default()
        };
        let problems = broken.problems();
        assert_eq!(problems.len(), 2);
        assert!(problems[0].contains("cam.1") && problems[1].contains("max-rate"));
    }
}
