use std::io;
use std::time::Duration;

use thiserror::Error;
use trommel_infer::InferError;
use trommel_queue::QueueError;
use trommel_storage::StorageError;

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
