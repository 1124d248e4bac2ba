//! A retry in a table: the rows that it replaces, and the job's totals with them.

use futures::TryStreamExt;
use roaring::RoaringTreemap;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row, Transaction};
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::{ColumnKind, Scalar};

use crate::generations::{FailedImage, FailedImages, FailedRow};
use crate::part::PartRecord;
use crate::retried::{go_on_with, no_rows, unfinished};
use crate::summary::{StoredSummary, Times};
use crate::table::schema::GENERATION;
use crate::table::table_sink::FoundJob;
use crate::table::{JOBS, TableDestination, quote};
use crate::takeover::{Identity, StoredJob, retry_of};
use crate::{Base, Existing, JobRecord, Ledger, Retry, Summary};

impl TableDestination {
    /// The record of a retry with its job, and its number if it has none yet: that of an
    /// interrupted retry, or the next one.
    pub(super) async fn retry_of(
        &self,
        transaction: &Transaction<'_>,
        record: JobRecord,
        identity: Identity,
    ) -> Result<JobRecord, StorageError> {
        let asked = record.retry.clone().unwrap_or_default();
        let job = JobRecord {
            retry: None,
            ..record.clone()
        };
        let found = match (asked.adds, identity) {
            (true, Identity::Spec) => {
                let Some(found) = self.find_base(transaction, &job).await? else {
                    return Ok(job); // all of its images are new
                };
                Some(found)
            }
            _ => self.find(transaction, &job, identity).await?,
        };
        let is_asked_for = |job: &JobRecord| identity == Identity::Spec || job.run == asked.of_run;
        let Some(found) = found.filter(|found| is_asked_for(&found.stored.job)) else {
            return Err(no_rows(self, &record, identity));
        };
        if identity == Identity::Run {
            return Ok(record);
        }
        if found.summary.is_none() && !asked.adds {
            return Err(unfinished(self));
        }
        let job_id = found.stored.job.job_id;
        let retry = Retry {
            of_run: found.stored.job.run,
            ..asked
        };
        let next = self.next_retry(transaction, &job, &job_id, retry);
        let (retry, run) = next.await?;
        Ok(JobRecord {
            retry: Some(retry),
            run: run.unwrap_or(record.run),
            job_id,
            ..record
        })
    }

    /// The job that rows of `job` may be added to: the one with the same source, else the only one.
    pub(super) async fn find_base(
        &self,
        transaction: &Transaction<'_>,
        job: &JobRecord,
    ) -> Result<Option<FoundJob>, StorageError> {
        if let Some(same) = self.find(transaction, job, Identity::Spec).await? {
            return Ok(Some(same));
        }
        let mut found = self.jobs_of(transaction, &job.model, None).await?;
        found.retain(|found| {
            found.stored.job.retry.is_none() && found.stored.job.row_differences(job).is_empty()
        });
        if let [one, other, ..] = found.as_slice() {
            return Err(StorageError::new(
                StorageErrorKind::OutputOfAnotherJob,
                format!(
                    "{self} holds rows of several jobs, such as {} ({}) and {} ({}), and none of {}, so it is unknown which of them others are added to; name a source of one of them, or another table",
                    one.stored.job.job_id,
                    one.stored.job.source,
                    other.stored.job.job_id,
                    other.stored.job.source,
                    job.source
                ),
            ));
        }
        Ok(found.pop())
    }

    /// The job that is here, if rows of `job` may be added to it.
    pub(crate) async fn base(
        &self,
        job: &JobRecord,
        named: Option<&str>,
    ) -> Result<Option<Base>, StorageError> {
        let mut client = self.connect().await?;
        let failed = |error| self.failed("failed to look for the job", &error);
        let transaction = client.transaction().await.map_err(failed)?;
        self.prepare(&transaction, job).await?;
        let found = match named {
            None => self.find_base(&transaction, job).await?,
            Some(id) => self
                .jobs_of(&transaction, &job.model, Some(id))
                .await?
                .pop(),
        };
        let base = match found.map(|found| found.stored.job) {
            None => None,
            Some(JobRecord { job_id, run, .. }) => {
                let last = self.last_retry(&transaction, job, &job_id).await?;
                let last = last.map_or(0, |(number, _)| number);
                Some(Base { job_id, run, last })
            }
        };
        transaction.commit().await.map_err(failed)?;
        Ok(base)
    }

    /// The last recorded retry of a job.
    async fn last_retry(
        &self,
        transaction: &Transaction<'_>,
        job: &JobRecord,
        job_id: &str,
    ) -> Result<Option<(u32, Row)>, StorageError> {
        let sql = format!(
            "SELECT job_id, record::text, summary IS NOT NULL FROM {} \
             WHERE model = $1 AND starts_with(job_id, $2 || '/')",
            self.quoted(JOBS)
        );
        let rows = transaction
            .query(&sql, &[&job.model, &job_id])
            .await
            .map_err(|error| self.failed("failed to look for retries", &error))?;
        let number = |row: &Row| retry_of(row.get::<_, &str>(0).rsplit_once('/')?.1);
        let last = rows
            .into_iter()
            .filter_map(|row| Some((number(&row)?, row)));
        Ok(last.max_by_key(|(number, _)| *number))
    }

