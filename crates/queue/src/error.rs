use thiserror::Error;

/// An error of a queue.
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
    /// The broker does not answer. Only at the start, and for one-time queries (counts, removals):
    /// publishing, pulling and settling wait until it is back.
    Unreachable,
    /// The broker refuses the credentials, or they cannot be read.
    Refused,
    /// The broker is too old, or lacks a required feature.
    Unsupported,
    /// Settings contradict what exists on the broker.
    Misconfigured,
    /// It does not fit into a message of the broker: payload, headers or subject are too long.
    TooLarge,
    /// The broker's permissions forbid a required subject.
    Forbidden,
    /// The account or the server has no room for JetStream. Publishes wait for room instead.
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

    /// The kind of error.
    pub fn kind(&self) -> QueueErrorKind {
        self.kind
    }
}
