use std::fmt;
use std::sync::Arc;

use trommel_storage::{S3Config, StorageError, StorageErrorKind};

use crate::part_sink::{How, PartSink};
use crate::table::TableSink;
use crate::takeover::Identity;
use crate::{
    Claims, Destination, Format, JobRecord, Opened, PostgresConfig, Preconditions, TableDestination,
};

/// The destination of a job's rows.
#[derive(Debug, Clone)]
pub enum Output {
    /// Parts in a folder or a bucket, or a single file.
    Parts(Box<Destination>),
    /// A table in a database.
    Table(Box<TableDestination>),
}

/// How to treat an existing output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// Resume the same job, or find it finished.
    Resume,
    /// Replace it.
    Overwrite,
}

/// The job whose rows are at an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// Its id, which added rows have too.
    pub job_id: String,
    /// Its run.
    pub run: String,
    /// The highest number of a [`Retry`](crate::Retry) with files there, or 0.
    pub last: u32,
}

/// How a caller with a lease opens an output.
pub struct Leased {
    /// Whether to remove rows of other runs. Those of the same run are never removed.
    pub overwrite: bool,
    /// Used on object stores that ignore preconditions.
    pub claims: Arc<dyn Claims>,
    /// The result of the first opening; see
    /// [`ResultSink::preconditions`](crate::ResultSink::preconditions).
    pub preconditions: Preconditions,
}

impl Output {
    /// The format of rows; JSON Lines for a table.
    pub fn format(&self) -> Format {
        match self {
            Self::Parts(destination) => destination.format(),
            Self::Table(_) => Format::Jsonl,
        }
    }

    /// Parses `--output`. Parts are written in `part_format` unless the name specifies a format.
    ///
    /// # Errors
    /// [`InvalidDestination`](trommel_storage::StorageErrorKind::InvalidDestination) if rows cannot
    /// be written there.
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

    /// As [`Output::parse`], for one of several models: a folder of its own below the given one, or
    /// the table itself, whose key has the model.
    ///
    /// # Errors
    /// As [`Output::parse`]; and for a single file, which has the rows of one model.
    pub fn parse_for(
        model: &str,
        text: &str,
        part_format: Format,
        s3: &S3Config,
        postgres: &PostgresConfig,
    ) -> Result<Self, StorageError> {
        let parse = |text: &str| Self::parse(text, part_format, s3, postgres);
        let whole = parse(text)?;
        match &whole {
            Self::Table(_) => Ok(whole),
            Self::Parts(parts) if parts.file.is_some() => Err(StorageError::new(
                StorageErrorKind::InvalidDestination,
                format!(
                    "output {text}: several models cannot write one file; give a folder, whose name ends with /"
                ),
            )),
            Self::Parts(_) => {
                let format_at = text.rfind("?format=").unwrap_or(text.len());
                let (folder, format) = text.split_at(format_at);
                let (folder, model) = (folder.trim_end_matches('/'), model.replace('/', "@"));
                parse(&format!("{folder}/{model}/{format}"))
            }
        }
    }

    /// Opens the output for a job that only this process works on: a new one, or the existing one
    /// if its rows have the same shape ([`JobRecord::spec_hash`]), whose id and run are then used.
    /// `overwrite` starts over; it never touches files that are not known to be Trommel's.
    ///
    /// # Errors
    /// Before any row is written or anything is changed: if the output cannot be written, is held
    /// by another process, has another job or files that are not Trommel's, has a damaged part, or
    /// is in a store that ignores preconditions.
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

    /// The job that is here, if rows of `job` may be added to it: same model and columns, any
    /// source. In a table with many jobs it is the one with the same source, else the only one, or
    /// the named one.
    ///
    /// # Errors
    /// If the output cannot be read, or has incompatible rows.
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

    /// Opens the output for a job with this id and run, whose lease the caller holds: a new one, or
    /// the existing one, whatever else differs.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_several_models_has_a_folder_of_its_own() {
        let parse = |model, text| {
            let (s3, postgres) = (S3Config::default(), PostgresConfig::default());
            Output::parse_for(model, text, Format::Parquet, &s3, &postgres)
        };
        for (model, text, place, format) in [
            ("vit", "rows", "rows/vit/", Format::Parquet),
            ("org/vit", "rows/", "rows/org@vit/", Format::Parquet),
            ("vit", "rows/?format=csv", "rows/vit/", Format::Csv),
        ] {
            let output = parse(model, text).unwrap();
            assert_eq!(
                (output.to_string().as_str(), output.format()),
                (place, format)
            );
        }
        let Err(error) = parse("vit", "rows.parquet") else {
            panic!("one file took the rows of several models");
        };
        assert!(error.to_string().contains("give a folder"), "{error}");
    }
}
