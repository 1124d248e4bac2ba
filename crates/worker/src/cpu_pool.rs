use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

use crate::WorkerError;

/// Threads that may hang at once before the process gives up: each holds memory, and perhaps a
/// core.
const MOST_HUNG: usize = 16;

/// Threads for CPU work, each with its own reusable state.
///
/// At most twice as many tasks as threads are accepted, and as many live ones again; further
/// callers wait in [`CpuPool::run`], which keeps their data out of memory. Live work starts first,
/// and on its own threads while all others are busy. A thread that exceeds its time limit is
/// replaced, and ends when its work does. When the pool is dropped, the threads finish the accepted
/// tasks.
pub(crate) struct CpuPool<S> {
    room: Arc<Semaphore>,
    live_room: Arc<Semaphore>,
    crew: Crew<S>,
}

/// How a task ended without a result.
#[derive(Debug)]
pub(crate) enum Unfinished {
    /// It exceeded its time limit.
    TimedOut,
    /// It panicked, or the pool has failed.
    Failed(WorkerError),
}

type Run<S> = Box<dyn FnOnce(&mut S) + Send>;

struct Work<S> {
    run: Run<S>,
    /// Reports that it begins, and on which thread.
    begun: oneshot::Sender<Post>,
    fate: Arc<Fate>,
}

/// The purpose of a thread.
#[derive(Debug, Clone, Copy, Default)]
struct Post {
    /// The core that it is pinned to.
    core: Option<usize>,
    /// Whether it only takes live work.
    only_live: bool,
}

impl<S: Send + 'static> CpuPool<S> {
    /// Starts `threads` threads, each `pinned` to its own core if there are enough; `state` is
    /// called once per thread, and again after a panic.
    pub(crate) fn start(
        name: &str,
        threads: usize,
        pinned: bool,
        state: impl Fn() -> S + Send + Sync + 'static,
    ) -> Result<Self, WorkerError> {
        let capacity = 2 * threads;
        let crew = Crew {
            name: name.to_owned(),
            waiting: Arc::default(),
            state: Arc::new(state),
            hung: Arc::default(),
        };
        for number in 0..threads {
            crew.start_one(Post {
                core: pinned.then_some(number),
                only_live: false,
            })?;
        }
        Ok(Self {
            room: Arc::new(Semaphore::new(capacity)),
            live_room: Arc::new(Semaphore::new(capacity)),
            crew,
        })
    }

    /// Starts additional threads that only take live work, so that it never waits for other work to
    /// end. They cost nothing without such work.
    pub(crate) fn reserve(&self, threads: usize) -> Result<(), WorkerError> {
        let post = Post {
            core: None,
            only_live: true,
        };
        (0..threads).try_for_each(|_| self.crew.start_one(post))
    }

    /// Runs `work` on one of the threads and returns its result. The time `limit` starts when a
    /// thread begins.
    ///
    /// Cancel-safe in the sense that dropping the future never blocks: work that has not begun is
    /// skipped, and the result of work that has begun is discarded.
    ///
    /// # Errors
    /// [`Unfinished::TimedOut`] if `work` exceeds the limit; another thread then replaces its own.
    /// [`WorkerError::Panicked`] if `work` panics; its thread continues with a fresh state.
    /// [`WorkerError::Hung`] if too many threads hang.
    pub(crate) async fn run<R: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> Result<R, Unfinished> {
        self.run_in(false, limit, work).await
    }

    /// As [`CpuPool::run`], for live work.
    ///
    /// # Errors
    /// As [`CpuPool::run`].
    pub(crate) async fn run_live<R: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> Result<R, Unfinished> {
        self.run_in(true, limit, work).await
    }

    async fn run_in<R: Send + 'static>(
        &self,
        is_live: bool,
        limit: Duration,
        work: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> Result<R, Unfinished> {
        let room = if is_live { &self.live_room } else { &self.room };
        let room = Arc::clone(room).acquire_owned().await;
        let room = room.map_err(|_| panicked())?;
        let (reply, mut result) = oneshot::channel();
        let (begun, begins) = oneshot::channel();
        let fate = Arc::new(Fate::new(room, &self.crew.hung));
        let work = Work {
            // The caller was cancelled.
            run: Box::new(move |state: &mut S| drop(reply.send(work(state)))),
            begun,
            fate: Arc::clone(&fate),
        };
        self.crew.waiting.push(is_live, work);
        let post = begins.await.map_err(|_| panicked())?;
        if let Ok(result) = timeout(limit, &mut result).await {
            return Ok(result.map_err(|_| panicked())?);
        }
        if !fate.abandon() {
            return Ok(result.await.map_err(|_| panicked())?); // it has just ended
        }
        self.crew.replace_one(post)?;
        Err(Unfinished::TimedOut)
    }
}

impl<S> Drop for CpuPool<S> {
    fn drop(&mut self) {
        self.crew.waiting.close();
    }
}

impl From<WorkerError> for Unfinished {
    fn from(error: WorkerError) -> Self {
        Self::Failed(error)
    }
}

