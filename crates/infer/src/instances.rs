use std::fmt;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, oneshot};
use tracing::Span;
use trommel_types::{Lane, Scores};

use crate::backend::{Backend, Image};
use crate::lanes::Lanes;
use crate::learning::{Learner, Learning};
use crate::pace::Pace;
use crate::stats::Counters;
use crate::{EngineOptions, EngineStats, InferError, InferErrorKind};

mod runner;

use self::runner::{ended, spawner, stopped, watch};

/// Threads that each own a backend, and the batch former that they share.
pub(crate) struct Instances {
    shared: Arc<Shared>,
    /// Abandons hung runs as long as it has the sender.
    watchdog: Option<(SyncSender<()>, JoinHandle<()>)>,
    /// When all threads were ready.
    since: Instant,
}

/// State shared by callers and threads.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Notified when a batch begins to form or is ready, and when the phase changes.
    changed: Condvar,
    /// For each lane, one permit per image that may wait.
    room: [Semaphore; Lane::ALL.len()],
    options: EngineOptions,
    /// Largest batch that may be learned.
    largest: usize,
    /// Called with learned batch sizes.
    learned: Option<Box<dyn Fn(usize) + Send + Sync>>,
    counters: Counters,
    /// For each instance.
    slots: Vec<Mutex<Slot>>,
    /// Notified when the thread of an instance ends.
    thread_ended: Condvar,
}

struct State {
    lanes: Lanes<Job>,
    pace: Pace,
    learner: Option<Learner>,
    phase: Phase,
    /// Instances that have a thread.
    alive: usize,
    /// Threads that were abandoned and have not ended.
    hung: usize,
}

/// What an instance is doing now.
#[derive(Default)]
struct Slot {
    /// How often the instance's thread was replaced. Older threads have been abandoned.
    turn: u64,
    running: Option<Running>,
    thread: Option<JoinHandle<()>>,
}

/// A batch that is being computed.
struct Running {
    since: Instant,
    jobs: Vec<Job>,
}

/// A thread of an instance.
#[derive(Clone, Copy)]
struct Seat {
    number: usize,
    turn: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Images are accepted.
    Open,
    /// No more are accepted; those inside are finished.
    Draining,
    /// Nothing is finished any more.
    Stopped,
}

/// An image and the receiver of its answer.
struct Job {
    image: Image,
    /// Its arrival time.
    since: Instant,
    /// The span of the caller.
    span: Span,
    answer: oneshot::Sender<Result<Scores, InferError>>,
}

/// A batch for an instance.
struct NextBatch {
    lane: Lane,
    jobs: Vec<Job>,
    /// Whether it was ready before the instance asked.
    was_waiting: bool,
    /// Whether it is a single live image, and nothing else waits or is computed.
    is_lone: bool,
}

impl Instances {
    /// Starts the threads, each of which creates its backend by number and warms it up. With
    /// `learning`, batch sizes up to the given one are learned.
    ///
    /// # Errors
    /// The first error of a thread; all threads have ended then.
    pub(crate) fn start<B: Backend>(
        model: &str,
        options: EngineOptions,
        learning: Option<(Learning, usize)>,
        make: impl Fn(usize) -> Result<B, InferError> + Send + Sync + 'static,
    ) -> Result<Self, InferError> {
        let EngineOptions {
            instances,
            max_batch,
            max_wait,
            run_timeout,
            live,
        } = options;
        let (mut learner, mut learned, mut largest) = (None, None, max_batch);
        if let Some((learning, most)) = learning {
            largest = most.max(max_batch);
            learner = Some(Learner::new(max_batch, largest, learning.doubtful));
            learned = Some(learning.learned);
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                lanes: Lanes::new(max_batch, max_wait, live.max_wait),
                pace: Pace::new(live.hold),
                learner,
                phase: Phase::Open,
                alive: 0,
                hung: 0,
            }),
            changed: Condvar::new(),
            // In addition to what the instances compute: one batch formed ahead for each, and one
            // forming.
            room: Lane::ALL.map(|_| {
                let images = largest.saturating_mul(instances + 1);
                Semaphore::new(images.min(Semaphore::MAX_PERMITS))
            }),
            options,
            largest,
            learned,
            counters: Counters::default(),
            slots: (0..instances).map(|_| Mutex::default()).collect(),
            thread_ended: Condvar::new(),
        });
        let spawn = spawner(&shared, model, make);
        let mut started = Self {
            shared,
            watchdog: None,
            since: Instant::now(),
        };
        let (ready, all_ready) = sync_channel(instances);
        for number in 0..instances {
            let ready = ready.clone();
            // The receiver only goes away after another instance has failed; then the phase ends
            // this one.
            let report = Box::new(move |outcome| drop(ready.send(outcome)));
            if let Err(error) = spawn(Seat { number, turn: 0 }, report) {
                started.shared.stop();
                return Err(error); // dropping `started` joins the threads before
            }
        }
        drop(ready);
        for _ in 0..instances {
            // A thread that ends without an answer has panicked.
            let outcome = all_ready
                .recv()
                .unwrap_or_else(|_| Err(stopped("a thread of the engine panicked at start")));
            if let Err(error) = outcome {
                started.shared.stop();
                return Err(error);
            }
        }
        started.watchdog = Some(watch(&started.shared, spawn, run_timeout)?);
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

    /// Largest possible batch, as far as known.
    pub(crate) fn largest_batch(&self) -> usize {
        self.shared.largest
    }
}

