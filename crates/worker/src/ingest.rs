//! The ingest role: lists the source and publishes one task per image.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, FuturesOrdered};
use futures::{FutureExt, StreamExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::field::Empty;
use tracing::{Instrument, debug_span};
use trommel_queue::{Queue, QueueErrorKind};
use trommel_sink::{Existing, FailedImage, SourceCheck};
use trommel_source::Found;
use trommel_storage::StorageError;
use trommel_types::{Content, ErrorKind, Failure, ImageRef, Lane};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::again::{Again, Late};
use crate::job::ModelId;
use crate::settle::{Settler, Subject};
use crate::{Progress, WorkerError, trace};

/// About how many images are listed ahead of an announcement.
const CHUNK: usize = 4096;

/// How many tasks may wait in memory until the listing is known to be the same as before.
const FAR: u64 = 1 << 16;

/// The context of the ingest role, for one job.
pub(crate) struct Context {
    pub(crate) job: Arc<str>,
    pub(crate) lane: Lane,
    pub(crate) output: Arc<dyn Queue<ImageRef>>,
    /// Most concurrent publishes, at least 1.
    pub(crate) window: usize,
    pub(crate) start: Start,
    pub(crate) place: Place,
    pub(crate) checkpoint: Arc<dyn Checkpoint>,
    /// The mark recorded once an image's task is stored; see [`no_mark`].
    pub(crate) mark: fn(&Found) -> String,
    /// Ends an image without a task, because it does not fit into a message or no longer exists,
    /// with a failed row for each model.
    pub(crate) fails: Option<(Settler, Vec<ModelId>)>,
    pub(crate) progress: Arc<Progress>,
}

/// Where a listing starts, and what it has to repeat.
#[derive(Debug, Clone, Default)]
pub(crate) struct Start {
    /// The index of the first listed image.
    pub(crate) first: u64,
    /// Images before this index have their task stored.
    pub(crate) stored: u64,
    /// The announcement of an earlier listing: the hash of the uris before an index.
    pub(crate) announced: Announced,
    /// A suffix of each task's id, so that a lost message can be sent again.
    pub(crate) generation: String,
    /// Whether the source was compared with what was announced; see [`check`].
    pub(crate) is_checked: bool,
}

impl Start {
    /// Whether so many images are announced and not stored that their tasks should not wait in memory.
    pub(crate) fn is_far_behind(&self) -> bool {
        self.announced.index.saturating_sub(self.stored) > FAR
    }
}

/// A position in a listing, with a summary of what precedes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Announced {
    /// Number of images before it.
    pub index: u64,
    /// The running hash of their uris: XXH3 of each uri, seeded with the hash of those before it.
    pub hash: u64,
}

impl Announced {
    /// The place behind an image. `adds` for jobs that skip images with rows, in the version that they
    /// have: a changed image may need more or fewer rows.
    fn pass(self, found: &Found, adds: bool) -> Self {
        let mut hash = xxh3_64_with_seed(found.uri.as_bytes(), self.hash);
        if let (true, Some(etag)) = (adds, &found.etag) {
            hash = xxh3_64_with_seed(etag.as_bytes(), hash);
        }
        Self {
            index: self.index + 1,
            hash,
        }
    }

    fn changed(self) -> WorkerError {
        WorkerError::SourceChanged { listed: self.index }
    }
}

/// Where the position of a listing is recorded, so that another process can continue it.
#[async_trait]
pub(crate) trait Checkpoint: Send + Sync {
    /// Records that the tasks of all images before this position may be published. Called before
    /// the first of them is.
    async fn announce(&self, to: Announced) -> Result<(), WorkerError>;

    /// Waits until the job has room for more images in flight, and returns how many, at least 1.
    async fn room(&self) -> Result<u64, WorkerError>;
}

/// The checkpoint of a run whose rows are not stored: its queues are bounded.
pub(crate) struct NoCheckpoint;

#[async_trait]
impl Checkpoint for NoCheckpoint {
    async fn announce(&self, _: Announced) -> Result<(), WorkerError> {
        Ok(())
    }

    async fn room(&self) -> Result<u64, WorkerError> {
        Ok(u64::MAX)
    }
}

