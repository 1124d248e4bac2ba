//! Objects in S3 and compatible stores.

mod fault;
mod store;
mod upload;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_config::retry::RetryConfig;
use aws_config::stalled_stream_protection::StalledStreamProtectionConfig;
use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::{Credentials, RequestChecksumCalculation, ResponseChecksumValidation};
use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::primitives::ByteStream;
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use self::fault::{Passing, failed, unreadable};
pub use self::store::S3Store;
use crate::error::words;
use crate::{StorageError, StorageErrorKind, background};

/// Connection to S3. Credentials are found as by all AWS tools: in the environment, the profile
/// files, or the role of the machine or pod.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct S3Config {
    /// Address of a store other than AWS, such as `http://127.0.0.1:9000`; buckets are then named
    /// in the path. Default: AWS.
    pub endpoint: Option<String>,
    /// Region. Default: that of the environment or profile, else `us-east-1`.
    pub region: Option<String>,
    /// Whether to send unsigned requests, as for public buckets. Default: no.
    pub anonymous: bool,
    /// Concurrent requests for images. Default: 64.
    pub max_concurrency: usize,
    /// Timeout of one attempt, and of each chunk of an object. Default: `30s`.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// Attempts per request, with exponential back-off and jitter. Default: 5.
    pub attempts: u32,
    /// Size above which a part of rows is uploaded in pieces, in parallel. Default: 64 MiB.
    pub multipart_bytes: u64,
    /// Key and secret that override the environment; never read from a file.
    #[serde(skip)]
    pub credentials: Option<(String, String)>,
}

impl fmt::Debug for S3Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Config")
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .field("anonymous", &self.anonymous)
            .finish_non_exhaustive()
    }
}

impl Default for S3Config {
    fn default() -> Self {
        Self {
            endpoint: None,
            region: None,
            anonymous: false,
            max_concurrency: 64,
            timeout: Duration::from_secs(30),
            attempts: 5,
            multipart_bytes: 64 << 20,
            credentials: None,
        }
    }
}

impl S3Config {
    /// Signs with this key, regardless of the environment.
    #[must_use]
    pub fn with_credentials(mut self, access_key: &str, secret_key: &str) -> Self {
        self.credentials = Some((access_key.to_owned(), secret_key.to_owned()));
        self
    }

    /// All problems, one sentence each; empty if it is valid.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if let Some(endpoint) = &self.endpoint
            && !endpoint.starts_with("http://")
            && !endpoint.starts_with("https://")
        {
            problems.push(format!(
                "s3.endpoint: {endpoint:?} begins with neither http:// nor https://"
            ));
        }
        if self.max_concurrency == 0 || self.attempts == 0 || self.timeout.is_zero() {
            problems.push("s3.max-concurrency, attempts, timeout: must not be 0".to_owned());
        }
        if self.multipart_bytes < upload::PIECE {
            problems.push(format!(
                "s3.multipart-bytes: must be at least {}, the smallest piece that S3 takes",
                upload::PIECE
            ));
        }
        problems
    }
}

/// The location of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// Its bucket.
    pub bucket: String,
    /// Its key.
    pub key: String,
}

impl Location {
    /// Parses `s3://bucket/key`; the key may be empty.
    pub fn parse(uri: &str) -> Option<Self> {
        let (bucket, key) = match uri.strip_prefix("s3://")?.split_once('/') {
            Some((bucket, key)) => (bucket, key),
            None => (uri.strip_prefix("s3://")?, ""),
        };
        (!bucket.is_empty()).then(|| Self {
            bucket: bucket.to_owned(),
            key: key.to_owned(),
        })
    }

    /// `s3://bucket/key`.
    pub fn uri(&self) -> String {
        format!("s3://{}/{}", self.bucket, self.key)
    }

    /// Another key in the same bucket.
    #[must_use]
    pub fn with_key(&self, key: String) -> Self {
        Self {
            bucket: self.bucket.clone(),
            key,
        }
    }
}

/// One object of a listing.
#[derive(Debug, Clone)]
pub struct Object {
    /// Its key.
    pub key: String,
    /// Its size in bytes.
    pub size: u64,
    /// The version of its content.
    pub etag: Option<String>,
}

/// A page of a listing, and the start of the next one.
pub struct Page {
    /// The objects, in the order of their keys.
    pub objects: Vec<Object>,
    /// The start of the next page, unless this is the last.
    pub next: Option<String>,
}

/// An object or a folder of keys.
pub enum Entry {
    /// An object.
    Object(Object),
    /// The prefix of its keys, up to the slash.
    Folder(String),
}

impl Entry {
    fn key(&self) -> &str {
        match self {
            Self::Object(object) => &object.key,
            Self::Folder(prefix) => prefix,
        }
    }
}

/// A page of the direct children of a prefix, in order, and the start of the next one.
pub struct Level {
    /// Objects and folders, in the order of their keys.
    pub entries: Vec<Entry>,
    /// The start of the next page, unless this is the last.
    pub next: Option<String>,
}

/// A client. Cheap to clone; connects on first use.
#[derive(Clone)]
pub struct S3 {
    shared: Arc<Shared>,
}

