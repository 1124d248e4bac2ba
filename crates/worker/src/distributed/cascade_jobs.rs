//! Cascades over the broker: first the tasks of a random sample, then a rule learned from its rows,
//! then the tasks of the rest.
//!
//! Whether an image is sampled follows from its index and two numbers, which are stored before the
//! first task is published: the size of the sample, and of the source. The rule has a record of its
//! own, which is created once, after all rows of the sample are committed, and before the first task
//! of the rest is published. So an image is answered in the same way however often it is delivered.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use trommel_infer::{Decided, Pair, Rule, Wanted, cascade_name, cascade_version};
use trommel_sink::CascadeRows;
use trommel_types::{Cascade, JobModel, JobSpec};

use crate::WorkerError;
use crate::distributed::ingest_jobs::Context;
use crate::distributed::job_images::{Images, Which};
use crate::distributed::job_lease::JobLease;
use crate::distributed::job_store::JobStore;
use crate::distributed::names::key;
use crate::distributed::record::{Counted, Job, JobProgress};
use crate::ingest::Share;

/// The rule of a cascade.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Learned {
    /// Sampled images with a label of each model, from which the rule was learned.
    pub sample: u64,
    /// The rule.
    pub rule: Rule,
}

/// Counts the decisions in rows.
pub(super) fn decided(rows: &CascadeRows) -> Decided {
    Decided {
        sample: rows.sampled,
        small: rows.small,
        large: rows.large,
    }
}

/// The models of a job that begins: those of its request, or their cascade with them as its stages.
pub(super) fn models(
    cascade: Option<Cascade>,
    models: Vec<JobModel>,
) -> (Vec<JobModel>, Vec<JobModel>) {
    match (cascade, models.as_slice()) {
        (Some(cascade), [small, large]) => {
            let both = JobModel {
                name: cascade_name(&small.name, &large.name),
                version: cascade_version(&small.version, &large.version, cascade.agree),
            };
            (vec![both], models)
        }
        _ => (models, Vec::new()),
    }
}

/// The stages of a job that is a cascade.
pub(super) fn stages(spec: &JobSpec) -> Option<(&JobModel, Stages)> {
    let ([both], [small, large], Some(cascade)) =
        (&*spec.models, &*spec.stages, spec.request.cascade)
    else {
        return None;
    };
    let stages = Stages {
        small: small.clone(),
        large: large.clone(),
        agree: cascade.agree,
    };
    Some((both, stages))
}

/// The two models of a cascade.
#[derive(Debug, Clone)]
pub(super) struct Stages {
    pub(super) small: JobModel,
    pub(super) large: JobModel,
    pub(super) agree: f64,
}

fn share(cascade: Cascade, counted: Counted) -> Share {
    Share((cascade.sample as f64 / counted.images.max(1) as f64).min(1.0))
}

/// Whether the rest of a cascade waits for rows of its sample.
pub(super) fn waits(job: &Job, progress: &JobProgress) -> bool {
    let rows = job.models().first().map(|model| &model.name);
    let rows = rows.and_then(|name| progress.rows.get(name));
    let committed = rows.map_or(0, |rows| rows.committed);
    progress.listing.waits && committed < progress.listing.listed
}

/// What is next for a job's listing.
pub(super) enum Next {
    List(Which),
    /// The sample of a cascade is listed, and does not have all of its rows yet.
    Wait,
    /// The process is stopping.
    Stop,
}

/// What is next: all images, or for a cascade its sample, and once its rows are committed the rest.
pub(super) async fn next(
    ctx: &Context,
    job: &Job,
    images: &Images,
    lease: &JobLease,
    shutdown: &CancellationToken,
) -> Result<Next, WorkerError> {
    let (Some(cascade), Images::Source(source)) = (job.spec.request.cascade, images) else {
        return Ok(Next::List(Which::All));
    };
    let progress = lease.change(|_| ()).await?;
    let counted = match progress.listing.counted {
        Some(counted) => counted,
        None => {
            let Some(images) = shutdown.run_until_cancelled(source.count()).await else {
                return Ok(Next::Stop);
            };
            let counted = Counted {
                images: images?,
                is_all: true,
            };
            let noted = lease.change(|progress| progress.listing.counted = Some(counted));
            noted.await?;
            counted
        }
    };
    if learned(&ctx.store, job.id()).await?.is_none() {
        if !progress.listing.waits {
            return Ok(Next::List(Which::Sample(share(cascade, counted))));
        }
        if waits(job, &progress) {
            return Ok(Next::Wait);
        }
        learn(ctx, job, cascade).await?;
    }
    if progress.listing.waits {
        // From the start again, now for the images without a row.
        let noted = lease.change(|progress| {
            progress.listing.waits = false;
            progress.listing.listed = 0;
            progress.listing.passed = None;
        });
        noted.await?;
    }
    Ok(Next::List(Which::Rest))
}

/// The rule of a job, if it is known.
pub(crate) async fn learned(store: &JobStore, id: &str) -> Result<Option<Learned>, WorkerError> {
    let learned = store.read(&key::rule(id)).await?;
    Ok(learned.map(|(learned, _)| learned))
}

