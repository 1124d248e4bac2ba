//! Distributions of times.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::measures::Spread;

/// Longest recorded time, an hour in microseconds. Longer ones count as this.
const LONGEST: u64 = 3_600_000_000;
/// Significant digits: an error of at most a thousandth.
const DIGITS: u8 = 3;

/// A histogram of times.
#[derive(Debug, Clone)]
pub(super) struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST, DIGITS);
        Self(histogram.expect("an hour in three digits is a histogram"))
    }
}

impl Times {
    pub(super) fn add(&mut self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(LONGEST);
        self.0.saturating_record(micros.clamp(1, LONGEST));
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.0
            .add(&other.0)
            .expect("histograms of the same bounds are added");
    }

    pub(super) fn count(&self) -> u64 {
        self.0.len()
    }

    /// Number of times up to this one, inclusive.
    pub(super) fn within(&self, time: Duration) -> u64 {
        let micros = u64::try_from(time.as_micros()).unwrap_or(LONGEST);
        self.0.count_between(0, micros.min(LONGEST))
    }

    /// The time at this quantile, in milliseconds.
    pub(super) fn percentile(&self, percent: f64) -> f64 {
        self.0.value_at_quantile(percent / 100.0) as f64 / 1e3
    }

    pub(super) fn spread(&self) -> Spread {
        Spread {
            mean: self.0.mean() / 1e3,
            p50: self.percentile(50.0),
            p90: self.percentile(90.0),
            p95: self.percentile(95.0),
            p99: self.percentile(99.0),
            p999: self.percentile(99.9),
            max: self.0.max() as f64 / 1e3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_right_within_a_thousandth() {
        let mut times = Times::default();
        (1..=10_000).for_each(|millis| times.add(Duration::from_millis(millis)));
        let spread = times.spread();
        for (found, expected) in [
            (spread.p50, 5_000.0),
            (spread.p95, 9_500.0),
            (spread.p99, 9_900.0),
            (spread.p999, 9_990.0),
            (spread.max, 10_000.0),
            (spread.mean, 5_000.5),
        ] {
            assert!(
                (found / expected - 1.0).abs() < 0.002,
                "{found}: {expected}"
            );
        }
        assert_eq!(times.within(Duration::from_secs(100)), 10_000);
    }

    #[test]
    fn what_is_too_long_counts_as_the_longest() {
        let mut times = Times::default();
        times.add(Duration::MAX);
        times.add(Duration::ZERO);
        assert_eq!(times.count(), 2);
        assert!(times.spread().max >= 3.59e6);
    }
}
