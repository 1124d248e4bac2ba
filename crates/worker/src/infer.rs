//! The infer role: hands tensors to the engine, which batches them, and publishes the answers.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use trommel_infer::Engine;
use trommel_queue::Delivery;
use trommel_types::{Outcome, PreparedImage};

use crate::WorkerError;
use crate::disposition::TaskError;
use crate::fatal::Fatal;
use crate::intake::Intake;
use crate::settle::{PreparedImageExt, Settler};

/// What the infer role works with.
pub(crate) struct Context {
    pub(crate) intake: Intake<PreparedImage>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) settler: Settler,
}

/// Classifies images until `shutdown` fires, then finishes the ones already started.
///
/// The engine forms batches of whatever is in hand. A delivery is settled only after its answer is
/// stored by the results queue.
pub(crate) async fn run(ctx: Arc<Context>, shutdown: CancellationToken) -> Result<(), WorkerError> {
    let (in_flight, fatal) = (TaskTracker::new(), Fatal::new(&shutdown));

    let stopped = loop {
        // Nothing more to come for now: what is in hand need not wait for a full batch.
        let next = ctx.intake.next_delivery(|| ctx.engine.flush());
        let (delivery, permit) = match fatal.token().run_until_cancelled(next).await {
            None => break Ok(()),
            Some(Err(error)) => break Err(error),
            Some(Ok(next)) => next,
        };
        let (ctx, fatal) = (Arc::clone(&ctx), fatal.clone());
        in_flight.spawn(async move {
            let kept_alive = delivery.keep_alive();
            let outcome = classify_one(&ctx, &delivery).await;
            drop(kept_alive);
            fatal.check(match outcome {
                // The device is gone: the process ends and redelivery does the rest.
                Err(TaskError::Infer(error)) if error.is_fatal() => Err(error.into()),
                outcome => ctx.settler.settle(delivery, outcome).await,
            });
            drop(permit);
        });
    };

    in_flight.close();
    in_flight.wait().await;
    stopped.and(fatal.into_result())
}

async fn classify_one(ctx: &Context, delivery: &Delivery<PreparedImage>) -> Result<(), TaskError> {
    ctx.settler.check_attempt(delivery.attempt())?;
    let image = delivery.message();
    let scores = ctx.engine.classify(image.pixels.clone()).await?;
    let answer = image.outcome(Outcome::Ok(scores), delivery.attempt(), &ctx.settler.model);
    ctx.settler.publish(answer).await?; // returns once stored
    Ok(())
}
