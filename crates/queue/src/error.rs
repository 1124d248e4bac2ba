use thiserror::Error;

/// What a queue could not do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct QueueError {
    kind: QueueErrorKind,
    message: String,
}

/// The kinds of [`QueueError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueErrorKind {
    /// The delivery was not settled in time and belongs to another consumer now.
    Expired,
}

impl QueueError {
    pub(crate) fn expired(attempt: u32) -> Self {
        Self {
            kind: QueueErrorKind::Expired,
            message: format!(
                "delivery (attempt {attempt}) outlasted its ack deadline and is delivered again"
            ),
        }
    }

    /// What went wrong.
    pub fn kind(&self) -> QueueErrorKind {
        self.kind
    }
}
