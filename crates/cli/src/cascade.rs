//! `trommel classify` with two models: first a random sample, then a rule learned from it, then the
//! rest; and what a job of two models over a broker reports.

use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use trommel_infer::{Decided, Pair, Rule, Wanted, check_cascade, has_shifted};
use trommel_sink::Output;
use trommel_worker::{CascadeStatus, EmbeddedJob, Ended, Images, Learned, Progress, Sinks};

use crate::args::ClassifyArgs;
use crate::config::Config;
use crate::exit::Usage;
use crate::model::Opened;
use crate::progress_bar::Bar;
use crate::results::Results;

/// The rule and the savings of a cascade.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct CascadeReport {
    /// The required share of labels equal to the large model's.
    agree: f64,
    /// Sampled images that the rule was learned from.
    sample: usize,
    /// Whether the classes of new images have shifted, so that an earlier sample was discarded.
    shifted: bool,
    rule: Rule,
    /// Of this run.
    decided: Decided,
    /// Share of this run's images that did not need the large model.
    saved: f64,
}

/// Refuses combinations that a cascade does not support, before anything is written.
pub(crate) fn check(args: &ClassifyArgs, wanted: &Wanted, models: [&Opened; 2]) -> Result<()> {
    check_cascade(args.agree.unwrap_or(1.0), wanted)?;
    let [small, large] = models;
    if matches!(small, Opened::Prompt(..)) {
        bail!("the first model of a cascade cannot be a prompt; give the prompt as the second one");
    }
    let (own, other) = (small.labels(), large.labels());
    if !other.is_empty() && !other.iter().any(|label| own.contains(label)) {
        bail!(
            "the models of the cascade have no label in common, so they would never agree; give them the same labels"
        );
    }
    if args.sources.iter().any(|source| source == "-") {
        bail!("a cascade lists its source twice, so it cannot read standard input; give a file");
    }
    if args.output.as_deref() == Some("-") {
        bail!(
            "a cascade reads the rows of its sample back; give a file, a folder or a table with --output"
        );
    }
    let is_folder = args.output.as_deref().is_some_and(|to| to.ends_with('/'));
    if args.skip_existing && !is_folder {
        bail!(
            "a cascade can add rows to a folder or a bucket, but not to a file or a table; end --output with /, or leave out --skip-existing"
        );
    }
    if args.agree_sample == 0 {
        bail!("--agree-sample is 0; give at least a few hundred images");
    }
    Ok(())
}

/// Runs the job: the sample, then the rest by the rule learned from the sample's rows. Each pass
/// resumes where an earlier run was interrupted, and the same rows give the same rule.
pub(crate) fn run(
    runtime: &Runtime,
    args: &ClassifyArgs,
    destination: &Output,
    job: EmbeddedJob,
    (sinks, images): (Sinks, Images),
    progress: &Arc<Progress>,
    stop: CancellationToken,
) -> Result<(Ended, Sinks, Option<CascadeReport>)> {
    let config = job.config.clone();
    let engines = job.models.iter().map(|model| Arc::clone(&model.engine));
    let engines: Vec<_> = engines.collect();
    let agree = args.agree.unwrap_or(1.0);
    let named = args.output.as_deref().unwrap_or_default();
    let retry = sinks.iter().find_map(|sink| sink.job().retry.clone());
    let added = retry.filter(|retry| retry.adds);
    // Added rows do not count before the run is complete, so they are read from their own folder.
    let (before, own, known) = match &added {
        Some(added) => (
            sampled(named, &config)?,
            format!("{named}retry-{:04}/", added.number),
            added.of_rows,
        ),
        None => (Vec::new(), named.to_owned(), 0),
    };
    let listed = runtime.block_on(job.source.count()).context(Usage)?;
    let new = listed.saturating_sub(known).max(1);
    let share = (args.agree_sample as f64 / new as f64).min(1.0);

    let sample = Images::Sample(Box::new(images), share);
    let (ended, mut sinks) = {
        // The sample's progress bar ends before that of the rest begins.
        let own = Arc::new(Progress::default());
        let _bar = Bar::show(&own, None, 1, args.quiet);
        runtime.block_on(job.clone().into_output(sinks, sample, own, stop.clone()))?
    };
    if ended == Ended::Stopped {
        return Ok((ended, sinks, None));
    }
    let now = match sinks.iter().all(|sink| sink.committed().is_empty()) {
        true => Vec::new(),
        false => sampled(&own, &config)
            .with_context(|| format!("failed to read the sample back from {destination}"))?,
    };
    let shifted = has_shifted(&before, &now);
    if shifted {
        tracing::warn!(
            "the classes have shifted since the earlier sample: only the new one counts"
        );
    }
    let before = before.into_iter().filter(|_| !shifted);
    let pairs: Vec<_> = before.chain(now).collect();
    let rule = Rule::learn(&pairs, agree);
    if rule.thresholds.is_empty() {
        tracing::warn!(
            sample = pairs.len(),
            "the sample shows no threshold with an agreement of {agree} for any class; all images go to the large model"
        );
    }

    let rest = match sinks.first_mut() {
        Some(sink) if added.is_some() => Images::New(runtime.block_on(sink.existing())?),
        _ => Images::Missing,
    };
    let _bar = Bar::show(progress, None, 1, args.quiet);
    let job = EmbeddedJob {
        rule: Some(Arc::new(rule.clone())),
        ..job
    };
    let (ended, sinks) =
        runtime.block_on(job.into_output(sinks, rest, Arc::clone(progress), stop))?;
    let decided = engines.iter().find_map(|engine| engine.decided());
    let decided = decided.unwrap_or_default();
    let report = CascadeReport {
        agree,
        sample: pairs.len(),
        shifted,
        rule,
        decided,
        saved: saved(decided),
    };
    Ok((ended, sinks, Some(report)))
}

