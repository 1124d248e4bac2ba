use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;
use trommel_infer::InferError;
use trommel_queue::QueueError;
use trommel_storage::{StorageError, StorageErrorKind};

/// What stops a job, as opposed to what fails one image.
#[derive(Debug, Error)]
pub enum WorkerError {
    /// The source could not be listed, or the rows could not be stored.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The model or its device failed for good.
    #[error(transparent)]
    Infer(#[from] InferError),
    /// A queue failed in a way that no waiting cures.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The operating system gave no thread.
    #[error("failed to start a thread")]
    Thread(#[source] io::Error),
    /// A defect in Trommel.
    #[error("{what} panicked; this is a defect, please report it")]
    Panicked {
        /// What panicked.
        what: &'static str,
    },
    /// A drain took longer than it may.
    #[error(
        "what was in hand was not finished within {} of the stop; what is committed stays, and the same command resumes",
        humantime::format_duration(*after)
    )]
    DrainTimeout {
        /// The time it had.
        after: Duration,
    },
    /// A setting or a file that the worker depends on cannot be used.
    #[error("{0}")]
    Settings(String),
    /// No folder of the repository has this name.
    #[error("there is no model {name} in {} (there are: {known})", root.display())]
    UnknownModel {
        /// The name.
        name: String,
        /// The names that are there.
        known: String,
        /// The repository.
        root: PathBuf,
    },
    /// A job began with a version that this worker does not have.
    #[error(
        "model {name} is to be version {expected} for a running job, but {} has version {found}; give all workers the same models",
        root.display()
    )]
    OtherVersion {
        /// The model.
        name: String,
        /// The job's version.
        expected: String,
        /// This worker's.
        found: String,
        /// The repository.
        root: PathBuf,
    },
    /// Another sink has taken over the job.
    #[error("another sink has taken over the job")]
    LeaseLost,
    /// No worker answers the control API.
    #[error("nobody answers: start a worker with the ingest role on this broker first")]
    NobodyAnswers,
    /// The workers refused a request.
    #[error("{0}")]
    Refused(String),
    /// More images failed than the job allows.
    #[error(
        "{failed} of the first {listed} images failed, more than --max-failure-rate {limit} allows"
    )]
    TooManyFailures {
        /// Images without a label.
        failed: u64,
        /// Images listed so far by this run.
        listed: u64,
        /// The share that is allowed.
        limit: f64,
    },
}

impl WorkerError {
    /// Whether it came of the work on one image, so that others may fare better.
    pub(crate) fn is_of_one_image(&self) -> bool {
        matches!(self, Self::Panicked { .. })
    }

    /// Whether another attempt, here or elsewhere, may end differently.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Storage(error) => is_transient(error),
            Self::Queue(_) | Self::Thread(_) | Self::Panicked { .. } => true,
            _ => false,
        }
    }
}

/// Whether a store may do later what it did not do now.
pub(crate) fn is_transient(error: &StorageError) -> bool {
    matches!(
        error.kind(),
        StorageErrorKind::Unreadable
            | StorageErrorKind::WriteFailed
            | StorageErrorKind::NoSpace
            | StorageErrorKind::Locked
            | StorageErrorKind::LostRace
    )
}
