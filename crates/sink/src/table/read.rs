//! Reads the rows of a job back.

use std::fmt;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use futures::TryStreamExt;
use percent_encoding::percent_decode_str;
use tokio_postgres::Client;
use trommel_storage::{StorageError, StorageErrorKind};

use crate::table::schema::GENERATION;
use crate::table::{PostgresConfig, TableDestination};

/// Number of jobs listed when one has to be chosen.
const NAMED: i64 = 10;

/// The rows of one job and model in a table, as in
/// `postgres://user@host/database?table=name&job=ID&model=NAME`. Job and model may be omitted if
/// the table has only one.
#[derive(Debug, Clone)]
pub struct TableRows {
    table: TableDestination,
    job: Option<String>,
    model: Option<String>,
}

impl TableRows {
    /// Parses the address; `None` if it is not in a PostgreSQL database.
    ///
    /// # Errors
    /// As [`TableDestination::parse`].
    pub fn parse(text: &str, access: &PostgresConfig) -> Result<Option<Self>, StorageError> {
        let (address, query) = text.split_once('?').unwrap_or((text, ""));
        let (mut job, mut model, mut rest) = (None, None, Vec::new());
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let decoded = |value| percent_decode_str(value).decode_utf8_lossy().into_owned();
            match option.split_once('=') {
                Some(("job", value)) => job = Some(decoded(value)),
                Some(("model", value)) => model = Some(decoded(value)),
                _ => rest.push(option),
            }
        }
        let table = TableDestination::parse(&format!("{address}?{}", rest.join("&")), access)?;
        Ok(table.map(|table| Self { table, job, model }))
    }

    /// Writes the rows to a new file, sorted by index, as JSON Lines for
    /// [`read_rows`](crate::read_rows), with embeddings if requested. Returns their number.
    ///
    /// # Errors
    /// If the table cannot be read, or has rows of several jobs or models and none is named.
    pub async fn save(&self, path: &Path, embeddings: bool) -> Result<u64, StorageError> {
        let client = self.table.connect().await?;
        let unlimited = Duration::ZERO;
        self.table.limit_statements(&client, unlimited).await?;
        let (job, model) = self.chosen(&client).await?;
        let file = std::fs::File::create_new(path);
        let file = file.map_err(|error| StorageError::write(path, error))?;
        let mut out = std::io::BufWriter::new(file);
        let failed = |error| self.table.failed("failed to read rows", &error);
        let table = self.table.quoted("");
        let left_out = if embeddings { "" } else { "embedding," };
        let rows = client
            .query_raw(
                &format!(
                    "SELECT (to_jsonb(own) - '{{logits,{left_out}{GENERATION}}}'::text[])::text \
                     FROM {table} AS own WHERE job_id = $1 AND model = $2 ORDER BY index"
                ),
                [&job, &model],
            )
            .await
            .map_err(failed)?;
        let mut rows = std::pin::pin!(rows);
        let mut count = 0;
        while let Some(row) = rows.try_next().await.map_err(failed)? {
            let row: &str = row.get(0);
            writeln!(out, "{row}").map_err(|error| StorageError::write(path, error))?;
            count += 1;
        }
        out.flush()
            .map_err(|error| StorageError::write(path, error))?;
        Ok(count)
    }

    /// The job and the model, out of the many that the table may have.
    async fn chosen(&self, client: &Client) -> Result<(String, String), StorageError> {
        let table = self.table.quoted("");
        // Jumps from one job and model to the next in the primary key.
        let found = client
            .query(
                &format!(
                    "WITH RECURSIVE held AS (\
                     (SELECT job_id, model FROM {table} ORDER BY job_id, model LIMIT 1) \
                     UNION ALL SELECT later.* FROM held, LATERAL (\
                     SELECT job_id, model FROM {table} AS own \
                     WHERE (own.job_id, own.model) > (held.job_id, held.model) \
                     ORDER BY job_id, model LIMIT 1) AS later) \
                     SELECT job_id, model FROM held \
                     WHERE job_id = coalesce($1, job_id) AND model = coalesce($2, model) LIMIT $3"
                ),
                &[&self.job, &self.model, &(NAMED + 1)],
            )
            .await
            .map_err(|error| self.table.failed("failed to look for jobs", &error))?;
        let mut found: Vec<(String, String)> =
            found.iter().map(|row| (row.get(0), row.get(1))).collect();
        if found.len() > 1 {
            let named = found.iter().take(NAMED as usize);
            let named: Vec<_> = named
                .map(|(job, model)| format!("job={job}&model={model}"))
                .collect();
            let more = if found.len() > named.len() {
                ", …"
            } else {
                ""
            };
            return Err(StorageError::invalid_source(format!(
                "{} holds rows of several jobs or models; add one to its address: {}{more}",
                self.table,
                named.join(", ")
            )));
        }
        found.pop().ok_or_else(|| {
            StorageError::new(StorageErrorKind::NotFound, format!("{self} holds no rows"))
        })
    }
}

impl fmt::Display for TableRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.table.fmt(f)?;
        for (name, value) in [("job", &self.job), ("model", &self.model)] {
            if let Some(value) = value {
                write!(f, "&{name}={value}")?;
            }
        }
        Ok(())
    }
}
