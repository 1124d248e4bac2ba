use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};
use trommel_types::Message;

use crate::delivery::Handle;
use crate::room::{Room, Units};
use crate::{
    Delivery, Disposition, KeepAlive, Origin, Published, Queue, QueueError, QueueStats, metrics,
};

/// Limits of a [`MemoryQueue`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryQueueConfig {
    /// Most messages held at once, waiting and in flight; at least 1.
    pub capacity: usize,
    /// Approximate limit of their bytes; one message is always held.
    pub max_bytes: u64,
    /// Time a delivery may stay unsettled before it is repeated.
    pub ack_wait: Duration,
    /// Time from delivery after which a delivery is no longer extended: work that hangs is
    /// redelivered elsewhere.
    pub max_work: Duration,
    /// Number of recent ids remembered for deduplication.
    pub dedupe_window: usize,
    /// The publishing stage, as named in metrics.
    pub stage: &'static str,
}

impl Default for MemoryQueueConfig {
    fn default() -> Self {
        Self {
            capacity: 1024,
            max_bytes: u64::MAX,
            ack_wait: Duration::from_secs(60),
            max_work: crate::MAX_WORK,
            dedupe_window: 16_384,
            stage: "unknown",
        }
    }
}

/// A work queue inside one process. Its contents end with the process.
///
/// Deadlines are checked by pulls, so an idle queue costs nothing.
pub struct MemoryQueue<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    config: MemoryQueueConfig,
    state: Mutex<State<T>>,
    room: Room,
    /// Notified when a message becomes deliverable, or a deadline moves forward.
    changed: Notify,
}

struct State<T> {
    next_sequence: u64,
    waiting: VecDeque<Entry<T>>,
    delayed: BTreeMap<(Instant, u64), Entry<T>>,
    in_flight: HashMap<u64, InFlight<T>>,
    /// `(deadline, sequence)` of all messages in flight.
    deadlines: BTreeSet<(Instant, u64)>,
    ids: HashSet<Arc<str>>,
    /// `ids` from the oldest to the newest.
    ids_by_age: VecDeque<Arc<str>>,
    dead_letters: u64,
}

struct Entry<T> {
    sequence: u64,
    message: Arc<T>,
    units: Units,
    origin: Origin,
    deliveries: u32,
}

/// What a delivery is made of.
struct HandedOut<T> {
    sequence: u64,
    attempt: u32,
    message: Arc<T>,
    origin: Origin,
}

struct InFlight<T> {
    entry: Entry<T>,
    deadline: Instant,
    /// No extensions after this time.
    extended_until: Instant,
    kept_alive: u32,
}

impl<T> InFlight<T> {
    /// Whether a guard keeps it from expiring.
    fn is_kept(&self, now: Instant) -> bool {
        self.kept_alive > 0 && now < self.extended_until
    }
}

