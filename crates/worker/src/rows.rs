//! Commits of a job that several sinks may serve.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::time::sleep;
use trommel_sink::ResultSink;
use trommel_storage::StorageErrorKind;
use trommel_types::Classification;

use crate::WorkerError;
use crate::fault::is_transient;

/// Longest time that a store may be unreachable before the job is left to another sink.
const PATIENCE: Duration = Duration::from_secs(60);

/// The lease of a job, and how to reopen its output.
#[async_trait]
pub(crate) trait Reopen: Send + Sync {
    /// Whether the lease is held.
    fn is_held(&self) -> bool;

    /// Opens the output, which reads what is committed.
    async fn open(&self) -> Result<Box<dyn ResultSink>, WorkerError>;
}

/// Makes rows durable and returns how many of them were new.
///
/// With a lease, rows are committed only while it is held. If another sink has taken the part
/// number, before or after this one's lease, or the answer to a commit was lost, the committed rows
/// are read again first.
pub(crate) async fn commit(
    sink: &mut Box<dyn ResultSink>,
    rows: Vec<Arc<Classification>>,
    shared: Option<&dyn Reopen>,
) -> Result<u64, WorkerError> {
    let Some(shared) = shared else {
        return Ok(sink.commit(rows).await?.rows);
    };
    let (start, before) = (Instant::now(), sink.committed().len());
    let mut wait = Duration::from_millis(100);
    loop {
        if !shared.is_held() {
            return Err(WorkerError::LeaseLost);
        }
        // The rows themselves are shared with their messages.
        match sink.commit(rows.clone()).await {
            Ok(_) => return Ok(sink.committed().len().saturating_sub(before)),
            Err(error) if error.kind() == StorageErrorKind::LostRace => {
                tracing::warn!(%error, "reading the committed rows again");
            }
            Err(error) if is_transient(&error) && start.elapsed() < PATIENCE => {
                tracing::warn!(%error, ?wait, "will be committed again");
                sleep(wait).await;
                wait = (2 * wait).min(Duration::from_secs(5));
            }
            Err(error) => return Err(error.into()),
        }
        *sink = shared.open().await?;
    }
}
