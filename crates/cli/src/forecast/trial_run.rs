//! The dry run of `trommel classify`: a sample through all roles, and no row stored.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::StreamExt;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use trommel_sink::Format;
use trommel_source::Source;
use trommel_types::Price;
use trommel_worker::{EmbeddedJob, Images, Progress, TrialOutcome, TrialSink};

use super::{Basis, Expected, Spending};
use crate::model::Asked;

/// Longest time that the sample is classified; what is done by then has to do.
const SAMPLE_FOR: Duration = Duration::from_secs(60);
/// Longest time that images are counted.
const COUNT_FOR: Duration = Duration::from_secs(120);

/// What a dry run needs in addition to its job.
pub(crate) struct Terms<'a> {
    /// The whole source; the job has a sample of it.
    pub(crate) source: &'a dyn Source,
    pub(crate) prices: &'a [Price],
    pub(crate) format: Format,
    pub(crate) to_s3: bool,
    /// When the process began.
    pub(crate) started: Instant,
    /// How servers are asked, if they are.
    pub(crate) asked: Option<Asked>,
}

/// Counts the images, classifies the sample that the job has, and says what all of them would take.
///
/// # Errors
/// Those of the job; and when the sample held fewer than two images.
pub(crate) fn dry_run(
    runtime: &Runtime,
    job: EmbeddedJob,
    terms: &Terms<'_>,
    progress: &Arc<Progress>,
    bottleneck: impl FnOnce() -> &'static str,
    stop: &CancellationToken,
) -> Result<Expected> {
    let startup = terms.started.elapsed().as_secs_f64();
    let spending = Spending::new(terms.prices, &job.config, terms.to_s3);
    let part_rows = job.config.sink.part_rows.get();
    let outcome = TrialOutcome::default();
    let (record, answers) = (job.record.clone(), job.engine.columns());
    let sink = TrialSink::new(record, terms.format, &answers, Arc::clone(&outcome));
    let sink = sink.with_budget(terms.asked.as_ref().and_then(|asked| asked.budget));
    let sampled = runtime.block_on(async {
        let enough = stop.child_token();
        let clock = enough.clone();
        let timer = tokio::spawn(async move {
            tokio::time::sleep(SAMPLE_FOR).await;
            clock.cancel();
        });
        let ended = job.into_output(
            Box::new(sink),
            Images::Missing,
            Arc::clone(progress),
            enough,
        );
        let ended = ended.await;
        timer.abort();
        ended
    });
    let (_, sink) = sampled?;
    if stop.is_cancelled() {
        bail!("stopped before the sample was classified; nothing is stored");
    }
    let bottleneck = bottleneck();
    runtime.block_on(sink.finish())?;
    let trial = *outcome.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(trial) = trial else {
        bail!("the source has too few images for a forecast; classify them");
    };
    let (images, all_counted) = runtime.block_on(count(terms.source))?;
    let basis = Basis {
        images,
        all_counted,
        startup,
        trial,
        most_written: terms.asked.as_ref().map(|asked| asked.max_tokens),
        held: spending.held,
        prices: terms.prices,
        s3_part_rows: terms.to_s3.then_some(part_rows),
        bottleneck: Some(bottleneck)
            .filter(|stage| *stage != "none")
            .map(str::to_owned),
    };
    Ok(basis.expected())
}

/// The images of a source, and whether that is all of them or time ran out.
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
