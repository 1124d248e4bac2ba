//! The row options of requests: checked once, and cached.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use trommel_infer::Wanted;

use crate::{LiveEngine, NotAnswered};

/// Cached kinds of rows: as many as an engine caches sets of labels.
const MOST: usize = 8;
/// Most labels in a request: embedding them takes the CPU from other requests.
const MOST_LABELS: usize = 1000;

/// The recent row options of requests for a model, each as the shared value by which its engine
/// recognises it.
pub(crate) struct AskedRows {
    engine: LiveEngine,
    known: Mutex<VecDeque<Arc<Wanted>>>,
    /// Labels are embedded on all threads, so one set at a time.
    turn: tokio::sync::Mutex<()>,
}

impl AskedRows {
    pub(crate) fn of(engine: LiveEngine) -> Self {
        Self {
            engine,
            known: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
        }
    }

    /// The row options, once the model is known to support them. New labels are embedded first,
    /// which takes milliseconds per label. Cancel-safe: work that has begun is finished and cached.
    ///
    /// # Errors
    /// [`NotAnswered::Settings`] if the model does not support such rows.
    pub(crate) async fn get(&self, wanted: Wanted) -> Result<Arc<Wanted>, NotAnswered> {
        if let Some(known) = self.find(&wanted) {
            return Ok(known);
        }
        let Some(labels) = &wanted.labels else {
            self.engine.check(&wanted)?;
            return Ok(self.remember(Arc::new(wanted)));
        };
        if labels.names.len() > MOST_LABELS {
            return Err(NotAnswered::Settings(format!(
                "the request brings {} labels and may bring {MOST_LABELS}; give them as a job, or at the start of the model",
                labels.names.len()
            )));
        }
        let _turn = self.turn.lock().await;
        if let Some(known) = self.find(&wanted) {
            return Ok(known);
        }
        let wanted = Arc::new(wanted);
        let (engine, asked) = (self.engine.clone(), Arc::clone(&wanted));
        let prepared = tokio::task::spawn_blocking(move || engine.prepare(&asked)).await;
        prepared.unwrap_or_else(|_| {
            let message = "the labels of the request cannot be read by the model";
            Err(NotAnswered::Settings(message.to_owned()))
        })?;
        Ok(self.remember(wanted))
    }

    fn find(&self, wanted: &Wanted) -> Option<Arc<Wanted>> {
        self.known()
            .iter()
            .find(|known| ***known == *wanted)
            .cloned()
    }

    fn remember(&self, wanted: Arc<Wanted>) -> Arc<Wanted> {
        let mut known = self.known();
        known.truncate(MOST - 1);
        known.push_front(Arc::clone(&wanted));
        wanted
    }

    fn known(&self) -> MutexGuard<'_, VecDeque<Arc<Wanted>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
