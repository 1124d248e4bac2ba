//! Learns the score from which a small model decides alone.
//!
//! The promise is a share of images whose label is the large model's. Where the large model decides
//! it always is; so the share at risk is that of images which the small model decides differently.
//!
//! A quarter of the sample is used to fit thresholds: for each class, the probability of equal
//! labels is fitted as a logistic curve of the score's logit (as in Platt, "Probabilistic outputs
//! for support vector machines", 1999), regularised by a ridge towards the curve of all classes, as
//! a class may have few images, and that one towards the score itself. A level of strictness is the
//! doubt up to which a class decides. The levels are then tested on the rest of the sample from the
//! strictest on, as long as the Clopper-Pearson upper bound of the share at risk is within the
//! promise. As the order is fixed in advance, and testing stops at the first failure, the last
//! level that passes keeps the promise at the level of that bound, 95 %, however many levels there
//! are and however badly the curves fit: fixed sequence testing, as in Angelopoulos, Bates, Candès,
//! Jordan and Lei, "Learn then Test" (2021).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::bounds::{differ, lower, upper};

/// The answers of both models for an image of the sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// The small model's label.
    pub label: String,
    /// Its score.
    pub score: f32,
    /// Whether the large model gave the same label.
    pub agrees: bool,
}

/// When the small model decides, with the statistics of the test.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Rule {
    /// The score that a label needs; a label without one is never accepted.
    pub thresholds: BTreeMap<String, f32>,
    /// Images that the rule was tested on.
    pub tried: usize,
    /// Of these, those that the small model would decide.
    pub decided: usize,
    /// Of these, those whose label differs from the large model's.
    pub other: usize,
    /// Share of all tested images whose label is the large model's.
    pub agreement: f64,
    /// The 95 % interval of this share (Clopper and Pearson).
    pub interval: [f64; 2],
}

/// Probability that a rule passes by chance.
const ALPHA: f64 = 0.05;
/// One image in this many is used for fitting.
const SHAPING: usize = 4;
/// Levels of strictness.
const LEVELS: usize = 60;
/// Doubt of the strictest level; that of the loosest is nearly 1.
const STRICTEST: f64 = 0.0002;

impl Rule {
    /// Whether the small model's label is accepted.
    pub fn decides(&self, label: &str, score: f32) -> bool {
        let threshold = self.thresholds.get(label);
        threshold.is_some_and(|threshold| score >= *threshold)
    }

    /// Learns the rule from a random sample, for a share of at least `agree`, 0 to 1. If the sample
    /// is too small for that, no label has a threshold.
    pub fn learn(sample: &[Pair], agree: f64) -> Self {
        let mut shaping: BTreeMap<&str, Vec<(f64, bool)>> = BTreeMap::new();
        let mut tried = Vec::new();
        for (place, pair) in sample.iter().enumerate() {
            match place % SHAPING {
                0 => shaping
                    .entry(&pair.label)
                    .or_default()
                    .push((logit(pair.score), pair.agrees)),
                _ => tried.push(pair),
            }
        }
        let all: Vec<_> = shaping.values().flatten().copied().collect();
        let of_all = Curve::SCORE.fitted(&all);
        let curves: BTreeMap<&str, Curve> = shaping
            .iter()
            .map(|(label, scores)| (*label, of_all.fitted(scores)))
            .collect();
        let mut best = Self::of(BTreeMap::new(), &tried);
        for level in 0..LEVELS {
            let doubt = STRICTEST.powf(1.0 - level as f64 / LEVELS as f64);
            let thresholds = curves
                .iter()
                .filter_map(|(label, curve)| Some(((*label).to_owned(), curve.threshold(doubt)?)));
            let rule = Self::of(thresholds.collect(), &tried);
            if tried.is_empty() || upper(rule.other, rule.tried, ALPHA) > 1.0 - agree {
                break;
            }
            best = rule;
        }
        best
    }

    fn of(thresholds: BTreeMap<String, f32>, tried: &[&Pair]) -> Self {
        let mut rule = Self {
            thresholds,
            tried: tried.len(),
            ..Self::default()
        };
        for pair in tried {
            if rule.decides(&pair.label, pair.score) {
                rule.decided += 1;
                rule.other += usize::from(!pair.agrees);
            }
        }
        if rule.tried > 0 {
            let same = rule.tried - rule.other;
            rule.agreement = same as f64 / rule.tried as f64;
            let each = ALPHA / 2.0;
            rule.interval = [lower(same, rule.tried, each), upper(same, rule.tried, each)];
        }
        rule
    }
}

