//! All four roles in one process, joined by in-process queues.

use std::future::Future;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use trommel_infer::Engine;
use trommel_preprocess::Plan;
use trommel_queue::{MemoryQueue, MemoryQueueConfig, Queue};
use trommel_storage::{Existing, JobRecord, ResultSink, Source};
use trommel_types::{Classification, ImageRef, Lane, Message, PreparedImage};

use crate::hop::QueueHop;
use crate::ingest::Choice;
use crate::intake::Intake;
use crate::job::{JobPlan, Jobs, ModelId, OneJob, PlannedModel};
use crate::rows::{CommittedRows, Rows, StreamRows};
use crate::settle::Settler;
use crate::{Progress, Role, WorkerConfig, WorkerError, infer, ingest, metrics, preprocess, sink};

/// One job with everything it needs, opened and checked.
pub struct EmbeddedJob {
    /// Where the images come from.
    pub source: Arc<dyn Source>,
    /// How they become tensors.
    pub plan: Arc<Plan>,
    /// The model, warmed up.
    pub engine: Arc<Engine>,
    /// The job as its rows name it.
    pub record: JobRecord,
    /// How the roles work.
    pub config: WorkerConfig,
    /// Share of failed images above which the job ends early.
    pub max_failure_rate: Option<f64>,
}

/// Longest time a row waits before it goes to a stream.
const STREAM_INTERVAL: Duration = Duration::from_millis(50);

/// How a job has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Every image has its row.
    Complete,
    /// A stop was asked for; what was in hand is committed.
    Stopped,
}

impl EmbeddedJob {
    /// Classifies into an output. Returns the sink for the last word on the job.
    ///
    /// When `stop` fires, the roles are drained in order: what is in hand is finished and
    /// committed, within `shutdown.drain-timeout`.
    ///
    /// # Errors
    /// What stops the whole job. What was in hand is committed then too, where the sink still
    /// works.
    ///
    /// With `existing`, images that have a row already are passed over, whatever their index.
    pub async fn into_output(
        self,
        sink: Box<dyn ResultSink>,
        existing: Option<Existing>,
        progress: Arc<Progress>,
        stop: CancellationToken,
    ) -> Result<(Ended, Box<dyn ResultSink>), WorkerError> {
        progress.count_resumed(sink.committed().len());
        let choice = match existing {
            Some(existing) => {
                // Their rows stay, so they are part of the total.
                progress.count_listed_before(sink.committed().len());
                Choice::Extend(existing)
            }
            None => Choice::Resume(Box::new(sink.source_check())),
        };
        let rows = CommittedRows(sink);
        let (ended, rows) = self.run(rows, choice, progress, stop).await?;
        Ok((ended, rows.0))
    }

