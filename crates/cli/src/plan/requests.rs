//! Settings and replicas that meet a latency target.

use anyhow::{Result, bail};
use serde::Serialize;

use super::fleet::Fleet;
use super::known::Known;
use super::refuse;
use super::simulate::{Arrivals, Outcome, SATURATED, Station, System, simulate};
use crate::args::{ArrivalArg, PlanArgs, PlanHop};
use crate::bench::Spread;

/// Images simulated per candidate.
const TRIED: usize = 10_000;
/// Images simulated for the figures in the output.
const SHOWN: usize = 200_000;
/// Smaller differences, as a share, are simulation noise: the smaller batch wins.
const NOISE: f64 = 0.03;
/// Candidate waits in milliseconds.
const WAITS: [f64; 14] = [
    1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 200.0,
];
/// Most sessions to try.
const MOST_INSTANCES: usize = 4096;

/// The target.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    rate: Option<f64>,
    /// 95th percentile of the latency in seconds.
    p95: f64,
    constant: bool,
    instances: Option<usize>,
    cores: Option<usize>,
    max_batch: Option<usize>,
    max_wait: Option<f64>,
    seed: u64,
}

impl Wanted {
    /// # Errors
    /// If neither a rate nor sessions are given, or an argument does not apply to requests.
    pub(crate) fn of(args: &PlanArgs, p95: f64) -> Result<Self> {
        if args.rate.is_none() && args.instances.is_none() {
            bail!("give a rate with --rate, or a number of sessions with --instances");
        }
        let why = "applies to jobs only, as requests use no stream; leave out --p95";
        refuse(args.streams.is_some(), "--streams", why)?;
        refuse(args.hop == PlanHop::Local, "--hop local", why)?;
        Ok(Self {
            rate: args.rate,
            p95,
            constant: args.arrivals == ArrivalArg::Constant,
            instances: args.instances.map(Into::into),
            cores: args.cores.map(Into::into),
            max_batch: args.max_batch.map(Into::into),
            max_wait: args.max_wait.map(|wait| wait.as_secs_f64()),
            seed: args.seed,
        })
    }

    fn arrivals(&self, rate: f64) -> Arrivals {
        match self.constant {
            true => Arrivals::Constant(rate),
            false => Arrivals::Poisson(rate),
        }
    }
}

/// A plan that meets the latency target.
#[derive(Debug, Serialize)]
pub(crate) struct RequestPlan {
    /// Images per second.
    pub(crate) rate: f64,
    pub(crate) p95_wanted_milliseconds: f64,
    pub(crate) max_batch: usize,
    pub(crate) max_wait_milliseconds: f64,
    #[serde(flatten)]
    pub(crate) fleet: Fleet,
    /// Mean batch size.
    pub(crate) mean_batch: f64,
    /// How busy the sessions are, 0 to 1.
    pub(crate) busy: f64,
    /// How busy the preprocess cores are, 0 to 1.
    pub(crate) cores_busy: Option<f64>,
    /// From the arrival of a request to its answer.
    pub(crate) milliseconds: Spread,
    /// Mean number of requests in flight.
    pub(crate) in_flight: f64,
    /// Most requests in flight that still meet the target.
    pub(crate) in_flight_cap: usize,
    /// Images per second of all sessions with full batches.
    pub(crate) capacity: f64,
    /// Highest rate in images per second at which these settings meet the target.
    pub(crate) holds_up_to: f64,
}

/// A candidate: a batch and a wait.
#[derive(Debug, Clone, Copy)]
struct Choice {
    max_batch: usize,
    max_wait: f64,
}

