use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use trommel_worker::ServeConfig;

use crate::connection::{self, Connection};
use crate::entrance::Entrance;
use crate::{ServeError, http};

/// Wait after the system could not accept a connection, as when file descriptors run out.
const BREATH: Duration = Duration::from_millis(50);

/// Answers over HTTP.
pub struct Server {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    entrance: Arc<Entrance>,
}

impl Server {
    /// Binds the address, without accepting connections yet.
    ///
    /// # Errors
    /// If the address is in use, or the certificate is invalid.
    pub async fn bind(entrance: Arc<Entrance>) -> Result<Self, ServeError> {
        let config = &entrance.config;
        let tls = tls(config)?;
        let address = config.listen;
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|source| ServeError::Listen { address, source })?;
        crate::metrics::begin("http");
        crate::metrics::begin("oip");
        Ok(Self {
            listener,
            tls,
            entrance,
        })
    }

    /// Its address.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers until `stop` fires, then finishes the requests in progress. Idle connections are
    /// closed then.
    pub async fn run(self, stop: CancellationToken) {
        let Self {
            listener,
            tls,
            entrance,
        } = self;
        let room = Arc::new(Semaphore::new(entrance.config.max_connections.get()));
        let (router, open) = (http::router(Arc::clone(&entrance)), TaskTracker::new());
        while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
            let stream: TcpStream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a connection is lost");
                    tokio::time::sleep(BREATH).await;
                    continue;
                }
            };
            // An answer is one small write that should be sent at once.
            drop(stream.set_nodelay(true));
            let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
                open.spawn(connection::refuse(stream, tls.is_some()));
                continue;
            };
            let connection = Connection {
                tls: tls.clone(),
                router: router.clone(),
                entrance: Arc::clone(&entrance),
                stop: stop.clone(),
            };
            open.spawn(async move {
                connection.serve(stream).await;
                drop(permit);
            });
        }
        drop(listener);
        open.close();
        open.wait().await;
    }
}

fn tls(config: &ServeConfig) -> Result<Option<TlsAcceptor>, ServeError> {
    let (Some(certificate), Some(key)) = (&config.tls_certificate, &config.tls_key) else {
        return Ok(None);
    };
    let read = |path: &Path| {
        let content = fs::read(path);
        content.map_err(|error| ServeError::Tls(format!("{}: {error}", path.display())))
    };
    let malformed = |path: &Path, why: &dyn std::fmt::Display| {
        ServeError::Tls(format!("{} is not a PEM file: {why}", path.display()))
    };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&read(certificate)?)
        .collect::<Result<_, _>>()
        .map_err(|error| malformed(certificate, &error))?;
    if chain.is_empty() {
        return Err(malformed(certificate, &"it holds no certificate"));
    }
    let private = PrivateKeyDer::from_pem_slice(&read(key)?);
    let private = private.map_err(|error| malformed(key, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut server = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder
                .with_no_client_auth()
                .with_single_cert(chain, private)
        })
        .map_err(|error| ServeError::Tls(error.to_string()))?;
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Some(TlsAcceptor::from(Arc::new(server))))
}
