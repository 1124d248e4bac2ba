//! Connections, with and without TLS.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Empty;
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::{ClientConfig, RootCertStore};

use super::HttpConfig;
use super::address::Resolver;

/// Time limit for connecting, including name lookup and TLS.
const CONNECT: Duration = Duration::from_secs(10);
/// Idle connections to keep.
pub(super) type WebClient = Client<HttpsConnector<HttpConnector<Resolver>>, Empty<Bytes>>;

/// A client that resolves names by our own rules.
pub(super) fn connect(config: &HttpConfig) -> WebClient {
    let mut tcp = HttpConnector::new_with_resolver(Resolver {
        allow_private: config.allow_private,
    });
    tcp.set_connect_timeout(Some(CONNECT));
    Client::builder(TokioExecutor::new())
        .pool_idle_timeout(Duration::from_secs(30))
        .pool_max_idle_per_host(config.max_per_host)
        .pool_timer(TokioTimer::new())
        .timer(TokioTimer::new())
        .build(https(tcp))
}

/// HTTP/1.1 connections, encrypted for `https://`.
pub(crate) fn https<R>(mut tcp: HttpConnector<R>) -> HttpsConnector<HttpConnector<R>> {
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    HttpsConnectorBuilder::new()
        .with_tls_config(tls())
        .https_or_http()
        .enable_http1()
        .wrap_connector(tcp)
}

/// Trusted servers: those that the system trusts.
fn tls() -> ClientConfig {
    let provider = || Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("ring has all of them");
    match builder.clone().with_native_roots() {
        Ok(builder) => builder.with_no_client_auth(),
        Err(error) => {
            tracing::warn!(%error, "no https:// server is trusted; install the package ca-certificates or set SSL_CERT_FILE");
            let nobody = RootCertStore::empty();
            builder.with_root_certificates(nobody).with_no_client_auth()
        }
    }
}
