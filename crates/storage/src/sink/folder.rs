//! The folder of parts: whose it is, who may write to it, and the record of its job.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use trommel_types::Column;

use crate::sink::files::{create_if_absent, is_leftover, remove, sync_dir};
use crate::sink::finish::replace;
use crate::sink::owner::Owner;
use crate::sink::row::JobRecord;
use crate::sink::{Destination, Format, part};
use crate::{StorageError, StorageErrorKind};

pub(super) const JOB: &str = "_job.json";
pub(super) const SUCCESS: &str = "_SUCCESS";
pub(super) const SUMMARY: &str = "_summary.json";
const LOCK: &str = "_lock";

/// What `_job.json` holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredJob {
    #[serde(flatten)]
    pub(super) job: JobRecord,
    /// Whether the job was opened to overwrite an earlier result, which stays until this one takes
    /// its place.
    #[serde(default)]
    pub(super) replaces_output: bool,
}

impl StoredJob {
    /// Whether this job's result may take the place of what is at the output's name.
    pub(super) fn may_replace(&self, owner: &Owner) -> bool {
        owner.is_result_of(&self.job.job_id)
            || (self.replaces_output && matches!(owner, Owner::Job(_)))
    }

    /// What of the job is not what it was, with both values.
    pub(super) fn differences(&self, job: &JobRecord) -> Vec<String> {
        let old = &self.job;
        let rows = [
            ("source", old.source.clone(), job.source.clone()),
            ("model", old.model.clone(), job.model.clone()),
            (
                "model version",
                old.model_version.clone(),
                job.model_version.clone(),
            ),
            ("options", old.options.clone(), job.options.clone()),
            ("format", old.format.to_string(), job.format.to_string()),
            (
                "pass-through columns",
                describe(&old.columns),
                describe(&job.columns),
            ),
            ("logits", old.logits.to_string(), job.logits.to_string()),
            (
                "embedding",
                old.embedding.to_string(),
                job.embedding.to_string(),
            ),
        ];
        rows.into_iter()
            .filter(|(_, old, new)| old != new)
            .map(|(what, old, new)| format!("{what} was {old}, is {new}"))
            .collect()
    }
}

fn describe(columns: &[Column]) -> String {
    let columns: Vec<_> = columns
        .iter()
        .map(|column| format!("{:?} {:?}", column.name, column.kind))
        .collect();
    if columns.is_empty() {
        "none".to_owned()
    } else {
        columns.join(", ")
    }
}

/// What the folder had to say about the job.
pub(super) enum Taken {
    /// Its record was written now.
    New(StoredJob),
    /// It was there before.
    Old(StoredJob),
}

/// Takes over the job whose record is in the folder, if it is the same; else writes a record.
/// `overwrite` clears the folder first.
pub(super) fn take(
    destination: &Destination,
    job: JobRecord,
    overwrite: bool,
) -> Result<Taken, StorageError> {
    let (dir, format) = (&destination.parts, destination.format);
    let job = JobRecord { format, ..job };
    let path = dir.join(JOB);
    if overwrite {
        let owner = destination
            .file
            .as_deref()
            .map(|file| Owner::of(file, format));
        let replaces_output = matches!(owner, Some(Owner::Job(_) | Owner::NoRows));
        let stored = StoredJob {
            job,
            replaces_output,
        };
        remove_results(dir)?;
        replace(dir, JOB, &stored)?;
        return Ok(Taken::New(stored));
    }
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let stored = StoredJob {
                job,
                replaces_output: false,
            };
            let text = serde_json::to_string_pretty(&stored).expect("text and lists of it");
            create_if_absent(dir, JOB, |out| {
                out.write_all(text.as_bytes())
                    .map_err(|error| StorageError::write(&path, error))
            })?;
            return Ok(Taken::New(stored));
        }
        Err(error) => return Err(StorageError::read(path.display(), error)),
    };
    let stored: StoredJob = serde_json::from_str(&text).map_err(|error| {
        let message = format!(
            "{} is damaged ({error}); choose another --output, or start over with --overwrite",
            path.display()
        );
        StorageError::new(StorageErrorKind::Corrupt, message)
    })?;
    let differences = stored.differences(&job);
    if differences.is_empty() {
        return Ok(Taken::Old(stored));
    }
    let message = format!(
        "{} holds rows of another job ({}); choose another --output, or replace them with --overwrite",
        dir.display(),
        differences.join("; ")
    );
    Err(StorageError::new(
        StorageErrorKind::OutputOfAnotherJob,
        message,
    ))
}

