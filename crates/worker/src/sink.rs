//! The sink role: gathers rows, commits them as parts, and only then acknowledges.

use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};
use trommel_queue::{Delivery, Disposition, KeepAlive, Queue};
use trommel_types::Classification;

use crate::metrics::{self, InFlight};
use crate::rows::Rows;
use crate::settle::expired;
use crate::trace::image_span;
use crate::{Progress, Role, SinkConfig, WorkerError};

/// Deliveries that are settled side by side; each may wait for the broker's word.
const SETTLES: usize = 256;
/// Longest time for settling the deliveries of a part. Those that are left come again.
const SETTLING: Duration = Duration::from_secs(30);

/// What the sink role works with.
pub(crate) struct Context {
    pub(crate) intake: Arc<dyn Queue<Classification>>,
    pub(crate) config: SinkConfig,
    pub(crate) max_failure_rate: Option<f64>,
    pub(crate) progress: Arc<Progress>,
}

/// Commits rows until all of the job are committed or `shutdown` fires, then commits what it
/// holds. Returns `rows` for the last word on the job.
///
/// A delivery is settled only after the part that holds its row is durable. A row that comes a
/// second time is dropped by `rows` and its delivery settled all the same.
pub(crate) async fn run<R: Rows>(
    ctx: Arc<Context>,
    mut rows: R,
    shutdown: CancellationToken,
) -> Result<R, WorkerError> {
    let mut part = OpenPart::default();
    let stopped = loop {
        if part.is_due(&ctx.config) || ctx.is_last(&rows, &part) {
            rows = commit_part(&ctx, rows, &mut part).await?;
        }
        if ctx.progress.total() == Some(rows.committed()) {
            break Ok(());
        }
        match shutdown
            .run_until_cancelled(ctx.next_deliveries(&part))
            .await
        {
            None => break Ok(()),
            Some(Err(error)) => break Err(error),
            Some(Ok(deliveries)) => part.add(deliveries, &ctx.progress),
        }
        if let Err(hopeless) = ctx.check_failures() {
            break Err(hopeless);
        }
    };

    // On every exit, so that a stop never throws away an answer that is in hand.
    rows = commit_part(&ctx, rows, &mut part).await?;
    stopped.map(|()| rows)
}

/// Makes the rows of `part` durable, settles their deliveries, and leaves it empty.
async fn commit_part<R: Rows>(
    ctx: &Context,
    mut rows: R,
    part: &mut OpenPart,
) -> Result<R, WorkerError> {
    let OpenPart { held, .. } = std::mem::take(part);
    if held.is_empty() {
        return Ok(rows);
    }
    let batch: Vec<_> = held
        .iter()
        .map(|held| Arc::clone(held.delivery.message()))
        .collect();
    let start = Instant::now();
    let (rows, committed) = tokio::task::spawn_blocking(move || {
        let committed = rows.commit(batch);
        (rows, committed)
    })
    .await
    .map_err(|_| WorkerError::Panicked { what: "the sink" })?;
    ctx.progress
        .add_time(crate::progress::Task::Commit, start.elapsed());
    ctx.progress.count_committed(committed?);
    let settled = stream::iter(held).map(async |held: Held| {
        metrics::settled(Role::Sink.as_str(), &Disposition::Done);
        // One that comes too late is repeated, and its row dropped as committed.
        let settled = held.delivery.settle(Disposition::Done);
        settled.instrument(held.span).await.or_else(expired)
    });
    // A broker that crashed may have forgotten what it delivered, and then answers none of them.
    let settled = settled.buffer_unordered(SETTLES).try_collect::<()>();
    match timeout(SETTLING, settled).await {
        Ok(settled) => settled?,
        Err(_) => tracing::warn!(
            "the broker does not confirm what is committed; it comes again and is dropped"
        ),
    }
    Ok(rows)
}

/// A row that waits for its part.
struct Held {
    delivery: Delivery<Classification>,
    span: Span,
    _in_flight: InFlight,
    _kept_alive: KeepAlive,
}

