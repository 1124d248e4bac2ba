//! Fetches images of requests from allowed places on the web.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;
use trommel_storage::StorageErrorKind;
use trommel_storage::http::{Http, HttpUrl};

use crate::{Allowed, WorkerConfig, WorkerError};

/// Fetches images that requests name by url.
///
/// Redirects are followed to allowed places; addresses of this machine and of private networks are
/// refused unless `http.allow-private` allows them, as for sources.
#[derive(Clone)]
pub struct LiveUrls {
    http: Http,
    allowed: Arc<Allowed>,
}

/// Why a url gave no image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UrlFault {
    /// The side at fault.
    pub kind: UrlFaultKind,
    /// The reason, for people.
    pub message: String,
}

/// The kinds of a [`UrlFault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UrlFaultKind {
    /// The url is malformed.
    Malformed,
    /// It is not allowed.
    Denied,
    /// It exceeds the size limit.
    TooLarge,
    /// Its server returned no possible image.
    Unreadable,
    /// Its server took too long.
    TimedOut,
}

impl LiveUrls {
    /// From `serve.allow-url`; `None` if it lists no places.
    ///
    /// # Errors
    /// Everything that is invalid in the setting.
    pub fn new(config: &WorkerConfig) -> Result<Option<Self>, WorkerError> {
        let places = &config.serve.allow_url;
        if places.is_empty() {
            return Ok(None);
        }
        let allowed = Allowed::of_urls("serve.allow-url", places);
        let allowed = allowed.map_err(|problems| WorkerError::Settings(problems.join("; ")))?;
        let allowed = Arc::new(allowed);
        Ok(Some(Self {
            http: Http::new(&config.http, Arc::clone(&allowed).rule()),
            allowed,
        }))
    }

    /// Reads the object at a url, within limits of bytes and time.
    ///
    /// # Errors
    /// See [`UrlFaultKind`].
    pub async fn fetch(&self, url: &str, limit: u64, time: Duration) -> Result<Bytes, UrlFault> {
        let fault = |kind, message: String| UrlFault { kind, message };
        if !HttpUrl::is_url(url) {
            let message = "url must be an https:// or http:// address".to_owned();
            return Err(fault(UrlFaultKind::Malformed, message));
        }
        let parsed = HttpUrl::parse(url);
        let parsed =
            parsed.map_err(|reason| fault(UrlFaultKind::Malformed, format!("url: {reason}")))?;
        self.allowed.check_source(url).map_err(|_| {
            let message = format!(
                "{} is not allowed: this server fetches only what serve.allow-url names",
                parsed.origin()
            );
            fault(UrlFaultKind::Denied, message)
        })?;
        // Including waits for a busy host, which the fetch itself does not count.
        let fetched = timeout(time, self.http.fetch(&parsed, None, None, limit, time)).await;
        let late = || {
            let message = format!("failed to fetch {parsed}: it took too long");
            fault(UrlFaultKind::TimedOut, message)
        };
        let (bytes, _) = fetched.map_err(|_| late())?.map_err(|error| {
            let kind = match error.kind() {
                StorageErrorKind::PermissionDenied => UrlFaultKind::Denied,
                StorageErrorKind::TooLarge => UrlFaultKind::TooLarge,
                StorageErrorKind::TimedOut => UrlFaultKind::TimedOut,
                _ => UrlFaultKind::Unreadable,
            };
            fault(kind, error.to_string())
        })?;
        Ok(bytes)
    }
}
