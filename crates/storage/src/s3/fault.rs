//! The meaning of a failed request: permanent, or worth another attempt.

use std::error::Error;

use aws_sdk_s3::config::interceptors::InterceptorContext;
use aws_sdk_s3::config::retry::{ClassifyRetry, RetryAction};
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};

use super::Location;
use crate::error::words;
use crate::{StorageError, StorageErrorKind};

/// Codes of temporary errors: the store is busy, or the clock or the credentials are momentarily
/// wrong.
const PASSING: [&str; 12] = [
    "ExpiredToken",
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestTimeTooSkewed",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
];

/// Whether another attempt at a request with this response may succeed.
fn passes(code: &str, status: Option<u16>) -> bool {
    PASSING.contains(&code) || matches!(status, Some(408 | 425 | 429 | 500..))
}

/// Makes the client retry responses that its own rules treat as permanent.
#[derive(Debug)]
pub(super) struct Passing;

impl ClassifyRetry for Passing {
    fn classify_retry(&self, context: &InterceptorContext) -> RetryAction {
        let Some(response) = context.response() else {
            return RetryAction::NoActionIndicated;
        };
        let status = response.status().as_u16();
        let code = || {
            response
                .body()
                .bytes()
                .and_then(code_of)
                .unwrap_or_default()
        };
        if status >= 400 && passes(code(), Some(status)) {
            RetryAction::transient_error()
        } else {
            RetryAction::NoActionIndicated
        }
    }

    fn name(&self) -> &'static str {
        "faults of S3 that pass"
    }
}

/// The code in an XML error.
fn code_of(body: &[u8]) -> Option<&str> {
    let (_, code) = str::from_utf8(body).ok()?.split_once("<Code>")?;
    Some(code.split_once("</Code>")?.0)
}

/// The kind of an error, and its remedy, if any.
fn meaning(code: &str, status: Option<u16>) -> Option<(StorageErrorKind, &'static str)> {
    Some(match (code, status) {
        _ if passes(code, status) => (StorageErrorKind::Unreadable, ""),
        ("NoSuchBucket", _) => (
            StorageErrorKind::NotFound,
            "the bucket does not exist; check its spelling, the region and the endpoint",
        ),
        ("NoSuchKey" | "NotFound", _) | (_, Some(404)) => {
            (StorageErrorKind::NotFound, "the object does not exist")
        }
        ("PreconditionFailed" | "ConditionalRequestConflict", _) | (_, Some(412)) => (
            StorageErrorKind::LostRace,
            "it was written by another process meanwhile",
        ),
        (_, Some(401 | 403)) => (
            StorageErrorKind::PermissionDenied,
            "the store refuses access; check the credentials and what they allow",
        ),
        ("InvalidRange", _) | (_, Some(416)) => (
            StorageErrorKind::NotAFile,
            "it ends before the requested bytes",
        ),
        (_, Some(301 | 307)) => (
            StorageErrorKind::InvalidSource,
            "the bucket is in another region; name it by AWS_REGION or s3.region",
        ),
        (_, Some(400..=499)) => (StorageErrorKind::InvalidSource, ""),
        _ => return None,
    })
}

pub(super) fn unreadable(message: String) -> StorageError {
    StorageError::new(StorageErrorKind::Unreadable, message)
}

/// The meaning of a failed request, with the object and the remedy.
pub(super) fn failed<E>(verb: &str, object: &Location, error: &SdkError<E>) -> StorageError
where
    E: ProvideErrorMetadata + Error + 'static,
{
    let status = error
        .raw_response()
        .map(|response| response.status().as_u16());
    let code = error.code().unwrap_or_default();
    let (kind, remedy) = meaning(code, status).unwrap_or_else(|| {
        let is_construction = matches!(error, SdkError::ConstructionFailure(_));
        if is_construction {
            (StorageErrorKind::InvalidSource, "")
        } else if words(error).contains("redentials") {
            (
                StorageErrorKind::PermissionDenied,
                "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or set s3.anonymous for a public bucket",
            )
        } else {
            (StorageErrorKind::Unreadable, "")
        }
    });
    let told = if matches!(error, SdkError::DispatchFailure(_)) && remedy.is_empty() {
        // The outer causes name layers of the client.
        let mut cause: &dyn Error = error;
        while let Some(next) = cause.source() {
            cause = next;
        }
        format!("{cause}; check the network, s3.endpoint and the region")
    } else if remedy.is_empty() {
        let code = if code.is_empty() {
            ""
        } else {
            &format!(" ({code})")
        };
        format!("{}{code}", words(error))
    } else {
        remedy.to_owned()
    };
    StorageError::new(kind, format!("failed to {verb} {}: {told}", object.uri()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R26: only real refusals are permanent.
    #[test]
    fn each_answer_has_its_class() {
        use StorageErrorKind::{
            InvalidSource, LostRace, NotAFile, NotFound, PermissionDenied, Unreadable,
        };
        for (code, status, expected) in [
            ("", 429, Unreadable),
            ("TooManyRequests", 429, Unreadable),
            ("", 408, Unreadable),
            ("RequestTimeout", 400, Unreadable),
            ("OperationAborted", 409, Unreadable),
            ("SlowDown", 503, Unreadable),
            ("ExpiredToken", 400, Unreadable),
            ("ExpiredToken", 403, Unreadable),
            ("RequestTimeTooSkewed", 403, Unreadable),
            ("InternalError", 500, Unreadable),
            ("", 502, Unreadable),
            ("", 503, Unreadable),
            ("", 504, Unreadable),
            ("AccessDenied", 403, PermissionDenied),
            ("InvalidAccessKeyId", 403, PermissionDenied),
            ("SignatureDoesNotMatch", 403, PermissionDenied),
            ("", 401, PermissionDenied),
            ("NoSuchKey", 404, NotFound),
            ("NoSuchBucket", 404, NotFound),
            ("", 404, NotFound),
            ("PreconditionFailed", 412, LostRace),
            ("ConditionalRequestConflict", 409, LostRace),
            ("BucketAlreadyExists", 409, InvalidSource),
            ("InvalidRange", 416, NotAFile),
            ("PermanentRedirect", 301, InvalidSource),
            ("InvalidRequest", 400, InvalidSource),
        ] {
            let told = meaning(code, Some(status)).map(|(kind, _)| kind);
            assert_eq!(told, Some(expected), "{code:?} {status}");
        }
        assert_eq!(meaning("", None), None);
    }

    #[test]
    fn a_cause_that_is_named_already_is_not_named_again() {
        #[derive(Debug, thiserror::Error)]
        #[error("{0}")]
        struct Told(&'static str, #[source] Option<Box<Told>>);
        let deepest = Told("connection refused", None);
        let middle = Told("connection refused", Some(Box::new(deepest)));
        let error = Told("dispatch failure", Some(Box::new(middle)));
        assert_eq!(words(&error), "dispatch failure: connection refused");
    }

    #[test]
    fn the_code_of_an_error_is_found_in_its_body() {
        let body =
            b"<?xml version=\"1.0\"?><Error><Code>SlowDown</Code><Message>x</Message></Error>";
        assert_eq!(code_of(body), Some("SlowDown"));
        assert_eq!(code_of(b"<html>busy</html>"), None);
        assert_eq!(code_of(b"\xff<Code>"), None);
    }
}
