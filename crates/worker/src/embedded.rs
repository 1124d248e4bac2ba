//! All four roles in one process, joined by in-process queues.

use std::future::Future;
use std::io::Write;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use roaring::RoaringTreemap;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use trommel_infer::{Engine, Rule, Wanted};
use trommel_preprocess::Plan;
use trommel_queue::{MemoryQueue, MemoryQueueConfig, Queue};
use trommel_sink::{Existing, FailedImage, JobRecord, ResultSink, StreamSink};
use trommel_source::Source;
use trommel_types::{
    Classification, ImageRef, JobModel, JobSpec, Lane, Message, PreparedImage, Role, RowOptions,
};

use crate::again::Again;
use crate::hop::QueueHop;
use crate::ingest::{Choice, Share};
use crate::intake::Intake;
use crate::job::{JobPlan, Jobs, ModelId, OneJob, PlannedModel};
use crate::reports::Reports;
use crate::settle::Settler;
use crate::tried::Tried;
use crate::{Progress, WorkerConfig, WorkerError, infer, ingest, metrics, preprocess, sink};

/// One job with everything that it needs, opened and checked.
#[derive(Clone)]
pub struct EmbeddedJob {
    /// The source of the images.
    pub source: Arc<dyn Source>,
    /// Preprocessing.
    pub plan: Arc<Plan>,
    /// For a cascade: the preprocessing of the large model.
    pub also: Option<Arc<Plan>>,
    /// The model, warmed up.
    pub engine: Arc<Engine>,
    /// The job as recorded in rows.
    pub record: JobRecord,
    /// Row options.
    pub rows: RowOptions,
    /// For a cascade: its rule, once the sample is classified.
    pub rule: Option<Arc<Rule>>,
    /// Settings of the roles.
    pub config: WorkerConfig,
    /// Share of failed images above which the job ends early.
    pub max_failure_rate: Option<f64>,
}

/// A job in this process, as recorded by its output.
pub fn job_record(spec: &JobSpec, model: &JobModel) -> JobRecord {
    crate::distributed::record_of_spec(spec, model, crate::clock::now())
}

/// Which images of the source a job classifies.
pub enum Images {
    /// Those without a row at their position in the listing.
    Missing,
    /// Those without a row, regardless of its index.
    New(Existing),
    /// Those with failed rows.
    Failed(Vec<FailedImage>),
    /// A random share of another choice, 0 to 1, by the index of the row.
    Sample(Box<Images>, f64),
}

impl Images {
    /// Whether images with a row are listed with the others.
    fn are_of_whole_listing(&self) -> bool {
        match self {
            Self::Missing => true,
            Self::Sample(images, _) => images.are_of_whole_listing(),
            Self::New(_) | Self::Failed(_) => false,
        }
    }

    fn choice(self, sink: &dyn ResultSink) -> Choice {
        match self {
            Self::Missing => Choice::Resume(Box::new(sink.source_check())),
            Self::New(existing) => Choice::Extend(existing),
            Self::Failed(images) => Choice::Retry(Box::new(Again::new(images))),
            Self::Sample(images, share) => {
                Choice::Sample(Box::new(images.choice(sink)), Share(share))
            }
        }
    }
}

/// Longest time a row waits before it goes to a stream.
const STREAM_INTERVAL: Duration = Duration::from_millis(50);

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Every image has its row.
    Complete,
    /// It was stopped; work in flight was finished and committed.
    Stopped,
}

impl EmbeddedJob {
    /// Classifies into an output. Returns the sink, so that the job can be finished.
    ///
    /// When `stop` fires, the roles are drained in order: images in flight are finished and
    /// committed, within `shutdown.drain-timeout`.
    ///
    /// # Errors
    /// Errors that stop the whole job. Images in flight are still committed if the sink works.
    pub async fn into_output(
        self,
        sink: Box<dyn ResultSink>,
        images: Images,
        progress: Arc<Progress>,
        stop: CancellationToken,
    ) -> Result<(Ended, Box<dyn ResultSink>), WorkerError> {
        progress.count_resumed(sink.committed().len());
        let tried = self.config.infer.cache.as_ref().map(|cache| {
            let path = cache.join("tried").join(&self.record.run);
            Arc::new(Tried::open(&path, sink.committed()))
        });
        if !images.are_of_whole_listing() {
            // Their rows stay, so they are part of the total.
            progress.count_listed_before(sink.committed().len());
        }
        let choice = images.choice(&*sink);
        let ended = self.run(sink, choice, tried.clone(), progress, stop).await;
        if let Some(tried) = tried {
            match &ended {
                Ok((_, sink)) => tried.close(sink.committed()),
                Err(_) => tried.close(&RoaringTreemap::new()),
            }
        }
        ended
    }

