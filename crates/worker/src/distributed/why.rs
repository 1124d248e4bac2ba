//! Why a job makes no progress: where its images are, since when, and the last reports about them.

use serde::{Deserialize, Serialize};
use trommel_queue::{Broker, Stream};
use trommel_types::{Classification, ImageRef, Message, PreparedImage, Role};

use crate::WorkerError;
use crate::clock::now;
use crate::distributed::job_store::JobStore;
use crate::distributed::names::Subjects;
use crate::distributed::presence;
use crate::distributed::record::{Job, JobState};
use crate::distributed::status::waiting_rooms;
use crate::reports::PutOff;

/// Images listed per stage.
const NAMED: usize = 3;
/// Longest time without new rows in a job that makes progress.
const STILL: i64 = 60_000_000;
/// Rows per second below which a job counts as stalled.
const MOVING: f64 = 0.01;

/// What is known about a job that may be stalled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobReasons {
    /// The job.
    pub id: String,
    /// Its state.
    pub state: JobState,
    /// The findings, one sentence each, most likely first.
    pub findings: Vec<String>,
    /// Where its images are.
    pub stages: Vec<StageReasons>,
    /// The workers' last reports about postponed images.
    pub put_off: Vec<PutOff>,
}

/// The messages that wait for a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageReasons {
    /// The stage.
    pub stage: Role,
    /// Live workers with this role.
    pub workers: usize,
    /// The job's messages that wait for it or are processed.
    pub waiting: u64,
    /// The job's images that have been here longest.
    pub oldest: Vec<OldImage>,
}

/// An image in a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OldImage {
    /// Its position in the listing.
    pub index: u64,
    /// Where it is stored.
    pub uri: String,
    /// Seconds since it reached the stage.
    pub seconds: f64,
}

/// Explains a job; `None` if it is unknown.
pub(crate) async fn explain(
    broker: &Broker,
    subjects: &Subjects,
    store: &JobStore,
    id: &str,
) -> Result<Option<JobReasons>, WorkerError> {
    let Some(job) = store.job(id).await? else {
        return Ok(None);
    };
    let workers = presence::alive(store).await?;
    let with = |role| workers.iter().filter(|worker| worker.has(role)).count();
    let reports = workers.iter().flat_map(|worker| worker.put_off.iter());
    let mut put_off: Vec<_> = reports.filter(|report| report.job == id).cloned().collect();
    put_off.sort_by_key(|report| std::cmp::Reverse(report.at));
    let mut reasons = JobReasons {
        id: id.to_owned(),
        state: job.state,
        findings: Vec::new(),
        stages: Vec::new(),
        put_off,
    };
    let ended = |words: &str| match &job.reason {
        Some(reason) => format!("the job {words}: {}", reason.text),
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
            for (stage, stream, subject) in waiting_rooms(subjects, &job) {
                let look = Look { broker, stream };
                reasons.stages.push(StageReasons {
                    stage,
                    workers: with(stage),
                    waiting: broker.subject_count(stream, &subject).await?,
                    oldest: match stage {
                        Role::Preprocess => look.oldest(&subject, |task: ImageRef| task).await?,
                        Role::Infer => {
                            let image = |tensor: PreparedImage| tensor.image;
                            look.oldest(&subject, image).await?
                        }
                        _ => {
                            look.oldest(&subject, |row: Classification| row.image)
                                .await?
                        }
                    },
                });
            }
            reasons.findings = findings(store, &job, &reasons, with(Role::Ingest)).await?;
        }
    }
    Ok(Some(reasons))
}

async fn findings(
    store: &JobStore,
    job: &Job,
    reasons: &JobReasons,
    listers: usize,
) -> Result<Vec<String>, WorkerError> {
    let progress = store.progress(job.id()).await?;
    let listing = progress.listing;
    let mut findings = Vec::new();
    if let Some(reason) = &job.reason {
        findings.push(format!("ingest: {}", reason.text));
    }
    for (model, rows) in &progress.rows {
        if let Some(waits_for) = &rows.waits_for {
            findings.push(format!("the sink of model {model} waits: {waits_for}"));
        }
    }
    if listing.waits {
        findings.push(format!(
            "the {} images of the cascade's sample are listed; the rest is listed when all of them have rows",
            listing.listed
        ));
    }
    if !listing.ended && listers == 0 {
        findings.push(format!(
            "{} images are listed, and no ingest worker is alive to list the rest; start one with trommel worker --role ingest",
            listing.listed
        ));
    }
    for stage in &reasons.stages {
        let (name, waiting) = (stage.stage, stage.waiting);
        if waiting > 0 && stage.workers == 0 {
            findings.push(format!(
                "{waiting} images wait for {name} and no worker of that role is alive; start one with trommel worker --role {name}"
            ));
        }
    }
    let of = |model: &trommel_types::JobModel| progress.rows.get(&model.name);
    let models = job.models().iter();
    let committed = models
        .clone()
        .map(|model| of(model).map_or(0, |rows| rows.committed));
    let committed = committed.min().unwrap_or_default();
    let is_moving = models.filter_map(of).any(|rows| rows.rate > MOVING);
    let nowhere = reasons.stages.iter().all(|stage| stage.waiting == 0);
    let is_old = job
        .started_at
        .is_some_and(|started| now() - started > STILL);
    if listing.ended && nowhere && is_old && committed < listing.listed && !is_moving {
        findings.push(format!(
            "{} images have no row and are in no queue: the broker has lost them; an ingest worker queues them again by itself",
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

struct Look<'a> {
    broker: &'a Broker,
    stream: Stream,
}

impl Look<'_> {
    /// The oldest images under a subject.
    async fn oldest<T: Message>(
        &self,
        subject: &str,
        image_of: fn(T) -> ImageRef,
    ) -> Result<Vec<OldImage>, WorkerError> {
        let (mut oldest, mut from) = (Vec::new(), 1);
        for _ in 0..NAMED {
            let Some(held) = self.broker.peek(self.stream, subject, from).await? else {
                break;
            };
            from = held.sequence + 1;
            if let Ok(image) = T::decode(&held.payload).map(image_of) {
                oldest.push(OldImage {
                    index: image.index,
                    uri: image.uri,
                    seconds: (now() - held.stored_at).max(0) as f64 / 1e6,
                });
            }
        }
        Ok(oldest)
    }
}
