//! Counts requests to servers and their tokens.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, counter};
use serde::Serialize;

use super::answer::Tokens;
use crate::metrics::{PROMPT_REQUESTS, PROMPT_TOKENS};

/// The requests of a prompt since its engine started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct PromptStats {
    /// Images that were answered, including answers outside the choices.
    pub answers: u64,
    /// Requests sent.
    pub requests: u64,
    /// Of these, refused because the server was busy (429, 503).
    pub busy: u64,
    /// Of these, failed at the server, or answered with an invalid response.
    pub failed: u64,
    /// Of these, not answered in time.
    pub timed_out: u64,
    /// Of these, without a connection.
    pub unreachable: u64,
    /// Input tokens, as counted by the servers.
    pub prompt_tokens: u64,
    /// Of these, cached by the servers.
    pub cached_tokens: u64,
    /// Output tokens.
    pub completion_tokens: u64,
    /// Their cost, in the currency of `price-in` and `price-out`, if these are set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price: Option<f64>,
    /// Most requests in flight at once so far.
    pub peak: u64,
    /// Current limit of requests in flight, over all servers.
    pub concurrency: u64,
    /// Servers.
    pub servers: u64,
}

/// The outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Answered,
    Refused,
    Busy,
    Failed,
    TimedOut,
    Unreachable,
}

/// Sums that all requests add to.
#[derive(Debug)]
pub(crate) struct Tally {
    ended: [AtomicU64; 6],
    counters: [Counter; 6],
    tokens: [AtomicU64; 3],
    token_counters: [Counter; 2],
    in_flight: AtomicU64,
    peak: AtomicU64,
    /// Nanoseconds of all requests.
    took: AtomicU64,
}

const NAMES: [&str; 6] = [
    "answered",
    "refused",
    "busy",
    "failed",
    "timed_out",
    "unreachable",
];

impl Tally {
    pub(crate) fn new(model: &str) -> Self {
        let count =
            |name| counter!(PROMPT_REQUESTS, "model" => model.to_owned(), "outcome" => name);
        let tokens = |kind| counter!(PROMPT_TOKENS, "model" => model.to_owned(), "kind" => kind);
        Self {
            ended: Default::default(),
            counters: NAMES.map(count),
            tokens: Default::default(),
            token_counters: ["prompt", "completion"].map(tokens),
            in_flight: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            took: AtomicU64::new(0),
        }
    }

    pub(crate) fn begin(&self) {
        let now = self.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// A request has ended, or was abandoned.
    pub(crate) fn over(&self, took: Duration) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.took.fetch_add(nanos, Ordering::Relaxed);
    }

    pub(crate) fn ended(&self, ended: Ended) {
        self.ended[ended as usize].fetch_add(1, Ordering::Relaxed);
        self.counters[ended as usize].increment(1);
    }

    pub(crate) fn tokens(&self, tokens: Tokens) {
        let Tokens {
            read,
            cached,
            written,
        } = tokens;
        for (sum, tokens) in self.tokens.iter().zip([read, cached, written]) {
            sum.fetch_add(tokens, Ordering::Relaxed);
        }
        self.token_counters[0].increment(read);
        self.token_counters[1].increment(written);
    }

    /// Time of all requests.
    pub(crate) fn took(&self) -> Duration {
        Duration::from_nanos(self.took.load(Ordering::Relaxed))
    }

    pub(crate) fn read(&self, prices: Option<(f64, f64)>) -> PromptStats {
        let ended = |ended: Ended| self.ended[ended as usize].load(Ordering::Relaxed);
        let [prompt_tokens, cached_tokens, completion_tokens] =
            [0, 1, 2].map(|kind| self.tokens[kind].load(Ordering::Relaxed));
        let price = prices.map(|(read, written)| {
            (prompt_tokens as f64 * read + completion_tokens as f64 * written) / 1e6
        });
        PromptStats {
            answers: ended(Ended::Answered),
            requests: self
                .ended
                .iter()
                .map(|sum| sum.load(Ordering::Relaxed))
                .sum(),
            busy: ended(Ended::Busy),
            failed: ended(Ended::Failed),
            timed_out: ended(Ended::TimedOut),
            unreachable: ended(Ended::Unreachable),
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            price,
            peak: self.peak.load(Ordering::Relaxed),
            concurrency: 0,
            servers: 0,
        }
    }
}
