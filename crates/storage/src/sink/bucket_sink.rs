//! Rows as parts in an S3 bucket.

use std::collections::HashMap;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use roaring::RoaringTreemap;
use trommel_types::Classification;

use crate::s3::{self, Location, Object, S3};
use crate::sink::finish::{StoredSummary, Summary};
use crate::sink::folder::{JOB, SUCCESS, SUMMARY, StoredJob};
use crate::sink::ledger::Ledger;
use crate::sink::part::{self, PartRecord};
use crate::sink::part_sink::{Committed, Opened};
use crate::sink::row::JobRecord;
use crate::sink::{Format, SourceCheck, parquet_part};
use crate::{S3Config, StorageError, StorageErrorKind};

/// Bytes at the end of a Parquet part that are read to learn what it commits; more when its footer
/// is larger.
const FOOTER: u64 = 64 << 10;
/// Parts that are looked at side by side.
const READS: usize = 32;

/// A prefix of an S3 bucket that parts go to.
#[derive(Clone)]
pub struct BucketDestination {
    prefix: Location,
    format: Format,
    s3: S3,
}

impl fmt::Debug for BucketDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix.uri())
    }
}

impl fmt::Display for BucketDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix.uri())
    }
}

impl BucketDestination {
    /// Reads `s3://bucket/prefix/`; `None` for what is in no bucket. Parts are written in
    /// `part_format`, unless another one follows, as in `s3://bucket/prefix/?format=jsonl`.
    ///
    /// # Errors
    /// [`InvalidDestination`](StorageErrorKind::InvalidDestination) for a single object: only a
    /// file system can put the parts together at the end.
    pub fn parse(
        text: &str,
        part_format: Format,
        config: &S3Config,
    ) -> Result<Option<Self>, StorageError> {
        let invalid = |reason: &str| {
            let message = format!("output {text}: {reason}");
            StorageError::new(StorageErrorKind::InvalidDestination, message)
        };
        if !text.starts_with("s3://") {
            return Ok(None);
        }
        let (text, format) = match text.rsplit_once("?format=") {
            None => (text, part_format),
            Some((text, name)) => {
                let format = Format::of_path(format!("x.{name}").as_ref())
                    .ok_or_else(|| invalid("has an unknown format; use parquet, jsonl or csv"))?;
                (text, format)
            }
        };
        let place = Location::parse(text).ok_or_else(|| invalid("expected s3://bucket/prefix/"))?;
        if !place.key.is_empty() && !place.key.ends_with('/') {
            return Err(invalid(
                "an output in s3 is a folder of parts; end its name with /",
            ));
        }
        Ok(Some(Self {
            prefix: place,
            format,
            s3: S3::new(config),
        }))
    }

    fn object(&self, name: &str) -> Location {
        self.prefix.with_key(format!("{}{name}", self.prefix.key))
    }

    /// The name that messages give an object.
    fn shown(&self, name: &str) -> PathBuf {
        self.object(name).uri().into()
    }

