//! What is told of a job when somebody asks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trommel_queue::{Broker, StreamName};
use trommel_storage::FailureSummary;
use trommel_types::Lane;

use crate::WorkerError;
use crate::distributed::names::{results_consumer, tasks_consumer, tensors_consumer};
use crate::distributed::record::{Counted, Job, JobState};
use crate::distributed::registry::Registry;

/// How a job stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobStatus {
    /// The job.
    pub id: String,
    /// How far it is.
    pub state: JobState,
    /// Why it ended early.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
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
    /// Of a dry run: all images of the source, as far as they were counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted: Option<Counted>,
    /// All images, once they are listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// Each model's rows.
    pub models: Vec<ModelStatus>,
    /// What waits between the stages.
    pub stages: Vec<StageStatus>,
    /// Seconds until all rows are committed, at the rate of the last seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<f64>,
}

/// How the rows of one model stand.
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
    /// The latter by kind.
    pub failures: BTreeMap<String, FailureSummary>,
    /// Rows a second.
    pub rate: f64,
}

/// What waits for a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStatus {
    /// `preprocess`, `infer` or `sink`.
    pub stage: String,
    /// Messages that nobody works on.
    pub waiting: u64,
    /// Messages that somebody works on.
    pub in_flight: u64,
    /// Whether the figures are of this job alone, or of all jobs in its lane.
    pub of_all_jobs: bool,
}

/// Beyond this many seconds, 30 days, an end is not foretold.
const LONGEST_ETA: f64 = 30.0 * 86_400.0;

/// Tells how a job stands; `None` if there is none.
pub(crate) async fn of(
    broker: &Broker,
    registry: &Registry,
    id: &str,
) -> Result<Option<JobStatus>, WorkerError> {
    let Some(job) = registry.job(id).await? else {
        return Ok(None);
    };
    let listing = registry.listing(id).await?;
    let mut models = Vec::new();
    for model in &job.models {
        let rows = registry.rows(id, &model.name).await?;
        models.push(ModelStatus {
            name: model.name.clone(),
            version: model.version.clone(),
            committed: rows.committed,
            ok: rows.ok,
            failed: rows.failed,
            failures: rows.failures,
            rate: rows.rate,
        });
    }
    let total = listing.ended.then_some(listing.listed);
    let stages = if job.state == JobState::Running {
        stages(broker, &job).await?
    } else {
        Vec::new()
    };
    let eta = |model: &ModelStatus| {
        let left = total?.saturating_sub(model.committed);
        let seconds = left as f64 / model.rate;
        // The rate of a job that stands still falls towards 0.
        (seconds < LONGEST_ETA).then_some(seconds)
    };
    let eta_seconds = if job.state == JobState::Running {
        models.iter().filter_map(eta).reduce(f64::max)
    } else {
        None
    };
    Ok(Some(JobStatus {
        id: id.to_owned(),
        state: job.state,
        reason: job.reason,
        source: job.source,
        output: job.request.output,
        lane: job.request.lane,
        submitted_at: job.submitted_at,
        started_at: job.started_at,
        finished_at: job.finished_at,
        listed: listing.listed,
        counted: listing.counted,
        total,
        models,
        stages,
        eta_seconds,
    }))
}

async fn stages(broker: &Broker, job: &Job) -> Result<Vec<StageStatus>, WorkerError> {
    let lane = job.request.lane;
    let mut stages = vec![
        stage(
            broker,
            "preprocess",
            StreamName::Tasks,
            &[tasks_consumer(lane)],
            true,
        )
        .await?,
    ];
    let consumers = |name: &dyn Fn(&str) -> String| -> Vec<String> {
        job.models.iter().map(|model| name(&model.name)).collect()
    };
    let tensors = consumers(&|model| tensors_consumer(model, lane));
    stages.push(stage(broker, "infer", StreamName::Tensors, &tensors, true).await?);
    let results = consumers(&|model| results_consumer(&job.request.id, model));
    stages.push(stage(broker, "sink", StreamName::Results, &results, false).await?);
    Ok(stages)
}

async fn stage(
    broker: &Broker,
    name: &str,
    stream: StreamName,
    consumers: &[String],
    of_all_jobs: bool,
) -> Result<StageStatus, WorkerError> {
    let mut status = StageStatus {
        stage: name.to_owned(),
        waiting: 0,
        in_flight: 0,
        of_all_jobs,
    };
    for consumer in consumers {
        // A consumer that nobody has made yet holds nothing.
        if let Some(stats) = broker.consumer_stats(stream, consumer).await? {
            status.waiting += stats.waiting;
            status.in_flight += stats.in_flight;
        }
    }
    Ok(status)
}
