//! The infer role: hands tensors to the engine, which batches them, and publishes the answers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use trommel_infer::{Engine, Wanted};
use trommel_queue::Delivery;
use trommel_types::PreparedImage;

use crate::WorkerError;
use crate::fatal::Fatal;
use crate::fault::TaskError;
use crate::intake::Intake;
use crate::job::{ModelId, check_due};
use crate::settle::Settler;
use crate::trace::image_span;

/// The models of this process.
#[async_trait]
pub(crate) trait Engines: Send + Sync {
    /// The engine of a model for such rows; started first if necessary.
    ///
    /// # Errors
    /// Why the model cannot run.
    async fn engine(&self, model: &ModelId, wanted: &Wanted) -> Result<Arc<Engine>, WorkerError>;

    /// Closes the open batches: no more images arrive for a while.
    fn flush(&self);
}

/// The models of an embedded run, by name.
pub(crate) struct OwnEngines(pub(crate) BTreeMap<Arc<str>, Arc<Engine>>);

#[async_trait]
impl Engines for OwnEngines {
    async fn engine(&self, model: &ModelId, _: &Wanted) -> Result<Arc<Engine>, WorkerError> {
        let engine = self.0.get(&model.name).cloned();
        engine.ok_or_else(|| WorkerError::Model(format!("the job has no model {}", model.name)))
    }

    fn flush(&self) {
        self.0.values().for_each(|engine| engine.flush());
    }
}

/// The context of the infer role.
pub(crate) struct Context {
    pub(crate) intake: Intake<PreparedImage>,
    pub(crate) engines: Arc<dyn Engines>,
    pub(crate) settler: Settler,
}

/// Classifies images until `shutdown` fires, then finishes those already started.
///
/// The engine forms batches of the images in flight. A delivery is settled only after the results
/// queue has stored its answer.
pub(crate) async fn run(ctx: Arc<Context>, shutdown: CancellationToken) -> Result<(), WorkerError> {
    let (in_flight, fatal) = (TaskTracker::new(), Fatal::new(&shutdown));

    let stopped = loop {
        // Nothing more arrives for now: images in flight need not wait for a full batch.
        let next = ctx.intake.next_delivery(|| ctx.engines.flush());
        let (delivery, permit) = match fatal.token().run_until_cancelled(next).await {
            None => break Ok(()),
            Some(Err(error)) => break Err(error),
            Some(Ok(next)) => next,
        };
        let (ctx, fatal) = (Arc::clone(&ctx), fatal.clone());
        let span = image_span!("infer.image", delivery, &delivery.message().image);
        let work = async move {
            let kept_alive = delivery.keep_alive();
            let model = ModelId::of(delivery.message());
            let outcome = classify_one(&ctx, &delivery, &model).await;
            drop(kept_alive);
            let models = std::iter::once(&model);
            fatal.check(ctx.settler.settle(delivery, outcome, models).await);
            drop(permit);
        };
        in_flight.spawn(work.instrument(span));
    };

    ctx.intake.give_back().await;
    in_flight.close();
    in_flight.wait().await;
    stopped.and(fatal.into_result())
}

async fn classify_one(
    ctx: &Context,
    delivery: &Delivery<PreparedImage>,
    model: &ModelId,
) -> Result<(), TaskError> {
    let image = delivery.message();
    if ctx.settler.jobs.is_over(&image.image.job) {
        return Ok(()); // nobody waits for its row any more
    }
    ctx.settler.check_attempt(delivery).await?;
    check_due(image.due_at)?;
    let wanted = ctx.settler.jobs.rows(&image.image).await?;
    let engine = ctx.engines.engine(model, &wanted).await?;
    if !engine.is_prepared(&wanted) {
        // Embedding labels takes seconds; all images of the job wait for it together.
        let (engine, wanted) = (Arc::clone(&engine), Arc::clone(&wanted));
        let prepared = tokio::task::spawn_blocking(move || engine.prepare(&wanted)).await;
        prepared.map_err(|_| WorkerError::Panicked {
            what: "preparing labels",
        })??;
    }
    let asked = Instant::now();
    let answer = engine
        .answer(image.pixels.clone(), image.image.lane, &wanted)
        .await?;
    let settler = &ctx.settler;
    settler.progress.add_answer(asked.elapsed());
    settler
        .publish_answer(image, delivery.attempt(), model, answer)
        .await?; // returns once stored
    Ok(())
}