impl Drop for Instances {
    fn drop(&mut self) {
        self.shared.drain();
        self.shared.wait_for_threads();
        if let Some((sender, thread)) = self.watchdog.take() {
            drop(sender);
            drop(thread.join());
        }
        for slot in &self.shared.slots {
            let thread = lock(slot).thread.take();
            // The panic hook and the callers have reported the panic.
            drop(thread.map(JoinHandle::join));
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
    pub(crate) async fn classify(&self, image: Image, lane: Lane) -> Result<Scores, InferError> {
        let room = self.room[lane as usize].acquire();
        let room = room.await.map_err(|_| ended())?;
        let (answer, answered) = oneshot::channel();
        let job = Job {
            image,
            since: Instant::now(),
            span: Span::current(),
            answer,
        };
        self.push(lane, job)?;
        room.forget(); // given back when an instance takes the batch
        // A job dropped without an answer was held by a thread that panicked, or was cleared by it.
        answered.await.unwrap_or_else(|_| Err(ended()))
    }

    pub(crate) fn flush(&self) {
        self.lock().lanes.flush();
        self.changed.notify_all();
    }

    pub(crate) fn flush_lane(&self, lane: Lane) {
        self.lock().lanes.flush_lane(lane);
        self.changed.notify_all();
    }

    fn push(&self, lane: Lane, job: Job) -> Result<(), InferError> {
        let mut state = self.lock();
        if state.phase != Phase::Open {
            return Err(ended());
        }
        let now = Instant::now();
        if lane == Lane::Live {
            state.pace.live(now);
        }
        // A waiting instance only has something to do when a batch begins or is full.
        if state.lanes.push(lane, job, now) {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Largest batch that may be tried now.
    fn largest(&self) -> usize {
        let state = self.lock();
        let learner = state.learner.as_ref().map(Learner::largest);
        learner.unwrap_or_else(|| state.lanes.max_batch())
    }

    /// Images in a full batch now.
    fn max_batch(&self) -> usize {
        self.lock().lanes.max_batch()
    }

    /// Limits full batches to this size, for a device without memory for more.
    fn limit_batches(&self, max_batch: usize, why: &InferError) {
        let mut state = self.lock();
        if max_batch < state.lanes.max_batch() {
            tracing::warn!("{why}; going on with batches of {max_batch}");
            state.lanes.set_max_batch(max_batch);
        }
        if let Some(learner) = &mut state.learner {
            learner.limit(max_batch);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Records the time of a `whole` batch: none of its images failed.
    fn took(&self, images: usize, time: Duration, whole: bool) {
        let mut state = self.lock();
        state.pace.took(images, time);
        let learner = state.learner.as_mut().filter(|_| whole);
        let Some(learned) = learner.and_then(|learner| learner.took(images, time)) else {
            return;
        };
        let was = state.lanes.max_batch();
        state.lanes.set_max_batch(learned);
        drop(state);
        self.changed.notify_all();
        tracing::info!("batches of {learned} instead of {was}: they have proved to be faster");
        if let Some(hear) = &self.learned {
            hear(learned);
        }
    }

    /// The next batch, or `None` at the end. While live work arrives, a batch with `is_cut` has no
    /// more images than the device finishes soon enough.
    fn next_batch(&self, is_cut: bool) -> Option<NextBatch> {
        let mut state = self.lock();
        let mut was_waiting = true;
        let batch = loop {
            let now = Instant::now();
            let most = match is_cut {
                true => state.pace.most(now),
                false => usize::MAX,
            };
            // No experiments on requests.
            let learner = state.learner.as_ref().filter(|_| most == usize::MAX);
            let tried = learner.and_then(Learner::wants);
            if let Some(batch) = state.lanes.take(now, most, tried) {
                if let Some(learner) = &mut state.learner
                    && tried == Some(batch.1.len())
                {
                    learner.trying();
                }
                // Another instance may wait for the part that was cut off.
                if most < usize::MAX && state.lanes.is_ready(now) {
                    self.changed.notify_one();
                }
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
        let nothing_waits = state.lanes.due().is_none();
        drop(state);
        let (lane, jobs) = batch?;
        self.room[lane as usize].add_permits(jobs.len());
        let is_single = lane == Lane::Live && jobs.len() == 1;
        Some(NextBatch {
            lane,
            jobs,
            was_waiting,
            is_lone: is_single && nothing_waits && self.is_idle(),
        })
    }

    /// Whether no instance is computing.
    fn is_idle(&self) -> bool {
        self.slots.iter().all(|slot| lock(slot).running.is_none())
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

    /// Records the batch that a thread begins to compute.
    fn begin(&self, seat: Seat, jobs: Vec<Job>) {
        lock(&self.slots[seat.number]).running = Some(Running {
            since: Instant::now(),
            jobs,
        });
    }

    /// The batch that a thread has computed; `None` if it was abandoned meanwhile.
    fn end(&self, seat: Seat) -> Option<Vec<Job>> {
        let mut slot = lock(&self.slots[seat.number]);
        if slot.turn != seat.turn {
            return None;
        }
        slot.running.take().map(|running| running.jobs)
    }

    /// Abandons a run that exceeds `limit`: its images are answered, its thread no longer counts,
    /// and the seat for its replacement is returned.
    fn give_up(&self, number: usize, limit: Duration) -> Option<Seat> {
        let mut slot = lock(&self.slots[number]);
        let is_late = |running: &mut Running| running.since.elapsed() > limit;
        let Running { jobs, .. } = slot.running.take_if(is_late)?;
        slot.turn += 1;
        slot.thread = None; // not joined
        let seat = Seat {
            number,
            turn: slot.turn,
        };
        self.lock().hung += 1;
        drop(slot);
        let error = InferError::new(
            InferErrorKind::Timeout,
            format_args!(
                "a batch of {} images was not computed in {limit:?}, and was given up",
                jobs.len()
            ),
        );
        tracing::error!("{error}");
        for job in jobs {
            job.answer.send(Err(error.clone())).ok();
        }
        Some(seat)
    }

    fn is_current(&self, seat: Seat) -> bool {
        lock(&self.slots[seat.number]).turn == seat.turn
    }

    /// Counts a thread that has ended, or was not started.
    fn leave(&self, seat: Seat) {
        let slot = lock(&self.slots[seat.number]);
        let mut state = self.lock();
        match slot.turn == seat.turn {
            true => state.alive -= 1,
            false => state.hung -= 1,
        }
        self.thread_ended.notify_all();
    }

    /// Waits until no instance has a thread; hung ones are not waited for.
    fn wait_for_threads(&self) {
        let alive = |state: &mut State| state.alive > 0;
        let ended = self.thread_ended.wait_while(self.lock(), alive);
        drop(ended.unwrap_or_else(PoisonError::into_inner));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// No code panics while it holds a lock, so a poisoned lock still protects valid state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
