//! All four roles in one process, joined by in-process queues.

use std::collections::BTreeMap;
use std::future::Future;
use std::io::Write;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
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
use crate::job::{JobPlan, Jobs, ModelId, PlannedModel};
use crate::one_job::OneJob;
use crate::reports::Reports;
use crate::settle::{RowQueues, Settler};
use crate::tried::Tried;
use crate::{Progress, WorkerConfig, WorkerError, infer, ingest, metrics, preprocess, sink};

/// One job with everything that it needs, opened and checked.
#[derive(Clone)]
pub struct EmbeddedJob {
    /// The source of the images.
    pub source: Arc<dyn Source>,
    /// At least one. Each image is fetched and decoded once for all of them.
    pub models: Vec<EmbeddedModel>,
    /// Row options.
    pub rows: RowOptions,
    /// For a cascade: its rule, once the sample is classified.
    pub rule: Option<Arc<Rule>>,
    /// Settings of the roles.
    pub config: WorkerConfig,
    /// Share of failed images above which the job ends early.
    pub max_failure_rate: Option<f64>,
}

/// A model of a job, opened and warmed up.
#[derive(Clone)]
pub struct EmbeddedModel {
    /// Preprocessing.
    pub plan: Arc<Plan>,
    /// For a cascade: the preprocessing of the large model.
    pub also: Option<Arc<Plan>>,
    /// The running model.
    pub engine: Arc<Engine>,
    /// The job as recorded in its rows. Models of a job differ by name.
    pub record: JobRecord,
}

impl EmbeddedModel {
    fn id(&self) -> ModelId {
        ModelId {
            name: self.record.model.as_str().into(),
            version: self.record.model_version.as_str().into(),
        }
    }

    fn planned(&self) -> PlannedModel {
        PlannedModel {
            id: self.id(),
            plan: Arc::clone(&self.plan),
            also: self.also.clone(),
        }
    }
}

/// A job in this process, as recorded by its output.
pub fn job_record(spec: &JobSpec, model: &JobModel) -> JobRecord {
    crate::distributed::record_of_spec(spec, model, crate::clock::now())
}

/// Which images of the source a job classifies.
pub enum Images {
    /// Those without a row at their position in the listing, in the output of any model.
    Missing,
    /// For one model: those without a row, regardless of its index.
    New(Existing),
    /// For one model: those with failed rows.
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

    fn choice(self, sinks: &Sinks) -> Choice {
        match self {
            Self::Missing => {
                let checks = sinks.iter().map(|sink| sink.source_check());
                Choice::Resume(checks.collect())
            }
            Self::New(existing) => Choice::Extend(existing),
            Self::Failed(images) => Choice::Retry(Box::new(Again::new(images))),
            Self::Sample(images, share) => {
                Choice::Sample(Box::new(images.choice(sinks)), Share(share))
            }
        }
    }
}

/// Longest time a row waits before it goes to a stream.
const STREAM_INTERVAL: Duration = Duration::from_millis(50);

/// The outputs of a job's models, in their order.
pub type Sinks = Vec<Box<dyn ResultSink>>;

/// How a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Every image has its row.
    Complete,
    /// It was stopped; work in flight was finished and committed.
    Stopped,
}

impl EmbeddedJob {
    /// Classifies into outputs, one for each model. Returns the sinks, so that the job can be finished.
    ///
    /// When `stop` fires, the roles are drained in order: images in flight are finished and
    /// committed, within `shutdown.drain-timeout`.
    ///
    /// # Errors
    /// Errors that stop the whole job. Images in flight are still committed if the sinks work.
    pub async fn into_output(
        self,
        sinks: Sinks,
        images: Images,
        progress: Arc<Progress>,
        stop: CancellationToken,
    ) -> Result<(Ended, Sinks), WorkerError> {
        let rows = sinks.iter().map(|sink| sink.committed().len()).sum();
        progress.count_resumed(rows);
        let tried = self.config.infer.cache.as_ref().map(|cache| {
            let run = self.models.first().map(|model| &model.record.run);
            let path = cache.join("tried").join(run.map_or("", String::as_str));
            Arc::new(Tried::open(&path, &in_all(&sinks)))
        });
        if !images.are_of_whole_listing() {
            // Their rows stay, so they are part of the total.
            progress.count_listed_before(rows);
        }
        let choice = images.choice(&sinks);
        let ended = self.run(sinks, choice, tried.clone(), progress, stop).await;
        if let Some(tried) = tried {
            match &ended {
                Ok((_, sinks)) => tried.close(&in_all(sinks)),
                Err(_) => tried.close(&RoaringTreemap::new()),
            }
        }
        ended
    }

