//! The tables: their columns, and how they are created.

use tokio_postgres::{Client, Transaction};
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::ColumnKind;

use crate::JobRecord;
use crate::row::COLUMNS;
use crate::table::{JOBS, MAX_NAME, TableDestination, invalid, quote};

/// The types of [`COLUMNS`].
const TYPES: [&str; COLUMNS.len()] = [
    "text NOT NULL",
    "bigint NOT NULL",
    "text NOT NULL",
    "text",
    "bigint",
    "integer",
    "integer",
    "text NOT NULL",
    "text",
    "text",
    "text",
    "real",
    "jsonb",
    "text NOT NULL",
    "text NOT NULL",
    "integer NOT NULL",
    "timestamp with time zone NOT NULL",
];

/// The column of [`JobRecord::generation`], after all others.
pub(super) const GENERATION: &str = "generation";

/// Name and type of each column: [`JobRecord::all_names`], and the generation.
fn columns(job: &JobRecord) -> Vec<(String, &'static str)> {
    let own = COLUMNS.map(str::to_owned).into_iter().zip(TYPES);
    let passed = job.columns.iter().map(|column| match column.kind {
        ColumnKind::String => "text",
        ColumnKind::Int => "bigint",
        ColumnKind::Float => "double precision",
        ColumnKind::Bool => "boolean",
    });
    let passed = job.column_names().into_iter().zip(passed);
    let vectors = job.vectors();
    let vectors = vectors.map(|vector| (vector.name.to_owned(), "real[]"));
    let generation = (GENERATION.to_owned(), "integer NOT NULL");
    own.chain(passed)
        .chain(vectors)
        .chain([generation])
        .collect()
}

/// The column names as an SQL list.
pub(super) fn column_list(job: &JobRecord) -> String {
    let columns = columns(job);
    let quoted: Vec<_> = columns.iter().map(|(name, _)| quote(name)).collect();
    quoted.join(", ")
}

impl TableDestination {
    /// Refuses names of pass-through columns that PostgreSQL does not allow.
    pub(super) fn check_columns(&self, job: &JobRecord) -> Result<(), StorageError> {
        for name in job.column_names() {
            let is_taken = name == GENERATION;
            if is_taken || name.is_empty() || name.len() > MAX_NAME || name.contains('\0') {
                return Err(invalid(&format!(
                    "column {name:?} of the source cannot be the name of a column there (1 to {MAX_NAME} bytes, not {GENERATION:?}); rename it"
                )));
            }
        }
        Ok(())
    }

    /// Creates missing tables, one process at a time.
    ///
    /// # Errors
    /// [`InvalidDestination`](StorageErrorKind::InvalidDestination) if a table with this name lacks
    /// columns of the job.
    pub(super) async fn prepare(
        &self,
        transaction: &Transaction<'_>,
        job: &JobRecord,
    ) -> Result<(), StorageError> {
        let failed = |error| self.failed("failed to prepare the tables", &error);
        let (table, jobs) = (self.quoted(""), self.quoted(JOBS));
        // Held until the end of the transaction. CREATE TABLE IF NOT EXISTS alone fails in a race.
        transaction
            .execute("SELECT pg_advisory_xact_lock(hashtext($1))", &[&table])
            .await
            .map_err(failed)?;
        if !self.exists(transaction, &jobs).await? {
            transaction
                .batch_execute(&format!(
                    "CREATE TABLE {jobs} (\
                     job_id text, model text, record jsonb NOT NULL, summary jsonb, \
                     created_at timestamp with time zone NOT NULL DEFAULT now(), \
                     finished_at timestamp with time zone, PRIMARY KEY (job_id, model))"
                ))
                .await
                .map_err(failed)?;
        }
        let columns = columns(job);
        if !self.exists(transaction, &table).await? {
            let columns: Vec<_> = columns
                .iter()
                .map(|(name, kind)| format!("{} {kind}", quote(name)))
                .collect();
            return transaction
                .batch_execute(&format!(
                    "CREATE TABLE {table} ({}, PRIMARY KEY (job_id, model, index))",
                    columns.join(", ")
                ))
                .await
                .map_err(failed);
        }
        let there = transaction
            .query(
                "SELECT attname::text FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
                &[&table],
            )
            .await
            .map_err(failed)?;
        let there: Vec<&str> = there.iter().map(|row| row.get(0)).collect();
        let missing: Vec<_> = columns
            .iter()
            .filter(|(name, _)| !there.contains(&name.as_str()))
            .map(|(name, kind)| {
                format!("ADD {} {}", quote(name), kind.trim_end_matches(" NOT NULL"))
            })
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(StorageError::new(
            StorageErrorKind::InvalidDestination,
            format!(
                "{self} has no columns for all of the rows; run ALTER TABLE {table} {}, or choose another table",
                missing.join(", ")
            ),
        ))
    }

    async fn exists(
        &self,
        transaction: &Transaction<'_>,
        quoted: &str,
    ) -> Result<bool, StorageError> {
        let row = transaction
            .query_one("SELECT to_regclass($1) IS NOT NULL", &[&quoted])
            .await
            .map_err(|error| self.failed("failed to look for the tables", &error))?;
        Ok(row.get(0))
    }

    /// Creates the session's temporary table for rows, and checks with an empty insert that rows
    /// may be inserted.
    pub(super) async fn stage(&self, client: &Client, job: &JobRecord) -> Result<(), StorageError> {
        let columns: Vec<_> = columns(job)
            .iter()
            .map(|(name, kind)| format!("{} {kind}", quote(name)))
            .collect();
        client
            .batch_execute(&format!(
                "CREATE TEMPORARY TABLE {STAGE} ({}) ON COMMIT DELETE ROWS",
                columns.join(", ")
            ))
            .await
            .map_err(|error| self.failed("failed to make a temporary table", &error))?;
        client
            .execute(&self.insert(job), &[])
            .await
            .map_err(|error| self.failed("failed to try an insert", &error))?;
        Ok(())
    }

    /// The statement that moves rows from the session's temporary table.
    pub(super) fn insert(&self, job: &JobRecord) -> String {
        let (columns, table) = (column_list(job), self.quoted(""));
        let conflict = if job.retry.is_none() {
            "NOTHING".to_owned()
        } else {
            // Only failed rows, or those of changed images, are replaced, and the row of the newest
            // generation stays, whatever the order.
            let replaced = if job.adds() {
                ""
            } else {
                " AND own.status = 'failed'"
            };
            let values: Vec<_> = self::columns(job)
                .iter()
                .map(|(name, _)| format!("EXCLUDED.{}", quote(name)))
                .collect();
            format!(
                "UPDATE SET ({columns}) = ROW({}) WHERE own.{GENERATION} < EXCLUDED.{GENERATION}{replaced}",
                values.join(", ")
            )
        };
        format!(
            "INSERT INTO {table} AS own ({columns}) SELECT {columns} FROM {STAGE} ON CONFLICT (job_id, model, index) DO {conflict}"
        )
    }
}

/// The session's temporary table for rows.
pub(super) const STAGE: &str = "pg_temp.trommel_rows";
