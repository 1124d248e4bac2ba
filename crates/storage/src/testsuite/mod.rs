//! Servers that tests start for themselves.

#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test fails by panicking"
)]

mod s3_server;

pub use s3_server::S3Server;
