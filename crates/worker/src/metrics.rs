//! The metrics of the roles; `docs/metrics.md` lists them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use metrics::{
    Gauge, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use trommel_queue::{Delivery, Disposition};
use trommel_types::{ErrorKind, Outcome};

use crate::{Role, Task};

const DELIVERIES: &str = "trommel_deliveries_total";
const REDELIVERIES: &str = "trommel_redeliveries_total";
const IN_FLIGHT: &str = "trommel_in_flight";
const QUEUE_WAIT: &str = "trommel_queue_wait_seconds";
const LISTED: &str = "trommel_listed_images_total";
const FETCH: &str = "trommel_fetch_seconds";
const FETCHED_BYTES: &str = "trommel_fetched_bytes_total";
const DECODE: &str = "trommel_decode_seconds";
const RESIZE: &str = "trommel_resize_seconds";
const COMMIT: &str = "trommel_commit_seconds";
const ROWS: &str = "trommel_rows_total";
const FAILURES: &str = "trommel_failures_total";
const COMMITTED_ROWS: &str = "trommel_committed_rows_total";
const PARTS: &str = "trommel_parts_total";
const MODEL_LOADS: &str = "trommel_model_loads_total";
const MODEL_LOAD: &str = "trommel_model_load_seconds";
const REQUEST_QUEUE: &str = "trommel_request_queue_seconds";
const REQUEST_SERVICE: &str = "trommel_request_service_seconds";
const THREADS: &str = "trommel_threads";

/// Describes all metrics to the recorder that is installed.
pub fn describe_metrics() {
    trommel_queue::metrics::describe();
    trommel_infer::describe_metrics();
    describe_counter!(
        DELIVERIES,
        "Deliveries whose work has ended, by their disposition"
    );
    describe_counter!(
        REDELIVERIES,
        "Deliveries that were not the first of their message"
    );
    describe_gauge!(IN_FLIGHT, "Deliveries in flight");
    describe_histogram!(
        QUEUE_WAIT,
        Unit::Seconds,
        "Time from the storing of a message to its first delivery"
    );
    describe_counter!(LISTED, "Images listed");
    describe_histogram!(
        FETCH,
        Unit::Seconds,
        "Reading the bytes of an image, with the wait for them"
    );
    describe_counter!(FETCHED_BYTES, Unit::Bytes, "Encoded bytes read");
    describe_histogram!(DECODE, Unit::Seconds, "Decoding an image");
    describe_histogram!(
        RESIZE,
        Unit::Seconds,
        "Resizing and cropping an image, for all models of its job"
    );
    describe_histogram!(COMMIT, Unit::Seconds, "Making a part of rows durable");
    describe_counter!(ROWS, "Rows that reached the sink, by status");
    describe_counter!(FAILURES, "Failed rows that reached the sink, by kind");
    describe_counter!(COMMITTED_ROWS, "Rows made durable");
    describe_counter!(PARTS, "Parts, or transactions, made durable");
    describe_counter!(MODEL_LOADS, "Models loaded and warmed up");
    describe_histogram!(MODEL_LOAD, Unit::Seconds, "Loading and warming up a model");
    describe_gauge!(THREADS, "Threads that a stage works on");
}

/// Publishes the counters of a role from its start, so that rates include the first event.
pub(crate) fn begin(role: Role) {
    let stage = role.as_str();
    if role.input().is_none() {
        return; // it takes no deliveries
    }
    for disposition in ["done", "retry", "dead_letter"] {
        counter!(DELIVERIES, "stage" => stage, "disposition" => disposition).increment(0);
    }
    counter!(REDELIVERIES, "stage" => stage).increment(0);
    gauge!(IN_FLIGHT, "stage" => stage).increment(0.0);
    match role {
        Role::Ingest => counter!(LISTED).increment(0),
        Role::Preprocess => counter!(FETCHED_BYTES).increment(0),
        Role::Infer | Role::Serve => {}
        Role::Sink => {
            for status in ["ok", "failed"] {
                counter!(ROWS, "status" => status).increment(0);
            }
            counter!(COMMITTED_ROWS).increment(0);
            counter!(PARTS).increment(0);
        }
    }
}

/// The work of this process since its start, for queries over the broker.
static DONE: Done = Done {
    listed: AtomicU64::new(0),
    prepared: AtomicU64::new(0),
    preparing: AtomicU64::new(0),
    committed: AtomicU64::new(0),
    committing: AtomicU64::new(0),
};

