//! What becomes of what is at the destination when a job begins there.

use crate::sink::bucket::BucketDestination;
use crate::sink::folder::{JOB, SUCCESS, SUMMARY, StoredJob};
use crate::sink::row::JobRecord;
use crate::{StorageError, StorageErrorKind};

/// The record of the job at the destination.
pub(super) fn stored_job(
    destination: &BucketDestination,
) -> Result<Option<StoredJob>, StorageError> {
    let Some(text) = destination.read(JOB)? else {
        return Ok(None);
    };
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| StorageError::corrupt(&destination.shown(JOB), error))
}

/// Takes over the job whose record is at the destination, if it is the same; else writes one.
/// Whether it was there.
pub(super) fn take(
    destination: &BucketDestination,
    job: &JobRecord,
    overwrite: bool,
) -> Result<bool, StorageError> {
    if let Some(stored) = stored_job(destination)? {
        let differences = stored.differences(job);
        if stored.job.job_id == job.job_id && differences.is_empty() {
            return Ok(true);
        }
        if !overwrite {
            let message = format!(
                "{destination} holds rows of another job, {} ({}); choose another --output, or replace it with --overwrite",
                stored.job.job_id,
                differences.join("; ")
            );
            return Err(StorageError::new(
                StorageErrorKind::OutputOfAnotherJob,
                message,
            ));
        }
        clear(destination)?;
    } else {
        let objects = destination.objects()?;
        if objects.iter().any(|object| object.key == JOB) {
            return Err(StorageError::lost_race(destination.shown(JOB).display()));
        }
        if let Some(object) = objects.first() {
            return Err(StorageError::new(
                StorageErrorKind::OutputExists,
                format!(
                    "{destination} has objects in it that are not known to be trommel's, such as {}; choose another --output",
                    object.key
                ),
            ));
        }
    }
    let stored = StoredJob {
        job: job.clone(),
        replaces_output: false,
    };
    let text = serde_json::to_vec_pretty(&stored).expect("records hold text and lists of it");
    destination.write(JOB, text.into(), true)?;
    Ok(false)
}

/// Takes back the word that a job is finished.
pub(super) fn reopen(destination: &BucketDestination) -> Result<(), StorageError> {
    destination.remove(SUCCESS)?;
    destination.remove(SUMMARY)
}

/// Removes the results of a job, the word that it is finished first.
pub(super) fn clear(destination: &BucketDestination) -> Result<(), StorageError> {
    reopen(destination)?;
    for object in destination.objects()? {
        if object.key.starts_with("part-") {
            destination.remove(&object.key)?;
        }
    }
    destination.remove(JOB)
}
