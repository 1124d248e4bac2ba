use std::fmt;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use bytes::Bytes;
use opentelemetry::trace::TraceContextExt;
use tokio::sync::{Semaphore, oneshot};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use trommel_types::{Lane, Scores};

use crate::backend::Backend;
use crate::lanes::Lanes;
use crate::metrics::InstanceMetrics;
use crate::stats::Counters;
use crate::{EngineOptions, EngineStats, InferError, InferErrorKind};

/// Threads that each own a backend, and the batch former that they take from.
pub(crate) struct Instances {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// When all threads were ready.
    since: Instant,
}

/// What callers and threads share.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Told when a batch has closed, when one begins to form, and when the phase changes.
    changed: Condvar,
    /// Of each lane, one permit for each image that may wait.
    room: [Semaphore; Lane::ALL.len()],
    options: EngineOptions,
    counters: Counters,
}

struct State {
    lanes: Lanes<Job>,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Images come in.
    Open,
    /// No more come in; those inside are finished.
    Draining,
    /// Nothing is finished any more.
    Stopped,
}

/// An image and who waits for its answer.
struct Job {
    pixels: Bytes,
    /// That of the caller.
    span: Span,
    answer: oneshot::Sender<Result<Scores, InferError>>,
}

/// A batch for an instance.
struct NextBatch {
    jobs: Vec<Job>,
    /// Whether it was there before the instance asked.
    was_waiting: bool,
}

