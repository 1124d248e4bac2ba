//! Adapts this crate's HTTP connections to `object_store`.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use http_body_util::BodyExt;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use tokio::time::timeout;

use crate::http::https;

/// Time limit for connecting, including name lookup and TLS.
const CONNECT: Duration = Duration::from_secs(5);

/// Creates a client whose responses must begin within `patience`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Connector {
    pub(super) patience: Duration,
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut tcp = Tcp::new();
        tcp.set_connect_timeout(Some(CONNECT));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .build(https(tcp));
        Ok(HttpClient::new(Service {
            client,
            patience: self.patience,
        }))
    }
}

struct Service {
    client: Client<HttpsConnector<Tcp>, HttpRequestBody>,
    patience: Duration,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Service")
    }
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answer = timeout(self.patience, self.client.request(request)).await;
        let answer = answer.map_err(|late| HttpError::new(HttpErrorKind::Timeout, late))?;
        let answer = answer.map_err(|error| {
            let kind = match error.is_connect() {
                true => HttpErrorKind::Connect,
                false => HttpErrorKind::Request,
            };
            HttpError::new(kind, error)
        })?;
        Ok(answer.map(|body| {
            HttpResponseBody::new(
                body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error)),
            )
        }))
    }
}
