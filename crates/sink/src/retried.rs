//! A retry in an output of parts: the rows that it replaces, and the job's totals with them.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use roaring::RoaringTreemap;
use tokio::task::spawn_blocking;
use trommel_storage::{StorageError, StorageErrorKind};

use crate::generations::{FailedImages, FailedRow, Generation, broken_off, existing, failed_rows};
use crate::part::PartRecord;
use crate::read_back::indices;
use crate::summary::{StoredSummary, Times};
use crate::takeover::{Identity, SUCCESS, SUMMARY, StoredJob, folder_of, read};
use crate::{Destination, Existing, FailedImage, JobRecord, Ledger, PartSummary, Retry, Summary};

/// The rows that a retry builds on.
pub(crate) struct Retried {
    retry: Retry,
    /// What it classifies: failed rows for images of another source are not its own.
    source: String,
    /// The location of the job's own parts.
    place: Destination,
    job: Arc<JobRecord>,
    /// The job's summary, if its output is finished.
    finished: Option<Summary>,
    /// The valid rows without this retry.
    generations: Vec<Generation>,
}

impl Retried {
    /// Finds the job that `record` retries, and the retry's number if it has none yet: that of an
    /// interrupted retry, or the next one. Returns the record and its location as well.
    pub(crate) async fn find(
        place: &Destination,
        record: JobRecord,
        identity: Identity,
    ) -> Result<(Self, JobRecord, Destination), StorageError> {
        let asked = record.retry.clone().unwrap_or_default();
        let stored = place.stored_job().await?.filter(|stored| match identity {
            Identity::Run => stored.job.job_id == record.job_id && stored.job.run == asked.of_run,
            Identity::Spec => asked.adds || stored.is(&record, identity),
        });
        let Some(stored) = stored else {
            return Err(no_rows(place, &record, identity));
        };
        if asked.adds {
            stored.refuse_other_rows(place, &record)?;
        }
        let job = Arc::new(stored.job);
        let finished = place.complete(&job).await?;
        if finished.is_none() && identity == Identity::Spec && !asked.adds {
            return Err(unfinished(place));
        }
        let counted = |before| place.counted(&job, finished.as_ref(), before);
        let (retry, generations) = match identity {
            Identity::Run => {
                let generations = counted(asked.number).await?;
                (asked, generations)
            }
            Identity::Spec => {
                let mut retry = place.next_retry(&job, asked).await?;
                let generations = counted(retry.number).await?;
                if retry.adds {
                    let rows = place.indices_of(&generations).await?.len();
                    // Its indices were free then, and are not now: its rows never count.
                    if retry.of_rows != rows
                        && place.of_retry(retry.number).stored_job().await?.is_some()
                    {
                        retry.number += 1;
                    }
                    retry.of_rows = rows;
                }
                (retry, generations)
            }
        };
        if let (Some(_), false) = (&place.file, retry.adds) {
            place.refuse_other_source(&record, retry.number).await?;
        }
        let own = Destination {
            // An unfinished job has no file yet, and only a job that adds to it finishes it.
            file: place
                .file
                .clone()
                .filter(|_| finished.is_some() || retry.adds),
            ..place.of_retry(retry.number)
        };
        let source = record.source.clone();
        let record = JobRecord {
            job_id: job.job_id.clone(),
            retry: Some(retry.clone()),
            ..record
        };
        let retried = Self {
            retry,
            source,
            place: place.clone(),
            job,
            finished,
            generations,
        };
        Ok((retried, record, own))
    }

    /// Whether it adds rows instead of replacing failed ones.
    pub(crate) fn adds(&self) -> bool {
        self.retry.adds
    }

    /// Whether the job is finished without the rows that this one adds.
    pub(crate) fn is_done(&self) -> bool {
        self.retry.adds && self.finished.is_some()
    }

    /// The files that precede the retry in a single file, each with the indices that later ones
    /// supersede; `own` are the retry's.
    pub(crate) fn before(&self, own: &RoaringTreemap) -> Vec<(PathBuf, RoaringTreemap)> {
        if let (Some(file), Some(_)) = (&self.place.file, &self.finished) {
            return vec![(file.clone(), own.clone())];
        }
        let (mut superseded, mut before) = (own.clone(), Vec::new());
        for generation in self.generations.iter().rev() {
            let paths = generation.paths(self.place.parts()).into_iter().rev();
            before.extend(paths.map(|path| (path, superseded.clone())));
            superseded |= generation.indices();
        }
        before.reverse();
        before
    }

    /// The images with valid rows, or rows in `own`.
    pub(crate) async fn existing(
        &self,
        own: Option<&Generation>,
    ) -> Result<Existing, StorageError> {
        let all: Vec<_> = self.generations.iter().chain(own).collect();
        let mut existing = existing(&all, &self.job).await?;
        if own.is_some() {
            existing.fill_from(self.retry.of_rows);
        }
        Ok(existing)
    }