    /// Classifies to a stream: JSON Lines, in order of completion. Rows of several models take turns.
    ///
    /// # Errors
    /// As [`EmbeddedJob::into_output`]; a closed stream is one.
    pub async fn into_stream<W: Write + Send + 'static>(
        mut self,
        out: W,
        progress: Arc<Progress>,
        stop: CancellationToken,
    ) -> Result<(Ended, Sinks), WorkerError> {
        // Readers want rows immediately; there is no part to fill.
        self.config.sink.part_interval = STREAM_INTERVAL;
        let out = Arc::new(Mutex::new(out));
        let to_stream = |model: &EmbeddedModel| -> Box<dyn ResultSink> {
            Box::new(StreamSink::new(Arc::clone(&out), model.record.clone()))
        };
        let sinks = self.models.iter().map(to_stream).collect();
        let all = Choice::Resume(Vec::new());
        self.run(sinks, all, None, progress, stop).await
    }

    async fn run(
        self,
        sinks: Sinks,
        choice: Choice,
        tried: Option<Arc<Tried>>,
        progress: Arc<Progress>,
        stop: CancellationToken,
    ) -> Result<(Ended, Sinks), WorkerError> {
        Role::ALL.into_iter().for_each(metrics::begin);
        let instances = self
            .models
            .iter()
            .map(|model| model.engine.stats().instances);
        metrics::threads(Role::Infer.as_str(), instances.sum());
        let queues = Queues::new(&self, self.tensors_in_flight());
        let tokens = Tokens::new(sinks.len());
        let roles = self.start((sinks, choice, tried), &queues, &tokens, &progress)?;
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
        let Some(sinks) = drained else {
            return Err(WorkerError::Panicked { what: "the sink" });
        };
        let total = progress.total();
        let mut each = sinks.iter();
        let complete = each.all(|sink| total == Some(sink.committed().len()));
        Ok((
            if complete {
                Ended::Complete
            } else {
                Ended::Stopped
            },
            sinks,
        ))
    }

    fn start(
        &self,
        (outputs, choice, tried): (Sinks, Choice, Option<Arc<Tried>>),
        queues: &Queues,
        tokens: &Tokens,
        progress: &Arc<Progress>,
    ) -> Result<Roles, WorkerError> {
        let config = &self.config;
        let own_columns = |model: &EmbeddedModel| {
            let all = model.record.columns.len();
            all - model.engine.columns().len()
        };
        let plan = JobPlan {
            models: self.models.iter().map(EmbeddedModel::planned).collect(),
            mode: self.rows.mode,
            phash: self.rows.phash,
            rows: Arc::new(Wanted {
                rule: self.rule.clone(),
                ..Wanted::from(&self.rows)
            }),
            columns: self.models.first().map_or(0, own_columns),
            image_deadline: None,
        };
        let committed = outputs.iter().map(|sink| sink.committed().clone());
        let jobs: Arc<dyn Jobs> = Arc::new(OneJob::new(plan, committed.collect(), tried.clone()));
        let checkpoint: Arc<dyn ingest::Checkpoint> = match tried {
            Some(tried) => tried,
            None => Arc::new(ingest::NoCheckpoint),
        };
        let settler = Settler {
            results: queues.rows_out(&self.models),
            retry: config.retry.clone(),
            progress: Arc::clone(progress),
            jobs,
            reports: Reports::default(),
        };
        let job = self.models.first().map(|model| &model.record.job_id);

        let ingest = Arc::new(ingest::Context {
            job: job.map_or("", String::as_str).into(),
            lane: Lane::default(),
            output: Arc::clone(&queues.tasks),
            window: 1,
            start: ingest::Start::default(),
            place: ingest::Place::default(),
            checkpoint,
            mark: ingest::no_mark,
            fails: Some((
                settler.clone(),
                self.models.iter().map(EmbeddedModel::id).collect(),
            )),
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
            engines: Arc::new(infer::OwnEngines(self.engines())),
            settler,
        });
        let held = sink::HeldRows::new(config.share_of_budget());
        let sink_of = |intake: &Arc<dyn Queue<Classification>>| {
            Arc::new(sink::Context {
                intake: Arc::clone(intake),
                config: config.sink.clone(),
                held: Arc::clone(&held),
                max_failure_rate: self.max_failure_rate,
                progress: Arc::clone(progress),
                shared: None,
                committed: watch::Sender::new(sink::Counts::default()),
            })
        };
        let sinks = queues.results.iter().zip(outputs).map(|(intake, output)| {
            let stop = tokens.sink.clone();
            tokens.spawn_last(sink::run(sink_of(intake), output, stop))
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
            sinks: sinks.collect(),
        })
    }
}

