use std::collections::BTreeMap;

use roaring::RoaringTreemap;
use trommel_storage::{StorageError, StorageErrorKind};

use crate::numbering::first_missing;
use crate::part::PartRecord;
use crate::row::Row;
use crate::{Committed, FailureSummary, JobRecord, PartSummary, Runs, Summary};

/// What is committed of a job, according to its parts.
#[derive(Default)]
pub struct Ledger {
    pub(crate) committed: RoaringTreemap,
    /// All parts together.
    pub(crate) record: PartRecord,
    pub(crate) parts: Vec<PartSummary>,
    pub(crate) next_number: u64,
    /// Whether indices may be missing because these rows are added to others.
    pub(crate) may_have_gaps: bool,
    /// For a retry: the indices of the rows that it replaces. No others are committed.
    pub(crate) wanted: Option<RoaringTreemap>,
}

impl Ledger {
    /// Indices whose rows are durable.
    pub fn committed(&self) -> &RoaringTreemap {
        &self.committed
    }

    /// The same as runs of consecutive indices with hashes of their uris.
    pub fn runs(&self) -> Runs {
        self.record.runs.clone()
    }

    /// Failed rows by kind.
    pub fn failures(&self) -> &BTreeMap<String, FailureSummary> {
        &self.record.failures
    }

    /// For a retry: how many rows it replaces in all.
    pub fn wanted(&self) -> Option<u64> {
        self.wanted.as_ref().map(RoaringTreemap::len)
    }

    /// Number of parts.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The ledger of a finished job.
    pub(crate) fn of_finished(summary: &Summary) -> Self {
        let mut ledger = Self::default();
        ledger.committed.insert_range(0..summary.images);
        // Only their number is needed.
        ledger.wanted = summary.whole.as_ref().map(|_| ledger.committed.clone());
        ledger.record.rows = summary.images;
        ledger.record.failures = summary.failures.clone();
        ledger.parts = summary.parts.clone();
        ledger
    }

    /// Counts rows that are not stored, as a commit would.
    ///
    /// # Errors
    /// If a row is malformed.
    pub fn count(&mut self, rows: Vec<Row>) -> Result<Committed, StorageError> {
        let given = rows.len();
        let rows = self.new_rows(rows)?;
        let record = PartRecord::of(&rows);
        self.add(self.next_number, String::new(), record);
        Ok(Committed::of(given, rows.len(), None))
    }

    /// The rows to commit, sorted by index: without those already committed or not replaced by a
    /// retry, and only the first of duplicates.
    pub(crate) fn new_rows(&self, mut rows: Vec<Row>) -> Result<Vec<Row>, StorageError> {
        rows.sort_by_key(|row| row.image.index);
        rows.dedup_by_key(|row| row.image.index);
        rows.retain(|row| {
            let index = row.image.index;
            let is_wanted = |wanted: &RoaringTreemap| wanted.contains(index);
            !self.committed.contains(index) && self.wanted.as_ref().is_none_or(is_wanted)
        });
        match rows.last() {
            // Rows have signed integers, so two of these would collide.
            Some(row) if i64::try_from(row.image.index).is_err() => Err(StorageError::new(
                StorageErrorKind::Corrupt,
                format!(
                    "the row of {} is malformed: its index {} is above 2^63 - 1",
                    row.image.uri, row.image.index
                ),
            )),
            _ => Ok(rows),
        }
    }

    /// Counts a part; `false` if it repeats a committed index.
    pub(crate) fn add(&mut self, number: u64, name: String, record: PartRecord) -> bool {
        let ranges = record.runs.ranges();
        let added: u64 = ranges
            .map(|(start, end)| self.committed.insert_range(start..=end))
            .sum();
        let is_new = added == record.rows;
        self.next_number = number + 1;
        if !name.is_empty() {
            self.parts.push(PartSummary {
                name,
                rows: record.rows,
            });
        }
        self.record.add(record);
        is_new
    }

    /// What all sinks of the run have committed so far.
    pub fn summary(&self, job: &JobRecord) -> Summary {
        Summary {
            job_id: job.job_id.clone(),
            run: job.run.clone(),
            source: job.source.clone(),
            model: job.model.clone(),
            model_version: job.model_version.clone(),
            images: self.record.rows,
            ok: self.record.rows - self.record.failed(),
            failed: self.record.failed(),
            failures: self.record.failures.clone(),
            parts: self.parts.clone(),
            whole: None,
        }
    }

    /// # Errors
    /// [`Incomplete`](StorageErrorKind::Incomplete) if an index below the last one is missing, or a
    /// row that a retry replaces.
    pub(crate) fn refuse_gaps(&self, place: impl std::fmt::Display) -> Result<(), StorageError> {
        let committed = &self.committed;
        if let Some(wanted) = &self.wanted {
            let missing = wanted - committed;
            return match missing.min() {
                None => Ok(()),
                Some(index) => Err(StorageError::new(
                    StorageErrorKind::Incomplete,
                    format!(
                        "{place} lacks the new row of index {index}, so the retry is not finished; run the same command again"
                    ),
                )),
            };
        }
        let missing = match self.may_have_gaps {
            true => None,
            false => first_missing(committed),
        };
        let Some(missing) = missing else {
            return Ok(());
        };
        let message = format!(
            "{place} lacks the row of index {missing}, so the job is not finished; run the same command again"
        );
        Err(StorageError::new(StorageErrorKind::Incomplete, message))
    }
}
