use std::time::Duration;

use rand::Rng;
use thiserror::Error;
use trommel_infer::InferError;
use trommel_preprocess::PrepareError;
use trommel_queue::{Disposition, QueueError};
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::ErrorKind;

use crate::{RetryPolicy, WorkerError};

/// Why the work on one delivery did not succeed.
#[derive(Debug, Error)]
pub(crate) enum TaskError {
    /// The image could not be read.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Its bytes could not be turned into a tensor.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// The model gave no answer.
    #[error(transparent)]
    Infer(#[from] InferError),
    /// The next queue did not store the outcome.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The worker itself failed, not the image.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// Earlier attempts ended without an outcome: the image may kill its worker.
    #[error("gave no outcome in {attempts} attempts; it may crash or hang the worker")]
    Poisoned {
        /// Attempts before this one.
        attempts: u32,
    },
}

impl TaskError {
    /// The word for the row's `error_kind`.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Storage(error) => storage_kind(error),
            Self::Prepare(error) => error.kind(),
            Self::Infer(_) => ErrorKind::ModelFailed,
            Self::Queue(_) => ErrorKind::Timeout,
            Self::Worker(_) | Self::Poisoned { .. } => ErrorKind::Poisoned,
        }
    }

    /// Whether another attempt at the same bytes could end differently.
    fn is_transient(&self) -> bool {
        match self {
            Self::Storage(error) => error.kind() == StorageErrorKind::Unreadable,
            Self::Queue(_) => true,
            Self::Prepare(_) | Self::Infer(_) | Self::Worker(_) | Self::Poisoned { .. } => false,
        }
    }
}

/// The word for an image that could not be read.
fn storage_kind(error: &StorageError) -> ErrorKind {
    match error.kind() {
        StorageErrorKind::NotFound => ErrorKind::NotFound,
        StorageErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
        StorageErrorKind::Empty => ErrorKind::Empty,
        StorageErrorKind::TooLarge => ErrorKind::TooLarge,
        _ => ErrorKind::Unreadable,
    }
}

/// The one place that turns an error into what the queue is told.
///
/// An error that another attempt may cure is retried, with full jitter, until `max_attempts`;
/// everything else is dead-lettered at once.
pub(crate) fn disposition(error: &TaskError, attempt: u32, policy: &RetryPolicy) -> Disposition {
    if error.is_transient() && attempt < policy.max_attempts.get() {
        Disposition::Retry {
            after: jittered(attempt, policy),
        }
    } else {
        Disposition::DeadLetter {
            reason: error.to_string(),
        }
    }
}

/// "Full jitter": uniform between nothing and a bound that doubles with each attempt, so that
/// workers that failed together do not come back together.
fn jittered(attempt: u32, policy: &RetryPolicy) -> Duration {
    let doubled = policy
        .base
        .saturating_mul(1 << attempt.saturating_sub(1).min(20));
    doubled.min(policy.cap).mul_f64(rand::rng().random())
}

#[cfg(test)]
mod tests {
    use trommel_preprocess::{Limits, Plan, Preparer};

    use super::*;

    fn policy() -> RetryPolicy {
        RetryPolicy::default()
    }

    /// A passing fault of a disk.
    fn unreadable() -> TaskError {
        let error = std::io::Error::other("input/output error");
        StorageError::read("photos/cat.jpg", error).into()
    }

    /// A real error of the preprocess crate.
    fn undecodable() -> TaskError {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/digits");
        let plan = Plan::load(dir.as_ref()).unwrap();
        let mut preparer = Preparer::new(plan.into(), Limits::default());
        preparer.prepare(b"no image").unwrap_err().into()
    }

    #[test]
    fn only_what_another_attempt_may_cure_is_retried() {
        let panicked = || TaskError::from(WorkerError::Panicked { what: "a thread" });
        let poisoned = TaskError::Poisoned { attempts: 4 };
        for (error, kind) in [
            (undecodable(), ErrorKind::UnknownFormat),
            (panicked(), ErrorKind::Poisoned),
            (poisoned, ErrorKind::Poisoned),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
            let first = disposition(&error, 1, &policy());
            assert!(
                matches!(first, Disposition::DeadLetter { .. }),
                "{error}: {first:?}"
            );
        }

        assert_eq!(unreadable().kind(), ErrorKind::Unreadable);
        for attempt in 1..policy().max_attempts.get() {
            let told = disposition(&unreadable(), attempt, &policy());
            assert!(
                matches!(told, Disposition::Retry { .. }),
                "attempt {attempt}: {told:?}"
            );
        }
        let last = disposition(&unreadable(), policy().max_attempts.get(), &policy());
        assert!(matches!(last, Disposition::DeadLetter { .. }), "{last:?}");
    }

    #[test]
    fn waits_grow_with_each_attempt_and_stay_within_the_cap() {
        let policy = policy();
        for attempt in 1..40 {
            let bound = policy
                .base
                .saturating_mul(1 << (attempt - 1).min(20))
                .min(policy.cap);
            for _ in 0..50 {
                assert!(jittered(attempt, &policy) <= bound);
            }
        }
    }
}
