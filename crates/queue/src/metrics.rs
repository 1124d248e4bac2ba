//! The metrics of queues; `docs/metrics.md` lists them.

use std::time::Duration;

use metrics::{Unit, describe_histogram, histogram};

const BACKPRESSURE: &str = "trommel_backpressure_seconds";

/// Describes the metrics of this crate to the recorder that is installed.
pub fn describe() {
    describe_histogram!(
        BACKPRESSURE,
        Unit::Seconds,
        "Waits of a stage's publishes for room in the next queue"
    );
}

/// A publish of `stage` has waited for room in the next queue.
pub(crate) fn waited_for_room(stage: &'static str, wait: Duration) {
    histogram!(BACKPRESSURE, "stage" => stage).record(wait);
}