    /// The indices of the rows to replace, without those already replaced in a single file; `None`
    /// if rows are added.
    pub(crate) async fn wanted(&self) -> Result<Option<RoaringTreemap>, StorageError> {
        if self.retry.adds {
            return Ok(None);
        }
        let all = (self.retry.clone(), RoaringTreemap::new());
        let add = |(retry, wanted): &mut (Retry, RoaringTreemap), row: FailedRow| {
            if retry.wants(&row.kind) {
                wanted.insert(row.image.index);
            }
        };
        let (none, source) = (RoaringTreemap::new(), Some(self.source.as_str()));
        let (_, wanted) = failed_rows(&self.generations, &self.job, source, none, all, add).await?;
        Ok(Some(wanted))
    }

    /// The images whose rows are to be replaced and are not in `committed`, sorted by index.
    pub(crate) async fn images(
        &self,
        committed: &RoaringTreemap,
    ) -> Result<Vec<FailedImage>, StorageError> {
        let (committed, all) = (committed.clone(), FailedImages::of(&self.retry));
        let (source, add) = (Some(self.source.as_str()), FailedImages::add);
        let all = failed_rows(&self.generations, &self.job, source, committed, all, add).await?;
        all.finish()
    }

    /// The job's totals with the rows of the retry.
    pub(crate) async fn whole(&self, own: &Ledger) -> Result<Summary, StorageError> {
        let (committed, all) = (own.committed.clone(), PartRecord::default());
        let (generations, job) = (&self.generations, &self.job);
        let failed = failed_rows(generations, job, None, committed, all, count_failure);
        let mut failed = failed.await?;
        failed.add(PartRecord {
            failures: own.record.failures.clone(),
            ..PartRecord::default()
        });
        let rows = self.generations.first().map_or(0, Generation::rows);
        let images = match (&self.finished, self.retry.adds) {
            (_, true) => (self.place.indices_of(generations).await? | &own.committed).len(),
            (Some(summary), false) => summary.images,
            (None, false) => rows,
        };
        let folder = folder_of(self.retry.number).unwrap_or_default() + "/";
        let before: Vec<PartSummary> = match (&self.finished, self.retry.adds) {
            (Some(summary), _) => summary.parts.clone(),
            (None, true) => generations.iter().flat_map(Generation::parts).collect(),
            (None, false) => Vec::new(),
        };
        let before = before.into_iter();
        let before = before.filter(|part| !part.name.starts_with(&folder));
        let after = own.parts.iter().map(|part| PartSummary {
            name: format!("{folder}{}", part.name),
            rows: part.rows,
        });
        Ok(Summary {
            images,
            ok: images - failed.failed().min(images),
            failed: failed.failed(),
            parts: before.chain(after).collect(),
            failures: failed.failures,
            ..Ledger::default().summary(&self.job)
        })
    }

    /// Records the job's totals if it is finished, with or without the added rows.
    pub(crate) async fn note(&self, whole: &Summary) -> Result<(), StorageError> {
        if self.finished.is_none() && !self.retry.adds {
            return Ok(());
        }
        // If it was suspended during a later retry, it would undo that one's counts.
        let retries = self.place.retries().await?;
        if retries.range(self.retry.number + 1..).next().is_some() {
            return Err(StorageError::lost_race(self.place.store.locate(SUMMARY)));
        }
        self.place.refuse_other_run(&self.job).await?;
        let path = self.place.store.locate(SUMMARY);
        let times = match &self.finished {
            None => Times::now(&self.job),
            Some(_) => {
                let text = read(&*self.place.store, SUMMARY).await?;
                let times = Times::retried(&text.unwrap_or_default());
                times.map_err(|error| StorageError::corrupt(path.as_ref(), error))?
            }
        };
        let text = StoredSummary::new(whole, times).text();
        self.place.store.put(SUMMARY, text.into()).await?;
        if self.finished.is_none() {
            self.place.store.put(SUCCESS, Bytes::new()).await?;
        }
        Ok(())
    }

    /// Removes the job's own parts after they were merged into the single file.
    pub(crate) async fn remove_merged(&self, whole: &Summary) -> Result<(), StorageError> {
        match self.retry.adds {
            true => self.place.remove_merged(whole).await,
            false => Ok(()),
        }
    }

    /// Refuses a retry with nothing to replace.
    pub(crate) fn refuse_none(&self, wanted: &RoaringTreemap) -> Result<(), StorageError> {
        match wanted.is_empty() {
            true => Err(nothing_failed(&self.place, &self.retry)),
            false => Ok(()),
        }
    }
}

/// Counts a failed row.
pub(crate) fn count_failure(record: &mut PartRecord, row: FailedRow) {
    record.count_failure(&row.kind, 1, &row.image.uri, &row.error);
}

