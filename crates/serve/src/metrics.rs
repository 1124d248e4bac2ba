//! The metrics of requests; `docs/metrics.md` lists them.

use std::time::Instant;

use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use crate::live_turns::Dropped;

/// Name of the histogram of request times.
pub const REQUEST_SECONDS: &str = "trommel_request_seconds";
/// Upper bounds of its buckets in seconds, fine in the range of budgets.
pub const REQUEST_BUCKETS: [f64; 14] = [
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5, 1.0, 5.0,
];
const SHED: &str = "trommel_requests_shed_total";
const EXPIRED: &str = "trommel_requests_expired_total";
/// Name of the histogram of the age of live frames when they have their result.
pub const FRAME_AGE_SECONDS: &str = "trommel_live_frame_age_seconds";
const FRAMES_DROPPED: &str = "trommel_live_frames_dropped_total";
const LIVE_SOURCES: &str = "trommel_live_sources";

/// Describes the metrics of this crate to the recorder that is installed.
pub fn describe_metrics() {
    describe_histogram!(
        REQUEST_SECONDS,
        Unit::Seconds,
        "From the head of a request to its answer, by entrance and outcome"
    );
    describe_counter!(
        SHED,
        "Requests that were refused because too many waited already"
    );
    describe_counter!(
        EXPIRED,
        "Requests that were dropped because their deadline had passed"
    );
    describe_histogram!(
        FRAME_AGE_SECONDS,
        Unit::Seconds,
        "From when a frame of a live source was taken to its result, by outcome"
    );
    describe_counter!(
        FRAMES_DROPPED,
        "Frames of live sources that were not classified, by reason"
    );
    describe_gauge!(LIVE_SOURCES, "Live sources that are known");
}

/// Publishes the counters of an entrance from its start.
pub(crate) fn begin(entrance: &'static str) {
    counter!(SHED, "entrance" => entrance).increment(0);
    counter!(EXPIRED, "entrance" => entrance).increment(0);
}

/// Publishes the counters of live sources from their start.
pub(crate) fn begin_live() {
    for reason in Dropped::ALL {
        live_dropped(reason, 0);
    }
    live_sources(0);
}

/// Counts frames that were not classified.
pub(crate) fn live_dropped(reason: Dropped, frames: u64) {
    counter!(FRAMES_DROPPED, "reason" => reason.as_str()).increment(frames);
}

/// A frame has its result, `ok`, `failed` or `error`, this many microseconds after it was taken.
pub(crate) fn live_done(outcome: &'static str, age: i64) {
    let seconds = age.max(0) as f64 / 1e6;
    histogram!(FRAME_AGE_SECONDS, "outcome" => outcome).record(seconds);
}

/// Sets the number of known live sources.
pub(crate) fn live_sources(sources: usize) {
    gauge!(LIVE_SOURCES).set(sources as f64);
}

/// A request in flight. If its client leaves before the answer, it counts as gone.
pub(crate) struct Observed {
    entrance: &'static str,
    since: Instant,
    outcome: &'static str,
}

impl Observed {
    /// For a request that arrived at `since`.
    pub(crate) fn begin(entrance: &'static str, since: Instant) -> Self {
        Self {
            entrance,
            since,
            outcome: "gone",
        }
    }

    /// The request was answered: `ok`, `failed`, `refused`, `shed`, `expired` or `error`.
    pub(crate) fn end(mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        let Self {
            entrance,
            since,
            outcome,
        } = *self;
        let took = since.elapsed();
        histogram!(REQUEST_SECONDS, "entrance" => entrance, "outcome" => outcome).record(took);
        trommel_worker::request_ended(entrance, outcome, took);
        match outcome {
            "shed" => counter!(SHED, "entrance" => entrance).increment(1),
            "expired" => counter!(EXPIRED, "entrance" => entrance).increment(1),
            _ => {}
        }
    }
}
