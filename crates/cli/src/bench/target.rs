//! Servers that requests are sent to.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, StatusCode};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Deserialize;
use trommel_queue::{Broker, BrokerConfig};

use super::load::{Answer, Target};

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// The server at an address.
///
/// # Errors
/// If the address is invalid, or a broker cannot be reached.
pub(super) async fn open(
    address: &str,
    model: &str,
    images: Vec<Bytes>,
    broker: &BrokerConfig,
) -> Result<Arc<dyn Target>> {
    match address.split_once("://") {
        Some(("http" | "https", _)) => Ok(Arc::new(Web::new(address, model, images)?)),
        Some(("nats" | "tls", _)) => {
            let config = BrokerConfig {
                url: address.to_owned(),
                ..broker.clone()
            };
            let broker = Broker::connect(&config, "trommel bench").await?;
            let subject = format!("{}.classify.{model}", config.prefix);
            Ok(Arc::new(Subject {
                broker,
                subject,
                images,
            }))
        }
        _ => bail!(
            "--against {address}: give the address of a server, such as http://127.0.0.1:8080 or nats://127.0.0.1:4222"
        ),
    }
}

/// A server over HTTP.
struct Web {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    url: String,
    token: Option<String>,
    images: Vec<Bytes>,
}

impl Web {
    fn new(address: &str, model: &str, images: Vec<Bytes>) -> Result<Self> {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        let provider = rustls::crypto::ring::default_provider();
        let connector = HttpsConnectorBuilder::new()
            .with_provider_and_native_roots(provider)
            .context(
                "the system's certificates cannot be read; install the package ca-certificates",
            )?
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        Ok(Self {
            client: Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .build(connector),
            url: format!(
                "{}/v1/models/{model}/classify",
                address.trim_end_matches('/')
            ),
            token: std::env::var("TROMMEL_SERVE_TOKEN").ok(),
            images,
        })
    }

    async fn answer(&self, image: usize) -> Result<Answer> {
        let mut request = Request::builder().method(Method::POST).uri(&self.url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let request = request.body(Full::new(self.images[image].clone()))?;
        let answer = self.client.request(request).await?;
        let status = answer.status();
        let body = answer.into_body().collect().await?.to_bytes();
        Ok(match status {
            StatusCode::OK => Answer::Ok,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Answer::Refused,
            status => Answer::Failed(format!("{} {}", status.as_u16(), kind_of(&body))),
        })
    }
}

/// The error kind of an answer, so that equal failures are counted together.
fn kind_of(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Body {
        error_kind: String,
    }
    serde_json::from_slice::<Body>(body)
        .map_or_else(|_| "without a kind".to_owned(), |body| body.error_kind)
}

#[async_trait::async_trait]
impl Target for Web {
    async fn ask(&self, image: usize) -> Answer {
        match tokio::time::timeout(PATIENCE, self.answer(image)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => Answer::Failed(error.root_cause().to_string()),
            Err(_) => Answer::Failed(format!("no answer within {} s", PATIENCE.as_secs())),
        }
    }
}

/// A server over NATS.
struct Subject {
    broker: Broker,
    subject: String,
    images: Vec<Bytes>,
}

#[async_trait::async_trait]
impl Target for Subject {
    async fn ask(&self, image: usize) -> Answer {
        let request = async_nats::Request::new()
            .payload(self.images[image].clone())
            .timeout(Some(PATIENCE));
        let client = self.broker.client();
        let answer = match client.send_request(self.subject.clone(), request).await {
            Ok(answer) => answer,
            Err(error) => return Answer::Failed(error.to_string()),
        };
        let headers = answer.headers.unwrap_or_default();
        let code = headers.get("Nats-Service-Error-Code");
        match code.map(async_nats::HeaderValue::as_str) {
            None => Answer::Ok,
            Some("429" | "503") => Answer::Refused,
            Some(code) => Answer::Failed(format!("{code} {}", kind_of(&answer.payload))),
        }
    }
}
