use bytes::Bytes;
use futures::{SinkExt, TryStreamExt};
use roaring::RoaringTreemap;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Transaction};
use trommel_types::Classification;

use crate::background;
use crate::sink::finish::{StoredSummary, Summary};
use crate::sink::folder::StoredJob;
use crate::sink::ledger::Ledger;
use crate::sink::part::PartRecord;
use crate::sink::row::JobRecord;
use crate::sink::runs::RunsBuilder;
use crate::sink::table::{JOBS, TableDestination, copy, schema};
use crate::sink::{Committed, Existing, Opened, ResultSink, Reuse, SourceCheck};
use crate::{StorageError, StorageErrorKind};

/// Bytes handed to the connection at once.
const CHUNK: usize = 64 << 10;

/// Which job of the table is the one that is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Identity {
    /// The one of its id.
    Id,
    /// The latest that is the same in all but its id and time of creation.
    Record,
}

/// Commits the rows of one job to a table of PostgreSQL, each index once.
///
/// A batch is one transaction. The table's primary key is `(job_id, model, index)`, so no writer
/// can store a row twice, whatever else it does. Many jobs share a table; their records and
/// summaries are in the table of its name with `_jobs`.
///
/// Blocking: to be called on a thread that may wait.
pub struct TableSink {
    destination: TableDestination,
    client: Client,
    job: JobRecord,
    is_resumed: bool,
    ledger: Ledger,
}

impl TableSink {
    /// Opens a table for the job of this id: a new one, or the one that is there if it has the same
    /// record. Creates the tables where they are missing. `overwrite` removes the rows of an
    /// earlier job of this id; those of other jobs are never touched.
    ///
    /// # Errors
    /// Before any row is written: when the database cannot be reached or may not be written, has no
    /// place for the rows, or holds another job of this id.
    pub fn open(
        destination: &TableDestination,
        job: JobRecord,
        overwrite: bool,
    ) -> Result<Opened<Self>, StorageError> {
        let reuse = Reuse::or_overwrite(overwrite);
        Self::open_as(destination, job, reuse, Identity::Id)
    }

    /// As [`TableSink::open`], but the job is the latest one that is the same in all but its id and
    /// time of creation, and no other process may work on it meanwhile.
    ///
    /// # Errors
    /// As [`TableSink::open`], and when another process works on the job.
    pub fn open_alone(
        destination: &TableDestination,
        job: JobRecord,
        reuse: Reuse,
    ) -> Result<Opened<Self>, StorageError> {
        Self::open_as(destination, job, reuse, Identity::Record)
    }

    fn open_as(
        destination: &TableDestination,
        job: JobRecord,
        reuse: Reuse,
        identity: Identity,
    ) -> Result<Opened<Self>, StorageError> {
        let overwrite = reuse == Reuse::Overwrite;
        destination.check_columns(&job)?;
        background::wait(async {
            let mut client = destination.connect().await?;
            let (job, summary, is_resumed) = destination
                .take(&mut client, job, overwrite, identity)
                .await?;
            destination.stage(&client, &job).await?;
            if let Some(summary) = summary {
                if reuse != Reuse::Extend
                    && destination.count(&client, &job).await? == summary.images
                {
                    return Ok(Opened::Complete(Box::new(summary)));
                }
                // Rows were taken away: what is missing is made again.
                destination.reopen(&client, &job).await?;
            }
            let ledger = destination.rebuild(&client, &job).await?;
            Ok(Opened::Ready(Box::new(Self {
                destination: destination.clone(),
                client,
                job,
                is_resumed,
                ledger,
            })))
        })
    }
}

impl ResultSink for TableSink {
    fn job(&self) -> &JobRecord {
        &self.job
    }

    fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    fn committed(&self) -> &RoaringTreemap {
        &self.ledger.committed
    }

    fn source_check(&self) -> SourceCheck {
        SourceCheck::new(self.ledger.record.runs.clone())
    }

    fn existing(&mut self) -> Result<Existing, StorageError> {
        let mut existing = Existing::new(self.ledger.committed.clone());
        let images = self
            .destination
            .images(&self.client, &self.job, &mut existing);
        background::wait(images)?;
        self.ledger.may_have_gaps = true;
        Ok(existing)
    }

    fn summary(&self) -> Summary {
        Summary {
            // Transactions leave no files behind.
            parts: Vec::new(),
            ..self.ledger.summary(&self.job)
        }
    }

