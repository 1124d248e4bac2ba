//! The broker: connection, streams, queues and the key-value bucket of a NATS server.

mod backoff;
mod broker;
mod browse;
mod config;
mod connect;
mod consumer;
mod consumption;
mod handle;
mod kv;
mod lease;
mod publish;
mod queue;
mod streams;
mod subject;
mod version;

pub use broker::{Broker, ConsumerStats, Event, StreamStats, Subscription};
pub use browse::{Feed, Held};
pub use config::BrokerConfig;
pub use kv::{Change, Entry, Kv, Watch};
pub use queue::{ConsumerSpec, JetStreamQueue, OnMalformed, QueueSpec, SubjectOf};
pub use streams::StreamName;
pub use subject::subject_token;
pub use version::ServerVersion;
