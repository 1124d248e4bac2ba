//! Answers requests for the labels of single images, over HTTP and NATS.
//!
//! In flow order: a [`Server`] listens over HTTP, a [`NatsService`] on the broker, and [`LiveSources`]
//! reads frames of live sources there, each in front of
//! the [`Answers`](trommel_worker::Answers) that do the work; an [`Entrance`] is what they share.
//!
//! Guarantees. A request is read, let in, worked on and answered within limits of size, number and
//! time; what is over them is refused with a reason, and nobody who is slow keeps others waiting. A
//! request that was let in is answered, also while the process stops. The answer for an image is its
//! row, as a job would write it.
//!
//! Deliberately absent: decoding and models, which are the worker's; queues and retries, which are
//! the client's; arguments and signals, which are the binary's.

mod access;
mod body;
mod connection;
mod entrance;
mod error;
mod http;
mod live_sources;
mod live_turns;
mod metrics;
mod named;
mod nats;
mod openapi;
mod params;
mod refused;
mod server;
mod stall;
mod trace;

pub use access::Token;
pub use entrance::Entrance;
pub use error::ServeError;
pub use live_sources::LiveSources;
pub use metrics::{FRAME_AGE_SECONDS, REQUEST_BUCKETS, REQUEST_SECONDS, describe_metrics};
pub use nats::NatsService;
pub use openapi::OPENAPI;
pub use server::Server;
