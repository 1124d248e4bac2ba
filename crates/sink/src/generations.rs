//! Which rows of an output count, and which of them are failed.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, stream};
use roaring::RoaringTreemap;
use tokio::task::spawn_blocking;
use trommel_storage::s3::Object;
use trommel_storage::{Get, ObjectStore, StorageError, StorageErrorKind};
use trommel_types::Scalar;

use crate::format::{Input, Tail};
use crate::part::{PartName, PartRecord};
use crate::read_back::{failed, images};
use crate::takeover::{folder_of, retry_of};
use crate::{Base, Destination, Existing, Format, JobRecord, PartSummary, Retry};

/// Parts read concurrently.
const READS: usize = 32;
/// Most failed rows in one retry: each is held in memory while its image is looked up.
const MOST_IMAGES: usize = 5_000_000;

/// An image with a failed row.
#[derive(Debug, Clone, PartialEq)]
pub struct FailedImage {
    /// Its index in the job.
    pub index: u64,
    /// Its uri.
    pub uri: String,
    /// The store's version of it, if the row has one.
    pub etag: Option<String>,
    /// The values of the pass-through columns.
    pub columns: Vec<Scalar>,
}

/// A failed row.
pub(crate) struct FailedRow {
    pub(crate) image: FailedImage,
    pub(crate) kind: String,
    pub(crate) error: String,
}

/// The images of failed rows that a retry classifies.
#[derive(Default)]
pub(crate) struct FailedImages {
    retry: Retry,
    images: Vec<FailedImage>,
    is_too_long: bool,
}

impl FailedImages {
    pub(crate) fn of(retry: &Retry) -> Self {
        Self {
            retry: retry.clone(),
            ..Self::default()
        }
    }

    pub(crate) fn add(&mut self, row: FailedRow) {
        if !self.retry.wants(&row.kind) {
            return;
        }
        self.is_too_long |= self.images.len() == MOST_IMAGES;
        if !self.is_too_long {
            self.images.push(row.image);
        }
    }

    /// The images, sorted by index.
    pub(crate) fn finish(self) -> Result<Vec<FailedImage>, StorageError> {
        if self.is_too_long {
            return Err(StorageError::new(
                StorageErrorKind::TooLarge,
                format!(
                    "more than {MOST_IMAGES} rows failed, which is more than one retry takes; name some of the kinds, or classify all again with --overwrite"
                ),
            ));
        }
        let mut images = self.images;
        images.sort_unstable_by_key(|image| image.index);
        Ok(images)
    }
}

/// The valid parts of a job, or of one of its retries.
pub(crate) struct Generation {
    /// 0 for the job itself.
    number: u32,
    /// What was classified; unknown for a single file, which contains all rows.
    source: Option<String>,
    files: Vec<RowFile>,
}

/// A file of rows.
pub(crate) struct RowFile {
    place: Place,
    format: Format,
    /// What is known without reading its rows.
    record: Option<PartRecord>,
}

enum Place {
    Object(Arc<dyn ObjectStore>, String),
    File(PathBuf),
}

impl Generation {
    /// All rows in one file.
    pub(crate) fn of_file(path: &Path, format: Format) -> Self {
        Self {
            number: 0,
            source: None,
            files: vec![RowFile {
                place: Place::File(path.to_owned()),
                format,
                record: None,
            }],
        }
    }

    pub(crate) fn files(&self) -> &[RowFile] {
        &self.files
    }

    /// Number of rows, if known without reading them.
    pub(crate) fn rows(&self) -> u64 {
        let records = self.files.iter().filter_map(|file| file.record.as_ref());
        records.map(|record| record.rows).sum()
    }

    /// Its parts, as named in the job's summary.
    pub(crate) fn parts(&self) -> Vec<PartSummary> {
        let folder = folder_of(self.number).map_or_else(String::new, |folder| folder + "/");
        let parts = self.files.iter().filter_map(|file| match &file.place {
            Place::Object(_, key) => Some((key, file.record.as_ref()?.rows)),
            Place::File(_) => None,
        });
        let parts = parts.map(|(key, rows)| PartSummary {
            name: format!("{folder}{key}"),
            rows,
        });
        parts.collect()
    }

    /// Its files in a local folder; `place` is the job's own.
    pub(crate) fn paths(&self, folder: &Path) -> Vec<PathBuf> {
        let parts = self.parts().into_iter();
        parts.map(|part| folder.join(part.name)).collect()
    }

