//! The last word on a job: its summary, and the single file that its parts become.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::sink::files::{Hidden, create_if_absent, remove, sync_dir};
use crate::sink::folder::{SUCCESS, SUMMARY, output_exists};
use crate::sink::merge::Parts;
use crate::sink::owner::Owner;
use crate::sink::part::FailureSummary;
use crate::sink::part_sink::PartSink;
use crate::sink::{Destination, JobRecord};
use crate::{StorageError, StorageErrorKind};

/// What became of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The job.
    pub job_id: String,
    /// What was classified.
    pub source: String,
    /// The model's name.
    pub model: String,
    /// The first digits of the model's content hash.
    pub model_version: String,
    /// Images, and so rows.
    pub images: u64,
    /// Rows with a label.
    pub ok: u64,
    /// Rows without.
    pub failed: u64,
    /// Failures by kind.
    pub failures: BTreeMap<String, FailureSummary>,
    /// The parts that were committed. Those of a single file are removed once they are in it.
    pub parts: Vec<PartSummary>,
}

/// One part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartSummary {
    /// File name.
    pub name: String,
    /// Rows in it.
    pub rows: u64,
}

/// What `_summary.json` holds.
#[derive(Serialize)]
pub(super) struct StoredSummary<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    /// When the job was created, in microseconds since the Unix epoch, UTC.
    started_at: i64,
    /// When it was finished, likewise.
    finished_at: i64,
    /// The time between.
    seconds: f64,
}

impl<'a> StoredSummary<'a> {
    /// Of a job that is finished now.
    pub(super) fn now(summary: &'a Summary, job: &JobRecord) -> Self {
        let finished_at = now();
        Self {
            summary,
            started_at: job.created_at,
            finished_at,
            seconds: finished_at.saturating_sub(job.created_at) as f64 / 1e6,
        }
    }
}

impl PartSink {
    /// What is committed so far, by all runs.
    pub fn summary(&self) -> Summary {
        self.ledger.summary(&self.stored.job)
    }

    /// Ends a job whose rows are all committed: the parts become the single file, if one was asked
    /// for, and `_summary.json` and `_SUCCESS` are written.
    ///
    /// A crash at any point leaves a job that the next run finishes.
    ///
    /// # Errors
    /// [`Incomplete`](StorageErrorKind::Incomplete) when an index is missing before the last one,
    /// [`OutputExists`](StorageErrorKind::OutputExists) when a file that is none of this job's has
    /// taken the output's name meanwhile, others when a file cannot be written. What is committed
    /// stays.
    pub fn finish(self) -> Result<Summary, StorageError> {
        self.ledger.refuse_gaps(self.destination.parts.display())?;
        let summary = self.summary();
        let dir = &self.destination.parts;
        if let Some(file) = &self.destination.file {
            self.write_file(file)?;
        }
        // The summary before the mark that says it is there.
        replace(
            dir,
            SUMMARY,
            &StoredSummary::now(&summary, &self.stored.job),
        )?;
        create_if_absent(dir, SUCCESS, |_| Ok(()))?;
        remove_merged(&self.destination, &summary)?;
        Ok(summary)
    }

    /// Makes the parts the single file. What stands there is replaced only if it is this job's, by
    /// a finish that crashed, or one that `overwrite` gave up.
    fn write_file(&self, file: &Path) -> Result<(), StorageError> {
        let (dir, format) = (&self.destination.parts, self.destination.format);
        let parts = Parts {
            paths: self
                .ledger
                .parts
                .iter()
                .map(|part| dir.join(&part.name))
                .collect(),
            format,
            job: &self.stored.job,
            fingerprint: self.ledger.record.runs.fingerprint(),
        };
        let merged = Hidden::write(dir, "merged", |out| parts.merge(out, file))?;
        let owner = Owner::of(file, format);
        if self.stored.may_replace(&owner) {
            merged.replace(file)?;
        } else if owner != Owner::Absent || !merged.link(file)? {
            return Err(output_exists(file, "has come up while the job ran"));
        }
        sync_dir(Destination::parent_of(file))
    }
}

fn now() -> i64 {
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since_epoch.as_micros()).unwrap_or(i64::MAX)
}

/// Writes a record in place of an earlier one, if there is one. Durable on return.
pub(super) fn replace(dir: &Path, name: &str, record: &impl Serialize) -> Result<(), StorageError> {
    let text = serde_json::to_string_pretty(record).expect("records hold text, numbers and lists");
    let path = dir.join(name);
    let hidden = Hidden::write(dir, name, |out| {
        out.write_all(text.as_bytes())
            .map_err(|error| StorageError::write(&path, error))
    })?;
    hidden.replace(&path)?;
    sync_dir(dir)
}

/// The summary of a finished job whose results are still there; removes parts that a crash has
/// left behind the single file. `None` when results were taken away.
pub(super) fn complete(
    destination: &Destination,
    job: &JobRecord,
) -> Result<Option<Summary>, StorageError> {
    let path = destination.parts.join(SUMMARY);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(StorageError::read(path.display(), error)),
    };
    let summary: Summary = serde_json::from_str(&text).map_err(|error| {
        let message = format!(
            "{} is damaged ({error}); remove it and run the same command again",
            path.display()
        );
        StorageError::new(StorageErrorKind::Corrupt, message)
    })?;
    let results_are_there = match &destination.file {
        Some(file) => match Owner::of(file, destination.format) {
            Owner::Absent => false,
            owner if owner.is_result_of(&job.job_id) => true,
            _ => {
                return Err(output_exists(
                    file,
                    "is not the result of this job any more",
                ));
            }
        },
        None => summary
            .parts
            .iter()
            .all(|part| destination.parts.join(&part.name).exists()),
    };
    if !results_are_there || summary.job_id != job.job_id {
        return Ok(None);
    }
    remove_merged(destination, &summary)?;
    Ok(Some(summary))
}

/// Removes the parts that have become the single file.
fn remove_merged(destination: &Destination, summary: &Summary) -> Result<(), StorageError> {
    if destination.file.is_some() {
        for part in &summary.parts {
            remove(&destination.parts.join(&part.name))?;
        }
    }
    Ok(())
}
