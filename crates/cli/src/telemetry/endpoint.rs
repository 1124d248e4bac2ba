use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::CONTENT_TYPE;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::TcpListener;

use super::Health;

/// Interval between polls of values that are not pushed.
const UPKEEP: Duration = Duration::from_secs(5);

/// Answers `/metrics` in Prometheus' text format, `/healthz` and `/readyz`, forever.
pub(super) async fn serve(listener: TcpListener, metrics: PrometheusHandle, health: Arc<Health>) {
    let kept = metrics.clone();
    tokio::spawn(async move {
        loop {
            trommel_worker::measure_devices();
            kept.run_upkeep();
            tokio::time::sleep(UPKEEP).await;
        }
    });
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "a request for metrics or health failed");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (metrics, health) = (metrics.clone(), Arc::clone(&health));
        tokio::spawn(async move {
            let answer = service_fn(|request| {
                let answer = answer(&request, &metrics, &health);
                async { Ok::<_, Infallible>(answer) }
            });
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), answer);
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection for metrics or health was lost");
            }
        });
    }
}

fn answer<B>(
    request: &Request<B>,
    metrics: &PrometheusHandle,
    health: &Health,
) -> Response<Full<Bytes>> {
    let (status, kind, text) = match request.uri().path() {
        "/metrics" => (
            StatusCode::OK,
            "text/plain; version=0.0.4; charset=utf-8",
            metrics.render(),
        ),
        "/healthz" => said(health.stuck().into_iter().collect()),
        "/readyz" => said(health.missing()),
        path => (
            StatusCode::NOT_FOUND,
            "text/plain; charset=utf-8",
            format!("nothing at {path}; try /metrics, /healthz or /readyz\n"),
        ),
    };
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    response
}

/// 200 if all is well, else 503 with the problems.
fn said(wrong: Vec<String>) -> (StatusCode, &'static str, String) {
    let (status, text) = match wrong.is_empty() {
        true => (StatusCode::OK, "ok".to_owned()),
        false => (StatusCode::SERVICE_UNAVAILABLE, wrong.join("\n")),
    };
    (status, "text/plain; charset=utf-8", text + "\n")
}
