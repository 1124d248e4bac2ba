//! Classifies faults: the only place that decides what an error ends.
//!
//! | scope | what happens |
//! | --- | --- |
//! | image | a failed row; nothing else |
//! | job | the job ends as failed with the reason, its committed rows stay; other jobs continue |
//! | worker | the process ends, and its work comes again elsewhere |
//!
//! If another attempt may succeed, it is not a fault yet: it is retried.

use std::time::Duration;

use rand::Rng;
use thiserror::Error;
use trommel_infer::{InferError, InferErrorKind};
use trommel_preprocess::PrepareError;
use trommel_queue::{QueueError, QueueErrorKind};
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::ErrorKind;

use crate::distributed::ReasonKind;
use crate::{RetryPolicy, WorkerError};

/// Why processing a delivery failed.
#[derive(Debug, Error)]
pub(crate) enum TaskError {
    /// The image could not be read.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Its bytes could not be turned into a tensor.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// Its bytes were not turned into a tensor within the time limit.
    #[error("was not decoded within {} (preprocess.decode-timeout)", humantime::format_duration(*after))]
    TimedOut {
        /// The time limit.
        after: Duration,
    },
    /// Its deadline passed before it was processed.
    #[error("was not classified before its deadline (image_deadline_ms of its job)")]
    Expired,
    /// The model gave no answer.
    #[error(transparent)]
    Infer(#[from] InferError),
    /// The next queue did not store the outcome.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// Something other than the image failed.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// Earlier attempts ended without an outcome: the image may kill its worker.
    #[error("gave no outcome in {attempts} attempts; it may crash or hang the worker")]
    Poisoned {
        /// Previous attempts.
        attempts: u32,
    },
    /// There is no record of the job that the image belongs to.
    #[error("job {job} has no record, so the content of its rows is unknown")]
    NoJob {
        /// The job.
        job: String,
    },
}

/// What an error ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Nothing: another attempt may succeed.
    Nothing,
    /// The image, whose row says why.
    Image(ErrorKind),
    /// The job, whose record says why.
    Job(ReasonKind),
    /// This process.
    Worker,
}

impl TaskError {
    /// What the error ends, once retries are exhausted.
    pub(crate) fn scope(&self) -> Scope {
        match self {
            Self::Storage(error) => Scope::Image(storage_kind(error)),
            Self::Prepare(error) => Scope::Image(error.kind()),
            Self::TimedOut { .. } => Scope::Image(ErrorKind::Timeout),
            Self::Expired => Scope::Image(ErrorKind::Expired),
            Self::Infer(error) if error.is_fatal() => Scope::Worker,
            Self::Infer(error) => match error.kind() {
                InferErrorKind::Timeout => Scope::Image(ErrorKind::Timeout),
                // This model does not support the job's row options, or no server has answered for
                // too long.
                InferErrorKind::Settings | InferErrorKind::Unreachable => {
                    Scope::Job(ReasonKind::Model)
                }
                _ => Scope::Image(ErrorKind::ModelFailed),
            },
            Self::Queue(error) => match queue_scope(error) {
                Scope::Job(_) => Scope::Image(ErrorKind::TooLarge),
                scope => scope,
            },
            Self::Worker(WorkerError::Panicked { .. }) => Scope::Image(ErrorKind::Poisoned),
            Self::Worker(error) => error.scope(),
            Self::Poisoned { .. } => Scope::Image(ErrorKind::Poisoned),
            Self::NoJob { .. } => Scope::Nothing,
        }
    }

    /// Whether another attempt at the same bytes may succeed, so that the image is retried before
    /// it fails.
    fn is_passing(&self) -> bool {
        use StorageErrorKind::{TimedOut, Unreadable};
        matches!(self, Self::Storage(error) if matches!(error.kind(), Unreadable | TimedOut))
    }
}

impl WorkerError {
    /// What the error ends if it occurs on behalf of a job.
    pub(crate) fn scope(&self) -> Scope {
        match self {
            Self::Storage(error) if is_transient(error) => Scope::Nothing,
            Self::Storage(_) | Self::SourceChanged { .. } => Scope::Job(ReasonKind::Source),
            Self::Infer(error) if error.is_fatal() => Scope::Worker,
            Self::Infer(error) => match error.kind() {
                InferErrorKind::Runtime | InferErrorKind::Settings | InferErrorKind::Device => {
                    Scope::Worker
                }
                _ => Scope::Job(ReasonKind::Model),
            },
            Self::Queue(error) => queue_scope(error),
            Self::UnknownModel { .. } | Self::OtherVersion { .. } | Self::Model(_) => {
                Scope::Job(ReasonKind::Model)
            }
            Self::Panicked { .. } | Self::Request(_) => Scope::Job(ReasonKind::Request),
            Self::TooManyFailures { .. } => Scope::Job(ReasonKind::TooManyFailures),
            Self::Attempts { .. } => Scope::Job(ReasonKind::Attempts),
            Self::Unreadable { .. }
            | Self::LeaseLost
            | Self::NotBegun { .. }
            | Self::OutputBusy { .. } => Scope::Nothing,
            Self::Thread(_)
            | Self::Hung { .. }
            | Self::DrainTimeout { .. }
            | Self::Settings(_)
            | Self::NobodyAnswers
            | Self::Refused(_) => Scope::Worker,
        }
    }
}

