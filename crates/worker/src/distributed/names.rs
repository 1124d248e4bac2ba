//! Subjects, consumers and keys in the broker, in one place.

use std::borrow::Cow;

use trommel_queue::subject_token;
use trommel_types::{JobModel, JobRequest, Lane, Role};

/// Subjects of one deployment; deployments with different prefixes share a broker.
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

    /// Subject of a job's tasks; `*` for all jobs of the lane.
    pub(crate) fn tasks(&self, lane: Lane, job: &str) -> String {
        format!("{}.tasks.{lane}.{}", self.prefix, token(job))
    }

    /// Subject of a job's tensors; `*` for all jobs of the lane.
    pub(crate) fn tensors(&self, model: &str, version: &str, lane: Lane, job: &str) -> String {
        let model = model_token(model, version);
        format!("{}.tensors.{model}.{lane}.{}", self.prefix, token(job))
    }

    /// Subject of tensors of requests for a model, which no stream stores.
    pub(crate) fn infer(&self, model: &str, version: &str) -> String {
        format!("{}.infer.{}", self.prefix, model_token(model, version))
    }

    /// The tensors of a job for all of its models.
    pub(crate) fn tensors_of_job(&self, lane: Lane, job: &str) -> String {
        format!("{}.tensors.*.{lane}.{}", self.prefix, token(job))
    }

    /// Subject of the rows of a job and model; `*` for all its models.
    pub(crate) fn results(&self, job: &str, model: &str) -> String {
        format!("{}.results.{}.{}", self.prefix, token(job), token(model))
    }

    /// Subject of dead letters of a stage; `*` for all stages.
    pub(crate) fn dead(&self, stage: &str, job: &str) -> String {
        format!("{}.dead.{stage}.{}", self.prefix, token(job))
    }

    /// Subject of a job's events: `progress`, `completed`, `failed`, `cancelled`.
    pub(crate) fn event(&self, job: &str, what: &str) -> String {
        format!("{}.events.{}.{what}", self.prefix, token(job))
    }
}

/// The id under which the broker keeps a request: its own, or a short hash of it if records and
/// subjects do not support it.
pub(crate) fn kept_id(request: &JobRequest) -> Cow<'_, str> {
    if request.has_valid_id() {
        return Cow::Borrowed(&request.id);
    }
    let hash = xxhash_rust::xxh3::xxh3_64(request.id.as_bytes());
    Cow::Owned(format!("invalid-{hash:016x}"))
}

/// One token for a name; the wildcard stays.
fn token(name: &str) -> String {
    if name == "*" {
        return name.to_owned();
    }
    subject_token(name)
}

fn model_token(model: &str, version: &str) -> String {
    subject_token(&format!("{model}@{version}"))
}

/// The durable consumer of job messages in a lane.
pub(crate) fn jobs_consumer(lane: Lane) -> String {
    format!("{}-{lane}", Role::Ingest)
}

/// The durable consumer of tasks in a lane.
pub(crate) fn tasks_consumer(lane: Lane) -> String {
    format!("{}-{lane}", Role::Preprocess)
}

/// The durable consumer of a model's tensors in a lane.
pub(crate) fn tensors_consumer(model: &JobModel, lane: Lane) -> String {
    let model = model_token(&model.name, &model.version);
    format!("{}-{model}-{lane}", Role::Infer)
}

/// The durable consumer of the results of a job and model. `=` occurs in tokens only as an escape,
/// so the two names cannot be confused.
pub(crate) fn results_consumer(job: &str, model: &str) -> String {
    format!(
        "{}-{}==={}",
        Role::Sink,
        subject_token(job),
        subject_token(model)
    )
}

/// The durable consumer of the events that a job follows.
pub(crate) fn feed_consumer(job: &str) -> String {
    format!("trommel-{}", subject_token(job))
}

/// Keys in the bucket of job records.
pub(crate) mod key {
    use super::subject_token;

    /// All job records.
    pub(crate) const JOBS: &str = "job.";
    /// All live workers.
    pub(crate) const WORKERS: &str = "worker.";

    /// The record of a job.
    pub(crate) fn job(job: &str) -> String {
        format!("job.{}", subject_token(job))
    }

    /// A job's progress: its checkpoint, with the leases.
    pub(crate) fn progress(job: &str) -> String {
        format!("progress.{}", subject_token(job))
    }

    /// The rule of a cascade.
    pub(crate) fn rule(job: &str) -> String {
        format!("rule.{}", subject_token(job))
    }

    /// Which job writes to an output.
    pub(crate) fn output(output: &str) -> String {
        format!("output.{}", subject_token(output))
    }

    /// All claims of part numbers of a job and model.
    pub(crate) fn claims(job: &str, model: &str) -> String {
        format!("claim.{}.{}.", subject_token(job), subject_token(model))
    }

    /// How often work on a redelivered message has begun.
    pub(crate) fn tried(stage: &str, job: &str, id: &str) -> String {
        format!("tried.{}.{stage}.{}", subject_token(job), subject_token(id))
    }

    /// All of a job's keys of [`tried`].
    pub(crate) fn all_tried(job: &str) -> String {
        format!("tried.{}.", subject_token(job))
    }

    /// A live worker.
    pub(crate) fn worker(id: &str) -> String {
        format!("worker.{}", subject_token(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consumers_of_different_jobs_and_models_have_different_names() {
        // R24: `sink-a-b-c` was job `a-b`, model `c`, and job `a`, model `b-c`.
        assert_ne!(results_consumer("a-b", "c"), results_consumer("a", "b-c"));
        let of = |version: &str| {
            let model = JobModel {
                name: "m".to_owned(),
                version: version.to_owned(),
            };
            tensors_consumer(&model, Lane::High)
        };
        assert_ne!(of("1"), of("2"), "each version has its own");
    }

    #[test]
    fn a_wildcard_stays_one() {
        let subjects = Subjects::new("t");
        assert_eq!(subjects.tasks(Lane::Low, "*"), "t.tasks.low.*");
        assert_eq!(subjects.tasks(Lane::Low, "a.b"), "t.tasks.low.a=2Eb");
        assert_eq!(
            subjects.tensors("m", "1", Lane::High, "j"),
            "t.tensors.m=401.high.j"
        );
    }
}