/// Learns the rule from the committed rows, and stores it unless it is stored already.
async fn learn(ctx: &Context, job: &Job, cascade: Cascade) -> Result<(), WorkerError> {
    let progress = ctx.store.progress(job.id()).await?;
    let [model] = job.models() else {
        return Ok(()); // not a cascade
    };
    let rows = progress.rows.get(&model.name);
    let preconditions = rows.map(|rows| rows.preconditions).unwrap_or_default();
    let mut opened = (ctx.open)(job, model, preconditions).await?;
    let mut rows = opened.sink.cascade_rows().await?.sample;
    rows.sort_unstable_by_key(|row| row.index);
    let pairs: Vec<_> = rows
        .into_iter()
        .map(|row| Pair {
            agrees: row.label == row.small_label,
            label: row.small_label,
            score: row.small_score,
        })
        .collect();
    let learned = Learned {
        sample: pairs.len() as u64,
        rule: Rule::learn(&pairs, cascade.agree),
    };
    if learned.rule.thresholds.is_empty() {
        tracing::warn!(
            job = job.id(),
            sample = learned.sample,
            "the sample shows no threshold with an agreement of {} for any class; all images go to the large model",
            cascade.agree
        );
    }
    // Another process learns the same from the same rows.
    ctx.store.set(&key::rule(job.id()), &learned, 0).await?;
    Ok(())
}

/// The row options of a job's images, each value shared by all images that have it.
#[derive(Debug)]
pub(super) struct JobRows {
    /// For a cascade: the share of its images in the sample.
    share: Option<Share>,
    /// Of all images, or of the sample.
    first: Arc<Wanted>,
    /// Of the rest, once the rule is known.
    rest: Option<Arc<Wanted>>,
}

impl JobRows {
    /// The options of an image's row, if they are known.
    pub(super) fn of(&self, index: u64) -> Option<Arc<Wanted>> {
        match self.share {
            Some(share) if !share.holds(index) => self.rest.clone(),
            _ => Some(Arc::clone(&self.first)),
        }
    }

    /// Adds the options that were not known yet.
    pub(super) fn complete(&mut self, other: &Self) {
        if self.rest.is_none() {
            self.rest.clone_from(&other.rest);
        }
    }

    /// The options as far as they are stored.
    pub(super) async fn find(store: &JobStore, job: &Job) -> Result<Self, WorkerError> {
        let first = Arc::new(Wanted::from(&job.spec.request.rows));
        let Some(cascade) = job.spec.request.cascade else {
            return Ok(Self {
                share: None,
                first,
                rest: None,
            });
        };
        let counted = store.progress(job.id()).await?.listing.counted;
        let counted = counted.ok_or_else(|| WorkerError::NotBegun {
            job: job.id().to_owned(),
        })?;
        let rest = learned(store, job.id()).await?.map(|learned| {
            Arc::new(Wanted {
                rule: Some(Arc::new(learned.rule)),
                ..Wanted::clone(&first)
            })
        });
        Ok(Self {
            share: Some(share(cascade, counted)),
            first,
            rest,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distributed::record::{JobState, Rows};

    fn job() -> Job {
        let model = |name: &str| JobModel {
            name: name.to_owned(),
            version: "0123456789ab".to_owned(),
        };
        let cascade = Some(Cascade {
            agree: 0.99,
            sample: 10,
        });
        let (models, stages) = models(cascade, vec![model("small"), model("large")]);
        let mut spec = JobSpec {
            models,
            stages,
            ..JobSpec::default()
        };
        spec.request.cascade = cascade;
        Job {
            spec,
            state: JobState::Running,
            reason: None,
            submitted_at: 0,
            started_at: None,
            finished_at: None,
            retries: 0,
        }
    }

    #[test]
    fn a_cascade_is_one_model_made_of_two() {
        let job = job();
        let (both, stages) = stages(&job.spec).unwrap();
        assert_eq!(both.name, "small+large");
        assert_eq!(
            (&*stages.small.name, &*stages.large.name),
            ("small", "large")
        );
        let (alone, none) = models(None, job.spec.stages.clone());
        assert_eq!((alone, none), (job.spec.stages.clone(), Vec::new()));
        let mut changed = job.spec.clone();
        changed.stages[1].version = "ba9876543210".to_owned();
        assert_ne!(changed.hash(), job.spec.hash());
    }

    #[test]
    fn the_rest_waits_until_the_sample_has_its_rows() {
        let (job, mut progress) = (job(), JobProgress::default());
        assert!(!waits(&job, &progress));
        progress.listing.waits = true;
        progress.listing.listed = 10;
        assert!(waits(&job, &progress));
        let rows = |committed| Rows {
            committed,
            ..Rows::default()
        };
        progress.rows.insert("small+large".to_owned(), rows(9));
        assert!(waits(&job, &progress));
        progress.rows.insert("small+large".to_owned(), rows(10));
        assert!(!waits(&job, &progress));
    }
}
