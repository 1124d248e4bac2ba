use std::fmt;
use std::sync::Arc;

use crate::sink::{
    BucketDestination, BucketSink, Claims, Destination, Format, JobRecord, Opened, PartSink,
    PostgresConfig, ResultSink, TableDestination, TableSink,
};
use crate::{S3Config, StorageError, StorageErrorKind};

/// Where the rows of a job go.
#[derive(Debug, Clone)]
pub enum Output {
    /// A folder of parts, or a single file.
    Folder(Destination),
    /// Parts in a bucket.
    Bucket(BucketDestination),
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
    /// The same job goes on, finished or not, and gets rows for images that it has none of.
    Extend,
}

impl Reuse {
    /// It is replaced if that is asked for.
    pub(super) fn or_overwrite(overwrite: bool) -> Self {
        if overwrite {
            Self::Overwrite
        } else {
            Self::Resume
        }
    }
}

impl Output {
    /// Reads what `--output` names. Parts are written in `part_format` unless the name says
    /// otherwise.
    ///
    /// # Errors
    /// [`InvalidDestination`](StorageErrorKind::InvalidDestination) when rows cannot go there.
    pub fn parse(
        text: &str,
        part_format: Format,
        s3: &S3Config,
        postgres: &PostgresConfig,
    ) -> Result<Self, StorageError> {
        if let Some(table) = TableDestination::parse(text, postgres)? {
            return Ok(Self::Table(Box::new(table)));
        }
        if let Some(bucket) = BucketDestination::parse(text, part_format, s3)? {
            return Ok(Self::Bucket(bucket));
        }
        Destination::parse(text, part_format).map(Self::Folder)
    }

    /// Opens the output for a job that this process works on alone: a new one, or the one that is
    /// there if it is the same in all but its id and time of creation.
    ///
    /// # Errors
    /// As [`PartSink::open`], [`BucketSink::open`] and [`TableSink::open_alone`].
    pub fn open_alone(
        &self,
        job: JobRecord,
        reuse: Reuse,
    ) -> Result<Opened<dyn ResultSink>, StorageError> {
        Ok(match self {
            Self::Folder(folder) if reuse == Reuse::Extend => {
                PartSink::open_to_extend(folder, job)?.boxed()
            }
            Self::Folder(folder) => PartSink::open(folder, job, reuse == Reuse::Overwrite)?.boxed(),
            Self::Bucket(bucket) => BucketSink::open_alone(bucket, job, reuse)?.boxed(),
            Self::Table(table) => TableSink::open_alone(table, job, reuse)?.boxed(),
        })
    }

    /// Opens the output for a job of this id, whose lease the caller holds. `claims` are used on
    /// stores of objects that honour no preconditions.
    ///
    /// # Errors
    /// As [`PartSink::open_leased`], [`BucketSink::open`] and [`TableSink::open`].
    pub fn open_leased(
        &self,
        job: JobRecord,
        overwrite: bool,
        claims: Arc<dyn Claims>,
    ) -> Result<Opened<dyn ResultSink>, StorageError> {
        Ok(match self {
            Self::Folder(folder) => open_folder(folder, job, overwrite)?.boxed(),
            Self::Bucket(bucket) => BucketSink::open(bucket, job, overwrite, Some(claims))?.boxed(),
            Self::Table(table) => TableSink::open(table, job, overwrite)?.boxed(),
        })
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => folder.path().display().fmt(f),
            Self::Bucket(bucket) => bucket.fmt(f),
            Self::Table(table) => table.fmt(f),
        }
    }
}

/// Opens a folder for this job alone. Only the first sink of a job finds another job's rows there;
/// the next ones find its own.
fn open_folder(
    folder: &Destination,
    job: JobRecord,
    overwrite: bool,
) -> Result<Opened, StorageError> {
    let opened = PartSink::open_leased(folder, job.clone(), false);
    let is_own = match &opened {
        Ok(Opened::Ready(sink)) => sink.job_id() == job.job_id,
        Ok(Opened::Complete(summary)) => summary.job_id == job.job_id,
        Err(error) => !matches!(
            error.kind(),
            StorageErrorKind::OutputOfAnotherJob | StorageErrorKind::OutputExists
        ),
    };
    if is_own {
        return opened;
    }
    if overwrite {
        drop(opened);
        return PartSink::open_leased(folder, job, true);
    }
    opened?;
    Err(StorageError::new(
        StorageErrorKind::OutputOfAnotherJob,
        format!(
            "{} holds rows of another job; choose another output, or submit with overwrite",
            folder.path().display()
        ),
    ))
}
