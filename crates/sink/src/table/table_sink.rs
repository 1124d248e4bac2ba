use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{SinkExt, TryStreamExt};
use tokio::task::spawn_blocking;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Transaction};
use trommel_storage::{StorageError, StorageErrorKind};

use crate::part::PartRecord;
use crate::retried::nothing_failed;
use crate::row::Row;
use crate::runs::RunsBuilder;
use crate::summary::{StoredSummary, Times};
use crate::table::schema::GENERATION;
use crate::table::{JOBS, TableDestination, copy, schema};
use crate::takeover::{Identity, StoredJob, folder_of};
use crate::{
    Committed, Existing, FailedImage, JobRecord, Ledger, Opened, ResultSink, Reuse, Summary,
};

/// Bytes passed to the connection at once.
const CHUNK: usize = 64 << 10;

/// Commits the rows of one job to a table of PostgreSQL, each index once.
///
/// A batch is one transaction. The table's primary key is `(job_id, model, index)`, so no writer
/// can store a row twice. Many jobs share a table; their records and summaries are in a table with
/// the suffix `_jobs`, those of a retry under its own id. A retry replaces rows of earlier
/// generations.
pub(crate) struct TableSink {
    destination: TableDestination,
    client: Client,
    job: Arc<JobRecord>,
    is_resumed: bool,
    /// Whether only this process works on the job.
    is_alone: bool,
    ledger: Ledger,
}

impl TableSink {
    pub(crate) async fn open(
        destination: &TableDestination,
        job: JobRecord,
        reuse: Reuse,
        identity: Identity,
    ) -> Result<Opened, StorageError> {
        let overwrite = reuse == Reuse::Overwrite;
        destination.check_columns(&job)?;
        let mut client = destination.connect().await?;
        let (job, summary, is_resumed) = destination
            .take(&mut client, job, overwrite, identity)
            .await?;
        destination.stage(&client, &job).await?;
        // A table may have more rows than can be read within the time limit of an insert.
        destination
            .limit_statements(&client, Duration::ZERO)
            .await?;
        if let Some(summary) = summary {
            let is_whole = match job.retry {
                // Later retries may have replaced its rows.
                Some(_) => true,
                None => destination.count(&client, &job).await? == summary.images,
            };
            if is_whole {
                return Ok(Opened::Complete(Box::new(summary)));
            }
            // Rows were removed: the missing ones are made again.
            destination.reopen(&client, &job).await?;
        }
        let mut ledger = destination.rebuild(&client, &job).await?;
        ledger.may_have_gaps = job.adds();
        if let Some(retry) = job.retry.as_ref().filter(|retry| !retry.adds) {
            let failed = destination.failed_indices(&client, &job, retry).await?;
            if identity == Identity::Spec && failed.is_empty() && !is_resumed {
                return Err(nothing_failed(destination, retry));
            }
            ledger.wanted = Some(failed | &ledger.committed);
        }
        let limit = destination.statement_timeout;
        destination.limit_statements(&client, limit).await?;
        Ok(Opened::Ready(Box::new(Self {
            destination: destination.clone(),
            client,
            job: Arc::new(job),
            is_resumed,
            is_alone: identity == Identity::Spec,
            ledger,
        })))
    }
}

