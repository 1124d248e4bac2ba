//! At-least-once work queues: JetStream for many machines, in-process for one.
//!
//! A [`Queue`] stores messages and hands each out as a [`Delivery`]; the consumer says by a
//! [`Disposition`] what became of it. [`MemoryQueue`] is the queue inside one process. A [`Broker`]
//! is the connection to a NATS server, and makes [`JetStreamQueue`]s on its streams by a
//! [`QueueSpec`]; it also holds the records that jobs share ([`Kv`]: compare-and-set, scans, watches),
//! sends events, and follows those of other programs ([`Feed`]).
//!
//! Guarantees, which `testsuite` states as tests and every implementation passes:
//! - A publish returns once the message is stored, and waits while the queue is full.
//! - A message is delivered until a delivery of it is settled as done or dead-lettered. A delivery
//!   that is neither settled nor extended within `ack_wait` is repeated, its attempt one higher; no
//!   delivery is extended for longer than `max_work`.
//! - First deliveries come in the order of publishing. Repeats come before what has not been
//!   delivered yet.
//! - A second publish of an id within the deduplication window is dropped and says so.
//! - Publish and pull are cancel-safe: dropping either future loses nothing and leaves nothing
//!   half-done.
//!
//! A message carries the trace of the span that published it, in headers as W3C trace context, and
//! the time when it was stored: see [`Origin`].
//!
//! On a broker, in addition:
//! - *Stored* means in the stream's file, as far as the server's `sync_interval` goes (two minutes
//!   unless changed): a server that is killed loses nothing, a power cut may lose the newest.
//! - While the broker is away, publishes, pulls and settles wait or repeat; none fails for it. At
//!   start it must be there: [`Broker::connect`] says what is wrong and what to change.
//! - What the server denies ends as an error that names the subject, whenever it happens.
//! - What a dropped pull had requested is kept for the next pull of the same queue object, and given
//!   back after half of `ack_wait`, which does count as an attempt.
//! - A server that is killed may forget the newest deliveries: a repeat may then carry the attempt
//!   of the delivery before it.
//! - A delivery settled as done without [`confirm_acks`](ConsumerSpec::confirm_acks) may come once
//!   more if the connection breaks at that moment.
//!
//! Streams are created if absent and never reconfigured; one that differs in what the guarantees
//! rest on is refused.
//!
//! Deliberately absent: exactly-once delivery (the sink makes it so), priorities (a lane is a queue
//! of its own), and retention of what is settled.
//!
//! ```
//! use std::time::Duration;
//! use trommel_queue::{Disposition, MemoryQueue, MemoryQueueConfig, Queue};
//! use trommel_types::{Content, ImageRef, Lane};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), trommel_queue::QueueError> {
//! let queue = MemoryQueue::new(MemoryQueueConfig { capacity: 100, ..Default::default() });
//! let image = ImageRef {
//!     job: "photos".into(),
//!     index: 0,
//!     lane: Lane::Normal,
//!     uri: "photos/cat.jpg".to_owned(),
//!     content: Content::Whole,
//!     etag: None,
//!     size: None,
//!     columns: Vec::new(),
//! };
//! queue.publish("photos/0", image).await?;
//!
//! for delivery in queue.pull(16, Duration::from_secs(1)).await? {
//!     assert_eq!((delivery.message().index, delivery.attempt()), (0, 1));
//!     delivery.settle(Disposition::Done).await?;
//! }
//! # Ok(())
//! # }
//! ```

mod delivery;
mod error;
pub mod jetstream;
mod memory;
pub mod metrics;
mod origin;
mod room;
#[cfg(feature = "testsuite")]
pub mod test_server;
#[cfg(feature = "testsuite")]
pub mod testsuite;

use std::time::Duration;

use async_trait::async_trait;
use trommel_types::Message;

pub use delivery::{Delivery, Disposition, Handle, KeepAlive};
pub use error::{QueueError, QueueErrorKind};
pub use jetstream::{
    Answered, Broker, BrokerConfig, ConsumerSpec, ConsumerStats, Copies, Entry, Feed, FeedReader,
    Held, JetStreamQueue, Kv, LIVE_FRAME, LIVE_FRAME_TIME, LiveFrame, LiveReader, LiveSent,
    QueueSpec, Request, Requests, live_stream, subject_token,
};
pub use memory::{MemoryQueue, MemoryQueueConfig};
pub use origin::Origin;
pub use trommel_types::Stream;

/// Time after which a delivery is extended no more unless a queue's settings say otherwise.
pub const MAX_WORK: Duration = Duration::from_secs(15 * 60);

/// A bounded store of messages that are to be worked on.
#[async_trait]
pub trait Queue<T: Message>: Send + Sync {
    /// Stores a message under an id that names it for good; waits while the queue is full.
    ///
    /// Cancel-safe: a publish that is dropped has stored the message or has not. To find out,
    /// publish again with the same id.
    ///
    /// # Errors
    /// Those that no waiting cures.
    async fn publish(&self, id: &str, message: T) -> Result<Published, QueueError>;

    /// Takes up to `limit` deliveries. Waits up to `expiry` for the first one and for no further
    /// one; nothing by then is an empty list.
    ///
    /// Cancel-safe: a pull that is dropped takes nothing and counts as no attempt.
    ///
    /// # Errors
    /// Those that no waiting cures.
    async fn pull(&self, limit: usize, expiry: Duration) -> Result<Vec<Delivery<T>>, QueueError>;

    /// Counts of what the queue holds; a moment's view.
    ///
    /// # Errors
    /// When the queue cannot be asked.
    async fn stats(&self) -> Result<QueueStats, QueueError>;
}

/// What a publish did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// The message is stored.
    Stored,
    /// A message of this id was stored before; this one was dropped.
    Duplicate,
}

/// What a queue holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Messages to be delivered, those whose retry is delayed included.
    pub waiting: u64,
    /// Deliveries that are neither settled nor expired.
    pub in_flight: u64,
    /// Messages dead-lettered so far.
    pub dead_letters: u64,
}
