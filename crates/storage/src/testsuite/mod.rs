//! Servers that tests start for themselves.

#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test fails by panicking"
)]

mod moto_server;
mod postgres_server;
mod s3_server;
mod web_server;

pub use moto_server::MotoServer;
pub use postgres_server::PostgresServer;
pub use s3_server::S3Server;
pub use web_server::{Asked, Reply, WebServer};

/// A port that no server listens on, and that no connection going out is given.
fn free_port() -> u16 {
    portpicker::pick_unused_port().expect("a port is free")
}
