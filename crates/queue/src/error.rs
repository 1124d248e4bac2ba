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
    /// No broker answers. At start only, and for questions that are asked once (counts, removals):
    /// publishing, pulling and settling wait until it is back.
    Unreachable,
    /// The broker refuses the credentials, or they cannot be read.
    Refused,
    /// The broker is too old, or lacks something that is needed.
    Unsupported,
    /// Settings and what is found on the broker do not go together.
    Misconfigured,
    /// No broker message can hold it: payload, headers or subject are too long.
    TooLarge,
    /// The broker's permissions forbid a subject that is needed.
    Forbidden,
    /// The account or the server has no room left for JetStream. Publishes wait for room instead.
    AccountLimit,
}

impl QueueError {
    pub(crate) fn new(kind: QueueErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    pub(crate) fn expired(attempt: u32) -> Self {
        Self::new(
            QueueErrorKind::Expired,
            format!(
                "delivery (attempt {attempt}) outlasted its ack deadline and is delivered again"
            ),
        )
    }

    /// What went wrong.
    pub fn kind(&self) -> QueueErrorKind {
        self.kind
    }
}
