use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use roaring::RoaringTreemap;
use trommel_types::Classification;

use crate::background;
use crate::s3::Object;
use crate::sink::bucket::BucketDestination;
use crate::sink::bucket::claims::{Claimed, Claims};
use crate::sink::bucket::records::{record_of, temporary};
use crate::sink::bucket::takeover::{reopen, stored_job, take};
use crate::sink::finish::{StoredSummary, Summary};
use crate::sink::folder::{SUCCESS, SUMMARY};
use crate::sink::ledger::Ledger;
use crate::sink::part;
use crate::sink::read_back::for_each_image;
use crate::sink::row::JobRecord;
use crate::sink::{Committed, Existing, Opened, Reuse, SourceCheck};
use crate::{StorageError, StorageErrorKind};

/// Parts that are looked at side by side.
const READS: usize = 32;

/// Commits the rows of one job in parts, each index once, to an S3 bucket.
///
/// On a store that honours `If-None-Match: *` a part is its own commit record, as in a folder. On
/// one that ignores it, a part counts once its claim is committed; its name carries the claim's
/// revision, so that a sink that has lost its claim overwrites nothing.
///
/// Blocking: to be called on a thread that may wait.
pub struct BucketSink {
    destination: BucketDestination,
    job: JobRecord,
    is_resumed: bool,
    ledger: Ledger,
    claims: Option<Claimed>,
}
impl BucketSink {
    /// Opens a destination for a job: a new one, or the one that is there if it has the same id
    /// and record. `claims` are used where the store honours no preconditions.
    ///
    /// `overwrite` removes the results of another job first.
    ///
    /// # Errors
    /// Before any row is written: when the bucket is not there or may not be written, holds another
    /// job's results or objects that are none of Trommel's, has a damaged part, or honours no
    /// preconditions and there are no `claims`.
    pub fn open(
        destination: &BucketDestination,
        job: JobRecord,
        overwrite: bool,
        claims: Option<Arc<dyn Claims>>,
    ) -> Result<Opened<Self>, StorageError> {
        let job = JobRecord {
            format: destination.format,
            ..job
        };
        let is_resumed = take(destination, &job, overwrite)?;
        Self::open_taken(destination, job, is_resumed, claims)
    }

    /// Opens a destination for a job that this process works on alone: a new one, or the one that
    /// is there if it is the same in all but its id and time of creation.
    ///
    /// # Errors
    /// As [`BucketSink::open`] without claims.
    pub fn open_alone(
        destination: &BucketDestination,
        job: JobRecord,
        reuse: Reuse,
    ) -> Result<Opened<Self>, StorageError> {
        let mut job = JobRecord {
            format: destination.format,
            ..job
        };
        if let Some(stored) = stored_job(destination)?
            && reuse != Reuse::Overwrite
            && stored.differences(&job).is_empty()
        {
            job = stored.job;
        }
        let is_resumed = take(destination, &job, reuse == Reuse::Overwrite)?;
        if reuse == Reuse::Extend {
            reopen(destination)?;
        }
        Self::open_taken(destination, job, is_resumed, None)
    }

    fn open_taken(
        destination: &BucketDestination,
        job: JobRecord,
        is_resumed: bool,
        claims: Option<Arc<dyn Claims>>,
    ) -> Result<Opened<Self>, StorageError> {
        if let Some(summary) = destination.read(SUCCESS).and_then(|mark| match mark {
            Some(_) => destination.read(SUMMARY),
            None => Ok(None),
        })? {
            let summary = serde_json::from_slice(&summary)
                .map_err(|error| StorageError::corrupt(&destination.shown(SUMMARY), error))?;
            return Ok(Opened::Complete(Box::new(summary)));
        }
        let claims = match (destination.honours_preconditions()?, claims) {
            (true, _) => None,
            (false, Some(claims)) => Some(Claimed {
                claims,
                replaces: None,
            }),
            (false, None) => {
                return Err(StorageError::new(
                    StorageErrorKind::InvalidDestination,
                    format!(
                        "{destination} is in a store that ignores If-None-Match, so that two writers could overwrite each other; submit the job to workers with a broker, or choose another --output"
                    ),
                ));
            }
        };
        let mut sink = Self {
            destination: destination.clone(),
            job,
            is_resumed,
            ledger: Ledger::default(),
            claims,
        };
        sink.rebuild()?;
        Ok(Opened::Ready(Box::new(sink)))
    }

    /// The job's id.
    pub fn job_id(&self) -> &str {
        &self.job.job_id
    }

    /// The job, as its record in the bucket says.
    pub fn job(&self) -> &JobRecord {
        &self.job
    }

    /// Whether another sink has begun this job.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// Indices whose rows are durable.
    pub fn committed(&self) -> &RoaringTreemap {
        &self.ledger.committed
    }