/// Stops the roles in pipeline order, each after its input has drained. Returns the sinks, unless one
/// has failed. A role that has ended does not delay the others.
async fn drain(roles: Roles, queues: &Queues, tokens: &Tokens) -> Option<Sinks> {
    let Roles {
        ingest,
        preprocess,
        infer,
        sinks,
    } = roles;
    tokens.ingest.cancel();
    drop(ingest.await);
    tokens.preprocess.cancel();
    drop(preprocess.await);
    run_dry(&queues.tensors, &infer).await;
    tokens.infer.cancel();
    drop(infer.await);
    for (results, sink) in queues.results.iter().zip(&sinks) {
        run_dry(results, sink).await;
    }
    tokens.sink.cancel();
    let ended = join_all(sinks).await;
    ended.into_iter().map(|sink| sink.ok().flatten()).collect()
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
    sinks: Vec<JoinHandle<Option<Box<dyn ResultSink>>>>,
}

/// One token per role, and one that fires when a role fails or the sinks have all rows.
struct Tokens {
    ingest: CancellationToken,
    preprocess: CancellationToken,
    infer: CancellationToken,
    sink: CancellationToken,
    halt: CancellationToken,
    /// Sinks that have not ended.
    sinks: Arc<AtomicUsize>,
    /// The first error of a role.
    cause: Arc<Mutex<Option<WorkerError>>>,
}

impl Tokens {
    fn new(sinks: usize) -> Self {
        Self {
            ingest: CancellationToken::new(),
            preprocess: CancellationToken::new(),
            infer: CancellationToken::new(),
            sink: CancellationToken::new(),
            halt: CancellationToken::new(),
            sinks: Arc::new(AtomicUsize::new(sinks)),
            cause: Arc::default(),
        }
    }

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

    /// Runs a sink. The end of the last one, successful or not, ends the job.
    fn spawn_last<T, F>(&self, role: F) -> JoinHandle<Option<T>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, WorkerError>> + Send + 'static,
    {
        let (halt, sinks) = (self.halt.clone(), Arc::clone(&self.sinks));
        self.spawn(async move {
            let ended = role.await;
            // The failure is recorded first, as it makes the others fail.
            if ended.is_ok() && sinks.fetch_sub(1, Relaxed) == 1 {
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
    /// One for each model.
    results: Vec<Arc<dyn Queue<Classification>>>,
}

impl EmbeddedJob {
    fn tensors_in_flight(&self) -> usize {
        let engines = self.models.iter().map(|model| &model.engine);
        engines
            .map(|engine| self.config.images_in_infer(engine))
            .sum()
    }

    fn engines(&self) -> BTreeMap<Arc<str>, Arc<Engine>> {
        let named = |model: &EmbeddedModel| (model.id().name, Arc::clone(&model.engine));
        self.models.iter().map(named).collect()
    }
}

impl Queues {
    fn new(job: &EmbeddedJob, tensors_in_flight: usize) -> Self {
        let config = &job.config;
        let part_rows = config.sink.part_rows.get();
        let bytes = config.share_of_budget();
        let each = bytes / job.models.len().max(1) as u64;
        // The sink holds a whole part before it settles any of it.
        let results = || memory(Role::Infer, part_rows + part_rows / 2 + 64, each);
        Self {
            tasks: memory(Role::Ingest, 1024, u64::MAX),
            tensors: memory(Role::Preprocess, 2 * tensors_in_flight, bytes),
            results: job.models.iter().map(|_| results()).collect(),
        }
    }

    fn rows_out(&self, models: &[EmbeddedModel]) -> RowQueues {
        let named = models.iter().map(|model| model.id().name);
        RowQueues::ByModel(named.zip(self.results.iter().cloned()).collect())
    }
}

/// The images with a row of each model.
fn in_all(sinks: &Sinks) -> RoaringTreemap {
    let sets = sinks.iter().map(|sink| sink.committed().clone());
    sets.reduce(|all, one| all & one).unwrap_or_default()
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
        let tokens = Tokens::new(2);
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
