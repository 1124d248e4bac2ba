use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use roaring::RoaringTreemap;
use tokio::task::spawn_blocking;
use trommel_storage::local::{Hidden, sync_dir};
use trommel_storage::s3::Object;
use trommel_storage::{StorageError, StorageErrorKind};

use crate::claims::Claimed;
use crate::format::MergePart;
use crate::generations::{Generation, broken_off, failed_rows, record_of};
use crate::owner::Owner;
use crate::part::{PartName, PartRecord};
use crate::retried::{Retried, count_failure, no_rows};
use crate::row::Row;
use crate::summary::{StoredSummary, Times};
use crate::takeover::{Identity, SUCCESS, SUMMARY, StoredJob, output_exists, read};
use crate::{
    CascadeRows, Claims, Committed, Destination, EncodedPart, Existing, FailedImage, Format,
    JobRecord, Ledger, Opened, Preconditions, ResultSink, Reuse, Summary,
};

/// Parts read concurrently.
const READS: usize = 32;

/// Commits the rows of one job in parts, to a folder or a bucket. `design.md` describes the
/// protocol.
pub(crate) struct PartSink {
    /// Where the parts are.
    place: Destination,
    /// For a retry, the rows that it builds on.
    retried: Option<Retried>,
    stored: StoredJob,
    job: Arc<JobRecord>,
    is_resumed: bool,
    /// Whether only this process works on the job.
    is_alone: bool,
    ledger: Ledger,
    claims: Option<Claimed>,
    _lock: Option<File>,
}

/// How a destination is opened.
pub(crate) struct How {
    pub(crate) reuse: Reuse,
    pub(crate) identity: Identity,
    /// Used if the store ignores preconditions.
    pub(crate) claims: Option<Arc<dyn Claims>>,
    pub(crate) preconditions: Preconditions,
}

impl PartSink {
    pub(crate) async fn open(
        destination: &Destination,
        job: JobRecord,
        how: How,
    ) -> Result<Opened, StorageError> {
        let How {
            reuse,
            identity,
            claims,
            preconditions,
        } = how;
        let mut job = JobRecord {
            format: destination.format,
            ..job
        };
        let overwrite = reuse == Reuse::Overwrite;
        if job.adds() && identity == Identity::Spec && destination.stored_job().await?.is_none() {
            job.retry = None; // all of its images are new
        }
        let is_retry = job.retry.is_some();
        if !is_retry {
            destination.refuse_foreign(overwrite).await?;
        }
        let lock = match identity {
            // The caller holds a lease; a process that is suspended must not block its successor.
            Identity::Run => None,
            Identity::Spec if is_retry && destination.stored_job().await?.is_none() => {
                return Err(no_rows(destination, &job, identity));
            }
            Identity::Spec => {
                let lock = destination.lock()?;
                // Another process may have worked here before we got the lock.
                destination.refuse_foreign(overwrite).await?;
                lock
            }
        };
        let (retried, job, place) = match is_retry {
            false => (None, job, destination.clone()),
            true => {
                let (retried, job, place) = Retried::find(destination, job, identity).await?;
                (Some(retried), job, place)
            }
        };
        let wanted = match &retried {
            None => None,
            Some(retried) => retried.wanted().await?,
        };
        // A retry that was begun is finished, even if all of its rows have been replaced.
        if let (Some(retried), Some(wanted), Identity::Spec) = (&retried, &wanted, identity)
            && place.stored_job().await?.is_none()
        {
            retried.refuse_none(wanted)?;
        }
        place.store.tidy().await?;
        place.probe_file()?;
        let (stored, is_resumed) = place.take(job, reuse, identity, claims.as_deref()).await?;
        let is_marked = read(&*place.store, SUCCESS).await?.is_some();
        let complete = place.complete(&stored.job).await?;
        if complete.is_none() && is_resumed && retried.is_none() {
            place.refuse_added(&stored.job).await?;
        }
        match complete {
            Some(summary) => return Ok(Opened::Complete(Box::new(summary))),
            // Results were removed, so the missing ones are made again, or the marks belong to
            // another run.
            None if is_marked => {
                place.refuse_other_run(&stored.job).await?;
                place.reopen().await?;
            }
            None => {}
        }
        let claims = place.claims(&stored, preconditions, claims).await?;
        if let Some(file) = &place.file {
            let owner = place.format.owner_of(file);
            if owner != Owner::Absent && !stored.may_replace(&owner) {
                return Err(output_exists(
                    file.display(),
                    "is not the result of this job",
                ));
            }
        }
        let mut sink = Self {
            place,
            job: Arc::new(stored.job.clone()),
            stored,
            is_resumed,
            is_alone: identity == Identity::Spec,
            ledger: Ledger {
                may_have_gaps: retried.as_ref().is_some_and(Retried::adds),
                ..Ledger::default()
            },
            retried,
            claims,
            _lock: lock,
        };
        sink.rebuild().await?;
        // Rows already merged into a single file are no longer failed there.
        sink.ledger.wanted = wanted.map(|wanted| wanted | &sink.ledger.committed);
        Ok(Opened::Ready(Box::new(sink)))
    }

