use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::{Origin, QueueError};

/// One hand-out of a message. If it is not settled before its deadline, the message is delivered
/// again.
pub struct Delivery<T> {
    message: Arc<T>,
    attempt: u32,
    origin: Origin,
    handle: Box<dyn Handle>,
}

/// How the work on a delivery ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Disposition {
    /// The effect is durable. A lost ack only costs a harmless repeat.
    Done,
    /// Another attempt may succeed, but not before `after` has passed.
    Retry {
        /// Time to wait.
        after: Duration,
    },
    /// No attempt can succeed.
    DeadLetter {
        /// A sentence for people.
        reason: String,
    },
}

/// An implementation's operations on a delivery.
#[async_trait]
pub trait Handle: Send + Sync {
    /// See [`Delivery::settle`].
    async fn settle(self: Box<Self>, disposition: Disposition) -> Result<(), QueueError>;

    /// See [`Delivery::extend`].
    async fn extend(&self) -> Result<(), QueueError>;

    /// See [`Delivery::keep_alive`].
    fn keep_alive(&self) -> KeepAlive;
}

impl<T> Delivery<T> {
    /// A delivery of `message`; `attempt` counts from 1.
    pub fn new(message: Arc<T>, attempt: u32, origin: Origin, handle: Box<dyn Handle>) -> Self {
        Self {
            message,
            attempt,
            origin,
            handle,
        }
    }

    /// The message.
    pub fn message(&self) -> &Arc<T> {
        &self.message
    }

    /// The number of this delivery of the message, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The trace of the message, and when it was stored.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Reports the outcome of the work to the queue.
    ///
    /// # Errors
    /// [`Expired`](crate::QueueErrorKind::Expired) if the deadline has passed; the message belongs
    /// to another delivery now and this ack has no effect.
    pub async fn settle(self, disposition: Disposition) -> Result<(), QueueError> {
        self.handle.settle(disposition).await
    }

    /// Restarts the deadline.
    ///
    /// # Errors
    /// As [`Delivery::settle`].
    pub async fn extend(&self) -> Result<(), QueueError> {
        self.handle.extend().await
    }

    /// Extends the deadline for as long as the guard lives.
    pub fn keep_alive(&self) -> KeepAlive {
        self.handle.keep_alive()
    }
}

impl<T> fmt::Debug for Delivery<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// Extends a delivery's deadline; see [`Delivery::keep_alive`].
pub struct KeepAlive {
    _guard: Box<dyn Send + Sync>,
}

impl KeepAlive {
    /// A guard whose drop ends the extension.
    pub fn new(guard: impl Send + Sync + 'static) -> Self {
        Self {
            _guard: Box::new(guard),
        }
    }
}

impl fmt::Debug for KeepAlive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeepAlive")
    }
}
