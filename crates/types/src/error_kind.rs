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
    /// The object is there but reading it failed.
    Unreadable,
    /// The object holds no bytes.
    Empty,
    /// More encoded bytes than the limit allows.
    TooLarge,
    /// The bytes are of no image format that is read.
    UnknownFormat,
    /// The file ends before the image does.
    Truncated,
    /// The bytes contradict their format.
    Corrupt,
    /// More pixels, or a longer side, than the limit allows.
    TooManyPixels,
    /// A valid file that uses a feature of its format that is not read.
    Unsupported,
    /// The work took longer than it may.
    Timeout,
    /// The model failed on this image, also when run alone.
    ModelFailed,
    /// Every attempt ended without an outcome; the image may kill its worker.
    Poisoned,
}

impl ErrorKind {
    /// The name used in rows and metrics, such as `too_many_pixels`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::PermissionDenied => "permission_denied",
            Self::Unreadable => "unreadable",
            Self::Empty => "empty",
            Self::TooLarge => "too_large",
            Self::UnknownFormat => "unknown_format",
            Self::Truncated => "truncated",
            Self::Corrupt => "corrupt",
            Self::TooManyPixels => "too_many_pixels",
            Self::Unsupported => "unsupported",
            Self::Timeout => "timeout",
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
