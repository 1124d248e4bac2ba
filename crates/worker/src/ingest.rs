//! The ingest role: lists the source and publishes one task an image.

use std::sync::Arc;

use futures::StreamExt;
use tokio_util::sync::CancellationToken;
use trommel_queue::Queue;
use trommel_storage::{Found, Source, SourceCheck};
use trommel_types::ImageRef;

use crate::{Progress, WorkerError};

/// What the ingest role works with.
pub(crate) struct Context {
    pub(crate) job: Arc<str>,
    pub(crate) source: Arc<dyn Source>,
    pub(crate) output: Arc<dyn Queue<ImageRef>>,
    pub(crate) progress: Arc<Progress>,
}

/// Publishes a task for every image of the source that is not committed yet, in listing order,
/// then stores the total. Stops early, with no total, when `shutdown` fires.
///
/// `check` holds what earlier runs have committed.
///
/// # Errors
/// When the source cannot be listed, or does not list what it listed before.
pub(crate) async fn run(
    ctx: Arc<Context>,
    mut check: SourceCheck,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let mut listing = ctx.source.list();
    let mut index = 0;
    loop {
        let found = match shutdown.run_until_cancelled(listing.next()).await {
            None => return Ok(()),
            Some(None) => break,
            Some(Some(found)) => found?,
        };
        let committed = check.observe(index, &found.uri)?;
        ctx.progress.count_listed();
        if !committed
            && shutdown
                .run_until_cancelled(list_one(&ctx, index, found))
                .await
                .transpose()?
                .is_none()
        {
            return Ok(());
        }
        index += 1;
    }
    check.finish(index)?;
    ctx.progress.listing_ended();
    Ok(())
}

async fn list_one(ctx: &Context, index: u64, found: Found) -> Result<(), WorkerError> {
    let image = ImageRef {
        job: Arc::clone(&ctx.job),
        index,
        uri: found.uri,
        content: found.content,
        etag: found.etag,
        size: found.size,
        columns: found.columns,
    };
    let id = format!("{}/{index}", ctx.job);
    ctx.output.publish(&id, image).await?; // waits while the queue is full
    Ok(())
}
