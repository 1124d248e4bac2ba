use roaring::RoaringTreemap;
use trommel_types::Classification;

use crate::sink::Committed;
use crate::sink::finish::{PartSummary, Summary};
use crate::sink::part::PartRecord;
use crate::sink::row::JobRecord;
use crate::{StorageError, StorageErrorKind};

/// What is committed of a job, as its parts tell.
#[derive(Default)]
pub(super) struct Ledger {
    pub(super) committed: RoaringTreemap,
    /// All parts together.
    pub(super) record: PartRecord,
    pub(super) parts: Vec<PartSummary>,
    pub(super) next_number: u64,
    /// Whether indices may be missing: images were added to what is left of an earlier listing.
    pub(super) may_have_gaps: bool,
}

impl Ledger {
    /// Commits rows as the next part, sorted by index. Those that are committed already, or stand
    /// twice among them, are dropped. `store` makes the part of this number durable and names it.
    pub(super) fn commit(
        &mut self,
        mut rows: Vec<Classification>,
        store: impl FnOnce(u64, &[Classification], &PartRecord) -> Result<String, StorageError>,
    ) -> Result<Committed, StorageError> {
        let given = rows.len() as u64;
        rows.sort_by_key(|row| row.image.index);
        rows.dedup_by_key(|row| row.image.index);
        rows.retain(|row| !self.committed.contains(row.image.index));
        let count = rows.len() as u64;
        let mut part = None;
        if count > 0 {
            let (number, record) = (self.next_number, PartRecord::of(&rows));
            let name = store(number, &rows, &record)?;
            part = Some(name.clone());
            let is_new = self.add(number, name, record);
            debug_assert!(is_new, "rows that are committed were dropped before");
        }
        Ok(Committed {
            part,
            rows: count,
            duplicates_dropped: given - count,
        })
    }

    /// Counts a part in; `false` if an index of it is committed twice.
    pub(super) fn add(&mut self, number: u64, name: String, record: PartRecord) -> bool {
        let ranges = record.runs.ranges();
        let added: u64 = ranges
            .map(|(start, end)| self.committed.insert_range(start..=end))
            .sum();
        let is_new = added == record.rows;
        self.next_number = number + 1;
        self.parts.push(PartSummary {
            name,
            rows: record.rows,
        });
        self.record.add(record);
        is_new
    }

    /// What is committed so far, by all runs.
    pub(super) fn summary(&self, job: &JobRecord) -> Summary {
        Summary {
            job_id: job.job_id.clone(),
            source: job.source.clone(),
            model: job.model.clone(),
            model_version: job.model_version.clone(),
            images: self.record.rows,
            ok: self.record.rows - self.record.failed(),
            failed: self.record.failed(),
            failures: self.record.failures.clone(),
            parts: self.parts.clone(),
        }
    }

    /// # Errors
    /// [`Incomplete`](StorageErrorKind::Incomplete) when an index is missing before the last one.
    pub(super) fn refuse_gaps(&self, place: impl std::fmt::Display) -> Result<(), StorageError> {
        let committed = &self.committed;
        if self.may_have_gaps
            || committed
                .max()
                .is_none_or(|last| committed.len().checked_sub(1) == Some(last))
        {
            return Ok(());
        }
        let missing = (0..)
            .zip(committed)
            .find(|(expected, index)| index != expected);
        let missing = missing.map_or(0, |(expected, _)| expected);
        let message = format!(
            "{place} lacks the row of index {missing}, so the job is not finished; run the same command again"
        );
        Err(StorageError::new(StorageErrorKind::Incomplete, message))
    }
}
