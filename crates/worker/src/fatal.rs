use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::WorkerError;

/// Passes the first error that stops a role from its tasks to its loop.
#[derive(Clone)]
pub(crate) struct Fatal {
    first: Arc<Mutex<Option<WorkerError>>>,
    token: CancellationToken,
}

impl Fatal {
    /// For a role that also stops when `shutdown` fires.
    pub(crate) fn new(shutdown: &CancellationToken) -> Self {
        Self {
            first: Arc::default(),
            token: shutdown.child_token(),
        }
    }

    /// Fires when the role has to stop pulling, for any reason.
    pub(crate) fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Records the error, if it is the first, and stops the role.
    pub(crate) fn check(&self, result: Result<(), WorkerError>) {
        if let Err(error) = result {
            let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(error);
            self.token.cancel();
        }
    }

    /// Whether there was an error.
    pub(crate) fn has_failed(&self) -> bool {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.is_some()
    }

    /// The first error, if there was one.
    pub(crate) fn into_result(self) -> Result<(), WorkerError> {
        match self
            .first
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }
}