    /// Classifies onto a stream: JSON Lines, in the order the answers come.
    ///
    /// # Errors
    /// As [`EmbeddedJob::into_output`]; a closed stream is one.
    pub async fn into_stream<W: Write + Send + 'static>(
        mut self,
        out: W,
        progress: Arc<Progress>,
        stop: CancellationToken,
    ) -> Result<Ended, WorkerError> {
        // Whoever reads along wants rows as they come; there is no part to fill.
        self.config.sink.part_interval = STREAM_INTERVAL;
        let rows = StreamRows::new(out, self.record.clone());
        Ok(self
            .run(rows, Choice::Resume(Box::default()), progress, stop)
            .await?
            .0)
    }

    async fn run<R: Rows>(
        self,
        rows: R,
        choice: Choice,
        progress: Arc<Progress>,
        stop: CancellationToken,
    ) -> Result<(Ended, R), WorkerError> {
        Role::ALL.into_iter().for_each(metrics::begin);
        let instances = self.engine.stats().instances;
        metrics::threads(Role::Infer.as_str(), instances);
        let queues = Queues::new(&self.config, self.tensors_in_hand());
        let tokens = Tokens::default();
        let roles = self.start(rows, choice, &queues, &tokens, &progress)?;
        let drain_timeout = self.config.shutdown.drain_timeout;

        tokio::select! {
            () = tokens.halt.cancelled() => {}
            () = stop.cancelled() => {}
        }
        let Ok(drained) = timeout(drain_timeout, drain(roles, &queues, &tokens)).await else {
            return Err(WorkerError::DrainTimeout {
                after: drain_timeout,
            });
        };
        let rows = drained?;
        let complete = progress.total() == Some(rows.committed());
        Ok((
            if complete {
                Ended::Complete
            } else {
                Ended::Stopped
            },
            rows,
        ))
    }

    fn start<R: Rows>(
        &self,
        rows: R,
        choice: Choice,
        queues: &Queues,
        tokens: &Tokens,
        progress: &Arc<Progress>,
    ) -> Result<Roles<R>, WorkerError> {
        let config = &self.config;
        let model = ModelId {
            name: self.record.model.as_str().into(),
            version: self.record.model_version.as_str().into(),
        };
        let settler = Settler {
            results: Arc::clone(&queues.results),
            retry: config.retry.clone(),
            progress: Arc::clone(progress),
            said: None,
        };

        let ingest = Arc::new(ingest::Context {
            job: self.record.job_id.as_str().into(),
            lane: Lane::default(),
            output: Arc::clone(&queues.tasks),
            window: 1,
            place: ingest::Place::default(),
            mark: ingest::uri_of,
            progress: Arc::clone(progress),
        });
        let planned = PlannedModel {
            id: model,
            plan: Arc::clone(&self.plan),
        };
        let job = JobPlan {
            models: [planned].into(),
        };
        let jobs: Arc<dyn Jobs> = Arc::new(OneJob(job));
        let preprocess = Arc::new(preprocess::Context {
            intake: Intake::new(
                Role::Preprocess,
                Arc::clone(&queues.tasks),
                config.preprocess.in_flight(),
            ),
            jobs: Arc::clone(&jobs),
            source: Arc::clone(&self.source),
            pool: preprocess::PreparePool::start(&config.preprocess)?,
            output: Arc::new(QueueHop(Arc::clone(&queues.tensors))),
            settler: settler.clone(),
            progress: Arc::clone(progress),
        });
        let infer = Arc::new(infer::Context {
            intake: Intake::new(
                Role::Infer,
                Arc::clone(&queues.tensors),
                self.tensors_in_hand(),
            ),
            engines: Arc::new(infer::OneEngine(Arc::clone(&self.engine))),
            jobs,
            settler,
        });
        let sink = Arc::new(sink::Context {
            intake: Arc::clone(&queues.results),
            config: config.sink.clone(),
            max_failure_rate: self.max_failure_rate,
            progress: Arc::clone(progress),
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

/// Stops the roles in the order of the pipeline, each after what reaches it has run dry, and
/// returns the first error among them. A role that has ended keeps nobody waiting.
async fn drain<R>(roles: Roles<R>, queues: &Queues, tokens: &Tokens) -> Result<R, WorkerError> {
    let Roles {
        ingest,
        preprocess,
        infer,
        sink,
    } = roles;
    tokens.ingest.cancel();
    let ingested = joined(ingest.await);
    tokens.preprocess.cancel();
    let prepared = joined(preprocess.await);
    run_dry(&queues.tensors, &infer).await;
    tokens.infer.cancel();
    let inferred = joined(infer.await);
    run_dry(&queues.results, &sink).await;
    tokens.sink.cancel();
    let rows = joined(sink.await);
    // A sink that stops makes the others fail too, so its word comes first.
    let rows = rows?;
    ingested.and(prepared).and(inferred)?;
    Ok(rows)
}

/// Waits until `consumer` has taken all that waits in `queue`, or has ended.
async fn run_dry<T: Message, E>(queue: &Arc<dyn Queue<T>>, consumer: &JoinHandle<E>) {
    while !consumer.is_finished() {
        match queue.stats().await {
            Ok(stats) if stats.waiting > 0 => tokio::time::sleep(Duration::from_millis(5)).await,
            _ => return,
        }
    }
}

fn joined<T>(
    ended: Result<Result<T, WorkerError>, tokio::task::JoinError>,
) -> Result<T, WorkerError> {
    ended.unwrap_or(Err(WorkerError::Panicked { what: "a role" }))
}

struct Roles<R> {
    ingest: JoinHandle<Result<(), WorkerError>>,
    preprocess: JoinHandle<Result<(), WorkerError>>,
    infer: JoinHandle<Result<(), WorkerError>>,
    sink: JoinHandle<Result<R, WorkerError>>,
}

/// One token a role, and one that fires when a role fails or the sink has all rows.
#[derive(Default)]
struct Tokens {
    ingest: CancellationToken,
    preprocess: CancellationToken,
    infer: CancellationToken,
    sink: CancellationToken,
    halt: CancellationToken,
}

impl Tokens {
    /// Runs a role whose failure halts the others.
    fn spawn<F>(&self, role: F) -> JoinHandle<Result<(), WorkerError>>
    where
        F: Future<Output = Result<(), WorkerError>> + Send + 'static,
    {
        let halt = self.halt.clone();
        tokio::spawn(async move {
            let ended = role.await;
            if ended.is_err() {
                halt.cancel();
            }
            ended
        })
    }

    /// Runs the role whose end, good or bad, is the end of the job.
    fn spawn_last<T: Send + 'static, F>(&self, role: F) -> JoinHandle<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let halted = self.halt.clone().drop_guard();
        tokio::spawn(async move {
            let ended = role.await;
            drop(halted);
            ended
        })
    }
}

/// The bounded queues between the roles.
struct Queues {
    tasks: Arc<dyn Queue<ImageRef>>,
    tensors: Arc<dyn Queue<PreparedImage>>,
    results: Arc<dyn Queue<Classification>>,
}

impl EmbeddedJob {
    fn tensors_in_hand(&self) -> usize {
        let max_batch = self.engine.stats().max_batch;
        self.config.infer.tensors_in_hand(max_batch)
    }
}

impl Queues {
    fn new(config: &WorkerConfig, tensors_in_hand: usize) -> Self {
        let part_rows = config.sink.part_rows.get();
        Self {
            tasks: memory(Role::Ingest, 1024),
            tensors: memory(Role::Preprocess, 2 * tensors_in_hand),
            // The sink holds a whole part before it settles any of it.
            results: memory(Role::Infer, part_rows + part_rows / 2 + 64),
        }
    }
}

/// A queue that `stage` publishes into.
fn memory<T: Message>(stage: Role, capacity: usize) -> Arc<dyn Queue<T>> {
    Arc::new(MemoryQueue::new(MemoryQueueConfig {
        capacity,
        stage: stage.as_str(),
        ..MemoryQueueConfig::default()
    }))
}
