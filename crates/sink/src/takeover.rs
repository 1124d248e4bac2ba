//! What happens to the contents of an output when a job begins there, and how a single process
//! holds it.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use trommel_storage::local::{create_dir, probe};
use trommel_storage::{Get, ObjectStore, StorageError, StorageErrorKind};

use crate::owner::Owner;
use crate::part::PartName;
use crate::{Claims, Destination, JobRecord, Reuse, Summary};

pub(crate) const JOB: &str = "_job.json";
pub(crate) const SUCCESS: &str = "_SUCCESS";
pub(crate) const SUMMARY: &str = "_summary.json";
const LOCK: &str = "_lock";
const RETRY: &str = "retry-";

/// The folder of a job's parts in its output; for the job itself, the output.
pub(crate) fn folder_of(generation: u32) -> Option<String> {
    (generation > 0).then(|| format!("{RETRY}{generation:04}"))
}

/// The generation of a folder with this name.
pub(crate) fn retry_of(name: &str) -> Option<u32> {
    let digits = name.strip_prefix(RETRY)?;
    let is_ours = digits.len() >= 4 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_ours.then(|| digits.parse().ok()).flatten()
}

/// How to recognise the job that is opened at an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Identity {
    /// By its id and run.
    Run,
    /// By the shape of its rows; its id and run are then used.
    Spec,
}

/// The content of `_job.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredJob {
    #[serde(flatten)]
    pub(crate) job: JobRecord,
    /// Whether the job was opened to overwrite an earlier result, which stays until it is replaced.
    #[serde(default)]
    pub(crate) replaces_output: bool,
}

impl StoredJob {
    /// Whether this job's result may replace what is at the output's name.
    pub(crate) fn may_replace(&self, owner: &Owner) -> bool {
        owner.is_result_of(&self.job.job_id)
            || (self.replaces_output && matches!(owner, Owner::Job(_)))
    }

    /// Whether `job` resumes this one.
    pub(crate) fn is(&self, job: &JobRecord, identity: Identity) -> bool {
        match identity {
            Identity::Run => self.job.job_id == job.job_id && self.job.run == job.run,
            Identity::Spec => {
                self.job.spec_hash == job.spec_hash
                    && self.job.format == job.format
                    && self.job.columns == job.columns
            }
        }
    }

    /// Refuses rows of `job` that cannot share an output with this job's, ignoring sources.
    pub(crate) fn refuse_other_rows(
        &self,
        place: impl std::fmt::Display,
        job: &JobRecord,
    ) -> Result<(), StorageError> {
        let reasons = self.job.row_differences(job);
        if reasons.is_empty() {
            return Ok(());
        }
        Err(StorageError::new(
            StorageErrorKind::OutputOfAnotherJob,
            format!(
                "{place} holds rows of job {}, which others cannot be added to ({}); choose another --output, or replace them with --overwrite",
                self.job.job_id,
                reasons.join("; ")
            ),
        ))
    }

    /// Why `job` cannot resume this one, unless it overwrites.
    pub(crate) fn refusal(&self, place: impl std::fmt::Display, job: &JobRecord) -> StorageError {
        let mut reasons = self.job.differences(job);
        let remedy = match self.job.row_differences(job).is_empty() && job.retry.is_none() {
            true => ", add rows for its new images with --skip-existing",
            false => "",
        };
        if reasons.is_empty() && self.job.run != job.run {
            let (old, new) = (&self.job.run, &job.run);
            reasons.push(format!("its run was {old}, is {new}"));
        }
        StorageError::new(
            StorageErrorKind::OutputOfAnotherJob,
            format!(
                "{place} holds rows of another job, {} ({}); choose another --output{remedy}, or replace them with --overwrite",
                self.job.job_id,
                reasons.join("; ")
            ),
        )
    }

    pub(crate) fn text(&self) -> Bytes {
        serde_json::to_vec_pretty(self)
            .expect("records hold text and lists of it")
            .into()
    }
}

