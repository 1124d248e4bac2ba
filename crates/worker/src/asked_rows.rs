//! What requests ask of their rows: looked at once, and remembered.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use trommel_infer::Wanted;

use crate::{LiveEngine, NotAnswered};

/// Kinds of rows that are remembered: as many as an engine remembers sets of labels.
const MOST: usize = 8;
/// Labels that a request may bring: their embeddings take the processor from those who wait.
const MOST_LABELS: usize = 1000;

/// The rows that a model was asked for lately, each in the place in memory by which its engine knows it.
pub(crate) struct AskedRows {
    engine: LiveEngine,
    known: Mutex<VecDeque<Arc<Wanted>>>,
    /// Labels become embeddings on all threads, so one set after the other.
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

    /// What rows are to hold, once the model is known to give them. New labels become embeddings first,
    /// which takes milliseconds a label. Cancel-safe: what was begun is finished and remembered.
    ///
    /// # Errors
    /// [`NotAnswered::Settings`] when the model cannot give such rows.
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
