use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use trommel_worker::Readiness;

/// A runtime without a heartbeat for this long is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(30);
const BEAT: Duration = Duration::from_secs(1);

/// The health of this process.
pub(crate) struct Health {
    start: Instant,
    /// Milliseconds from the start to the last heartbeat of the work's runtime; 0 before the first.
    last_beat: AtomicU64,
    readiness: Mutex<Option<Readiness>>,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            last_beat: AtomicU64::new(0),
            readiness: Mutex::default(),
        }
    }
}

impl Health {
    /// Sends heartbeats from the current runtime while it lives.
    pub(crate) fn watch(self: &std::sync::Arc<Self>) {
        let health = std::sync::Arc::clone(self);
        tokio::spawn(async move {
            loop {
                let now = health.start.elapsed().as_millis();
                health
                    .last_beat
                    .store(u64::try_from(now).unwrap_or(u64::MAX), Relaxed);
                tokio::time::sleep(BEAT).await;
            }
        });
    }

    /// From now on `/readyz` reports `readiness`.
    pub(crate) fn has(&self, readiness: Readiness) {
        *self.readiness() = Some(readiness);
    }

    /// Why the process has to be restarted, if it has to.
    pub(super) fn stuck(&self) -> Option<String> {
        let beat = Duration::from_millis(self.last_beat.load(Relaxed));
        let since = self.start.elapsed().saturating_sub(beat);
        (since > STUCK_AFTER).then(|| format!("the runtime has not run for {} s", since.as_secs()))
    }

    /// Unmet conditions of readiness; empty if the process is ready.
    pub(super) fn missing(&self) -> Vec<String> {
        match &*self.readiness() {
            Some(readiness) => readiness.missing(),
            None => vec!["it is starting".to_owned()],
        }
    }

    fn readiness(&self) -> std::sync::MutexGuard<'_, Option<Readiness>> {
        self.readiness
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
