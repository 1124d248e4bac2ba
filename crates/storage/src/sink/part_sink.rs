use std::fs::File;
use std::path::Path;

use roaring::RoaringTreemap;
use trommel_types::Classification;

use crate::StorageError;
use crate::sink::files::probe;
use crate::sink::finish;
use crate::sink::folder::{self, SUCCESS, StoredJob, Taken};
use crate::sink::ledger::Ledger;
use crate::sink::owner::Owner;
use crate::sink::part::{self, PartRecord};
use crate::sink::read_back::for_each_image;
use crate::sink::row::JobRecord;
use crate::sink::{Committed, Destination, Existing, Opened, Reuse, Runs, SourceCheck};

/// Commits the rows of one job in parts, each index once.
///
/// Blocking: to be called on a thread that may wait.
pub struct PartSink {
    pub(super) destination: Destination,
    pub(super) stored: StoredJob,
    pub(super) ledger: Ledger,
    is_resumed: bool,
    _lock: Option<File>,
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
        let reuse = Reuse::or_overwrite(overwrite);
        Self::open_with(destination, job, reuse, folder::lock)
    }

    /// As [`PartSink::open`], but a finished job is opened again to add rows to it.
    ///
    /// # Errors
    /// As [`PartSink::open`], and for a finished single file.
    pub fn open_to_extend(
        destination: &Destination,
        job: JobRecord,
    ) -> Result<Opened, StorageError> {
        Self::open_with(destination, job, Reuse::Extend, folder::lock)
    }

    /// As [`PartSink::open`], for a caller that holds a lease on the job: no lock is taken, so that
    /// a process that has stopped without ending does not hold up its heir.
    ///
    /// # Errors
    /// As [`PartSink::open`].
    pub fn open_leased(
        destination: &Destination,
        job: JobRecord,
        overwrite: bool,
    ) -> Result<Opened, StorageError> {
        let reuse = Reuse::or_overwrite(overwrite);
        Self::open_with(destination, job, reuse, |_| Ok(None))
    }

    fn open_with(
        destination: &Destination,
        job: JobRecord,
        reuse: Reuse,
        lock: impl FnOnce(&Path) -> Result<Option<File>, StorageError>,
    ) -> Result<Opened, StorageError> {
        let overwrite = reuse == Reuse::Overwrite;
        folder::refuse_foreign(destination, overwrite)?;
        let dir = &destination.parts;
        folder::create(dir)?;
        let lock = lock(dir)?;
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
                if reuse != Reuse::Extend {
                    return Ok(Opened::Complete(Box::new(summary)));
                }
                if let Some(file) = &destination.file {
                    return Err(folder::output_exists(
                        file,
                        "is finished, and rows can be added to a folder of parts only",
                    ));
                }
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
            ledger: Ledger::default(),
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
        &self.ledger.committed
    }

    /// The same as runs of consecutive indices, with hashes of their uris.
    pub fn committed_runs(&self) -> Runs {
        self.ledger.record.runs.clone()
    }

    /// Compares a listing with what is committed now.
    pub fn source_check(&self) -> SourceCheck {
        SourceCheck::new(self.committed_runs())
    }

    /// The images that are committed now; see [`ResultSink::existing`](crate::ResultSink::existing).
    ///
    /// # Errors
    /// When a part cannot be read.
    pub fn existing(&mut self) -> Result<Existing, StorageError> {
        let mut existing = Existing::new(self.ledger.committed.clone());
        for part in &self.ledger.parts {
            let path = self.destination.parts.join(&part.name);
            for_each_image(&path, self.destination.format, |uri, etag| {
                existing.add(uri, etag);
            })?;
        }
        self.ledger.may_have_gaps = true;
        Ok(existing)
    }

    /// Makes rows durable as one part, sorted by index. Rows whose index is committed already, or
    /// stands twice among them, are dropped; of the latter the first one stays.
    ///
    /// # Errors
    /// When the part cannot be written, or another process has taken its number. Nothing of it is
    /// left behind, and what was committed before is untouched. After
    /// [`LostRace`](crate::StorageErrorKind::LostRace) this sink can commit nothing more.
    pub fn commit(&mut self, rows: Vec<Classification>) -> Result<Committed, StorageError> {
        let (dir, format) = (&self.destination.parts, self.destination.format);
        let job = &self.stored.job;
        self.ledger.commit(rows, |number, rows, record| {
            let name = part::name(number, format);
            part::commit(dir, &name, format, job, rows, record)?;
            Ok(name)
        })
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
            if !self.ledger.add(number, name, record) {
                return Err(StorageError::corrupt(
                    &path,
                    "it repeats rows that are committed",
                ));
            }
        }
        Ok(())
    }
}
