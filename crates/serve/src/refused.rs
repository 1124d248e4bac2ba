use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use serde::Serialize;
use trommel_types::ErrorKind;
use trommel_worker::{NotAnswered, UrlFault, UrlFaultKind};

/// Why a request gets no row, or is invalid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) status: StatusCode,
    /// One of a closed set.
    pub(crate) kind: &'static str,
    /// A sentence for people.
    pub(crate) message: String,
}

/// A refusal as sent to the client.
#[derive(Debug, Serialize)]
pub(crate) struct Refusal<'a> {
    error_kind: &'a str,
    error: &'a str,
}

impl Refused {
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
        }
    }

    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "malformed", message)
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_type",
            message,
        )
    }

    pub(crate) fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    }

    pub(crate) fn full(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "full", message)
    }

    pub(crate) fn unknown_model(name: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "unknown_model",
            format!("model {name:?} does not exist; GET /v1/models lists all"),
        )
    }

    /// A request with a url where none may be fetched.
    pub(crate) fn no_urls() -> Self {
        Self::unsupported(
            "the request names a url, but this server fetches none (serve.allow-url names no place); send the image's bytes",
        )
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            "unauthorized",
            "bring the server's token as `Authorization: Bearer TOKEN`",
        )
    }

    /// The refusal as JSON.
    pub(crate) fn json(&self) -> Vec<u8> {
        let refusal = Refusal {
            error_kind: self.kind,
            error: &self.message,
        };
        serde_json::to_vec(&refusal).expect("two texts are JSON")
    }

    /// The outcome in metrics.
    pub(crate) fn outcome(&self) -> &'static str {
        match self.kind {
            "full" => "shed",
            "deadline" => "expired",
            _ if self.status.is_server_error() => "error",
            _ => "refused",
        }
    }

    /// The response with this body, and the headers for the status.
    pub(crate) fn response(&self, body: Vec<u8>) -> Response {
        let mut response = json(self.status, body);
        let headers = response.headers_mut();
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        self.response(self.json())
    }
}

impl From<NotAnswered> for Refused {
    fn from(error: NotAnswered) -> Self {
        let message = error.to_string();
        match error {
            NotAnswered::Full { .. } => Self::full(message),
            NotAnswered::Expired => Self::new(StatusCode::GATEWAY_TIMEOUT, "deadline", message),
            NotAnswered::Settings(_) => Self::malformed(message),
            NotAnswered::Away(_) | NotAnswered::Broken(_) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
            }
        }
    }
}

impl From<UrlFault> for Refused {
    fn from(fault: UrlFault) -> Self {
        let (status, kind) = match fault.kind {
            UrlFaultKind::Malformed => (StatusCode::BAD_REQUEST, "malformed"),
            UrlFaultKind::Denied => (StatusCode::FORBIDDEN, "permission_denied"),
            UrlFaultKind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "too_large"),
            UrlFaultKind::Unreadable => (StatusCode::BAD_GATEWAY, "unreadable"),
            UrlFaultKind::TimedOut => (StatusCode::GATEWAY_TIMEOUT, "timeout"),
        };
        Self::new(status, kind, fault.message)
    }
}

/// A response with a JSON body.
pub(crate) fn json(status: StatusCode, body: impl Into<axum::body::Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// The status of the answer for an image without a label.
pub(crate) fn status_of(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::UnknownFormat | ErrorKind::Unsupported => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ErrorKind::TooLarge | ErrorKind::TooManyPixels => StatusCode::PAYLOAD_TOO_LARGE,
        ErrorKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
        ErrorKind::ModelFailed | ErrorKind::Poisoned => StatusCode::INTERNAL_SERVER_ERROR,
        _ => StatusCode::BAD_REQUEST,
    }
}
