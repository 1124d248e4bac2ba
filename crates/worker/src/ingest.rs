//! The ingest role: lists the source and publishes one task an image.

use std::sync::{Arc, Mutex, PoisonError};

use futures::stream::{BoxStream, FuturesOrdered};
use futures::{FutureExt, StreamExt};
use tokio_util::sync::CancellationToken;
use trommel_queue::Queue;
use trommel_storage::{Found, SourceCheck, StorageError};
use trommel_types::{ImageRef, Lane};

use crate::{Progress, WorkerError};

/// What the ingest role works with, for one job.
pub(crate) struct Context {
    pub(crate) job: Arc<str>,
    pub(crate) lane: Lane,
    pub(crate) output: Arc<dyn Queue<ImageRef>>,
    /// Publishes that may be under way at once, at least 1.
    pub(crate) window: usize,
    pub(crate) place: Place,
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

/// Publishes a task for every image of `listing`, which begins at the context's place, that is not
/// committed yet, in order, then stores the total. Stops early, with no total, when `shutdown`
/// fires.
///
/// `check` holds what earlier runs have committed.
///
/// # Errors
/// When the source cannot be listed, or does not list what it listed before.
pub(crate) async fn run(
    ctx: Arc<Context>,
    mut listing: BoxStream<'static, Result<Found, StorageError>>,
    mut check: SourceCheck,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let (mut index, _) = ctx.place.get();
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
                let committed = check.observe(index, &found.uri)?;
                ctx.progress.count_listed();
                publishing.push_back(publish(&ctx, index, found, committed).boxed());
                index += 1;
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
    check.finish(index)?;
    ctx.progress.listing_ended();
    Ok(())
}

enum Step {
    Stored(Option<Result<String, WorkerError>>),
    Listed(Option<Result<Found, StorageError>>),
}

/// Publishes the task of an image unless its row is committed; gives its uri.
async fn publish(
    ctx: &Context,
    index: u64,
    found: Found,
    committed: bool,
) -> Result<String, WorkerError> {
    let uri = found.uri.clone();
    if committed {
        return Ok(uri);
    }
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
    ctx.output.publish(&id, image).await?; // waits while the queue is full
    Ok(uri)
}