#[async_trait]
impl ResultSink for TableSink {
    fn job(&self) -> &JobRecord {
        &self.job
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    async fn existing(&mut self) -> Result<Existing, StorageError> {
        let Some(retry) = &self.job.retry else {
            return Ok(Existing::default());
        };
        let (limit, destination) = (self.destination.statement_timeout, &self.destination);
        let unlimited = Duration::ZERO;
        destination
            .limit_statements(&self.client, unlimited)
            .await?;
        let alone = self.is_alone;
        let existing = destination.existing(&self.client, &self.job, retry, alone);
        let existing = existing.await?;
        destination.limit_statements(&self.client, limit).await?;
        Ok(existing)
    }

    async fn failed_images(&mut self) -> Result<Vec<FailedImage>, StorageError> {
        match &self.job.retry {
            None => Ok(Vec::new()),
            Some(retry) => {
                let job = &self.job;
                self.destination
                    .failed_images(&self.client, job, retry)
                    .await
            }
        }
    }

    async fn commit(&mut self, rows: Vec<Row>) -> Result<Committed, StorageError> {
        let given = rows.len();
        let rows = self.ledger.new_rows(rows)?;
        let new = rows.len();
        if new == 0 {
            return Ok(Committed::of(given, 0, None));
        }
        let job = Arc::clone(&self.job);
        let encoded = spawn_blocking(move || {
            let (record, mut text) = (PartRecord::of(&rows), Vec::new());
            copy::append(&mut text, &job, &rows);
            (Bytes::from(text), record)
        });
        let (text, record) = encoded
            .await
            .map_err(|_| StorageError::unavailable("the encoding of rows was broken off"))?;
        self.destination
            .insert_rows(&mut self.client, &self.job, text, new as u64)
            .await?;
        self.ledger.add(0, String::new(), record);
        Ok(Committed::of(given, new, None))
    }

    async fn finish(self: Box<Self>) -> Result<Summary, StorageError> {
        self.ledger.refuse_gaps(&self.destination)?;
        let Self {
            destination,
            mut client,
            job,
            ledger,
            ..
        } = *self;
        let mut summary = ledger.summary(&job);
        // The time to count grows with the table.
        destination
            .limit_statements(&client, Duration::ZERO)
            .await?;
        let failed = |error| destination.failed("failed to store the summary", &error);
        let transaction = client.transaction().await.map_err(failed)?;
        if let Some(retry) = &job.retry {
            let whole = destination.whole(&transaction, &job, retry).await?;
            summary.whole = Some(Box::new(whole));
        }
        // PostgreSQL stores no NUL, not even escaped.
        let mut stored = summary.clone();
        for failure in stored.failures.values_mut() {
            failure.example = failure.example.replace('\0', "\u{FFFD}");
            failure.error = failure.error.replace('\0', "\u{FFFD}");
        }
        let text = StoredSummary::new(&stored, Times::now(&job)).text();
        let sql = format!(
            "UPDATE {} SET summary = $3::text::jsonb, finished_at = now() \
             WHERE job_id = $1 AND model = $2 AND record->>'run' = $4",
            destination.quoted(JOBS)
        );
        let id = id_of(&job);
        let of: [&(dyn ToSql + Sync); 4] = [&id, &job.model, &text, &job.run];
        if transaction.execute(&sql, &of).await.map_err(failed)? == 0 {
            return Err(StorageError::lost_race(format!(
                "the record of job {id} in {destination}"
            )));
        }
        transaction.commit().await.map_err(failed)?;
        Ok(summary)
    }
}

/// The id in the jobs table; a retry has its own.
fn id_of(job: &JobRecord) -> String {
    match folder_of(job.generation()) {
        None => job.job_id.clone(),
        Some(retry) => format!("{}/{retry}", job.job_id),
    }
}

/// A job in the jobs table.
pub(super) struct FoundJob {
    pub(super) stored: StoredJob,
    pub(super) summary: Option<Summary>,
}

impl TableDestination {
    /// Finds or records the job; returns its summary if it is finished, and whether it existed.
    async fn take(
        &self,
        client: &mut Client,
        job: JobRecord,
        overwrite: bool,
        identity: Identity,
    ) -> Result<(JobRecord, Option<Summary>, bool), StorageError> {
        let failed = |error| self.failed("failed to look for the job", &error);
        let transaction = client.transaction().await.map_err(failed)?;
        self.prepare(&transaction, &job).await?;
        let lock = identity == Identity::Spec;
        let (job, identity) = match job.retry {
            None => (job, identity),
            Some(_) => {
                let job = self.retry_of(&transaction, job, identity).await?;
                (job, Identity::Run)
            }
        };
        let taken = match self.find(&transaction, &job, identity).await? {
            None => {
                let mut job = job;
                if job.adds() {
                    let first = self.first_free(&transaction, &job).await?;
                    job.retry
                        .as_mut()
                        .into_iter()
                        .for_each(|retry| retry.first = first);
                }
                let sql = format!(
                    "INSERT INTO {} (job_id, model, record) VALUES ($1, $2, $3::text::jsonb)",
                    self.quoted(JOBS)
                );
                transaction
                    .execute(&sql, &[&id_of(&job), &job.model, &record_text(&job)])
                    .await
                    .map_err(|error| self.failed("failed to record the job", &error))?;
                (job, None, false)
            }
            // The first sink of a run has overwritten; the next ones resume.
            Some(found)
                if found.stored.is(&job, identity)
                    && !(overwrite && identity == Identity::Spec) =>
            {
                (found.stored.job, found.summary, true)
            }
            Some(found) if !overwrite => return Err(found.stored.refusal(self, &job)),
            Some(found) => {
                let job = JobRecord {
                    job_id: found.stored.job.job_id,
                    ..job
                };
                self.start_over(&transaction, &job).await?;
                (job, None, false)
            }
        };
        if lock {
            // Held until the connection ends.
            let row = transaction
                .query_one(
                    "SELECT pg_try_advisory_lock(hashtext('trommel job'), hashtext($1 || ' ' || $2))",
                    &[&taken.0.job_id, &taken.0.model],
                )
                .await
                .map_err(failed)?;
            if !row.get::<_, bool>(0) {
                return Err(StorageError::new(
                    StorageErrorKind::Locked,
                    format!(
                        "another trommel process writes job {} to {self}; wait for it or stop it",
                        taken.0.job_id
                    ),
                ));
            }
        }
        transaction.commit().await.map_err(failed)?;
        Ok(taken)
    }

