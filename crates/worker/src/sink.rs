//! The sink role: gathers rows, commits them as parts, and only then acknowledges.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use roaring::RoaringTreemap;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};
use trommel_queue::{Delivery, Disposition, KeepAlive, Queue, QueueError};
use trommel_sink::{FailureSummary, Ledger, ResultSink};
use trommel_types::{Classification, Outcome, Role};

use crate::metrics::{self, InFlight};
use crate::rows::{self, Reopen};
use crate::settle::expired;
use crate::trace::image_span;
use crate::{Progress, SinkConfig, WorkerError};

/// Deliveries settled concurrently; each may wait for the broker's ack.
const SETTLES: usize = 256;
/// Longest time to settle the deliveries of a part. The rest is redelivered.
const SETTLING: Duration = Duration::from_secs(30);

/// Longest time that a pull stays open while the sink holds no rows.
const IDLE: Duration = Duration::from_secs(5);

/// Number of parts after which the interval grows by one.
const PARTS_A_STEP: usize = 100;
/// Most intervals that a part waits.
const MOST_INTERVALS: u32 = 12;

/// Longest time that a part waits for rows. It grows with the number of parts, so that a slow model
/// leaves hundreds of parts and not thousands.
fn interval(config: &SinkConfig, parts: usize) -> Duration {
    let steps = u32::try_from(parts / PARTS_A_STEP).unwrap_or(u32::MAX);
    config.part_interval * steps.saturating_add(1).min(MOST_INTERVALS)
}

/// The context of the sink role.
pub(crate) struct Context {
    pub(crate) intake: Arc<dyn Queue<Classification>>,
    pub(crate) config: SinkConfig,
    pub(crate) held: Arc<HeldRows>,
    pub(crate) max_failure_rate: Option<f64>,
    pub(crate) progress: Arc<Progress>,
    /// What is committed so far.
    pub(crate) committed: watch::Sender<Counts>,
    /// The lease, if other sinks may serve the job too.
    pub(crate) shared: Option<Arc<dyn Reopen>>,
}

/// What all sinks of a job have committed. Repeats count once.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Counts {
    pub(crate) committed: u64,
    pub(crate) failures: BTreeMap<String, FailureSummary>,
}

impl Counts {
    pub(crate) fn of(ledger: &Ledger) -> Self {
        Self {
            committed: ledger.committed().len(),
            failures: ledger.failures().clone(),
        }
    }

    /// Failed rows.
    pub(crate) fn failed(&self) -> u64 {
        self.failures.values().map(|failure| failure.count).sum()
    }
}

/// Commits rows until all of the job are committed or `shutdown` fires, then commits those that it
/// holds. Returns the sink, so that its caller can finish the job.
///
/// A delivery is settled only after the part with its row is durable. `sink` drops repeated rows,
/// and their deliveries are settled too.
pub(crate) async fn run(
    ctx: Arc<Context>,
    mut sink: Box<dyn ResultSink>,
    shutdown: CancellationToken,
) -> Result<Box<dyn ResultSink>, WorkerError> {
    let mut part = OpenPart::default();
    let mut silence = Silence::default();
    ctx.committed.send_replace(Counts::of(sink.ledger()));
    let stopped = loop {
        let committed = sink.committed().len();
        let interval = interval(&ctx.config, sink.ledger().parts());
        if part.is_due(&ctx, interval) || ctx.is_last(committed, &part) {
            commit_part(&ctx, &mut sink, &mut part).await?;
        }
        if let Err(hopeless) = ctx.check_failures(&part, sink.committed()) {
            break Err(hopeless);
        }
        if ctx.progress.total() == Some(sink.committed().len()) {
            break Ok(());
        }
        match shutdown
            .run_until_cancelled(ctx.next_deliveries(&part, interval))
            .await
        {
            None => break Ok(()),
            Some(Err(error)) => break Err(error),
            Some(Ok(deliveries)) => {
                silence.hear(!deliveries.is_empty() || !part.held.is_empty());
                part.add(deliveries, &ctx);
            }
        }
        if let Some(shared) = &ctx.shared
            && ctx.progress.total().is_some()
            && silence.is_long()
        {
            // A sink that was suspended for longer than its lease may have committed the last rows
            // after this one read what is committed: then no more messages arrive.
            sink = shared.open().await?;
            ctx.committed.send_replace(Counts::of(sink.ledger()));
        }
    };

    // On every exit, so that a stop never discards an answer.
    commit_part(&ctx, &mut sink, &mut part).await?;
    stopped.map(|()| sink)
}