struct Shared {
    config: S3Config,
    client: tokio::sync::OnceCell<Client>,
    fetches: Semaphore,
}

impl S3 {
    /// A client of this store.
    pub fn new(config: &S3Config) -> Self {
        Self {
            shared: Arc::new(Shared {
                config: config.clone(),
                client: tokio::sync::OnceCell::new(),
                fetches: Semaphore::new(config.max_concurrency.max(1)),
            }),
        }
    }

    async fn client(&self) -> &Client {
        let config = &self.shared.config;
        self.shared
            .client
            .get_or_init(|| async { connect(config).await })
            .await
    }

    /// Reads a page of the objects whose keys begin with `prefix`, in byte order of the keys: after
    /// the key `after`, or from the start given by the last page.
    pub async fn list(
        &self,
        prefix: &Location,
        after: Option<String>,
        page: Option<String>,
    ) -> Result<Page, StorageError> {
        let listed = self.list_page(prefix, None, after, page).await?;
        Ok(Page {
            objects: objects(listed.contents).collect(),
            next: listed.next_continuation_token,
        })
    }

    /// As [`S3::list`], but keys with a further slash are grouped into a folder.
    pub async fn list_level(
        &self,
        prefix: &Location,
        after: Option<String>,
        page: Option<String>,
    ) -> Result<Level, StorageError> {
        let listed = self.list_page(prefix, Some("/"), after, page).await?;
        let folders = listed.common_prefixes.unwrap_or_default().into_iter();
        let mut entries: Vec<Entry> = folders
            .filter_map(|folder| folder.prefix.map(Entry::Folder))
            .chain(objects(listed.contents).map(Entry::Object))
            .collect();
        entries.sort_unstable_by(|a, b| a.key().cmp(b.key()));
        Ok(Level {
            entries,
            next: listed.next_continuation_token,
        })
    }

    async fn list_page(
        &self,
        prefix: &Location,
        delimiter: Option<&str>,
        after: Option<String>,
        page: Option<String>,
    ) -> Result<ListObjectsV2Output, StorageError> {
        let request = self
            .client()
            .await
            .list_objects_v2()
            .bucket(&prefix.bucket)
            .prefix(&prefix.key)
            .set_delimiter(delimiter.map(str::to_owned))
            .set_start_after(after)
            .set_continuation_token(page);
        request
            .send()
            .await
            .map_err(|error| failed("list", prefix, &error))
    }

    /// Reads an object, or `range` of it (offset and length), at most `limit` bytes, and only in
    /// the version `etag`, if given. Also returns the time that it took, at most `time`, without
    /// the wait for a connection.
    pub async fn fetch(
        &self,
        object: Location,
        range: Option<(u64, u64)>,
        etag: Option<String>,
        limit: u64,
        time: Duration,
    ) -> Result<(Bytes, Duration), StorageError> {
        let s3 = self.clone();
        background::run(async move {
            let _permit = s3.shared.fetches.acquire().await;
            let start = Instant::now();
            let fetched = s3.get_version(&object, range, etag.as_deref(), limit);
            match timeout(time, fetched).await {
                Ok(fetched) => Ok((fetched?, start.elapsed())),
                Err(_) => Err(StorageError::timed_out(object.uri(), time)),
            }
        })
        .await
    }

    /// As [`S3::get_version`], for any version.
    pub async fn get(
        &self,
        object: &Location,
        range: Option<(u64, u64)>,
        limit: u64,
    ) -> Result<Bytes, StorageError> {
        self.get_version(object, range, None, limit).await
    }

    /// As [`S3::fetch`], for callers on a thread of this module, without a limit on concurrency.
    pub async fn get_version(
        &self,
        object: &Location,
        range: Option<(u64, u64)>,
        etag: Option<&str>,
        limit: u64,
    ) -> Result<Bytes, StorageError> {
        if range.is_some_and(|(_, length)| length == 0) {
            return Ok(Bytes::new());
        }
        let bytes = range.map(|(offset, length)| {
            format!("bytes={offset}-{}", offset.saturating_add(length) - 1)
        });
        let request = self
            .client()
            .await
            .get_object()
            .bucket(&object.bucket)
            .key(&object.key)
            .set_range(bytes)
            .set_if_match(etag.map(|etag| format!("\"{etag}\"")));
        let changed = || StorageError::changed(object.uri());
        let answer =
            request
                .send()
                .await
                .map_err(|error| match failed("fetch", object, &error) {
                    error if error.kind() == StorageErrorKind::LostRace => changed(),
                    error => error,
                })?;
        // Not every store honours the precondition.
        let found = answer.e_tag().map(|found| found.trim_matches('"'));
        if etag.is_some() && found.is_some() && etag != found {
            return Err(changed());
        }
        let promised = answer
            .content_length
            .and_then(|length| u64::try_from(length).ok());
        let size = promised.unwrap_or(0);
        if size > limit {
            return Err(StorageError::too_large(object.uri(), size, limit));
        }
        let bytes = self.read_body(object, answer.body, size, limit).await?;
        let expected = range.map(|(_, length)| length).or(promised);
        if let (Some((offset, _)), Some(end)) = (range, end_of(answer.content_range.as_deref()))
            && offset + bytes.len() as u64 == end
            && expected > Some(bytes.len() as u64)
        {
            // No other attempt will read more.
            return Err(StorageError::new(
                StorageErrorKind::NotAFile,
                format!(
                    "failed to fetch {}: it ends before the requested bytes",
                    object.uri()
                ),
            ));
        }
        if expected.is_some_and(|expected| expected != bytes.len() as u64) {
            return Err(unreadable(format!(
                "failed to fetch {}: {} bytes came where there should be {}",
                object.uri(),
                bytes.len(),
                expected.unwrap_or_default()
            )));
        }
        Ok(bytes)
    }