    fn read(&self, name: &str) -> Result<Option<Bytes>, StorageError> {
        match s3::wait(self.s3.get(&self.object(name), None, u64::MAX)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == StorageErrorKind::NotFound => {
                // A missing bucket is another matter.
                s3::wait(self.s3.list(&self.object(name), None, None))?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn write(&self, name: &str, content: Bytes, only_if_absent: bool) -> Result<(), StorageError> {
        s3::wait(self.s3.put(&self.object(name), content, only_if_absent))
    }

    fn remove(&self, name: &str) -> Result<(), StorageError> {
        s3::wait(self.s3.remove(&self.object(name)))
    }

    /// The objects under the prefix, by their names behind it.
    fn objects(&self) -> Result<Vec<Object>, StorageError> {
        s3::wait(async {
            let (mut objects, mut token) = (Vec::new(), None);
            loop {
                let page = self.s3.list(&self.prefix, None, token).await?;
                objects.extend(page.objects.into_iter().map(|object| Object {
                    key: object.key[self.prefix.key.len()..].to_owned(),
                    ..object
                }));
                token = page.next;
                if token.is_none() {
                    return Ok(objects);
                }
            }
        })
    }

    /// Whether the store refuses to write an object that is there, when it is asked to. Some accept
    /// the question and ignore it.
    fn honours_preconditions(&self) -> Result<bool, StorageError> {
        // Names of their own, so that two probes at once do not take each other for an answer.
        let name = format!("_probe-{:016x}", rand::random::<u64>());
        let probe = || self.write(&name, Bytes::from_static(b"probe"), true);
        let again = match probe() {
            Ok(()) => probe(),
            // Its answer was lost and the client asked again: nobody else knows the name.
            first => first,
        };
        self.remove(&name)?;
        match again {
            Ok(()) => Ok(false),
            Err(error) if error.kind() == StorageErrorKind::LostRace => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// A part number that a sink has taken, on a store that honours no preconditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The part's number.
    pub part: u64,
    /// Changes with every change of the claim.
    pub revision: u64,
    /// The object that was committed under it; none yet when the part is still being written.
    pub committed: Option<String>,
}

/// Claims of part numbers, kept where compare-and-set works. Blocking.
pub trait Claims: Send + Sync {
    /// All claims of the destination.
    ///
    /// # Errors
    /// When they cannot be read.
    fn list(&self) -> Result<Vec<Claim>, StorageError>;

    /// Claims a number, `replaces` being the revision of a claim that was not committed. Gives the
    /// claim's revision.
    ///
    /// # Errors
    /// [`LostRace`](StorageErrorKind::LostRace) when another has it.
    fn open(&self, part: u64, replaces: Option<u64>) -> Result<u64, StorageError>;

    /// Commits a claim.
    ///
    /// # Errors
    /// [`LostRace`](StorageErrorKind::LostRace) when another has taken it over.
    fn commit(&self, part: u64, revision: u64, object: &str) -> Result<(), StorageError>;
}

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
    ledger: Ledger,
    claims: Option<Claimed>,
}

/// The claims, and the one on the next number that was never committed.
struct Claimed {
    claims: Arc<dyn Claims>,
    replaces: Option<u64>,
}

impl Claimed {
    /// Writes a part under a claim of its number.
    fn store(
        &mut self,
        destination: &BucketDestination,
        number: u64,
        encode: impl FnOnce(&str) -> Result<Bytes, StorageError>,
    ) -> Result<String, StorageError> {
        let revision = self.claims.open(number, self.replaces.take())?;
        let name = part::claimed_name(number, revision, destination.format);
        destination.write(&name, encode(&name)?, false)?;
        if let Err(error) = self.claims.commit(number, revision, &name) {
            if error.kind() == StorageErrorKind::LostRace {
                // Nobody else writes this name, and it never counts. The heir removes it otherwise.
                drop(destination.remove(&name));
            }
            return Err(error);
        }
        Ok(name)
    }
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
        take(destination, &job, overwrite)?;
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

    /// Indices whose rows are durable.
    pub fn committed(&self) -> &RoaringTreemap {
        &self.ledger.committed
    }

    /// Compares a listing with what is committed now.
    pub fn source_check(&self) -> SourceCheck {
        SourceCheck::new(self.ledger.record.runs.clone())
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
        let records = s3::wait(
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

/// Takes over the job whose record is at the destination, if it is the same; else writes one.
fn take(
    destination: &BucketDestination,
    job: &JobRecord,
    overwrite: bool,
) -> Result<(), StorageError> {
    let path = destination.shown(JOB);
    let another = |what: String| {
        let message = format!(
            "{destination} {what}; choose another --output, or replace it with --overwrite"
        );
        StorageError::new(StorageErrorKind::OutputOfAnotherJob, message)
    };
    if let Some(text) = destination.read(JOB)? {
        let stored: StoredJob =
            serde_json::from_slice(&text).map_err(|error| StorageError::corrupt(&path, error))?;
        let differences = stored.differences(job);
        if stored.job.job_id == job.job_id && differences.is_empty() {
            return Ok(());
        }
        if !overwrite {
            return Err(another(format!(
                "holds rows of another job, {} ({})",
                stored.job.job_id,
                differences.join("; ")
            )));
        }
        clear(destination)?;
    } else if let Some(object) = destination.objects()?.first() {
        return Err(StorageError::new(
            StorageErrorKind::OutputExists,
            format!(
                "{destination} has objects in it that are not known to be trommel's, such as {}; choose another --output",
                object.key
            ),
        ));
    }
    let stored = StoredJob {
        job: job.clone(),
        replaces_output: false,
    };
    let text = serde_json::to_vec_pretty(&stored).expect("records hold text and lists of it");
    destination.write(JOB, text.into(), true)
}

/// Removes the results of a job, the word that it is finished first.
fn clear(destination: &BucketDestination) -> Result<(), StorageError> {
    destination.remove(SUCCESS)?;
    destination.remove(SUMMARY)?;
    for object in destination.objects()? {
        if object.key.starts_with("part-") {
            destination.remove(&object.key)?;
        }
    }
    destination.remove(JOB)
}

/// What a part commits: of Parquet the footer alone is read, of the text formats all of it.
async fn record_of(
    destination: &BucketDestination,
    job: &JobRecord,
    object: &Object,
) -> Result<PartRecord, StorageError> {
    let (place, path) = (
        destination.object(&object.key),
        destination.shown(&object.key),
    );
    if destination.format != Format::Parquet {
        let content = destination.s3.get(&place, None, u64::MAX).await?;
        return text_record(&content, destination.format, job);
    }
    let mut wanted = FOOTER;
    loop {
        let length = wanted.min(object.size);
        let range = (object.size - length, length);
        let end = destination.s3.get(&place, Some(range), u64::MAX).await?;
        match parquet_part::read_record_from(end, object.size, &path, &job.job_id)? {
            Ok(record) => return record.check(&path),
            Err(needed) if needed > length => wanted = needed,
            Err(_) => return Err(StorageError::corrupt(&path, "its footer cannot be read")),
        }
    }
}

/// The readers of text read files.
fn text_record(
    content: &[u8],
    format: Format,
    job: &JobRecord,
) -> Result<PartRecord, StorageError> {
    let failed = |error| StorageError::write(std::env::temp_dir().as_path(), error);
    let mut file = tempfile::NamedTempFile::new().map_err(failed)?;
    file.write_all(content).map_err(failed)?;
    PartRecord::read(file.path(), format, job)
}
