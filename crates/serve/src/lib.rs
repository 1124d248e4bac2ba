//! Answers requests for the labels of single images, over HTTP and NATS.
//!
//! In flow order: a [`Server`] listens over HTTP, a [`NatsService`] on the broker, and
//! [`LiveSources`] reads frames of live sources there. All of them use the
//! [`Answers`](trommel_worker::Answers) that do the work, and share an [`Entrance`].
//!
//! Guarantees. A request is read, admitted, processed and answered within limits of size, number
//! and time; a request above a limit is refused with a reason, and slow clients do not delay
//! others. An admitted request is answered, even while the process stops. The answer for an image
//! is its row, as a job would write it.
//!
//! Deliberately absent: decoding and models, which belong to the worker; queues and retries, which
//! belong to the client; arguments and signals, which belong to the binary.

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
