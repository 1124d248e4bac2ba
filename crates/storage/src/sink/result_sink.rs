use roaring::RoaringTreemap;
use trommel_types::Classification;

use crate::StorageError;
use crate::sink::row::JobRecord;
use crate::sink::{BucketSink, Existing, PartSink, SourceCheck, Summary};

/// Where the rows of one job are committed, each index once.
///
/// Blocking: to be called on a thread that may wait.
pub trait ResultSink: Send {
    /// The job, with the id of its first run.
    fn job(&self) -> &JobRecord;

    /// Whether an earlier run has begun this job.
    fn is_resumed(&self) -> bool;

    /// Indices whose rows are durable.
    fn committed(&self) -> &RoaringTreemap;

    /// Compares a listing with what is committed now.
    fn source_check(&self) -> SourceCheck;

    /// The images that are committed now, for a listing that adds to them. The job may then end
    /// with gaps in its indices, where an earlier listing was not worked through.
    ///
    /// # Errors
    /// When the rows cannot be read.
    fn existing(&mut self) -> Result<Existing, StorageError>;

    /// What is committed so far, by all runs.
    fn summary(&self) -> Summary;

    /// Makes rows durable at once, sorted by index. Rows whose index is committed already, or
    /// stands twice among them, are dropped; of the latter the first one stays.
    ///
    /// # Errors
    /// When the rows cannot be written; what was committed before is untouched. After
    /// [`LostRace`](crate::StorageErrorKind::LostRace) another sink has committed some of them, or
    /// this one has done so without hearing of it: open the destination anew to go on.
    fn commit(&mut self, rows: Vec<Classification>) -> Result<Committed, StorageError>;

    /// Ends a job whose rows are all committed, and leaves word of its end.
    ///
    /// # Errors
    /// [`Incomplete`](crate::StorageErrorKind::Incomplete) when an index is missing before the last
    /// one, others when the end cannot be written. What is committed stays.
    fn finish(self: Box<Self>) -> Result<Summary, StorageError>;
}

/// What is at a destination.
pub enum Opened<S: ?Sized = PartSink> {
    /// A job to work on: a new one, or one that was interrupted.
    Ready(Box<S>),
    /// The same job, finished.
    Complete(Box<Summary>),
}

impl<S: ResultSink + 'static> Opened<S> {
    /// The same, whatever the sink is.
    pub fn boxed(self) -> Opened<dyn ResultSink> {
        match self {
            Self::Ready(sink) => Opened::Ready(sink),
            Self::Complete(summary) => Opened::Complete(summary),
        }
    }
}

/// What a commit did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Name of the new part; `None` when there was nothing to write, empty where there are no
    /// parts.
    pub part: Option<String>,
    /// Rows in it.
    pub rows: u64,
    /// Rows that were committed before, or stood twice in the batch.
    pub duplicates_dropped: u64,
}

/// Both sinks of parts have these as methods of their own.
macro_rules! result_sink {
    ($sink:ty) => {
        impl ResultSink for $sink {
            fn job(&self) -> &JobRecord {
                self.job()
            }

            fn is_resumed(&self) -> bool {
                self.is_resumed()
            }

            fn committed(&self) -> &RoaringTreemap {
                self.committed()
            }

            fn source_check(&self) -> SourceCheck {
                self.source_check()
            }

            fn existing(&mut self) -> Result<Existing, StorageError> {
                self.existing()
            }

            fn summary(&self) -> Summary {
                self.summary()
            }

            fn commit(&mut self, rows: Vec<Classification>) -> Result<Committed, StorageError> {
                self.commit(rows)
            }

            fn finish(self: Box<Self>) -> Result<Summary, StorageError> {
                (*self).finish()
            }
        }
    };
}

result_sink!(PartSink);
result_sink!(BucketSink);
