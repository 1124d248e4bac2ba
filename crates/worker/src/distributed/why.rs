//! Why a job does not move: where its images are, since when, and what was last said of them.

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use trommel_queue::{Broker, ConsumerStats, StreamName};
use trommel_types::{Classification, ImageRef, Message, PreparedImage};

use crate::WorkerError;
use crate::distributed::names::{
    Subjects, key, results_consumer, tasks_consumer, tensors_consumer,
};
use crate::distributed::presence::Presence;
use crate::distributed::record::{Job, JobState};
use crate::distributed::registry::Registry;
use crate::distributed::worker::Role;
use crate::settle::now;

/// Images that are named of each stage.
const NAMED: usize = 3;
/// Messages looked at for them; messages with tensors are large.
const LOOKED_AT: usize = 300;
const TENSORS_LOOKED_AT: usize = 30;
/// Longest time a moving job's rows may keep still.
const STILL: i64 = 60_000_000;
/// Rows a second below which a job stands still.
const MOVING: f64 = 0.01;

/// What is known of a job that may not move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobReasons {
    /// The job.
    pub id: String,
    /// How far it is.
    pub state: JobState,
    /// What it comes down to, a sentence each, the most likely first.
    pub findings: Vec<String>,
    /// Where its images are.
    pub stages: Vec<StageReasons>,
    /// What workers last said of its images, a stage each.
    pub said: Vec<Said>,
}

/// What waits for a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageReasons {
    /// `preprocess`, `infer` or `sink`.
    pub stage: String,
    /// Workers with this role that are alive.
    pub workers: usize,
    /// Messages that nobody works on; of all jobs of the lane, but for `sink`.
    pub waiting: u64,
    /// Messages that somebody works on, likewise.
    pub in_flight: u64,
    /// Of the latter, those that came to a worker before.
    pub redelivered: u64,
    /// The job's images that have been here longest.
    pub oldest: Vec<OldImage>,
}

/// An image in a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OldImage {
    /// Its place in the listing.
    pub index: u64,
    /// Where it is stored.
    pub uri: String,
    /// Seconds since it came to the stage.
    pub seconds: f64,
}

/// What a worker said of an image that it put off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Said {
    /// `preprocess` or `infer`.
    pub stage: String,
    /// The job.
    pub job: String,
    /// The image.
    pub uri: String,
    /// How often it had come.
    pub attempt: u32,
    /// What was wrong.
    pub error: String,
    /// When, in microseconds since the Unix epoch, UTC.
    pub at: i64,
}

/// Explains a job; `None` if there is none.
pub(crate) async fn explain(
    broker: &Broker,
    subjects: &Subjects,
    registry: &Registry,
    id: &str,
) -> Result<Option<JobReasons>, WorkerError> {
    let Some(job) = registry.job(id).await? else {
        return Ok(None);
    };
    let workers = Presence::alive(registry).await?;
    let with = |role| workers.iter().filter(|worker| worker.has(role)).count();
    let mut said: Vec<Said> = Vec::new();
    for key in registry.kv().keys(&key::said(id)).await? {
        said.extend(registry.read::<Said>(&key).await?.map(|(said, _)| said));
    }
    let mut reasons = JobReasons {
        id: id.to_owned(),
        state: job.state,
        findings: Vec::new(),
        stages: Vec::new(),
        said,
    };
    let ended = |words: &str| match &job.reason {
        Some(reason) => format!("the job {words}: {reason}"),
        None => format!("the job {words}"),
    };
    match job.state {
        JobState::Complete => reasons.findings.push(ended("is complete")),
        JobState::Failed => reasons.findings.push(ended("has failed")),
        JobState::Cancelled => reasons.findings.push(ended("was cancelled")),
        JobState::Queued if with(Role::Ingest) == 0 => reasons.findings.push(
            "no ingest worker is alive to list it; start one with trommel worker --role ingest"
                .to_owned(),
        ),
        JobState::Queued => reasons
            .findings
            .push(ended("waits for its listing to begin")),
        JobState::Running => {
            reasons.stages = stages(broker, subjects, &job, &with).await?;
            reasons.findings = findings(registry, &job, &reasons, with(Role::Ingest)).await?;
        }
    }
    Ok(Some(reasons))
}

async fn findings(
    registry: &Registry,
    job: &Job,
    reasons: &JobReasons,
    listers: usize,
) -> Result<Vec<String>, WorkerError> {
    let id = job.request.id.as_str();
    let listing = registry.listing(id).await?;
    let mut findings = Vec::new();
    if let Some(reason) = &job.reason {
        findings.push(format!("ingest: {reason}"));
    }
    if !listing.ended && listers == 0 {
        findings.push(format!(
            "{} images are listed, and no ingest worker is alive to list the rest; start one with trommel worker --role ingest",
            listing.listed
        ));
    }
    for stage in &reasons.stages {
        let (name, waiting) = (&stage.stage, stage.waiting);
        if waiting + stage.in_flight > 0 && stage.workers == 0 {
            findings.push(format!(
                "{waiting} images wait for {name} and no worker of that role is alive; start one with trommel worker --role {name}"
            ));
        }
        if stage.redelivered > 0 {
            findings.push(format!(
                "{} images in {name} came to a worker before and were not finished; see what was last said",
                stage.redelivered
            ));
        }
    }
    let mut committed = u64::MAX;
    let mut is_moving = false;
    for model in &job.models {
        let rows = registry.rows(id, &model.name).await?;
        committed = committed.min(rows.committed);
        is_moving |= rows.rate > MOVING;
    }
    let nowhere = reasons
        .stages
        .iter()
        .all(|stage| stage.waiting + stage.in_flight == 0);
    let is_old = job
        .started_at
        .is_some_and(|started| now() - started > STILL);
    if listing.ended && nowhere && is_old && committed < listing.listed && !is_moving {
        findings.push(format!(
            "{} images have no row and are in no queue: the broker has lost them; cancel the job and submit it again to another output",
            listing.listed - committed
        ));
    }
    if findings.is_empty() {
        let busiest = reasons.stages.iter().max_by_key(|stage| stage.waiting);
        let pace = match is_moving || !is_old {
            true => "it moves",
            false => "nothing has been committed for a while",
        };
        findings.push(match busiest {
            Some(stage) if stage.waiting > 0 => format!(
                "{pace}; most images wait for {}, which has {} workers",
                stage.stage, stage.workers
            ),
            _ => format!("{pace}; nothing waits"),
        });
    }
    Ok(findings)
}