/// Reads the rows of the sample.
fn sampled(named: &str, config: &Config) -> Result<Vec<Pair>> {
    // A file is merged from its parts at the end.
    let parts = format!("{named}.parts");
    let named = match std::path::Path::new(&parts).is_dir() {
        true => &parts,
        false => named,
    };
    let mut pairs = Vec::new();
    for row in Results::open(named, config)?.rows()? {
        let row = row?;
        let column = |name: &str| row.columns.get(name).map(String::as_str);
        if column("decided_by") != Some("sample") {
            continue;
        }
        if let (Some(label), Some(small), Some(score)) =
            (&row.label, column("small_label"), column("small_score"))
        {
            let pair = Pair {
                agrees: *label == *small,
                label: small.to_owned(),
                score: score.parse().context("small_score of a row is no number")?,
            };
            pairs.push((row.index, pair));
        }
    }
    pairs.sort_by_key(|(index, _)| *index);
    pairs.dedup_by_key(|(index, _)| *index);
    Ok(pairs.into_iter().map(|(_, pair)| pair).collect())
}

impl CascadeReport {
    /// Images that this run passed to both models.
    pub(crate) fn sampled(&self) -> u64 {
        self.decided.sample
    }
}

impl fmt::Display for CascadeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_decided(f, self.decided)?;
        write_rule(f, &self.rule, self.agree)?;
        match self.shifted {
            true => writeln!(f, "; the classes have shifted since the earlier sample"),
            false => writeln!(f),
        }
    }
}

/// The cascade of a job over a broker, as far as it is known.
pub(crate) struct OfJob<'a>(pub(crate) &'a CascadeStatus);

impl fmt::Display for OfJob<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CascadeStatus {
            agree,
            learned,
            decided,
        } = self.0;
        if let Some(decided) = decided {
            write_decided(f, *decided)?;
        }
        match learned {
            None => writeln!(
                f,
                "  cascade: both models classify the sample that the rule is learned from"
            ),
            Some(Learned { rule, .. }) => {
                write_rule(f, rule, *agree)?;
                writeln!(f)
            }
        }
    }
}

fn write_decided(f: &mut fmt::Formatter<'_>, decided: Decided) -> fmt::Result {
    let Decided {
        sample,
        small,
        large,
    } = decided;
    writeln!(
        f,
        "  cascade: {small} by the small model alone ({:.0} %), {large} unsure, {sample} sampled",
        100.0 * saved(decided)
    )
}

fn write_rule(f: &mut fmt::Formatter<'_>, rule: &Rule, agree: f64) -> fmt::Result {
    let [low, high] = rule.interval.map(|share| 100.0 * share);
    write!(
        f,
        "  agreement: {:.2} % ({low:.2} to {high:.2}) of {} sampled images, at least {} % required",
        100.0 * rule.agreement,
        rule.tried,
        100.0 * agree
    )
}

/// Share of the images that did not need the large model.
fn saved(decided: Decided) -> f64 {
    let all = decided.sample + decided.small + decided.large;
    decided.small as f64 / all.max(1) as f64
}
