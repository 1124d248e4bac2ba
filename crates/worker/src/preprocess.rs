//! The preprocess role: fetches, decodes and resizes, one image a delivery.

use std::sync::Arc;
use std::time::Instant;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use trommel_preprocess::{Prepared, Preparer};
use trommel_queue::{Delivery, Queue};
use trommel_storage::Source;
use trommel_types::{ImageRef, PreparedImage};

use crate::cpu_pool::CpuPool;
use crate::disposition::TaskError;
use crate::fatal::Fatal;
use crate::intake::Intake;
use crate::progress::Task;
use crate::settle::{Settler, message_id};
use crate::{Progress, WorkerError};

/// What the preprocess role works with.
pub(crate) struct Context {
    pub(crate) intake: Intake<ImageRef>,
    pub(crate) source: Arc<dyn Source>,
    pub(crate) max_bytes: u64,
    pub(crate) cpu_pool: CpuPool<Preparer>,
    pub(crate) output: Arc<dyn Queue<PreparedImage>>,
    pub(crate) settler: Settler,
    pub(crate) progress: Arc<Progress>,
}

/// Prepares images until `shutdown` fires, then finishes the ones already started.
///
/// A delivery is settled only after its tensor is stored by the output queue, so a crash at any
/// point repeats an image and never loses one.
pub(crate) async fn run(ctx: Arc<Context>, shutdown: CancellationToken) -> Result<(), WorkerError> {
    let (in_flight, fatal) = (TaskTracker::new(), Fatal::new(&shutdown));

    // No permit, no pull: the backlog stays in the queue, where other workers can take it.
    let stopped = loop {
        let (delivery, permit) = match fatal
            .token()
            .run_until_cancelled(ctx.intake.next_delivery(|| ()))
            .await
        {
            None => break Ok(()),
            Some(Err(error)) => break Err(error),
            Some(Ok(next)) => next,
        };
        let (ctx, fatal) = (Arc::clone(&ctx), fatal.clone());
        in_flight.spawn(async move {
            let kept_alive = delivery.keep_alive();
            let outcome = prepare_one(&ctx, &delivery).await;
            drop(kept_alive);
            fatal.check(ctx.settler.settle(delivery, outcome).await);
            drop(permit);
        });
    };

    in_flight.close();
    in_flight.wait().await;
    stopped.and(fatal.into_result())
}

async fn prepare_one(ctx: &Arc<Context>, delivery: &Delivery<ImageRef>) -> Result<(), TaskError> {
    ctx.settler.check_attempt(delivery.attempt())?;
    let image = delivery.message();
    let start = Instant::now();
    let bytes = ctx.source.fetch(image, ctx.max_bytes).await?;
    ctx.progress.add_time(Task::Fetch, start.elapsed());
    let length = bytes.len() as u64;
    ctx.progress.count_bytes(length);

    let progress = Arc::clone(&ctx.progress);
    let prepared = ctx
        .cpu_pool
        .run(move |preparer| prepare(preparer, &bytes, &progress))
        .await??;

    let tensor = PreparedImage {
        image: image.without_inline_bytes(),
        model: Arc::clone(&ctx.settler.model.name),
        pixels: prepared.pixels.into(),
        shape: prepared.shape,
        bytes: length,
        original: prepared.original,
        attempts: delivery.attempt(),
    };
    let id = message_id(image, &ctx.settler.model.name);
    ctx.output.publish(&id, tensor).await?; // returns once stored
    Ok(())
}

fn prepare(
    preparer: &mut Preparer,
    bytes: &[u8],
    progress: &Progress,
) -> Result<Prepared, TaskError> {
    progress.timed(Task::Decode, || preparer.decode(bytes))?;
    Ok(progress.timed(Task::Resize, || preparer.resize())?)
}
