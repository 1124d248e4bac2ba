use std::fmt::Display;
use std::io;
use std::path::Path;
use std::time::Duration;

use thiserror::Error;

/// An error of reading or storing.
#[derive(Debug, Error)]
#[error("{message}")]
pub struct StorageError {
    kind: StorageErrorKind,
    message: String,
    #[source]
    source: Option<io::Error>,
}

/// The kinds of [`StorageError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StorageErrorKind {
    /// There is no such object.
    NotFound,
    /// The system refused access.
    PermissionDenied,
    /// The object exists, but reading it failed; another attempt may succeed.
    Unreadable,
    /// Reading exceeded its time limit; another attempt may succeed.
    TimedOut,
    /// The object is not the version that was listed.
    Changed,
    /// The object cannot be read as an image, such as a pipe or a folder.
    NotAFile,
    /// The object is empty.
    Empty,
    /// The object is larger than the limit.
    TooLarge,
    /// The source given by the user is invalid.
    InvalidSource,
    /// The destination given by the user is invalid.
    InvalidDestination,
    /// Foreign or finished results are in the way.
    OutputExists,
    /// The destination has rows of another job.
    OutputOfAnotherJob,
    /// Another process writes there.
    Locked,
    /// Another process has committed the same part first.
    LostRace,
    /// The disk is full.
    NoSpace,
    /// Writing failed for another reason.
    WriteFailed,
    /// The source's listing has changed.
    SourceChanged,
    /// A file of Trommel's is damaged.
    Corrupt,
    /// A job cannot be finished because rows are missing.
    Incomplete,
}

impl StorageError {
    /// An error with this message.
    pub fn new(kind: StorageErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
        }
    }

    /// Another process has changed `what` first.
    pub fn lost_race(what: impl Display) -> Self {
        let message = format!("{what} was changed by another process in the meantime");
        Self::new(StorageErrorKind::LostRace, message)
    }

    /// Access was refused, with the reason.
    pub fn denied(message: impl Into<String>) -> Self {
        Self::new(StorageErrorKind::PermissionDenied, message.into())
    }

    /// Something is temporarily unreachable.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StorageErrorKind::Unreadable, message)
    }

    /// The source given by the user is invalid.
    pub fn invalid_source(message: impl Into<String>) -> Self {
        Self::new(StorageErrorKind::InvalidSource, message)
    }

    /// The source given by the user cannot be opened.
    pub fn source(path: &Path, error: io::Error) -> Self {
        let (kind, remedy) = match error.kind() {
            io::ErrorKind::NotFound => (
                StorageErrorKind::NotFound,
                "; check its spelling and the folder you are in",
            ),
            io::ErrorKind::PermissionDenied => (
                StorageErrorKind::PermissionDenied,
                "; give yourself the right to read it",
            ),
            _ => (StorageErrorKind::InvalidSource, ""),
        };
        Self {
            kind,
            message: format!("source {}: {error}{remedy}", path.display()),
            source: Some(error),
        }
    }

    /// A failure to read `what`.
    pub fn read(what: impl Display, error: io::Error) -> Self {
        let kind = match error.kind() {
            // No file can have such a path, so no other attempt will succeed.
            io::ErrorKind::NotFound
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::InvalidFilename
            | io::ErrorKind::InvalidInput => StorageErrorKind::NotFound,
            io::ErrorKind::PermissionDenied => StorageErrorKind::PermissionDenied,
            _ => StorageErrorKind::Unreadable,
        };
        Self {
            kind,
            message: format!("failed to read {what}: {error}"),
            source: Some(error),
        }
    }

    /// An object that was not read within `limit`.
    pub fn timed_out(what: impl Display, limit: Duration) -> Self {
        let message = format!(
            "{what} was not read within {} seconds (preprocess.fetch-timeout)",
            limit.as_secs_f64()
        );
        Self::new(StorageErrorKind::TimedOut, message)
    }

    /// An object that has changed since it was listed.
    pub fn changed(what: impl Display) -> Self {
        let message = format!("{what} was changed since it was listed; submit a new job for it");
        Self::new(StorageErrorKind::Changed, message)
    }

    /// An object of `size` bytes that exceeds `limit`.
    pub fn too_large(what: impl Display, size: u64, limit: u64) -> Self {
        let message =
            format!("{what} holds {size} bytes, more than preprocess.max-bytes = {limit} allows");
        Self::new(StorageErrorKind::TooLarge, message)
    }

    /// A failure to write to `path`.
    pub fn write(path: &Path, error: io::Error) -> Self {
        let path = path.display();
        let (kind, message) = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => (
                StorageErrorKind::NoSpace,
                format!(
                    "no space left to write {path}; committed rows are kept; free some space and run the same command again"
                ),
            ),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => (
                StorageErrorKind::PermissionDenied,
                format!("not allowed to write {path}: {error}; choose another --output"),
            ),
            _ => (
                StorageErrorKind::WriteFailed,
                format!("failed to write {path}: {error}"),
            ),
        };
        Self {
            kind,
            message,
            source: Some(error),
        }
    }

    /// A failure to write to an open stream.
    pub fn stream(name: &str, error: io::Error) -> Self {
        let message = format!("failed to write to {name}: {error}");
        Self {
            kind: StorageErrorKind::WriteFailed,
            message,
            source: Some(error),
        }
    }

    /// A damaged file of Trommel's.
    pub fn corrupt(path: &Path, reason: impl Display) -> Self {
        Self::new(
            StorageErrorKind::Corrupt,
            format!(
                "{} is damaged ({reason}); remove it to have its rows written again",
                path.display()
            ),
        )
    }

    /// The kind of error.
    pub fn kind(&self) -> StorageErrorKind {
        self.kind
    }
}

/// An error with its causes, for people, without repetitions.
pub(crate) fn words(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !words.contains(&next) {
            words = format!("{words}: {next}");
        }
        cause = error.source();
    }
    words
}