impl Destination {
    /// The valid files of the job that is here, without retries from number `before` on.
    async fn counted(
        &self,
        job: &Arc<JobRecord>,
        finished: Option<&Summary>,
        before: u32,
    ) -> Result<Vec<Generation>, StorageError> {
        match (&self.file, finished) {
            (Some(file), Some(_)) => Ok(vec![Generation::of_file(file, self.format)]),
            _ => {
                let parts = finished.map(|summary| summary.parts.as_slice());
                self.generations(job, parts, before).await
            }
        }
    }

    /// The indices of all valid rows.
    async fn indices_of(&self, generations: &[Generation]) -> Result<RoaringTreemap, StorageError> {
        let mut all = RoaringTreemap::new();
        for generation in generations {
            all |= match generation.file() {
                None => generation.indices(),
                Some(file) => {
                    let (file, format) = (file.to_owned(), self.format);
                    let read = spawn_blocking(move || indices(&file, format)).await;
                    read.map_err(|_| broken_off("reading the rows"))??
                }
            };
        }
        Ok(all)
    }

    /// Refuses to retry rows of a single file that also has rows of another source, because it does
    /// not record which ones.
    async fn refuse_other_source(
        &self,
        record: &JobRecord,
        before: u32,
    ) -> Result<(), StorageError> {
        for number in self.retries().await?.range(..before) {
            let stored = self.of_retry(*number).stored_job().await?;
            let other = stored.filter(|stored| stored.job.source != record.source);
            if let Some(StoredJob { job, .. }) = other {
                return Err(StorageError::new(
                    StorageErrorKind::Incomplete,
                    format!(
                        "rows of {} were added to {self}, and which of its failed rows are theirs is not known; classify all again with --overwrite",
                        job.source
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Refuses to resume a job to which rows of new images were added: positions in its listing are
    /// no longer its indices.
    pub(crate) async fn refuse_added(&self, job: &JobRecord) -> Result<(), StorageError> {
        for number in self.retries().await? {
            let place = self.of_retry(number);
            let Some(stored) = place.stored_job().await? else {
                continue;
            };
            let adds = |retry: &Retry| retry.adds && retry.of_run == job.run;
            if stored.job.retry.as_ref().is_some_and(adds)
                && place.marked(&stored.job).await?.is_some()
            {
                return Err(StorageError::new(
                    StorageErrorKind::Incomplete,
                    format!(
                        "{self} lacks rows that it had when others were added to it; make what is missing with --skip-existing, or start over with --overwrite"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The retry that a process working here alone resumes or begins.
    async fn next_retry(&self, job: &JobRecord, asked: Retry) -> Result<Retry, StorageError> {
        let last = self.retries().await?.last().copied().unwrap_or_default();
        let place = self.of_retry(last);
        let stored = match last {
            0 => None,
            _ => place.stored_job().await?,
        };
        if let Some(stored) = stored
            && let Some(retry) = &stored.job.retry
            && retry.of_run == job.run
            && place.marked(&stored.job).await?.is_none()
        {
            return go_on_with(self, retry, &asked);
        }
        Ok(Retry {
            number: last + 1,
            of_run: job.run.clone(),
            ..asked
        })
    }
}

/// The interrupted retry, if it is the requested one.
pub(crate) fn go_on_with(
    place: impl std::fmt::Display,
    retry: &Retry,
    asked: &Retry,
) -> Result<Retry, StorageError> {
    if retry.kinds == asked.kinds && retry.adds == asked.adds {
        return Ok(retry.clone());
    }
    let flag = retry.flag();
    Err(StorageError::new(
        StorageErrorKind::Incomplete,
        format!("a run in {place} was interrupted; finish it first, with {flag}"),
    ))
}

pub(crate) fn nothing_failed(place: impl std::fmt::Display, retry: &Retry) -> StorageError {
    let kinds = retry.kinds_in_words();
    StorageError::new(
        StorageErrorKind::OutputExists,
        format!("no row in {place} failed{kinds}, so there is nothing to try again"),
    )
}

pub(crate) fn unfinished(place: impl std::fmt::Display) -> StorageError {
    StorageError::new(
        StorageErrorKind::Incomplete,
        format!(
            "{place} is not finished; run the same command without --retry-failed first, then its failed rows can be tried again"
        ),
    )
}

pub(crate) fn no_rows(
    place: impl std::fmt::Display,
    record: &JobRecord,
    identity: Identity,
) -> StorageError {
    let job = match identity {
        Identity::Run => format!("job {}", record.job_id),
        Identity::Spec => "this job".to_owned(),
    };
    StorageError::new(
        StorageErrorKind::OutputOfAnotherJob,
        format!("{place} holds no rows of {job}, so none of them can be tried again"),
    )
}