/// Finds the fewest sessions that meet the target, and for them the batch and wait with the lowest 95th percentile.
///
/// # Errors
/// Why no candidate meets the target.
pub(crate) fn plan(wanted: &Wanted, known: &Known) -> Result<RequestPlan> {
    let least = known.service.seconds(1) + known.other + known.prepare.unwrap_or(0.0);
    if least > wanted.p95 {
        bail!(
            "a single image takes {:.1} ms, more than the p95 target of {:.1} ms; use a faster device or a smaller model",
            1e3 * least,
            1e3 * wanted.p95
        );
    }
    let Some(rate) = wanted.rate else {
        return full(wanted, known);
    };
    let best = known.service.rate(known.service.fastest());
    let first = (rate / best).ceil().max(1.0) as usize;
    let counts: Box<dyn Iterator<Item = usize>> = match wanted.instances {
        Some(instances) => Box::new(std::iter::once(instances)),
        None => Box::new(rising(first)),
    };
    for instances in counts {
        let found = choices(wanted, known, instances, rate);
        for choice in found {
            if let Some(plan) = settle(wanted, known, instances, rate, choice) {
                return Ok(plan);
            }
        }
    }
    match wanted.instances {
        Some(instances) => {
            let most = instances as f64 * best;
            bail!(
                "95 % of {rate} images/s are not answered within {:.0} ms with --instances {instances}; the limit with full batches is {most:.1}/s",
                1e3 * wanted.p95
            )
        }
        None => bail!(
            "even {MOST_INSTANCES} sessions do not answer 95 % within {:.0} ms",
            1e3 * wanted.p95
        ),
    }
}

/// Numbers from `first` on, with growing steps.
fn rising(first: usize) -> impl Iterator<Item = usize> {
    let next = |number: &usize| Some(number + (number / 16).max(1));
    std::iter::successors(Some(first), next).take_while(|number| *number <= MOST_INSTANCES)
}

fn system<'a>(known: &'a Known, instances: usize, choice: Choice) -> System<'a> {
    System {
        service: &known.service,
        max_batch: choice.max_batch,
        max_wait: choice.max_wait,
        instances,
        other: known.other,
        stations: Vec::new(),
        exponential: false,
    }
}

/// The candidates that meet the target, best first.
fn choices(wanted: &Wanted, known: &Known, instances: usize, rate: f64) -> Vec<Choice> {
    let mut found: Vec<(f64, Choice)> = Vec::new();
    for choice in all_choices(wanted, known) {
        if rate >= SATURATED * instances as f64 * known.service.rate(choice.max_batch) {
            continue;
        }
        // Cores are chosen later; until then preprocessing is a fixed delay.
        let mut system = system(known, instances, choice);
        system.other += known.prepare.unwrap_or(0.0);
        let seen = simulate(&system, wanted.arrivals(rate), TRIED, wanted.seed);
        let p95 = seen.percentile(95.0);
        if seen.keeps_up() && p95 <= wanted.p95 {
            found.push((p95, choice));
        }
    }
    let best = found.iter().map(|(p95, _)| *p95).fold(f64::MAX, f64::min);
    let noise = |p95: f64| p95 > (1.0 + NOISE) * best;
    found.sort_by(|(a, one), (b, other)| {
        let by_noise = noise(*a).cmp(&noise(*b));
        let by_size = one.max_batch.cmp(&other.max_batch);
        let by_wait = one.max_wait.total_cmp(&other.max_wait);
        by_noise.then(by_size).then(by_wait)
    });
    found.into_iter().map(|(_, choice)| choice).collect()
}

fn all_choices(wanted: &Wanted, known: &Known) -> Vec<Choice> {
    let batches: Vec<_> = match wanted.max_batch {
        Some(batch) => vec![batch],
        None => known.service.sizes().collect(),
    };
    let mut all = Vec::new();
    for max_batch in batches {
        let left = wanted.p95 - known.other - known.service.seconds(max_batch);
        let waits: Vec<_> = match (wanted.max_wait, max_batch) {
            (Some(wait), _) => vec![wait],
            (None, 1) => vec![0.0],
            (None, _) => WAITS.iter().map(|wait| wait / 1e3).collect(),
        };
        let in_time = |wait: &f64| wanted.max_wait.is_some() || *wait <= left;
        all.extend(waits.into_iter().filter(in_time).map(|max_wait| Choice {
            max_batch,
            max_wait,
        }));
    }
    all
}

/// Adds the fewest cores with which a candidate meets the target, if any number does.
fn settle(
    wanted: &Wanted,
    known: &Known,
    instances: usize,
    rate: f64,
    choice: Choice,
) -> Option<RequestPlan> {
    let Some(prepare) = known.prepare else {
        return shown(wanted, known, instances, rate, choice, None);
    };
    let first = (rate * prepare / SATURATED).ceil().max(1.0) as usize;
    let counts: Vec<usize> = match wanted.cores {
        Some(cores) => vec![cores],
        None => rising(first).take(24).collect(),
    };
    counts.into_iter().find_map(|servers| {
        let station = Station {
            servers,
            seconds: prepare,
        };
        shown(wanted, known, instances, rate, choice, Some(station))
    })
}

