//! The broker: connection, streams, queues and the key-value bucket of a NATS server.
//!
//! Imports point one way: the meaning of answers (`answers`, `denial`), the connection (`connect`,
//! `broker`), the state of the server (`streams`, `consumer`, `counts`, `peek`), storing and
//! records (`publish`, `scan`, `kv`), and the queue on top (`lease`, `handle`, `consumption`,
//! `queue`). `Broker`'s methods are in the files of their subjects.

mod answers;
mod backoff;
mod broker;
mod config;
mod connect;
mod consumer;
mod consumption;
mod counts;
mod denial;
mod events;
mod feed;
mod handle;
mod kv;
mod lease;
mod live;
mod peek;
mod publish;
mod queue;
mod requests;
mod scan;
mod spec;
mod streams;
mod subject;
pub(crate) mod version;
mod watch;

pub use broker::Broker;
pub use config::BrokerConfig;
pub use consumer::ConsumerSpec;
pub use counts::{ConsumerStats, StreamStats};
pub use events::{Event, Subscription};
pub use feed::{Feed, FeedReader};
pub use kv::{Entry, Kv};
pub use live::{LIVE_FRAME, LIVE_FRAME_TIME, LiveFrame, LiveReader, LiveSent, live_stream};
pub use peek::Held;
pub use queue::JetStreamQueue;
pub use requests::{Answered, Copies, Request, Requests};
pub use spec::{OnMalformed, QueueSpec, SubjectOf};
pub use subject::subject_token;
pub use watch::{Change, Watch};
