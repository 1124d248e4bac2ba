//! The status of a job, on request.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trommel_infer::Decided;
use trommel_queue::Broker;
use trommel_sink::FailureSummary;
use trommel_types::{Forecast, Lane, RetryOf, Role, Stream};

use crate::distributed::cascade_jobs::{self, Learned};
use crate::distributed::job_store::JobStore;
use crate::distributed::names::Subjects;
use crate::distributed::presence::{self, Presence};
use crate::distributed::record::{Counted, Job, JobProgress, JobState, Reason, is_zero};
use crate::{Percentiles, TimeCounts, Trial, WorkerError};

/// The status of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The job.
    pub id: String,
    /// Its state.
    pub state: JobState,
    /// Why it ended early, or what it waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// What is classified.
    pub source: String,
    /// Where rows go.
    pub output: String,
    /// How urgent it is.
    pub lane: Lane,
    /// When it was submitted, in microseconds since the Unix epoch, UTC.
    pub submitted_at: i64,
    /// When its listing began, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<i64>,
    /// When it ended, likewise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<i64>,
    /// Images listed so far.
    pub listed: u64,
    /// For a dry run: all images of the source, as far as counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted: Option<Counted>,
    /// All images, once they are listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// Whether it is a dry run, which classifies a sample and stores no rows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// For a retry: which rows of which job it retries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<RetryOf>,
    /// Number of retries requested.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retries: u32,
    /// The last of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retried_by: Option<String>,
    /// For a cascade: what is known of it; absent in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cascade: Option<CascadeStatus>,
    /// Each model's rows.
    pub models: Vec<ModelStatus>,
    /// Queue lengths of a running job; absent in lists.
    pub stages: Vec<StageStatus>,
    /// Times of all live workers by kind of work, for all jobs since they started; absent in lists.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub times: BTreeMap<String, Percentiles>,
    /// Its cost at the user's prices, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// The estimate of a dry run, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// Seconds until all rows are committed, at the rate of the last seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<f64>,
}

/// The rule and the savings of a cascade.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CascadeStatus {
    /// The required share of labels equal to the large model's.
    pub agree: f64,
    /// The rule, once it is learned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned: Option<Learned>,
    /// Which model has decided how many images, once all rows are committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided: Option<Decided>,
}

/// The progress of one model's rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelStatus {
    /// The model.
    pub name: String,
    /// Its version when the job began.
    pub version: String,
    /// Rows that are durable.
    pub committed: u64,
    /// Images labelled.
    pub ok: u64,
    /// Images without a label.
    pub failed: u64,
    /// Failures by kind.
    pub failures: BTreeMap<String, FailureSummary>,
    /// Rows held by a sink that are not durable yet.
    pub pending: u64,
    /// Rows per second.
    pub rate: f64,
    /// For a dry run: the result of its sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trial: Option<Trial>,
    /// What its sink waits for, if the output does not accept rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

/// Messages that wait for a stage or are processed by it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStatus {
    /// The stage.
    pub stage: Role,
    /// Messages of this job.
    pub waiting: u64,
}

/// Longest predicted time, 30 days in seconds.
const LONGEST_ETA: f64 = 30.0 * 86_400.0;

/// The status of a job; `None` if it is unknown.
pub(crate) async fn of(
    broker: &Broker,
    subjects: &Subjects,
    store: &JobStore,
    id: &str,
) -> Result<Option<JobStatus>, WorkerError> {
    let Some(job) = store.job(id).await? else {
        return Ok(None);
    };
    let progress = store.progress(id).await?;
    let decided = progress.rows.values().find_map(|rows| rows.decided);
    let mut status = brief(job.clone(), progress);
    if let Some(cascade) = job.spec.request.cascade {
        status.cascade = Some(CascadeStatus {
            agree: cascade.agree,
            learned: cascade_jobs::learned(store, id).await?,
            decided,
        });
    }
    status.times = times(&presence::alive(store).await?);
    if status.state == JobState::Running {
        status.stages = stages(broker, subjects, &job).await?;
    }
    Ok(Some(status))
}

