//! The preprocess role: fetches, decodes and resizes, one image per delivery.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use trommel_preprocess::{Limits, Mode, PrepareError, Prepared, Preparer};
use trommel_queue::Delivery;
use trommel_source::{FetchLimits, Fetched, Source};
use trommel_storage::StorageError;
use trommel_types::{Failure, ImageRef, PreparedImage, Role, Scalar};

use crate::byte_budget::ByteBudget;
use crate::cpu_pool::{CpuPool, Unfinished};
use crate::fatal::Fatal;
use crate::fault::{Remedy, TaskError, remedy};
use crate::hop::TensorHop;
use crate::intake::Intake;
use crate::job::{JobPlan, ModelId, Planned, PlannedModel, check_due};
use crate::progress::Task;
use crate::settle::{Settler, Subject};
use crate::trace::image_span;
use crate::{Allowed, PreprocessConfig, Progress, WorkerError, metrics};

/// Reads that may hang at once before the process gives up: each holds a thread.
const MOST_HUNG: usize = 64;

/// Threads that decode and resize.
pub(crate) struct PreparePool {
    threads: CpuPool<Option<Preparer>>,
    budget: ByteBudget,
    limits: Limits,
    fetch_timeout: Duration,
    decode_timeout: Duration,
}

impl PreparePool {
    /// # Errors
    /// If threads cannot be started, or pinned to their cores.
    pub(crate) fn start(config: &PreprocessConfig) -> Result<Self, WorkerError> {
        let (threads, pinned) = (config.threads(), config.pin_threads);
        metrics::threads(Role::Preprocess.as_str(), threads);
        Ok(Self {
            threads: CpuPool::start("prepare", threads, pinned, || None)?,
            budget: ByteBudget::new(config.max_bytes_in_flight),
            limits: config.limits(),
            fetch_timeout: config.fetch_timeout,
            decode_timeout: config.decode_timeout,
        })
    }

    /// Starts threads that only take live work.
    pub(crate) fn reserve_live(&self, threads: usize) -> Result<(), WorkerError> {
        self.threads.reserve(threads)
    }

    /// Decodes and resizes an image of a request, with this limit of pixels.
    pub(crate) async fn prepare_live(
        &self,
        bytes: Bytes,
        models: Arc<[PlannedModel]>,
        mode: Mode,
        max_pixels: u64,
        progress: Arc<Progress>,
    ) -> Result<Vec<Result<Prepared, PrepareError>>, TaskError> {
        let limits = Limits {
            max_pixels: max_pixels.min(self.limits.max_pixels),
            ..self.limits
        };
        let came = Instant::now();
        let work = prepare_for(bytes, models, mode, false, limits, progress);
        let timed = move |preparer: &mut Option<Preparer>| {
            let begun = Instant::now();
            let prepared = work(preparer);
            metrics::request_prepared(begun - came, begun.elapsed());
            prepared
        };
        self.outcome(self.threads.run_live(self.decode_timeout, timed).await)
    }

    /// Decodes once and resizes for each model, each with its own outcome.
    async fn prepare(
        &self,
        bytes: Bytes,
        job: &JobPlan,
        progress: Arc<Progress>,
    ) -> Result<Vec<Result<Prepared, PrepareError>>, TaskError> {
        let models = Arc::clone(&job.models);
        let work = prepare_for(bytes, models, job.mode, job.phash, self.limits, progress);
        self.outcome(self.threads.run(self.decode_timeout, work).await)
    }

    fn outcome<T>(&self, ended: Result<Result<T, TaskError>, Unfinished>) -> Result<T, TaskError> {
        match ended {
            Ok(prepared) => prepared,
            Err(Unfinished::TimedOut) => Err(TaskError::TimedOut {
                after: self.decode_timeout,
            }),
            Err(Unfinished::Failed(error)) => Err(error.into()),
        }
    }
}

