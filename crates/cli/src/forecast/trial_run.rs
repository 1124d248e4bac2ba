//! The dry run of `trommel classify`: a sample passes through all roles, and no row is stored.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use trommel_sink::Format;
use trommel_source::Source;
use trommel_types::Price;
use trommel_worker::{
    EmbeddedJob, Images, Progress, Sinks, Trial, TrialOutcome, TrialSink, TrialTokens,
};

use super::{Basis, Expected, Spending};
use crate::model::Asked;
use crate::summary::{Run, busiest};

/// Longest time to classify the sample; the forecast uses what is done by then.
const SAMPLE_FOR: Duration = Duration::from_secs(60);
/// A shorter sample, in seconds, is mostly its beginning, in which caches are cold and queues empty.
const SHORT: f64 = 1.5;
/// Seconds that a longer sample is to take, and the most images that it has.
const LONG: f64 = 3.0;
const MOST_IMAGES: u64 = 20_000;
/// Longest time to count the images.
const COUNT_FOR: Duration = Duration::from_secs(120);

/// What a dry run needs in addition to its job.
pub(crate) struct Terms<'a> {
    /// The whole source; the job has a sample of it.
    pub(crate) source: &'a dyn Source,
    /// Opens a sample of this many images.
    pub(crate) open: &'a dyn Fn(u64) -> Result<Arc<dyn Source>>,
    pub(crate) prices: &'a [Price],
    pub(crate) format: Format,
    pub(crate) to_s3: bool,
    /// When the process began.
    pub(crate) started: Instant,
    /// How servers are asked, for each model that is a prompt.
    pub(crate) asked: Vec<Option<Asked>>,
}

impl Terms<'_> {
    /// Most tokens of the answers for an image, if servers are asked.
    fn most_written(&self) -> Option<u32> {
        let asked = self.asked.iter().flatten();
        asked.map(|asked| asked.max_tokens).reduce(|a, b| a + b)
    }
}

/// Counts the images, classifies the sample, and forecasts the whole job. A sample that takes too little time
/// is followed by a longer one, which replaces it.
///
/// # Errors
/// Those of the job; and if the sample has fewer than two images.
pub(crate) fn dry_run(
    runtime: &Runtime,
    mut job: EmbeddedJob,
    terms: &Terms<'_>,
    stop: &CancellationToken,
) -> Result<(Expected, Run)> {
    let startup = terms.started.elapsed().as_secs_f64();
    let (mut trial, mut run) = sample(runtime, &job, terms, stop)?;
    let (images, all_counted) = runtime.block_on(count(terms.source))?;
    if let Some(images) = longer(&trial, images) {
        job.source = (terms.open)(images)?;
        (trial, run) = sample(runtime, &job, terms, stop)?;
    }
    let basis = Basis {
        images,
        all_counted,
        startup,
        trial,
        most_written: terms.most_written(),
        held: run.spending.held,
        prices: terms.prices,
        // Each model has its own parts.
        s3_part_rows: terms
            .to_s3
            .then_some(job.config.sink.part_rows.get() / job.models.len().max(1)),
        bottleneck: Some(busiest(&run))
            .filter(|stage| *stage != "none")
            .map(str::to_owned),
    };
    Ok((basis.expected(), run))
}

/// Classifies the images of the job and stores nothing.
fn sample(
    runtime: &Runtime,
    job: &EmbeddedJob,
    terms: &Terms<'_>,
    stop: &CancellationToken,
) -> Result<(Trial, Run)> {
    let progress = Arc::new(Progress::default());
    let spending = Spending::new(terms.prices, &job.config, terms.to_s3);
    let run = Run::of(job, &progress, Instant::now(), spending);
    let (mut outcomes, mut sinks): (Vec<_>, Sinks) = (Vec::new(), Vec::new());
    for (model, asked) in job.models.iter().zip(&terms.asked) {
        let (record, answers) = (model.record.clone(), model.engine.columns());
        let outcome = TrialOutcome::default();
        let sink = TrialSink::new(record, terms.format, &answers, Arc::clone(&outcome));
        let budget = asked.as_ref().and_then(|asked| asked.budget);
        sinks.push(Box::new(sink.with_budget(budget)));
        outcomes.push(outcome);
    }
    let began = Instant::now();
    let sampled = runtime.block_on(async {
        let enough = stop.child_token();
        let clock = enough.clone();
        let timer = tokio::spawn(async move {
            tokio::time::sleep(SAMPLE_FOR).await;
            clock.cancel();
        });
        let job = job.clone();
        let ended = job.into_output(sinks, Images::Missing, progress, enough);
        let ended = ended.await;
        timer.abort();
        ended
    });
    let (_, sinks) = sampled?;
    let took = began.elapsed().as_secs_f64();
    if stop.is_cancelled() {
        bail!("stopped before the sample was classified; nothing is stored");
    }
    for sink in sinks {
        runtime.block_on(sink.finish())?;
    }
    let trials = outcomes.iter().map(|outcome| {
        let trial = outcome.lock().unwrap_or_else(PoisonError::into_inner);
        *trial
    });
    match trials
        .reduce(|one, other| Some(together(one?, other?)))
        .flatten()
    {
        Some(trial) => Ok((at_least(trial, took), run)),
        None => bail!("the source has too few images for a forecast; classify them"),
    }
}

