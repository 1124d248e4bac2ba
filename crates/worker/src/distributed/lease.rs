//! The right to commit rows of a job and model: one sink at a time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use trommel_queue::{Kv, QueueError};

use crate::distributed::registry::json;

/// What the broker holds of a lease.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    /// The worker that holds it; empty when it was given back.
    owner: String,
}

/// A lease in the broker, renewed by compare-and-set.
///
/// It tells sinks who is to work, so that two do not waste each other's time. It does not make
/// commits safe: that is the part number's work, or the claim's, or the database's.
#[derive(Clone)]
pub(crate) struct Lease {
    shared: Arc<Shared>,
}

struct Shared {
    kv: Kv,
    key: String,
    owner: String,
    ttl: Duration,
    held: Mutex<Held>,
}

struct Held {
    revision: u64,
    until: Instant,
}

impl Lease {
    /// Whether this process may still go on. Goes by a clock that does not stop while the process
    /// is stopped.
    pub(crate) fn is_held(&self) -> bool {
        Instant::now() < self.held().until
    }

    /// Holds on to the lease; `false` when another has it.
    pub(crate) async fn renew(&self) -> Result<bool, QueueError> {
        // Counted from before the request: the others count from when they see it.
        let (asked, revision) = (Instant::now(), self.held().revision);
        let Shared {
            kv,
            key,
            owner,
            ttl,
            ..
        } = &*self.shared;
        let stored = Stored {
            owner: owner.clone(),
        };
        let Some(revision) = kv.update(key, json(&stored), revision).await? else {
            self.held().until = asked;
            return Ok(false);
        };
        *self.held() = Held {
            revision,
            until: asked + *ttl,
        };
        Ok(true)
    }

    /// Gives the lease back, so that another need not wait until it runs out.
    pub(crate) async fn release(self) -> Result<(), QueueError> {
        let revision = self.held().revision;
        let stored = Stored {
            owner: String::new(),
        };
        self.held().until = Instant::now();
        let Shared { kv, key, .. } = &*self.shared;
        kv.update(key, json(&stored), revision).await?;
        Ok(())
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.shared
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes leases that are free or have run out.
///
/// A lease has run out when its revision has stayed the same for `ttl` by this process's own
/// clock, so that clocks need not agree.
pub(crate) struct Leases {
    kv: Kv,
    owner: String,
    ttl: Duration,
    seen: HashMap<String, (u64, Instant)>,
}

impl Leases {
    pub(crate) fn new(kv: Kv, owner: &str, ttl: Duration) -> Self {
        Self {
            kv,
            owner: owner.to_owned(),
            ttl,
            seen: HashMap::new(),
        }
    }

    /// Takes the lease of this key if nobody else holds it.
    pub(crate) async fn take(&mut self, key: &str) -> Result<Option<Lease>, QueueError> {
        let asked = Instant::now();
        let mine = json(&Stored {
            owner: self.owner.clone(),
        });
        let revision = match self.kv.get(key).await? {
            None => self.kv.create(key, mine).await?,
            Some(entry) => {
                let is_free = serde_json::from_slice(&entry.value)
                    .is_ok_and(|stored: Stored| stored.owner.is_empty());
                if !is_free && !self.has_run_out(key, entry.revision, asked) {
                    return Ok(None);
                }
                self.kv.update(key, mine, entry.revision).await?
            }
        };
        let Some(revision) = revision else {
            return Ok(None);
        };
        self.seen.remove(key);
        let shared = Shared {
            kv: self.kv.clone(),
            key: key.to_owned(),
            owner: self.owner.clone(),
            ttl: self.ttl,
            held: Mutex::new(Held {
                revision,
                until: asked + self.ttl,
            }),
        };
        Ok(Some(Lease {
            shared: Arc::new(shared),
        }))
    }

    fn has_run_out(&mut self, key: &str, revision: u64, now: Instant) -> bool {
        let seen = self.seen.entry(key.to_owned()).or_insert((revision, now));
        if seen.0 != revision {
            *seen = (revision, now);
        }
        now.duration_since(seen.1) >= self.ttl
    }
}
