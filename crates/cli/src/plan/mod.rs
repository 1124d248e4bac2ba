//! `trommel plan`: the resources that a rate and a latency need, before anything runs.

mod fleet;
mod known;
mod random;
mod requests;
mod service;
mod show;
mod simulate;

use std::io::{self, Write};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use trommel_types::{Price, problem_of_prices, problem_of_token_prices};

use self::fleet::{Fleet, JobPlan, Scale};
use self::known::Known;
use self::requests::{RequestPlan, Wanted};
use crate::args::PlanArgs;
use crate::exit::{Exit, Usage};

pub(crate) use self::random::Random;
pub(crate) use self::service::{Service, seconds_argument};

/// The output of the command.
#[derive(Debug, Serialize)]
struct Plan {
    /// For requests, if a latency was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<RequestPlan>,
    /// For a job.
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<JobPlan>,
    /// How a job scales with cores and devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    scale: Option<Scale>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<CostOfPlan>,
    /// Missing inputs, and what the plan leaves out without them.
    missing: Vec<String>,
}

/// What the planned processes cost.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct CostOfPlan {
    an_hour: f64,
    a_million_images: f64,
}

impl CostOfPlan {
    fn of(fleet: &Fleet, rate: f64, known: &Known, prices: &[Price]) -> Option<Self> {
        let an_hour = trommel_types::cost(prices, &fleet.usage_in_an_hour(rate, known));
        (!prices.is_empty()).then(|| Self {
            an_hour,
            a_million_images: an_hour / (rate * 3600.0) * 1e6,
        })
    }
}

/// Runs the command.
pub(crate) fn run(args: &PlanArgs) -> Result<Exit> {
    let prices = &args.prices.prices;
    let uncounted = || problem_of_token_prices(prices);
    if let Some(problem) = problem_of_prices(prices).or_else(uncounted) {
        return Err(anyhow::anyhow!("--price: {problem}").context(Usage));
    }
    let known = Known::of(args).context(Usage)?;
    let plan = match plan(args, &known)? {
        Some(plan) => plan,
        None => return Ok(Exit::Failed),
    };
    if args.json {
        let text = serde_json::to_string_pretty(&plan).context("failed to write JSON")?;
        writeln!(io::stdout(), "{text}")?;
    } else {
        write!(io::stdout(), "{plan}")?;
    }
    Ok(Exit::Success)
}

/// `None` if no plan meets the latency; the reason has been printed.
fn plan(args: &PlanArgs, known: &Known) -> Result<Option<Plan>> {
    let prices = &args.prices.prices;
    let scale = known.prepare.map(|prepare| Scale::of(known, prepare));
    let missing = known.missing(args.p95.is_some());
    let Some(p95) = args.p95 else {
        let job = fleet::plan_job(args, known).context(Usage)?;
        return Ok(Some(Plan {
            cost: CostOfPlan::of(&job.fleet, job.images_per_second, known, prices),
            requests: None,
            job: Some(job),
            scale,
            missing,
        }));
    };
    let wanted = Wanted::of(args, p95.as_secs_f64()).context(Usage)?;
    match requests::plan(&wanted, known) {
        Ok(requests) => Ok(Some(Plan {
            cost: CostOfPlan::of(&requests.fleet, requests.rate, known, prices),
            requests: Some(requests),
            job: None,
            scale,
            missing,
        })),
        Err(reason) => {
            writeln!(io::stderr(), "trommel: no plan: {reason:#}")?;
            Ok(None)
        }
    }
}