    /// Whether its rows are for images of this source, as far as known.
    fn is_of(&self, source: &str) -> bool {
        self.source.as_ref().is_none_or(|own| own == source)
    }

    /// The single file, if it is one; its indices are known only by reading it.
    pub(crate) fn file(&self) -> Option<&Path> {
        match self.files.first().map(|file| &file.place) {
            Some(Place::File(path)) => Some(path),
            _ => None,
        }
    }

    pub(crate) fn indices(&self) -> RoaringTreemap {
        let mut indices = RoaringTreemap::new();
        for record in self.files.iter().filter_map(|file| file.record.as_ref()) {
            for (start, end) in record.runs.ranges() {
                indices.insert_range(start..=end);
            }
        }
        indices
    }
}

/// Adds the valid failed rows to `all`: those of generations, oldest first, that no later one
/// supersedes, and whose indices are not in `superseded`; only for images of `source`, if given.
pub(crate) async fn failed_rows<T: Send + 'static>(
    generations: &[Generation],
    job: &Arc<JobRecord>,
    source: Option<&str>,
    superseded: RoaringTreemap,
    mut all: T,
    add: fn(&mut T, FailedRow),
) -> Result<T, StorageError> {
    let mut superseded = Arc::new(superseded);
    for generation in generations.iter().rev() {
        let is_asked_for = source.is_none_or(|source| generation.is_of(source));
        for file in &generation.files {
            let record = file.record.as_ref();
            if !is_asked_for || record.is_some_and(|record| record.failures.is_empty()) {
                continue;
            }
            let (name, input) = file.open().await?;
            let (format, job, superseded) = (file.format, Arc::clone(job), Arc::clone(&superseded));
            let read = spawn_blocking(move || {
                for row in failed(input, format, &job)? {
                    let row = row?;
                    if !superseded.contains(row.image.index) {
                        add(&mut all, row);
                    }
                }
                Ok::<_, String>(all)
            });
            let read = read.await.map_err(|_| broken_off("reading a part"))?;
            all = read.map_err(|reason| StorageError::corrupt(name.as_ref(), reason))?;
        }
        superseded = Arc::new(&*superseded | generation.indices());
    }
    Ok(all)
}

/// The images of the valid rows; generations come oldest first.
pub(crate) async fn existing(
    generations: &[&Generation],
    job: &Arc<JobRecord>,
) -> Result<Existing, StorageError> {
    let (mut existing, mut superseded) = (Existing::default(), RoaringTreemap::new());
    for generation in generations.iter().rev() {
        let mut own = RoaringTreemap::new();
        for file in &generation.files {
            let (name, input) = file.open().await?;
            let (format, job) = (file.format, Arc::clone(job));
            let read = spawn_blocking(move || {
                for image in images(input, format, &job)? {
                    let image = image?;
                    own.insert(image.index);
                    if !superseded.contains(image.index) {
                        existing.add(&image.uri, image.etag.as_deref(), image.index);
                    }
                }
                Ok::<_, String>((existing, superseded, own))
            });
            let read = read.await.map_err(|_| broken_off("reading a part"))?;
            (existing, superseded, own) =
                read.map_err(|reason| StorageError::corrupt(name.as_ref(), reason))?;
        }
        superseded |= own;
    }
    Ok(existing)
}

impl RowFile {
    pub(crate) fn format(&self) -> Format {
        self.format
    }

    /// Its name for people, and its content.
    pub(crate) async fn open(&self) -> Result<(String, Input), StorageError> {
        match &self.place {
            Place::Object(store, key) => {
                let content = store.get(key, Get::default()).await?;
                Ok((store.locate(key), Input::Bytes(content)))
            }
            Place::File(path) => {
                let name = path.display().to_string();
                let file = File::open(path).map_err(|error| StorageError::read(&name, error))?;
                Ok((name, Input::File(file)))
            }
        }
    }
}

impl Destination {
    /// The folder of a retry of this job.
    pub(crate) fn of_retry(&self, number: u32) -> Self {
        let Some(folder) = folder_of(number) else {
            return self.clone();
        };
        Self {
            store: self.store.within(&folder),
            folder: self.folder.as_ref().map(|parts| parts.join(&folder)),
            file: None,
            ..self.clone()
        }
    }