/// The probability of equal labels as a logistic curve of the score's logit.
#[derive(Debug, Clone, Copy)]
struct Curve {
    shift: f64,
    slope: f64,
}

/// The logit of a score, clamped.
fn logit(score: f32) -> f64 {
    let score = f64::from(score).clamp(1e-6, 1.0 - 1e-6);
    (score / (1.0 - score)).ln()
}

impl Curve {
    /// The score itself is the probability.
    const SCORE: Self = Self {
        shift: 0.0,
        slope: 1.0,
    };

    /// The curve that fits these logits best, regularised towards this one by a ridge with the
    /// weight of one image: Newton's method with step halving.
    fn fitted(self, scores: &[(f64, bool)]) -> Self {
        let mut curve = self;
        let mut loss = curve.loss(self, scores);
        for _ in 0..50 {
            let (mut by_shift, mut by_slope) = (curve.shift - self.shift, curve.slope - self.slope);
            let (mut shifts, mut both, mut slopes) = (1.0, 0.0, 1.0);
            for (logit, agrees) in scores {
                let likely = curve.at(*logit);
                let (off, weight) = (likely - f64::from(*agrees), likely * (1.0 - likely));
                by_shift += off;
                by_slope += off * logit;
                shifts += weight;
                both += weight * logit;
                slopes += weight * logit * logit;
            }
            let volume = shifts * slopes - both * both;
            let step = (
                (slopes * by_shift - both * by_slope) / volume,
                (shifts * by_slope - both * by_shift) / volume,
            );
            let halves = (0..30).map(|halving| 0.5_f64.powi(halving));
            let mut forward = halves.map(|part| Self {
                shift: curve.shift - part * step.0,
                slope: curve.slope - part * step.1,
            });
            let next = forward.find(|next| next.loss(self, scores) < loss);
            let Some(next) = next else { break };
            curve = next;
            loss = curve.loss(self, scores);
        }
        curve
    }

    fn at(self, logit: f64) -> f64 {
        1.0 / (1.0 + (-(self.shift + self.slope * logit)).exp())
    }

    fn loss(self, held_to: Self, scores: &[(f64, bool)]) -> f64 {
        let ridge = (self.shift - held_to.shift).powi(2) + (self.slope - held_to.slope).powi(2);
        let each = scores.iter().map(|(logit, agrees)| {
            let sure = self.shift + self.slope * logit;
            // The log-likelihood, without overflow.
            let against = if *agrees { -sure } else { sure };
            against.max(0.0) + (-against.abs()).exp().ln_1p()
        });
        ridge / 2.0 + each.sum::<f64>()
    }

    /// The score from which the doubt is at most this; `None` if no score reaches it.
    fn threshold(self, doubt: f64) -> Option<f32> {
        if self.slope <= 0.0 {
            // All scores mean the same: all of them decide, or none.
            let worst = 1.0 - self.at(logit(1.0));
            return (worst <= doubt).then_some(0.0);
        }
        let logit = (((1.0 - doubt) / doubt).ln() - self.shift) / self.slope;
        Some((1.0 / (1.0 + (-logit).exp())) as f32)
    }
}

