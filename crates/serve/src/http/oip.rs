//! The Open Inference Protocol, version 2, over HTTP, as used by clients of Triton and KServe.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use serde_json::{Value, json};
use trommel_types::{Outcome, Scores};
use trommel_worker::ServedModel;

use super::oip_tensors::{self, InferRequest, OUTPUTS, Output};
use super::{App, answer, header, observed};
use crate::body;
use crate::entrance::{Asked, Entrance, Image, abreast, deadline, request_id};
use crate::named;
use crate::params::Params;
use crate::refused::{self, Refused, status_of};

/// The length of the JSON before binary tensors.
const JSON_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// An error in the format of this protocol.
pub(super) struct OipRefused(Refused);

impl IntoResponse for OipRefused {
    fn into_response(self) -> Response {
        let body = json!({ "error": self.0.message }).to_string();
        self.0.response(body.into_bytes())
    }
}

impl From<Refused> for OipRefused {
    fn from(refused: Refused) -> Self {
        Self(refused)
    }
}

type Answer = Result<Response, OipRefused>;

pub(super) async fn server() -> Response {
    answer(&json!({
        "name": "trommel",
        "version": env!("CARGO_PKG_VERSION"),
        "extensions": ["binary_tensor_data"],
    }))
}

pub(super) async fn live() -> StatusCode {
    StatusCode::OK
}

pub(super) async fn ready(State(entrance): App) -> Answer {
    let missing = entrance.readiness.missing();
    if missing.is_empty() {
        return Ok(StatusCode::OK.into_response());
    }
    Err(OipRefused(Refused::new(
        StatusCode::SERVICE_UNAVAILABLE,
        "unavailable",
        missing.join("; "),
    )))
}

pub(super) async fn model(State(entrance): App, Path(name): Path<String>) -> Answer {
    Ok(metadata(entrance.model(&name)?))
}

pub(super) async fn version(
    State(entrance): App,
    Path((name, version)): Path<(String, String)>,
) -> Answer {
    Ok(metadata(of_version(&entrance, &name, &version)?))
}

pub(super) async fn model_ready(app: App, Path(name): Path<String>) -> Answer {
    app.0.model(&name)?;
    ready(app).await
}

pub(super) async fn version_ready(
    app: App,
    Path((name, version)): Path<(String, String)>,
) -> Answer {
    of_version(&app.0, &name, &version)?;
    ready(app).await
}

pub(super) async fn infer(
    State(entrance): App,
    Path(name): Path<String>,
    request: Request,
) -> Answer {
    answer_tensors(&entrance, request, || entrance.model(&name)).await
}

pub(super) async fn version_infer(
    State(entrance): App,
    Path((name, version)): Path<(String, String)>,
    request: Request,
) -> Answer {
    answer_tensors(&entrance, request, || {
        of_version(&entrance, &name, &version)
    })
    .await
}

fn of_version<'a>(
    entrance: &'a Entrance,
    name: &str,
    version: &str,
) -> Result<&'a Arc<ServedModel>, Refused> {
    let model = entrance.model(name)?;
    match **model.version() == *version {
        true => Ok(model),
        false => Err(Refused::new(
            StatusCode::NOT_FOUND,
            "unknown_model",
            format!("model {name} is here in version {}", model.version()),
        )),
    }
}

fn metadata(model: &ServedModel) -> Response {
    let outputs: Vec<Value> = OUTPUTS
        .iter()
        .map(|(name, datatype, ranks)| {
            let shape = vec![-1; *ranks];
            json!({ "name": name, "datatype": datatype, "shape": shape })
        })
        .collect();
    answer(&json!({
        "name": **model.name(),
        "versions": [**model.version()],
        "platform": "onnxruntime_onnx",
        "inputs": [{ "name": oip_tensors::INPUT, "datatype": "BYTES", "shape": [-1] }],
        "outputs": outputs,
    }))
}

async fn answer_tensors<'a>(
    entrance: &Entrance,
    request: Request,
    find: impl FnOnce() -> Result<&'a Arc<ServedModel>, Refused>,
) -> Answer {
    let since = Instant::now();
    let (head, body) = request.into_parts();
    let work = async {
        let found = find().and_then(|model| {
            model.check_room()?;
            let deadline = deadline(since, header(&head.headers, "trommel-deadline-ms"))?;
            Ok((model, deadline))
        });
        match found {
            Ok((model, deadline)) => work(entrance, model, since, deadline, &head, body).await,
            Err(refused) => Err(body::refuse(&head.headers, body, refused).await),
        }
    };
    Ok(observed("oip", since, &head.headers, work).await?)
}

