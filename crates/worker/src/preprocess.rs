//! The preprocess role: fetches, decodes and resizes, one image a delivery.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use trommel_preprocess::{Limits, Mode, Prepared, Preparer};
use trommel_queue::{Delivery, Disposition};
use trommel_storage::Source;
use trommel_types::{ImageRef, PreparedImage};

use crate::cpu_pool::CpuPool;
use crate::disposition::TaskError;
use crate::fatal::Fatal;
use crate::hop::TensorHop;
use crate::intake::Intake;
use crate::job::{JobPlan, Jobs, PlannedModel};
use crate::progress::Task;
use crate::settle::{Settler, expired};
use crate::trace::image_span;
use crate::{PreprocessConfig, Progress, Role, WorkerError, metrics};

/// Threads that decode and resize.
pub(crate) struct PreparePool {
    threads: CpuPool<Option<Preparer>>,
    limits: Limits,
    mode: Mode,
}

impl PreparePool {
    /// # Errors
    /// When the system starts no threads, or does not keep them on their cores.
    pub(crate) fn start(config: &PreprocessConfig) -> Result<Self, WorkerError> {
        let (threads, pinned) = (config.threads(), config.pin_threads);
        metrics::threads(Role::Preprocess.as_str(), threads);
        Ok(Self {
            threads: CpuPool::start("prepare", threads, pinned, || None)?,
            limits: config.limits(),
            mode: config.mode,
        })
    }

    /// Decodes once and resizes for each model.
    async fn prepare(
        &self,
        bytes: Bytes,
        models: Arc<[PlannedModel]>,
        progress: Arc<Progress>,
    ) -> Result<Vec<Prepared>, TaskError> {
        let (limits, mode) = (self.limits, self.mode);
        let work = move |preparer: &mut Option<Preparer>| {
            let Some(first) = models.first() else {
                return Ok(Vec::new());
            };
            let preparer = preparer.get_or_insert_with(|| {
                Preparer::new(Arc::clone(&first.plan), limits).with_mode(mode)
            });
            progress.timed(Task::Decode, || {
                preparer.decode_for(&bytes, models.iter().map(|model| &*model.plan))
            })?;
            progress.timed(Task::Resize, || {
                let each = models.iter().map(|model| preparer.resize_by(&model.plan));
                Ok(each.collect::<Result<_, _>>()?)
            })
        };
        self.threads.run(work).await?
    }
}

/// What the preprocess role works with.
pub(crate) struct Context {
    pub(crate) intake: Intake<ImageRef>,
    pub(crate) jobs: Arc<dyn Jobs>,
    pub(crate) source: Arc<dyn Source>,
    pub(crate) pool: PreparePool,
    pub(crate) output: Arc<dyn TensorHop>,
    pub(crate) settler: Settler,
    pub(crate) progress: Arc<Progress>,
}

/// Prepares images until `shutdown` fires, then finishes the ones already started.
///
/// A delivery is settled only after its tensors are handed on for good, so a crash at any point
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
    let (outcome, models) = match ctx.jobs.plan(&delivery.message().job).await {
        Ok(Some(job)) => (prepare_one(ctx, &delivery, &job).await, job.models),
        // Nobody waits for its row any more.
        Ok(None) => (Ok(()), Arc::default()),
        Err(WorkerError::Queue(error)) => {
            // Without its models no row can be written: others, or a later attempt, may know them.
            tracing::warn!(%error, "a job cannot be looked up");
            drop(kept_alive);
            let after = ctx.settler.retry.cap;
            return Ok(delivery
                .settle(Disposition::Retry { after })
                .await
                .or_else(expired)?);
        }
        Err(error) => return Err(error),
    };
    drop(kept_alive);
    let models = models.iter().map(|model| &model.id);
    ctx.settler.settle(delivery, outcome, models).await
}

async fn prepare_one(
    ctx: &Arc<Context>,
    delivery: &Delivery<ImageRef>,
    job: &JobPlan,
) -> Result<(), TaskError> {
    ctx.settler.check_attempt(delivery.attempt())?;
    let image = delivery.message();
    let start = Instant::now();
    let bytes = ctx.source.fetch(image, ctx.pool.limits.max_bytes).await?;
    ctx.progress.add_time(Task::Fetch, start.elapsed());
    let length = bytes.len() as u64;
    ctx.progress.count_bytes(length);

    let (models, progress) = (Arc::clone(&job.models), Arc::clone(&ctx.progress));
    let prepared = ctx.pool.prepare(bytes, models, progress).await?;

    for (prepared, model) in prepared.into_iter().zip(&*job.models) {
        let tensor = PreparedImage {
            image: image.without_inline_bytes(),
            model: Arc::clone(&model.id.name),
            model_version: Arc::clone(&model.id.version),
            pixels: prepared.pixels.into(),
            shape: prepared.shape,
            bytes: length,
            original: prepared.original,
            attempts: delivery.attempt(),
        };
        ctx.output.hand_on(tensor, &model.id).await?;
    }
    Ok(())
}
