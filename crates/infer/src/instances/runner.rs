//! The thread of an instance: runs batches, answers each image, and is replaced when it hangs.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use opentelemetry::trace::TraceContextExt;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use trommel_types::{Lane, Scores};

use super::{Job, NextBatch, Seat, Shared, lock};
use crate::backend::{Backend, Image};
use crate::metrics::InstanceMetrics;
use crate::{InferError, InferErrorKind};

/// Called once, with whether the thread is ready.
pub(super) type Report = Box<dyn FnOnce(Result<(), InferError>) + Send>;

/// Starts the thread of a seat.
pub(super) type Spawn = Box<dyn Fn(Seat, Report) -> Result<(), InferError> + Send>;

/// Starts threads; each creates its backend and warms it up first.
pub(super) fn spawner<B: Backend>(
    shared: &Arc<Shared>,
    model: &str,
    make: impl Fn(usize) -> Result<B, InferError> + Send + Sync + 'static,
) -> Spawn {
    let (shared, model, make) = (Arc::clone(shared), model.to_owned(), Arc::new(make));
    Box::new(move |seat, report| {
        let metrics = InstanceMetrics::of(&model);
        if seat.turn == 0 {
            shared.lock().alive += 1;
        }
        let work = {
            let (shared, make) = (Arc::clone(&shared), Arc::clone(&make));
            move || run(&shared, seat, &metrics, || make(seat.number), report)
        };
        let thread = thread::Builder::new()
            .name(format!("infer-{}", seat.number))
            .spawn(work);
        match thread {
            Ok(thread) => {
                let mut slot = lock(&shared.slots[seat.number]);
                slot.thread = (slot.turn == seat.turn).then_some(thread);
                Ok(())
            }
            Err(error) => {
                shared.leave(seat);
                Err(stopped(format_args!("cannot start a thread: {error}")))
            }
        }
    })
}

/// Watches for runs that exceed `limit`, and replaces their threads.
pub(super) fn watch(
    shared: &Arc<Shared>,
    spawn: Spawn,
    limit: Duration,
) -> Result<(SyncSender<()>, JoinHandle<()>), InferError> {
    const TICKS: [Duration; 2] = [Duration::from_millis(1), Duration::from_secs(1)];
    let tick = (limit / 8).clamp(TICKS[0], TICKS[1]);
    let (sender, ended) = sync_channel(0);
    let shared = Arc::clone(shared);
    let work = move || {
        while ended.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
            for number in 0..shared.slots.len() {
                if let Some(seat) = shared.give_up(number, limit)
                    && let Err(error) = replace(&shared, &spawn, seat)
                {
                    tracing::error!("{error}");
                    shared.stop();
                }
            }
        }
    };
    let thread = thread::Builder::new()
        .name("infer-watch".to_owned())
        .spawn(work)
        .map_err(|error| stopped(format_args!("cannot start a thread: {error}")))?;
    Ok((sender, thread))
}

/// Starts a thread to replace an abandoned one.
fn replace(shared: &Arc<Shared>, spawn: &Spawn, seat: Seat) -> Result<(), InferError> {
    let hung = shared.lock().hung;
    if hung > shared.slots.len() {
        shared.leave(seat);
        return Err(stopped(format_args!("{hung} runs of the model hang")));
    }
    let engine = Arc::clone(shared);
    let report = move |outcome: Result<(), InferError>| {
        if let Err(error) = outcome {
            tracing::error!("cannot replace a thread that hangs: {error}");
            engine.stop();
        }
    };
    spawn(seat, Box::new(report))
}

/// Reports that a thread has ended. If it unwinds, it stops the engine, so that nobody waits for
/// answers that never come.
struct Leaving<'a> {
    shared: &'a Shared,
    seat: Seat,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if thread::panicking() && self.shared.is_current(self.seat) {
            drop(self.shared.end(self.seat)); // its callers notice
            self.shared.stop();
        }
        self.shared.leave(self.seat);
    }
}

/// The main loop of an instance's thread.
fn run<B: Backend>(
    shared: &Shared,
    seat: Seat,
    metrics: &InstanceMetrics,
    make: impl FnOnce() -> Result<B, InferError>,
    report: Report,
) {
    let _leaving = Leaving { shared, seat };
    let warm = make().and_then(|mut backend| {
        warm_up(shared, &mut backend)?;
        Ok(backend)
    });
    let mut backend = match warm {
        Ok(backend) => backend,
        Err(error) => return report(Err(error)),
    };
    report(Ok(()));

    // For a model with a fixed batch, a smaller batch is no faster.
    let is_cut = backend.computed(1) < backend.computed(shared.max_batch());
    let mut last_end = None;
    while let Some(mut next) = shared.next_batch(is_cut) {
        next.jobs.retain(|job| !job.answer.is_closed());
        if next.jobs.is_empty() {
            continue;
        }
        if let (true, Some(end)) = (next.was_waiting, last_end) {
            let gap = Instant::now() - end;
            shared.counters.gap(gap);
            metrics.gap(gap);
        }
        match run_batch(shared, seat, metrics, &mut backend, next) {
            Ok(Some(end)) => last_end = Some(end),
            Ok(None) => return,
            Err(lost) => {
                tracing::error!("{lost}");
                shared.stop();
                // Releasing a lost device may end the process at once, before it can report the
                // reason.
                return std::mem::forget(backend);
            }
        }
    }
}

