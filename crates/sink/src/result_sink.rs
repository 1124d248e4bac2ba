use async_trait::async_trait;
use roaring::RoaringTreemap;
use trommel_storage::{StorageError, StorageErrorKind};

use crate::row::Row;
use crate::{
    EncodedPart, Existing, FailedImage, JobRecord, Ledger, Preconditions, SourceCheck, Summary,
};

/// Where the rows of one job are committed, each index once.
#[async_trait]
pub trait ResultSink: Send {
    /// The job, with id and run of the output it goes on with.
    fn job(&self) -> &JobRecord;

    /// What is committed.
    fn ledger(&self) -> &Ledger;

    /// Whether an earlier sink has begun this run.
    fn is_resumed(&self) -> bool {
        false
    }

    /// What was found about the store; never [`Preconditions::Probe`]. The job keeps it for its
    /// next sinks.
    fn preconditions(&self) -> Preconditions {
        Preconditions::Honoured
    }

    /// Makes rows durable at once, sorted by index. Rows whose index is committed already, or
    /// stands twice among them, are dropped; of the latter the first one stays.
    ///
    /// # Errors
    /// When the rows cannot be written; what was committed before is untouched. After
    /// [`LostRace`](trommel_storage::StorageErrorKind::LostRace) another sink has committed some of
    /// them, or this one has done so without hearing of it: open the output again to go on. The
    /// same holds for a commit that was dropped before its end.
    async fn commit(&mut self, rows: Vec<Row>) -> Result<Committed, StorageError>;

    /// Whether rows can be committed that are encoded as a part of Parquet.
    fn takes_encoded(&self) -> bool {
        false
    }

    /// Makes the rows of a part durable that is encoded already, all of them or none.
    ///
    /// # Errors
    /// As [`ResultSink::commit`], and where [`ResultSink::takes_encoded`] is false.
    async fn commit_encoded(&mut self, _: EncodedPart) -> Result<Committed, StorageError> {
        Err(StorageError::new(
            StorageErrorKind::InvalidDestination,
            "the output takes rows one by one, and no part of Parquet",
        ))
    }

    /// Of a run that adds rows to those of a job: the images that have rows which count. Alone, also those
    /// that this run has committed; else a listing that is repeated gives the same indices again.
    ///
    /// # Errors
    /// When the rows cannot be read.
    async fn existing(&mut self) -> Result<Existing, StorageError> {
        Ok(Existing::default())
    }

    /// Of a retry: the images whose failed rows it has not replaced yet, sorted by index.
    ///
    /// # Errors
    /// When the rows cannot be read, or are too many for one retry.
    async fn failed_images(&mut self) -> Result<Vec<FailedImage>, StorageError> {
        Ok(Vec::new())
    }

    /// Ends a job whose rows are all committed, and records its end; a retry also what the job comes
    /// to with its rows, which is [`Summary::whole`].
    ///
    /// # Errors
    /// [`Incomplete`](trommel_storage::StorageErrorKind::Incomplete) when an index is missing before
    /// the last one, [`LostRace`](trommel_storage::StorageErrorKind::LostRace) when another run has
    /// taken the output over, others when the end cannot be written. What is committed stays.
    async fn finish(self: Box<Self>) -> Result<Summary, StorageError>;

    /// Indices whose rows are durable.
    fn committed(&self) -> &RoaringTreemap {
        self.ledger().committed()
    }

    /// Of a retry: how many rows it replaces in all.
    fn wanted(&self) -> Option<u64> {
        self.ledger().wanted()
    }

    /// Compares a listing with what is committed now.
    fn source_check(&self) -> SourceCheck {
        SourceCheck::new(self.ledger().runs())
    }

    /// What is committed so far, by all sinks of the run.
    fn summary(&self) -> Summary {
        self.ledger().summary(self.job())
    }
}

/// What is at an output.
pub enum Opened {
    /// A job to work on: a new one, or one that was interrupted.
    Ready(Box<dyn ResultSink>),
    /// The same job, finished.
    Complete(Box<Summary>),
}

impl Opened {
    /// A sink in either case; to a finished job every row is a repeat.
    pub fn into_sink(self, job: &JobRecord) -> Box<dyn ResultSink> {
        match self {
            Self::Ready(sink) => sink,
            Self::Complete(summary) => Box::new(FinishedSink {
                job: job.clone(),
                ledger: Ledger::of_finished(&summary),
                summary: *summary,
            }),
        }
    }
}

/// What a commit did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Name of the new part; `None` when there was nothing to write, or there are no parts.
    pub part: Option<String>,
    /// Rows that are new.
    pub rows: u64,
    /// Rows that were committed before, or stood twice in the batch.
    pub duplicates_dropped: u64,
}

impl Committed {
    pub(crate) fn of(given: usize, new: usize, part: Option<String>) -> Self {
        Self {
            part,
            rows: new as u64,
            duplicates_dropped: (given - new) as u64,
        }
    }
}

/// A job that needs no more rows.
struct FinishedSink {
    job: JobRecord,
    ledger: Ledger,
    summary: Summary,
}

#[async_trait]
impl ResultSink for FinishedSink {
    fn job(&self) -> &JobRecord {
        &self.job
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn is_resumed(&self) -> bool {
        true
    }

    async fn commit(&mut self, rows: Vec<Row>) -> Result<Committed, StorageError> {
        Ok(Committed::of(rows.len(), 0, None))
    }

    async fn finish(self: Box<Self>) -> Result<Summary, StorageError> {
        Ok(self.summary)
    }
}
