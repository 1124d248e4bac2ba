use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::task::spawn_blocking;
use trommel_storage::StorageError;

use crate::part::PartRecord;
use crate::row::Row;
use crate::{Committed, JobRecord, JsonLines, Ledger, ResultSink, Runs, Summary};

/// Rows as JSON Lines on a stream, in order of completion. Cannot be resumed. Sinks that share a stream
/// write whole lines in turn.
pub struct StreamSink<W> {
    /// Absent during a commit, and after one whose future was dropped.
    out: Option<Arc<Mutex<W>>>,
    job: Arc<JobRecord>,
    ledger: Ledger,
}

impl<W: Write + Send + 'static> StreamSink<W> {
    /// Writes the rows of a job to `out`.
    pub fn new(out: Arc<Mutex<W>>, job: JobRecord) -> Self {
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
        let out = self.out.take().ok_or_else(lost)?;
        let written = spawn_blocking(move || {
            let mut stream = out.lock().unwrap_or_else(PoisonError::into_inner);
            JsonLines::write_rows(&mut *stream, &job, &rows)?;
            let flushed = stream.flush();
            flushed.map_err(|error| StorageError::stream("the output", error))?;
            drop(stream);
            Ok::<_, StorageError>((out, rows))
        });
        let (out, rows) = written.await.unwrap_or_else(|_| Err(lost()))?;
        self.out = Some(out);
        // A stream is unbounded, so only small state is kept.
        let new = rows.iter().map(|row| row.image.index);
        self.ledger.committed.extend(new);
        let counts = PartRecord::of(&rows);
        self.ledger.record.add(PartRecord {
            runs: Runs::default(),
            ..counts
        });
        Ok(Committed::of(given, given, None))
    }

    async fn finish(self: Box<Self>) -> Result<Summary, StorageError> {
        Ok(self.summary())
    }
}