    /// Numbers of the retries that have a folder here, whatever it contains.
    pub(crate) async fn retries(&self) -> Result<BTreeSet<u32>, StorageError> {
        let objects = self.store.list("retry-", None);
        let number = |object: Object| Some(retry_of(object.key.split_once('/')?.0));
        let numbers = objects.try_filter_map(async |object| Ok(number(object).flatten()));
        numbers.try_collect().await
    }

    /// The job that is here, if rows of `job` may be added to it.
    pub(crate) async fn base(
        &self,
        job: &JobRecord,
        named: Option<&str>,
    ) -> Result<Option<Base>, StorageError> {
        let is_named = |id: &str| named.is_none_or(|named| named == id);
        let stored = self.stored_job().await?;
        let Some(stored) = stored.filter(|stored| is_named(&stored.job.job_id)) else {
            return Ok(None);
        };
        let job = JobRecord {
            format: self.format,
            ..job.clone()
        };
        stored.refuse_other_rows(self, &job)?;
        Ok(Some(Base {
            job_id: stored.job.job_id,
            run: stored.job.run,
            last: self.retries().await?.last().copied().unwrap_or_default(),
        }))
    }

    /// The valid files of the job that is here: its own parts, then those of finished retries with
    /// numbers below `before`. Its own parts are the named ones, or all of its run.
    pub(crate) async fn generations(
        &self,
        job: &Arc<JobRecord>,
        parts: Option<&[PartSummary]>,
        before: u32,
    ) -> Result<Vec<Generation>, StorageError> {
        let mut generations = vec![self.generation(job, parts).await?];
        for number in self.retries().await?.range(..before) {
            let place = self.of_retry(*number);
            let Some(stored) = place.stored_job().await? else {
                continue;
            };
            let is_ours = |retry: &Retry| retry.of_run == job.run;
            if !stored.job.retry.as_ref().is_some_and(is_ours) {
                continue;
            }
            if let Some(summary) = place.marked(&stored.job).await? {
                let retry = Arc::new(stored.job);
                generations.push(place.generation(&retry, Some(&summary.parts)).await?);
            }
        }
        Ok(generations)
    }

    /// The named parts of a job, or all of its run.
    pub(crate) async fn generation(
        &self,
        job: &Arc<JobRecord>,
        parts: Option<&[PartSummary]>,
    ) -> Result<Generation, StorageError> {
        let objects: Vec<Object> = self.store.list("part-", None).try_collect().await?;
        let counts = |object: &Object| match parts {
            Some(parts) => parts.iter().any(|part| part.name == object.key),
            None => PartName::parse(&object.key)
                .is_some_and(|name| name.run == job.run && name.format == self.format),
        };
        let objects = objects.into_iter().filter(counts);
        let files = stream::iter(objects).map(|object| async move {
            let record = record_of(&self.store, &object, self.format, job).await?;
            Ok::<_, StorageError>(RowFile {
                place: Place::Object(Arc::clone(&self.store), object.key),
                format: self.format,
                record: Some(record),
            })
        });
        let files = files.buffered(READS).try_collect().await?;
        Ok(Generation {
            number: job.generation(),
            source: Some(job.source.clone()),
            files,
        })
    }
}

/// The record of a part: for Parquet only the footer is read, for text formats the whole part.
pub(crate) async fn record_of(
    store: &Arc<dyn ObjectStore>,
    object: &Object,
    format: Format,
    job: &Arc<JobRecord>,
) -> Result<PartRecord, StorageError> {
    let path = store.locate(&object.key);
    let corrupt = |reason: String| StorageError::corrupt(Path::new(&path), reason);
    let (encoding, size) = (format.encoding(), object.size);
    let mut wanted = encoding.tail().unwrap_or(u64::MAX);
    loop {
        let start = size.saturating_sub(wanted);
        let range = Get {
            range: Some(start..size),
            ..Get::default()
        };
        let end = store.get(&object.key, range).await?;
        let job = Arc::clone(job);
        let read = spawn_blocking(move || encoding.read_record(end, size, &job));
        let read = read.await.map_err(|_| broken_off("reading a part"))?;
        match read.map_err(&corrupt)? {
            Tail::Record(record) => return Ok(record),
            Tail::More(needed) if start > 0 && needed > wanted => wanted = needed,
            Tail::More(_) => return Err(corrupt("its footer cannot be read".to_owned())),
        }
    }
}

pub(crate) fn broken_off(what: &str) -> StorageError {
    StorageError::unavailable(format!("{what} was broken off"))
}