/// Makes the rows of `part` durable, settles their deliveries, and leaves it empty.
async fn commit_part(
    ctx: &Context,
    sink: &mut Box<dyn ResultSink>,
    part: &mut OpenPart,
) -> Result<(), WorkerError> {
    let OpenPart { held, .. } = std::mem::take(part);
    if held.is_empty() {
        return Ok(());
    }
    let batch: Vec<_> = held
        .iter()
        .map(|held| Arc::clone(held.delivery.message()))
        .collect();
    let given = batch.len() as u64;
    let bytes = batch.iter().filter_map(|row| row.bytes).sum();
    let start = Instant::now();
    let committed = rows::commit(sink, batch, ctx.shared.as_deref()).await;
    ctx.progress
        .add_time(crate::progress::Task::Commit, start.elapsed());
    let committed = committed?;
    ctx.progress.count_committed(committed, bytes);
    ctx.progress.count_repeated(given.saturating_sub(committed));
    ctx.committed.send_replace(Counts::of(sink.ledger()));
    let settled = stream::iter(held).map(Held::settle);
    // A broker that crashed may have forgotten its deliveries, and then acknowledges none of them.
    let settled = settled.buffer_unordered(SETTLES).try_collect::<()>();
    match timeout(SETTLING, settled).await {
        Ok(settled) => settled?,
        Err(_) => tracing::warn!(
            "the broker did not confirm the acks of committed rows; the rows will be redelivered and dropped"
        ),
    }
    Ok(())
}

/// Time without a row after which committed rows are read again; it doubles each time.
struct Silence {
    since: Instant,
    longest: Duration,
}

impl Default for Silence {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            longest: Duration::from_secs(10),
        }
    }
}

impl Silence {
    fn hear(&mut self, has_rows: bool) {
        if has_rows {
            *self = Self::default();
        }
    }

    /// Whether the time has passed; doubles the next one.
    fn is_long(&mut self) -> bool {
        let is_long = self.since.elapsed() >= self.longest;
        if is_long {
            self.since = Instant::now();
            self.longest = (2 * self.longest).min(Duration::from_secs(300));
        }
        is_long
    }
}

/// Bytes of the rows that wait for their parts in all sinks of a process.
#[derive(Debug)]
pub(crate) struct HeldRows {
    bytes: AtomicU64,
    most: u64,
}

impl HeldRows {
    /// At `most` bytes, each sink commits its rows.
    pub(crate) fn new(most: u64) -> Arc<Self> {
        let bytes = AtomicU64::new(0);
        Arc::new(Self { bytes, most })
    }

    fn is_full(&self) -> bool {
        self.bytes.load(Relaxed) >= self.most
    }
}

/// Bytes count as held while this lives.
struct HeldBytes {
    bytes: u64,
    held: Arc<HeldRows>,
}

impl HeldBytes {
    fn new(held: &Arc<HeldRows>, bytes: usize) -> Self {
        let (bytes, held) = (bytes as u64, Arc::clone(held));
        held.bytes.fetch_add(bytes, Relaxed);
        Self { bytes, held }
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.held.bytes.fetch_sub(self.bytes, Relaxed);
    }
}

