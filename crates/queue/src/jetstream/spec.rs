use std::sync::Arc;

use trommel_types::DecodeError;
#[cfg(doc)]
use trommel_types::Message;
use trommel_types::Stream;

use super::consumer::ConsumerSpec;

/// Returns a message's subject.
pub type SubjectOf<T> = Arc<dyn Fn(&T) -> String + Send + Sync>;

/// Called with each malformed message: its bytes, the problem, and its subject.
pub type OnMalformed = Arc<dyn Fn(&[u8], &DecodeError, &str) + Send + Sync>;

/// What a [`JetStreamQueue`](crate::JetStreamQueue) stores where, and what it consumes.
pub struct QueueSpec<T> {
    /// The stream.
    pub stream: Stream,
    /// The subject of a message.
    pub subject: SubjectOf<T>,
    /// The subject of its dead letter, stored with the output of [`Message::encode_remains`].
    pub dead_subject: SubjectOf<T>,
    /// The consumer; `None` for a queue that only publishes.
    pub consumer: Option<ConsumerSpec>,
    /// Called with each malformed message, before it is dead-lettered.
    pub on_malformed: Option<OnMalformed>,
}