/// Times of all workers by kind of work.
fn times(workers: &[Presence]) -> BTreeMap<String, Percentiles> {
    let mut all: BTreeMap<&str, TimeCounts> = BTreeMap::new();
    for (stage, counts) in workers.iter().flat_map(|worker| &worker.times) {
        all.entry(stage).or_default().add(counts);
    }
    let percentiles =
        |(stage, counts): (&str, TimeCounts)| Some((stage.to_owned(), counts.percentiles()?));
    all.into_iter().filter_map(percentiles).collect()
}

/// The status of a job, without queue lengths.
pub(crate) fn brief(job: Job, progress: JobProgress) -> JobStatus {
    let JobProgress { listing, mut rows } = progress;
    let retried_by = job.last_retry();
    let wanted = rows.values().filter_map(|rows| rows.wanted).max();
    // The sink of each model has counted the same workers.
    let cost = rows.values().filter_map(|rows| rows.cost).reduce(f64::max);
    let models: Vec<_> = job
        .models()
        .iter()
        .map(|model| {
            let rows = rows.remove(&model.name).unwrap_or_default();
            ModelStatus {
                name: model.name.clone(),
                version: model.version.clone(),
                committed: rows.committed,
                ok: rows.ok,
                failed: rows.failed,
                failures: rows.failures,
                pending: rows.pending,
                rate: rows.rate,
                trial: rows.trial,
                waits_for: rows.waits_for,
            }
        })
        .collect();
    // For a retry it is known before the source is listed.
    let total = wanted.or(listing.ended.then_some(listing.listed));
    let eta = |model: &ModelStatus| {
        let left = total?.saturating_sub(model.committed);
        let seconds = left as f64 / model.rate;
        // The rate of a stalled job decays towards 0.
        (seconds < LONGEST_ETA).then_some(seconds)
    };
    let eta_seconds = match job.state {
        JobState::Running => models.iter().filter_map(eta).reduce(f64::max),
        _ => None,
    };
    let request = job.spec.request;
    JobStatus {
        id: request.id,
        state: job.state,
        reason: job.reason,
        // Unknown before the job has begun.
        source: match job.spec.source.is_empty() {
            true => request.sources.join(" "),
            false => job.spec.source,
        },
        output: request.output,
        lane: request.lane,
        submitted_at: job.submitted_at,
        started_at: job.started_at,
        finished_at: job.finished_at,
        listed: listing.listed,
        counted: listing.counted,
        total,
        dry_run: request.options.dry_run,
        retry: request.options.retry,
        retries: job.retries,
        retried_by,
        cascade: None,
        models,
        stages: Vec::new(),
        times: BTreeMap::new(),
        cost,
        forecast: request.options.forecast,
        eta_seconds,
    }
}

/// The stages of a job's messages, with the subjects under which they wait.
pub(crate) fn waiting_rooms(subjects: &Subjects, job: &Job) -> [(Role, Stream, String); 3] {
    let (id, lane) = (job.id(), job.lane());
    [
        (Role::Preprocess, Stream::Tasks, subjects.tasks(lane, id)),
        (
            Role::Infer,
            Stream::Tensors,
            subjects.tensors_of_job(lane, id),
        ),
        (Role::Sink, Stream::Results, subjects.results(id, "*")),
    ]
}

async fn stages(
    broker: &Broker,
    subjects: &Subjects,
    job: &Job,
) -> Result<Vec<StageStatus>, WorkerError> {
    let mut stages = Vec::new();
    for (stage, stream, subject) in waiting_rooms(subjects, job) {
        let waiting = broker.subject_count(stream, &subject).await?;
        stages.push(StageStatus { stage, waiting });
    }
    Ok(stages)
}
