//! The meaning of responses and failed requests.

use std::error::Error;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::header::RETRY_AFTER;
use http::{HeaderMap, StatusCode};

use super::address::Private;
use super::url::HttpUrl;
use crate::{StorageError, StorageErrorKind};

/// An error about a url.
pub(super) fn failed(kind: StorageErrorKind, url: &HttpUrl, reason: &str) -> StorageError {
    StorageError::new(kind, format!("failed to fetch {url}: {reason}"))
}

/// Whether the server says that it may succeed later.
pub(super) fn is_busy(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    )
}

/// The meaning of a response without content.
pub(super) fn refused(url: &HttpUrl, status: StatusCode) -> StorageError {
    use StorageErrorKind::{Changed, NotAFile, NotFound, PermissionDenied, Unreadable};
    let (kind, remedy) = match status.as_u16() {
        404 | 410 => (NotFound, ""),
        401 | 407 => (
            PermissionDenied,
            ", which asks for a login; Trommel sends none",
        ),
        402 | 403 | 451 => (PermissionDenied, ""),
        408 | 425 | 429 => (Unreadable, ""),
        412 => (Changed, ""),
        501 | 505 => (NotAFile, ""),
        500.. => (Unreadable, ""),
        _ => (NotAFile, ""),
    };
    if kind == Changed {
        return StorageError::changed(url);
    }
    failed(kind, url, &format!("the server returned {status}{remedy}"))
}

/// The meaning of a missing response.
pub(super) fn unanswered(url: &HttpUrl, error: &(dyn Error + 'static)) -> StorageError {
    let chain = || {
        std::iter::successors(Some(error), |error: &&'_ (dyn Error + 'static)| {
            (*error).source()
        })
    };
    let inner = |error: &'_ (dyn Error + 'static)| -> Option<String> {
        let refusal = error.downcast_ref::<std::io::Error>()?.get_ref()?;
        refusal.downcast_ref::<Private>().map(ToString::to_string)
    };
    if let Some(reason) = chain().find_map(inner) {
        return failed(StorageErrorKind::PermissionDenied, url, &reason);
    }
    let last = chain().last().map_or_else(String::new, ToString::to_string);
    // The system's resolver has no error kinds, only messages.
    let unknown = ["not known", "does not resolve", "No address associated"];
    if unknown.iter().any(|words| last.contains(words)) {
        let reason = format!("unknown host ({last})");
        return failed(StorageErrorKind::NotFound, url, &reason);
    }
    let invalid = |error: &(dyn Error + 'static)| {
        let tls = error.downcast_ref::<rustls::Error>().or_else(|| {
            let inner = error.downcast_ref::<std::io::Error>()?.get_ref()?;
            inner.downcast_ref::<rustls::Error>()
        });
        matches!(tls, Some(rustls::Error::InvalidCertificate(_)))
    };
    if chain().any(invalid) {
        let reason = format!(
            "the server's certificate is not valid ({last}); an authority of your own is trusted by SSL_CERT_FILE"
        );
        return failed(StorageErrorKind::PermissionDenied, url, &reason);
    }
    failed(StorageErrorKind::Unreadable, url, &last)
}

/// How long the server asks not to be contacted: seconds, or a date.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = seconds_of_date(text)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(Duration::from_secs(date).saturating_sub(now))
}

/// Seconds since 1970 of a date such as `Sun, 06 Nov 1994 08:49:37 GMT`, the only form that servers
/// may send.
fn seconds_of_date(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let (_, date) = text.split_once(", ")?;
    let [day, month, year, time, "GMT"] = date.split(' ').collect::<Vec<_>>()[..] else {
        return None;
    };
    let number = |text: &str| text.parse::<u64>().ok();
    let (day, year) = (number(day)?, number(year)?);
    let month = MONTHS.iter().position(|known| *known == month)? as u64 + 1;
    let [hours, minutes, seconds] = time.split(':').collect::<Vec<_>>()[..] else {
        return None;
    };
    if !(1970..=9999).contains(&year) || !(1..=31).contains(&day) {
        return None;
    }
    // With years that begin in March, the leap day is the last one.
    let (years, months) = match month {
        3.. => (year, month - 3),
        _ => (year - 1, month + 9),
    };
    let days = 365 * years + years / 4 - years / 100 + years / 400 + (153 * months + 2) / 5 + day;
    let since_1970 = days.checked_sub(719_469)?;
    Some(((since_1970 * 24 + number(hours)?) * 60 + number(minutes)?) * 60 + number(seconds)?)
}

/// Whether the content is a page for people.
pub(super) fn is_html(body: &[u8]) -> bool {
    let body = body
        .strip_prefix(b"\xef\xbb\xbf")
        .unwrap_or(body)
        .trim_ascii_start();
    let begins = |tag: &str| {
        body.get(..tag.len())
            .is_some_and(|begin| begin.eq_ignore_ascii_case(tag.as_bytes()))
    };
    ["<!doctype html", "<html", "<head", "<body"]
        .iter()
        .any(|tag| begins(tag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_answer_has_its_class() {
        use StorageErrorKind::{Changed, NotAFile, NotFound, PermissionDenied, Unreadable};
        let url = HttpUrl::parse("https://host/a.jpg").unwrap();
        for (status, expected) in [
            (300, NotAFile),
            (400, NotAFile),
            (401, PermissionDenied),
            (403, PermissionDenied),
            (404, NotFound),
            (405, NotAFile),
            (408, Unreadable),
            (410, NotFound),
            (412, Changed),
            (418, NotAFile),
            (425, Unreadable),
            (429, Unreadable),
            (451, PermissionDenied),
            (500, Unreadable),
            (501, NotAFile),
            (502, Unreadable),
            (503, Unreadable),
            (504, Unreadable),
            (520, Unreadable),
        ] {
            let error = refused(&url, StatusCode::from_u16(status).unwrap());
            assert_eq!(error.kind(), expected, "{status}");
            assert!(error.to_string().contains("https://host/a.jpg"), "{error}");
        }
    }

    #[test]
    fn dates_are_read() {
        for (date, seconds) in [
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(784_111_777)),
            ("Thu, 01 Jan 1970 00:00:00 GMT", Some(0)),
            ("Thu, 29 Feb 2024 12:00:00 GMT", Some(1_709_208_000)),
            ("Sunday, 06-Nov-94 08:49:37 GMT", None),
            ("soon", None),
            ("Sun, 06 Nov 99999999999999999999 08:49:37 GMT", None),
        ] {
            assert_eq!(seconds_of_date(date), seconds, "{date}");
        }
    }

    #[test]
    fn pages_are_told_from_images() {
        assert!(is_html(b"\xef\xbb\xbf \n<!DOCTYPE HTML><html>"));
        assert!(is_html(b"<html lang=en>") && is_html(b"<HEAD>"));
        assert!(!is_html(b"\xff\xd8\xff\xe0") && !is_html(b"<svg/>") && !is_html(b"<ht"));
    }
}
