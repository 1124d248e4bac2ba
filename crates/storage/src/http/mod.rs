//! Objects on the web, at `https://` and `http://` urls.
//!
//! One request per fetch, over reused connections. A host gets a few concurrent requests, and none
//! while it reports that it is busy (`429`, `503`, `Retry-After`). Redirects are followed; their
//! targets are checked like the original url. Addresses of this machine and of private networks are
//! refused unless allowed: the addresses of connections are checked, not names.
//!
//! Not done here: the worker retries other failures, as for any store.

mod address;
mod client;
mod config;
mod fault;
mod gate;
mod url;

use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header::{
    ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, IF_MATCH,
    LAST_MODIFIED, LOCATION, RANGE, USER_AGENT,
};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use self::address::{Private, is_public};
#[cfg(any(feature = "gs", feature = "az"))]
pub(crate) use self::client::https;
use self::client::{WebClient, connect};
pub use self::config::HttpConfig;
use self::fault::{failed, is_busy, is_html, refused, retry_after, unanswered};
use self::gate::{Gates, Pass};
pub use self::url::HttpUrl;
use crate::{PlaceRule, StorageError, StorageErrorKind, background};

/// How often one fetch waits for a busy host.
const BUSY: u32 = 8;
/// Attempts to read a piece of a list or archive while listing.
const ATTEMPTS: u32 = 4;
/// Most bytes of a response that are read only to reuse its connection.
const DRAINED: usize = 16 << 10;

/// Information about an object without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Looked {
    /// Its size in bytes, if the server reports it.
    pub size: Option<u64>,
    /// Its version: its entity tag as the server sends it, else its modification time.
    pub etag: Option<String>,
    /// Whether the server supports ranges.
    pub has_ranges: bool,
}

/// A client. Cheap to clone; connects on first use.
#[derive(Clone)]
pub struct Http {
    shared: Arc<Shared>,
}

struct Shared {
    config: HttpConfig,
    rule: PlaceRule,
    client: OnceLock<WebClient>,
    gates: Gates,
    requests: Semaphore,
}

/// The parameters of a request.
#[derive(Clone, Copy, Default)]
struct Ask<'a> {
    range: Option<(u64, u64)>,
    etag: Option<&'a str>,
}

/// A response, with the guards to hold while its content is read.
struct Answer<'a> {
    url: HttpUrl,
    response: Response<Incoming>,
    pass: Pass,
    _permit: Option<SemaphorePermit<'a>>,
}

/// The time limit of a fetch, without its waits for a busy host.
struct Clock {
    left: Duration,
    spent: Duration,
}

impl Clock {
    async fn run<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let start = Instant::now();
        let ended = timeout(self.left, work).await.ok();
        let took = start.elapsed();
        self.spent += took;
        self.left = self.left.saturating_sub(took);
        ended
    }
}

impl Http {
    /// A client with these settings, which follows redirects that `rule` allows.
    pub fn new(config: &HttpConfig, rule: PlaceRule) -> Self {
        Self {
            shared: Arc::new(Shared {
                config: config.clone(),
                rule,
                client: OnceLock::new(),
                gates: Gates::new(config.max_per_host.max(1), config.max_wait),
                requests: Semaphore::new(config.max_concurrency.max(1)),
            }),
        }
    }

    /// Reads an object, or `range` of it (offset and length), at most `limit` bytes, and only in
    /// the version `etag`, if given. Also returns the time that it took, at most `time`, without
    /// the waits for its host.
    ///
    /// # Errors
    /// If the object does not exist, has another version, is a page for people, exceeds the size or
    /// time limit, or must not be connected to.
    pub async fn fetch(
        &self,
        url: &HttpUrl,
        range: Option<(u64, u64)>,
        etag: Option<String>,
        limit: u64,
        time: Duration,
    ) -> Result<(Bytes, Duration), StorageError> {
        let (http, url) = (self.clone(), url.clone());
        background::run(async move {
            let etag = etag.as_deref();
            http.shared
                .read(&url, Ask { range, etag }, limit, time)
                .await
        })
        .await
    }

    /// As [`Http::fetch`], for a listing on a thread of this module: temporary errors are retried.
    ///
    /// # Errors
    /// As [`Http::fetch`].
    pub async fn get_version(
        &self,
        url: &HttpUrl,
        range: (u64, u64),
        etag: Option<&str>,
    ) -> Result<Bytes, StorageError> {
        let ask = Ask {
            range: Some(range),
            etag,
        };
        let time = self.shared.config.timeout.saturating_mul(2);
        let read = || self.shared.read(url, ask, range.1, time);
        Ok(repeated(read).await?.0)
    }

    /// Information about an object without reading it. For callers on a thread of this module.
    ///
    /// # Errors
    /// If the object does not exist or cannot be reached.
    pub async fn look(&self, url: &HttpUrl) -> Result<Looked, StorageError> {
        repeated(|| self.shared.look(url)).await
    }
}