/// Reads an object, if it exists.
pub(crate) async fn read(
    store: &dyn ObjectStore,
    key: &str,
) -> Result<Option<Bytes>, StorageError> {
    match store.get(key, Get::default()).await {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == StorageErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

impl Destination {
    /// The record of the job that is here.
    pub(crate) async fn stored_job(&self) -> Result<Option<StoredJob>, StorageError> {
        let text = read(&*self.store, JOB).await?;
        text.map(|text| self.parsed(&text)).transpose()
    }

    fn parsed(&self, text: &[u8]) -> Result<StoredJob, StorageError> {
        serde_json::from_slice(text).map_err(|error| {
            let message = format!(
                "{} is damaged ({error}); choose another --output, or start over with --overwrite",
                self.store.locate(JOB)
            );
            StorageError::new(StorageErrorKind::Corrupt, message)
        })
    }

    /// Takes over the job whose record is here, if it is the same; otherwise writes a record after
    /// removing what is here, if allowed. Returns whether the job was here before. A caller that
    /// stops midway and continues when the output belongs to another run removes nothing of that
    /// run, and does not overwrite its record.
    pub(crate) async fn take(
        &self,
        job: JobRecord,
        reuse: Reuse,
        identity: Identity,
        claims: Option<&dyn Claims>,
    ) -> Result<(StoredJob, bool), StorageError> {
        let overwrite = reuse == Reuse::Overwrite;
        let old = read(&*self.store, JOB).await?;
        match old.as_ref().map(|text| self.parsed(text)) {
            None => {}
            // The first sink of a run has overwritten; the next ones resume.
            Some(Ok(stored))
                if stored.is(&job, identity) && !(overwrite && identity == Identity::Spec) =>
            {
                return Ok((stored, true));
            }
            Some(Ok(stored)) if !overwrite => return Err(stored.refusal(self, &job)),
            Some(Err(error)) if !overwrite => return Err(error),
            Some(_) => {}
        }
        let owner = self.file.as_deref().filter(|_| overwrite);
        let owner = owner.map(|file| self.format.owner_of(file));
        let stored = StoredJob {
            job,
            replaces_output: matches!(owner, Some(Owner::Job(_) | Owner::NoRows)),
        };
        match old {
            None => self.store.put_if_absent(JOB, stored.text()).await?,
            Some(old) => {
                // Rows of this run are already here if another sink of it was faster.
                let own = (identity == Identity::Run).then_some(stored.job.run.as_str());
                self.clear(&old, own, claims).await?;
                self.store.replace(JOB, &old, stored.text()).await?;
            }
        }
        Ok((stored, false))
    }

    /// Refuses if another run has taken the output over.
    pub(crate) async fn refuse_other_run(&self, job: &JobRecord) -> Result<(), StorageError> {
        match self.stored_job().await? {
            Some(stored) if stored.is(job, Identity::Run) => Ok(()),
            _ => Err(StorageError::lost_race(self.store.locate(JOB))),
        }
    }

    /// Refuses to overwrite, or write among, files that are not Trommel's. Changes nothing.
    pub(crate) async fn refuse_foreign(&self, overwrite: bool) -> Result<(), StorageError> {
        let has_job = read(&*self.store, JOB).await;
        let has_job = match has_job {
            Ok(job) => job.is_some(),
            // A file in place of the folder; see below.
            Err(_) if self.folder.as_ref().is_some_and(|folder| folder.is_file()) => false,
            Err(error) => return Err(error),
        };
        if let Some(file) = &self.file {
            let parent = Self::parent_of(file);
            if !parent.is_dir() {
                return Err(StorageError::new(
                    StorageErrorKind::InvalidDestination,
                    format!(
                        "folder {} does not exist; create it first",
                        parent.display()
                    ),
                ));
            }
            let owner = self.format.owner_of(file);
            if overwrite && owner == Owner::Foreign {
                return Err(output_exists(
                    file.display(),
                    "was not written by trommel, and --overwrite replaces only its own results",
                ));
            }
            if !overwrite && owner != Owner::Absent && !has_job {
                let message = format!(
                    "{} exists already; choose another --output, or replace it with --overwrite",
                    file.display()
                );
                return Err(StorageError::new(StorageErrorKind::OutputExists, message));
            }
        }
        if let Some(folder) = &self.folder
            && folder.exists()
            && !folder.is_dir()
        {
            return Err(output_exists(folder.display(), "is a file and no folder"));
        }
        if has_job {
            return Ok(());
        }
        // Names alone prove nothing: other programs use `part-…` too.
        let mut objects = self.store.list("", None);
        while let Some(object) = objects.try_next().await? {
            match object.key.as_str() {
                LOCK => {}
                // It was created meanwhile.
                JOB => return Err(StorageError::lost_race(self.store.locate(JOB))),
                key => {
                    let what = format!("contains files that trommel did not write, such as {key}");
                    return Err(output_exists(self.store.locate(""), &what));
                }
            }
        }
        Ok(())
    }

    /// The summary of the job if it is finished and its results still exist; removes parts that a
    /// crash has left next to the single file.
    pub(crate) async fn complete(&self, job: &JobRecord) -> Result<Option<Summary>, StorageError> {
        let Some(summary) = self.marked(job).await? else {
            return Ok(None);
        };
        match &self.file {
            Some(file) => match self.format.owner_of(file) {
                Owner::Absent => return Ok(None),
                owner if owner.is_result_of(&job.job_id) => {}
                _ => {
                    return Err(output_exists(
                        file.display(),
                        "is not the result of this job any more",
                    ));
                }
            },
            None => {
                let listed: Vec<_> = self.store.list("part-", None).try_collect().await?;
                let is_there = |name: &str| listed.iter().any(|object| object.key == name);
                // Retries clean up their own.
                let mut own = summary.parts.iter().filter(|part| !part.name.contains('/'));
                if !own.all(|part| is_there(&part.name)) {
                    return Ok(None);
                }
            }
        }
        self.remove_merged(&summary).await?;
        Ok(Some(summary))
    }

    /// The summary of the job if it has the marks of a finished one.
    pub(crate) async fn marked(&self, job: &JobRecord) -> Result<Option<Summary>, StorageError> {
        let store = &*self.store;
        if read(store, SUCCESS).await?.is_none() {
            return Ok(None);
        }
        let Some(text) = read(store, SUMMARY).await? else {
            return Ok(None);
        };
        let summary: Summary = serde_json::from_slice(&text).map_err(|error| {
            let message = format!(
                "{} is damaged ({error}); remove it and run the same command again",
                store.locate(SUMMARY)
            );
            StorageError::new(StorageErrorKind::Corrupt, message)
        })?;
        // The summary of another run comes from a sink that did not know about this one.
        let is_ours = summary.job_id == job.job_id && summary.run == job.run;
        Ok(Some(summary).filter(|_| is_ours))
    }

    /// Removes parts that were merged into the single file.
    pub(crate) async fn remove_merged(&self, summary: &Summary) -> Result<(), StorageError> {
        if self.file.is_some() {
            // A retry removes its own, once it is marked as finished.
            for part in summary.parts.iter().filter(|part| !part.name.contains('/')) {
                self.store.delete(&part.name).await?;
            }
        }
        Ok(())
    }

    /// Removes the marks of a finished job.
    pub(crate) async fn reopen(&self) -> Result<(), StorageError> {
        self.store.delete(SUCCESS).await?;
        self.store.delete(SUMMARY).await
    }

    /// Removes the results of the job whose record is `old`, the marks of its end first. Its record
    /// stays until another one replaces it. The results are listed before it is certain that the
    /// output belongs to this run, `own`, and that no other sink of it was here; the list contains
    /// nothing that these write, and `old` is not a later run.
    async fn clear(
        &self,
        old: &Bytes,
        own: Option<&str>,
        claims: Option<&dyn Claims>,
    ) -> Result<(), StorageError> {
        let is_own = |name: &str| {
            own.is_some() && own == PartName::parse(name).as_ref().map(|name| name.run.as_str())
        };
        let mut results = self.parts_but(is_own).await?;
        let retries = self.store.list(RETRY, None);
        let retries: Vec<_> = retries.try_collect().await?;
        for object in retries {
            let Some((folder, name)) = object.key.split_once('/') else {
                continue;
            };
            let is_record = [JOB, SUCCESS, SUMMARY].contains(&name);
            if retry_of(folder).is_some() && (is_record || PartName::parse(name).is_some()) {
                results.push(object.key);
            }
        }
        let is_ours = match claims {
            Some(claims) => claims.hold_output().await?,
            None => true,
        };
        if !is_ours || read(&*self.store, JOB).await?.as_ref() != Some(old) {
            return Err(StorageError::lost_race(self.store.locate(JOB)));
        }
        self.reopen().await?;
        self.remove(results).await
    }

    /// The names of all parts except those to keep.
    pub(crate) async fn parts_but(
        &self,
        keeps: impl Fn(&str) -> bool,
    ) -> Result<Vec<String>, StorageError> {
        let parts: Vec<_> = self.store.list("part-", None).try_collect().await?;
        let parts = parts.into_iter().map(|object| object.key);
        let parts = parts.filter(|key| PartName::parse(key).is_some() && !keeps(key));
        Ok(parts.collect())
    }

    pub(crate) async fn remove(&self, keys: Vec<String>) -> Result<(), StorageError> {
        let removed = futures::stream::iter(keys).map(|key| {
            let store = Arc::clone(&self.store);
            async move { store.delete(&key).await }
        });
        removed.buffer_unordered(32).try_collect().await
    }

    /// Holds a local output for this process until the file is closed. This saves a second process
    /// its work; the names of parts prevent duplicate rows.
    pub(crate) fn lock(&self) -> Result<Option<File>, StorageError> {
        let Some(folder) = &self.folder else {
            return Ok(None);
        };
        create_dir(folder)?;
        let path = folder.join(LOCK);
        let failed = |error| StorageError::write(&path, error);
        let mut file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = fs::read_to_string(&path).unwrap_or_default();
                let pid = match holder.trim() {
                    "" => String::new(),
                    pid => format!(" (pid {pid})"),
                };
                let message = format!(
                    "another trommel process{pid} writes to {}; wait for it or stop it",
                    folder.display()
                );
                return Err(StorageError::new(StorageErrorKind::Locked, message));
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        file.set_len(0)
            .and_then(|()| write!(file, "{}", std::process::id()))
            .map_err(failed)?;
        Ok(Some(file))
    }

    /// Checks that the single file can be written.
    pub(crate) fn probe_file(&self) -> Result<(), StorageError> {
        let file = self.file.as_deref();
        file.map_or(Ok(()), |file| probe(Self::parent_of(file)))
    }
}

pub(crate) fn output_exists(place: impl std::fmt::Display, what: &str) -> StorageError {
    let message = format!("{place} {what}; choose another --output, or move it out of the way");
    StorageError::new(StorageErrorKind::OutputExists, message)
}

#[cfg(test)]
mod tests;