fn queue_scope(error: &QueueError) -> Scope {
    match error.kind() {
        QueueErrorKind::TooLarge => Scope::Job(ReasonKind::Request),
        QueueErrorKind::Unreachable | QueueErrorKind::Expired | QueueErrorKind::AccountLimit => {
            Scope::Nothing
        }
        QueueErrorKind::Refused
        | QueueErrorKind::Unsupported
        | QueueErrorKind::Misconfigured
        | QueueErrorKind::Forbidden => Scope::Worker,
    }
}

/// Whether a store may succeed later.
pub(crate) fn is_transient(error: &StorageError) -> bool {
    matches!(
        error.kind(),
        StorageErrorKind::Unreadable
            | StorageErrorKind::TimedOut
            | StorageErrorKind::WriteFailed
            | StorageErrorKind::NoSpace
            | StorageErrorKind::Locked
            | StorageErrorKind::LostRace
    )
}

/// The kind of failure of an image that could not be read.
fn storage_kind(error: &StorageError) -> ErrorKind {
    match error.kind() {
        StorageErrorKind::NotFound => ErrorKind::NotFound,
        StorageErrorKind::PermissionDenied => ErrorKind::PermissionDenied,
        StorageErrorKind::Empty => ErrorKind::Empty,
        StorageErrorKind::TooLarge => ErrorKind::TooLarge,
        StorageErrorKind::Changed => ErrorKind::Changed,
        StorageErrorKind::TimedOut => ErrorKind::Timeout,
        _ => ErrorKind::Unreadable,
    }
}

/// What to do about a failed delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// Retry after this time.
    Retry { after: Duration },
    /// Write the image's failed row.
    FailImage(ErrorKind),
    /// End the job.
    FailJob,
    /// End this process.
    EndWorker,
    /// Dead-letter the message: no row can be written for it.
    SetAside,
}

/// The only place that turns an error into an action. `attempt` is the number of the delivery.
pub(crate) fn remedy(error: &TaskError, attempt: u32, policy: &RetryPolicy) -> Remedy {
    if error.is_passing() && attempt < policy.max_attempts.get() {
        return Remedy::Retry {
            after: jittered(attempt, policy),
        };
    }
    match (error.scope(), error) {
        (Scope::Image(kind), _) => Remedy::FailImage(kind),
        (Scope::Job(_), _) => Remedy::FailJob,
        (Scope::Worker, _) => Remedy::EndWorker,
        (Scope::Nothing, TaskError::NoJob { .. }) if attempt >= policy.max_deliveries.get() => {
            Remedy::SetAside
        }
        // Its record may take a long time to come back, and the message is set aside after that
        // many attempts.
        (Scope::Nothing, TaskError::NoJob { .. }) => Remedy::Retry { after: policy.cap },
        (Scope::Nothing, _) => Remedy::Retry {
            after: jittered(attempt, policy),
        },
    }
}

/// "Full jitter": uniform between 0 and a bound that doubles with each attempt, so that workers
/// that failed together do not retry together.
fn jittered(attempt: u32, policy: &RetryPolicy) -> Duration {
    let doubled = policy
        .base
        .saturating_mul(1 << attempt.saturating_sub(1).min(20));
    doubled.min(policy.cap).mul_f64(rand::rng().random())
}

#[cfg(test)]
mod tests {
    use trommel_preprocess::{Limits, Plan, Preparer, Reference};

    use super::*;

    fn policy() -> RetryPolicy {
        RetryPolicy::default()
    }

    /// A temporary disk error.
    fn unreadable() -> StorageError {
        StorageError::read(
            "photos/cat.jpg",
            std::io::Error::other("input/output error"),
        )
    }

    /// A real error of the preprocess crate.
    fn undecodable() -> TaskError {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/digits");
        let plan = Plan::load(dir.as_ref(), Reference::Auto).unwrap();
        let mut preparer = Preparer::new(plan.into(), Limits::default());
        preparer.prepare(b"no image").unwrap_err().into()
    }