    fn commit(&mut self, rows: Vec<Classification>) -> Result<Committed, StorageError> {
        let Self {
            destination,
            client,
            job,
            ledger,
            ..
        } = self;
        ledger.commit(rows, |_, rows, _| {
            background::wait(destination.insert_rows(client, job, rows))?;
            Ok(String::new())
        })
    }

    fn finish(self: Box<Self>) -> Result<Summary, StorageError> {
        self.ledger.refuse_gaps(&self.destination)?;
        let summary = self.summary();
        let text = serde_json::to_string(&StoredSummary::now(&summary, &self.job))
            .expect("summaries hold text, numbers and lists");
        let sql = format!(
            "UPDATE {} SET summary = $3::text::jsonb, finished_at = now() WHERE job_id = $1 AND model = $2",
            self.destination.quoted(JOBS)
        );
        let of: [&(dyn ToSql + Sync); 3] = [&self.job.job_id, &self.job.model, &text];
        background::wait(self.client.execute(&sql, &of)).map_err(|error| {
            self.destination
                .failed("failed to store the summary", &error)
        })?;
        Ok(summary)
    }
}

/// A job that the table of jobs has.
struct FoundJob {
    job: JobRecord,
    summary: Option<Summary>,
    /// What of it is not as asked for.
    differences: Vec<String>,
}

impl FoundJob {
    /// Whether its rows cannot be gone on with. A job that is known by its id is the same to each
    /// of its sinks, so only the first one ever finds rows to overwrite.
    fn is_other_than(&self, identity: Identity, overwrite: bool) -> bool {
        !self.differences.is_empty() || (overwrite && identity == Identity::Record)
    }
}

