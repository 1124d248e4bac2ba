//! Subjects, consumers and keys in the broker, in one place.

use trommel_queue::subject_token;
use trommel_types::Lane;

/// Subjects of one deployment; several share a broker by different prefixes.
#[derive(Debug, Clone)]
pub(crate) struct Subjects {
    prefix: String,
}

impl Subjects {
    pub(crate) fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
        }
    }

    pub(crate) fn jobs(&self, lane: Lane) -> String {
        format!("{}.jobs.{lane}", self.prefix)
    }

    pub(crate) fn tasks(&self, lane: Lane) -> String {
        format!("{}.tasks.{lane}", self.prefix)
    }

    pub(crate) fn tensors(&self, model: &str, lane: Lane) -> String {
        format!("{}.tensors.{}.{lane}", self.prefix, subject_token(model))
    }

    pub(crate) fn results(&self, job: &str, model: &str) -> String {
        format!(
            "{}.results.{}.{}",
            self.prefix,
            subject_token(job),
            subject_token(model)
        )
    }

    pub(crate) fn dead(&self, stage: &str, job: &str) -> String {
        format!("{}.dead.{stage}.{}", self.prefix, subject_token(job))
    }

    /// What happens to a job: `progress`, `completed`, `failed`, `cancelled`.
    pub(crate) fn event(&self, job: &str, what: &str) -> String {
        format!("{}.events.{}.{what}", self.prefix, subject_token(job))
    }
}

/// The durable consumer of tasks in a lane.
pub(crate) fn tasks_consumer(lane: Lane) -> String {
    format!("preprocess-{lane}")
}

/// The durable consumer of a model's tensors in a lane.
pub(crate) fn tensors_consumer(model: &str, lane: Lane) -> String {
    format!("infer-{}-{lane}", subject_token(model))
}

/// The durable consumer of what a job's sink takes for one model.
pub(crate) fn results_consumer(job: &str, model: &str) -> String {
    format!("sink-{}-{}", subject_token(job), subject_token(model))
}

/// Keys in the bucket of job records.
pub(crate) mod key {
    use super::subject_token;

    /// All job records.
    pub(crate) const JOBS: &str = "job.";
    /// All workers that are alive.
    pub(crate) const WORKERS: &str = "worker.";

    /// The record of a job.
    pub(crate) fn job(job: &str) -> String {
        format!("job.{}", subject_token(job))
    }

    /// How far a job's source is listed.
    pub(crate) fn listing(job: &str) -> String {
        format!("listing.{}", subject_token(job))
    }

    /// How many rows of a job and model are committed.
    pub(crate) fn rows(job: &str, model: &str) -> String {
        format!("rows.{}.{}", subject_token(job), subject_token(model))
    }

    /// Who may commit rows of a job and model.
    pub(crate) fn lease(job: &str, model: &str) -> String {
        format!("lease.{}.{}", subject_token(job), subject_token(model))
    }

    /// All claims of part numbers of a job and model.
    pub(crate) fn claims(job: &str, model: &str) -> String {
        format!("claim.{}.{}.", subject_token(job), subject_token(model))
    }

    /// What was last said of a job's images; the stage follows.
    pub(crate) fn said(job: &str) -> String {
        format!("said.{}.", subject_token(job))
    }

    /// A worker that is alive.
    pub(crate) fn worker(id: &str) -> String {
        format!("worker.{}", subject_token(id))
    }
}