    /// Compares a listing with what is committed now.
    pub fn source_check(&self) -> SourceCheck {
        SourceCheck::new(self.ledger.record.runs.clone())
    }

    /// The images that are committed now; see [`ResultSink::existing`](crate::ResultSink::existing).
    ///
    /// # Errors
    /// When a part cannot be read.
    pub fn existing(&mut self) -> Result<Existing, StorageError> {
        let Self {
            destination,
            ledger,
            ..
        } = self;
        let mut existing = Existing::new(ledger.committed.clone());
        for part in &ledger.parts {
            let place = destination.object(&part.name);
            let content = background::wait(destination.s3.get(&place, None, u64::MAX))?;
            let file = temporary(&content)?;
            for_each_image(file.path(), destination.format, |uri, etag| {
                existing.add(uri, etag);
            })?;
        }
        ledger.may_have_gaps = true;
        Ok(existing)
    }

    /// What is committed so far, by all runs.
    pub fn summary(&self) -> Summary {
        self.ledger.summary(&self.job)
    }

    /// Makes rows durable as one part, as [`PartSink::commit`](crate::PartSink::commit) does.
    ///
    /// # Errors
    /// When the part cannot be written. After [`LostRace`](StorageErrorKind::LostRace) another sink
    /// has committed a part of this number, or this one has done so without hearing of it: open the
    /// destination anew to go on.
    pub fn commit(&mut self, rows: Vec<Classification>) -> Result<Committed, StorageError> {
        let Self {
            destination,
            job,
            ledger,
            claims,
            ..
        } = self;
        ledger.commit(rows, |number, rows, record| {
            let encode = |name: &str| {
                let mut content = Vec::new();
                let path = destination.shown(name);
                part::write(&mut content, &path, destination.format, job, rows, record)?;
                Ok(Bytes::from(content))
            };
            match claims {
                None => {
                    let name = part::name(number, destination.format);
                    destination.write(&name, encode(&name)?, true)?;
                    Ok(name)
                }
                Some(claimed) => claimed.store(destination, number, encode),
            }
        })
    }

    /// Ends a job whose rows are all committed: writes `_summary.json` and `_SUCCESS`, and removes
    /// parts that have lost their claim.
    ///
    /// # Errors
    /// [`Incomplete`](StorageErrorKind::Incomplete) when an index is missing before the last one,
    /// others when an object cannot be written.
    pub fn finish(self) -> Result<Summary, StorageError> {
        self.ledger.refuse_gaps(&self.destination)?;
        let summary = self.summary();
        if self.claims.is_some() {
            let counts = |name: &str| summary.parts.iter().any(|part| part.name == name);
            for object in self.destination.objects()? {
                if object.key.starts_with("part-") && !counts(&object.key) {
                    self.destination.remove(&object.key)?;
                }
            }
        }
        let text = serde_json::to_vec_pretty(&StoredSummary::now(&summary, &self.job))
            .expect("summaries hold text, numbers and lists");
        // The summary before the mark that says it is there.
        self.destination.write(SUMMARY, text.into(), false)?;
        self.destination.write(SUCCESS, Bytes::new(), false)?;
        Ok(summary)
    }

    /// Learns from the parts, or the claims, what is committed.
    fn rebuild(&mut self) -> Result<(), StorageError> {
        let objects = self.destination.objects()?;
        let format = self.destination.format;
        let mut parts: Vec<(u64, Object)> = match &mut self.claims {
            None => objects
                .into_iter()
                .filter_map(|object| Some((part::number(&object.key, format)?, object)))
                .collect(),
            Some(claimed) => {
                let mut parts = Vec::new();
                let objects: HashMap<_, _> = objects
                    .into_iter()
                    .map(|object| (object.key.clone(), object))
                    .collect();
                for claim in claimed.claims.list()? {
                    let Some(name) = claim.committed else {
                        // Only the last number can be without an end.
                        claimed.replaces = Some(claim.revision);
                        self.ledger.next_number = self.ledger.next_number.max(claim.part);
                        continue;
                    };
                    let object = objects.get(&name).cloned().ok_or_else(|| {
                        let path = self.destination.shown(&name);
                        StorageError::corrupt(&path, "it was committed but is not there any more")
                    })?;
                    parts.push((claim.part, object));
                }
                parts
            }
        };
        parts.sort_unstable_by_key(|(number, _)| *number);
        let records = background::wait(
            stream::iter(&parts)
                .map(|(_, object)| record_of(&self.destination, &self.job, object))
                .buffered(READS)
                .try_collect::<Vec<_>>(),
        )?;
        for ((number, object), record) in parts.into_iter().zip(records) {
            let path = self.destination.shown(&object.key);
            if !self.ledger.add(number, object.key, record) {
                return Err(StorageError::corrupt(
                    &path,
                    "it repeats rows that are committed",
                ));
            }
        }
        Ok(())
    }
}