    /// The retry to resume, and its run if it was begun.
    async fn next_retry(
        &self,
        transaction: &Transaction<'_>,
        job: &JobRecord,
        job_id: &str,
        asked: Retry,
    ) -> Result<(Retry, Option<String>), StorageError> {
        let last = self.last_retry(transaction, job, job_id).await?;
        if let Some((_, row)) = &last
            && !row.get::<_, bool>(2)
        {
            let stored: StoredJob = serde_json::from_str(row.get(1))
                .map_err(|error| StorageError::corrupt(self.quoted(JOBS).as_ref(), error))?;
            if let Some(retry) = stored.job.retry.filter(|old| old.of_run == asked.of_run) {
                return Ok((go_on_with(self, &retry, &asked)?, Some(stored.job.run)));
            }
        }
        let number = last.map_or(0, |(number, _)| number) + 1;
        Ok((Retry { number, ..asked }, None))
    }

    /// The indices of the rows to replace.
    pub(super) async fn failed_indices(
        &self,
        client: &Client,
        job: &JobRecord,
        retry: &Retry,
    ) -> Result<RoaringTreemap, StorageError> {
        let failed = |error| self.failed("failed to read what failed", &error);
        let sql = self.failed_rows("index, coalesce(error_kind, '')", retry);
        let of: [&(dyn ToSql + Sync); 3] = [&job.job_id, &job.model, &job.source];
        let rows = client.query_raw(&sql, of).await.map_err(failed)?;
        let mut rows = std::pin::pin!(rows);
        let mut indices = RoaringTreemap::new();
        while let Some(row) = rows.try_next().await.map_err(failed)? {
            if retry.wants(row.get(1)) {
                indices.insert(index(&row)?);
            }
        }
        Ok(indices)
    }

    /// The images whose rows are to be replaced, sorted by index.
    pub(super) async fn failed_images(
        &self,
        client: &Client,
        job: &JobRecord,
        retry: &Retry,
    ) -> Result<Vec<FailedImage>, StorageError> {
        let failed = |error| self.failed("failed to read what failed", &error);
        let mut columns = "index, uri, etag, coalesce(error_kind, '')".to_owned();
        for name in job.column_names() {
            columns.push_str(", ");
            columns.push_str(&quote(&name));
        }
        let sql = self.failed_rows(&columns, retry);
        let of: [&(dyn ToSql + Sync); 3] = [&job.job_id, &job.model, &job.source];
        let rows = client.query_raw(&sql, of).await.map_err(failed)?;
        let mut rows = std::pin::pin!(rows);
        let mut images = FailedImages::of(retry);
        while let Some(row) = rows.try_next().await.map_err(failed)? {
            let columns = job.columns.iter().enumerate();
            let columns = columns.map(|(place, column)| scalar(&row, 4 + place, column.kind));
            images.add(FailedRow {
                image: FailedImage {
                    index: index(&row)?,
                    uri: row.get(1),
                    etag: row.get(2),
                    columns: columns.collect(),
                },
                kind: row.get(3),
                error: String::new(),
            });
        }
        images.finish()
    }

    /// Failed rows for images of source `$3` that no retry with this or a later number has written.
    fn failed_rows(&self, columns: &str, retry: &Retry) -> String {
        let (table, jobs) = (self.quoted(""), self.quoted(JOBS));
        format!(
            "SELECT {columns} FROM {table} AS own WHERE job_id = $1 AND model = $2 AND status = 'failed' \
             AND {GENERATION} < {} AND NOT EXISTS (SELECT FROM {jobs} AS run WHERE run.model = $2 \
             AND run.job_id = $1 || CASE WHEN own.{GENERATION} > 0 \
             THEN '/retry-' || lpad(own.{GENERATION}::text, greatest(4, length(own.{GENERATION}::text)), '0') ELSE '' END \
             AND run.record->>'source' <> $3)",
            retry.number
        )
    }

