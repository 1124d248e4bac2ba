use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;
use trommel_infer::InferError;
use trommel_queue::QueueError;
use trommel_storage::StorageError;

/// Errors that stop a job, as opposed to failing one image.
#[derive(Debug, Error)]
pub enum WorkerError {
    /// The source could not be listed, or the rows could not be stored.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The model or its device failed permanently.
    #[error(transparent)]
    Infer(#[from] InferError),
    /// A queue failed permanently.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The operating system could not start a thread.
    #[error("failed to start a thread")]
    Thread(#[source] io::Error),
    /// A defect in Trommel.
    #[error("{what} panicked; this is a defect, please report it")]
    Panicked {
        /// What panicked.
        what: &'static str,
    },
    /// Threads hang in abandoned work.
    #[error(
        "{threads} threads hang in images that were given up; look for a file system that does not answer, then start the process again"
    )]
    Hung {
        /// Number of threads.
        threads: usize,
    },
    /// A drain exceeded its time limit.
    #[error(
        "images in flight were not finished within {} of the stop; committed rows stay, and the same command resumes",
        humantime::format_duration(*after)
    )]
    DrainTimeout {
        /// The time limit.
        after: Duration,
    },
    /// A setting or a file of the worker cannot be used.
    #[error("{0}")]
    Settings(String),
    /// A request, or the record of a job, cannot be carried out.
    #[error("{0}")]
    Request(String),
    /// A model cannot be used.
    #[error("{0}")]
    Model(String),
    /// A restarted listing differs from the previous one.
    #[error(
        "the source does not list the first {listed} images that it listed before; give the job another output, or submit it again with --skip-existing, which compares by uri and etag"
    )]
    SourceChanged {
        /// Images listed before.
        listed: u64,
    },
    /// A record in the broker is unreadable.
    #[error(
        "the record {key} in the broker cannot be read ({reason}); a newer version may have written it: upgrade this worker"
    )]
    Unreadable {
        /// Its key.
        key: String,
        /// The problem.
        reason: String,
    },
    /// The repository has no folder with this name.
    #[error("model {name} does not exist in {} (known: {known})", root.display())]
    UnknownModel {
        /// The name.
        name: String,
        /// The existing names.
        known: String,
        /// The repository.
        root: PathBuf,
    },
    /// A job began with a version that this worker lacks.
    #[error(
        "model {name} has version {expected} in this job, but version {found} in {}; give all workers the same models",
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
    /// Work for a job that has not begun according to its record.
    #[error("job {job} has not begun, as far as its record shows")]
    NotBegun {
        /// The job.
        job: String,
    },
    /// An output that another job has not released yet.
    #[error("the workers of job {job}, which has ended, have not released {output} yet")]
    OutputBusy {
        /// The output.
        output: String,
        /// The job.
        job: String,
    },
    /// A listing that was begun repeatedly.
    #[error(
        "the listing was begun {starts} times without getting further; it may crash its worker: see the logs of the ingest workers"
    )]
    Attempts {
        /// Number of starts.
        starts: u32,
    },
    /// Another worker has taken over the job.
    #[error("another worker has taken over the job")]
    LeaseLost,
    /// No worker answers the control API.
    #[error("no ingest worker answered; start one on this broker: trommel worker --role ingest")]
    NobodyAnswers,
    /// The workers refused a request.
    #[error("{0}")]
    Refused(String),
    /// More images failed than the job allows.
    #[error(
        "{failed} of the first {listed} images failed, more than --max-failure-rate {limit} allows"
    )]
    TooManyFailures {
        /// Failed images.
        failed: u64,
        /// Images listed so far by this run.
        listed: u64,
        /// The allowed share.
        limit: f64,
    },
}
