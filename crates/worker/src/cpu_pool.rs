use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tokio::sync::{Semaphore, oneshot};

use crate::WorkerError;

type Work<S> = Box<dyn FnOnce(&mut S) + Send>;

/// Threads for work that computes, each with a state of its own that it reuses.
///
/// At most twice as many pieces of work as threads are taken in; further callers wait in
/// [`CpuPool::run`], which keeps what they hold out of memory. Dropping the pool lets the threads
/// finish what was taken in.
pub(crate) struct CpuPool<S> {
    sender: SyncSender<Work<S>>,
    room: Arc<Semaphore>,
}

impl<S: Send + 'static> CpuPool<S> {
    /// Starts `threads` threads, each `pinned` to a core of its own as far as there are enough;
    /// `state` is called once for each, and again after a panic.
    pub(crate) fn start(
        name: &str,
        threads: usize,
        pinned: bool,
        state: impl Fn() -> S + Send + Clone + 'static,
    ) -> Result<Self, WorkerError> {
        let capacity = 2 * threads;
        let (sender, receiver) = sync_channel(capacity);
        let receiver = Arc::new(Mutex::new(receiver));
        let mut cores = if pinned { cores()? } else { Vec::new() }
            .into_iter()
            .cycle();
        for number in 0..threads {
            let (receiver, state, core) = (Arc::clone(&receiver), state.clone(), cores.next());
            let (started, start) = sync_channel(1);
            let work = move || {
                let is_placed = core.is_none_or(core_affinity::set_for_current);
                if started.send(is_placed).is_ok() {
                    work_until_closed(&receiver, state);
                }
            };
            thread::Builder::new()
                .name(format!("{name}-{number}"))
                .spawn(work)
                .map_err(WorkerError::Thread)?;
            if start.recv() != Ok(true) {
                return Err(not_pinned());
            }
        }
        Ok(Self {
            sender,
            room: Arc::new(Semaphore::new(capacity)),
        })
    }

    /// Runs `work` on one of the threads and returns what it returns.
    ///
    /// Cancel-safe in the sense that dropping the future never blocks; work that was taken in still
    /// runs, and its result is dropped.
    ///
    /// # Errors
    /// [`WorkerError::Panicked`] when `work` panics; its thread goes on with a fresh state.
    pub(crate) async fn run<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> Result<R, WorkerError> {
        let room = Arc::clone(&self.room)
            .acquire_owned()
            .await
            .map_err(|_| panicked())?;
        let (reply, result) = oneshot::channel();
        let work = Box::new(move |state: &mut S| {
            let _room = room;
            // Nobody waits any more when the caller was cancelled.
            drop(reply.send(work(state)));
        });
        // The semaphore counts what the channel holds, so there is room and this does not block.
        self.sender.try_send(work).map_err(|_| panicked())?;
        result.await.map_err(|_| panicked())
    }
}

/// The cores that this process may use.
fn cores() -> Result<Vec<core_affinity::CoreId>, WorkerError> {
    core_affinity::get_core_ids()
        .filter(|cores| !cores.is_empty())
        .ok_or_else(not_pinned)
}

fn not_pinned() -> WorkerError {
    let message = "the system keeps no thread on a core; unset preprocess.pin-threads";
    WorkerError::Thread(io::Error::new(io::ErrorKind::Unsupported, message))
}

fn work_until_closed<S>(receiver: &Mutex<Receiver<Work<S>>>, fresh: impl Fn() -> S) {
    let mut state = fresh();
    while let Some(work) = next(receiver) {
        // The state is thrown away after a panic, so nothing half-changed is seen again.
        if catch_unwind(AssertUnwindSafe(|| work(&mut state))).is_err() {
            state = fresh();
        }
    }
}

fn next<S>(receiver: &Mutex<Receiver<Work<S>>>) -> Option<Work<S>> {
    receiver
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .recv()
        .ok()
}

fn panicked() -> WorkerError {
    WorkerError::Panicked {
        what: "a CPU worker thread",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_thread_keeps_its_state_and_all_work_is_answered() {
        let pool = CpuPool::start("test", 2, true, || 0_u64).unwrap();
        let sums = futures::future::join_all((0..100_u64).map(|n| {
            pool.run(move |count| {
                *count += 1;
                n
            })
        }))
        .await;
        let sum: u64 = sums.into_iter().map(Result::unwrap).sum();
        assert_eq!(sum, 4950);
    }

    #[tokio::test]
    async fn a_panic_is_an_error_for_its_caller_alone() {
        let pool = CpuPool::start("test", 2, false, || ()).unwrap();
        for _ in 0..3 {
            let error = pool.run(|()| panic!("on purpose")).await.unwrap_err();
            assert!(matches!(error, WorkerError::Panicked { .. }), "{error}");
        }
        assert_eq!(pool.run(|()| 5).await.unwrap(), 5);
    }
}
