//! `POST /v1/models/NAME/classify`: rows for an image, or for several in a form.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Path, Request, State};
use axum::response::Response;
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode};
use serde_json::{Value, json};
use trommel_sink::RowShape;
use trommel_types::{Classification, Outcome};
use trommel_worker::{NotAnswered, ServedModel};

use super::{App, header, observed};
use crate::body;
use crate::entrance::{Asked, Entrance, Image, abreast, deadline, outcome, request_id};
use crate::named;
use crate::params::Params;
use crate::refused::{self, Refused, status_of};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

pub(super) async fn classify(
    State(entrance): App,
    Path(name): Path<String>,
    request: Request,
) -> Result<Response, Refused> {
    let since = Instant::now();
    let (head, body) = request.into_parts();
    let id = request_id(header(&head.headers, REQUEST_ID.as_str()));
    let work = async {
        let prepared = prepare(&entrance, &name, since, &id, &head).await;
        let (model, asked, uri, kind) = match prepared {
            Ok(prepared) => prepared,
            Err(refused) => return Err(body::refuse(&head.headers, body, refused).await),
        };
        let body = body::read(&entrance, &head.headers, body).await?;
        let bytes = body.bytes.clone();
        match kind {
            BodyKind::Url => {
                drop(body);
                let (image, _room) = named::fetch(&entrance, bytes, uri, asked.deadline).await?;
                one(&entrance, model, asked, image).await
            }
            BodyKind::Image => {
                let uri = uri.unwrap_or_default();
                one(&entrance, model, asked, Image { uri, bytes }).await
            }
            BodyKind::Form { boundary } => {
                let images = images(&entrance, bytes, boundary).await?;
                several(&entrance, model, &asked, images).await
            }
        }
    };
    let mut response = observed("http", since, &head.headers, work).await?;
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    Ok(response)
}

/// The request according to its header.
type Prepared<'a> = (&'a Arc<ServedModel>, Asked, Option<String>, BodyKind);

async fn prepare<'a>(
    entrance: &'a Entrance,
    name: &str,
    since: Instant,
    id: &Arc<str>,
    head: &Parts,
) -> Result<Prepared<'a>, Refused> {
    let model = entrance.model(name)?;
    let params = Params::of_query(head.uri.query())?;
    let asked = Asked {
        id: Arc::clone(id),
        wanted: params.wanted(model).await?,
        deadline: deadline(since, header(&head.headers, "trommel-deadline-ms"))?,
    };
    let kind = BodyKind::of(&head.headers)?;
    if matches!(kind, BodyKind::Url) && entrance.urls.is_none() {
        return Err(Refused::no_urls());
    }
    // Refused before the client sends a large image.
    model.check_room()?;
    Ok((model, asked, params.uri, kind))
}

async fn one(
    entrance: &Entrance,
    model: &Arc<ServedModel>,
    asked: Asked,
    image: Image,
) -> Result<(Response, &'static str), Refused> {
    let shape = asked.shape(model);
    let row = entrance.one(model.admit(1)?, asked, image).await?;
    let json = row_json(&shape, &row)?;
    let response = match &row.outcome {
        Outcome::Ok(_) => refused::json(StatusCode::OK, json),
        Outcome::Failed(failure) => refused::json(status_of(failure.kind), json),
    };
    Ok((response, outcome(&row)))
}

async fn several(
    entrance: &Entrance,
    model: &Arc<ServedModel>,
    asked: &Asked,
    images: Vec<Image>,
) -> Result<(Response, &'static str), Refused> {
    let admitted = model.admit(abreast(images.len()))?;
    let shape = asked.shape(model);
    let uris: Vec<_> = images.iter().map(|image| image.uri.clone()).collect();
    let rows = entrance.several(&admitted, asked, images).await;
    let mut list = vec![b'['];
    for ((index, uri), row) in uris.into_iter().enumerate().zip(rows) {
        if index > 0 {
            list.push(b',');
        }
        list.extend(match row {
            Ok(row) => row_json(&shape, &row)?,
            Err(error) => without_row(index, &uri, error).to_string().into_bytes(),
        });
    }
    list.push(b']');
    Ok((refused::json(StatusCode::OK, list), "ok"))
}

/// The entry of an image without a row.
fn without_row(index: usize, uri: &str, error: NotAnswered) -> Value {
    let refused = Refused::from(error);
    json!({
        "index": index,
        "uri": uri,
        "status": "failed",
        "error_kind": refused.kind,
        "error": refused.message,
    })
}

fn row_json(shape: &RowShape, row: &Classification) -> Result<Vec<u8>, Refused> {
    serde_json::to_vec(&shape.row(row)).map_err(|error| unwritten(&error))
}

fn unwritten(error: &serde_json::Error) -> Refused {
    let message = format!("the row cannot be written as JSON: {error}");
    Refused::new(StatusCode::INTERNAL_SERVER_ERROR, "unavailable", message)
}

/// The kind of a request's body.
enum BodyKind {
    /// An encoded image.
    Image,
    /// Several, as `multipart/form-data`.
    Form { boundary: String },
    /// An image's url, as JSON.
    Url,
}

impl BodyKind {
    /// From the content type. The default types of clients count as an image, which is recognised
    /// by its own content.
    fn of(headers: &HeaderMap) -> Result<Self, Refused> {
        let Some(kind) = headers.get(CONTENT_TYPE) else {
            return Ok(Self::Image);
        };
        let kind = kind.to_str().unwrap_or_default();
        let essence = kind.split(';').next().unwrap_or_default().trim();
        let essence = essence.to_ascii_lowercase();
        match essence.as_str() {
            "multipart/form-data" => {
                let boundary = multer::parse_boundary(kind);
                let boundary = boundary.map_err(|error| {
                    Refused::malformed(format!("the form's boundary cannot be read: {error}"))
                })?;
                Ok(Self::Form { boundary })
            }
            "" | "application/octet-stream" | "application/x-www-form-urlencoded" => {
                Ok(Self::Image)
            }
            named::CONTENT_TYPE => Ok(Self::Url),
            image if image.starts_with("image/") => Ok(Self::Image),
            _ => Err(Refused::unsupported(format!(
                "the body is {essence}; send the image's bytes as image/* or application/octet-stream, or several images as multipart/form-data"
            ))),
        }
    }
}

/// The parts of a form, each an image.
async fn images(entrance: &Entrance, body: Bytes, boundary: String) -> Result<Vec<Image>, Refused> {
    let most = entrance.config.max_files.get();
    let malformed =
        |error: multer::Error| Refused::malformed(format!("the form cannot be read: {error}"));
    let body = futures::stream::iter([Ok::<_, Infallible>(body)]);
    let mut form = multer::Multipart::new(body, boundary);
    let mut images = Vec::new();
    while let Some(part) = form.next_field().await.map_err(malformed)? {
        if images.len() == most {
            return Err(Refused::too_large(format!(
                "the form has more parts than serve.max-files = {most}"
            )));
        }
        let uri = part.file_name().or(part.name()).unwrap_or_default();
        let uri = uri.to_owned();
        let bytes = part.bytes().await.map_err(malformed)?;
        images.push(Image { uri, bytes });
    }
    if images.is_empty() {
        return Err(Refused::malformed(
            "the form has no parts; each is an image",
        ));
    }
    Ok(images)
}
