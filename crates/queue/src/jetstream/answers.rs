//! The meaning of the broker's error responses.

use async_nats::HeaderMap;
use serde::Deserialize;

use crate::{QueueError, QueueErrorKind};

/// Length of a protocol line that every server accepts; `max_control_line` unless changed.
const CONTROL_LINE: usize = 4096;
/// Other parts of such a line besides the subject: the verb, an inbox, two sizes.
const LINE_REST: usize = 160;
/// Most bytes of headers in a stream, regardless of `max_payload`.
const STREAM_HEADERS: usize = 65_535;

/// An error response of JetStream.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Refusal {
    #[serde(default)]
    code: u64,
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    pub(super) description: String,
}

/// What to do about a [`Refusal`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The stream is full; there will be room.
    Full,
    /// The account or the server is full; there is room once other streams shrink or the limit is
    /// raised.
    AccountLimit,
    /// The server is temporarily unavailable.
    Busy,
    /// The message is too large.
    TooLarge,
    /// The subject's newest message is not the expected one.
    Conflict,
    /// Permanent.
    Refused,
}

impl Refusal {
    pub(super) fn verdict(&self) -> Verdict {
        match (self.err_code, self.description.as_str()) {
            // One code is used for all limits; only the text tells them apart.
            (10077, text) if text.contains("per subject") => Verdict::Refused,
            (10077, text) if text.starts_with("maximum") => Verdict::Full,
            (10054 | 10097, _) => Verdict::TooLarge,
            (10071 | 10164, _) => Verdict::Conflict,
            (10002 | 10026 | 10027 | 10028 | 10047 | 10120 | 10122, _) => Verdict::AccountLimit,
            // An earlier attempt to store the same id is in progress among the replicas; a later
            // one learns its result.
            (10158, _) => Verdict::Busy,
            _ if self.code >= 500 => Verdict::Busy,
            _ => Verdict::Refused,
        }
    }

    pub(super) fn is(&self, codes: &[ErrorCode]) -> bool {
        codes.iter().any(|code| u64::from(code.0) == self.err_code)
    }

    /// The error for an account limit, for callers that do not wait.
    pub(super) fn account_limit(&self, subject: &str) -> QueueError {
        let remedy = match self.err_code {
            10026 => "raise the account's `max_consumers`",
            10027 => "raise the account's `max_streams`",
            10120 => "give the account JetStream limits in the server's configuration",
            10122 => "raise the account's `max_bytes` of one stream, or lower the broker limits",
            _ => {
                "raise the account's `max_file` (JetStream storage) or the server's \
                 `max_file_store`, or `max_mem` and `max_memory_store` for tensors in memory; lower \
                 the broker limits of the streams, or remove streams"
            }
        };
        QueueError::new(
            QueueErrorKind::AccountLimit,
            format!(
                "JetStream has no room for {subject}: {}; {remedy}",
                self.description
            ),
        )
    }
}

/// A code of JetStream's errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct ErrorCode(u16);

impl ErrorCode {
    pub(super) const CONSUMER_NOT_FOUND: Self = Self(10014);
    pub(super) const NO_MESSAGE_FOUND: Self = Self(10037);
    pub(super) const NOT_ENABLED: Self = Self(10076);
    pub(super) const NOT_ENABLED_FOR_ACCOUNT: Self = Self(10039);
    pub(super) const STREAM_NAME_EXIST: Self = Self(10058);
    pub(super) const STREAM_NOT_FOUND: Self = Self(10059);
}

/// Refuses a subject for which the server would close the connection.
pub(super) fn check_subject(subject: &str) -> Result<(), QueueError> {
    let room = CONTROL_LINE - LINE_REST;
    if subject.len() <= room {
        return Ok(());
    }
    let start: String = subject.chars().take(64).collect();
    Err(QueueError::new(
        QueueErrorKind::TooLarge,
        format!(
            "subject {start}… of {} bytes is longer than the broker takes: shorten the names in it \
             to {room} bytes together",
            subject.len()
        ),
    ))
}