impl Instances {
    /// Starts the threads, each of which makes its backend by its number and warms it up.
    ///
    /// # Errors
    /// The first error of a thread; all threads have ended then.
    pub(crate) fn start<B: Backend>(
        model: &str,
        options: EngineOptions,
        make: impl Fn(usize) -> Result<B, InferError> + Send + Sync + 'static,
    ) -> Result<Self, InferError> {
        let EngineOptions {
            instances,
            max_batch,
            max_wait,
        } = options;
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                lanes: Lanes::new(max_batch, max_wait),
                phase: Phase::Open,
            }),
            changed: Condvar::new(),
            // Beside what the instances compute: a batch formed ahead for each, and one forming.
            room: Lane::ALL.map(|_| {
                let images = max_batch.saturating_mul(instances + 1);
                Semaphore::new(images.min(Semaphore::MAX_PERMITS))
            }),
            options,
            counters: Counters::default(),
        });
        let make = Arc::new(make);
        let mut started = Self {
            shared,
            threads: Vec::with_capacity(instances),
            since: Instant::now(),
        };
        let (ready, all_ready) = sync_channel(instances);
        for number in 0..instances {
            let (shared, make, ready) = (
                Arc::clone(&started.shared),
                Arc::clone(&make),
                ready.clone(),
            );
            let metrics = InstanceMetrics::of(model);
            let thread = thread::Builder::new()
                .name(format!("infer-{number}"))
                .spawn(move || run(&shared, &metrics, || make(number), ready))
                .map_err(|error| stopped(format_args!("cannot start a thread: {error}")));
            match thread {
                Ok(thread) => started.threads.push(thread),
                Err(error) => {
                    started.shared.stop();
                    return Err(error); // dropping `started` joins the threads before
                }
            }
        }
        drop(ready);
        for _ in 0..instances {
            // A thread that ends without a word has panicked.
            let outcome = all_ready
                .recv()
                .unwrap_or_else(|_| Err(stopped("a thread of the engine panicked at start")));
            if let Err(error) = outcome {
                started.shared.stop();
                return Err(error);
            }
        }
        started.since = Instant::now();
        Ok(started)
    }

    pub(crate) fn stats(&self) -> EngineStats {
        let instances = self.shared.options.instances;
        let max_batch = self.shared.max_batch();
        self.shared
            .counters
            .read(instances, max_batch, self.since.elapsed())
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Instances {
    fn drop(&mut self) {
        self.shared.drain();
        for thread in self.threads.drain(..) {
            // A panic has been reported by the panic hook and to the callers.
            drop(thread.join());
        }
    }
}

impl fmt::Debug for Instances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Instances")
            .field("options", &self.shared.options)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Waits for room, hands the image to the former and waits for its answer.
    pub(crate) async fn classify(&self, pixels: Bytes, lane: Lane) -> Result<Scores, InferError> {
        let room = self.room[lane as usize].acquire();
        let room = room.await.map_err(|_| ended())?;
        let (answer, answered) = oneshot::channel();
        let job = Job {
            pixels,
            span: Span::current(),
            answer,
        };
        self.push(lane, job)?;
        room.forget(); // given back when an instance takes the batch
        // A job that is dropped unanswered was in the hands of a thread that panicked, or was
        // cleared by it.
        answered.await.unwrap_or_else(|_| Err(ended()))
    }

    pub(crate) fn flush(&self) {
        self.lock().lanes.flush();
        self.changed.notify_all();
    }

    fn push(&self, lane: Lane, job: Job) -> Result<(), InferError> {
        let mut state = self.lock();
        if state.phase != Phase::Open {
            return Err(ended());
        }
        // Only when a batch has closed or begun has a waiting instance anything to do.
        if state.lanes.push(lane, job, Instant::now()) {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Images that a full batch holds now.
    fn max_batch(&self) -> usize {
        self.lock().lanes.max_batch()
    }

    /// Makes full batches no larger than this, for a device that has no memory for more.
    fn limit_batches(&self, max_batch: usize, why: &InferError) {
        let mut state = self.lock();
        if max_batch < state.lanes.max_batch() {
            tracing::warn!("{why}; going on with batches of {max_batch}");
            state.lanes.limit(max_batch);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The next batch, or nothing once there will be none.
    fn next_batch(&self) -> Option<NextBatch> {
        let mut state = self.lock();
        let mut was_waiting = true;
        let batch = loop {
            let now = Instant::now();
            if let Some(batch) = state.lanes.take(now) {
                break Some(batch);
            }
            was_waiting = false;
            if state.phase != Phase::Open {
                break None;
            }
            state = match state.lanes.due() {
                Some(due) => {
                    let wait = due.saturating_duration_since(now);
                    self.changed
                        .wait_timeout(state, wait)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
                None => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
            };
        };
        drop(state);
        let (lane, jobs) = batch?;
        self.room[lane as usize].add_permits(jobs.len());
        Some(NextBatch { jobs, was_waiting })
    }

    fn drain(&self) {
        self.room.iter().for_each(Semaphore::close);
        let mut state = self.lock();
        if state.phase == Phase::Open {
            state.phase = Phase::Draining;
            state.lanes.flush();
        }
        self.changed.notify_all();
    }

    fn stop(&self) {
        self.room.iter().for_each(Semaphore::close);
        let mut state = self.lock();
        state.phase = Phase::Stopped;
        state.lanes.clear();
        self.changed.notify_all();
    }

    /// No code panics while it holds the lock, so a poisoned one still guards a sound state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stops the engine when its thread unwinds, so that nobody waits for answers that never come.
struct StopOnPanic<'a>(&'a Shared);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.stop();
        }
    }
}

/// The life of an instance.
fn run<B: Backend>(
    shared: &Shared,
    metrics: &InstanceMetrics,
    make: impl FnOnce() -> Result<B, InferError>,
    ready: SyncSender<Result<(), InferError>>,
) {
    let _stop_on_panic = StopOnPanic(shared);
    let warm = make().and_then(|mut backend| {
        warm_up(shared, &mut backend)?;
        Ok(backend)
    });
    let (backend, outcome) = match warm {
        Ok(backend) => (Some(backend), Ok(())),
        Err(error) => (None, Err(error)),
    };
    // The receiver goes only after another instance has failed; then the phase ends this one.
    ready.send(outcome).ok();
    drop(ready);
    let Some(mut backend) = backend else { return };

    let mut last_end = None;
    while let Some(NextBatch {
        mut jobs,
        was_waiting,
    }) = shared.next_batch()
    {
        jobs.retain(|job| !job.answer.is_closed());
        if jobs.is_empty() {
            continue;
        }
        let pixels: Vec<Bytes> = jobs.iter().map(|job| job.pixels.clone()).collect();
        let start = Instant::now();
        if let (true, Some(end)) = (was_waiting, last_end) {
            shared.counters.gap(start - end);
            metrics.gap(start - end);
        }
        let outcomes = batch_span(&jobs).in_scope(|| compute(shared, &mut backend, &pixels));
        let end = Instant::now();
        last_end = Some(end);
        let (images, computed) = (pixels.len(), backend.computed(pixels.len()));
        let places = shared.max_batch().max(images);
        shared.counters.batch(images, computed, places, end - start);
        metrics.batch(images, places, end - start);
        if let Err(lost) = answer(jobs, outcomes) {
            tracing::error!("{lost}");
            shared.stop();
            // Giving back what a lost device held may end the process at once, before it can say why.
            std::mem::forget(backend);
            return;
        }
    }
}

/// The span of a batch, if one of its images is traced: in the first such image's trace, and linked
/// to by the spans of all.
fn batch_span(jobs: &[Job]) -> Span {
    let is_traced = |job: &&Job| job.span.context().span().span_context().is_sampled();
    let Some(first) = jobs.iter().find(is_traced) else {
        return Span::none();
    };
    let batch = tracing::warn_span!(parent: &first.span, "infer.batch", batch_size = jobs.len());
    for job in jobs {
        job.span.follows_from(&batch);
    }
    batch
}

/// Warms a backend up with as large a batch as the device has memory for.
fn warm_up(shared: &Shared, backend: &mut impl Backend) -> Result<(), InferError> {
    loop {
        let batch = shared.max_batch();
        match backend.warm_up(batch) {
            Err(error) if can_halve(backend, batch, &error) => {
                shared.limit_batches(batch.div_ceil(2), &error);
            }
            done => return done,
        }
    }
}

/// Whether half of a batch may have room where all of it had none.
fn can_halve(backend: &impl Backend, images: usize, error: &InferError) -> bool {
    error.kind() == InferErrorKind::OutOfMemory
        && backend.computed(images.div_ceil(2)) < backend.computed(images)
}

/// One outcome an image. A batch that was formed before batches were made smaller is cut up.
fn compute(
    shared: &Shared,
    backend: &mut impl Backend,
    pixels: &[Bytes],
) -> Vec<Result<Scores, InferError>> {
    let (images, limit) = (pixels.len(), shared.max_batch());
    if images > limit {
        let batches = pixels.chunks(limit);
        return batches
            .flat_map(|pixels| compute(shared, backend, pixels))
            .collect();
    }
    let outcomes = match backend.run(pixels) {
        Err(error) if can_halve(backend, images, &error) => {
            shared.limit_batches(images.div_ceil(2), &error);
            compute(shared, backend, pixels)
        }
        Err(error) if images > 1 && !error.is_fatal() => {
            tracing::warn!("a batch of {images} failed, running its images singly: {error}");
            singly(shared, backend, pixels)
        }
        Err(error) => vec![Err(error); images],
        Ok(outcomes) => outcomes,
    };
    debug_assert_eq!(outcomes.len(), images, "one outcome an image");
    outcomes
}

/// Answers every job of a batch. An error is one that no later image will survive.
fn answer(batch: Vec<Job>, outcomes: Vec<Result<Scores, InferError>>) -> Result<(), InferError> {
    let mut lost = Ok(());
    for (job, outcome) in batch.into_iter().zip(outcomes) {
        if let Err(error) = &outcome
            && error.is_fatal()
        {
            lost = Err(error.clone());
        }
        // Its caller may have left meanwhile.
        job.answer.send(outcome).ok();
    }
    lost
}

/// Runs each image alone, so that one that breaks its batch takes no other with it.
fn singly(
    shared: &Shared,
    backend: &mut impl Backend,
    pixels: &[Bytes],
) -> Vec<Result<Scores, InferError>> {
    let mut lost = None;
    pixels
        .iter()
        .map(|image| {
            if let Some(error) = &lost {
                return Err(InferError::clone(error));
            }
            shared.counters.retry();
            let outcome = backend
                .run(std::slice::from_ref(image))
                .and_then(|outcomes| outcomes.into_iter().next().unwrap_or_else(|| Err(ended())));
            if let Err(error) = &outcome
                && error.is_fatal()
            {
                lost = Some(error.clone());
            }
            outcome
        })
        .collect()
}

fn ended() -> InferError {
    stopped("the engine has stopped, so the image was not classified")
}

fn stopped(message: impl fmt::Display) -> InferError {
    InferError::new(InferErrorKind::EngineStopped, message)
}

#[cfg(test)]
mod tests;
