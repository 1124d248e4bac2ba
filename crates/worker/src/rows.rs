use std::io::Write;
use std::sync::Arc;

use trommel_storage::{JobRecord, JsonLines, ResultSink, StorageError, Summary};
use trommel_types::Classification;

use crate::WorkerError;

/// Where the sink's rows go. Blocking: called on a thread that may wait.
pub(crate) trait Rows: Send + 'static {
    /// Makes rows durable, drops those whose index is committed already, and returns how many
    /// were new.
    fn commit(&mut self, rows: Vec<Arc<Classification>>) -> Result<u64, WorkerError>;

    /// Rows of the job that are durable, those of earlier runs included.
    fn committed(&self) -> u64;
}

/// Rows of a job over the broker, which any sink may go on with.
pub(crate) trait JobRows: Rows {
    /// What is committed so far.
    fn summary(&self) -> Summary;

    /// Rows a second over the whole job, where that is what it was run for.
    fn rate(&self) -> Option<f64> {
        None
    }

    /// Ends a job whose rows are all committed.
    fn finish(self: Box<Self>) -> Result<Summary, WorkerError>;
}

/// Rows that are committed to an output.
pub(crate) struct CommittedRows(pub(crate) Box<dyn ResultSink>);

impl Rows for CommittedRows {
    fn commit(&mut self, rows: Vec<Arc<Classification>>) -> Result<u64, WorkerError> {
        // Nobody else holds the messages any more, so this moves them as a rule.
        let rows = rows.into_iter().map(Arc::unwrap_or_clone).collect();
        Ok(self.0.commit(rows)?.rows)
    }

    fn committed(&self) -> u64 {
        self.0.committed().len()
    }
}

impl JobRows for CommittedRows {
    fn summary(&self) -> Summary {
        self.0.summary()
    }

    fn finish(self: Box<Self>) -> Result<Summary, WorkerError> {
        Ok(self.0.finish()?)
    }
}

/// Rows as text on a stream, in the order they become known. Nothing is resumed.
pub(crate) struct StreamRows<W> {
    out: W,
    job: JobRecord,
    written: u64,
}

impl<W: Write + Send + 'static> StreamRows<W> {
    pub(crate) fn new(out: W, job: JobRecord) -> Self {
        Self {
            out,
            job,
            written: 0,
        }
    }
}

impl<W: Write + Send + 'static> Rows for StreamRows<W> {
    fn commit(&mut self, rows: Vec<Arc<Classification>>) -> Result<u64, WorkerError> {
        let rows: Vec<_> = rows.into_iter().map(Arc::unwrap_or_clone).collect();
        JsonLines::write_rows(&mut self.out, &self.job, &rows)?;
        self.out
            .flush()
            .map_err(|error| StorageError::stream("standard output", error))?;
        self.written += rows.len() as u64;
        Ok(rows.len() as u64)
    }

    fn committed(&self) -> u64 {
        self.written
    }
}
