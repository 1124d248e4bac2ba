use std::fs::File;

use roaring::RoaringTreemap;
use trommel_types::Classification;

use crate::StorageError;
use crate::sink::files::probe;
use crate::sink::finish::{self, PartSummary, Summary};
use crate::sink::folder::{self, SUCCESS, StoredJob, Taken};
use crate::sink::output::Owner;
use crate::sink::part::{self, PartRecord};
use crate::sink::row::JobRecord;
use crate::sink::{Destination, Runs, SourceCheck};

/// Commits the rows of one job in parts, each index once.
///
/// Blocking: to be called on a thread that may wait.
pub struct PartSink {
    pub(super) destination: Destination,
    pub(super) stored: StoredJob,
    committed: RoaringTreemap,
    /// All parts together.
    pub(super) record: PartRecord,
    pub(super) parts: Vec<PartSummary>,
    next_number: u64,
    is_resumed: bool,
    _lock: File,
}

/// What is at a destination.
pub enum Opened {
    /// A job to work on: a new one, or one that was interrupted; see [`PartSink::is_resumed`].
    Ready(Box<PartSink>),
    /// The same job, finished.
    Complete(Box<Summary>),
}

/// What a commit did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// File name of the new part; `None` when there was nothing to write.
    pub part: Option<String>,
    /// Rows in it.
    pub rows: u64,
    /// Rows that were committed before, or stood twice in the batch.
    pub duplicates_dropped: u64,
}

impl PartSink {
    /// Opens a destination for a job: a new one, or the one that is there if it is the same in
    /// all but its id and time of creation.
    ///
    /// `overwrite` starts over: it removes the parts of the job that is there, and lets the new
    /// single file take the place of the old one in the end. It touches no file that is not known
    /// to be Trommel's.
    ///
    /// # Errors
    /// Before any row is written, and with what is there as it was: when the destination cannot be
    /// written, is locked by another process, holds another job or files that are none of
    /// Trommel's, or has a damaged part.
    pub fn open(
        destination: &Destination,
        job: JobRecord,
        overwrite: bool,
    ) -> Result<Opened, StorageError> {
        folder::refuse_foreign(destination, overwrite)?;
        let dir = &destination.parts;
        folder::create(dir)?;
        let lock = folder::lock(dir)?;
        // Another process may have worked here until the lock was ours.
        folder::refuse_foreign(destination, overwrite)?;
        folder::remove_leftovers(dir)?;
        probe(dir)?;
        if let Some(file) = &destination.file {
            probe(Destination::parent_of(file))?;
        }

        let (stored, is_resumed) = match folder::take(destination, job, overwrite)? {
            Taken::New(stored) => (stored, false),
            Taken::Old(stored) => (stored, true),
        };
        if dir.join(SUCCESS).exists() {
            if let Some(summary) = finish::complete(destination, &stored.job)? {
                return Ok(Opened::Complete(Box::new(summary)));
            }
            // Results were taken away: what is missing is made again.
            folder::reopen(dir)?;
        }
        if let Some(file) = &destination.file {
            let owner = Owner::of(file, destination.format);
            if owner != Owner::Absent && !stored.may_replace(&owner) {
                return Err(folder::output_exists(file, "is not the result of this job"));
            }
        }
        let mut sink = Self {
            destination: destination.clone(),
            stored,
            committed: RoaringTreemap::new(),
            record: PartRecord::default(),
            parts: Vec::new(),
            next_number: 0,
            is_resumed,
            _lock: lock,
        };
        sink.rebuild()?;
        Ok(Opened::Ready(Box::new(sink)))
    }

    /// The job, with the id of its first run.
    pub fn job(&self) -> &JobRecord {
        &self.stored.job
    }

    /// The job's id: the one of its first run.
    pub fn job_id(&self) -> &str {
        &self.stored.job.job_id
    }

    /// Whether an earlier run has begun this job.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// Indices whose rows are durable.
    pub fn committed(&self) -> &RoaringTreemap {
        &self.committed
    }

    /// The same as runs of consecutive indices, with hashes of their uris.
    pub fn committed_runs(&self) -> Runs {
        self.record.runs.clone()
    }

    /// Compares a listing with what is committed now.
    pub fn source_check(&self) -> SourceCheck {
        SourceCheck::new(self.committed_runs())
    }

    /// Makes rows durable as one part, sorted by index. Rows whose index is committed already, or
    /// stands twice among them, are dropped; of the latter the first one stays.
    ///
    /// # Errors
    /// When the part cannot be written, or another process has taken its number. Nothing of it is
    /// left behind, and what was committed before is untouched. After
    /// [`LostRace`](crate::StorageErrorKind::LostRace) this sink can commit nothing more.
    pub fn commit(&mut self, mut rows: Vec<Classification>) -> Result<Committed, StorageError> {
        let given = rows.len() as u64;
        rows.sort_by_key(|row| row.image.index);
        rows.dedup_by_key(|row| row.image.index);
        rows.retain(|row| !self.committed.contains(row.image.index));
        let count = rows.len() as u64;
        let mut part = None;
        if count > 0 {
            let (dir, format) = (&self.destination.parts, self.destination.format);
            let name = part::name(self.next_number, format);
            let record = part::commit(dir, &name, format, &self.stored.job, &rows)?;
            part = Some(name.clone());
            let is_new = self.add(name, record);
            debug_assert!(is_new, "rows that are committed were dropped before");
        }
        Ok(Committed {
            part,
            rows: count,
            duplicates_dropped: given - count,
        })
    }

    /// Counts a part in; `false` if an index of it is committed twice.
    fn add(&mut self, name: String, record: PartRecord) -> bool {
        let ranges = record.runs.ranges();
        let added: u64 = ranges
            .map(|(start, end)| self.committed.insert_range(start..=end))
            .sum();
        let is_new = added == record.rows;
        self.next_number += 1;
        self.parts.push(PartSummary {
            name,
            rows: record.rows,
        });
        self.record.add(record);
        is_new
    }

    /// Learns from the parts what is committed.
    fn rebuild(&mut self) -> Result<(), StorageError> {
        let (dir, format) = (self.destination.parts.clone(), self.destination.format);
        let names = folder::names(&dir)?;
        let mut numbers: Vec<u64> = names
            .iter()
            .filter_map(|name| part::number(name, format))
            .collect();
        numbers.sort_unstable();
        for number in numbers {
            let name = part::name(number, format);
            let path = dir.join(&name);
            let record = PartRecord::read(&path, format, &self.stored.job)?;
            self.next_number = number;
            if !self.add(name, record) {
                return Err(StorageError::corrupt(
                    &path,
                    "it repeats rows that are committed",
                ));
            }
        }
        Ok(())
    }
}