    /// The existing job.
    pub(super) async fn find(
        &self,
        transaction: &Transaction<'_>,
        job: &JobRecord,
        identity: Identity,
    ) -> Result<Option<FoundJob>, StorageError> {
        let id = id_of(job);
        let id = (identity == Identity::Run).then_some(id.as_str());
        let found = self.jobs_of(transaction, &job.model, id).await?;
        let is_same =
            |found: &FoundJob| found.stored.job.retry.is_none() && found.stored.is(job, identity);
        Ok(found
            .into_iter()
            .find(|found| identity == Identity::Run || is_same(found)))
    }

    /// The jobs of a model and their retries, newest first, or the one with an id.
    pub(super) async fn jobs_of(
        &self,
        transaction: &Transaction<'_>,
        model: &str,
        id: Option<&str>,
    ) -> Result<Vec<FoundJob>, StorageError> {
        let (condition, of): (_, &[&(dyn ToSql + Sync)]) = match &id {
            Some(id) => ("AND job_id = $2", &[&model, id]),
            None => ("", &[&model]),
        };
        let sql = format!(
            "SELECT record::text, summary::text FROM {} WHERE model = $1 {condition} ORDER BY created_at DESC",
            self.quoted(JOBS)
        );
        let rows = transaction
            .query(&sql, of)
            .await
            .map_err(|error| self.failed("failed to read the jobs", &error))?;
        let found = rows.iter().map(|row| {
            let (record, summary): (&str, Option<&str>) = (row.get(0), row.get(1));
            let damaged = |error| StorageError::corrupt(self.quoted(JOBS).as_ref(), error);
            let summary = summary.map(serde_json::from_str).transpose();
            Ok(FoundJob {
                stored: StoredJob {
                    job: serde_json::from_str(record).map_err(damaged)?,
                    replaces_output: false,
                },
                summary: summary.map_err(damaged)?,
            })
        });
        found.collect()
    }

    /// Removes the rows of a job.
    async fn start_over(
        &self,
        transaction: &Transaction<'_>,
        job: &JobRecord,
    ) -> Result<(), StorageError> {
        let failed = |error| self.failed("failed to start the job over", &error);
        if job.retry.is_none() {
            let of: [&(dyn ToSql + Sync); 2] = [&job.job_id, &job.model];
            for delete in [
                format!(
                    "DELETE FROM {} WHERE job_id = $1 AND model = $2",
                    self.quoted("")
                ),
                format!(
                    "DELETE FROM {} WHERE starts_with(job_id, $1 || '/') AND model = $2",
                    self.quoted(JOBS)
                ),
            ] {
                transaction.execute(&delete, &of).await.map_err(failed)?;
            }
        }
        let (id, record) = (id_of(job), record_text(job));
        let update = format!(
            "UPDATE {} SET record = $3::text::jsonb, summary = NULL, created_at = now(), finished_at = NULL WHERE job_id = $1 AND model = $2",
            self.quoted(JOBS)
        );
        let of: [&(dyn ToSql + Sync); 3] = [&id, &job.model, &record];
        transaction.execute(&update, &of).await.map_err(failed)?;
        Ok(())
    }

