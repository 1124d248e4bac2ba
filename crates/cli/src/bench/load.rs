//! Sends requests at given times, regardless of earlier ones: an open loop.
//!
//! The latency of each counts from when it was due. A server that falls behind cannot delay
//! requests and so hide how long their senders would have waited, which is known as coordinated
//! omission.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::measures::Spread;
use super::spread::Times;
use crate::plan::Random;

/// Most open requests; further ones are sent late, and counted from when they were due.
const MOST_OPEN: usize = 8192;

/// The outcome of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// A row.
    Ok,
    /// The server refuses it for now.
    Refused,
    /// Any other failure, with its message.
    Failed(String),
}

/// The server under test.
#[async_trait::async_trait]
pub(crate) trait Target: Send + Sync + 'static {
    /// Sends the image with this number and waits for the answer.
    async fn ask(&self, image: usize) -> Answer;
}

/// When requests are due.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schedule {
    /// Requests per second.
    pub(crate) rate: f64,
    /// Whether the intervals are equal instead of random.
    pub(crate) constant: bool,
    /// The duration.
    pub(crate) time: Duration,
    pub(crate) seed: u64,
    /// Whether to end once more than one in twenty of all requests have missed the deadline.
    pub(crate) ends_early: bool,
}

impl Schedule {
    /// The times at which requests are due, from the start.
    fn times(&self) -> impl Iterator<Item = Duration> + use<> {
        let Self {
            rate,
            constant,
            time,
            seed,
            ..
        } = *self;
        let (mut random, mut at) = (Random::new(seed), 0.0);
        let next = move || {
            let distance = match constant {
                true => 1.0,
                false => random.exponential(),
            };
            at += distance / rate;
            Some(Duration::from_secs_f64(at))
        };
        std::iter::from_fn(next).take_while(move |at| *at <= time)
    }
}

/// The result for one rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Load {
    /// The target rate in requests per second.
    pub(crate) rate: f64,
    pub(crate) seconds: f64,
    pub(crate) sent: u64,
    pub(crate) ok: u64,
    pub(crate) refused: u64,
    pub(crate) failed: u64,
    /// Latencies of rows, from when each request was due.
    pub(crate) milliseconds: Spread,
    /// The same as percentiles, for plots.
    pub(crate) percentiles: Vec<(f64, f64)>,
    /// Rows per second within the deadline.
    pub(crate) goodput: f64,
    pub(crate) deadline_milliseconds: f64,
    /// Failures by message.
    pub(crate) failures: BTreeMap<String, u64>,
}

/// Percentiles in a plot.
const DRAWN: [f64; 14] = [
    1.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 97.5, 99.0, 99.5, 99.75, 99.9, 99.95, 99.99,
];

/// Sends requests as scheduled and waits for all answers.
pub(crate) async fn drive(
    target: Arc<dyn Target>,
    images: usize,
    schedule: Schedule,
    deadline: Duration,
) -> Load {
    let room = Arc::new(Semaphore::new(MOST_OPEN));
    let (mut open, mut seen) = (JoinSet::new(), Seen::default());
    let most_missed = match schedule.ends_early {
        true => schedule.times().count() as u64 / 20,
        false => u64::MAX,
    };
    let start = Instant::now();
    for (number, at) in schedule.times().enumerate() {
        let due = start + at;
        while let Some(Ok((answer, took))) = open.try_join_next() {
            seen.count(answer, took);
        }
        if seen.missed(deadline) > most_missed {
            break;
        }
        sleep_until(due).await;
        let (target, room) = (Arc::clone(&target), Arc::clone(&room));
        let image = number % images.max(1);
        open.spawn(async move {
            let _room = room.acquire().await;
            let answer = target.ask(image).await;
            (answer, due.elapsed())
        });
        seen.sent += 1;
    }
    while seen.missed(deadline) <= most_missed
        && let Some(ended) = open.join_next().await
    {
        match ended {
            Ok((answer, took)) => seen.count(answer, took),
            Err(error) => seen.count(Answer::Failed(error.to_string()), Duration::ZERO),
        }
    }
    Load {
        rate: schedule.rate,
        seconds: schedule.time.as_secs_f64(),
        sent: seen.sent,
        ok: seen.times.count(),
        refused: seen.refused,
        failed: seen.failed(),
        milliseconds: seen.times.spread(),
        percentiles: DRAWN
            .map(|percent| (percent, seen.times.percentile(percent)))
            .into(),
        goodput: seen.times.within(deadline) as f64 / schedule.time.as_secs_f64(),
        deadline_milliseconds: 1e3 * deadline.as_secs_f64(),
        failures: seen.failures,
    }
}

#[derive(Default)]
struct Seen {
    sent: u64,
    refused: u64,
    failures: BTreeMap<String, u64>,
    times: Times,
}

impl Seen {
    fn failed(&self) -> u64 {
        self.failures.values().sum()
    }

    /// Requests without a row within the deadline.
    fn missed(&self, deadline: Duration) -> u64 {
        let late = self.times.count() - self.times.within(deadline);
        late + self.refused + self.failed()
    }