/// Runs a batch and answers its images. Returns when the model finished, or `None` if this thread
/// was abandoned meanwhile: its images are answered, and another thread has replaced it.
///
/// # Errors
/// Errors that no later image would survive.
fn run_batch(
    shared: &Shared,
    seat: Seat,
    metrics: &InstanceMetrics,
    backend: &mut impl Backend,
    next: NextBatch,
) -> Result<Option<Instant>, InferError> {
    let NextBatch {
        lane,
        jobs,
        is_lone,
        ..
    } = next;
    let batch: Vec<Image> = jobs.iter().map(|job| job.image.clone()).collect();
    let (span, start) = (batch_span(&jobs), Instant::now());
    if lane == Lane::Live {
        let waits = jobs.iter().map(|job| start - job.since);
        waits.for_each(|wait| metrics.live_wait(wait));
    }
    shared.begin(seat, jobs);
    let (outcomes, ran_lone) = span.in_scope(|| match &*batch {
        [image] if is_lone && let Some(scores) = backend.run_lone(image) => {
            (vec![Ok(scores)], true)
        }
        batch => (compute(shared, backend, batch), false),
    });
    let Some(jobs) = shared.end(seat) else {
        return Ok(None);
    };
    let (end, images) = (Instant::now(), batch.len());
    let (computed, places) = (backend.computed(images), shared.max_batch().max(images));
    shared.counters.batch(images, computed, places, end - start);
    metrics.batch(images, places, end - start);
    if lane == Lane::Live {
        metrics.live_batch(images, places, end - start);
    }
    // Batches have fewer threads.
    if !ran_lone {
        let whole = outcomes.iter().all(Result::is_ok);
        shared.took(images, end - start, whole);
    }
    answer(jobs, outcomes)?;
    Ok(Some(end))
}

/// The span of a batch, if one of its images is traced: in the trace of the first such image, and
/// linked from the spans of all.
fn batch_span(jobs: &[Job]) -> Span {
    let is_traced = |job: &&Job| job.span.context().span().span_context().is_sampled();
    let Some(first) = jobs.iter().find(is_traced) else {
        return Span::none();
    };
    let batch = tracing::debug_span!(parent: &first.span, "infer.batch", batch_size = jobs.len());
    for job in jobs {
        job.span.follows_from(&batch);
    }
    batch
}

/// Warms up a backend with as large a batch as fits into the device's memory; one with separate
/// memory per size, with all sizes that may be learned.
fn warm_up(shared: &Shared, backend: &mut impl Backend) -> Result<(), InferError> {
    loop {
        let batch = match backend.keeps_sizes() {
            true => shared.largest(),
            false => shared.max_batch(),
        };
        match backend.warm_up(batch) {
            Err(error) if can_halve(backend, batch, &error) => {
                shared.limit_batches(batch.div_ceil(2), &error);
            }
            done => return done,
        }
    }
}

/// Whether half of a batch may fit where all of it did not.
fn can_halve(backend: &impl Backend, images: usize, error: &InferError) -> bool {
    error.kind() == InferErrorKind::OutOfMemory
        && backend.computed(images.div_ceil(2)) < backend.computed(images)
}

/// One outcome per image. A batch formed before the limit was lowered is split.
fn compute(
    shared: &Shared,
    backend: &mut impl Backend,
    batch: &[Image],
) -> Vec<Result<Scores, InferError>> {
    let (images, limit) = (batch.len(), shared.max_batch());
    if images > limit {
        let batches = batch.chunks(limit);
        return batches
            .flat_map(|batch| compute(shared, backend, batch))
            .collect();
    }
    let outcomes = match backend.run(batch) {
        Err(error) if can_halve(backend, images, &error) => {
            shared.limit_batches(images.div_ceil(2), &error);
            compute(shared, backend, batch)
        }
        Err(error) if images > 1 && !error.is_fatal() => {
            tracing::warn!("a batch of {images} failed, running its images singly: {error}");
            singly(shared, backend, batch)
        }
        Err(error) => vec![Err(error); images],
        Ok(outcomes) => outcomes,
    };
    debug_assert_eq!(outcomes.len(), images, "one outcome an image");
    outcomes
}

/// Answers every job of a batch. Returns an error that no later image would survive.
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

/// Runs each image alone, so that one that breaks its batch does not affect the others.
fn singly(
    shared: &Shared,
    backend: &mut impl Backend,
    batch: &[Image],
) -> Vec<Result<Scores, InferError>> {
    let mut lost = None;
    batch
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

pub(super) fn ended() -> InferError {
    stopped("the engine has stopped, so the image was not classified")
}

pub(super) fn stopped(message: impl fmt::Display) -> InferError {
    InferError::new(InferErrorKind::EngineStopped, message)
}
