//! Latency of requests to this process, for queries over the broker.
//!
//! Times are counted in buckets that grow by a fifth, so those of several processes can be added,
//! and percentiles are accurate to a tenth.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Number of buckets; the last one counts all above two minutes.
const BUCKETS: usize = 80;
/// Upper bound of the first bucket in seconds.
const FIRST: f64 = 100e-6;
/// Ratio between successive bounds.
const GROWTH: f64 = 1.2;

/// Requests of one entrance, since the start of the process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestWork {
    /// The entrance: `http`, `oip`, `nats`.
    pub entrance: String,
    /// Requests refused because too many were waiting.
    pub shed: u64,
    /// Requests whose deadline had passed.
    pub expired: u64,
    /// Requests answered with a label or a failed row, by latency.
    pub answered: Vec<u64>,
}

static TIMES: Mutex<BTreeMap<&'static str, RequestWork>> = Mutex::new(BTreeMap::new());

/// Counts a request with this outcome, named as in `trommel_request_seconds`.
pub fn request_ended(entrance: &'static str, outcome: &str, took: Duration) {
    let mut times = lock();
    let work = times.entry(entrance).or_insert_with(|| RequestWork {
        entrance: entrance.to_owned(),
        ..RequestWork::default()
    });
    match outcome {
        "ok" | "failed" => {
            work.answered.resize(BUCKETS, 0);
            work.answered[bucket(took)] += 1;
        }
        "shed" => work.shed += 1,
        "expired" => work.expired += 1,
        _ => {}
    }
}

/// All requests so far, by entrance.
pub(crate) fn so_far() -> Vec<RequestWork> {
    lock().values().cloned().collect()
}

fn lock() -> MutexGuard<'static, BTreeMap<&'static str, RequestWork>> {
    TIMES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bucket(took: Duration) -> usize {
    let above = (took.as_secs_f64() / FIRST).ln() / GROWTH.ln();
    (above.ceil().max(0.0) as usize).min(BUCKETS - 1)
}

impl RequestWork {
    /// Adds those of another process.
    pub fn add(&mut self, other: &Self) {
        self.shed += other.shed;
        self.expired += other.expired;
        let most = self.answered.len().max(other.answered.len());
        self.answered.resize(most, 0);
        for (mine, theirs) in self.answered.iter_mut().zip(&other.answered) {
            *mine += theirs;
        }
    }

    /// The requests after `earlier`, of the same process.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut since = self.clone();
        since.shed = since.shed.saturating_sub(earlier.shed);
        since.expired = since.expired.saturating_sub(earlier.expired);
        for (mine, theirs) in since.answered.iter_mut().zip(&earlier.answered) {
            *mine = mine.saturating_sub(*theirs);
        }
        since
    }

    /// Number of answers.
    pub fn count(&self) -> u64 {
        self.answered.iter().sum()
    }

    /// The latency at this quantile, 0 to 1; `None` without answers.
    pub fn within(&self, share: f64) -> Option<Duration> {
        let all = self.count();
        let rank = ((all as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.answered.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        // The geometric middle of the bucket.
        let end = |bucket: usize| FIRST * GROWTH.powi(bucket as i32);
        found.map(|bucket| Duration::from_secs_f64(end(bucket) / GROWTH.sqrt()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(millis: impl IntoIterator<Item = u64>) -> RequestWork {
        let mut work = RequestWork {
            answered: vec![0; BUCKETS],
            ..RequestWork::default()
        };
        for millis in millis {
            work.answered[bucket(Duration::from_millis(millis))] += 1;
        }
        work
    }

    #[test]
    fn percentiles_are_right_within_a_tenth() {
        let mut work = work(1..=500);
        work.add(&self::work(501..=1000));
        assert_eq!(work.count(), 1000);
        for (share, millis) in [(0.5, 500.0), (0.95, 950.0), (0.99, 990.0)] {
            let found = work.within(share).unwrap().as_secs_f64() * 1e3;
            assert!((found / millis - 1.0).abs() < 0.1, "{share}: {found}");
        }
        assert_eq!(RequestWork::default().within(0.5), None);
    }

    #[test]
    fn the_shortest_and_the_longest_have_a_bucket() {
        let mut work = work([0, 10_000_000]);
        assert!(work.within(0.1).unwrap() < Duration::from_millis(1));
        assert!(work.within(1.0).unwrap() > Duration::from_secs(100));
        work.shed = 3;
        let earlier = self::work([0]);
        assert_eq!(
            (work.since(&earlier).count(), work.since(&earlier).shed),
            (1, 3)
        );
    }
}
