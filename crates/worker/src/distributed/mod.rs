//! The roles over the broker: the same loops as in the embedded run, with other queues between.

mod claims;
mod client;
mod control;
mod events;
mod feed;
mod infer_models;
mod ingest_jobs;
mod lanes;
mod lease;
mod leased_rows;
mod names;
mod output;
mod planned_jobs;
mod presence;
mod queues;
mod record;
mod registry;
mod repository;
mod request;
mod sink_jobs;
mod status;
mod why;
mod worker;

pub use client::Client;
pub use control::{JobId, ModelReply, SubmitReply};
pub use presence::{Presence, StageWork};
pub use record::{Counted, Job, JobModel, JobState, Listing};
pub use registry::{Registry, Submitted};
pub(crate) use repository::Repository;
pub use status::{JobStatus, ModelStatus, StageStatus};
pub use why::{JobReasons, OldImage, Said, StageReasons};
pub use worker::{HopKind, Role, Worker, WorkerOptions};