    fn count(&mut self, answer: Answer, took: Duration) {
        match answer {
            Answer::Ok => self.times.add(took),
            Answer::Refused => self.refused += 1,
            Answer::Failed(why) => *self.failures.entry(why).or_default() += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A server with a known distribution of latencies. Time is tokio's, which is paused while
    /// there is work, so the machine's speed does not matter.
    struct Delays(Mutex<Random>);

    #[async_trait::async_trait]
    impl Target for Delays {
        async fn ask(&self, _: usize) -> Answer {
            let delay = 0.1 * self.0.lock().unwrap().exponential();
            tokio::time::sleep(Duration::from_secs_f64(delay)).await;
            Answer::Ok
        }
    }

    fn schedule(rate: f64, seconds: u64, constant: bool) -> Schedule {
        Schedule {
            rate,
            constant,
            time: Duration::from_secs(seconds),
            seed: 1,
            ends_early: false,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn percentiles_are_those_of_the_delays_within_two_percent() {
        let target = Arc::new(Delays(Mutex::new(Random::new(2))));
        let load = drive(
            target,
            7,
            schedule(500.0, 400, false),
            Duration::from_millis(200),
        )
        .await;
        assert_eq!((load.sent, load.failed, load.refused), (load.ok, 0, 0));
        assert!(
            (load.sent as f64 / 200_000.0 - 1.0).abs() < 0.01,
            "{}",
            load.sent
        );
        let Spread {
            mean,
            p50,
            p90,
            p95,
            p99,
            p999,
            ..
        } = load.milliseconds;
        // Exponential with a mean of 100 ms, plus a millisecond for the clock's resolution.
        for (found, above) in [
            (p50, 0.5),
            (p90, 0.1),
            (p95, 0.05),
            (p99, 0.01),
            (p999, 0.001),
        ] {
            let expected = -100.0 * f64::ln(above);
            assert!(
                (found - expected).abs() < 0.02 * expected + 1.0,
                "{found}: {expected}"
            );
        }
        assert!((mean - 100.0).abs() < 2.0, "{mean}");
        let goodput = 500.0 * (1.0 - f64::exp(-2.0));
        assert!(
            (load.goodput / goodput - 1.0).abs() < 0.02,
            "{}",
            load.goodput
        );
    }

    /// A server that answers one request at a time, in 10 ms each, and stalls once for a second.
    struct Stalls(tokio::sync::Mutex<u32>);

    #[async_trait::async_trait]
    impl Target for Stalls {
        async fn ask(&self, _: usize) -> Answer {
            let mut asked = self.0.lock().await;
            *asked += 1;
            let millis = if *asked == 100 { 1000 } else { 10 };
            tokio::time::sleep(Duration::from_millis(millis)).await;
            Answer::Ok
        }
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_wait_while_a_server_stands_still_count() {
        let target = Arc::new(Stalls(tokio::sync::Mutex::new(0)));
        let load = drive(
            target,
            1,
            schedule(50.0, 20, true),
            Duration::from_millis(100),
        )
        .await;
        assert_eq!(load.ok, 1000);
        // One request is slow; the fifty that were due in that second wait for it, and as many
        // again until the server has caught up, at twice the rate. A closed loop would have seen a
        // single slow request, and a p95 of 10 ms.
        let late = load.ok as f64 - load.goodput * load.seconds;
        assert!((80.0..110.0).contains(&late), "{late}");
        assert!(load.milliseconds.p95 > 400.0, "{:?}", load.milliseconds);
        assert!(
            (load.milliseconds.p50 - 10.0).abs() < 2.0,
            "{:?}",
            load.milliseconds
        );
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_where_the_deadline_is_missed() {
        let drive_with = |deadline| {
            let schedule = Schedule {
                ends_early: true,
                ..schedule(200.0, 20, true)
            };
            drive(
                Arc::new(Stalls(tokio::sync::Mutex::new(0))),
                1,
                schedule,
                deadline,
            )
        };
        // Twice as many requests as are answered: soon all are late.
        let load = drive_with(Duration::from_millis(100)).await;
        assert!(load.sent < 1000, "{}", load.sent);
        assert!(load.milliseconds.p95 > 100.0, "{:?}", load.milliseconds);
        let load = drive_with(Duration::from_secs(60)).await;
        assert_eq!((load.sent, load.ok), (4000, 4000));
    }

    struct Answers;

    #[async_trait::async_trait]
    impl Target for Answers {
        async fn ask(&self, image: usize) -> Answer {
            match image {
                0 => Answer::Refused,
                1 => Answer::Failed("500 model_failed".to_owned()),
                _ => Answer::Ok,
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_no_row_is_counted_apart() {
        let load = drive(
            Arc::new(Answers),
            4,
            schedule(100.0, 4, true),
            Duration::from_millis(10),
        )
        .await;
        assert_eq!(
            (load.sent, load.ok, load.refused, load.failed),
            (400, 200, 100, 100)
        );
        assert_eq!(load.failures["500 model_failed"], 100);
        assert!((load.goodput - 50.0).abs() < 1e-9);
    }
}
