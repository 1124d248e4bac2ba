//! Reads results from this machine, a bucket or a database.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use tempfile::TempDir;
use trommel_sink::{
    JobRecord, Misnumbered, ResultRow, StoredColumns, StoredRows, TableRows, misnumbered,
    read_rows, read_stored,
};
use trommel_storage::{Mirror, StorageError};

use crate::config::Config;
use crate::exit::Usage;
use crate::paths::check_input;

const REMEDY: &str = "give the file or folder that trommel classify wrote with --output";

/// The results given to a command, copied to this machine if they are remote.
pub(crate) struct Results {
    named: String,
    path: PathBuf,
    copy: Option<TempDir>,
}

impl Results {
    /// Opens a file, a folder of parts, `s3://bucket/prefix` or
    /// `postgres://user@host/database?table=name`.
    ///
    /// # Errors
    /// Of usage: if there are no such results, or they cannot be read.
    pub(crate) fn open(named: &str, config: &Config) -> Result<Self> {
        Self::copied(named, config, false)
    }

    /// The same, with embeddings.
    ///
    /// # Errors
    /// As [`Results::open`].
    pub(crate) fn open_embedded(named: &str, config: &Config) -> Result<Self> {
        Self::copied(named, config, true)
    }

    fn copied(named: &str, config: &Config, embeddings: bool) -> Result<Self> {
        if let Some(rows) = TableRows::parse(named, &config.postgres).context(Usage)? {
            let copy = folder_for_copy()?;
            let path = copy.path().join("rows.jsonl");
            let runtime = crate::runtime::on_this_thread()?;
            runtime
                .block_on(rows.save(&path, embeddings))
                .context(Usage)?;
            return Ok(Self {
                named: rows.to_string(),
                path,
                copy: Some(copy),
            });
        }
        let Some(rest) = named.strip_prefix("s3://") else {
            check_input(named.as_ref(), "results", REMEDY)?;
            return Ok(Self {
                named: named.to_owned(),
                path: named.into(),
                copy: None,
            });
        };
        let Some((parent, folder)) = rest.trim_end_matches('/').rsplit_once('/') else {
            let bucket = anyhow!("{named} is a whole bucket; give the prefix of the results in it");
            return Err(bucket.context(Usage));
        };
        let copy = folder_for_copy()?;
        let mirror = Mirror::of(&format!("s3://{parent}/"), copy.path(), &config.s3);
        let mirror = mirror.with_context(|| format!("{named} is not a prefix in a bucket"))?;
        mirror.update(folder).context(Usage)?;
        Ok(Self {
            named: named.to_owned(),
            path: copy.path().join(folder),
            copy: Some(copy),
        })
    }

    /// Their rows, sorted by index within a part.
    ///
    /// # Errors
    /// If there are no such results; an unreadable row is an error of the iterator.
    pub(crate) fn rows(
        &self,
    ) -> Result<impl Iterator<Item = Result<ResultRow, StorageError>> + use<>> {
        read_rows(&self.path).context(Usage)
    }

    /// The rows as they were written, with embeddings if present.
    ///
    /// # Errors
    /// As [`Results::rows`].
    pub(crate) fn stored(&self) -> Result<StoredRows> {
        read_stored(&self.path, true).context(Usage)
    }

    /// The same by column, for a job that derives rows from them; `None` if they have to be read
    /// row by row.
    ///
    /// # Errors
    /// As [`Results::rows`].
    pub(crate) fn columns(&self, job: &JobRecord) -> Result<Option<StoredColumns>> {
        StoredColumns::open(&self.path, job).context(Usage)
    }

    /// Refuses rows with duplicate indices and, if new rows must be as `dense` as those of an
    /// output, rows with missing indices.
    ///
    /// # Errors
    /// Of usage, with the name of the file.
    pub(crate) fn check_numbers(&self, dense: bool) -> Result<()> {
        let problem = match misnumbered(&self.path).context(Usage)? {
            Some(Misnumbered::Twice { index, file }) => {
                let file = file.file_name().filter(|_| self.path.is_dir());
                let file = file.map_or_else(String::new, |file| format!("{}: ", file.display()));
                format!(
                    "{self}: {file}two rows have the index {index}, and the index identifies a row: remove one of them, or change its index"
                )
            }
            Some(Misnumbered::Missing { index }) if dense => format!(
                "{self} has no row of index {index}, and the rows of an output are numbered from 0 without gaps: finish the job that writes these results, number the rows of a file of your own again, or write to standard output with --output -"
            ),
            _ => return Ok(()),
        };
        Err(anyhow!(problem).context(Usage))
    }

    /// Their original location on this machine; `None` for a copy.
    pub(crate) fn local(&self) -> Option<&Path> {
        self.copy.is_none().then_some(&*self.path)
    }
}

/// As the user gave them, without a password.
impl fmt::Display for Results {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.named)
    }
}

fn folder_for_copy() -> Result<TempDir> {
    tempfile::tempdir().context("failed to create a folder for a copy of the results")
}
