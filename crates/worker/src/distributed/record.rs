//! The state of a job in the broker's key-value store: one record, and one checkpoint.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trommel_infer::Decided;
use trommel_sink::{FailureSummary, Preconditions, Summary};
use trommel_types::{JobModel, JobSpec, Lane, RetryOf};

use crate::Trial;
use crate::ingest::Announced;
use crate::sink::Counts;

/// A job as seen by all roles.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Its spec. Complete and unchanged once the job has begun.
    pub spec: JobSpec,
    /// Its state.
    pub state: JobState,
    /// Why it ended early, or what it waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// When it was submitted, in microseconds since the Unix epoch, UTC.
    pub submitted_at: i64,
    /// When its listing began, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<i64>,
    /// When it ended, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<i64>,
    /// Number of retries requested.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retries: u32,
}

impl Job {
    /// Its id.
    pub fn id(&self) -> &str {
        self.spec.id()
    }

    /// How urgent it is.
    pub fn lane(&self) -> Lane {
        self.spec.request.lane
    }

    /// The id of its last retry.
    pub fn last_retry(&self) -> Option<String> {
        let retry = RetryOf {
            job: self.id().to_owned(),
            number: self.retries,
            kinds: Vec::new(),
        };
        (self.retries > 0).then(|| retry.id())
    }

    /// The id and the run of the job that its rows belong to: usually its own.
    pub(crate) fn root(&self) -> (&str, &str) {
        match &self.spec.base {
            None => (self.id(), &self.spec.run),
            Some(base) => (&base.job, &base.run),
        }
    }

    /// Whether it adds rows to others, for images without rows.
    pub(crate) fn adds(&self) -> bool {
        self.spec.base.is_some() && self.spec.request.options.retry.is_none()
    }

    /// Whether a small model decides images that it is certain of, and a large one the rest.
    pub(crate) fn is_cascade(&self) -> bool {
        self.spec.request.cascade.is_some()
    }

    /// Whether it lists only some images of its source, or not all of them at once.
    pub(crate) fn lists_some(&self) -> bool {
        self.adds() || self.is_cascade()
    }

    /// Its models with their versions when it began; empty before.
    pub fn models(&self) -> &[JobModel] {
        &self.spec.models
    }
}

pub(crate) fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Why a job ended early, or makes no progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// For programs.
    pub kind: ReasonKind,
    /// For people: the problem, the object, and the remedy.
    pub text: String,
}

impl Reason {
    pub(crate) fn new(kind: ReasonKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }
}

/// The kind of a [`Reason`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasonKind {
    /// The request cannot be carried out.
    Request,
    /// The source cannot be listed, or lists other images than before.
    Source,
    /// A model does not exist, or cannot run.
    Model,
    /// The output cannot be written.
    Output,
    /// More images failed than the job allows.
    TooManyFailures,
    /// It exceeded its time limit.
    MaxRuntime,
    /// It reached its cost limit.
    MaxCost,
    /// Its listing was begun repeatedly without progress.
    Attempts,
    /// It waits for something that may still happen.
    Waiting,
}

/// The state of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// It has not begun.
    Queued,
    /// Its images are being processed.
    Running,
    /// Every image has its row.
    Complete,
    /// It ended early, for the reason given; what is committed stays.
    Failed,
    /// A user ended it; what is committed stays.
    Cancelled,
}

impl JobState {
    /// Whether this state is final.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Complete | Self::Failed | Self::Cancelled)
    }

    /// Its name.
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

/// The checkpoint of a job. Each part is changed only by the worker that holds its lease, by
/// compare-and-set under the lease's fencing number.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct JobProgress {
    /// The listing.
    #[serde(default)]
    pub listing: Listing,
    /// The rows of each model, by its name.
    #[serde(default)]
    pub rows: BTreeMap<String, Rows>,
}

/// The holder of a part of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The worker; empty if the lease was released.
    pub owner: String,
    /// Grows with each new holder: a worker with an old number may change nothing.
    pub fence: u64,
    /// Grows with each heartbeat.
    pub beat: u64,
}