    async fn count(&self, client: &Client, job: &JobRecord) -> Result<u64, StorageError> {
        let sql = format!(
            "SELECT count(*) FROM {} WHERE job_id = $1 AND model = $2 AND {GENERATION} >= {}",
            self.quoted(""),
            job.generation()
        );
        let row = client
            .query_one(&sql, &[&job.job_id, &job.model])
            .await
            .map_err(|error| self.failed("failed to count the rows", &error))?;
        Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or(0))
    }

    /// Removes the mark that a job is finished.
    async fn reopen(&self, client: &Client, job: &JobRecord) -> Result<(), StorageError> {
        let sql = format!(
            "UPDATE {} SET summary = NULL, finished_at = NULL WHERE job_id = $1 AND model = $2",
            self.quoted(JOBS)
        );
        client
            .execute(&sql, &[&id_of(job), &job.model])
            .await
            .map_err(|error| self.failed("failed to go on with the job", &error))?;
        Ok(())
    }

    /// Determines from the rows what is committed, in primary key order.
    async fn rebuild(&self, client: &Client, job: &JobRecord) -> Result<Ledger, StorageError> {
        let failed = |error| self.failed("failed to read what is committed", &error);
        let sql = format!(
            "SELECT index, uri, error_kind, error FROM {} WHERE job_id = $1 AND model = $2 AND {GENERATION} >= {} ORDER BY index",
            self.quoted(""),
            job.generation()
        );
        let of: [&(dyn ToSql + Sync); 2] = [&job.job_id, &job.model];
        let rows = client.query_raw(&sql, of).await.map_err(failed)?;
        let mut rows = std::pin::pin!(rows);
        let (mut record, mut runs) = (PartRecord::default(), RunsBuilder::default());
        while let Some(row) = rows.try_next().await.map_err(failed)? {
            let index = u64::try_from(row.get::<_, i64>(0)).map_err(|_| {
                StorageError::corrupt(self.quoted("").as_ref(), "a row has a negative index")
            })?;
            let uri: &str = row.get(1);
            record.rows += 1;
            runs.add(index, uri);
            if let Some(kind) = row.get::<_, Option<&str>>(2) {
                let error: Option<&str> = row.get(3);
                record.count_failure(kind, 1, uri, error.unwrap_or_default());
            }
        }
        record.runs = runs.finish();
        let mut ledger = Ledger::default();
        if record.rows > 0 {
            ledger.add(0, String::new(), record);
        }
        Ok(ledger)
    }

    /// Inserts encoded rows in one transaction.
    async fn insert_rows(
        &self,
        client: &mut Client,
        job: &JobRecord,
        mut text: Bytes,
        rows: u64,
    ) -> Result<(), StorageError> {
        let failed = |error| self.failed("failed to insert rows", &error);
        let transaction = client.transaction().await.map_err(failed)?;
        // Held until the end, so that no row of this run is inserted after another run has cleared
        // the table.
        let sql = format!(
            "SELECT 1 FROM {} WHERE job_id = $1 AND model = $2 AND record->>'run' = $3 FOR SHARE",
            self.quoted(JOBS)
        );
        let of: [&(dyn ToSql + Sync); 3] = [&id_of(job), &job.model, &job.run];
        if transaction
            .query_opt(&sql, &of)
            .await
            .map_err(failed)?
            .is_none()
        {
            return Err(StorageError::lost_race(self));
        }
        let copy = format!(
            "COPY {} ({}) FROM STDIN",
            schema::STAGE,
            schema::column_list(job)
        );
        let input = transaction.copy_in(&copy).await.map_err(failed)?;
        let mut input = std::pin::pin!(input);
        while !text.is_empty() {
            let chunk = text.split_to(text.len().min(CHUNK));
            input.feed(chunk).await.map_err(failed)?;
        }
        input.flush().await.map_err(failed)?;
        input.finish().await.map_err(failed)?;
        let inserted = transaction
            .execute(&self.insert(job), &[])
            .await
            .map_err(failed)?;
        transaction.commit().await.map_err(failed)?;
        if inserted == rows {
            return Ok(());
        }
        // All of the rows are there, but this sink did not know about some of them.
        Err(StorageError::lost_race(self))
    }
}

fn record_text(job: &JobRecord) -> String {
    serde_json::to_string(job).expect("records hold text and lists of it")
}