    /// Determines from the parts, or the claims, what is committed.
    async fn rebuild(&mut self) -> Result<(), StorageError> {
        // Claims first, so that parts claimed meanwhile are not missed among the objects.
        let listed = match &self.claims {
            None => Vec::new(),
            Some(claimed) => claimed.claims.list().await?,
        };
        let objects: Vec<Object> = self.place.store.list("part-", None).try_collect().await?;
        let own = objects.into_iter().filter_map(|object| {
            let name = PartName::parse(&object.key)?;
            // Late parts of other runs are ignored.
            (name.run == self.job.run && name.format == self.place.format).then_some((name, object))
        });
        let mut parts: Vec<(u64, Object)> = match &mut self.claims {
            None => own
                .filter(|(name, _)| name.revision.is_none())
                .map(|(name, object)| (name.number, object))
                .collect(),
            Some(claimed) => {
                let own: HashMap<_, _> = own
                    .map(|(_, object)| (object.key.clone(), object))
                    .collect();
                let mut parts = Vec::new();
                for claim in listed {
                    let Some(name) = claim.committed else {
                        // Only the last claim can be uncommitted.
                        claimed.replaces = Some(claim.revision);
                        self.ledger.next_number = self.ledger.next_number.max(claim.part);
                        continue;
                    };
                    if PartName::parse(&name).is_none_or(|name| name.run != self.job.run) {
                        // Its number is taken by a run that was overwritten.
                        self.ledger.next_number = self.ledger.next_number.max(claim.part + 1);
                        continue;
                    }
                    let object = own.get(&name).cloned().ok_or_else(|| {
                        let path = self.place.store.locate(&name);
                        let reason = "it was committed but no longer exists";
                        StorageError::corrupt(path.as_ref(), reason)
                    })?;
                    parts.push((claim.part, object));
                }
                parts
            }
        };
        parts.sort_unstable_by_key(|(number, _)| *number);
        let unfinished = self.ledger.next_number;
        let store = &self.place.store;
        let (format, job) = (self.place.format, &self.job);
        let mut records = stream::iter(parts)
            .map(|(number, object)| {
                let (store, job) = (Arc::clone(store), Arc::clone(job));
                async move {
                    let record = record_of(&store, &object, format, &job).await?;
                    Ok::<_, StorageError>((number, object.key, record))
                }
            })
            .buffered(READS);
        while let Some((number, name, record)) = records.try_next().await? {
            let path = store.locate(&name);
            if !self.ledger.add(number, name, record) {
                let reason = "it repeats rows that are committed";
                return Err(StorageError::corrupt(path.as_ref(), reason));
            }
        }
        self.ledger.next_number = self.ledger.next_number.max(unfinished);
        Ok(())
    }

    /// Makes encoded rows durable as the part with this number.
    async fn store(&mut self, number: u64, content: Bytes) -> Result<String, StorageError> {
        let mut name = PartName {
            number,
            run: self.job.run.clone(),
            revision: None,
            format: self.place.format,
        };
        let store = &self.place.store;
        let Some(claimed) = &mut self.claims else {
            let name = name.to_string();
            store.put_if_absent(&name, content).await?;
            return Ok(name);
        };
        let replaces = claimed.replaces.take();
        let revision = claimed.claims.open(number, replaces).await?;
        name.revision = Some(revision);
        let name = name.to_string();
        store.put(&name, content).await?;
        if let Err(error) = claimed.claims.commit(number, revision, &name).await {
            if error.kind() == StorageErrorKind::LostRace {
                // No other writer uses this name, and it never counts. If this fails, `finish`
                // removes it.
                drop(store.delete(&name).await);
            }
            return Err(error);
        }
        Ok(name)
    }

