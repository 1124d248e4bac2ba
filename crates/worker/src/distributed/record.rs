//! What the broker's key-value store holds of a job.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trommel_storage::FailureSummary;
use trommel_types::{Column, JobRequest};

/// A job, as all roles see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// What was asked for.
    pub request: JobRequest,
    /// How far it is.
    pub state: JobState,
    /// Why it failed or was cancelled; or what it waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When it was submitted, in microseconds since the Unix epoch, UTC.
    pub submitted_at: i64,
    /// When its listing began, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<i64>,
    /// When it ended, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<i64>,
    /// The source in words, once it was opened.
    #[serde(default)]
    pub source: String,
    /// The source's pass-through columns.
    #[serde(default)]
    pub columns: Vec<Column>,
    /// The models with the versions that they had when the job began.
    #[serde(default)]
    pub models: Vec<JobModel>,
}

/// A model of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobModel {
    /// Its name in the repository.
    pub name: String,
    /// The first digits of its content hash.
    pub version: String,
}

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Nobody has begun it.
    Queued,
    /// Its images are on their way.
    Running,
    /// Every image has its row.
    Complete,
    /// It ended early, for the reason given; what is committed stays.
    Failed,
    /// A user ended it; what is committed stays.
    Cancelled,
}

impl JobState {
    /// Whether nothing more will come of it.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Complete | Self::Failed | Self::Cancelled)
    }

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Complete => "complete",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// How far a job's source is listed. Written by ingest alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// Images whose tasks are stored.
    pub listed: u64,
    /// The uri of the last of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_uri: Option<String>,
    /// Whether that is all of them.
    pub ended: bool,
    /// Of a dry run: all images of the source, as far as they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted: Option<Counted>,
}

/// How many images a source has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Images.
    pub images: u64,
    /// Whether that is all of them, or time ran out.
    pub is_all: bool,
}

/// How many rows of a job and model are committed. Written by its sink alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rows {
    /// Rows that are durable.
    pub committed: u64,
    /// Of them, with a label.
    pub ok: u64,
    /// Of them, without.
    pub failed: u64,
    /// The latter by kind.
    pub failures: BTreeMap<String, FailureSummary>,
    /// Rows in hand that are not durable yet.
    pub in_hand: u64,
    /// Rows a second, over the last seconds.
    pub rate: f64,
    /// Whether that is all, and the output finished.
    pub finished: bool,
}