/// Retries temporary errors.
async fn repeated<T, F: Future<Output = Result<T, StorageError>>>(
    request: impl Fn() -> F,
) -> Result<T, StorageError> {
    let mut attempt = 1;
    loop {
        match request().await {
            Err(error)
                if attempt < ATTEMPTS
                    && matches!(
                        error.kind(),
                        StorageErrorKind::Unreadable | StorageErrorKind::TimedOut
                    ) =>
            {
                let wait = Duration::from_millis(200) * (1 << attempt);
                tokio::time::sleep(wait).await;
                attempt += 1;
            }
            ended => return ended,
        }
    }
}

impl Shared {
    fn client(&self) -> &WebClient {
        self.client.get_or_init(|| connect(&self.config))
    }

    async fn look(&self, url: &HttpUrl) -> Result<Looked, StorageError> {
        let mut clock = Clock {
            left: self.config.timeout.saturating_mul(2),
            spent: Duration::ZERO,
        };
        // Not with HEAD: addresses signed for GET refuse it.
        let ask = Ask {
            range: Some((0, 1)),
            etag: None,
        };
        let answer = self.answer(url, ask, &mut clock).await?;
        let headers = answer.response.headers();
        let etag = version(headers);
        let looked = match answer.response.status() {
            StatusCode::PARTIAL_CONTENT => Looked {
                size: whole_size(headers),
                etag,
                has_ranges: true,
            },
            StatusCode::RANGE_NOT_SATISFIABLE => Looked {
                size: Some(0),
                etag,
                has_ranges: true,
            },
            status if status.is_success() => Looked {
                size: promised(headers),
                etag,
                has_ranges: false,
            },
            status => return Err(refused(&answer.url, status)),
        };
        Ok(looked)
    }

    async fn read(
        &self,
        url: &HttpUrl,
        ask: Ask<'_>,
        limit: u64,
        time: Duration,
    ) -> Result<(Bytes, Duration), StorageError> {
        if ask.range.is_some_and(|(_, length)| length == 0) {
            return Ok((Bytes::new(), Duration::ZERO));
        }
        let mut clock = Clock {
            left: time,
            spent: Duration::ZERO,
        };
        let answer = self.answer(url, ask, &mut clock).await?;
        check(url, &answer.response, ask)?;
        let promised = promised(answer.response.headers());
        if let Some(size) = promised.filter(|size| *size > limit) {
            return Err(StorageError::too_large(url, size, limit));
        }
        let body = self.body(url, answer, promised, limit);
        let bytes = match clock.run(body).await {
            Some(bytes) => bytes?,
            None => return Err(StorageError::timed_out(url, time)),
        };
        match ask.range {
            Some((_, length)) if bytes.len() as u64 != length => Err(failed(
                StorageErrorKind::NotAFile,
                url,
                "it ends before the requested bytes",
            )),
            None if is_html(&bytes) => Err(failed(
                StorageErrorKind::NotAFile,
                url,
                "it is an HTML page and no image; the link may have expired or ask for a login",
            )),
            _ => Ok((bytes, clock.spent)),
        }
    }

    async fn body(
        &self,
        url: &HttpUrl,
        answer: Answer<'_>,
        promised: Option<u64>,
        limit: u64,
    ) -> Result<Bytes, StorageError> {
        let mut body = answer.response.into_body();
        // The promised bytes may never come.
        let room = promised.unwrap_or(0).min(1 << 20);
        let mut bytes = BytesMut::with_capacity(usize::try_from(room).unwrap_or(0));
        loop {
            let Ok(frame) = timeout(self.config.timeout, body.frame()).await else {
                return Err(failed(StorageErrorKind::TimedOut, url, "it stalled"));
            };
            let Some(frame) = frame else { break };
            let frame = frame.map_err(|error| unanswered(url, &error))?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if bytes.len() as u64 + data.len() as u64 > limit {
                let size = bytes.len() as u64 + data.len() as u64;
                return Err(StorageError::too_large(url, size, limit));
            }
            bytes.extend_from_slice(&data);
        }
        answer.pass.answered();
        Ok(bytes.freeze())
    }