    /// Commits a part with the rows in `given`, without repeats, under the next number.
    async fn commit_part(
        &mut self,
        given: usize,
        part: EncodedPart,
    ) -> Result<Committed, StorageError> {
        let EncodedPart { content, record } = part;
        let (number, rows) = (self.ledger.next_number, record.rows);
        let name = self.store(number, content).await?;
        let is_new = self.ledger.add(number, name.clone(), record);
        debug_assert!(is_new, "rows that are committed were dropped before");
        let new = usize::try_from(rows).unwrap_or(given);
        Ok(Committed::of(given, new, Some(name)))
    }

    /// What is committed; for a retry including the job's totals, for a job including its retries.
    async fn whole_summary(&self) -> Result<Summary, StorageError> {
        let mut summary = self.ledger.summary(&self.job);
        if let Some(retried) = &self.retried {
            summary.whole = Some(Box::new(retried.whole(&self.ledger).await?));
            return Ok(summary);
        }
        if self.place.file.is_some() || self.place.retries().await?.is_empty() {
            return Ok(summary);
        }
        // Images were added to a job after its failed rows were retried.
        let (job, parts) = (&self.job, Some(summary.parts.as_slice()));
        let generations = self.place.generations(job, parts, u32::MAX).await?;
        let (none, all) = (RoaringTreemap::new(), PartRecord::default());
        let failed = failed_rows(&generations, job, None, none, all, count_failure).await?;
        summary.failed = failed.failed();
        summary.ok = summary.images - summary.failed.min(summary.images);
        summary.failures = failed.failures;
        let retries = generations.iter().skip(1);
        summary.parts.extend(retries.flat_map(Generation::parts));
        Ok(summary)
    }

    /// Merges the parts into the single file. An existing file is replaced only if it belongs to
    /// this job, from a finish that crashed, or one that `overwrite` abandoned.
    async fn write_file(&self, file: PathBuf) -> Result<(), StorageError> {
        let (stored, job, format) = (
            self.stored.clone(),
            Arc::clone(&self.job),
            self.place.format,
        );
        let dir = self.place.parts().to_owned();
        let parts = self.ledger.parts.iter();
        let parts: Vec<PathBuf> = parts.map(|part| dir.join(&part.name)).collect();
        let fingerprint = self.ledger.record.runs.fingerprint();
        let earlier = match &self.retried {
            None => Vec::new(),
            Some(retried) => retried.before(&self.ledger.committed),
        };
        let merged = spawn_blocking(move || {
            let part = |path, superseded| MergePart { path, superseded };
            let earlier = earlier.into_iter().map(|(path, later)| part(path, later));
            let own = parts
                .into_iter()
                .map(|path| part(path, RoaringTreemap::new()));
            let parts: Vec<MergePart> = earlier.chain(own).collect();
            let merged = Hidden::write(&dir, "merged", |out| {
                let merged = format.encoding().merge(&parts, out, &job, &fingerprint);
                merged.map_err(|error| error.named(&file))
            })?;
            let owner = format.owner_of(&file);
            if stored.may_replace(&owner) {
                merged.replace(&file)?;
            } else if owner != Owner::Absent || !merged.link(&file)? {
                return Err(output_exists(
                    file.display(),
                    "has come up while the job ran",
                ));
            }
            sync_dir(Destination::parent_of(&file))
        });
        merged
            .await
            .unwrap_or_else(|_| Err(broken_off("the merge")))
    }
}

#[async_trait]
impl ResultSink for PartSink {
    fn job(&self) -> &JobRecord {
        &self.job
    }

    fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    fn preconditions(&self) -> Preconditions {
        match self.claims {
            None => Preconditions::Honoured,
            Some(_) => Preconditions::Ignored,
        }
    }

    async fn commit(&mut self, rows: Vec<Row>) -> Result<Committed, StorageError> {
        let given = rows.len();
        let rows = self.ledger.new_rows(rows)?;
        if rows.is_empty() {
            return Ok(Committed::of(given, 0, None));
        }
        let number = self.ledger.next_number;
        let (job, format) = (Arc::clone(&self.job), self.place.format);
        let encoded = spawn_blocking(move || {
            let (record, mut out) = (PartRecord::of(&rows), Vec::new());
            let written = format.encoding().write(&mut out, &job, &rows, &record);
            let content = Bytes::from(out);
            written.map(|()| EncodedPart { content, record })
        });
        let encoded = encoded
            .await
            .map_err(|_| broken_off("the encoding of rows"))?;
        let part = encoded.map_err(|error| {
            let path = self.place.store.locate(&format!("part-{number:08}"));
            StorageError::write(path.as_ref(), error)
        })?;
        self.commit_part(given, part).await
    }

    fn takes_encoded(&self) -> bool {
        self.place.format == Format::Parquet && self.retried.is_none()
    }