impl<T: Message> MemoryQueue<T> {
    /// An empty queue.
    pub fn new(config: MemoryQueueConfig) -> Self {
        let room = Room::new(config.capacity, config.max_bytes);
        let state = State {
            next_sequence: 0,
            waiting: VecDeque::new(),
            delayed: BTreeMap::new(),
            in_flight: HashMap::new(),
            deadlines: BTreeSet::new(),
            ids: HashSet::new(),
            ids_by_age: VecDeque::new(),
            dead_letters: 0,
        };
        let shared = Shared {
            config,
            state: Mutex::new(state),
            room,
            changed: Notify::new(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }
}

#[async_trait]
impl<T: Message> Queue<T> for MemoryQueue<T> {
    async fn publish(&self, id: &str, message: T) -> Result<Published, QueueError> {
        // A duplicate needs no room, so it must not wait for any.
        if self.shared.lock().ids.contains(id) {
            return Ok(Published::Duplicate);
        }
        let units = self.shared.room.units(message.approx_bytes());
        let room = match self.shared.room.try_take(units) {
            Some(room) => room,
            None => {
                let full = Instant::now();
                let room = self.shared.room.take(units).await;
                metrics::waited_for_room(self.shared.config.stage, full.elapsed());
                room
            }
        };
        let window = self.shared.config.dedupe_window;
        let published = self.shared.lock().add(id, message, units, window);
        if published == Published::Stored {
            room.keep(); // given back when the message is settled for good
            self.shared.changed.notify_one();
        }
        Ok(published)
    }

    async fn pull(&self, limit: usize, expiry: Duration) -> Result<Vec<Delivery<T>>, QueueError> {
        let end = Instant::now() + expiry;
        loop {
            let mut changed = std::pin::pin!(self.shared.changed.notified());
            changed.as_mut().enable(); // from here on no change goes unseen
            let now = Instant::now();
            let (entries, more, next_event) = {
                let mut state = self.shared.lock();
                state.revive(now, self.shared.config.ack_wait);
                let entries = state.deliver(limit, now, &self.shared.config);
                (entries, !state.waiting.is_empty(), state.next_event())
            };
            if more {
                self.shared.changed.notify_one(); // one notice may stand for many changes
            }
            if !entries.is_empty() {
                return Ok(entries
                    .into_iter()
                    .map(|entry| self.delivery(entry))
                    .collect());
            }
            if now >= end {
                return Ok(Vec::new());
            }
            let wake = next_event.map_or(end, |event| event.min(end));
            // Timed out or not: check again.
            drop(timeout_at(wake, changed).await);
        }
    }

    async fn stats(&self) -> Result<QueueStats, QueueError> {
        let state = self.shared.lock();
        Ok(QueueStats {
            waiting: (state.waiting.len() + state.delayed.len()) as u64,
            in_flight: state.in_flight.len() as u64,
            dead_letters: state.dead_letters,
        })
    }
}

impl<T: Message> MemoryQueue<T> {
    fn delivery(&self, handed_out: HandedOut<T>) -> Delivery<T> {
        let HandedOut {
            sequence,
            attempt,
            message,
            origin,
        } = handed_out;
        let shared = Arc::clone(&self.shared);
        Delivery::new(
            message,
            attempt,
            origin,
            Box::new(MemoryHandle {
                shared,
                sequence,
                attempt,
            }),
        )
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // No code that runs under the lock panics in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> State<T> {
    fn add(&mut self, id: &str, message: T, units: Units, dedupe_window: usize) -> Published {
        let id: Arc<str> = id.into();
        if !self.ids.insert(Arc::clone(&id)) {
            return Published::Duplicate;
        }
        self.ids_by_age.push_back(id);
        if self.ids_by_age.len() > dedupe_window
            && let Some(oldest) = self.ids_by_age.pop_front()
        {
            self.ids.remove(&oldest);
        }
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.waiting.push_back(Entry {
            sequence,
            message: Arc::new(message),
            units,
            origin: Origin::here(),
            deliveries: 0,
        });
        Published::Stored
    }

    /// Makes messages deliverable again whose delay or deadline has passed; oldest first, before
    /// all others.
    fn revive(&mut self, now: Instant, ack_wait: Duration) {
        let mut revived = Vec::new();
        while let Some(due) = self
            .delayed
            .first_entry()
            .filter(|first| first.key().0 <= now)
        {
            revived.push(due.remove());
        }
        while let Some(&(deadline, sequence)) = self.deadlines.first()
            && deadline <= now
        {
            self.deadlines.pop_first();
            let Some(mut expired) = self.in_flight.remove(&sequence) else {
                continue;
            };
            if expired.is_kept(now) {
                expired.deadline = now + ack_wait;
                self.deadlines.insert((expired.deadline, sequence));
                self.in_flight.insert(sequence, expired);
            } else {
                revived.push(expired.entry);
            }
        }
        revived.sort_unstable_by_key(|entry| entry.sequence);
        for entry in revived.into_iter().rev() {
            self.waiting.push_front(entry);
        }
    }

    fn deliver(
        &mut self,
        limit: usize,
        now: Instant,
        config: &MemoryQueueConfig,
    ) -> Vec<HandedOut<T>> {
        let deadline = now + config.ack_wait;
        let count = limit.min(self.waiting.len());
        let mut delivered = Vec::with_capacity(count);
        for mut entry in self.waiting.drain(..count) {
            entry.deliveries += 1;
            delivered.push(HandedOut {
                sequence: entry.sequence,
                attempt: entry.deliveries,
                message: Arc::clone(&entry.message),
                origin: entry.origin.clone(),
            });
            self.deadlines.insert((deadline, entry.sequence));
            let sequence = entry.sequence;
            self.in_flight.insert(
                sequence,
                InFlight {
                    entry,
                    deadline,
                    extended_until: now + config.max_work,
                    kept_alive: 0,
                },
            );
        }
        delivered
    }

    /// When `revive` will next have work.
    fn next_event(&self) -> Option<Instant> {
        let delayed = self.delayed.first_key_value().map(|((due, _), _)| *due);
        let deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
        delayed.into_iter().chain(deadline).min()
    }

    /// The delivery `(sequence, attempt)`, if it is still valid.
    fn valid(
        &mut self,
        sequence: u64,
        attempt: u32,
        now: Instant,
    ) -> Result<&mut InFlight<T>, QueueError> {
        self.in_flight
            .get_mut(&sequence)
            .filter(|found| found.entry.deliveries == attempt)
            .filter(|found| found.deadline > now || found.is_kept(now))
            .ok_or_else(|| QueueError::expired(attempt))
    }

    fn set_deadline(&mut self, sequence: u64, deadline: Instant) {
        if let Some(found) = self.in_flight.get_mut(&sequence) {
            self.deadlines.remove(&(found.deadline, sequence));
            found.deadline = deadline;
            self.deadlines.insert((deadline, sequence));
        }
    }
}

struct MemoryHandle<T> {
    shared: Arc<Shared<T>>,
    sequence: u64,
    attempt: u32,
}

#[async_trait]
impl<T: Message> Handle for MemoryHandle<T> {
    async fn settle(self: Box<Self>, disposition: Disposition) -> Result<(), QueueError> {
        let now = Instant::now();
        let mut state = self.shared.lock();
        state.valid(self.sequence, self.attempt, now)?;
        if let Some(settled) = state.in_flight.remove(&self.sequence) {
            state.deadlines.remove(&(settled.deadline, self.sequence));
            match disposition {
                Disposition::Done => self.shared.room.give_back(settled.entry.units),
                Disposition::DeadLetter { .. } => {
                    state.dead_letters += 1;
                    self.shared.room.give_back(settled.entry.units);
                }
                Disposition::Retry { after } => {
                    state
                        .delayed
                        .insert((now + after, self.sequence), settled.entry);
                    self.shared.changed.notify_one();
                }
            }
        }
        Ok(())
    }

    async fn extend(&self) -> Result<(), QueueError> {
        let now = Instant::now();
        let mut state = self.shared.lock();
        let found = state.valid(self.sequence, self.attempt, now)?;
        if now >= found.extended_until {
            return Err(QueueError::expired(self.attempt));
        }
        state.set_deadline(self.sequence, now + self.shared.config.ack_wait);
        Ok(())
    }

    fn keep_alive(&self) -> KeepAlive {
        let mut state = self.shared.lock();
        if let Ok(valid) = state.valid(self.sequence, self.attempt, Instant::now()) {
            valid.kept_alive += 1;
        }
        let shared = Arc::clone(&self.shared);
        KeepAlive::new(Kept {
            shared,
            sequence: self.sequence,
            attempt: self.attempt,
        })
    }
}

/// Ends a delivery's extension when dropped.
struct Kept<T> {
    shared: Arc<Shared<T>>,
    sequence: u64,
    attempt: u32,
}

impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let now = Instant::now();
        if let Ok(valid) = state.valid(self.sequence, self.attempt, now)
            && valid.kept_alive > 0
        {
            valid.kept_alive -= 1;
            state.set_deadline(self.sequence, now + self.shared.config.ack_wait);
        }
    }
}