/// The work of decoding an image once and resizing it for each model.
fn prepare_for(
    bytes: Bytes,
    models: Arc<[PlannedModel]>,
    mode: Mode,
    phash: bool,
    limits: Limits,
    progress: Arc<Progress>,
) -> impl FnOnce(&mut Option<Preparer>) -> Result<Vec<Result<Prepared, PrepareError>>, TaskError>
+ Send
+ 'static {
    move |preparer| {
        let Some(first) = models.first() else {
            return Ok(Vec::new());
        };
        let preparer =
            preparer.get_or_insert_with(|| Preparer::new(Arc::clone(&first.plan), limits));
        preparer.set_mode(mode);
        preparer.set_limits(limits);
        preparer.set_phash(phash);
        progress.timed(Task::Decode, || {
            preparer.decode_for(&bytes, models.iter().flat_map(PlannedModel::plans))
        })?;
        Ok(progress.timed(Task::Resize, || {
            let each = models.iter().map(|model| resize(preparer, model));
            each.collect()
        }))
    }
}

/// Resizes the decoded image for a model; for a cascade twice, the results concatenated.
fn resize(preparer: &mut Preparer, model: &PlannedModel) -> Result<Prepared, PrepareError> {
    let mut prepared = preparer.resize_by(&model.plan)?;
    if let Some(also) = &model.also {
        let behind = preparer.resize_by(also)?;
        prepared.pixels.extend_from_slice(&behind.pixels);
    }
    Ok(prepared)
}

/// The context of the preprocess role.
pub(crate) struct Context {
    pub(crate) intake: Intake<ImageRef>,
    pub(crate) source: Arc<dyn Source>,
    /// Where images may be read from; anywhere for the user's own command.
    pub(crate) allowed: Option<Arc<Allowed>>,
    pub(crate) pool: Arc<PreparePool>,
    pub(crate) output: Arc<dyn TensorHop>,
    pub(crate) settler: Settler,
    pub(crate) progress: Arc<Progress>,
}

/// Prepares images until `shutdown` fires, then finishes those already started.
///
/// A delivery is settled only after its tensors are durably handed on, so a crash at any point
/// repeats an image and never loses one.
pub(crate) async fn run(ctx: Arc<Context>, shutdown: CancellationToken) -> Result<(), WorkerError> {
    let (in_flight, fatal) = (TaskTracker::new(), Fatal::new(&shutdown));

    // No permit, no pull: the backlog stays in the queue, where other workers can take it.
    let stopped = loop {
        let next = ctx.intake.next_delivery(|| ctx.output.idle());
        let (delivery, permit) = match fatal.token().run_until_cancelled(next).await {
            None => break Ok(()),
            Some(Err(error)) => break Err(error),
            Some(Ok(next)) => next,
        };
        let (ctx, fatal) = (Arc::clone(&ctx), fatal.clone());
        let span = image_span!("preprocess.image", delivery, delivery.message());
        let work = async move {
            fatal.check(work_on(&ctx, delivery).await);
            drop(permit);
        };
        in_flight.spawn(work.instrument(span));
    };

    ctx.intake.give_back().await;
    in_flight.close();
    in_flight.wait().await;
    stopped.and(fatal.into_result())
}

async fn work_on(ctx: &Arc<Context>, delivery: Delivery<ImageRef>) -> Result<(), WorkerError> {
    let kept_alive = delivery.keep_alive();
    let (job, prepared) = match ctx.settler.jobs.plan(delivery.message()).await {
        Ok(Planned::Running(job)) => {
            let prepared = prepare_one(ctx, &delivery, &job).await;
            (Some(job), prepared)
        }
        // Its row is no longer needed.
        Ok(Planned::Over) => (None, Ok(Vec::new())),
        Ok(Planned::Unknown) => {
            let job = delivery.message().job.to_string();
            (None, Err(TaskError::NoJob { job }))
        }
        Err(error) => (None, Err(error.into())),
    };
    drop(kept_alive);
    settle(ctx, delivery, job, prepared).await
}