    async fn commit_encoded(&mut self, part: EncodedPart) -> Result<Committed, StorageError> {
        let committed = &self.ledger.committed;
        let is_committed = part.record.runs.ranges().any(|(start, end)| {
            let before = start.checked_sub(1).map_or(0, |last| committed.rank(last));
            committed.rank(end) != before
        });
        if is_committed {
            return Err(StorageError::lost_race(&self.place.shown));
        }
        let given = usize::try_from(part.record.rows).unwrap_or(usize::MAX);
        self.commit_part(given, part).await
    }

    async fn failed_images(&mut self) -> Result<Vec<FailedImage>, StorageError> {
        match &self.retried {
            None => Ok(Vec::new()),
            Some(retried) => retried.images(&self.ledger.committed).await,
        }
    }

    async fn existing(&mut self) -> Result<Existing, StorageError> {
        let Some(retried) = &self.retried else {
            return Ok(Existing::default());
        };
        let own = match self.is_alone {
            true => Some(self.place.generation(&self.job, None).await?),
            false => None,
        };
        retried.existing(own.as_ref()).await
    }

    async fn cascade_rows(&mut self) -> Result<CascadeRows, StorageError> {
        let parts = Some(self.ledger.parts.as_slice());
        let parts = self.place.generation(&self.job, parts).await?;
        CascadeRows::of(&parts, &self.job).await
    }

    /// After a crash at any point, the next sink finishes the job.
    async fn finish(self: Box<Self>) -> Result<Summary, StorageError> {
        let place = &self.place;
        self.ledger.refuse_gaps(place)?;
        place.refuse_other_run(&self.job).await?;
        let summary = self.whole_summary().await?;
        let is_idle = summary.images == 0 && self.retried.as_ref().is_some_and(Retried::is_done);
        if let (Some(file), false) = (&place.file, is_idle) {
            self.write_file(file.clone()).await?;
        }
        // Late parts of other runs, and parts that have lost their claim.
        let counts = |name: &str| summary.parts.iter().any(|part| part.name == name);
        let late = place.parts_but(counts).await?;
        // Only now: what was listed before the output changed owners does not belong to its next
        // run.
        place.refuse_other_run(&self.job).await?;
        if let Some(claimed) = &self.claims
            && !claimed.claims.hold_output().await?
        {
            // A late record may have replaced that of the next run in the store.
            return Err(StorageError::lost_race(&place.shown));
        }
        place.remove(late).await?;
        // The job's counts before the mark of the retry, so that a crash in between is repaired.
        if let (Some(retried), Some(whole), false) = (&self.retried, &summary.whole, is_idle) {
            retried.note(whole).await?;
        }
        if self.ledger.may_have_gaps && summary.images == 0 {
            // Nothing was new, so there is nothing to record.
            place.store.delete(crate::takeover::JOB).await?;
        } else {
            let text = StoredSummary::new(&summary, Times::now(&self.job)).text();
            // The summary before the mark that announces it.
            place.store.put(SUMMARY, text.into()).await?;
            place.store.put(SUCCESS, Bytes::new()).await?;
        }
        if let Some(claimed) = &self.claims {
            claimed.claims.clear().await?;
        }
        place.remove_merged(&summary).await?;
        if let (Some(retried), Some(whole)) = (&self.retried, &summary.whole) {
            retried.remove_merged(whole).await?;
        }
        Ok(summary)
    }
}

impl Destination {
    /// Whether, and where, part numbers are claimed.
    async fn claims(
        &self,
        stored: &StoredJob,
        preconditions: Preconditions,
        claims: Option<Arc<dyn Claims>>,
    ) -> Result<Option<Claimed>, StorageError> {
        let is_honoured = match preconditions {
            Preconditions::Honoured => true,
            Preconditions::Ignored => false,
            Preconditions::Probe => {
                // A store that ignores preconditions writes the record again.
                self.refuse_other_run(&stored.job).await?;
                let key = crate::takeover::JOB;
                self.store.honours_preconditions(key, stored.text()).await?
            }
        };
        match (is_honoured, claims) {
            (true, _) => Ok(None),
            (false, Some(claims)) => {
                // The record may have been overwritten by another sink.
                self.refuse_other_run(&stored.job).await?;
                Ok(Some(Claimed {
                    claims,
                    replaces: None,
                }))
            }
            (false, None) => Err(StorageError::new(
                StorageErrorKind::InvalidDestination,
                format!(
                    "{self} is in a store that ignores If-None-Match, so that two writers could overwrite each other; submit the job to workers with a broker, or choose another --output"
                ),
            )),
        }
    }
}