/// Refuses to write over, or among, files that are none of Trommel's. Changes nothing.
pub(super) fn refuse_foreign(
    destination: &Destination,
    overwrite: bool,
) -> Result<(), StorageError> {
    let dir = &destination.parts;
    let has_job = dir.join(JOB).exists();
    if let Some(file) = &destination.file {
        let parent = Destination::parent_of(file);
        if !parent.is_dir() {
            return Err(StorageError::new(
                StorageErrorKind::InvalidDestination,
                format!(
                    "there is no folder {} to write into; create it first",
                    parent.display()
                ),
            ));
        }
        let owner = Owner::of(file, destination.format);
        if overwrite && owner == Owner::Foreign {
            return Err(output_exists(
                file,
                "is no result of trommel's, and --overwrite replaces only those",
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
    if dir.exists() && !dir.is_dir() {
        return Err(output_exists(dir, "is a file and no folder"));
    }
    // Names alone prove nothing: other programs call their files part-… too.
    let is_empty = |name: &String| name == LOCK || is_leftover(name.as_ref());
    if dir.is_dir() && !has_job && !names(dir)?.iter().all(is_empty) {
        return Err(output_exists(
            dir,
            "has files in it that are not known to be trommel's",
        ));
    }
    Ok(())
}

pub(super) fn output_exists(path: &Path, what: &str) -> StorageError {
    let message = format!(
        "{} {what}; choose another --output, or move it out of the way",
        path.display()
    );
    StorageError::new(StorageErrorKind::OutputExists, message)
}

/// Creates the folder. Its name is durable on return.
pub(super) fn create(dir: &Path) -> Result<(), StorageError> {
    if dir.is_dir() {
        return Ok(());
    }
    let missing: Vec<_> = dir
        .ancestors()
        .take_while(|folder| !folder.is_dir())
        .collect();
    fs::create_dir_all(dir).map_err(|error| StorageError::write(dir, error))?;
    missing
        .iter()
        .try_for_each(|folder| sync_dir(Destination::parent_of(folder)))
}

/// Holds the folder for this process until the file is closed.
///
/// It spares a second process its work; that no row is written twice rests on the names of parts.
pub(super) fn lock(dir: &Path) -> Result<Option<File>, StorageError> {
    let path = dir.join(LOCK);
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
                dir.display()
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

/// Removes the hidden files of runs that crashed.
pub(super) fn remove_leftovers(dir: &Path) -> Result<(), StorageError> {
    let names = names(dir)?;
    let leftovers = names.iter().filter(|name| is_leftover(name.as_ref()));
    leftovers
        .map(|name| dir.join(name))
        .try_for_each(|path| remove(&path))
}

/// Takes back the word that a job is finished.
pub(super) fn reopen(dir: &Path) -> Result<(), StorageError> {
    remove(&dir.join(SUCCESS))?;
    remove(&dir.join(SUMMARY))?;
    sync_dir(dir)
}

/// Removes the results of a job, the word that it is finished first.
fn remove_results(dir: &Path) -> Result<(), StorageError> {
    reopen(dir)?;
    for name in names(dir)? {
        if Format::ALL
            .iter()
            .any(|format| part::number(&name, *format).is_some())
        {
            remove(&dir.join(name))?;
        }
    }
    sync_dir(dir)
}

pub(super) fn names(dir: &Path) -> Result<Vec<String>, StorageError> {
    let failed = |error| StorageError::read(format!("folder {}", dir.display()), error);
    fs::read_dir(dir)
        .map_err(failed)?
        .map(|entry| {
            Ok(entry
                .map_err(failed)?
                .file_name()
                .to_string_lossy()
                .into_owned())
        })
        .collect()
}