async fn stages(
    broker: &Broker,
    subjects: &Subjects,
    job: &Job,
    with: &impl Fn(Role) -> usize,
) -> Result<Vec<StageReasons>, WorkerError> {
    let (id, lane) = (job.request.id.as_str(), job.request.lane);
    let look = Look { broker, job: id };
    let tasks = look
        .stage::<ImageRef>(
            StreamName::Tasks,
            vec![(tasks_consumer(lane), subjects.tasks(lane))],
            LOOKED_AT,
            |task| task,
        )
        .await?;
    let of_models = |each: &dyn Fn(&str) -> (String, String)| -> Vec<_> {
        job.models.iter().map(|model| each(&model.name)).collect()
    };
    let tensors = of_models(&|model| {
        let consumer = tensors_consumer(model, lane);
        (consumer, subjects.tensors(model, lane))
    });
    let tensors = look
        .stage::<PreparedImage>(StreamName::Tensors, tensors, TENSORS_LOOKED_AT, |tensor| {
            tensor.image
        })
        .await?;
    let results = of_models(&|model| (results_consumer(id, model), subjects.results(id, model)));
    let results = look
        .stage::<Classification>(StreamName::Results, results, LOOKED_AT, |row| row.image)
        .await?;
    let stages = [
        (Role::Preprocess, tasks),
        (Role::Infer, tensors),
        (Role::Sink, results),
    ];
    Ok(stages
        .into_iter()
        .map(|(role, stage)| StageReasons {
            stage: role.as_str().to_owned(),
            workers: with(role),
            ..stage
        })
        .collect())
}

struct Look<'a> {
    broker: &'a Broker,
    job: &'a str,
}

impl Look<'_> {
    /// Adds up consumers with their subjects, and looks for the job's oldest images before them.
    async fn stage<T: Message>(
        &self,
        stream: StreamName,
        consumers: Vec<(String, String)>,
        looked_at: usize,
        image_of: fn(T) -> ImageRef,
    ) -> Result<StageReasons, WorkerError> {
        let mut stage = StageReasons {
            stage: String::new(),
            workers: 0,
            waiting: 0,
            in_flight: 0,
            redelivered: 0,
            oldest: Vec::new(),
        };
        for (consumer, subject) in consumers {
            let ConsumerStats {
                waiting,
                in_flight,
                redelivered,
                settled_up_to,
            } = match self.broker.consumer_stats(stream, &consumer).await? {
                Some(stats) => stats,
                // Nobody has taken anything from there yet.
                None => ConsumerStats {
                    waiting: self.broker.subject_count(stream, &subject).await?,
                    in_flight: 0,
                    redelivered: 0,
                    settled_up_to: 0,
                },
            };
            stage.waiting += waiting;
            stage.in_flight += in_flight;
            stage.redelivered += redelivered;
            let mut from = settled_up_to + 1;
            for _ in 0..looked_at {
                if stage.oldest.len() >= NAMED {
                    break;
                }
                let Some(held) = self.broker.peek(stream, &subject, from).await? else {
                    break;
                };
                from = held.sequence + 1;
                let Ok(image) = T::decode(&held.payload).map(image_of) else {
                    continue;
                };
                if *image.job == *self.job {
                    stage.oldest.push(OldImage {
                        index: image.index,
                        uri: image.uri,
                        seconds: (now() - held.stored_at).max(0) as f64 / 1e6,
                    });
                }
            }
        }
        Ok(stage)
    }
}

/// Notes what is said of images, a note for each job and stage every so often.
pub(crate) async fn note(
    registry: Registry,
    mut said: mpsc::Receiver<Said>,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    while let Some(Some(first)) = shutdown.run_until_cancelled(said.recv()).await {
        // Of what came meanwhile the last word of each job counts.
        let mut latest = vec![first];
        while let Ok(next) = said.try_recv() {
            latest.retain(|said| (&said.job, &said.stage) != (&next.job, &next.stage));
            latest.push(next);
        }
        for said in latest {
            let key = format!("{}{}", key::said(&said.job), said.stage);
            if let Err(error) = registry.put(&key, &said).await {
                tracing::debug!(%error, "what was said is not noted");
            }
        }
        shutdown
            .run_until_cancelled(tokio::time::sleep(std::time::Duration::from_secs(1)))
            .await;
    }
    // Roles without images have nothing to say; the process goes on all the same.
    shutdown.cancelled().await;
    Ok(())
}