/// The position of a listing. The tasks of all images before `index` are stored, or the images are
/// committed.
#[derive(Debug, Default)]
pub(crate) struct Place(Mutex<(u64, String)>);

impl Place {
    /// Behind `index` images.
    pub(crate) fn at(index: u64) -> Self {
        Self(Mutex::new((index, String::new())))
    }

    /// The number of processed images, and the mark of the last one.
    pub(crate) fn get(&self) -> (u64, String) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn reach(&self, index: u64, mark: Option<String>) {
        let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        place.0 = index;
        if let Some(mark) = mark {
            place.1 = mark;
        }
    }
}

/// The mark in a repeatable listing, where the index is sufficient.
pub(crate) fn no_mark(_: &Found) -> String {
    String::new()
}

/// Which listed images need a row, and with which index.
pub(crate) enum Choice {
    /// All that lack a row in any output, by their positions in the listing.
    Resume(Vec<SourceCheck>),
    /// Those without a row, regardless of its index.
    Extend(Existing),
    /// Those with a failed row.
    Retry(Box<Again>),
    /// A random sample of another choice, by the index of the row.
    Sample(Box<Choice>, Share),
}

/// A fixed share of all indices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Share(pub(crate) f64);

impl Share {
    pub(crate) fn holds(self, index: u64) -> bool {
        // A different seed from other choices by hash.
        let hash = xxh3_64_with_seed(&index.to_le_bytes(), 0x6361_7363_6164_6531);
        (hash as f64) < self.0 * u64::MAX as f64
    }
}

impl Choice {
    /// Whether the image at this position belongs to the job, with the index of the row to make, if
    /// it needs one.
    fn choose(
        &mut self,
        place: u64,
        found: Found,
    ) -> Result<(bool, Option<(u64, Found)>), StorageError> {
        Ok(match self {
            Self::Resume(checks) => {
                let mut needed = checks.is_empty();
                for check in checks {
                    needed |= !check.observe(place, &found.uri)?;
                }
                (true, needed.then_some((place, found)))
            }
            Self::Extend(existing) => {
                let index = existing.index_for(&found.uri, found.etag.as_deref());
                (index.is_some(), index.map(|index| (index, found)))
            }
            Self::Retry(again) => {
                let chosen = again.observe(place, found)?;
                (chosen.is_some(), chosen)
            }
            // An image with a row counts as done.
            Self::Sample(choice, share) => match choice.choose(place, found)? {
                (counts, Some((index, found))) if share.holds(index) => {
                    (counts, Some((index, found)))
                }
                (_, Some(_)) => (false, None),
                (counts, None) => (counts, None),
            },
        })
    }

    /// Checks the remainder after the whole listing was observed.
    ///
    /// # Errors
    /// If images beyond it are committed.
    fn finish(&mut self, listed: u64) -> Result<impl Iterator<Item = Late> + use<>, StorageError> {
        let choice = match self {
            Self::Sample(choice, _) => &mut **choice,
            choice => choice,
        };
        let late = match choice {
            Self::Resume(checks) => {
                let mut checks = std::mem::take(checks).into_iter();
                checks.try_for_each(|check| check.finish(listed))?;
                None
            }
            Self::Extend(_) | Self::Sample(..) => None,
            Self::Retry(again) => Some(std::mem::take(again).finish()),
        };
        Ok(late.into_iter().flatten())
    }
}

/// Publishes a task for every uncommitted image of `listing`, in order, then stores the total.
/// Stops early, without a total, when `shutdown` fires.
///
/// `choice` has the images committed by earlier runs. What an earlier listing has announced is
/// published only after this one has listed the same.
///
/// # Errors
/// If the source cannot be listed, or its listing has changed.
pub(crate) async fn run(
    ctx: Arc<Context>,
    mut listing: BoxStream<'static, Result<Found, StorageError>>,
    mut choice: Choice,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let all = list(&ctx, &mut listing, &mut choice);
    let Some(listed) = shutdown.run_until_cancelled(all).await else {
        return Ok(());
    };
    listed?;
    ctx.progress.listing_ended();
    Ok(())
}