/// The trial of two models that classify the same images: the slower one sets the pace.
fn together(one: Trial, other: Trial) -> Trial {
    let (slow, fast) = match one.seconds_each >= other.seconds_each {
        true => (one, other),
        false => (other, one),
    };
    let tokens = match (one.tokens, other.tokens) {
        (Some(one), Some(other)) => Some(TrialTokens {
            read: one.read + other.read,
            written: one.written + other.written,
            image: one.image.zip(other.image).map(|(one, other)| one + other),
        }),
        (one, other) => one.or(other),
    };
    Trial {
        images: slow.images.min(fast.images),
        row_bytes: slow.row_bytes + fast.row_bytes,
        tokens,
        ..slow
    }
}

/// A sample of a few batches says little about the time between rows: those of a batch are finished at
/// once. Then the time of the whole sample counts.
fn at_least(trial: Trial, seconds: f64) -> Trial {
    let each = seconds / trial.images.max(1) as f64;
    match trial.plus_or_minus {
        Some(_) => trial,
        None => Trial {
            seconds_each: trial.seconds_each.max(each),
            ..trial
        },
    }
}

/// Images of a longer sample, if this one was too short and the source has many more.
fn longer(trial: &Trial, images: u64) -> Option<u64> {
    let short = trial.images as f64 * trial.seconds_each < SHORT;
    let wanted = (LONG / trial.seconds_each) as u64;
    (short && images >= 2 * trial.images).then(|| wanted.min(images).min(MOST_IMAGES))
}

/// The number of images of a source, and whether all were counted in time.
async fn count(source: &dyn Source) -> Result<(u64, bool)> {
    let deadline = tokio::time::Instant::now() + COUNT_FOR;
    let (mut listing, mut images) = (source.list(), 0);
    loop {
        match tokio::time::timeout_at(deadline, listing.next()).await {
            Ok(Some(found)) => {
                found.context("failed to count the images")?;
                images += 1;
            }
            ended => return Ok((images, ended.is_ok())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(seconds_each: f64) -> Trial {
        Trial {
            images: 512,
            seconds_each,
            plus_or_minus: None,
            image_bytes: 1.0,
            row_bytes: 1.0,
            from_s3: 0.0,
            tokens: None,
        }
    }

    #[test]
    fn the_rows_of_one_batch_do_not_say_how_long_an_image_takes() {
        // 25 images whose rows were finished within microseconds, in a run of half a second.
        let batch = Trial {
            images: 25,
            ..trial(1e-6)
        };
        assert_eq!(at_least(batch, 0.5).seconds_each, 0.02);
        let many = Trial {
            plus_or_minus: Some(1e-7),
            ..trial(1e-6)
        };
        assert_eq!(at_least(many, 0.5).seconds_each, 1e-6);
    }

    #[test]
    fn of_two_models_the_slower_one_sets_the_pace_and_both_write_rows() {
        let fast = Trial {
            row_bytes: 5.0,
            ..trial(0.001)
        };
        for both in [together(fast, trial(0.004)), together(trial(0.004), fast)] {
            assert_eq!((both.seconds_each, both.row_bytes), (0.004, 6.0));
        }
    }

    #[test]
    fn a_short_sample_is_followed_by_one_of_seconds() {
        assert_eq!(longer(&trial(0.001), 1_000_000), Some(3000));
        assert_eq!(
            longer(&trial(0.001), 2000),
            Some(2000),
            "no more than there are"
        );
        assert_eq!(longer(&trial(0.00001), 1_000_000), Some(MOST_IMAGES));
        assert_eq!(
            longer(&trial(0.001), 1023),
            None,
            "the job itself is as short"
        );
        assert_eq!(longer(&trial(0.003), 1_000_000), None);
    }
}