    /// The images of the valid rows without those of `retry`, or, if `alone`, with them.
    pub(super) async fn existing(
        &self,
        client: &Client,
        job: &JobRecord,
        retry: &Retry,
        alone: bool,
    ) -> Result<Existing, StorageError> {
        let failed = |error| self.failed("failed to read what is committed", &error);
        // In primary key order, so that the same rows give the same indices.
        let sql = format!(
            "SELECT index, uri, etag, {GENERATION} >= {} FROM {} WHERE job_id = $1 AND model = $2 ORDER BY index",
            retry.number,
            self.quoted("")
        );
        let of: [&(dyn ToSql + Sync); 2] = [&job.job_id, &job.model];
        let rows = client.query_raw(&sql, of).await.map_err(failed)?;
        let mut rows = std::pin::pin!(rows);
        let mut existing = Existing::default();
        existing.begin_at(retry.first);
        while let Some(row) = rows.try_next().await.map_err(failed)? {
            let (index, uri, is_own) = (index(&row)?, row.get(1), row.get::<_, bool>(3));
            match (is_own && !alone, index < retry.first) {
                (false, _) => existing.add(uri, row.get(2), index),
                (true, true) => existing.add_replaced(uri, index),
                (true, false) => {}
            }
        }
        if alone {
            existing.fill_from(retry.first);
        }
        Ok(existing)
    }

    /// The first free index of a job.
    pub(super) async fn first_free(
        &self,
        transaction: &Transaction<'_>,
        job: &JobRecord,
    ) -> Result<u64, StorageError> {
        let sql = format!(
            "SELECT coalesce(max(index) + 1, 0) FROM {} WHERE job_id = $1 AND model = $2",
            self.quoted("")
        );
        let row = transaction
            .query_one(&sql, &[&job.job_id, &job.model])
            .await;
        index(&row.map_err(|error| self.failed("failed to look for the last row", &error))?)
    }

    /// The job's totals with the rows of its retries, recorded if it is finished.
    pub(super) async fn whole(
        &self,
        transaction: &Transaction<'_>,
        retried: &JobRecord,
        retry: &Retry,
    ) -> Result<Summary, StorageError> {
        let failed = |error| self.failed("failed to count the rows", &error);
        let job = JobRecord {
            retry: None,
            run: retry.of_run.clone(),
            ..retried.clone()
        };
        let of: [&(dyn ToSql + Sync); 2] = [&job.job_id, &job.model];
        let table = self.quoted("");
        let all = format!("SELECT count(*) FROM {table} WHERE job_id = $1 AND model = $2");
        let all = transaction.query_one(&all, &of).await.map_err(failed)?;
        let kinds = format!(
            "SELECT DISTINCT ON (kind) coalesce(error_kind, '') AS kind, \
             count(*) OVER (PARTITION BY error_kind), uri, coalesce(error, '') \
             FROM {table} WHERE job_id = $1 AND model = $2 AND status = 'failed' ORDER BY kind, index"
        );
        let mut record = PartRecord::default();
        for row in transaction.query(&kinds, &of).await.map_err(failed)? {
            let (kind, count) = (row.get(0), counted(row.get(1)));
            record.count_failure(kind, count, row.get(2), row.get(3));
        }
        let images = counted(all.get(0));
        let whole = Summary {
            images,
            ok: images - record.failed().min(images),
            failed: record.failed(),
            failures: record.failures,
            ..Ledger::default().summary(&job)
        };
        let jobs = self.quoted(JOBS);
        let before = format!(
            "SELECT summary::text FROM {jobs} WHERE job_id = $1 AND model = $2 AND record->>'run' = $3 FOR UPDATE"
        );
        let of: [&(dyn ToSql + Sync); 3] = [&job.job_id, &job.model, &job.run];
        let before = transaction.query_opt(&before, &of).await.map_err(failed)?;
        let before = before.and_then(|row| row.get::<_, Option<String>>(0));
        let times = match &before {
            None if !retry.adds => return Ok(whole),
            None => Times::now(&job),
            Some(before) => Times::retried(before.as_bytes())
                .map_err(|error| StorageError::corrupt(jobs.as_ref(), error))?,
        };
        let text = StoredSummary::new(&whole, times).text();
        let note = format!(
            "UPDATE {jobs} SET summary = $3::text::jsonb, finished_at = coalesce(finished_at, now()) WHERE job_id = $1 AND model = $2"
        );
        let of: [&(dyn ToSql + Sync); 3] = [&job.job_id, &job.model, &text];
        transaction.execute(&note, &of).await.map_err(failed)?;
        Ok(whole)
    }
}

fn index(row: &Row) -> Result<u64, StorageError> {
    u64::try_from(row.get::<_, i64>(0))
        .map_err(|_| StorageError::corrupt("a row".as_ref(), "it has a negative index"))
}

fn counted(count: i64) -> u64 {
    u64::try_from(count).unwrap_or_default()
}

fn scalar(row: &Row, place: usize, kind: ColumnKind) -> Scalar {
    match kind {
        ColumnKind::String => row.get::<_, Option<String>>(place).map(Scalar::String),
        ColumnKind::Int => row.get::<_, Option<i64>>(place).map(Scalar::Int),
        ColumnKind::Float => row.get::<_, Option<f64>>(place).map(Scalar::Float),
        ColumnKind::Bool => row.get::<_, Option<bool>>(place).map(Scalar::Bool),
    }
    .unwrap_or(Scalar::Null)
}