/// Whether the small model's classes, or the rate of agreement, have changed.
pub fn has_shifted(before: &[Pair], now: &[Pair]) -> bool {
    let all = before.iter().chain(now);
    let mut labels: Vec<_> = all.map(|pair| (&*pair.label, pair.agrees)).collect();
    labels.sort_unstable();
    labels.dedup();
    let counts = |pairs: &[Pair]| -> Vec<usize> {
        let count = |label: &(&str, bool)| {
            let same = |pair: &&Pair| (&*pair.label, pair.agrees) == *label;
            pairs.iter().filter(same).count()
        };
        labels.iter().map(count).collect()
    };
    differ(&counts(before), &counts(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudorandom numbers from 0 to 1.
    struct Numbers(u64);

    impl Numbers {
        fn next(&mut self) -> f64 {
            // SplitMix64.
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut bits = self.0;
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((bits ^ (bits >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
        }

        /// An image whose label is right with its score as probability, except that class 0 is
        /// wrong half as often, and class 1 twice as often.
        fn pair(&mut self) -> Pair {
            let class = (self.next() * 5.0) as usize;
            let score = 1.0 - 0.4 * self.next().powi(6);
            let doubt = (1.0 - score) * [0.5, 2.0, 1.0, 1.0, 1.0][class];
            Pair {
                label: format!("class {class}"),
                score: score as f32,
                agrees: self.next() >= doubt,
            }
        }
    }

    #[test]
    fn the_promise_is_kept_in_nineteen_of_twenty_samples() {
        let mut numbers = Numbers(7);
        let images: Vec<_> = (0..20_000).map(|_| numbers.pair()).collect();
        let (mut kept, mut decided) = (0, 0);
        const SAMPLES: usize = 200;
        for _ in 0..SAMPLES {
            let sample: Vec<_> = (0..1500).map(|_| numbers.pair()).collect();
            let rule = Rule::learn(&sample, 0.99);
            let by_small = |pair: &&Pair| rule.decides(&pair.label, pair.score);
            let small: Vec<_> = images.iter().filter(by_small).collect();
            let other = small.iter().filter(|pair| !pair.agrees).count();
            kept += usize::from(1.0 - other as f64 / images.len() as f64 >= 0.99);
            decided += small.len();
        }
        assert!(kept * 20 >= SAMPLES * 19, "{kept} of {SAMPLES}");
        let share = decided as f64 / (SAMPLES * images.len()) as f64;
        assert!(share > 0.5, "{share}");
    }

    #[test]
    fn a_curve_fits_what_it_was_made_of() {
        let mut numbers = Numbers(3);
        let made = Curve {
            shift: -1.0,
            slope: 0.5,
        };
        let scores: Vec<_> = (0..20_000)
            .map(|_| {
                let logit = 12.0 * numbers.next() - 4.0;
                (logit, numbers.next() < made.at(logit))
            })
            .collect();
        let found = Curve::SCORE.fitted(&scores);
        assert!((found.shift - made.shift).abs() < 0.1, "{found:?}");
        assert!((found.slope - made.slope).abs() < 0.05, "{found:?}");
        let at = found.threshold(0.1).unwrap();
        assert!((found.at(logit(at)) - 0.9).abs() < 1e-3);
        // Perfect agreement is kept in check by the ridge.
        let perfect: Vec<_> = (0..50).map(|number| (f64::from(number), true)).collect();
        assert!(Curve::SCORE.fitted(&perfect).slope.is_finite());
    }

    #[test]
    fn a_sample_that_is_too_small_promises_nothing() {
        let pair = |number: usize| Pair {
            label: format!("{}", number % 3),
            score: 0.9,
            agrees: true,
        };
        let sample: Vec<_> = (0..300).map(pair).collect();
        assert!(Rule::learn(&sample, 0.99).thresholds.is_empty());
        assert_eq!(Rule::learn(&sample, 0.95).thresholds.len(), 3);
        assert!(Rule::learn(&[], 0.5).thresholds.is_empty());
    }

    #[test]
    fn each_class_has_the_threshold_that_it_needs() {
        let mut sample = Vec::new();
        for number in 0..2000 {
            let score = (number % 100) as f32 / 100.0;
            let (label, agrees) = match number % 2 {
                0 => ("sure", true),
                _ => ("doubtful", score >= 0.6),
            };
            sample.push(Pair {
                label: label.to_owned(),
                score,
                agrees,
            });
        }
        // Neither class may coincide with one half of the sample's order.
        sample.sort_by(|a, b| (a.score * 7919.0 % 1.0).total_cmp(&(b.score * 7919.0 % 1.0)));
        let rule = Rule::learn(&sample, 0.98);
        assert!(rule.decides("sure", 0.3) && !rule.decides("unseen", 1.0));
        assert!(!rule.decides("doubtful", 0.3) && rule.decides("doubtful", 0.95));
        assert!(rule.agreement >= 0.98 && rule.interval[0] <= rule.agreement);
    }

    #[test]
    fn other_classes_and_another_agreement_are_noticed() {
        let pairs = |counts: [usize; 3], wrong: usize| -> Vec<Pair> {
            let labels = (0..3).flat_map(|class| std::iter::repeat_n(class, counts[class]));
            labels
                .enumerate()
                .map(|(place, class)| Pair {
                    label: class.to_string(),
                    score: 0.9,
                    agrees: wrong == 0 || place % wrong != 0,
                })
                .collect()
        };
        let before = pairs([200, 200, 200], 20);
        assert!(!has_shifted(&before, &pairs([105, 95, 100], 20)));
        assert!(has_shifted(&before, &pairs([20, 30, 250], 20)));
        assert!(has_shifted(&before, &pairs([100, 100, 100], 4)));
    }
}