/// Compares a listing from its start with what was announced. `adds` as for [`Announced::pass`].
///
/// # Errors
/// When the source cannot be listed, or lists something else.
pub(crate) async fn check(
    mut listing: BoxStream<'static, Result<Found, StorageError>>,
    start: &Start,
    adds: bool,
) -> Result<(), WorkerError> {
    let mut at = Announced {
        index: start.first,
        hash: 0,
    };
    while at.index < start.announced.index {
        let found = listing.next().await;
        at = at.pass(&found.ok_or(start.announced.changed())??, adds);
    }
    match at == start.announced {
        true => Ok(()),
        false => Err(start.announced.changed()),
    }
}

/// Lists all of it. Cancel-safe: the next listing publishes images that were announced but not
/// published.
async fn list(
    ctx: &Context,
    listing: &mut BoxStream<'static, Result<Found, StorageError>>,
    choice: &mut Choice,
) -> Result<(), WorkerError> {
    // While one chunk is published, the next one is announced.
    let (announced, chunks) = mpsc::channel(1);
    let (end, ()) = tokio::try_join!(
        announce_all(ctx, listing, choice, announced),
        publish_all(ctx, chunks)
    )?;
    let mut publishing = Publishing::new(ctx);
    for late in choice.finish(end)? {
        ctx.progress.count_listed();
        match late {
            Late::Moved(index, found) => publishing.publish(vec![(end, index, found)]).await?,
            Late::Gone(image, failure) => fail(ctx, image, failure).await?,
        }
    }
    publishing.finish().await?;
    ctx.place.reach(end, None);
    Ok(())
}

/// Announces all images, in order, and then sends those that need a row. Lists ahead while earlier
/// images are published, so that one announcement covers many. Returns the number of images.
async fn announce_all(
    ctx: &Context,
    listing: &mut BoxStream<'static, Result<Found, StorageError>>,
    choice: &mut Choice,
    announced: mpsc::Sender<Vec<Task>>,
) -> Result<u64, WorkerError> {
    let mut ready = listing.ready_chunks(CHUNK);
    let expected = ctx.start.announced;
    let mut at = Announced {
        index: ctx.start.first,
        hash: 0,
    };
    let (mut passed, mut tasks, mut is_all) = (at.index, Vec::new(), false);
    loop {
        let is_known = ctx.start.is_checked || at.index >= expected.index;
        let is_ahead = is_known && at.index - passed >= CHUNK as u64;
        tokio::select! {
            biased;
            chunk = ready.next(), if !(is_all || is_ahead) => {
                is_all = chunk.is_none();
                for found in chunk.into_iter().flatten() {
                    at = observe(ctx, choice, at, found?, &mut tasks)?;
                }
            }
            room = announced.reserve(), if is_known && at.index > passed => {
                if at.index > expected.index {
                    ctx.checkpoint.announce(at).await?;
                }
                passed = at.index;
                if let Ok(room) = room {
                    room.send(std::mem::take(&mut tasks));
                }
            }
            else => break,
        }
    }
    if at.index < expected.index {
        return Err(expected.changed());
    }
    Ok(at.index)
}

/// Passes an image of the listing, and adds its task if it needs a row.
fn observe(
    ctx: &Context,
    choice: &mut Choice,
    at: Announced,
    found: Found,
    tasks: &mut Vec<Task>,
) -> Result<Announced, WorkerError> {
    let (place, is_stored) = (at.index, at.index < ctx.start.stored);
    let at = at.pass(&found, matches!(choice, Choice::Extend(_)));
    let (counts, chosen) = choice.choose(place, found)?;
    if counts {
        ctx.progress.count_listed();
    }
    let expected = ctx.start.announced;
    if at.index == expected.index && at.hash != expected.hash {
        return Err(expected.changed());
    }
    if let (Some((index, found)), false) = (chosen, is_stored) {
        tasks.push((at.index, index, found));
    }
    Ok(at)
}

async fn publish_all(
    ctx: &Context,
    mut chunks: mpsc::Receiver<Vec<Task>>,
) -> Result<(), WorkerError> {
    let mut publishing = Publishing::new(ctx);
    while let Some(tasks) = publishing.alongside(chunks.recv()).await? {
        publishing.publish(tasks).await?;
    }
    publishing.finish().await
}