/// Refuses a message that no server accepts, before it is sent.
pub(super) fn check_size(
    subject: &str,
    headers: &HeaderMap,
    payload: usize,
    max_payload: usize,
) -> Result<(), QueueError> {
    let headers = header_bytes(headers);
    if headers > STREAM_HEADERS {
        return Err(QueueError::new(
            QueueErrorKind::TooLarge,
            format!(
                "headers of {headers} bytes for {subject} are larger than the {STREAM_HEADERS} bytes \
                 that a stream takes"
            ),
        ));
    }
    if headers + payload > max_payload {
        return Err(too_large(subject, headers + payload, max_payload));
    }
    Ok(())
}

pub(super) fn too_large(subject: &str, size: usize, max_payload: usize) -> QueueError {
    QueueError::new(
        QueueErrorKind::TooLarge,
        format!(
            "message of {size} bytes for {subject} is larger than the broker takes: raise \
             `max_payload` (now {max_payload} bytes) in the configuration of nats-server"
        ),
    )
}

/// Size of headers on the wire.
pub(super) fn header_bytes(headers: &HeaderMap) -> usize {
    let lines = headers
        .iter()
        .flat_map(|(name, values)| values.iter().map(move |value| (name, value)));
    let lines = lines.map(|(name, value)| AsRef::<str>::as_ref(name).len() + value.as_str().len());
    "NATS/1.0\r\n\r\n".len() + lines.map(|line| line + ": \r\n".len()).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(code: u64, err_code: u64, description: &str) -> Refusal {
        Refusal {
            code,
            err_code,
            description: description.to_owned(),
        }
    }

    #[test]
    fn refusals_differ_in_what_helps() {
        let table = [
            (503, 10077, "maximum messages exceeded", Verdict::Full),
            (503, 10077, "maximum bytes exceeded", Verdict::Full),
            (
                503,
                10077,
                "maximum messages per subject exceeded",
                Verdict::Refused,
            ),
            (
                400,
                10054,
                "message size exceeds maximum allowed",
                Verdict::TooLarge,
            ),
            (
                400,
                10097,
                "header size exceeds maximum allowed of 64k",
                Verdict::TooLarge,
            ),
            (
                503,
                10008,
                "JetStream system temporarily unavailable",
                Verdict::Busy,
            ),
            (
                409,
                10158,
                "duplicate message id is in process",
                Verdict::Busy,
            ),
            (400, 10071, "wrong last sequence: 5", Verdict::Conflict),
            (
                400,
                10002,
                "resource limits exceeded for account",
                Verdict::AccountLimit,
            ),
            (
                500,
                10047,
                "insufficient storage resources available",
                Verdict::AccountLimit,
            ),
            (400, 10025, "bad request", Verdict::Refused),
        ];
        for (code, err_code, text, verdict) in table {
            assert_eq!(refusal(code, err_code, text).verdict(), verdict, "{text}");
        }
    }

    #[test]
    fn an_account_limit_says_what_to_raise() {
        let error = refusal(400, 10027, "maximum number of streams reached");
        let error = error.account_limit("STREAM.CREATE.X");
        assert_eq!(error.kind(), QueueErrorKind::AccountLimit);
        assert!(error.to_string().contains("`max_streams`"), "{error}");
    }

    /// R22: the server drops the connection for a longer one.
    #[test]
    fn a_subject_beyond_the_control_line_is_refused() {
        check_subject(&"a".repeat(3900)).unwrap();
        let error = check_subject(&"a".repeat(4000)).unwrap_err();
        assert_eq!(error.kind(), QueueErrorKind::TooLarge);
        assert!(error.to_string().len() < 300, "{error}");
    }

    /// R16: headers count, and have a limit of their own.
    #[test]
    fn headers_count_as_part_of_a_message() {
        let mut headers = HeaderMap::new();
        headers.insert("A", "x".repeat(1000));
        assert_eq!(header_bytes(&headers), 12 + 1 + 1000 + 4);
        check_size("s", &headers, 1000, 2017).unwrap();
        let error = check_size("s", &headers, 1001, 2017).unwrap_err();
        assert!(error.to_string().contains("`max_payload`"), "{error}");
        headers.insert("A", "x".repeat(66_000));
        let error = check_size("s", &headers, 0, 1 << 20).unwrap_err();
        assert_eq!(error.kind(), QueueErrorKind::TooLarge);
    }
}