/// The figures of a candidate, if it meets the target.
fn shown(
    wanted: &Wanted,
    known: &Known,
    instances: usize,
    rate: f64,
    choice: Choice,
    cores: Option<Station>,
) -> Option<RequestPlan> {
    let mut system = system(known, instances, choice);
    system.stations.extend(cores);
    let run = |rate: f64, images| simulate(&system, wanted.arrivals(rate), images, wanted.seed);
    let keeps = |seen: &Outcome| seen.keeps_up() && seen.percentile(95.0) <= wanted.p95;
    if !keeps(&run(rate, TRIED)) {
        return None;
    }
    let seen = run(rate, SHOWN);
    if !keeps(&seen) {
        return None;
    }
    let capacity = instances as f64 * known.service.rate(choice.max_batch);
    let (mut low, mut high) = (rate, capacity.max(rate));
    for _ in 0..8 {
        let middle = f64::midpoint(low, high);
        match keeps(&run(middle, TRIED)) {
            true => low = middle,
            false => high = middle,
        }
    }
    let fleet = Fleet::new(instances, cores.map_or(0, |cores| cores.servers), 0, known);
    Some(figures(wanted, choice, fleet, capacity, low, rate, &seen))
}

/// The given sessions, with as many requests in flight as they answer in time.
fn full(wanted: &Wanted, known: &Known) -> Result<RequestPlan> {
    let instances = wanted.instances.unwrap_or(1);
    let max_batch = wanted.max_batch.unwrap_or_else(|| known.service.fastest());
    // Batches that are always full need no wait; the given one applies when they are not.
    let longest = if max_batch == 1 { 0.0 } else { wanted.p95 };
    let choice = Choice {
        max_batch,
        max_wait: wanted.max_wait.unwrap_or(longest),
    };
    let capacity = instances as f64 * known.service.rate(max_batch);
    let cap = in_flight_cap(capacity, wanted.p95);
    if cap < max_batch {
        bail!(
            "a batch of {max_batch} does not fit: only {cap} images in flight are answered within {:.0} ms; give a smaller one with --max-batch",
            1e3 * wanted.p95
        );
    }
    let mut system = system(known, instances, choice);
    if let Some(seconds) = known.prepare {
        let fits = (capacity * seconds).ceil().max(1.0) as usize;
        let servers = wanted.cores.unwrap_or(fits);
        system.stations.push(Station { servers, seconds });
    }
    let cores = system.stations.first().map_or(0, |station| station.servers);
    let seen = simulate(&system, Arrivals::InFlight(cap), TRIED, wanted.seed);
    let fleet = Fleet::new(instances, cores, 0, known);
    let rate = seen.rate;
    Ok(figures(wanted, choice, fleet, capacity, rate, rate, &seen))
}

/// Little's law: in flight = rate × latency.
fn in_flight_cap(capacity: f64, seconds: f64) -> usize {
    // Absorbs rounding errors just below a whole number.
    (capacity * seconds + 1e-9).floor().max(1.0) as usize
}

fn figures(
    wanted: &Wanted,
    choice: Choice,
    fleet: Fleet,
    capacity: f64,
    holds_up_to: f64,
    rate: f64,
    seen: &Outcome,
) -> RequestPlan {
    let at = |percent| 1e3 * seen.percentile(percent);
    RequestPlan {
        rate,
        p95_wanted_milliseconds: 1e3 * wanted.p95,
        max_batch: choice.max_batch,
        max_wait_milliseconds: 1e3 * choice.max_wait,
        fleet,
        mean_batch: seen.mean_batch,
        busy: seen.busy,
        cores_busy: seen.stations.first().copied(),
        milliseconds: Spread {
            mean: 1e3 * seen.mean(),
            p50: at(50.0),
            p90: at(90.0),
            p95: at(95.0),
            p99: at(99.0),
            p999: at(99.9),
            max: at(100.0),
        },
        in_flight: seen.in_flight,
        in_flight_cap: in_flight_cap(capacity, wanted.p95),
        capacity,
        holds_up_to,
    }
}
