//! Sends one request to one server, and interprets the result.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::{ClientConfig, RootCertStore};

use super::answer::shown;
use super::key::Secret;

/// Time limit for connecting, including name lookup and TLS.
const CONNECT: Duration = Duration::from_secs(10);
/// Largest answer in bytes.
const MOST_BYTES: usize = 4 << 20;

/// Why a request got no answer.
#[derive(Debug)]
pub(crate) enum Fault {
    /// No connection: the server is unreachable.
    Unreachable(String),
    /// The server is busy, and may say for how long.
    Busy {
        after: Option<Duration>,
        why: String,
    },
    /// The server failed, or returned an invalid answer. Another attempt may succeed.
    Failed(String),
    /// It exceeded the time limit.
    TimedOut,
    /// The server rejects this image's request permanently.
    Refused(String),
    /// The server rejects all requests of this job: its key, model or address is wrong.
    Hopeless(String),
}

/// A client that keeps its connections. Belongs to the runtime that it is used on.
pub(crate) struct AskClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    secret: Option<Secret>,
    /// Where the key is, for people.
    key: String,
}

impl AskClient {
    pub(crate) fn new(secret: Option<Secret>, key: String) -> Self {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls())
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            // Only our own rules repeat requests.
            .retry_canceled_requests(false)
            .build(connector);
        Self {
            client,
            secret,
            key,
        }
    }

    /// Sends a request; returns the body of the answer.
    ///
    /// # Errors
    /// The failure.
    pub(crate) async fn ask(&self, url: &str, body: Bytes, time: Duration) -> Result<Bytes, Fault> {
        let call = self.call(Method::POST, format!("{url}/chat/completions"), body);
        match tokio::time::timeout(time, call).await {
            Ok(ended) => ended,
            Err(_) => Err(Fault::TimedOut),
        }
    }

    /// Checks that the server is reachable and accepts the key.
    ///
    /// # Errors
    /// If it is not, or does not.
    pub(crate) async fn look(&self, url: &str) -> Result<(), Fault> {
        let call = self.call(Method::GET, format!("{url}/models"), Bytes::new());
        match tokio::time::timeout(CONNECT, call).await {
            Err(_) => Err(Fault::TimedOut),
            Ok(Err(fault @ (Fault::Unreachable(_) | Fault::TimedOut))) => Err(fault),
            Ok(Err(Fault::Hopeless(why))) if !why.contains("404") => Err(Fault::Hopeless(why)),
            // Not every server can list its models.
            Ok(_) => Ok(()),
        }
    }

    async fn call(&self, method: Method, url: String, body: Bytes) -> Result<Bytes, Fault> {
        let mut request = Request::builder()
            .method(method)
            .uri(&url)
            .header(USER_AGENT, concat!("trommel/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, "application/json");
        if let Some(secret) = &self.secret {
            request = request.header(AUTHORIZATION, secret.header());
        }
        let request = request
            .body(Full::new(body))
            .map_err(|error| Fault::Hopeless(format!("{url}: {error}")))?;
        let response = self.client.request(request).await.map_err(|error| {
            let why = last_cause(&error);
            match error.is_connect() {
                true => Fault::Unreachable(why),
                false => Fault::Failed(format!("its connection ended without an answer ({why})")),
            }
        })?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = read(response.into_body()).await?;
        match status.is_success() {
            true => Ok(body),
            false => Err(self.fault(&url, status, &headers, &body)),
        }
    }

    /// The meaning of an unsuccessful response.
    fn fault(&self, url: &str, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Fault {
        let text = String::from_utf8_lossy(body);
        let text = match &self.secret {
            Some(secret) => secret.scrub(&text),
            None => text.into_owned(),
        };
        let why = match text.trim().is_empty() {
            true => format!("it answers {status}"),
            false => format!("it answers {status}: {}", shown(&text)),
        };
        match status.as_u16() {
            429 | 503 => Fault::Busy {
                after: retry_after(headers),
                why,
            },
            401 | 403 => Fault::Hopeless(match &self.secret {
                Some(_) => format!("{why}; the key in {} is not taken", self.key),
                None => format!("{why}; name a key with key-env or key-file in [prompt]"),
            }),
            404 | 405 => Fault::Hopeless(format!(
                "{why}; look at url and model in [prompt] ({url} was asked)"
            )),
            300..=399 => Fault::Hopeless(format!(
                "{why}; it redirects, which is not followed with a key; give the address itself as url"
            )),
            408 | 425 => Fault::TimedOut,
            500.. => Fault::Failed(why),
            _ => Fault::Refused(why),
        }
    }
}

async fn read(mut body: hyper::body::Incoming) -> Result<Bytes, Fault> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            Fault::Failed(format!(
                "its answer ended in the middle ({})",
                last_cause(&error)
            ))
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        if bytes.len() + data.len() > MOST_BYTES {
            return Err(Fault::Failed(format!(
                "its answer has more than {MOST_BYTES} bytes"
            )));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

/// How long the server asks not to be contacted. A date, which these servers do not send, is
/// ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds: f64 = headers
        .get(RETRY_AFTER)?
        .to_str()
        .ok()?
        .trim()
        .parse()
        .ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

fn last_cause(error: &(dyn Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

fn tls() -> ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(status: u16, retry_after: Option<&str>, body: &str) -> Fault {
        let mut headers = HeaderMap::new();
        if let Some(after) = retry_after {
            headers.insert(RETRY_AFTER, after.parse().unwrap());
        }
        let client = AskClient::new(None, String::new());
        let status = StatusCode::from_u16(status).unwrap();
        client.fault("http://x", status, &headers, body.as_bytes())
    }

    #[test]
    fn each_status_has_its_class() {
        for status in [400, 413, 415, 422] {
            assert!(
                matches!(fault(status, None, "no"), Fault::Refused(_)),
                "{status}"
            );
        }
        for status in [401, 403, 404, 302] {
            assert!(
                matches!(fault(status, None, "no"), Fault::Hopeless(_)),
                "{status}"
            );
        }
        for status in [500, 502, 504, 529] {
            assert!(
                matches!(fault(status, None, "no"), Fault::Failed(_)),
                "{status}"
            );
        }
        assert!(matches!(fault(408, None, ""), Fault::TimedOut));
        let after = |text| match fault(429, text, "") {
            Fault::Busy { after, .. } => after,
            other => panic!("{other:?}"),
        };
        assert_eq!(after(Some("2")), Some(Duration::from_secs(2)));
        assert_eq!(after(Some("0.25")), Some(Duration::from_millis(250)));
        assert_eq!(
            (after(Some("-1")), after(Some("soon")), after(None)),
            (None, None, None)
        );
    }
}
