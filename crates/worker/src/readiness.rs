use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use trommel_queue::Broker;

use crate::distributed::Repository;

/// Whether a process is at work, for those who ask from outside. Asking is cheap and never waits.
#[derive(Clone, Default)]
pub struct Readiness {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    at_work: AtomicBool,
    stopping: AtomicBool,
    /// Models that are being loaded and warmed up.
    loading: AtomicUsize,
    over_broker: OnceLock<(Broker, Arc<Repository>)>,
    /// What else is needed, as a sentence of what is missing without it.
    needs: Mutex<Vec<(String, Need)>>,
}

impl Readiness {
    /// What is still missing, as sentences for people; empty when the process is at work: its queues
    /// are bound, the models that it was asked for are warm, the broker and the model repository can
    /// be reached.
    pub fn missing(&self) -> Vec<String> {
        let inner = &*self.inner;
        let mut missing = Vec::new();
        let mut say = |is_missing: bool, what: String| {
            if is_missing {
                missing.push(what);
            }
        };
        say(!inner.at_work.load(Relaxed), "it is starting".to_owned());
        say(inner.stopping.load(Relaxed), "it is stopping".to_owned());
        let loading = inner.loading.load(Relaxed);
        say(loading > 0, format!("models being loaded: {loading}"));
        if let Some((broker, repository)) = inner.over_broker.get() {
            say(!broker.is_connected(), "the broker is away".to_owned());
            say(
                !repository.is_reachable(),
                "the model repository cannot be read".to_owned(),
            );
        }
        let needs = inner.needs.lock().unwrap_or_else(PoisonError::into_inner);
        for (sentence, need) in &*needs {
            say(!need.0.load(Relaxed), sentence.clone());
        }
        missing
    }

    /// From here on the process is at work.
    pub fn begin(&self) {
        self.inner.at_work.store(true, Relaxed);
    }

    /// From here on the process finishes what it has begun, and takes nothing more.
    pub fn stop(&self) {
        self.inner.stopping.store(true, Relaxed);
    }

    pub(crate) fn needs(&self, broker: Broker, repository: Arc<Repository>) {
        // Said once, by the worker that owns this.
        drop(self.inner.over_broker.set((broker, repository)));
    }

    /// Not ready until a need is met, and whenever it is not any more; `sentence` says what is missing then.
    pub(crate) fn need(&self, sentence: String) -> Need {
        let need = Need::default();
        let mut needs = self
            .inner
            .needs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        needs.push((sentence, need.clone()));
        need
    }

    /// Not ready for as long as the guard lives.
    pub(crate) fn loading(&self) -> Loading {
        self.inner.loading.fetch_add(1, Relaxed);
        Loading(Arc::clone(&self.inner))
    }
}

/// Something outside of the process that it needs to be ready. Missing at first.
#[derive(Clone, Default)]
pub(crate) struct Need(Arc<AtomicBool>);

impl Need {
    /// Whether it is there.
    pub(crate) fn set(&self, is_met: bool) {
        self.0.store(is_met, Relaxed);
    }
}

/// A model that is being loaded.
pub(crate) struct Loading(Arc<Inner>);

impl Drop for Loading {
    fn drop(&mut self) {
        self.0.loading.fetch_sub(1, Relaxed);
    }
}
