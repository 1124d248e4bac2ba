//! HTTP endpoints: Trommel's own, and the Open Inference Protocol.

mod classify;
mod oip;
mod oip_tensors;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use tracing::Instrument;
use trommel_worker::ServedModel;

use crate::body;
use crate::entrance::Entrance;
use crate::metrics::Observed;
use crate::openapi;
use crate::refused::{self, Refused};
use crate::trace::request_span;

/// Paths that require no token.
const OPEN: [&str; 3] = ["/openapi.json", "/v2/health/live", "/v2/health/ready"];

type App = State<Arc<Entrance>>;

/// All paths.
pub(crate) fn router(entrance: Arc<Entrance>) -> Router {
    Router::new()
        .route("/openapi.json", get(description))
        .route("/v1/models", get(models))
        .route("/v1/models/{model}", get(model))
        .route("/v1/models/{model}/classify", post(classify::classify))
        .route("/v2", get(oip::server))
        .route("/v2/health/live", get(oip::live))
        .route("/v2/health/ready", get(oip::ready))
        .route("/v2/models/{model}", get(oip::model))
        .route("/v2/models/{model}/ready", get(oip::model_ready))
        .route("/v2/models/{model}/infer", post(oip::infer))
        .route("/v2/models/{model}/versions/{version}", get(oip::version))
        .route(
            "/v2/models/{model}/versions/{version}/ready",
            get(oip::version_ready),
        )
        .route(
            "/v2/models/{model}/versions/{version}/infer",
            post(oip::version_infer),
        )
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .layer(middleware::from_fn_with_state(
            Arc::clone(&entrance),
            authorize,
        ))
        .with_state(entrance)
}

/// Admits requests with the token.
async fn authorize(State(entrance): App, request: Request, next: Next) -> Response {
    let is_open = OPEN.contains(&request.uri().path());
    if let (Some(token), false) = (&entrance.token, is_open) {
        let brought = request.headers().get(AUTHORIZATION);
        if let Err(refused) = token.check(brought.map(|value| value.as_bytes())) {
            let (head, body) = request.into_parts();
            return body::refuse(&head.headers, body, refused)
                .await
                .into_response();
        }
    }
    next.run(request).await
}

async fn description(State(entrance): App) -> Response {
    let names = entrance.answers.models().map(|model| &**model.name());
    refused::json(StatusCode::OK, openapi::of_models(names))
}

async fn models(State(entrance): App) -> Response {
    let models: Vec<_> = entrance
        .answers
        .models()
        .map(|model| facts(model))
        .collect();
    answer(&json!({ "models": models }))
}

async fn model(State(entrance): App, Path(name): Path<String>) -> Result<Response, Refused> {
    let model = entrance.model(&name)?;
    let mut facts = facts(model);
    let labels = model.labels().ok_or_else(|| {
        let message = format!("no infer worker has published the labels of model {name} yet");
        Refused::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
    })?;
    let labels: Vec<_> = labels.iter().map(|label| &**label).collect();
    facts["labels"] = labels.into();
    Ok(answer(&facts))
}

fn facts(model: &ServedModel) -> Value {
    let mut facts = json!({
        "name": **model.name(),
        "version": **model.version(),
    });
    if let Some(labels) = model.labels() {
        facts["classes"] = labels.len().into();
    }
    facts
}

async fn unknown_path(request: Request) -> Refused {
    let path = request.uri().path();
    let message = format!("there is nothing at {path}; GET /openapi.json describes what there is");
    Refused::new(StatusCode::NOT_FOUND, "unknown_path", message)
}

async fn unknown_method(request: Request) -> Refused {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("{path} does not take {method}");
    Refused::new(StatusCode::METHOD_NOT_ALLOWED, "unknown_method", message)
}

fn answer(value: &Value) -> Response {
    refused::json(StatusCode::OK, value.to_string())
}

/// A header as text.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Counts and traces a request; `work` returns its response with the outcome for metrics.
async fn observed<F>(
    entrance: &'static str,
    since: Instant,
    headers: &HeaderMap,
    work: F,
) -> Result<Response, Refused>
where
    F: Future<Output = Result<(Response, &'static str), Refused>>,
{
    let observed = Observed::begin(entrance, since);
    let span = request_span(entrance, |name| header(headers, name).map(str::to_owned));
    match work.instrument(span).await {
        Ok((response, outcome)) => {
            observed.end(outcome);
            Ok(response)
        }
        Err(refused) => {
            observed.end(refused.outcome());
            Err(refused)
        }
    }
}