    /// Classifies to a stream: JSON Lines, in order of completion.
    ///
    /// # Errors
    /// As [`EmbeddedJob::into_output`]; a closed stream is one.
    pub async fn into_stream<W: Write + Send + 'static>(
        mut self,
        out: W,
        progress: Arc<Progress>,
        stop: CancellationToken,
    ) -> Result<Ended, WorkerError> {
        // Readers want rows immediately; there is no part to fill.
        self.config.sink.part_interval = STREAM_INTERVAL;
        let sink = Box::new(StreamSink::new(out, self.record.clone()));
        Ok(self
            .run(sink, Choice::Resume(Box::default()), None, progress, stop)
            .await?
            .0)
    }

    async fn run(
        self,
        sink: Box<dyn ResultSink>,
        choice: Choice,
        tried: Option<Arc<Tried>>,
        progress: Arc<Progress>,
        stop: CancellationToken,
    ) -> Result<(Ended, Box<dyn ResultSink>), WorkerError> {
        Role::ALL.into_iter().for_each(metrics::begin);
        let instances = self.engine.stats().instances;
        metrics::threads(Role::Infer.as_str(), instances);
        let queues = Queues::new(&self.config, self.tensors_in_flight());
        let tokens = Tokens::default();
        let roles = self.start((sink, choice, tried), &queues, &tokens, &progress)?;
        let drain_timeout = self.config.shutdown.drain_timeout;

        tokio::select! {
            () = tokens.halt.cancelled() => {}
            () = stop.cancelled() => {}
        }
        let drained = timeout(drain_timeout, drain(roles, &queues, &tokens)).await;
        // The first failure is the cause; a drain timeout only follows from it.
        if let Some(cause) = tokens.cause() {
            return Err(cause);
        }
        let Ok(drained) = drained else {
            return Err(WorkerError::DrainTimeout {
                after: drain_timeout,
            });
        };
        let Some(sink) = drained else {
            return Err(WorkerError::Panicked { what: "the sink" });
        };
        let complete = progress.total() == Some(sink.committed().len());
        Ok((
            if complete {
                Ended::Complete
            } else {
                Ended::Stopped
            },
            sink,
        ))
    }

    fn start(
        &self,
        (rows, choice, tried): (Box<dyn ResultSink>, Choice, Option<Arc<Tried>>),
        queues: &Queues,
        tokens: &Tokens,
        progress: &Arc<Progress>,
    ) -> Result<Roles, WorkerError> {
        let config = &self.config;
        let model = ModelId {
            name: self.record.model.as_str().into(),
            version: self.record.model_version.as_str().into(),
        };
        let planned = PlannedModel {
            id: model.clone(),
            plan: Arc::clone(&self.plan),
            also: self.also.clone(),
        };
        let plan = JobPlan {
            models: [planned].into(),
            mode: self.rows.mode,
            phash: self.rows.phash,
            rows: Arc::new(Wanted {
                rule: self.rule.clone(),
                ..Wanted::from(&self.rows)
            }),
            columns: self.record.columns.len() - self.engine.columns().len(),
            image_deadline: None,
        };
        let jobs: Arc<dyn Jobs> = Arc::new(OneJob {
            plan,
            tried: tried.clone(),
        });
        let checkpoint: Arc<dyn ingest::Checkpoint> = match tried {
            Some(tried) => tried,
            None => Arc::new(ingest::NoCheckpoint),
        };
        let settler = Settler {
            results: Arc::clone(&queues.results),
            retry: config.retry.clone(),
            progress: Arc::clone(progress),
            jobs,
            reports: Reports::default(),
        };

        let ingest = Arc::new(ingest::Context {
            job: self.record.job_id.as_str().into(),
            lane: Lane::default(),
            output: Arc::clone(&queues.tasks),
            window: 1,
            start: ingest::Start::default(),
            place: ingest::Place::default(),
            checkpoint,
            mark: ingest::no_mark,
            fails: Some((settler.clone(), vec![model])),
            progress: Arc::clone(progress),
        });
        let preprocess = Arc::new(preprocess::Context {
            intake: Intake::new(
                Role::Preprocess,
                Arc::clone(&queues.tasks),
                config.preprocess.in_flight(),
            ),
            source: Arc::clone(&self.source),
            allowed: None,
            pool: Arc::new(preprocess::PreparePool::start(&config.preprocess)?),
            output: Arc::new(QueueHop(Arc::clone(&queues.tensors))),
            settler: settler.clone(),
            progress: Arc::clone(progress),
        });
        let infer = Arc::new(infer::Context {
            intake: Intake::new(
                Role::Infer,
                Arc::clone(&queues.tensors),
                self.tensors_in_flight(),
            ),
            engines: Arc::new(infer::OneEngine(Arc::clone(&self.engine))),
            settler,
        });
        let sink = Arc::new(sink::Context {
            intake: Arc::clone(&queues.results),
            config: config.sink.clone(),
            held: sink::HeldRows::new(config.share_of_budget()),
            max_failure_rate: self.max_failure_rate,
            progress: Arc::clone(progress),
            shared: None,
            committed: watch::Sender::new(sink::Counts::default()),
        });

        Ok(Roles {
            ingest: tokens.spawn(ingest::run(
                ingest,
                self.source.list(),
                choice,
                tokens.ingest.clone(),
            )),
            preprocess: tokens.spawn(preprocess::run(preprocess, tokens.preprocess.clone())),
            infer: tokens.spawn(infer::run(infer, tokens.infer.clone())),
            sink: tokens.spawn_last(sink::run(sink, rows, tokens.sink.clone())),
        })
    }
}

