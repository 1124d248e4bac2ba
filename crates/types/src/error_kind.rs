use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Why an image has no label. A closed set: it is a column of every result row and a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The object does not exist, or a symbolic link leads nowhere.
    NotFound,
    /// The store refused access.
    PermissionDenied,
    /// The object exists, but reading it failed.
    Unreadable,
    /// The object has changed since it was listed.
    Changed,
    /// The object is empty.
    Empty,
    /// More encoded bytes than the limit allows.
    TooLarge,
    /// The bytes are of no supported image format.
    UnknownFormat,
    /// The file ends before the image does.
    Truncated,
    /// The bytes contradict their format.
    Corrupt,
    /// More pixels, or a longer side, than the limit allows.
    TooManyPixels,
    /// A valid file that uses an unsupported feature of its format.
    Unsupported,
    /// The work exceeded its time limit.
    Timeout,
    /// The image's deadline, which the job set, passed before it was processed.
    Expired,
    /// The model failed on this image, also when run alone.
    ModelFailed,
    /// Every attempt ended without an outcome; the image may kill its worker.
    Poisoned,
}

/// Words for several kinds: everything that a stage reports.
const GROUPS: [(&str, &[ErrorKind]); 3] = [
    (
        "fetch",
        &[
            ErrorKind::NotFound,
            ErrorKind::PermissionDenied,
            ErrorKind::Unreadable,
            ErrorKind::Changed,
            ErrorKind::Empty,
            ErrorKind::TooLarge,
        ],
    ),
    (
        "decode",
        &[
            ErrorKind::UnknownFormat,
            ErrorKind::Truncated,
            ErrorKind::Corrupt,
            ErrorKind::TooManyPixels,
            ErrorKind::Unsupported,
        ],
    ),
    ("infer", &[ErrorKind::ModelFailed, ErrorKind::Poisoned]),
];

impl ErrorKind {
    /// All kinds.
    pub const ALL: [Self; 15] = [
        Self::NotFound,
        Self::PermissionDenied,
        Self::Unreadable,
        Self::Changed,
        Self::Empty,
        Self::TooLarge,
        Self::UnknownFormat,
        Self::Truncated,
        Self::Corrupt,
        Self::TooManyPixels,
        Self::Unsupported,
        Self::Timeout,
        Self::Expired,
        Self::ModelFailed,
        Self::Poisoned,
    ];

    /// The kinds that these words name, in order: a kind by its name, or `fetch`, `decode` or
    /// `infer` for all kinds that this stage reports.
    ///
    /// # Errors
    /// If a word is unknown: a sentence that lists the valid ones.
    pub fn named<W: AsRef<str>>(words: &[W]) -> Result<Vec<Self>, String> {
        let mut named = BTreeSet::new();
        for word in words.iter().map(AsRef::as_ref) {
            if let Some((_, kinds)) = GROUPS.iter().find(|(group, _)| *group == word) {
                named.extend(kinds.iter().copied());
            } else if let Some(kind) = Self::ALL.iter().find(|kind| kind.as_str() == word) {
                named.insert(*kind);
            } else {
                let groups = GROUPS.iter().map(|(group, _)| *group);
                let all: Vec<_> = groups.chain(Self::ALL.map(Self::as_str)).collect();
                return Err(format!(
                    "unknown kind of failure {word:?}; use {}",
                    all.join(", ")
                ));
            }
        }
        Ok(named.into_iter().collect())
    }

    /// The name used in rows and metrics, such as `too_many_pixels`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::PermissionDenied => "permission_denied",
            Self::Unreadable => "unreadable",
            Self::Changed => "changed",
            Self::Empty => "empty",
            Self::TooLarge => "too_large",
            Self::UnknownFormat => "unknown_format",
            Self::Truncated => "truncated",
            Self::Corrupt => "corrupt",
            Self::TooManyPixels => "too_many_pixels",
            Self::Unsupported => "unsupported",
            Self::Timeout => "timeout",
            Self::Expired => "expired",
            Self::ModelFailed => "model_failed",
            Self::Poisoned => "poisoned",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_named_by_themselves_and_by_their_stage() {
        let kinds = ErrorKind::named(&["timeout", "infer", "poisoned"]).unwrap();
        let expected = [
            ErrorKind::Timeout,
            ErrorKind::ModelFailed,
            ErrorKind::Poisoned,
        ];
        assert_eq!(kinds, expected);
        let error = ErrorKind::named(&["fetch", "slow"]).unwrap_err();
        assert!(
            error.contains("\"slow\"") && error.contains("decode") && error.contains("timeout")
        );
        // Each kind but `timeout` and `expired` belongs to one stage.
        let grouped: Vec<_> = GROUPS.iter().flat_map(|(_, kinds)| kinds.iter()).collect();
        assert_eq!(grouped.len() + 2, ErrorKind::ALL.len());
        let all = ErrorKind::named(&["fetch", "decode", "timeout", "expired", "infer"]).unwrap();
        assert_eq!(all, ErrorKind::ALL);
    }
}
