use std::sync::Arc;

use trommel_types::DecodeError;
#[cfg(doc)]
use trommel_types::Message;
use trommel_types::Stream;

use super::consumer::ConsumerSpec;

/// Names a message's subject.
pub type SubjectOf<T> = Arc<dyn Fn(&T) -> String + Send + Sync>;

/// Takes notice of a message that does not decode: its bytes, what is wrong, and its subject.
pub type OnMalformed = Arc<dyn Fn(&[u8], &DecodeError, &str) + Send + Sync>;

/// What a [`JetStreamQueue`](crate::JetStreamQueue) stores where, and what it takes.
pub struct QueueSpec<T> {
    /// The stream.
    pub stream: Stream,
    /// Where in it a message is stored.
    pub subject: SubjectOf<T>,
    /// Where its dead letter is stored, with what [`Message::encode_remains`] keeps of it.
    pub dead_subject: SubjectOf<T>,
    /// What pulls take; `None` for a queue that only publishes.
    pub consumer: Option<ConsumerSpec>,
    /// Takes notice of each malformed message, before it is dead-lettered.
    pub on_malformed: Option<OnMalformed>,
}
