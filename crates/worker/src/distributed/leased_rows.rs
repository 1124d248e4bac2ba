//! The lease of a job and model, with its output.

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use trommel_sink::ResultSink;

use crate::WorkerError;
use crate::distributed::job_lease::JobLease;
use crate::rows::Reopen;

/// Opens the output of a job.
pub(crate) type Open =
    dyn Fn() -> BoxFuture<'static, Result<Box<dyn ResultSink>, WorkerError>> + Send + Sync;

/// Rows that are committed only while the lease is held.
pub(crate) struct LeasedRows {
    pub(crate) lease: JobLease,
    pub(crate) open: Arc<Open>,
}

#[async_trait]
impl Reopen for LeasedRows {
    fn is_held(&self) -> bool {
        self.lease.is_held()
    }

    async fn open(&self) -> Result<Box<dyn ResultSink>, WorkerError> {
        (self.open)().await
    }
}
