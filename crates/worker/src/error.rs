use std::io;
use std::path::PathBuf;
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
    /// Threads hang in work that was given up.
    #[error(
        "{threads} threads hang in images that were given up; look for a file system that does not answer, then start the process again"
    )]
    Hung {
        /// How many.
        threads: usize,
    },
    /// A drain took longer than it may.
    #[error(
        "images in flight were not finished within {} of the stop; committed rows stay, and the same command resumes",
        humantime::format_duration(*after)
    )]
    DrainTimeout {
        /// The time it had.
        after: Duration,
    },
    /// A setting or a file that the worker depends on cannot be used.
    #[error("{0}")]
    Settings(String),
    /// A request, or the record of a job, cannot be carried out.
    #[error("{0}")]
    Request(String),
    /// A model cannot be used.
    #[error("{0}")]
    Model(String),
    /// A restarted listing does not list what was listed before.
    #[error(
        "the source does not list the first {listed} images that it listed before; give the job another output, or submit it again with --skip-existing, which compares by uri and etag"
    )]
    SourceChanged {
        /// Images that were listed before.
        listed: u64,
    },
    /// A record in the broker cannot be understood.
    #[error(
        "the record {key} in the broker cannot be read ({reason}); a newer version may have written it: upgrade this worker"
    )]
    Unreadable {
        /// Its key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No folder of the repository has this name.
    #[error("model {name} does not exist in {} (known: {known})", root.display())]
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
    /// Work for a job whose record does not show that it has begun.
    #[error("job {job} has not begun, as far as its record shows")]
    NotBegun {
        /// The job.
        job: String,
    },
    /// An output that another job has not let go of yet.
    #[error("the workers of job {job}, which has ended, have not released {output} yet")]
    OutputBusy {
        /// The output.
        output: String,
        /// The job.
        job: String,
    },
    /// A listing that is begun again and again.
    #[error(
        "the listing was begun {starts} times without getting further; it may crash its worker: see the logs of the ingest workers"
    )]
    Attempts {
        /// How often it was begun.
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
        /// Images without a label.
        failed: u64,
        /// Images listed so far by this run.
        listed: u64,
        /// The share that is allowed.
        limit: f64,
    },
}
