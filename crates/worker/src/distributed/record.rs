//! What the broker's key-value store holds of a job: one record, and one checkpoint.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trommel_sink::{FailureSummary, Preconditions, Summary};
use trommel_types::{JobModel, JobSpec, Lane, RetryOf};

use crate::Trial;
use crate::ingest::Announced;
use crate::sink::Counts;

/// A job, as all roles see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// What shapes its rows. Complete once the job has begun, and the same from then on.
    pub spec: JobSpec,
    /// How far it is.
    pub state: JobState,
    /// Why it ended early; or what it waits for.
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
    /// How many retries of its failed rows were asked for.
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

    /// The id and the run of the job whose rows its own are among: of most its own.
    pub(crate) fn root(&self) -> (&str, &str) {
        match &self.spec.base {
            None => (self.id(), &self.spec.run),
            Some(base) => (&base.job, &base.run),
        }
    }

    /// Whether it adds rows to others, for images that have none.
    pub(crate) fn adds(&self) -> bool {
        self.spec.base.is_some() && self.spec.request.options.retry.is_none()
    }

    /// Its models with the versions that they had when it began; none before.
    pub fn models(&self) -> &[JobModel] {
        &self.spec.models
    }
}

pub(crate) fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Why a job ended early, or does not move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// For programs.
    pub kind: ReasonKind,
    /// For people: what, of which object, and what to do.
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

/// What a [`Reason`] comes down to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasonKind {
    /// The request cannot be carried out.
    Request,
    /// The source cannot be listed, or lists other images than before.
    Source,
    /// A model is not there, or cannot be run.
    Model,
    /// The output cannot be written.
    Output,
    /// More images failed than the job allows.
    TooManyFailures,
    /// It ran longer than it may.
    MaxRuntime,
    /// It cost as much as it may.
    MaxCost,
    /// Its listing was begun again and again without getting further.
    Attempts,
    /// It waits for something that may yet come.
    Waiting,
}

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// It has not begun.
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

/// Who holds a part of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The worker; empty when the lease was given back.
    pub owner: String,
    /// Grows by one with each change of hands: a worker whose number has passed may change nothing.
    pub fence: u64,
    /// Grows with each sign of life.
    pub beat: u64,
}

/// How far a job's source is listed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// Who lists.
    #[serde(default)]
    pub held: Holder,
    /// Images whose tasks are stored: all before this index.
    pub listed: u64,
    /// Of a job that passes over images which have rows: how many of the listing were looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed: Option<u64>,
    /// Of a feed: the event of the last of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<String>,
    /// How far tasks may be stored already, and the hash of the uris up to there, noted before the
    /// first of them is published: a restarted listing has to list the same.
    #[serde(default)]
    pub announced: Announced,
    /// Whether that is all of them.
    pub ended: bool,
    /// How often the source was listed all over, because the broker had lost what was on its way.
    #[serde(default)]
    pub generation: u32,
    /// How often the listing was begun since it last got further.
    #[serde(default)]
    pub starts: u32,
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

/// How many rows of a job and model are committed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rows {
    /// Which sink commits.
    #[serde(default)]
    pub held: Holder,
    /// Rows that are durable.
    pub committed: u64,
    /// Of them, with a label.
    pub ok: u64,
    /// Of them, without.
    pub failed: u64,
    /// The latter by kind.
    pub failures: BTreeMap<String, FailureSummary>,
    /// Rows that a sink holds and that are not durable yet.
    pub pending: u64,
    /// Rows a second, over the last seconds.
    pub rate: f64,
    /// What the job has cost at its user's prices, as far as this sink has seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// Of a dry run: what its sample has shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<Trial>,
    /// Whether that is all, and the output finished.
    pub finished: bool,
    /// What the sink waits for, when its output does not take rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Since when it does, in microseconds since the Unix epoch, UTC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_since: Option<i64>,
    /// Of a retry: how many rows it replaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<u64>,
    /// The retry whose rows are counted in, if one has replaced failed rows.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retried: u32,
    /// Whether the store honours preconditions, decided once for the job.
    #[serde(default)]
    pub preconditions: Preconditions,
}

impl Rows {
    /// Takes over what a sink has committed.
    pub(crate) fn count(&mut self, counts: &Counts) {
        self.committed = counts.committed;
        self.failed = counts.failed();
        self.ok = self.committed.saturating_sub(self.failed);
        self.failures.clone_from(&counts.failures);
    }

    /// Counts what became of the failed rows that a retry has replaced; `false` if that is counted already.
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

    /// Takes over what the job comes to with the rows of a retry; `false` if those of a later one are
    /// counted already.
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
