//! Bayesian optimisation: each trial is of the settings that may be the fastest, judging by all trials so far: those with
//! the highest upper confidence bound (Srinivas, Krause, Kakade and Seeger, *Gaussian Process Optimization in the Bandit
//! Setting*, ICML 2010). Settings that are both promising and unknown are thus tried before known ones, and those that
//! remain promising are tried again.
//!
//! The best settings are compared with the defaults in pairs, in alternating order, so that other load on the
//! machine affects both; a gain within the noise is rejected.

use std::num::NonZeroUsize;

use anyhow::Result;
use serde::Serialize;
use trommel_worker::Tuned;

use super::surface::{Surface, Surfaces};

/// Trials of a search are this many times the square root of the number of settings.
const TRIALS: f64 = 2.5;
/// The same after settings that miss the latency target.
const MORE_TRIALS: usize = 2;
/// Standard deviations by which settings may surpass what is expected of them.
const HOPE: f64 = 2.0;
/// Share of the budget of a trial of a search.
const SHARE: f64 = 0.5;
/// Numbers of pairs of trials after which the comparison with the defaults may end, and Student's t for the two-sided
/// intervals of 95 and 99 %. Before the last pair the latter decides, as several looks find more by chance (Peto and
/// others, *Design and Analysis of Randomized Clinical Trials*, British Journal of Cancer 34, 1976).
const LOOKS: [(usize, f64, f64); 3] = [(5, 2.776, 4.604), (10, 2.262, 3.250), (15, 2.145, 2.977)];
/// A smaller gain, as a share, is not worth a profile.
const LEAST_GAIN: f64 = 0.01;

/// Runs trials of settings.
pub(super) trait Measure {
    /// The score of these settings, higher being better, in a trial with this share of the budget; `None` if
    /// they do not run.
    ///
    /// # Errors
    /// Those that no other settings would avoid.
    fn measure(&mut self, settings: &Tuned, share: f64) -> Result<Option<f64>>;

    /// Whether these settings, which run, meet the latency target.
    ///
    /// # Errors
    /// As [`Measure::measure`].
    fn keeps(&mut self, settings: &Tuned) -> Result<bool>;
}

/// The outcome of a search.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Choice {
    /// Nothing better than the defaults was found.
    DefaultsAreBest,
    /// The gain over the defaults is within the noise.
    InsideTheNoise(Gain),
    /// The gain is above the noise.
    Better(Gain),
    /// The defaults miss the latency target, and the settings that were found meet it.
    OnlyThese,
    /// Nothing meets the latency target.
    Nothing,
}

/// The gain as a share, with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Gain {
    pub(super) mean: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

/// The best of these settings among those that meet the latency target; `None` if none does. The first are the defaults.
///
/// # Errors
/// As [`Measure::measure`].
pub(super) fn search(all: &[Tuned], measure: &mut impl Measure) -> Result<Option<Tuned>> {
    let mut surfaces = Surfaces::new(all);
    let mut left: Vec<usize> = (0..all.len()).collect();
    let mut trials = trials_of(all);
    loop {
        for _ in 0..trials {
            let next = match most(&left, surfaces.likeliest(), HOPE) {
                Some(next) if left.len() > 1 => next,
                _ => break,
            };
            match measure.measure(&all[next], SHARE)? {
                Some(score) => surfaces.add(next, SHARE, score),
                // It is the model that does not fit into memory.
                None => left.retain(|other| of_model(&all[*other]) != of_model(&all[next])),
            }
        }
        let Some(best) = most(&left, surfaces.likeliest(), -1.0) else {
            return Ok(None);
        };
        if measure.keeps(&all[best])? {
            return Ok(Some(all[best]));
        }
        left.retain(|other| *other != best);
        trials = MORE_TRIALS;
    }
}

/// Trials of a search among these settings, and most pairs of the comparison.
fn trials_of(all: &[Tuned]) -> usize {
    (TRIALS * (all.len() as f64).sqrt()).ceil() as usize
}

fn of_model(settings: &Tuned) -> [NonZeroUsize; 3] {
    [
        settings.max_batch,
        settings.instances,
        settings.intra_threads,
    ]
}

/// Of these settings those of which most is expected, and this many standard deviations more.
fn most(of: &[usize], surface: &Surface, deviations: f64) -> Option<usize> {
    let expected = |arm: &usize| {
        let (mean, deviation) = surface.at(*arm);
        mean + deviations * deviation
    };
    let by = |a: &usize, b: &usize| expected(a).total_cmp(&expected(b)).then(b.cmp(a));
    of.iter().copied().max_by(by)
}

/// Compares the settings that were found with the first ones, the defaults.
///
/// # Errors
/// As [`Measure::measure`].
pub(super) fn choose(
    all: &[Tuned],
    found: Option<Tuned>,
    measure: &mut impl Measure,
) -> Result<Choice> {
    let default = all[0];
    let Some(found) = found.filter(|found| *found != default) else {
        return Ok(match (found, measure.measure(&default, 1.0)?) {
            (Some(_), Some(_)) => Choice::DefaultsAreBest,
            _ => Choice::Nothing,
        });
    };
    if !measure.keeps(&default)? {
        for settings in [default, found] {
            measure.measure(&settings, 1.0)?;
        }
        return Ok(Choice::OnlyThese);
    }
    let mut gains = Vec::new();
    loop {
        let (ours, theirs) = match gains.len() % 2 {
            0 => {
                let theirs = measure.measure(&default, 1.0)?;
                (measure.measure(&found, 1.0)?, theirs)
            }
            _ => (
                measure.measure(&found, 1.0)?,
                measure.measure(&default, 1.0)?,
            ),
        };
        match (ours, theirs) {
            (Some(ours), Some(theirs)) => gains.push((ours / theirs).ln()),
            (Some(_), None) => return Ok(Choice::OnlyThese),
            (None, _) => return Ok(Choice::DefaultsAreBest),
        }
        if let Some(choice) = judge(&gains, trials_of(all)) {
            return Ok(choice);
        }
    }
}

/// Whether the gain is above the noise, given the logarithms of the ratios within pairs; `None` while more pairs
/// may decide it, of which there are at most this many.
fn judge(gains: &[f64], most: usize) -> Option<Choice> {
    let look = LOOKS.iter().position(|look| look.0 == gains.len())?;
    let (_, student_t, early) = LOOKS[look];
    let is_last = LOOKS.get(look + 1).is_none_or(|next| next.0 > most);
    let count = gains.len() as f64;
    let mean = gains.iter().sum::<f64>() / count;
    let squares: f64 = gains.iter().map(|gain| (gain - mean).powi(2)).sum();
    let deviation = (squares / (count - 1.0) / count).sqrt();
    let gain = Gain {
        mean: mean.exp_m1(),
        low: (mean - student_t * deviation).exp_m1(),
        high: (mean + student_t * deviation).exp_m1(),
    };
    let deciding = match is_last {
        true => student_t,
        false => early,
    };
    let half = deciding * deviation;
    match (mean > half, gain.mean >= LEAST_GAIN) {
        (true, true) => Some(Choice::Better(gain)),
        _ if is_last || (mean + half).exp_m1() < LEAST_GAIN => Some(Choice::InsideTheNoise(gain)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
