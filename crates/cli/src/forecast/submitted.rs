//! The dry run of `trommel submit`: the workers classify a sample and report their times.

use std::collections::BTreeMap;
use std::io::{self, Write};

use anyhow::{Context, Result, anyhow};
use indicatif::HumanCount;
use trommel_types::{Forecast, Role, problem_of_token_prices};
use trommel_worker::{Client, JobState, JobStatus, fleet_usage};

use super::{Basis, Expected};
use crate::args::SubmitArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::jobs::{LOOK_EVERY, ended, print_json, show_failures};
use crate::standstill::Standstill;

/// How a dry run ended.
pub(crate) enum DryRun {
    Said(Forecast),
    Nothing(Exit),
}

impl DryRun {
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Said(_) => Exit::Success,
            Self::Nothing(exit) => *exit,
        }
    }
}

/// Follows a dry run and forecasts the whole job.
pub(crate) async fn follow(
    client: &Client,
    id: &str,
    args: &SubmitArgs,
    config: &Config,
) -> Result<DryRun> {
    let mut waited: BTreeMap<Role, u64> = BTreeMap::new();
    let mut standstill = Standstill::new();
    let status = loop {
        let status = client.status(id).await?;
        for stage in &status.stages {
            *waited.entry(stage.stage).or_default() += stage.waiting;
        }
        if status.state.is_final() {
            break status;
        }
        for finding in standstill.explain(client, &status).await? {
            writeln!(io::stderr(), "{finding}")?;
        }
        tokio::time::sleep(LOOK_EVERY / 4).await;
    };
    if status.state != JobState::Complete {
        return ended(&status, false).map(DryRun::Nothing);
    }
    let bottleneck = waited
        .iter()
        .max_by_key(|(_, waiting)| **waiting)
        .filter(|(_, waiting)| **waiting > 0)
        .map(|(stage, _)| stage.as_str().to_owned());
    let fleet = fleet_usage(&client.workers().await?);
    let to_s3 = args.output.starts_with("s3://");
    let counted = status.counted.unwrap_or(trommel_worker::Counted {
        images: status.listed,
        is_all: true,
    });
    // The slowest model ends the job.
    let trials = status.models.iter().filter_map(|model| model.trial);
    let slowest = trials.max_by(|a, b| a.seconds_each.total_cmp(&b.seconds_each));
    let uncounted = slowest
        .filter(|trial| trial.tokens.is_none())
        .and_then(|_| problem_of_token_prices(&args.prices.prices));
    if let Some(problem) = uncounted {
        return Err(anyhow!("--price: {problem}").context(Usage));
    }
    let expected = slowest.map(|trial| {
        let basis = Basis {
            images: counted.images,
            all_counted: counted.is_all,
            startup: 0.0, // the workers run already
            trial,
            most_written: None, // the workers have the prompt
            held: fleet,
            prices: &args.prices.prices,
            s3_part_rows: to_s3.then_some(config.sink.part_rows.get()),
            bottleneck,
        };
        basis.expected()
    });
    show_dry_run(&status, counted, expected.as_ref(), args.json)?;
    Ok(match expected {
        Some(expected) => DryRun::Said(expected.forecast()),
        None => DryRun::Nothing(Exit::Success),
    })
}

fn show_dry_run(
    status: &JobStatus,
    counted: trommel_worker::Counted,
    expected: Option<&Expected>,
    json: bool,
) -> Result<()> {
    if json {
        let mut all = serde_json::json!({
            "images": counted.images,
            "all_counted": counted.is_all,
            "sample": status.models,
        });
        let expected = serde_json::to_value(expected).context("failed to write the answer")?;
        if let (Some(all), Some(more)) = (all.as_object_mut(), expected.as_object()) {
            all.extend(more.clone());
        }
        return print_json(&all);
    }
    let mut out = io::stdout().lock();
    let images = super::counted(counted.images, counted.is_all);
    writeln!(out, "images      {images}")?;
    for model in &status.models {
        writeln!(
            out,
            "sample      {}: {} ok, {} failed",
            model.name,
            HumanCount(model.ok),
            HumanCount(model.failed)
        )?;
        show_failures(&mut out, &model.failures)?;
    }
    match expected {
        Some(expected) => write!(out, "{expected}")?,
        None => writeln!(out, "time        unknown: the sample was too small")?,
    }
    Ok(())
}
