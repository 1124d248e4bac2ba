//! The ingest role: lists the source and publishes one task an image.

use std::sync::{Arc, Mutex, PoisonError};

use futures::stream::{BoxStream, FuturesOrdered};
use futures::{FutureExt, StreamExt};
use tokio_util::sync::CancellationToken;
use tracing::field::Empty;
use tracing::{Instrument, warn_span};
use trommel_queue::Queue;
use trommel_storage::{Existing, Found, SourceCheck, StorageError};
use trommel_types::{ImageRef, Lane};

use crate::{Progress, WorkerError, trace};

/// What the ingest role works with, for one job.
pub(crate) struct Context {
    pub(crate) job: Arc<str>,
    pub(crate) lane: Lane,
    pub(crate) output: Arc<dyn Queue<ImageRef>>,
    /// Publishes that may be under way at once, at least 1.
    pub(crate) window: usize,
    pub(crate) place: Place,
    /// What the place is noted as, once the task of an image is stored.
    pub(crate) mark: fn(&Found) -> String,
    pub(crate) progress: Arc<Progress>,
}

/// How far a listing is. All images before `index` have their task stored, or are committed.
#[derive(Debug, Default)]
pub(crate) struct Place(Mutex<(u64, Option<String>)>);

impl Place {
    /// Behind the image `uri`, which was the last of `index`.
    pub(crate) fn at(index: u64, uri: Option<String>) -> Self {
        Self(Mutex::new((index, uri)))
    }

    /// The number of images passed, and the last one's uri.
    pub(crate) fn get(&self) -> (u64, Option<String>) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn pass(&self, uri: String) {
        let mut place = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *place = (place.0 + 1, Some(uri));
    }
}

/// The mark of images in a listing that repeats itself.
pub(crate) fn uri_of(found: &Found) -> String {
    found.uri.clone()
}

/// Which images of a listing still need a row, and of which index.
pub(crate) enum Choice {
    /// All that are not committed, by their places in the listing.
    Resume(Box<SourceCheck>),
    /// Those that have no row yet, whatever its index.
    Extend(Existing),
}

impl Choice {
    /// Whether the image at this place of the listing counts as one of the job's, and the index of
    /// the row to make.
    fn choose(&mut self, place: u64, found: &Found) -> Result<(bool, Option<u64>), StorageError> {
        Ok(match self {
            Self::Resume(check) => {
                let committed = check.observe(place, &found.uri)?;
                (true, Some(place).filter(|_| !committed))
            }
            Self::Extend(existing) => {
                let index = existing.index_for(found);
                (index.is_some(), index)
            }
        })
    }

    fn finish(self, listed: u64) -> Result<(), StorageError> {
        match self {
            Self::Resume(check) => check.finish(listed),
            Self::Extend(_) => Ok(()),
        }
    }
}

/// Publishes a task for every image of `listing`, which begins at the context's place, that is not
/// committed yet, in order, then stores the total. Stops early, with no total, when `shutdown`
/// fires.
///
/// `choice` holds what earlier runs have committed.
///
/// # Errors
/// When the source cannot be listed, or does not list what it listed before.
pub(crate) async fn run(
    ctx: Arc<Context>,
    mut listing: BoxStream<'static, Result<Found, StorageError>>,
    mut choice: Choice,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let (mut place, _) = ctx.place.get();
    let mut publishing = FuturesOrdered::new();
    loop {
        let next = async {
            if publishing.len() >= ctx.window {
                return Step::Stored(publishing.next().await);
            }
            tokio::select! {
                biased;
                stored = publishing.next(), if !publishing.is_empty() => Step::Stored(stored),
                found = listing.next() => Step::Listed(found),
            }
        };
        match shutdown.run_until_cancelled(next).await {
            None => return Ok(()),
            Some(Step::Stored(stored)) => ctx.place.pass(stored.transpose()?.unwrap_or_default()),
            Some(Step::Listed(Some(found))) => {
                let found = found?;
                let (counts, index) = choice.choose(place, &found)?;
                if counts {
                    ctx.progress.count_listed();
                }
                publishing.push_back(publish(&ctx, index, found).boxed());
                place += 1;
            }
            Some(Step::Listed(None)) => break,
        }
    }
    while let Some(stored) = match shutdown.run_until_cancelled(publishing.next()).await {
        None => return Ok(()),
        Some(stored) => stored.transpose()?,
    } {
        ctx.place.pass(stored);
    }
    choice.finish(place)?;
    ctx.progress.listing_ended();
    Ok(())
}

enum Step {
    Stored(Option<Result<String, WorkerError>>),
    Listed(Option<Result<Found, StorageError>>),
}

/// Publishes the task of an image if it is to have a row; gives its mark.
async fn publish(ctx: &Context, index: Option<u64>, found: Found) -> Result<String, WorkerError> {
    let mark = (ctx.mark)(&found);
    let Some(index) = index else {
        return Ok(mark);
    };
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
    let id = format!("{}/{index}", ctx.job);
    // Here the trace of an image begins.
    let span = trace::named(warn_span!("ingest.image", image_id = id, trace_id = Empty));
    let published = ctx.output.publish(&id, image).instrument(span);
    published.await?; // waits while the queue is full
    Ok(mark)
}
