//! `trommel evaluate`: results against labels, or against another run's.

mod agreement;
mod tally;
mod thresholds;
mod truth;

use std::fmt;
use std::io::{self, Write};

use anyhow::{Context, Result};
use serde::Serialize;

use self::agreement::compare;
use self::tally::{Evaluation, Tally};
pub(crate) use self::truth::Truth;
use crate::args::EvaluateArgs;
use crate::config::Config;
use crate::exit::{Exit, Usage};
use crate::results::Results;

/// Runs the command.
pub(crate) fn run(args: &EvaluateArgs, config: &Config) -> Result<Exit> {
    let results = Results::open(&args.results, config)?;
    if let Some(against) = &args.against {
        let agreement = compare(&results, &Results::open(against, config)?)?;
        print(&agreement, args.json)?;
        return Ok(verdict(agreement.agreement, args.min_agreement));
    }
    let evaluation = score(&results, args)?;
    print(&evaluation, args.json)?;
    Ok(verdict(evaluation.accuracy, args.min_accuracy))
}

fn print(what: &(impl Serialize + fmt::Display), json: bool) -> Result<()> {
    if json {
        let text = serde_json::to_string_pretty(what).context("failed to write JSON")?;
        writeln!(io::stdout(), "{text}")?;
    } else {
        write!(io::stdout(), "{what}")?;
    }
    Ok(())
}

/// Whether a share reaches its minimum.
fn verdict(share: f64, least: Option<f64>) -> Exit {
    if least.is_some_and(|least| share < least) {
        Exit::Failed
    } else {
        Exit::Success
    }
}

fn score(results: &Results, args: &EvaluateArgs) -> Result<Evaluation> {
    let truth = Truth::from(args).context(Usage)?;
    let mut tally = Tally::default();
    for row in results.rows()? {
        let row = row?;
        match truth.of(&row) {
            Some(label) => tally.add(&label, &row),
            None => tally.leave_out(&row),
        }
    }
    tally.check(&truth).context(Usage)?;
    Ok(tally.finish(args.precision))
}
