//! Precision and recall by threshold.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// Resolution of scores, a thousandth.
const STEPS: u16 = 1000;
/// Thresholds that are always reported, in thousandths.
const REPORTED: [u16; 11] = [0, 300, 400, 500, 600, 700, 800, 900, 950, 990, 999];

/// Predictions by score.
#[derive(Debug, Clone, Default)]
pub(super) struct ByScore {
    /// All and correct predictions by thousandth of their score; in bounded memory.
    steps: BTreeMap<u16, (u64, u64)>,
}

/// Metrics of the predictions that reach a threshold.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct AtThreshold {
    /// The threshold.
    pub(super) threshold: f64,
    /// Predictions that reach it.
    pub(super) images: u64,
    /// Share of them that is correct; `null` if none reaches it.
    pub(super) precision: Option<f64>,
    /// Correct predictions that reach it, as a share of all images of the class.
    pub(super) recall: Option<f64>,
}

impl ByScore {
    /// Counts a prediction with a score from 0 to 1.
    pub(super) fn add(&mut self, score: f32, is_right: bool) {
        // A score equal to a threshold except for its last bit reaches it.
        let steps = f64::from(score) * f64::from(STEPS) + 1e-4;
        let step = steps.clamp(0.0, f64::from(STEPS)) as u16;
        let (all, right) = self.steps.entry(step).or_default();
        *all += 1;
        *right += u64::from(is_right);
    }

    /// The reported thresholds; `of` is the number of images of the class.
    pub(super) fn reported(&self, of: u64) -> Vec<AtThreshold> {
        if self.steps.is_empty() {
            return Vec::new();
        }
        let at = |step| at(step, self.sums_from(step), of);
        REPORTED.into_iter().map(at).collect()
    }

    /// The lowest threshold at which at least this share is correct; `None` if no threshold reaches it. If
    /// all predictions are correct enough, it is 0.
    pub(super) fn reaching(&self, precision: f64, of: u64) -> Option<AtThreshold> {
        let (mut all, mut right, mut best) = (0, 0, None);
        for (&step, counts) in self.steps.iter().rev() {
            all += counts.0;
            right += counts.1;
            if right as f64 >= precision * all as f64 {
                // Down to the next lower score, the same predictions reach it.
                let below = self.steps.range(..step).next_back();
                let lowest = below.map_or(0, |(below, _)| below + 1);
                best = Some(at(lowest, (all, right), of));
            }
        }
        best
    }

    fn sums_from(&self, step: u16) -> (u64, u64) {
        let counts = self.steps.range(step..).map(|(_, counts)| counts);
        counts.fold((0, 0), |sum, counts| (sum.0 + counts.0, sum.1 + counts.1))
    }
}

fn at(step: u16, (all, right): (u64, u64), of: u64) -> AtThreshold {
    let share = |of: u64| (of > 0).then(|| right as f64 / of as f64);
    AtThreshold {
        threshold: f64::from(step) / f64::from(STEPS),
        images: all,
        precision: share(all),
        recall: share(of),
    }
}

/// Threshold, precision and recall in columns.
impl fmt::Display for AtThreshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (precision, recall) = (percent(self.precision), percent(self.recall));
        let (threshold, images) = (self.threshold, self.images);
        write!(
            f,
            "{threshold:>9.3}  {images:>6}  {precision:>9}  {recall:>7}"
        )
    }
}

/// A share for people.
pub(super) fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".to_owned(), |share| format!("{:.1} %", 100.0 * share))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn predictions() -> ByScore {
        let mut by_score = ByScore::default();
        for (score, is_right) in [
            (0.2, false),
            (0.4, true),
            (0.6, false),
            (0.9, true),
            (1.0, true),
        ] {
            by_score.add(score, is_right);
        }
        by_score
    }

    #[test]
    fn precision_and_recall_are_of_the_predictions_that_reach_the_threshold() {
        let reported = predictions().reported(6);
        let at = |threshold: f64| {
            let found = reported.iter().find(|at| at.threshold == threshold);
            let found = found.expect("it is reported");
            (found.images, found.precision, found.recall)
        };
        assert_eq!(at(0.0), (5, Some(3.0 / 5.0), Some(3.0 / 6.0)));
        assert_eq!(at(0.9), (2, Some(1.0), Some(2.0 / 6.0)));
        assert_eq!(at(0.6), (3, Some(2.0 / 3.0), Some(2.0 / 6.0)));
        assert_eq!(at(0.95), (1, Some(1.0), Some(1.0 / 6.0)));
        assert_eq!(ByScore::default().reported(6), []);
    }

    #[test]
    fn the_least_threshold_that_reaches_a_precision_is_found() {
        let reaching = |precision| {
            let found = predictions().reaching(precision, 6)?;
            Some((found.threshold, found.images))
        };
        // Just above the wrong one at 0.6.
        assert_eq!(reaching(1.0), Some((0.601, 2)));
        assert_eq!(reaching(0.75), Some((0.201, 4)));
        assert_eq!(reaching(0.5), Some((0.0, 5)));
        let mut wrong = ByScore::default();
        wrong.add(0.9, false);
        assert_eq!(wrong.reaching(0.5, 1), None);
    }
}