    /// Reads a response of about `size` bytes, and no more than `limit`.
    async fn read_body(
        &self,
        object: &Location,
        mut body: ByteStream,
        size: u64,
        limit: u64,
    ) -> Result<Bytes, StorageError> {
        let mut bytes = BytesMut::with_capacity(usize::try_from(size).unwrap_or(0));
        // The client's own timeouts end where the response begins.
        let stalled = |_| unreadable(format!("failed to fetch {}: it stalled", object.uri()));
        let patience = self.shared.config.timeout;
        while let Some(chunk) = timeout(patience, body.next()).await.map_err(stalled)? {
            let chunk = chunk.map_err(|error| {
                let error = words(&error);
                unreadable(format!("failed to fetch {}: {error}", object.uri()))
            })?;
            bytes.extend_from_slice(&chunk);
            let read = bytes.len() as u64;
            if read > limit {
                return Err(StorageError::too_large(object.uri(), read, limit));
            }
        }
        Ok(bytes.freeze())
    }

    /// Removes an object, if it exists.
    pub async fn remove(&self, object: &Location) -> Result<(), StorageError> {
        let request = self
            .client()
            .await
            .delete_object()
            .bucket(&object.bucket)
            .key(&object.key);
        match request.send().await {
            Ok(_) => Ok(()),
            Err(error) => match failed("remove", object, &error) {
                error if error.kind() == StorageErrorKind::NotFound => Ok(()),
                error => Err(error),
            },
        }
    }
}

fn objects(contents: Option<Vec<aws_sdk_s3::types::Object>>) -> impl Iterator<Item = Object> {
    contents
        .unwrap_or_default()
        .into_iter()
        .filter_map(|object| {
            Some(Object {
                key: object.key?,
                size: object
                    .size
                    .and_then(|size| size.try_into().ok())
                    .unwrap_or(0),
                etag: object.e_tag.map(|etag| etag.trim_matches('"').to_owned()),
            })
        })
}

/// The size of the whole object, from `Content-Range: bytes 0-9/10`.
fn end_of(content_range: Option<&str>) -> Option<u64> {
    content_range?.rsplit_once('/')?.1.parse().ok()
}

async fn connect(config: &S3Config) -> Client {
    let http = aws_smithy_http_client::Builder::new()
        .tls_provider(Provider::Rustls(CryptoMode::Ring))
        .build_https();
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(Duration::from_secs(5))
        .operation_attempt_timeout(config.timeout)
        .operation_timeout(config.timeout.saturating_mul(config.attempts))
        .build();
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .http_client(http)
        .timeout_config(timeouts)
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .retry_config(RetryConfig::standard().with_max_attempts(config.attempts));
    if let Some(endpoint) = &config.endpoint {
        loader = loader.endpoint_url(endpoint);
    }
    if let Some((access_key, secret_key)) = &config.credentials {
        let credentials = Credentials::new(access_key, secret_key, None, None, "given");
        loader = loader.credentials_provider(credentials);
    }
    if config.anonymous {
        loader = loader.no_credentials();
    }
    if let Some(region) = &config.region {
        loader = loader.region(Region::new(region.clone()));
    }
    let loaded = loader.load().await;
    // Other stores have no regions, but requests are signed for one.
    let region = loaded
        .region()
        .cloned()
        .unwrap_or_else(|| Region::from_static("us-east-1"));
    let built = aws_sdk_s3::config::Builder::from(&loaded)
        .region(region)
        .force_path_style(config.endpoint.is_some())
        .retry_classifier(Passing)
        // Not every store supports the newer checksums.
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
        .build();
    Client::from_conf(built)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_written() {
        let place = Location::parse("s3://bucket/a/b c#.jpg").unwrap();
        assert_eq!(
            (place.bucket.as_str(), place.key.as_str()),
            ("bucket", "a/b c#.jpg")
        );
        assert_eq!(place.uri(), "s3://bucket/a/b c#.jpg");
        assert_eq!(Location::parse("s3://bucket").unwrap().key, "");
        assert_eq!(Location::parse("s3:///key"), None);
        assert_eq!(Location::parse("photos/x.jpg"), None);
    }

    #[test]
    fn all_problems_are_told_at_once() {
        assert_eq!(S3Config::default().problems(), Vec::<String>::new());
        let config = S3Config {
            endpoint: Some("localhost:9000".to_owned()),
            attempts: 0,
            ..S3Config::default()
        };
        assert_eq!(config.problems().len(), 2);
    }
}