impl TableDestination {
    /// Finds the job, or records it; with its summary if it is finished, and whether it was there.
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
        let taken = match self.find(&transaction, &job, identity).await? {
            None => {
                let sql = format!(
                    "INSERT INTO {} (job_id, model, record) VALUES ($1, $2, $3::text::jsonb)",
                    self.quoted(JOBS)
                );
                transaction
                    .execute(&sql, &[&job.job_id, &job.model, &record_text(&job)])
                    .await
                    .map_err(|error| self.failed("failed to record the job", &error))?;
                (job, None, false)
            }
            Some(found) if found.is_other_than(identity, overwrite) => {
                if !overwrite {
                    return Err(StorageError::new(
                        StorageErrorKind::OutputOfAnotherJob,
                        format!(
                            "{self} holds another job of the id {} ({}); choose another id, or replace its rows with --overwrite",
                            job.job_id,
                            found.differences.join("; ")
                        ),
                    ));
                }
                let job = JobRecord {
                    job_id: found.job.job_id,
                    ..job
                };
                self.start_over(&transaction, &job).await?;
                (job, None, false)
            }
            Some(found) => (found.job, found.summary, true),
        };
        if identity == Identity::Record {
            // Held until the connection ends.
            let row = transaction
                .query_one(
                    "SELECT pg_try_advisory_lock(hashtext('trommel job'), hashtext($1))",
                    &[&taken.0.job_id],
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

    /// The job that is there already.
    async fn find(
        &self,
        transaction: &Transaction<'_>,
        job: &JobRecord,
        identity: Identity,
    ) -> Result<Option<FoundJob>, StorageError> {
        let (condition, id): (_, &[&(dyn ToSql + Sync)]) = match identity {
            Identity::Id => ("AND job_id = $2", &[&job.model, &job.job_id]),
            Identity::Record => ("", &[&job.model]),
        };
        let sql = format!(
            "SELECT record::text, summary::text FROM {} WHERE model = $1 {condition} ORDER BY created_at DESC",
            self.quoted(JOBS)
        );
        let rows = transaction
            .query(&sql, id)
            .await
            .map_err(|error| self.failed("failed to read the jobs", &error))?;
        for row in rows {
            let (record, summary): (&str, Option<&str>) = (row.get(0), row.get(1));
            let damaged = |error| StorageError::corrupt(self.quoted(JOBS).as_ref(), error);
            let stored = StoredJob {
                job: serde_json::from_str(record).map_err(damaged)?,
                replaces_output: false,
            };
            let differences = stored.differences(job);
            if identity == Identity::Id || differences.is_empty() {
                let summary = summary.map(serde_json::from_str).transpose();
                return Ok(Some(FoundJob {
                    job: stored.job,
                    summary: summary.map_err(damaged)?,
                    differences,
                }));
            }
        }
        Ok(None)
    }

    /// Removes the rows of a job.
    async fn start_over(
        &self,
        transaction: &Transaction<'_>,
        job: &JobRecord,
    ) -> Result<(), StorageError> {
        let failed = |error| self.failed("failed to start the job over", &error);
        let of: [&(dyn ToSql + Sync); 2] = [&job.job_id, &job.model];
        let delete = format!(
            "DELETE FROM {} WHERE job_id = $1 AND model = $2",
            self.quoted("")
        );
        transaction.execute(&delete, &of).await.map_err(failed)?;
        let record = record_text(job);
        let update = format!(
            "UPDATE {} SET record = $3::text::jsonb, summary = NULL, created_at = now(), finished_at = NULL WHERE job_id = $1 AND model = $2",
            self.quoted(JOBS)
        );
        let of: [&(dyn ToSql + Sync); 3] = [&job.job_id, &job.model, &record];
        transaction.execute(&update, &of).await.map_err(failed)?;
        Ok(())
    }

    async fn count(&self, client: &Client, job: &JobRecord) -> Result<u64, StorageError> {
        let sql = format!(
            "SELECT count(*) FROM {} WHERE job_id = $1 AND model = $2",
            self.quoted("")
        );
        let row = client
            .query_one(&sql, &[&job.job_id, &job.model])
            .await
            .map_err(|error| self.failed("failed to count the rows", &error))?;
        Ok(u64::try_from(row.get::<_, i64>(0)).unwrap_or(0))
    }

    /// Takes back the word that a job is finished.
    async fn reopen(&self, client: &Client, job: &JobRecord) -> Result<(), StorageError> {
        let sql = format!(
            "UPDATE {} SET summary = NULL, finished_at = NULL WHERE job_id = $1 AND model = $2",
            self.quoted(JOBS)
        );
        client
            .execute(&sql, &[&job.job_id, &job.model])
            .await
            .map_err(|error| self.failed("failed to go on with the job", &error))?;
        Ok(())
    }

    /// Learns from the rows what is committed, in the order of the primary key.
    async fn rebuild(&self, client: &Client, job: &JobRecord) -> Result<Ledger, StorageError> {
        let failed = |error| self.failed("failed to read what is committed", &error);
        let sql = format!(
            "SELECT index, uri, error_kind, error FROM {} WHERE job_id = $1 AND model = $2 ORDER BY index",
            self.quoted("")
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

    /// Reads which images are committed.
    async fn images(
        &self,
        client: &Client,
        job: &JobRecord,
        existing: &mut Existing,
    ) -> Result<(), StorageError> {
        let failed = |error| self.failed("failed to read what is committed", &error);
        let sql = format!(
            "SELECT uri, etag FROM {} WHERE job_id = $1 AND model = $2",
            self.quoted("")
        );
        let of: [&(dyn ToSql + Sync); 2] = [&job.job_id, &job.model];
        let rows = client.query_raw(&sql, of).await.map_err(failed)?;
        let mut rows = std::pin::pin!(rows);
        while let Some(row) = rows.try_next().await.map_err(failed)? {
            existing.add(row.get(0), row.get(1));
        }
        Ok(())
    }

    /// Inserts rows in one transaction.
    async fn insert_rows(
        &self,
        client: &mut Client,
        job: &JobRecord,
        rows: &[Classification],
    ) -> Result<(), StorageError> {
        let failed = |error| self.failed("failed to insert rows", &error);
        let transaction = client.transaction().await.map_err(failed)?;
        let copy = format!(
            "COPY {} ({}) FROM STDIN",
            schema::STAGE,
            schema::column_list(job)
        );
        let input = transaction.copy_in(&copy).await.map_err(failed)?;
        let mut input = std::pin::pin!(input);
        let mut chunk = Vec::with_capacity(CHUNK + (CHUNK >> 2));
        for row in rows {
            copy::append(&mut chunk, job, std::slice::from_ref(row));
            if chunk.len() >= CHUNK {
                let full = std::mem::replace(&mut chunk, Vec::with_capacity(CHUNK + (CHUNK >> 2)));
                input.feed(Bytes::from(full)).await.map_err(failed)?;
            }
        }
        input.send(Bytes::from(chunk)).await.map_err(failed)?;
        input.finish().await.map_err(failed)?;
        let inserted = transaction
            .execute(&self.insert(job), &[])
            .await
            .map_err(failed)?;
        transaction.commit().await.map_err(failed)?;
        if inserted == rows.len() as u64 {
            return Ok(());
        }
        // All of the rows are there now, but this sink did not know of some of them.
        Err(StorageError::lost_race(self))
    }
}

fn record_text(job: &JobRecord) -> String {
    serde_json::to_string(job).expect("records hold text and lists of it")
}
