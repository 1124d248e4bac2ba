use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

/// Why a server cannot start.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The address is in use, or not on this machine.
    #[error("failed to listen at serve.listen = {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The token's file cannot be used.
    #[error("serve.token-file {path}: {reason}")]
    Token {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
    },
    /// The certificate or its key cannot be used.
    #[error("serve.tls-certificate, tls-key: {0}")]
    Tls(String),
    /// Settings contradict each other.
    #[error("{0}")]
    Settings(String),
    /// The broker refused the service.
    #[error("failed to answer over NATS: {0}")]
    Nats(String),
}