/// The rows that the next part will hold.
#[derive(Default)]
struct OpenPart {
    held: Vec<Held>,
    since: Option<Instant>,
}

impl OpenPart {
    fn add(&mut self, deliveries: Vec<Delivery<Classification>>, progress: &Progress) {
        for delivery in deliveries {
            self.since.get_or_insert_with(Instant::now);
            progress.count_outcome(delivery.message());
            self.held.push(Held {
                span: image_span!("sink.image", delivery, &delivery.message().image),
                _in_flight: metrics::delivered(Role::Sink.as_str(), &delivery),
                _kept_alive: delivery.keep_alive(),
                delivery,
            });
        }
    }

    fn is_due(&self, config: &SinkConfig) -> bool {
        self.held.len() >= config.part_rows.get()
            || self
                .since
                .is_some_and(|since| since.elapsed() >= config.part_interval)
    }
}

impl Context {
    /// Waits for rows, but no longer than the open part may wait. Cancel-safe.
    async fn next_deliveries(
        &self,
        part: &OpenPart,
    ) -> Result<Vec<Delivery<Classification>>, WorkerError> {
        // Short enough to notice that the listing has ended without a further row.
        let wait = Instant::now() + Duration::from_millis(50);
        let until = part
            .since
            .map_or(wait, |since| wait.min(since + self.config.part_interval));
        let room = self
            .config
            .part_rows
            .get()
            .saturating_sub(part.held.len())
            .clamp(1, 256);
        let wait = until.saturating_duration_since(Instant::now());
        Ok(self.intake.pull(room, wait).await?)
    }

    /// Whether the open part holds the last rows of the job.
    fn is_last<R: Rows>(&self, rows: &R, part: &OpenPart) -> bool {
        let held = part.held.len() as u64;
        held > 0
            && self
                .progress
                .total()
                .is_some_and(|total| rows.committed() + held >= total)
    }

    /// Ends a hopeless job: the failures so far could hardly come from a share that is allowed.
    ///
    /// The share is of the images listed, not of those finished: what fails does so early, while
    /// images that succeed are still on their way through the stages.
    fn check_failures(&self) -> Result<(), WorkerError> {
        let Some(limit) = self.max_failure_rate else {
            return Ok(());
        };
        let failed = self.progress.failed();
        // While a resumed listing still passes what is committed, nothing can be said.
        let listed = self
            .progress
            .listed()
            .saturating_sub(self.progress.resumed());
        if listed < failed {
            return Ok(());
        }
        let all_known = self.progress.total() == Some(self.progress.finished());
        let share = failed as f64 / listed.max(1) as f64;
        if (all_known && share > limit) || wilson_lower_bound(failed, listed) > limit {
            return Err(WorkerError::TooManyFailures {
                failed,
                listed,
                limit,
            });
        }
        Ok(())
    }
}

/// Lower end of the 99.9 % Wilson score interval of a proportion (E. B. Wilson, 1927): the share
/// that `hits` of `trials` prove at the least.
fn wilson_lower_bound(hits: u64, trials: u64) -> f64 {
    if trials == 0 {
        return 0.0;
    }
    const Z: f64 = 3.29;
    let (hits, trials) = (hits as f64, trials as f64);
    let share = hits / trials;
    let centre = share + Z * Z / (2.0 * trials);
    let spread = Z * ((share * (1.0 - share) + Z * Z / (4.0 * trials)) / trials).sqrt();
    (centre - spread) / (1.0 + Z * Z / trials)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_failures_prove_nothing_and_many_do() {
        assert!(wilson_lower_bound(2, 2) < 0.2, "two of two may be bad luck");
        assert!(wilson_lower_bound(20, 20) > 0.2, "twenty of twenty are not");
        assert!(wilson_lower_bound(250, 1000) > 0.2);
        assert!(
            wilson_lower_bound(210, 1000) < 0.2,
            "within the noise of 0.2"
        );
        assert_eq!(wilson_lower_bound(0, 0), 0.0);
    }
}
