use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use trommel_types::{Classification, ErrorKind, Outcome};

use crate::metrics;
use crate::times::{TimeCounts, Times};

/// The progress of a job, for progress bars and summaries.
///
/// Counters only grow. Reading is cheap and never waits for a stage.
#[derive(Debug, Default)]
pub struct Progress {
    listed: AtomicU64,
    listing_done: AtomicBool,
    /// Notified when `listing_done` is set.
    ended: Notify,
    resumed: AtomicU64,
    ok: AtomicU64,
    failed: AtomicU64,
    committed: AtomicU64,
    committed_bytes: AtomicU64,
    repeated: AtomicU64,
    parts: AtomicU64,
    retried: AtomicU64,
    bytes: AtomicU64,
    from_s3: AtomicU64,
    failures: Mutex<BTreeMap<ErrorKind, FailureCount>>,
    work: Work,
    times: StageTimes,
}

/// Times of each kind of work; `infer` is the wait for a batch and its computation.
#[derive(Debug, Default)]
struct StageTimes {
    fetch: Times,
    decode: Times,
    resize: Times,
    infer: Times,
    commit: Times,
}

/// Failures of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureCount {
    /// Number of images.
    pub count: u64,
    /// The uri of the first one.
    pub example: String,
    /// Its error message.
    pub error: String,
}

/// Time that threads spent at each kind of work, in thread-seconds.
#[derive(Debug, Default)]
struct Work {
    fetch: AtomicU64,
    decode: AtomicU64,
    resize: AtomicU64,
    commit: AtomicU64,
}

/// A kind of work whose time is counted here; engines count the model's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Reading encoded bytes, including the wait for them.
    Fetch,
    /// Decoding.
    Decode,
    /// Resizing and cropping.
    Resize,
    /// Making rows durable.
    Commit,
}

impl Progress {
    /// Images listed so far, including those committed by an earlier run.
    pub fn listed(&self) -> u64 {
        self.listed.load(Relaxed)
    }

    /// The number of images of the job, once they are listed.
    pub fn total(&self) -> Option<u64> {
        self.listing_done.load(Relaxed).then(|| self.listed())
    }

    /// Rows committed by an earlier run of the same job.
    pub fn resumed(&self) -> u64 {
        self.resumed.load(Relaxed)
    }

    /// Images labelled by this run.
    pub fn ok(&self) -> u64 {
        self.ok.load(Relaxed)
    }

    /// Images that this run could not label.
    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    /// Images with a known outcome, from any run.
    pub fn finished(&self) -> u64 {
        self.resumed() + self.ok() + self.failed()
    }

    /// Rows made durable by this run.
    pub fn committed(&self) -> u64 {
        self.committed.load(Relaxed)
    }

    /// Rows of this run that are not durable yet.
    pub fn pending(&self) -> u64 {
        let ended = self.committed() + self.repeated.load(Relaxed);
        (self.ok() + self.failed()).saturating_sub(ended)
    }

    /// Parts written by this run.
    pub fn parts(&self) -> u64 {
        self.parts.load(Relaxed)
    }

    /// Attempts that were postponed.
    pub fn retried(&self) -> u64 {
        self.retried.load(Relaxed)
    }

