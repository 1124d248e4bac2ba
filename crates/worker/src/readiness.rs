use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use trommel_queue::Broker;

use crate::distributed::Repository;

/// Whether a process is ready. Cheap and never blocks.
#[derive(Clone, Default)]
pub struct Readiness {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    at_work: AtomicBool,
    stopping: AtomicBool,
    /// Models being loaded and warmed up.
    loading: AtomicUsize,
    over_broker: OnceLock<(Broker, Arc<Repository>)>,
    /// Other conditions, each with a sentence for when it is not met.
    needs: Mutex<Vec<(String, Need)>>,
}

impl Readiness {
    /// Unmet conditions, as sentences for people; empty when the process is ready: its queues are
    /// bound, its models are warm, and the broker and the model repository can be reached.
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

    /// Marks the process as working.
    pub fn begin(&self) {
        self.inner.at_work.store(true, Relaxed);
    }

    /// Marks the process as stopping: it finishes its work and accepts no more.
    pub fn stop(&self) {
        self.inner.stopping.store(true, Relaxed);
    }

    pub(crate) fn needs(&self, broker: Broker, repository: Arc<Repository>) {
        // Called once, by the worker that owns this.
        drop(self.inner.over_broker.set((broker, repository)));
    }

    /// Adds a condition; while it is not met, the process is not ready, for the reason in
    /// `sentence`.
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

/// An external condition of readiness. Unmet at first.
#[derive(Clone, Default)]
pub(crate) struct Need(Arc<AtomicBool>);

impl Need {
    /// Sets whether it is met.
    pub(crate) fn set(&self, is_met: bool) {
        self.0.store(is_met, Relaxed);
    }
}

/// A model being loaded.
pub(crate) struct Loading(Arc<Inner>);

impl Drop for Loading {
    fn drop(&mut self) {
        self.0.loading.fetch_sub(1, Relaxed);
    }
}