/// A row waiting for its part.
struct Held {
    delivery: Delivery<Classification>,
    _bytes: HeldBytes,
    span: Span,
    _in_flight: InFlight,
    _kept_alive: KeepAlive,
}

impl Held {
    async fn settle(self) -> Result<(), QueueError> {
        metrics::settled(Role::Sink.as_str(), &Disposition::Done);
        // A late row is repeated, and dropped as committed.
        let settled = self.delivery.settle(Disposition::Done);
        settled.instrument(self.span).await.or_else(expired)
    }
}

/// The rows of the next part.
#[derive(Default)]
struct OpenPart {
    held: Vec<Held>,
    /// Number of failed rows among them.
    failed: RoaringTreemap,
    /// Approximate bytes of the rows.
    bytes: u64,
    since: Option<Instant>,
}

impl OpenPart {
    fn add(&mut self, deliveries: Vec<Delivery<Classification>>, ctx: &Context) {
        for delivery in deliveries {
            self.since.get_or_insert_with(Instant::now);
            ctx.progress.count_outcome(delivery.message());
            let row = delivery.message();
            let bytes = HeldBytes::new(&ctx.held, row.approx_bytes());
            self.bytes += bytes.bytes;
            if matches!(row.outcome, Outcome::Failed(_)) {
                self.failed.insert(row.image.index);
            }
            self.held.push(Held {
                span: image_span!("sink.image", delivery, &delivery.message().image),
                _in_flight: metrics::delivered(Role::Sink.as_str(), &delivery),
                _kept_alive: delivery.keep_alive(),
                _bytes: bytes,
                delivery,
            });
        }
    }

    fn is_due(&self, ctx: &Context, interval: Duration) -> bool {
        let config = &ctx.config;
        self.held.len() >= config.part_rows.get()
            || self.bytes >= config.part_bytes.get() as u64
            || (self.bytes > 0 && ctx.held.is_full())
            || self.since.is_some_and(|since| since.elapsed() >= interval)
    }
}

impl Context {
    /// Waits for rows, at most until the open part is due, or the listing ends, which may end the
    /// job. Cancel-safe.
    async fn next_deliveries(
        &self,
        part: &OpenPart,
        interval: Duration,
    ) -> Result<Vec<Delivery<Classification>>, WorkerError> {
        let now = Instant::now();
        let until = part.since.map_or(now + IDLE, |since| since + interval);
        let room = self
            .config
            .part_rows
            .get()
            .saturating_sub(part.held.len())
            .clamp(1, 256);
        let is_listing = self.progress.total().is_none();
        tokio::select! {
            pulled = self.intake.pull(room, until.saturating_duration_since(now)) => Ok(pulled?),
            () = self.progress.until_listed(), if is_listing => Ok(Vec::new()),
        }
    }

    /// Whether the open part has the last rows of the job.
    fn is_last(&self, committed: u64, part: &OpenPart) -> bool {
        let held = part.held.len() as u64;
        held > 0
            && self
                .progress
                .total()
                .is_some_and(|total| committed + held >= total)
    }

    /// Ends a hopeless job: its failures are significantly above the allowed share.
    ///
    /// The share refers to the images listed, not those finished: failures finish early, while
    /// successful images are still in flight. Repeats count once.
    fn check_failures(&self, part: &OpenPart, durable: &RoaringTreemap) -> Result<(), WorkerError> {
        let Some(limit) = self.max_failure_rate else {
            return Ok(());
        };
        let committed = durable.len();
        let failed = self.committed.borrow().failed() + (&part.failed - durable).len();
        // While a resumed listing is still skipping committed images, nothing can be concluded.
        let listed = self.progress.listed();
        if listed < committed {
            return Ok(());
        }
        let all_known = self.progress.total() == Some(committed);
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

/// Lower bound of the 99.9 % Wilson score interval of a proportion (E. B. Wilson, 1927), given
/// `hits` of `trials`.
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
mod tests;