struct Done {
    listed: AtomicU64,
    prepared: AtomicU64,
    /// Nanoseconds of threads.
    preparing: AtomicU64,
    committed: AtomicU64,
    committing: AtomicU64,
}

/// Images that a role of this process has finished, and the busy time of its threads. Not for
/// infer, whose engines count.
pub(crate) fn done(role: Role) -> (u64, Duration) {
    let (images, time) = match role {
        Role::Ingest => (&DONE.listed, None),
        Role::Preprocess => (&DONE.prepared, Some(&DONE.preparing)),
        Role::Infer | Role::Serve => return (0, Duration::ZERO),
        Role::Sink => (&DONE.committed, Some(&DONE.committing)),
    };
    let nanos = time.map_or(0, |time| time.load(Relaxed));
    (images.load(Relaxed), Duration::from_nanos(nanos))
}

/// A delivery in flight.
pub(crate) struct InFlight(Gauge);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.decrement(1);
    }
}

/// A delivery reached a stage; it is in flight while the guard lives.
pub(crate) fn delivered<T>(stage: &'static str, delivery: &Delivery<T>) -> InFlight {
    if delivery.attempt() > 1 {
        counter!(REDELIVERIES, "stage" => stage).increment(1);
    } else if let Some(waited) = delivery.origin().waited() {
        histogram!(QUEUE_WAIT, "stage" => stage).record(waited);
    }
    let in_flight = gauge!(IN_FLIGHT, "stage" => stage);
    in_flight.increment(1);
    InFlight(in_flight)
}

/// A delivery was settled.
pub(crate) fn settled(stage: &'static str, disposition: &Disposition) {
    let disposition = match disposition {
        Disposition::Done => "done",
        Disposition::Retry { .. } => "retry",
        Disposition::DeadLetter { .. } => "dead_letter",
    };
    counter!(DELIVERIES, "stage" => stage, "disposition" => disposition).increment(1);
}

pub(crate) fn listed() {
    DONE.listed.fetch_add(1, Relaxed);
    counter!(LISTED).increment(1);
}

/// A thread has worked at `task`.
pub(crate) fn worked(task: Task, time: Duration) {
    let name = match task {
        Task::Fetch => FETCH,
        Task::Decode => DECODE,
        Task::Resize => RESIZE,
        Task::Commit => COMMIT,
    };
    histogram!(name).record(time);
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    match task {
        Task::Fetch => {}
        Task::Decode => drop(DONE.preparing.fetch_add(nanos, Relaxed)),
        Task::Resize => {
            DONE.preparing.fetch_add(nanos, Relaxed);
            DONE.prepared.fetch_add(1, Relaxed);
        }
        Task::Commit => drop(DONE.committing.fetch_add(nanos, Relaxed)),
    }
}

pub(crate) fn fetched(bytes: u64) {
    counter!(FETCHED_BYTES).increment(bytes);
}

/// A row reached the sink.
pub(crate) fn row(outcome: &Outcome) {
    let failure = |kind: ErrorKind| counter!(FAILURES, "kind" => kind.as_str()).increment(1);
    let status = match outcome {
        Outcome::Ok(_) => "ok",
        Outcome::Failed(failed) => {
            failure(failed.kind);
            "failed"
        }
    };
    counter!(ROWS, "status" => status).increment(1);
}

pub(crate) fn committed(rows: u64) {
    DONE.committed.fetch_add(rows, Relaxed);
    counter!(COMMITTED_ROWS).increment(rows);
    counter!(PARTS).increment(1);
}

pub(crate) fn loaded(model: &str, time: Duration) {
    counter!(MODEL_LOADS, "model" => model.to_owned()).increment(1);
    histogram!(MODEL_LOAD, "model" => model.to_owned()).record(time);
}

/// An image of a request waited for a thread, and was decoded and resized on it.
pub(crate) fn request_prepared(waited: Duration, worked: Duration) {
    histogram!(REQUEST_QUEUE, "stage" => "decode").record(waited);
    histogram!(REQUEST_SERVICE, "stage" => "decode").record(worked);
}

/// Sets the number of threads of a stage.
pub(crate) fn threads(stage: &'static str, threads: usize) {
    gauge!(THREADS, "stage" => stage).set(threads as f64);
}