/// Publishes the failed rows of an image that is gone.
async fn fail(ctx: &Context, image: FailedImage, failure: Failure) -> Result<(), WorkerError> {
    let Some((settler, models)) = &ctx.fails else {
        return Ok(());
    };
    let image = ImageRef {
        job: Arc::clone(&ctx.job),
        index: image.index,
        lane: ctx.lane,
        uri: image.uri,
        content: Content::Whole,
        etag: image.etag,
        size: None,
        columns: image.columns,
    };
    for model in models {
        let row = image.failed(failure.clone(), 1, model);
        settler.publish(row).await?;
    }
    Ok(())
}

/// An image whose task is stored.
struct Stored {
    /// The position after it.
    place: u64,
    mark: String,
}

/// An image that needs a row: the place behind it in the listing, and the index of the row.
type Task = (u64, u64, Found);

/// Tasks on their way to the queue, in order.
struct Publishing<'a> {
    ctx: &'a Context,
    under_way: FuturesOrdered<BoxFuture<'a, Result<Stored, WorkerError>>>,
    /// Images that may be published before the next check of the room.
    room: u64,
}

impl<'a> Publishing<'a> {
    fn new(ctx: &'a Context) -> Self {
        Self {
            ctx,
            under_way: FuturesOrdered::new(),
            room: 0,
        }
    }

    /// Does `work` while publishes continue.
    async fn alongside<T>(&mut self, work: impl Future<Output = T>) -> Result<T, WorkerError> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                Some(stored) = self.under_way.next(), if !self.under_way.is_empty() => {
                    self.pass(stored?);
                }
                done = &mut work => return Ok(done),
            }
        }
    }

    async fn publish(&mut self, tasks: Vec<Task>) -> Result<(), WorkerError> {
        for (place, index, found) in tasks {
            while self.under_way.len() >= self.ctx.window {
                self.pass_one().await?;
            }
            if self.room == 0 {
                let checkpoint = Arc::clone(&self.ctx.checkpoint);
                self.room = self.alongside(checkpoint.room()).await??;
            }
            self.room -= 1;
            let ctx = self.ctx;
            let stored = async move {
                let mark = (ctx.mark)(&found);
                publish(ctx, index, found).await?;
                Ok(Stored { place, mark })
            };
            self.under_way.push_back(stored.boxed());
        }
        Ok(())
    }

    async fn finish(mut self) -> Result<(), WorkerError> {
        while !self.under_way.is_empty() {
            self.pass_one().await?;
        }
        Ok(())
    }

    async fn pass_one(&mut self) -> Result<(), WorkerError> {
        if let Some(stored) = self.under_way.next().await {
            self.pass(stored?);
        }
        Ok(())
    }

    fn pass(&self, stored: Stored) {
        self.ctx.place.reach(stored.place, Some(stored.mark));
    }
}

/// Publishes the task of an image.
async fn publish(ctx: &Context, index: u64, found: Found) -> Result<(), WorkerError> {
    let image = ImageRef {
        job: Arc::clone(&ctx.job),
        index,
        lane: ctx.lane,
        uri: found.uri,
        content: found.content,
        etag: found.etag,
        size: found.size,
        columns: found.columns,
    };
    let id = format!("{}/{index}{}", ctx.job, ctx.start.generation);
    // Here the trace of an image begins.
    let span = trace::named(debug_span!("ingest.image", image_id = id, trace_id = Empty));
    let Some((settler, models)) = &ctx.fails else {
        let published = ctx.output.publish(&id, image).instrument(span);
        published.await?; // waits while the queue is full
        return Ok(());
    };
    match ctx
        .output
        .publish(&id, image.clone())
        .instrument(span)
        .await
    {
        Ok(_) => {}
        Err(error) if error.kind() == QueueErrorKind::TooLarge => {
            let failure = Failure {
                kind: ErrorKind::TooLarge,
                error: error.to_string(),
            };
            for model in models {
                settler
                    .publish(image.failed(failure.clone(), 1, model))
                    .await?;
            }
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
