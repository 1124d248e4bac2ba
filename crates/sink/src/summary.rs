use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::{FailureSummary, JobRecord};

/// The result of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The job.
    pub job_id: String,
    /// The run whose parts count.
    pub run: String,
    /// What was classified.
    pub source: String,
    /// The model's name.
    pub model: String,
    /// The first digits of the model's content hash.
    pub model_version: String,
    /// Number of images, and so of rows.
    pub images: u64,
    /// Rows with a label.
    pub ok: u64,
    /// Rows without a label.
    pub failed: u64,
    /// Failures by kind.
    pub failures: BTreeMap<String, FailureSummary>,
    /// The valid parts; of several rows with the same index, the one in the later part counts.
    /// Parts are removed once merged into a single file.
    pub parts: Vec<PartSummary>,
    /// For a retry: the same for the whole job, with the retry's rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<Box<Summary>>,
}

/// One part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartSummary {
    /// File name.
    pub name: String,
    /// Rows in it.
    pub rows: u64,
}

/// The content of `_summary.json`.
#[derive(Serialize)]
pub(crate) struct StoredSummary<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    #[serde(flatten)]
    times: Times,
}

/// When a job was worked on, in microseconds since the Unix epoch, UTC.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Times {
    /// When it was created.
    started_at: i64,
    /// When it was finished.
    finished_at: i64,
    /// The time in between.
    seconds: f64,
    /// When the last retry of its failed rows was finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) retried_at: Option<i64>,
}

impl Times {
    /// For a job that finishes now.
    pub(crate) fn now(job: &JobRecord) -> Self {
        let finished_at = now();
        Self {
            started_at: job.created_at,
            finished_at,
            seconds: finished_at.saturating_sub(job.created_at) as f64 / 1e6,
            retried_at: None,
        }
    }

    /// For a job whose failed rows are replaced now, from its summary so far.
    pub(crate) fn retried(summary: &[u8]) -> Result<Self, serde_json::Error> {
        let times: Self = serde_json::from_slice(summary)?;
        Ok(Self {
            retried_at: Some(now()),
            ..times
        })
    }
}

impl<'a> StoredSummary<'a> {
    pub(crate) fn new(summary: &'a Summary, times: Times) -> Self {
        Self { summary, times }
    }

    /// As JSON.
    pub(crate) fn text(&self) -> String {
        serde_json::to_string_pretty(self).expect("summaries hold text, numbers and lists")
    }
}

fn now() -> i64 {
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX)
}
