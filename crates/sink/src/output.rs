use std::fmt;
use std::sync::Arc;

use trommel_storage::{S3Config, StorageError};

use crate::part_sink::{How, PartSink};
use crate::table::TableSink;
use crate::takeover::Identity;
use crate::{
    Claims, Destination, Format, JobRecord, Opened, PostgresConfig, Preconditions, TableDestination,
};

/// Where the rows of a job go.
#[derive(Debug, Clone)]
pub enum Output {
    /// Parts in a folder or a bucket, or a single file.
    Parts(Box<Destination>),
    /// A table of a database.
    Table(Box<TableDestination>),
}

/// What becomes of an output that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// The same job goes on, or is finished.
    Resume,
    /// It is replaced.
    Overwrite,
}

/// The job whose rows are at an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// Its id, which rows that are added have too.
    pub job_id: String,
    /// Its run.
    pub run: String,
    /// The highest number of a [`Retry`](crate::Retry) that has left anything there, or 0.
    pub last: u32,
}

/// How an output is opened by a caller that holds a lease on it.
pub struct Leased {
    /// Whether rows of another run are removed. Those of the same run never are.
    pub overwrite: bool,
    /// Used on stores of objects that honour no preconditions.
    pub claims: Arc<dyn Claims>,
    /// What the first opening has found; see [`ResultSink::preconditions`](crate::ResultSink::preconditions).
    pub preconditions: Preconditions,
}

impl Output {
    /// How rows are written; those of a table count as JSON Lines.
    pub fn format(&self) -> Format {
        match self {
            Self::Parts(destination) => destination.format(),
            Self::Table(_) => Format::Jsonl,
        }
    }

    /// Reads what `--output` names. Parts are written in `part_format` unless the name says
    /// otherwise.
    ///
    /// # Errors
    /// [`InvalidDestination`](trommel_storage::StorageErrorKind::InvalidDestination) when rows
    /// cannot go there.
    pub fn parse(
        text: &str,
        part_format: Format,
        s3: &S3Config,
        postgres: &PostgresConfig,
    ) -> Result<Self, StorageError> {
        if let Some(table) = TableDestination::parse(text, postgres)? {
            return Ok(Self::Table(Box::new(table)));
        }
        let parts = match Destination::in_bucket(text, part_format, s3)? {
            Some(bucket) => bucket,
            None => Destination::parse(text, part_format)?,
        };
        Ok(parts.into())
    }

    /// Opens the output for a job that this process works on alone: a new one, or the one that is
    /// there if its rows have the same shape ([`JobRecord::spec_hash`]), whose id and run are taken
    /// over. `overwrite` starts over: it touches no file that is not known to be Trommel's.
    ///
    /// # Errors
    /// Before any row is written, and with what is there as it was: when the output cannot be
    /// written, is held by another process, holds another job or files that are not Trommel's,
    /// has a damaged part, or is in a store that honours no preconditions.
    pub async fn open_alone(&self, job: JobRecord, reuse: Reuse) -> Result<Opened, StorageError> {
        match self {
            Self::Parts(parts) => {
                let how = How {
                    reuse,
                    identity: Identity::Spec,
                    claims: None,
                    preconditions: Preconditions::Probe,
                };
                PartSink::open(parts, job, how).await
            }
            Self::Table(table) => TableSink::open(table, job, reuse, Identity::Spec).await,
        }
    }

    /// The job that is here, if rows of `job` may stand beside its own: those of the same model, of the
    /// same columns, whatever the source. In a table, where many jobs are, it is the one of the same
    /// source, else the only one; or the one that is named.
    ///
    /// # Errors
    /// When the output cannot be read, or holds rows of another kind.
    pub async fn base(
        &self,
        job: &JobRecord,
        named: Option<&str>,
    ) -> Result<Option<Base>, StorageError> {
        match self {
            Self::Parts(parts) => parts.base(job, named).await,
            Self::Table(table) => table.base(job, named).await,
        }
    }

    /// Opens the output for a job of this id and run, whose lease the caller holds: a new one, or
    /// the one that is there, whatever else differs.
    ///
    /// # Errors
    /// As [`Output::open_alone`].
    pub async fn open_leased(&self, job: JobRecord, lease: Leased) -> Result<Opened, StorageError> {
        let reuse = match lease.overwrite {
            true => Reuse::Overwrite,
            false => Reuse::Resume,
        };
        match self {
            Self::Parts(parts) => {
                let how = How {
                    reuse,
                    identity: Identity::Run,
                    claims: Some(lease.claims),
                    preconditions: lease.preconditions,
                };
                PartSink::open(parts, job, how).await
            }
            Self::Table(table) => TableSink::open(table, job, reuse, Identity::Run).await,
        }
    }
}

impl From<Destination> for Output {
    fn from(parts: Destination) -> Self {
        Self::Parts(Box::new(parts))
    }
}

impl From<TableDestination> for Output {
    fn from(table: TableDestination) -> Self {
        Self::Table(Box::new(table))
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parts(parts) => parts.fmt(f),
            Self::Table(table) => table.fmt(f),
        }
    }
}
