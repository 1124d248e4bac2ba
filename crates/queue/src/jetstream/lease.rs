use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_nats::{Client, Subject};
use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tracing::warn;

use super::connect::Link;
use crate::QueueError;

/// Until when a delivery is ours, by this machine's clock. It ends slightly before the server's
/// deadline, so that nothing is reported about a delivery that has been repeated.
#[derive(Debug)]
pub(super) struct Lease {
    deadline: Mutex<Instant>,
    term: Duration,
    /// No extensions after this time.
    extended_until: Instant,
}

impl Lease {
    /// A lease from now on, which can be extended until `max_work` has passed.
    pub(super) fn new(ack_wait: Duration, max_work: Duration) -> Self {
        let margin = (ack_wait / 20).min(Duration::from_secs(1));
        let term = ack_wait - margin;
        let now = Instant::now();
        Self {
            deadline: Mutex::new(now + term),
            term,
            extended_until: now + max_work,
        }
    }

    pub(super) fn deadline(&self) -> Instant {
        *lock(&self.deadline)
    }

    /// Remaining time; zero once it has ended.
    pub(super) fn left(&self) -> Duration {
        self.deadline().saturating_duration_since(Instant::now())
    }

    /// Whether less than `share` of it remains.
    pub(super) fn is_below(&self, share: f64) -> bool {
        self.left() < self.term.mul_f64(share)
    }

    pub(super) fn check(&self, attempt: u32) -> Result<(), QueueError> {
        if self.left().is_zero() {
            return Err(QueueError::expired(attempt));
        }
        Ok(())
    }

    /// Whether it may be extended: work that takes longer is hanging.
    pub(super) fn may_be_extended(&self) -> bool {
        Instant::now() < self.extended_until
    }

    /// Restarts it, as of the time when the server was asked.
    pub(super) fn renew(&self, asked_at: Instant) {
        let mut deadline = lock(&self.deadline);
        // An ended lease stays ended: the message may belong to another delivery.
        if *deadline > Instant::now() {
            *deadline = (*deadline).max(asked_at + self.term);
        }
    }
}

/// The deliveries kept alive, and the single task that does so for a queue.
pub(super) struct Keeper {
    client: Client,
    link: Link,
    kept: Mutex<HashMap<u64, Kept>>,
    next: AtomicU64,
    added: Notify,
}

struct Kept {
    reply: Subject,
    lease: Arc<Lease>,
}

impl Keeper {
    /// Starts the task; it ends when the keeper and all guards are gone.
    pub(super) fn start(client: Client, link: Link, ack_wait: Duration) -> Arc<Self> {
        let keeper = Arc::new(Self {
            client,
            link,
            kept: Mutex::default(),
            next: AtomicU64::new(0),
            added: Notify::new(),
        });
        tokio::spawn(keep(Arc::downgrade(&keeper), ack_wait / 6));
        keeper
    }

    /// Keeps a delivery alive until the guard is dropped.
    pub(super) fn guard(self: &Arc<Self>, reply: Subject, lease: Arc<Lease>) -> KeptGuard {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let late = lease.is_below(0.7);
        lock(&self.kept).insert(id, Kept { reply, lease });
        if late {
            self.added.notify_one();
        }
        KeptGuard {
            keeper: Arc::clone(self),
            id,
        }
    }

    /// Extends every delivery that has used a third of its time.
    async fn extend_due(&self) {
        if !self.link.is_up() {
            return; // sent to a dead connection, it would only arrive too late
        }
        let due: Vec<_> = {
            let mut kept = lock(&self.kept);
            kept.retain(|_, kept| {
                let expired = kept.lease.left().is_zero();
                if expired || kept.lease.may_be_extended() {
                    return !expired;
                }
                warn!(reply = %kept.reply, "work takes too long and is left to another delivery");
                false
            });
            let due = kept.values().filter(|kept| kept.lease.is_below(0.7));
            due.map(|kept| (kept.reply.clone(), Arc::clone(&kept.lease)))
                .collect()
        };
        for (reply, lease) in due {
            let asked_at = Instant::now();
            let progress = Bytes::from_static(b"+WPI");
            if self.client.publish(reply, progress).await.is_ok() {
                lease.renew(asked_at);
            }
        }
    }
}

async fn keep(keeper: Weak<Keeper>, period: Duration) {
    loop {
        let Some(alive) = keeper.upgrade() else {
            return;
        };
        alive.extend_due().await;
        // Held only for one period: dropping the last owner ends this task.
        let added = tokio::time::timeout(period, alive.added.notified()).await;
        drop(alive);
        if added.is_ok() {
            sleep(Duration::from_millis(1)).await; // many are added at once
        }
    }
}

/// Ends the extension of one delivery when dropped.
pub(super) struct KeptGuard {
    keeper: Arc<Keeper>,
    id: u64,
}

impl Drop for KeptGuard {
    fn drop(&mut self) {
        lock(&self.keeper.kept).remove(&self.id);
    }
}

/// No code that runs under these locks panics in the middle of a change.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