/// Stops the roles in pipeline order, each after its input has drained. Returns the sink, unless it
/// has failed. A role that has ended does not delay the others.
async fn drain(roles: Roles, queues: &Queues, tokens: &Tokens) -> Option<Box<dyn ResultSink>> {
    let Roles {
        ingest,
        preprocess,
        infer,
        sink,
    } = roles;
    tokens.ingest.cancel();
    drop(ingest.await);
    tokens.preprocess.cancel();
    drop(preprocess.await);
    run_dry(&queues.tensors, &infer).await;
    tokens.infer.cancel();
    drop(infer.await);
    run_dry(&queues.results, &sink).await;
    tokens.sink.cancel();
    sink.await.ok().flatten()
}

/// Waits until `consumer` has drained `queue`, or has ended.
async fn run_dry<T: Message, E>(queue: &Arc<dyn Queue<T>>, consumer: &JoinHandle<E>) {
    while !consumer.is_finished() {
        match queue.stats().await {
            Ok(stats) if stats.waiting > 0 => tokio::time::sleep(Duration::from_millis(5)).await,
            _ => return,
        }
    }
}

/// Running roles; failed ones leave their error in [`Tokens`].
struct Roles {
    ingest: JoinHandle<Option<()>>,
    preprocess: JoinHandle<Option<()>>,
    infer: JoinHandle<Option<()>>,
    sink: JoinHandle<Option<Box<dyn ResultSink>>>,
}

/// One token per role, and one that fires when a role fails or the sink has all rows.
#[derive(Default)]
struct Tokens {
    ingest: CancellationToken,
    preprocess: CancellationToken,
    infer: CancellationToken,
    sink: CancellationToken,
    halt: CancellationToken,
    /// The first error of a role.
    cause: Arc<Mutex<Option<WorkerError>>>,
}

impl Tokens {
    /// Runs a role whose failure stops the others.
    fn spawn<T, F>(&self, role: F) -> JoinHandle<Option<T>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, WorkerError>> + Send + 'static,
    {
        let (halt, cause) = (self.halt.clone(), Arc::clone(&self.cause));
        tokio::spawn(async move {
            let panicked = |_| Err(WorkerError::Panicked { what: "a role" });
            match AssertUnwindSafe(role)
                .catch_unwind()
                .await
                .unwrap_or_else(panicked)
            {
                Ok(ended) => Some(ended),
                Err(error) => {
                    let mut cause = cause.lock().unwrap_or_else(PoisonError::into_inner);
                    cause.get_or_insert(error);
                    halt.cancel();
                    None
                }
            }
        })
    }

    /// Runs the role whose end, successful or not, ends the job.
    fn spawn_last<T, F>(&self, role: F) -> JoinHandle<Option<T>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, WorkerError>> + Send + 'static,
    {
        let halt = self.halt.clone();
        self.spawn(async move {
            let ended = role.await;
            // The failure is recorded first, as it makes the others fail.
            if ended.is_ok() {
                halt.cancel();
            }
            ended
        })
    }

    fn cause(&self) -> Option<WorkerError> {
        let mut cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
        cause.take()
    }
}

/// The bounded queues between the roles.
struct Queues {
    tasks: Arc<dyn Queue<ImageRef>>,
    tensors: Arc<dyn Queue<PreparedImage>>,
    results: Arc<dyn Queue<Classification>>,
}

impl EmbeddedJob {
    fn tensors_in_flight(&self) -> usize {
        self.config.images_in_infer(&self.engine)
    }
}

impl Queues {
    fn new(config: &WorkerConfig, tensors_in_flight: usize) -> Self {
        let part_rows = config.sink.part_rows.get();
        let bytes = config.share_of_budget();
        Self {
            tasks: memory(Role::Ingest, 1024, u64::MAX),
            tensors: memory(Role::Preprocess, 2 * tensors_in_flight, bytes),
            // The sink holds a whole part before it settles any of it.
            results: memory(Role::Infer, part_rows + part_rows / 2 + 64, bytes),
        }
    }
}

/// A queue that `stage` publishes into.
fn memory<T: Message>(stage: Role, capacity: usize, max_bytes: u64) -> Arc<dyn Queue<T>> {
    Arc::new(MemoryQueue::new(MemoryQueueConfig {
        capacity,
        max_bytes,
        stage: stage.as_str(),
        ..MemoryQueueConfig::default()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_run_ends_with_the_first_error_and_not_with_what_followed_from_it() {
        let tokens = Tokens::default();
        let first = tokens.spawn(async { Err::<(), _>(WorkerError::LeaseLost) });
        first.await.unwrap();
        assert!(tokens.halt.is_cancelled());
        let after = Duration::ZERO;
        let second =
            tokens.spawn_last(async move { Err::<(), _>(WorkerError::DrainTimeout { after }) });
        second.await.unwrap();
        assert!(matches!(tokens.cause(), Some(WorkerError::LeaseLost)));
    }
}