    #[test]
    fn a_fault_of_an_image_is_a_row_and_ends_nothing_else() {
        let panicked = WorkerError::Panicked { what: "a thread" };
        for (error, kind) in [
            (undecodable(), ErrorKind::UnknownFormat),
            (panicked.into(), ErrorKind::Poisoned),
            (TaskError::Poisoned { attempts: 4 }, ErrorKind::Poisoned),
            (TaskError::Expired, ErrorKind::Expired),
        ] {
            assert_eq!(
                remedy(&error, 1, &policy()),
                Remedy::FailImage(kind),
                "{error}"
            );
        }
        for attempt in 1..policy().max_attempts.get() {
            let remedy = remedy(&unreadable().into(), attempt, &policy());
            assert!(
                matches!(remedy, Remedy::Retry { .. }),
                "attempt {attempt}: {remedy:?}"
            );
        }
        let last = remedy(&unreadable().into(), policy().max_attempts.get(), &policy());
        assert_eq!(last, Remedy::FailImage(ErrorKind::Unreadable));
    }

    #[test]
    fn a_fault_of_a_job_ends_that_job_and_no_worker() {
        // R14: each of these ended one process after another.
        let other_version = WorkerError::OtherVersion {
            name: "vit".to_owned(),
            expected: "0123456789ab".to_owned(),
            found: "ba9876543210".to_owned(),
            root: "models".into(),
        };
        let unknown = WorkerError::UnknownModel {
            name: "vit".to_owned(),
            known: String::new(),
            root: "models".into(),
        };
        for error in [
            other_version,
            unknown,
            WorkerError::Model("model vit: its images end up in different sizes".to_owned()),
        ] {
            assert_eq!(error.scope(), Scope::Job(ReasonKind::Model), "{error}");
            let remedy = remedy(&error.into(), 1, &policy());
            assert_eq!(remedy, Remedy::FailJob);
        }
        let hopeless = WorkerError::TooManyFailures {
            failed: 3,
            listed: 4,
            limit: 0.1,
        };
        assert_eq!(hopeless.scope(), Scope::Job(ReasonKind::TooManyFailures));
        let panicked = WorkerError::Panicked {
            what: "opening a source",
        };
        assert_eq!(
            panicked.scope(),
            Scope::Job(ReasonKind::Request),
            "of a job, not of an image"
        );
    }

    #[test]
    fn what_cannot_be_read_now_waits_and_is_never_settled() {
        // R2: a record that could not be read counted as "no job", and its images were lost.
        let unreadable_record = WorkerError::Unreadable {
            key: "job.a".to_owned(),
            reason: "unknown variant".to_owned(),
        };
        for attempt in [1, 10, 1000] {
            let error = TaskError::Worker(WorkerError::Unreadable {
                key: "job.a".to_owned(),
                reason: "unknown variant".to_owned(),
            });
            let remedy = remedy(&error, attempt, &policy());
            assert!(matches!(remedy, Remedy::Retry { .. }), "{remedy:?}");
        }
        assert_eq!(unreadable_record.scope(), Scope::Nothing);
        let no_job = |attempt| {
            let error = TaskError::NoJob {
                job: "a".to_owned(),
            };
            remedy(&error, attempt, &policy())
        };
        assert!(matches!(no_job(1), Remedy::Retry { .. }));
        assert_eq!(
            no_job(10),
            Remedy::SetAside,
            "kept in the dead letters, without a row"
        );
        assert_eq!(WorkerError::Storage(unreadable()).scope(), Scope::Nothing);
    }

    #[test]
    fn what_a_broker_did_not_answer_once_is_tried_again_soon() {
        let unanswered = |attempt| {
            let error = WorkerError::NotBegun {
                job: "a".to_owned(),
            };
            match remedy(&error.into(), attempt, &policy()) {
                Remedy::Retry { after } => after,
                other => panic!("{other:?}"),
            }
        };
        let first = (0..50).map(|_| unanswered(1)).max().unwrap();
        assert!(first <= policy().base, "{first:?}");
        let later = (0..50).map(|_| unanswered(40)).max().unwrap();
        assert!(later > policy().cap / 2, "{later:?}");
    }

    #[test]
    fn what_no_job_is_at_fault_for_ends_the_worker() {
        let settings = WorkerError::Settings("broken".to_owned());
        assert_eq!(settings.scope(), Scope::Worker);
        let thread = WorkerError::Thread(std::io::Error::other("none left"));
        assert_eq!(thread.scope(), Scope::Worker);
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