    /// Encoded bytes read.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Failures of this run by kind.
    pub fn failures(&self) -> BTreeMap<ErrorKind, FailureCount> {
        self.failures
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Thread-seconds spent at `task`.
    pub fn time(&self, task: Task) -> Duration {
        Duration::from_nanos(self.work.of(task).load(Relaxed))
    }

    pub(crate) fn count_listed(&self) {
        metrics::listed();
        self.listed.fetch_add(1, Relaxed);
    }

    /// Counts images of an earlier listing.
    pub(crate) fn count_listed_before(&self, images: u64) {
        self.listed.fetch_add(images, Relaxed);
    }

    /// Adopts the progress of another process's listing.
    pub(crate) fn set_listed(&self, images: u64, ended: bool) {
        self.listed.store(images, Relaxed);
        self.listing_done.store(ended, Relaxed);
        self.ended.notify_waiters();
    }

    pub(crate) fn listing_ended(&self) {
        self.listing_done.store(true, Relaxed);
        self.ended.notify_waiters();
    }

    /// Waits until the listing has ended, or is checked again. Cancel-safe.
    pub(crate) async fn until_listed(&self) {
        let mut ended = std::pin::pin!(self.ended.notified());
        ended.as_mut().enable(); // from here on no end goes unseen
        if self.total().is_none() {
            ended.await;
        }
    }

    pub(crate) fn count_resumed(&self, rows: u64) {
        self.resumed.fetch_add(rows, Relaxed);
    }

    pub(crate) fn count_retried(&self) {
        self.retried.fetch_add(1, Relaxed);
    }

    /// Images that were read from S3.
    pub fn from_s3(&self) -> u64 {
        self.from_s3.load(Relaxed)
    }

    pub(crate) fn count_fetched(&self, uri: &str, bytes: u64) {
        metrics::fetched(bytes);
        if uri.starts_with("s3://") {
            self.from_s3.fetch_add(1, Relaxed);
        }
        self.bytes.fetch_add(bytes, Relaxed);
    }

    /// Encoded bytes of the images whose rows this run has made durable.
    pub fn committed_bytes(&self) -> u64 {
        self.committed_bytes.load(Relaxed)
    }

    /// `bytes` are the sizes of the images.
    pub(crate) fn count_committed(&self, rows: u64, bytes: u64) {
        metrics::committed(rows);
        self.committed.fetch_add(rows, Relaxed);
        self.committed_bytes.fetch_add(bytes, Relaxed);
        self.parts.fetch_add(1, Relaxed);
    }

    /// Counts rows that were committed before and came again.
    pub(crate) fn count_repeated(&self, rows: u64) {
        self.repeated.fetch_add(rows, Relaxed);
    }

    pub(crate) fn count_outcome(&self, classification: &Classification) {
        metrics::row(&classification.outcome);
        let failure = match &classification.outcome {
            Outcome::Ok(_) => {
                self.ok.fetch_add(1, Relaxed);
                return;
            }
            Outcome::Failed(failure) => failure,
        };
        self.failed.fetch_add(1, Relaxed);
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures
            .entry(failure.kind)
            .or_insert_with(|| FailureCount {
                count: 0,
                example: classification.image.uri.clone(),
                error: failure.error.clone(),
            });
        count.count += 1;
    }

    /// Runs `work` and counts its time for `task`.
    pub(crate) fn timed<R>(&self, task: Task, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.add_time(task, start.elapsed());
        result
    }

    /// A tensor was answered after this time.
    pub(crate) fn add_answer(&self, time: Duration) {
        self.times.infer.add(time);
    }

    /// Percentiles of times per image by stage (for `commit`, per part), without idle stages.
    pub fn times(&self) -> BTreeMap<String, TimeCounts> {
        let StageTimes {
            fetch,
            decode,
            resize,
            infer,
            commit,
        } = &self.times;
        let all = [
            ("fetch", fetch),
            ("decode", decode),
            ("resize", resize),
            ("infer", infer),
            ("commit", commit),
        ];
        let counts = all.map(|(stage, times)| (stage.to_owned(), times.counts()));
        let worked = |(_, counts): &(String, TimeCounts)| counts.percentiles().is_some();
        counts.into_iter().filter(worked).collect()
    }

    pub(crate) fn add_time(&self, task: Task, time: Duration) {
        metrics::worked(task, time);
        let times = match task {
            Task::Fetch => &self.times.fetch,
            Task::Decode => &self.times.decode,
            Task::Resize => &self.times.resize,
            Task::Commit => &self.times.commit,
        };
        times.add(time);
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.work.of(task).fetch_add(nanos, Relaxed);
    }
}

impl Work {
    fn of(&self, task: Task) -> &AtomicU64 {
        match task {
            Task::Fetch => &self.fetch,
            Task::Decode => &self.decode,
            Task::Resize => &self.resize,
            Task::Commit => &self.commit,
        }
    }
}
