//! Distributions of the times of a stage: lock-free histograms that can be added over processes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets per doubling of a time: an error of at most one in 64.
const PARTS: u64 = 32;
/// Doublings from 32 µs on; the last one ends at 38 hours.
const DOUBLINGS: usize = 32;
const BUCKETS: usize = (DOUBLINGS + 1) * PARTS as usize;

/// A histogram of times.
#[derive(Debug)]
pub(crate) struct Times(Box<[AtomicU64]>);

impl Default for Times {
    fn default() -> Self {
        Self((0..BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Times {
    pub(crate) fn add(&self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.0[bucket(micros)].fetch_add(1, Relaxed);
    }

    pub(crate) fn counts(&self) -> TimeCounts {
        let counts = self.0.iter().map(|count| count.load(Relaxed));
        let known = (0..).zip(counts).filter(|(_, count)| *count > 0);
        TimeCounts(known.collect())
    }
}

/// The bucket of a time: exact below 32 µs, then 32 per doubling.
fn bucket(micros: u64) -> usize {
    if micros < PARTS {
        return micros as usize;
    }
    let doubling = micros.ilog2() - PARTS.ilog2();
    let part = (micros >> doubling) - PARTS;
    let bucket = (u64::from(doubling) + 1) * PARTS + part;
    usize::try_from(bucket)
        .unwrap_or(usize::MAX)
        .min(BUCKETS - 1)
}

/// The middle of a bucket, in microseconds.
fn middle(bucket: u64) -> f64 {
    if bucket < PARTS {
        return bucket as f64;
    }
    let (doubling, part) = (bucket / PARTS - 1, bucket % PARTS);
    let width = (1_u64 << doubling.min(40)) as f64;
    (PARTS + part) as f64 * width + (width - 1.0) / 2.0
}

/// A snapshot of counts, which can be added.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeCounts(BTreeMap<u64, u64>);

/// Percentiles of times, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Number of times.
    pub count: u64,
    /// Median.
    pub p50: f64,
    /// 90 of 100.
    pub p90: f64,
    /// 95 of 100.
    pub p95: f64,
    /// 99 of 100.
    pub p99: f64,
    /// 999 of 1000.
    pub p999: f64,
}

impl TimeCounts {
    /// Adds those of another process.
    pub fn add(&mut self, other: &Self) {
        for (bucket, count) in &other.0 {
            *self.0.entry(*bucket).or_default() += count;
        }
    }

    /// The percentiles; `None` without times.
    pub fn percentiles(&self) -> Option<Percentiles> {
        let count: u64 = self.0.values().sum();
        let at = |share: f64| {
            let rank = (share * count as f64).ceil().max(1.0) as u64;
            let mut passed = 0;
            let found = self.0.iter().find(|(_, count)| {
                passed += **count;
                passed >= rank
            });
            found.map_or(0.0, |(bucket, _)| middle(*bucket) / 1e3)
        };
        (count > 0).then(|| Percentiles {
            count,
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            p999: at(0.999),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_counted_within_a_sixty_fourth() {
        for micros in (0..200).chain((0..34).map(|power| 77_u64 << power >> 4)) {
            let error = (middle(bucket(micros) as u64) - micros as f64).abs();
            assert!(error <= micros as f64 / 64.0, "{micros}: {error}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_of_two_processes_are_those_of_all_their_times() {
        let (one, other) = (Times::default(), Times::default());
        (1..=500).for_each(|millis| one.add(Duration::from_millis(millis)));
        (501..=1000).for_each(|millis| other.add(Duration::from_millis(millis)));
        let mut all = one.counts();
        all.add(&other.counts());
        let text = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<TimeCounts>(&text).unwrap(), all);
        let found = all.percentiles().unwrap();
        assert_eq!(found.count, 1000);
        for (found, expected) in [
            (found.p50, 500.0),
            (found.p90, 900.0),
            (found.p95, 950.0),
            (found.p99, 990.0),
            (found.p999, 999.0),
        ] {
            assert!((found / expected - 1.0).abs() < 0.02, "{found}: {expected}");
        }
        assert_eq!(TimeCounts::default().percentiles(), None);
    }
}
