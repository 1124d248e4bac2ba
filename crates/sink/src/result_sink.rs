use async_trait::async_trait;
use roaring::RoaringTreemap;
use trommel_storage::{StorageError, StorageErrorKind};

use crate::row::Row;
use crate::{
    CascadeRows, EncodedPart, Existing, FailedImage, JobRecord, Ledger, Preconditions, SourceCheck,
    Summary,
};

/// The destination of one job's rows; each index is committed once.
#[async_trait]
pub trait ResultSink: Send {
    /// The job, with the id and run of the output that it resumes.
    fn job(&self) -> &JobRecord;

    /// What is committed.
    fn ledger(&self) -> &Ledger;

    /// Whether an earlier sink began this run.
    fn is_resumed(&self) -> bool {
        false
    }

    /// The finding about the store; never [`Preconditions::Probe`]. The job keeps it for its next
    /// sinks.
    fn preconditions(&self) -> Preconditions {
        Preconditions::Honoured
    }

    /// Makes rows durable, sorted by index. Rows whose index is already committed are dropped; of
    /// duplicates in the batch, the first one is kept.
    ///
    /// # Errors
    /// If the rows cannot be written; earlier commits are unaffected. After
    /// [`LostRace`](trommel_storage::StorageErrorKind::LostRace) another sink has committed some of
    /// them, or this one did so without receiving the answer: open the output again to continue.
    /// The same holds if the future is dropped.
    async fn commit(&mut self, rows: Vec<Row>) -> Result<Committed, StorageError>;

    /// Whether rows encoded as a Parquet part can be committed.
    fn takes_encoded(&self) -> bool {
        false
    }

    /// Makes the rows of an encoded part durable, all or none.
    ///
    /// # Errors
    /// As [`ResultSink::commit`], and if [`ResultSink::takes_encoded`] is false.
    async fn commit_encoded(&mut self, _: EncodedPart) -> Result<Committed, StorageError> {
        Err(StorageError::new(
            StorageErrorKind::InvalidDestination,
            "the output takes rows one by one, and no part of Parquet",
        ))
    }

    /// For a run that adds rows to a job: the images with valid rows. For a process that works
    /// alone this includes rows committed by this run; otherwise a repeated listing gives the same
    /// indices again.
    ///
    /// # Errors
    /// If the rows cannot be read.
    async fn existing(&mut self) -> Result<Existing, StorageError> {
        Ok(Existing::default())
    }

    /// For a retry: the images whose failed rows it has not replaced yet, sorted by index.
    ///
    /// # Errors
    /// If the rows cannot be read, or are too many for one retry.
    async fn failed_images(&mut self) -> Result<Vec<FailedImage>, StorageError> {
        Ok(Vec::new())
    }

    /// For a cascade: the decisions in the rows that are committed now.
    ///
    /// # Errors
    /// If the rows cannot be read back.
    async fn cascade_rows(&mut self) -> Result<CascadeRows, StorageError> {
        Err(StorageError::new(
            StorageErrorKind::InvalidDestination,
            "the rows of a cascade are read back, which this output does not allow; give a folder or s3://bucket/prefix/",
        ))
    }

    /// Ends a job whose rows are all committed, and records its end; for a retry also the job's
    /// totals with its rows, which are [`Summary::whole`].
    ///
    /// # Errors
    /// [`Incomplete`](trommel_storage::StorageErrorKind::Incomplete) if an index below the last one
    /// is missing, [`LostRace`](trommel_storage::StorageErrorKind::LostRace) if another run has
    /// taken the output over, others if the end cannot be written. Committed rows stay.
    async fn finish(self: Box<Self>) -> Result<Summary, StorageError>;

    /// Indices whose rows are durable.
    fn committed(&self) -> &RoaringTreemap {
        self.ledger().committed()
    }

    /// For a retry: how many rows it replaces in all.
    fn wanted(&self) -> Option<u64> {
        self.ledger().wanted()
    }

    /// Compares a listing with the rows committed now.
    fn source_check(&self) -> SourceCheck {
        SourceCheck::new(self.ledger().runs())
    }

    /// What all sinks of the run have committed so far.
    fn summary(&self) -> Summary {
        self.ledger().summary(self.job())
    }
}

/// The state of an output.
pub enum Opened {
    /// A job to work on: a new or an interrupted one.
    Ready(Box<dyn ResultSink>),
    /// The same job, finished.
    Complete(Box<Summary>),
}

impl Opened {
    /// A sink in either case; for a finished job every row is a repeat.
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

/// The result of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Name of the new part; `None` if nothing was written, or there are no parts.
    pub part: Option<String>,
    /// New rows.
    pub rows: u64,
    /// Rows that were committed before, or duplicates in the batch.
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