async fn work(
    entrance: &Entrance,
    model: &Arc<ServedModel>,
    since: Instant,
    by_header: Option<Instant>,
    head: &Parts,
    body: Body,
) -> Result<(Response, &'static str), Refused> {
    let body = body::read(entrance, &head.headers, body).await?;
    let json_length = match header(&head.headers, JSON_LENGTH.as_str()) {
        None => None,
        Some(text) => Some(text.trim().parse::<usize>().map_err(|_| {
            Refused::malformed(format!("{JSON_LENGTH} is {text:?}; give a number of bytes"))
        })?),
    };
    let most = entrance.config.max_files.get();
    let request = InferRequest::read(&body.bytes, json_length, most)?;
    let mut params = Params::default();
    for (name, value) in &request.params {
        params.set(name, value)?;
    }
    let timeout = request.timeout.and_then(|time| since.checked_add(time));
    let asked = Asked {
        id: request_id(request.id.as_deref()),
        wanted: params.wanted(model).await?,
        deadline: by_header.into_iter().chain(timeout).min(),
    };
    let (images, _rooms) = match request.are_urls {
        true => named::fetch_all(entrance, &request.images, asked.deadline).await?,
        false => (request.images.iter().map(image).collect(), Vec::new()),
    };
    let admitted = model.admit(abreast(images.len()))?;
    let rows = entrance.several(&admitted, &asked, images).await;
    let alone = rows.len() == 1;
    let mut all = Vec::with_capacity(rows.len());
    let shape = asked.shape(model);
    for (index, row) in rows.into_iter().enumerate() {
        let row = row?;
        if let Outcome::Failed(failure) = &row.outcome {
            // This protocol has one answer for all images of a request.
            let message = match alone {
                true => failure.error.clone(),
                false => format!("image {index}: {}", failure.error),
            };
            return Err(Refused::new(
                status_of(failure.kind),
                failure.kind.as_str(),
                message,
            ));
        }
        let json = serde_json::to_string(&shape.row(&row)).map_err(|error| {
            Refused::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "unavailable",
                error.to_string(),
            )
        })?;
        all.push((row, json));
    }
    let outputs: Vec<Output> = {
        let scores: Vec<(&Scores, &str)> = all
            .iter()
            .filter_map(|(row, json)| match &row.outcome {
                Outcome::Ok(scores) => Some((scores, json.as_str())),
                Outcome::Failed(_) => None,
            })
            .collect();
        oip_tensors::outputs(&request, &scores)
    };
    Ok((response(model, &request, outputs), "ok"))
}

fn image(bytes: &Bytes) -> Image {
    let (uri, bytes) = (String::new(), bytes.clone());
    Image { uri, bytes }
}

/// JSON, followed by the tensors requested in binary.
fn response(model: &ServedModel, request: &InferRequest, outputs: Vec<Output>) -> Response {
    let mut binary = Vec::new();
    let mut described = Vec::with_capacity(outputs.len());
    for output in outputs {
        described.push(output.describe(&mut binary));
    }
    let mut answer = json!({
        "model_name": **model.name(),
        "model_version": **model.version(),
        "outputs": described,
    });
    if let Some(id) = &request.id {
        answer["id"] = id.as_str().into();
    }
    let mut body = answer.to_string().into_bytes();
    if binary.is_empty() {
        return refused::json(StatusCode::OK, body);
    }
    let length = body.len();
    body.append(&mut binary);
    let mut response = Response::new(Body::from(body));
    let headers = response.headers_mut();
    headers.insert(JSON_LENGTH, HeaderValue::from(length));
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(CONTENT_TYPE, kind);
    response
}

/// The timeout of a request in microseconds, as in Triton.
pub(super) fn timeout(value: &Value) -> Result<Duration, Refused> {
    let micros = value.as_u64().ok_or_else(|| {
        Refused::malformed(format!("timeout is {value}; give a number of microseconds"))
    })?;
    Ok(Duration::from_micros(micros))
}
