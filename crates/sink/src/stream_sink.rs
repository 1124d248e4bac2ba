use std::io::Write;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::task::spawn_blocking;
use trommel_storage::StorageError;

use crate::row::Row;
use crate::{Committed, JobRecord, JsonLines, Ledger, ResultSink, Summary};

/// Rows as JSON Lines on a stream, in order of completion. Cannot be resumed.
pub struct StreamSink<W> {
    /// Absent during a commit, and after one whose future was dropped.
    out: Option<W>,
    job: Arc<JobRecord>,
    ledger: Ledger,
}

impl<W: Write + Send + 'static> StreamSink<W> {
    /// Writes the rows of a job to `out`.
    pub fn new(out: W, job: JobRecord) -> Self {
        Self {
            out: Some(out),
            job: Arc::new(job),
            ledger: Ledger::default(),
        }
    }
}

#[async_trait]
impl<W: Write + Send + 'static> ResultSink for StreamSink<W> {
    fn job(&self) -> &JobRecord {
        &self.job
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    async fn commit(&mut self, rows: Vec<Row>) -> Result<Committed, StorageError> {
        let (given, job) = (rows.len(), Arc::clone(&self.job));
        let lost = || StorageError::unavailable("a write to the output was broken off");
        let mut out = self.out.take().ok_or_else(lost)?;
        let written = spawn_blocking(move || {
            JsonLines::write_rows(&mut out, &job, &rows)?;
            out.flush()
                .map_err(|error| StorageError::stream("the output", error))?;
            Ok::<_, StorageError>((out, rows))
        });
        let (out, rows) = written.await.unwrap_or_else(|_| Err(lost()))?;
        self.out = Some(out);
        // A stream is unbounded, so only small state is kept.
        let new = rows.iter().map(|row| row.image.index);
        self.ledger.committed.extend(new);
        self.ledger.record.rows += given as u64;
        Ok(Committed::of(given, given, None))
    }

    async fn finish(self: Box<Self>) -> Result<Summary, StorageError> {
        Ok(self.summary())
    }
}