/// Tasks that no thread has begun. Bounded by the pool's room.
struct Waiting<S> {
    work: Mutex<WaitingWork<S>>,
    changed: Condvar,
}

struct WaitingWork<S> {
    live: VecDeque<Work<S>>,
    other: VecDeque<Work<S>>,
    closed: bool,
}

impl<S> Default for Waiting<S> {
    fn default() -> Self {
        Self {
            work: Mutex::new(WaitingWork {
                live: VecDeque::new(),
                other: VecDeque::new(),
                closed: false,
            }),
            changed: Condvar::new(),
        }
    }
}

impl<S> Waiting<S> {
    fn push(&self, is_live: bool, work: Work<S>) {
        let mut waiting = self.lock();
        match is_live {
            true => waiting.live.push_back(work),
            false => waiting.other.push_back(work),
        }
        drop(waiting);
        // The thread that is woken may only take live work.
        self.changed.notify_all();
    }

    /// Waits for work; `None` once the pool is gone and all work is taken.
    fn next(&self, only_live: bool) -> Option<Work<S>> {
        let mut waiting = self.lock();
        loop {
            let other = |waiting: &mut WaitingWork<S>| match only_live {
                true => None,
                false => waiting.other.pop_front(),
            };
            let next = waiting.live.pop_front();
            if let Some(work) = next.or_else(|| other(&mut waiting)) {
                return Some(work);
            }
            if waiting.closed {
                return None;
            }
            waiting = self
                .changed
                .wait(waiting)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, WaitingWork<S>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What threads are started with.
struct Crew<S> {
    name: String,
    waiting: Arc<Waiting<S>>,
    state: Arc<dyn Fn() -> S + Send + Sync>,
    /// Threads whose work was abandoned and has not ended.
    hung: Arc<Mutex<usize>>,
}

impl<S: Send + 'static> Crew<S> {
    fn start_one(&self, post: Post) -> Result<(), WorkerError> {
        let (waiting, state) = (Arc::clone(&self.waiting), Arc::clone(&self.state));
        let (started, start) = sync_channel(1);
        let work = move || {
            let pin = |number| trommel_infer::pin_thread(number, 1).is_ok();
            let is_placed = post.core.is_none_or(pin);
            if started.send(is_placed).is_ok() {
                work_until_closed(&waiting, post, &*state);
            }
        };
        thread::Builder::new()
            .name(self.name.clone())
            .spawn(work)
            .map_err(WorkerError::Thread)?;
        if start.recv() != Ok(true) {
            return Err(not_pinned());
        }
        Ok(())
    }

    /// Starts a thread to replace one that hangs.
    fn replace_one(&self, post: Post) -> Result<(), WorkerError> {
        let hung = *self.hung.lock().unwrap_or_else(PoisonError::into_inner);
        if hung > MOST_HUNG {
            return Err(WorkerError::Hung { threads: hung });
        }
        tracing::warn!(hung, pool = self.name, "replaced a thread that hangs");
        self.start_one(post)
    }
}

/// Whether a task has ended or was abandoned, whichever came first.
struct Fate {
    /// Room in the pool, until either.
    room: Mutex<Option<OwnedSemaphorePermit>>,
    hung: Arc<Mutex<usize>>,
}

impl Fate {
    fn new(room: OwnedSemaphorePermit, hung: &Arc<Mutex<usize>>) -> Self {
        Self {
            room: Mutex::new(Some(room)),
            hung: Arc::clone(hung),
        }
    }

    /// Ends it in time; `false` if it was abandoned, so that its thread is surplus.
    fn end(&self) -> bool {
        let mut hung = self.hung.lock().unwrap_or_else(PoisonError::into_inner);
        let in_time = self.take_room();
        if !in_time {
            *hung -= 1;
        }
        in_time
    }

    /// Abandons it; `false` if it has ended.
    fn abandon(&self) -> bool {
        let mut hung = self.hung.lock().unwrap_or_else(PoisonError::into_inner);
        let in_time = self.take_room();
        if in_time {
            *hung += 1;
        }
        in_time
    }

    fn take_room(&self) -> bool {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        room.take().is_some()
    }
}

fn not_pinned() -> WorkerError {
    let message = "the system keeps no thread on a core; unset preprocess.pin-threads";
    WorkerError::Thread(io::Error::new(io::ErrorKind::Unsupported, message))
}

fn work_until_closed<S>(waiting: &Waiting<S>, post: Post, fresh: &dyn Fn() -> S) {
    let mut state = fresh();
    while let Some(Work { run, begun, fate }) = waiting.next(post.only_live) {
        if begun.send(post).is_err() {
            fate.end();
            continue; // nobody waits for it any more
        }
        // The state is dropped after a panic, so nothing half-changed is seen again.
        let panicked = catch_unwind(AssertUnwindSafe(|| run(&mut state))).is_err();
        if !fate.end() {
            return; // another thread has its place
        }
        if panicked {
            state = fresh();
        }
    }
}

fn panicked() -> WorkerError {
    WorkerError::Panicked {
        what: "a CPU worker thread",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(600);
    const SHORT: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn each_thread_keeps_its_state_and_all_work_is_answered() {
        let pool = CpuPool::start("test", 2, true, || 0_u64).unwrap();
        let sums = futures::future::join_all((0..100_u64).map(|n| {
            pool.run(LONG, move |count| {
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
            let error = pool.run(LONG, |()| panic!("on purpose")).await.unwrap_err();
            let Unfinished::Failed(error) = error else {
                panic!("a panic took no time");
            };
            assert!(matches!(error, WorkerError::Panicked { .. }), "{error}");
        }
        assert_eq!(pool.run(LONG, |()| 5).await.unwrap(), 5);
    }

    /// R20: a hung thread costs its image alone.
    #[tokio::test]
    async fn a_thread_that_hangs_is_replaced_and_its_room_is_free() {
        let pool = CpuPool::start("test", 1, false, || ()).unwrap();
        let mut held = Vec::new();
        // More than the pool has room for.
        for _ in 0..5 {
            let (release, hold) = sync_channel::<()>(1);
            held.push(release);
            let hung = pool.run(SHORT, move |()| hold.recv().is_err()).await;
            assert!(matches!(hung, Err(Unfinished::TimedOut)), "{hung:?}");
            assert_eq!(pool.run(LONG, |()| 5).await.unwrap(), 5);
        }
        let hung = || *pool.crew.hung.lock().unwrap();
        assert_eq!(hung(), 5);
        // Work that ends after all is no longer counted, and its thread takes no more.
        let (done, ended) = sync_channel::<()>(0);
        let (release, hold) = sync_channel::<()>(1);
        let late = move |_: &mut ()| {
            let _released = hold.recv();
            drop(done);
        };
        assert!(pool.run(SHORT, late).await.is_err());
        drop((release, held));
        assert!(ended.recv().is_err());
        while hung() > 0 {
            thread::yield_now();
        }
        assert_eq!(pool.run(LONG, |()| 5).await.unwrap(), 5);
    }

    #[tokio::test]
    async fn a_pool_with_too_many_hung_threads_says_so() {
        let pool = CpuPool::start("test", 2, false, || ()).unwrap();
        let mut held = Vec::new();
        for number in 0..=MOST_HUNG {
            let (release, hold) = sync_channel::<()>(1);
            held.push(release);
            let hung = pool.run(SHORT, move |()| hold.recv().is_err()).await;
            match hung {
                Err(Unfinished::TimedOut) => assert!(number < MOST_HUNG),
                Err(Unfinished::Failed(WorkerError::Hung { threads })) => {
                    assert_eq!((number, threads), (MOST_HUNG, MOST_HUNG + 1));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// A pool of one thread that is held, and what holds it.
    async fn held() -> (Arc<CpuPool<()>>, std::sync::mpsc::SyncSender<()>) {
        let pool = Arc::new(CpuPool::start("test", 1, false, || ()).unwrap());
        let (release, hold) = sync_channel::<()>(1);
        let (begun, begins) = oneshot::channel();
        let held = Arc::clone(&pool);
        tokio::spawn(async move {
            let work = move |_: &mut ()| {
                let _told = begun.send(());
                let _released = hold.recv();
            };
            held.run(LONG, work).await.unwrap();
        });
        begins.await.unwrap();
        (pool, release)
    }

    /// A call that is polled, so that its work is taken in.
    macro_rules! taken_in {
        ($call:expr) => {{
            let mut call = Box::pin($call);
            assert!(futures::poll!(&mut call).is_pending());
            call
        }};
    }

    #[tokio::test]
    async fn live_work_is_begun_first() {
        let (pool, release) = held().await;
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |name: &'static str| {
            let order = Arc::clone(&order);
            move |_: &mut ()| order.lock().unwrap().push(name)
        };
        let bulk = taken_in!(pool.run(LONG, note("bulk")));
        let live = taken_in!(pool.run_live(LONG, note("live")));
        release.send(()).unwrap();
        bulk.await.unwrap();
        live.await.unwrap();
        assert_eq!(*order.lock().unwrap(), ["live", "bulk"]);
    }

    #[tokio::test]
    async fn live_work_has_a_thread_while_other_work_holds_all() {
        let (pool, release) = held().await;
        pool.reserve(1).unwrap();
        let bulk = taken_in!(pool.run(LONG, |()| 7));
        assert_eq!(pool.run_live(LONG, |()| 5).await.unwrap(), 5);
        let mut bulk = bulk;
        assert!(
            futures::poll!(&mut bulk).is_pending(),
            "it is for live work"
        );
        release.send(()).unwrap();
        assert_eq!(bulk.await.unwrap(), 7);
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_is_not_begun() {
        let (pool, release) = held().await;
        let done = Arc::new(Mutex::new(false));
        let note = Arc::clone(&done);
        let left = taken_in!(pool.run_live(LONG, move |()| *note.lock().unwrap() = true));
        drop(left);
        release.send(()).unwrap();
        pool.run(LONG, |()| ()).await.unwrap();
        assert!(!*done.lock().unwrap());
        assert_eq!(pool.live_room.available_permits(), 2);
    }
}