/// Fetches and decodes an image and hands its tensors on. Returns the failures and their models:
/// the image fails for all models, a tensor for its own.
async fn prepare_one(
    ctx: &Arc<Context>,
    delivery: &Delivery<ImageRef>,
    job: &JobPlan,
) -> Result<Vec<(ModelId, TaskError)>, TaskError> {
    ctx.settler.check_attempt(delivery).await?;
    let due_at = job.due_at(delivery.origin());
    check_due(due_at)?;
    let image = delivery.message();
    if let Some(allowed) = &ctx.allowed {
        let allowed = allowed.check_image(image);
        allowed.map_err(|refusal| StorageError::denied(refusal.to_string()))?;
    }
    let mut held = ctx.pool.budget.hold(image.size).await;
    let bytes = fetch(ctx, image).await?;
    let length = bytes.len() as u64;
    held.correct(length);
    check_due(due_at)?; // the fetch may have taken long

    let progress = Arc::clone(&ctx.progress);
    let prepared = ctx.pool.prepare(bytes, job, progress).await?;
    drop(held);

    let mut failed = Vec::new();
    for (prepared, model) in prepared.into_iter().zip(&*job.models) {
        let handed_on = match prepared {
            Ok(prepared) => {
                let mut image = image.without_inline_bytes();
                if let Some(phash) = prepared.phash {
                    // After the columns of the source, which a message may have fewer of.
                    image
                        .columns
                        .resize(job.columns.saturating_sub(1), Scalar::Null);
                    image.columns.push(Scalar::String(format!("{phash:016x}")));
                }
                let tensor = PreparedImage {
                    image,
                    model: Arc::clone(&model.id.name),
                    model_version: Arc::clone(&model.id.version),
                    pixels: prepared.pixels.into(),
                    shape: prepared.shape,
                    bytes: length,
                    original: prepared.original,
                    attempts: delivery.attempt(),
                    due_at,
                };
                ctx.output.hand_on(tensor, &model.id).await
            }
            Err(error) => Err(error.into()),
        };
        if let Err(error) = handed_on {
            failed.push((model.id.clone(), error));
        }
    }
    Ok(failed)
}

async fn fetch(ctx: &Context, image: &ImageRef) -> Result<Bytes, TaskError> {
    let limits = FetchLimits {
        bytes: ctx.pool.limits.max_bytes,
        time: ctx.pool.fetch_timeout,
    };
    let fetched = ctx.source.fetch_within(image, limits).await;
    let threads = ctx.source.hung();
    if threads > MOST_HUNG {
        return Err(WorkerError::Hung { threads }.into());
    }
    let Fetched { bytes, took } = fetched?;
    ctx.progress.add_time(Task::Fetch, took);
    ctx.progress.count_fetched(&image.uri, bytes.len() as u64);
    Ok(bytes)
}

