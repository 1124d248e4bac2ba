use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::entrance::Entrance;
use crate::stall::Impatient;

/// Largest request header in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Time limit for a refused client to read the answer.
const TURN_AWAY: Duration = Duration::from_secs(1);
const FULL: &str = concat!(
    "HTTP/1.1 503 Service Unavailable\r\n",
    "content-type: application/json\r\n",
    "retry-after: 1\r\n",
    "connection: close\r\n",
    "content-length: 94\r\n\r\n",
    r#"{"error_kind":"connections","error":"serve.max-connections are open already; try again later"}"#,
);

/// The context of a connection.
pub(crate) struct Connection {
    pub(crate) tls: Option<TlsAcceptor>,
    pub(crate) router: Router,
    pub(crate) entrance: Arc<Entrance>,
    pub(crate) stop: CancellationToken,
}

impl Connection {
    /// Answers the requests of a connection in sequence.
    pub(crate) async fn serve(self, stream: TcpStream) {
        let Some(tls) = &self.tls else {
            return self.answer(stream).await;
        };
        let limit = self.entrance.config.header_timeout;
        match timeout(limit, tls.accept(stream)).await {
            Ok(Ok(stream)) => self.answer(stream).await,
            Ok(Err(error)) => tracing::debug!(%error, "a client does not agree on TLS"),
            Err(_) => tracing::debug!("a client does not agree on TLS in time"),
        }
    }

    async fn answer(self, stream: impl AsyncRead + AsyncWrite + Unpin) {
        let config = &self.entrance.config;
        let stream = Impatient::new(stream, config.write_timeout);
        let service = TowerToHyperService::new(self.router);
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(config.header_timeout)
            .max_buf_size(MAX_HEAD)
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = self.stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection broke");
        }
    }
}

/// Refuses a client if there is no room; over TLS without an answer, as that is expensive.
pub(crate) async fn refuse(mut stream: TcpStream, is_tls: bool) {
    if !is_tls {
        drop(timeout(TURN_AWAY, stream.write_all(FULL.as_bytes())).await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_the_fixed_answer_is_right() {
        let (head, body) = FULL.split_once("\r\n\r\n").unwrap();
        assert!(
            head.ends_with(&format!("content-length: {}", body.len())),
            "{}",
            body.len()
        );
    }
}