    /// The response after all redirects, once its host is no longer busy.
    async fn answer(
        &self,
        named: &HttpUrl,
        ask: Ask<'_>,
        clock: &mut Clock,
    ) -> Result<Answer<'_>, StorageError> {
        let time = clock.left;
        let (mut url, mut redirects, mut busy) = (named.clone(), 0, 0);
        loop {
            self.check_address(&url)?;
            let pass = self.gates.enter(&url.origin()).await;
            let permit = self.requests.acquire().await.ok();
            let request = self.request(&url, ask)?;
            let response = match clock.run(self.client().request(request)).await {
                Some(Ok(response)) => response,
                Some(Err(error)) => return Err(unanswered(&url, &error)),
                None => return Err(StorageError::timed_out(named, time)),
            };
            let status = response.status();
            if is_busy(status) {
                pass.refused(retry_after(response.headers()));
                busy += 1;
                if busy > BUSY {
                    return Err(refused(&url, status));
                }
                clock.run(drained(response)).await;
                continue;
            }
            if !status.is_redirection() || !response.headers().contains_key(LOCATION) {
                return Ok(Answer {
                    url,
                    response,
                    pass,
                    _permit: permit,
                });
            }
            redirects += 1;
            if redirects > self.config.max_redirects {
                let reason = format!(
                    "it is redirected more than {} times (http.max-redirects)",
                    self.config.max_redirects
                );
                return Err(failed(StorageErrorKind::NotAFile, named, &reason));
            }
            url = self.redirected(named, &url, &response)?;
            pass.answered();
            clock.run(drained(response)).await;
        }
    }

    /// The target of a redirect.
    fn redirected(
        &self,
        named: &HttpUrl,
        url: &HttpUrl,
        response: &Response<Incoming>,
    ) -> Result<HttpUrl, StorageError> {
        let location = response.headers().get(LOCATION);
        let location = location.map_or_else(String::new, |location| {
            String::from_utf8_lossy(location.as_bytes()).into_owned()
        });
        let next = url.join(&location).map_err(|reason| {
            let reason = format!("it is redirected to {location:?}: {reason}");
            failed(StorageErrorKind::NotAFile, named, &reason)
        })?;
        self.rule.check(&next.to_string()).map_err(|reason| {
            let reason = format!("it is redirected: {reason}");
            failed(StorageErrorKind::PermissionDenied, named, &reason)
        })?;
        Ok(next)
    }

    /// Refuses a url whose host is a forbidden address; names are checked when they are resolved.
    fn check_address(&self, url: &HttpUrl) -> Result<(), StorageError> {
        let is_private = |address| !is_public(address);
        if self.config.allow_private || !url.address().is_some_and(is_private) {
            return Ok(());
        }
        let reason = Private::new(url.host()).to_string();
        Err(failed(StorageErrorKind::PermissionDenied, url, &reason))
    }

    fn request(&self, url: &HttpUrl, ask: Ask<'_>) -> Result<Request<Empty<Bytes>>, StorageError> {
        let mut request = Request::get(url.to_string())
            .header(USER_AGENT, &self.config.user_agent)
            .header(ACCEPT, "*/*")
            .header(ACCEPT_ENCODING, "identity");
        if let Some((offset, length)) = ask.range {
            let last = offset.saturating_add(length) - 1;
            request = request.header(RANGE, format!("bytes={offset}-{last}"));
        }
        // Weak tags and modification times are only compared with those of the response.
        if let Some(etag) = ask.etag.filter(|etag| etag.starts_with('"')) {
            request = request.header(IF_MATCH, etag);
        }
        request
            .body(Empty::new())
            .map_err(|error| failed(StorageErrorKind::NotAFile, url, &error.to_string()))
    }
}

/// Refuses a response that does not match the request.
fn check(url: &HttpUrl, response: &Response<Incoming>, ask: Ask<'_>) -> Result<(), StorageError> {
    let (status, headers) = (response.status(), response.headers());
    let other = |reason: &str| Err(failed(StorageErrorKind::NotAFile, url, reason));
    match (status, ask.range) {
        (StatusCode::RANGE_NOT_SATISFIABLE, Some(_)) => {
            return other("it ends before the requested bytes");
        }
        (StatusCode::PARTIAL_CONTENT, Some((offset, _))) => {
            let range = headers
                .get(CONTENT_RANGE)
                .and_then(|range| range.to_str().ok());
            let start = range.and_then(|range| range.strip_prefix("bytes ")?.split('-').next());
            if start != Some(offset.to_string().as_str()) {
                return other("the server sent other bytes than requested");
            }
        }
        (status, Some(_)) if status.is_success() => {
            return other("its server gives no byte ranges; download it first");
        }
        (StatusCode::PARTIAL_CONTENT, None) => {
            return other("the server sent a part of it only");
        }
        (status, _) if !status.is_success() => return Err(refused(url, status)),
        _ => {}
    }
    let found = version(headers);
    if ask.etag.is_some() && found.is_some() && ask.etag != found.as_deref() {
        return Err(StorageError::changed(url));
    }
    let encoding = headers.get(CONTENT_ENCODING);
    if let Some(encoding) = encoding.filter(|encoding| encoding.as_bytes() != b"identity") {
        let encoding = String::from_utf8_lossy(encoding.as_bytes());
        return other(&format!(
            "the server compressed it ({encoding}) although it was asked not to"
        ));
    }
    Ok(())
}

/// The version of an object: its entity tag, else its modification time.
fn version(headers: &HeaderMap) -> Option<String> {
    let version = headers.get(ETAG).or_else(|| headers.get(LAST_MODIFIED))?;
    version.to_str().ok().map(str::to_owned)
}

/// The length stated by a response.
fn promised(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// The size of the whole object, from `Content-Range: bytes 0-9/10`.
fn whole_size(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    range.rsplit_once('/')?.1.parse().ok()
}

/// Reads a short response to its end, so that its connection can be reused.
async fn drained(response: Response<Incoming>) {
    let mut body = response.into_body();
    let mut read = 0;
    while read < DRAINED
        && let Some(Ok(frame)) = body.frame().await
    {
        read += frame.data_ref().map_or(0, Bytes::len);
    }
}
