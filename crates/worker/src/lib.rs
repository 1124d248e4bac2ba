//! The four roles as loops: pull, do the work, make it durable, settle the delivery.
//!
//! In flow order: *ingest* lists a source and publishes one task per image; *preprocess* turns each
//! into a tensor; *infer* runs tensors through the model in batches; *sink* commits the answers as
//! parts. [`EmbeddedJob`] runs all four in one process, joined by in-process queues; a [`Worker`]
//! runs some of them over a broker, for jobs that a [`Client`] submits; [`Progress`] counts their
//! work; [`WorkerConfig`] has their settings. [`Answers`] classifies single images for requests,
//! without a queue.
//!
//! Guarantees. A stage settles a delivery only after its output is stored, so a crash at any point
//! repeats an image and never loses one; the sink drops rows that are already committed, so that
//! every image gets exactly one row. An error of one image becomes its row (`status = failed`);
//! only [`WorkerError`] stops a job. One file, `fault.rs`, decides which errors are retried.
//!
//! Deliberately absent: arguments, environment, signals and terminals, which belong to the binary.

mod admission;
mod again;
mod allow;
mod asked_rows;
mod byte_budget;
mod calibration;
mod clock;
mod config;
mod cpu_pool;
mod distributed;
mod embedded;
mod error;
mod fatal;
mod fault;
mod hop;
mod infer;
mod ingest;
mod intake;
mod job;
mod live;
mod live_engine;
mod live_urls;
mod metrics;
mod one_job;
mod permissions;
mod preprocess;
mod progress;
mod readiness;
mod reports;
mod request_times;
mod rows;
mod serve_config;
mod settle;
mod sink;
mod times;
mod trace;
mod trial;
mod tried;
mod tuned;

pub use allow::{Allowed, Refusal};
pub use calibration::{Quiet, engine_options, machine_name, start_engine};
pub use config::{
    AccessConfig, InferConfig, IngestConfig, LiveConfig, LogFormat, OtlpProtocol, PreprocessConfig,
    RetryPolicy, ShutdownConfig, SinkConfig, TelemetryConfig, WorkerConfig, is_source_name,
};
pub use distributed::{
    CascadeStatus, Client, Counted, DeadLetter, Holder, HopKind, Job, JobId, JobPage, JobProgress,
    JobReasons, JobState, JobStatus, JobStore, Learned, ListRequest, Listing, ModelReply,
    ModelStatus, OldImage, Presence, Reason, ReasonKind, RetryReply, RetryRequest, Rows,
    StageReasons, StageStatus, StageWork, SubmitReply, Submitted, Worker, WorkerOptions,
    fleet_usage,
};
pub use embedded::{EmbeddedJob, EmbeddedModel, Ended, Images, Sinks, job_record};
pub use error::WorkerError;
pub use ingest::Announced;
pub use live::{Admitted, Answers, LiveModel, LiveRequest, NotAnswered, ServedModel};
pub use live_engine::{LiveEngine, Remote};
pub use live_urls::{LiveUrls, UrlFault, UrlFaultKind};
pub use metrics::describe_metrics;
pub use permissions::nats_permissions;
pub use progress::{FailureCount, Progress, Task};
pub use readiness::Readiness;
pub use reports::PutOff;
pub use request_times::{RequestWork, request_ended};
pub use serve_config::ServeConfig;
pub use times::{Percentiles, TimeCounts};
pub use trial::{Trial, TrialOutcome, TrialSink, TrialTokens};
pub use trommel_infer::measure_devices;
pub use trommel_types::Role;
pub use tuned::{Tuned, TunedProfile};
