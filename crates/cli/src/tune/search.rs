//! Successive halving: all settings of a group run with a small share of the budget, the best third of them
//! with three times as much, and so on (Jamieson and Talwalkar, *Non-stochastic Best Arm Identification and
//! Hyperparameter Optimization*, AISTATS 2016; the factor of three is from Li et al., *Hyperband*, JMLR 18, 2018). The
//! groups are searched in turn, each around the best settings so far, until a round changes nothing.
//!
//! The best settings are compared with the defaults in pairs, in alternating order, so that other load on the
//! machine affects both; a gain within the noise is rejected.

use anyhow::Result;
use serde::Serialize;
use trommel_worker::Tuned;

use super::space::{Group, Space};

/// One in this many settings stays in the race.
const KEPT: usize = 3;
/// Most rounds through the groups.
const ROUNDS: usize = 2;
/// Pairs of trials that compare the best settings with the defaults.
const PAIRS: usize = 5;
/// Student's t for a two-sided interval of 95 % with four degrees of freedom.
const STUDENT_T: f64 = 2.776;
/// A smaller gain, as a share, is not worth a profile.
const LEAST_GAIN: f64 = 0.01;

/// Runs trials of settings.
pub(super) trait Measure {
    /// The score of these settings, higher being better, in a trial with this share of the budget; `None` if
    /// they do not run or miss the latency target.
    ///
    /// # Errors
    /// Those that no other settings would avoid.
    fn measure(&mut self, settings: &Tuned, share: f64) -> Result<Option<f64>>;
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

/// The best settings found, starting from `start`.
///
/// # Errors
/// As [`Measure::measure`].
pub(super) fn search(space: &Space, start: Tuned, measure: &mut impl Measure) -> Result<Tuned> {
    let mut best = start;
    for _ in 0..ROUNDS {
        let before = best;
        for group in Group::ALL {
            best = halve(space.around(&best, group), measure)?;
        }
        if best == before {
            break;
        }
    }
    Ok(best)
}

/// The best of `arms`. The first one stays to the end, and is the answer if none runs.
fn halve(arms: Vec<Tuned>, measure: &mut impl Measure) -> Result<Tuned> {
    let first = arms[0];
    if arms.len() == 1 {
        return Ok(first);
    }
    let mut left = arms;
    for &share in shares(left.len()) {
        let mut scored = Vec::new();
        for settings in left {
            if let Some(score) = measure.measure(&settings, share)? {
                scored.push((settings, score));
            }
        }
        scored.sort_by(|a, b| b.1.total_cmp(&a.1));
        let Some((best, _)) = scored.first().copied() else {
            return Ok(first);
        };
        if share >= 1.0 {
            return Ok(best);
        }
        let kept = scored.len().div_ceil(KEPT);
        let is_kept =
            |(place, (settings, _)): &(usize, (Tuned, f64))| *place < kept || *settings == first;
        let all = scored.into_iter().enumerate();
        left = all
            .filter(is_kept)
            .map(|(_, (settings, _))| settings)
            .collect();
    }
    Ok(left[0])
}

/// The shares of the budget for the successive rungs of this many settings.
fn shares(arms: usize) -> &'static [f64] {
    const ALL: [f64; 3] = [1.0 / 9.0, 1.0 / 3.0, 1.0];
    match arms {
        0..=KEPT => &ALL[2..],
        4..=9 => &ALL[1..],
        _ => &ALL,
    }
}

/// Compares the settings that were found with the defaults.
///
/// # Errors
/// As [`Measure::measure`].
pub(super) fn choose(default: Tuned, found: Tuned, measure: &mut impl Measure) -> Result<Choice> {
    if default == found {
        return Ok(match measure.measure(&default, 1.0)? {
            Some(_) => Choice::DefaultsAreBest,
            None => Choice::Nothing,
        });
    }
    let (mut gains, mut of_default, mut of_found) = (Vec::new(), 0, 0);
    for pair in 0..PAIRS {
        let (ours, theirs) = match pair % 2 {
            0 => {
                let theirs = measure.measure(&default, 1.0)?;
                (measure.measure(&found, 1.0)?, theirs)
            }
            _ => (
                measure.measure(&found, 1.0)?,
                measure.measure(&default, 1.0)?,
            ),
        };
        of_default += usize::from(theirs.is_some());
        of_found += usize::from(ours.is_some());
        gains.extend(ours.zip(theirs).map(|(ours, theirs)| (ours / theirs).ln()));
    }
    Ok(match (of_default, of_found) {
        (PAIRS, PAIRS) => judge(&gains),
        (PAIRS, _) => Choice::DefaultsAreBest,
        (_, PAIRS) => Choice::OnlyThese,
        _ => Choice::Nothing,
    })
}

/// Whether the gain is above the noise, given the logarithms of the ratios within pairs.
fn judge(gains: &[f64]) -> Choice {
    let count = gains.len() as f64;
    let mean = gains.iter().sum::<f64>() / count;
    let squares: f64 = gains.iter().map(|gain| (gain - mean).powi(2)).sum();
    let half = STUDENT_T * (squares / (count - 1.0) / count).sqrt();
    let gain = Gain {
        mean: mean.exp_m1(),
        low: (mean - half).exp_m1(),
        high: (mean + half).exp_m1(),
    };
    match gain.low > 0.0 && gain.mean >= LEAST_GAIN {
        true => Choice::Better(gain),
        false => Choice::InsideTheNoise(gain),
    }
}

#[cfg(test)]
mod tests;
