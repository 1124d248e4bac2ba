//! The rows of a job under a lease.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use trommel_storage::{StorageErrorKind, Summary};
use trommel_types::Classification;

use crate::WorkerError;
use crate::distributed::lease::Lease;
use crate::error::is_transient;
use crate::rows::{JobRows, Rows};

/// Longest time that a store may be out of reach before the job is left to another sink.
const PATIENCE: Duration = Duration::from_secs(60);

/// Opens the output of a job. Blocking.
pub(crate) type Open = dyn Fn() -> Result<Box<dyn JobRows>, WorkerError> + Send + Sync;

/// Rows that are committed only while the lease is held.
///
/// A part number that another sink has taken, before or after this one's lease, makes it learn
/// anew what is committed and go on.
pub(crate) struct LeasedRows {
    rows: Box<dyn JobRows>,
    lease: Lease,
    open: Arc<Open>,
}

impl LeasedRows {
    pub(crate) fn new(rows: Box<dyn JobRows>, lease: Lease, open: Arc<Open>) -> Self {
        Self { rows, lease, open }
    }

    /// See [`JobRows::rate`].
    pub(crate) fn rate(&self) -> Option<f64> {
        self.rows.rate()
    }

    /// See [`JobRows::finish`].
    pub(crate) fn finish(self) -> Result<Summary, WorkerError> {
        self.rows.finish()
    }
}

impl Rows for LeasedRows {
    fn commit(&mut self, rows: Vec<Arc<Classification>>) -> Result<u64, WorkerError> {
        let (start, before) = (Instant::now(), self.rows.committed());
        let mut wait = Duration::from_millis(100);
        loop {
            if !self.lease.is_held() {
                return Err(WorkerError::LeaseLost);
            }
            match self.rows.commit(rows.clone()) {
                Ok(_) => return Ok(self.rows.committed() - before),
                Err(WorkerError::Storage(error)) if error.kind() == StorageErrorKind::LostRace => {
                    tracing::warn!(%error, "reading again what is committed");
                    self.rows = (self.open)()?;
                }
                Err(WorkerError::Storage(error))
                    if is_transient(&error) && start.elapsed() < PATIENCE =>
                {
                    tracing::warn!(%error, ?wait, "will be committed again");
                    sleep(wait);
                    wait = (2 * wait).min(Duration::from_secs(5));
                    // It may have been stored all the same.
                    self.rows = (self.open)()?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn committed(&self) -> u64 {
        self.rows.committed()
    }
}