/// Settles a delivery by the outcomes of its image for each model. A fault worse than a failed row
/// applies to the image as a whole; if one model is to be retried, all are, and those with an
/// outcome merely repeat it.
async fn settle(
    ctx: &Context,
    delivery: Delivery<ImageRef>,
    job: Option<JobPlan>,
    prepared: Result<Vec<(ModelId, TaskError)>, TaskError>,
) -> Result<(), WorkerError> {
    let (settler, attempt) = (&ctx.settler, delivery.attempt());
    let mut failed = match prepared {
        Ok(failed) => failed,
        Err(error) => {
            let models = job.iter().flat_map(|job| job.models.iter());
            let models = models.map(|model| &model.id);
            return settler.settle(delivery, Err(error), models).await;
        }
    };
    let gravity = |(_, error): &(ModelId, TaskError)| match remedy(error, attempt, &settler.retry) {
        Remedy::FailImage(_) => 0,
        Remedy::SetAside | Remedy::Retry { .. } => 1,
        Remedy::FailJob => 2,
        Remedy::EndWorker => 3,
    };
    failed.sort_by_key(gravity);
    let Some(worst) = failed.pop() else {
        return settler.settle(delivery, Ok(()), [].iter()).await;
    };
    if gravity(&worst) == 0 {
        for (model, error) in failed {
            let Remedy::FailImage(kind) = remedy(&error, attempt, &settler.retry) else {
                continue; // nothing weighs more than the worst
            };
            let failure = Failure {
                kind,
                error: error.to_string(),
            };
            let row = delivery.message().failed(failure, attempt, &model);
            settler.publish(row).await?;
        }
    }
    let (model, error) = worst;
    settler.settle(delivery, Err(error), [model].iter()).await
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use roaring::RoaringTreemap;
    use trommel_preprocess::{Plan, Reference};
    use trommel_queue::{MemoryQueue, MemoryQueueConfig, Queue};
    use trommel_source::{SourceOptions, fetcher};
    use trommel_types::{Classification, Content, ErrorKind, Lane, Outcome};

    use super::*;
    use crate::RetryPolicy;
    use crate::one_job::OneJob;
    use crate::settle::RowQueues;

    const DIGITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/digits");

    /// Takes tensors of all models except one.
    struct Hop {
        refused: &'static str,
        taken: std::sync::Mutex<Vec<String>>,
    }

    #[async_trait]
    impl TensorHop for Hop {
        async fn hand_on(&self, tensor: PreparedImage, model: &ModelId) -> Result<(), TaskError> {
            if *model.name == *self.refused {
                let after = Duration::from_secs(1);
                return Err(TaskError::TimedOut { after });
            }
            self.taken.lock().unwrap().push(tensor.model.to_string());
            Ok(())
        }
    }

    fn memory<T: trommel_types::Message>() -> Arc<dyn Queue<T>> {
        Arc::new(MemoryQueue::new(MemoryQueueConfig::default()))
    }

    /// R12: each model of an image has its own outcome.
    #[tokio::test]
    async fn a_model_that_fails_does_not_fail_the_others() {
        let (tasks, results) = (memory::<ImageRef>(), memory::<Classification>());
        let mut examples = std::fs::read_dir(format!("{DIGITS}/examples/0")).unwrap();
        let example = examples.next().unwrap().unwrap().path();
        let image = ImageRef {
            job: "job".into(),
            index: 7,
            lane: Lane::Normal,
            uri: example.to_str().unwrap().to_owned(),
            content: Content::Whole,
            etag: None,
            size: None,
            columns: Vec::new(),
        };
        tasks.publish("job/7", image).await.unwrap();
        let plan = Arc::new(Plan::load(DIGITS.as_ref(), Reference::Auto).unwrap());
        let models = ["one", "two", "three"].map(|name| PlannedModel {
            id: ModelId {
                name: name.into(),
                version: "1".into(),
            },
            plan: Arc::clone(&plan),
            also: None,
        });
        let hop = Arc::new(Hop {
            refused: "one",
            taken: std::sync::Mutex::default(),
        });
        let progress = Arc::new(Progress::default());
        let ctx = Arc::new(Context {
            intake: Intake::new(Role::Preprocess, Arc::clone(&tasks), 1),
            source: fetcher(&SourceOptions::default()),
            pool: Arc::new(PreparePool::start(&PreprocessConfig::default()).unwrap()),
            output: Arc::clone(&hop) as Arc<dyn TensorHop>,
            settler: Settler {
                results: RowQueues::Shared(Arc::clone(&results)),
                retry: RetryPolicy::default(),
                jobs: Arc::new(OneJob::new(
                    JobPlan {
                        models: models.into(),
                        mode: Mode::Exact,
                        phash: false,
                        rows: Arc::default(),
                        columns: 0,
                        image_deadline: None,
                    },
                    vec![RoaringTreemap::new(); 3],
                    None,
                )),
                progress: Arc::clone(&progress),
                reports: crate::reports::Reports::default(),
            },
            allowed: None,
            progress,
        });
        let (delivery, _permit) = ctx.intake.next_delivery(|| {}).await.unwrap();
        work_on(&ctx, delivery).await.unwrap();
        assert_eq!(*hop.taken.lock().unwrap(), ["two", "three"]);
        assert_eq!(tasks.stats().await.unwrap().dead_letters, 1);
        let rows = results.pull(10, Duration::ZERO).await.unwrap();
        assert_eq!(rows.len(), 1);
        let row = rows[0].message();
        assert_eq!(*row.model, *"one");
        let Outcome::Failed(failure) = &row.outcome else {
            panic!("a model that failed gave {:?}", row.outcome);
        };
        assert_eq!(failure.kind, ErrorKind::Timeout);
    }
}