/// Rejects arguments that the other kind of plan uses.
fn refuse(is_given: bool, flag: &str, why: &str) -> Result<()> {
    if is_given {
        bail!("{flag} {why}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn planned(line: &str) -> Option<Plan> {
        let words = ["trommel", "plan"].into_iter().chain(line.split(' '));
        let Command::Plan(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("{line} is a plan");
        };
        plan(&args, &Known::of(&args).unwrap()).unwrap()
    }

    fn requests(line: &str) -> RequestPlan {
        planned(line).unwrap().requests.unwrap()
    }

    /// One session of b4 or b8 carries 100 a second within 120 ms; single images do not, and 10 ms gather only
    /// two.
    #[test]
    fn a_hundred_a_second_within_120_ms() {
        let line = "--service b1=18,b2=20,b4=24,b8=32 --other 10ms --rate 100 --p95 120ms";
        let plan = requests(line);
        assert_eq!(plan.fleet.instances, 1);
        assert!(plan.max_batch >= 4, "{plan:?}");
        assert!(plan.milliseconds.p95 <= 120.0, "{plan:?}");
        assert!(plan.busy < 0.95, "{plan:?}");
        // Little's law: as many as arrive while each is processed.
        let expected = plan.rate * plan.milliseconds.mean / 1e3;
        assert!((plan.in_flight / expected - 1.0).abs() < 0.03, "{plan:?}");
        assert!(plan.holds_up_to > 100.0, "{plan:?}");

        // 10 ms gather about two; a few more come while the only session is busy with others.
        let short = requests(&format!(
            "{line} --max-batch 4 --max-wait 10ms --instances 1"
        ));
        assert!((2.0..3.0).contains(&short.mean_batch), "{short:?}");
        let longer = requests(&format!(
            "{line} --max-batch 4 --max-wait 30ms --instances 1"
        ));
        assert!((3.0..4.0).contains(&longer.mean_batch), "{longer:?}");
        assert!(longer.milliseconds.p95 <= 120.0, "{longer:?}");
        let single = planned(&format!("{line} --max-batch 1 --instances 1"));
        assert!(single.is_none(), "{single:?}");
    }

    /// Little's law: two sessions of 40 ms answer 50 a second, and with more than ten in flight the last
    /// of them waits for longer than 200 ms.
    #[test]
    fn two_sessions_of_40_ms_take_ten_in_flight() {
        let plan = requests("--service b1=40 --instances 2 --p95 200ms --max-batch 1");
        assert!((plan.capacity - 50.0).abs() < 1e-9, "{plan:?}");
        assert_eq!(plan.in_flight_cap, 10);
        assert!((plan.milliseconds.p95 - 200.0).abs() < 1e-6, "{plan:?}");
        // More than what they answer cannot be promised.
        let beyond = "--service b1=40 --instances 2 --p95 200ms --rate 50";
        assert!(planned(beyond).is_none());
    }

    /// Batches of four carry 117.6 a second, so one GPU needs batches of eight.
    #[test]
    fn a_hundred_and_twenty_a_second_on_one_gpu() {
        let line = "--service b1=25,b2=27,b4=34,b8=48 --other 10ms --rate 120 --p95 140ms";
        let plan = requests(&format!("{line} --instances 1"));
        assert_eq!(plan.max_batch, 8);
        assert!(plan.milliseconds.p95 <= 140.0, "{plan:?}");
        assert!(plan.mean_batch > 4.0, "{plan:?}");
        let four = planned(&format!("{line} --instances 1 --max-batch 4"));
        assert!(four.is_none(), "{four:?}");
        assert_eq!(requests(line).fleet.instances, 1);
    }

    #[test]
    fn a_time_that_no_number_of_sessions_keeps_is_refused() {
        let line = "--service b1=18,b8=32 --other 10ms --rate 100 --p95 25ms";
        assert!(planned(line).is_none());
    }

    #[test]
    fn a_job_takes_as_many_of_each_as_its_rate_asks_for() {
        let line = "--service b1=5,b8=16 --rate 2000 --prepare 2ms --tensor-bytes 150528 \
                    --image-bytes 60000 --broker 1500 --price infer=2/h,preprocess=0.05/core-h";
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        let plan = planned(&line).unwrap();
        let job = plan.job.unwrap();
        assert_eq!(
            (job.fleet.cores, job.fleet.instances, job.fleet.streams),
            (4, 4, 2)
        );
        let cost = plan.cost.unwrap();
        assert!(
            (cost.an_hour - (4.0 * 2.0 + 4.0 * 0.05)).abs() < 1e-9,
            "{cost:?}"
        );
        let local = planned(&format!("{line} --hop local"))
            .unwrap()
            .job
            .unwrap();
        assert_eq!(local.fleet.streams, 0);
    }

    #[test]
    fn a_plan_says_what_it_does_not_know() {
        let plan = planned("--service b1=5,b8=16 --rate 100").unwrap();
        assert!(plan.missing.iter().any(|text| text.contains("--prepare")));
        assert!(plan.scale.is_none());
    }
}
