//! Sends requests at given times, regardless of earlier ones: an open loop.
//!
//! The latency of each counts from when it was due. A server that falls behind cannot delay
//! requests and so hide how long their senders would have waited, which is known as coordinated
//! omission.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use std::{io, thread};

use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{Receiver, channel};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::measures::Spread;
use super::spread::Times;
use crate::plan::Random;

/// Most open requests; further ones are sent late, and counted from when they were due.
const MOST_OPEN: usize = 8192;

/// Consecutive parts of a load's requests, for the uncertainty of its percentiles.
const PARTS: usize = 10;
/// The 97.5th percentile of Student's distribution with a degree of freedom less than that.
const STUDENT: f64 = 2.262;
/// Fewest answers of a part for a p95 of its own.
const LEAST_OF_PART: u64 = 40;

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
    /// Half of the 95 % confidence interval of their p95, if there are enough of them.
    pub(crate) p95_uncertainty: Option<f64>,
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
///
/// # Errors
/// If no thread can be started that keeps the time.
pub(crate) async fn drive(
    target: Arc<dyn Target>,
    images: usize,
    schedule: Schedule,
    deadline: Duration,
) -> io::Result<Load> {
    let total = schedule.times().count(); // before the clock starts
    let due = clock(schedule.times())?;
    Ok(drive_by(due, total, target, images, schedule, deadline).await)
}

/// Sends each moment from now when it has come. On a thread, because the runtime's timers are
/// late by up to a millisecond, which would count as the server's.
fn clock(times: impl Iterator<Item = Duration> + Send + 'static) -> io::Result<Receiver<Instant>> {
    let (sender, receiver) = channel(MOST_OPEN);
    let start = Instant::now();
    let ticks = move || {
        for at in times {
            let due = start + at;
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if sender.blocking_send(due).is_err() {
                return; // the load has ended early
            }
        }
    };
    thread::Builder::new()
        .name("load-clock".to_owned())
        .spawn(ticks)?;
    Ok(receiver)
}

/// Sends a request at each moment that `due` gives, `total` in all.
async fn drive_by(
    mut due: Receiver<Instant>,
    total: usize,
    target: Arc<dyn Target>,
    images: usize,
    schedule: Schedule,
    deadline: Duration,
) -> Load {
    let room = Arc::new(Semaphore::new(MOST_OPEN));
    let (mut open, mut seen) = (JoinSet::new(), Seen::default());
    let most_missed = match schedule.ends_early {
        true => total as u64 / 20,
        false => u64::MAX,
    };
    while let Some(due) = due.recv().await {
        while let Some(Ok((answer, took, part))) = open.try_join_next() {
            seen.count(answer, took, part);
        }
        if seen.missed(deadline) > most_missed {
            break;
        }
        let (target, room) = (Arc::clone(&target), Arc::clone(&room));
        let number = seen.sent as usize;
        let (image, part) = (number % images.max(1), number * PARTS / total);
        open.spawn(async move {
            let _room = room.acquire().await;
            let answer = target.ask(image).await;
            (answer, due.elapsed(), part)
        });
        seen.sent += 1;
    }
    while seen.missed(deadline) <= most_missed
        && let Some(ended) = open.join_next().await
    {
        match ended {
            Ok((answer, took, part)) => seen.count(answer, took, part),
            Err(error) => seen.count(Answer::Failed(error.to_string()), Duration::ZERO, 0),
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
        p95_uncertainty: seen.p95_uncertainty(),
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
    /// Those of each part.
    parts: [Times; PARTS],
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

    /// Half of the confidence interval of p95, by those of the parts: requests of a part wait for
    /// each other, those of different parts hardly (the method of batch means).
    fn p95_uncertainty(&self) -> Option<f64> {
        if self.parts.iter().any(|part| part.count() < LEAST_OF_PART) {
            return None;
        }
        let p95s = self.parts.each_ref().map(|part| part.percentile(95.0));
        let mean = p95s.iter().sum::<f64>() / PARTS as f64;
        let squares: f64 = p95s.iter().map(|p95| (p95 - mean).powi(2)).sum();
        let variance = squares / (PARTS - 1) as f64;
        Some(STUDENT * (variance / PARTS as f64).sqrt())
    }

    fn count(&mut self, answer: Answer, took: Duration, part: usize) {
        match answer {
            Answer::Ok => {
                self.times.add(took);
                self.parts[part].add(took);
            }
            Answer::Refused => self.refused += 1,
            Answer::Failed(why) => *self.failures.entry(why).or_default() += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::time::sleep_until;

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

    /// A load whose clock is tokio's.
    async fn drive_paused(
        target: Arc<dyn Target>,
        images: usize,
        schedule: Schedule,
        deadline: Duration,
    ) -> Load {
        let (sender, due) = channel(MOST_OPEN);
        let (start, total) = (Instant::now(), schedule.times().count());
        tokio::spawn(async move {
            for at in schedule.times() {
                sleep_until(start + at).await;
                if sender.send(start + at).await.is_err() {
                    return;
                }
            }
        });
        drive_by(due, total, target, images, schedule, deadline).await
    }

    #[tokio::test]
    async fn no_request_is_sent_early() {
        let times = [0, 3, 3, 7].map(Duration::from_millis);
        let mut due = clock(times.into_iter()).unwrap();
        let mut sent = Vec::new();
        while let Some(at) = due.recv().await {
            assert!(Instant::now() >= at);
            sent.push(at);
        }
        let after_first: Vec<Duration> = sent.iter().map(|at| *at - sent[0]).collect();
        assert_eq!(after_first, times);
    }

    #[tokio::test(start_paused = true)]
    async fn percentiles_are_those_of_the_delays_within_two_percent() {
        let target = Arc::new(Delays(Mutex::new(Random::new(2))));
        let load = drive_paused(
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
        // The standard error of a quantile q of n samples: sqrt(q (1 - q) / n) / density there.
        let expected = 1.96 * 100.0 * (0.95 * 0.05 / 200_000.0_f64).sqrt() / 0.05;
        let found = load.p95_uncertainty.unwrap();
        assert!(
            (0.4..2.0).contains(&(found / expected)),
            "{found}: {expected}"
        );
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
        let load = drive_paused(
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
            drive_paused(
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
        let load = drive_paused(
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
        assert_eq!(load.p95_uncertainty, None, "20 answers a part");
    }
}
