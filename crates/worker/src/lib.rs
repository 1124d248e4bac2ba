//! The four roles as loops: pull, do the work, make it durable, settle the delivery.
//!
//! In flow order: *ingest* lists a source and publishes one task an image; *preprocess* turns each
//! into a tensor; *infer* runs tensors through the model in batches; *sink* commits the answers as
//! parts. [`EmbeddedJob`] runs all four in one process, joined by in-process queues; a [`Worker`]
//! runs some of them over a broker, for jobs that a [`Client`] submits; [`Progress`] counts what
//! they do; [`WorkerConfig`] says how they work.
//!
//! Guarantees. A stage settles a delivery only after its output is stored, so a crash at any point
//! repeats an image and never loses one; the sink drops what is committed already, so that every
//! image ends in exactly one row. An error of one image becomes its row (`status = failed`); only
//! [`WorkerError`] stops a job. Which errors are retried is decided in one place,
//! `disposition.rs`.
//!
//! Deliberately absent: arguments, environment, signals and terminals, which are the binary's.

mod calibration;
mod config;
mod cpu_pool;
mod disposition;
mod distributed;
mod embedded;
mod error;
mod fatal;
mod hop;
mod infer;
mod ingest;
mod intake;
mod job;
mod metrics;
mod preprocess;
mod progress;
mod readiness;
mod rows;
mod settle;
mod sink;
mod trace;

pub use calibration::engine_options;
pub use config::{
    InferConfig, IngestConfig, LogFormat, OtlpProtocol, PreprocessConfig, RetryPolicy,
    ShutdownConfig, SinkConfig, TelemetryConfig, WorkerConfig,
};
pub use distributed::{
    Client, Counted, HopKind, Job, JobId, JobModel, JobReasons, JobState, JobStatus, Listing,
    ModelReply, ModelStatus, OldImage, Presence, Registry, Role, Said, StageReasons, StageStatus,
    StageWork, SubmitReply, Submitted, Worker, WorkerOptions,
};
pub use embedded::{EmbeddedJob, Ended};
pub use error::WorkerError;
pub use metrics::describe_metrics;
pub use progress::{FailureCount, Progress, Task};
pub use readiness::Readiness;
pub use trommel_infer::measure_devices;