/// Progress of a job's listing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// The listing worker.
    #[serde(default)]
    pub held: Holder,
    /// Images whose tasks are stored: all before this index.
    pub listed: u64,
    /// For a job that lists only some images of its source: how many of the source it has checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed: Option<u64>,
    /// For a feed: the event of the last of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<String>,
    /// How far tasks may be stored already, with the hash of the uris up to there, recorded before
    /// the first of them is published: a restarted listing has to list the same.
    #[serde(default)]
    pub announced: Announced,
    /// Whether the listing is complete.
    pub ended: bool,
    /// How often the source was listed again because the broker had lost messages.
    #[serde(default)]
    pub generation: u32,
    /// How often the listing was begun since its last progress.
    #[serde(default)]
    pub starts: u32,
    /// For a dry run and a cascade: all images of the source, as far as counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted: Option<Counted>,
    /// For a cascade: whether its sample is listed, and the rest waits for the rows of the sample.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waits: bool,
}

/// How many images a source has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Images.
    pub images: u64,
    /// Whether these are all, or the time limit was reached.
    pub is_all: bool,
}

/// Progress of the rows of a job and model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rows {
    /// The sink.
    #[serde(default)]
    pub held: Holder,
    /// Rows that are durable.
    pub committed: u64,
    /// Of these, with a label.
    pub ok: u64,
    /// Of these, without a label.
    pub failed: u64,
    /// Failures by kind.
    pub failures: BTreeMap<String, FailureSummary>,
    /// Rows held by a sink that are not durable yet.
    pub pending: u64,
    /// Recent rows per second.
    pub rate: f64,
    /// The cost of the job at its user's prices, as seen by this sink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// For a dry run: the result of its sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<Trial>,
    /// For a cascade: which model has decided how many images, once all rows are committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided: Option<Decided>,
    /// Whether all rows are committed and the output is finished.
    pub finished: bool,
    /// What the sink waits for, if its output does not accept rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Since when it waits, in microseconds since the Unix epoch, UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_since: Option<i64>,
    /// For a retry: how many rows it replaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<u64>,
    /// The retry whose rows are included in the counts, if one has replaced failed rows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retried: u32,
    /// Whether the store honours preconditions, decided once per job.
    #[serde(default)]
    pub preconditions: Preconditions,
}

impl Rows {
    /// Updates the counts from a sink.
    pub(crate) fn count(&mut self, counts: &Counts) {
        self.committed = counts.committed;
        self.failed = counts.failed();
        self.ok = self.committed.saturating_sub(self.failed);
        self.failures.clone_from(&counts.failures);
    }

    /// Includes the results of a retry in the counts; `false` if they are already included.
    pub(crate) fn count_replaced(&mut self, retry: &RetryOf, replaced: &Summary) -> bool {
        if self.retried >= retry.number {
            return false;
        }
        self.retried = retry.number;
        let is_replaced = |name: &str| {
            retry.kinds.is_empty() || retry.kinds.iter().any(|kind| kind.as_str() == name)
        };
        self.failures.retain(|kind, _| !is_replaced(kind));
        for (kind, failure) in &replaced.failures {
            let known = self.failures.entry(kind.clone());
            let known = known.or_insert_with(|| FailureSummary {
                count: 0,
                ..failure.clone()
            });
            known.count += failure.count;
        }
        self.failed = self.failures.values().map(|failure| failure.count).sum();
        self.ok = self.committed.saturating_sub(self.failed);
        true
    }

    /// Sets the job's totals with the rows of a retry; `false` if those of a later one are already
    /// included.
    pub(crate) fn count_retried(&mut self, number: u32, whole: &Summary) -> bool {
        if self.retried > number {
            return false;
        }
        self.retried = number;
        self.committed = whole.images;
        self.ok = whole.ok;
        self.failed = whole.failed;
        self.failures.clone_from(&whole.failures);
        true
    }
}
