use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetRange, ObjectMeta, ObjectStore as Client, ObjectStoreExt, PutMode,
    PutPayload, RetryConfig, UpdateVersion,
};
use tokio::time::timeout;

use super::connect::Connector;
use super::{CloudConfig, CloudLocation};
use crate::error::words;
use crate::s3::Object;
use crate::{Get, ObjectStore, StorageError, StorageErrorKind};

/// A client that reads, writes and lists page by page.
trait Bucket: Client + PaginatedListStore {}

impl<T: Client + PaginatedListStore> Bucket for T {}

/// A bucket prefix as a store. The prefix is empty or ends with a slash.
#[derive(Clone)]
struct CloudStore {
    bucket: Arc<dyn Bucket>,
    prefix: CloudLocation,
    patience: Duration,
}

/// The store below a prefix in Google Cloud Storage.
///
/// # Errors
/// If the environment or an option is unusable.
#[cfg(feature = "gs")]
pub(super) fn google(
    prefix: &CloudLocation,
    config: &CloudConfig,
) -> Result<Arc<dyn ObjectStore>, StorageError> {
    use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(&prefix.bucket)
        .with_http_connector(connector(config))
        .with_retry(retries(config));
    for (name, value) in &config.options {
        if let Ok(key) = name.parse::<GoogleConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    let remedy = "check GOOGLE_APPLICATION_CREDENTIALS, or set GOOGLE_SKIP_SIGNATURE=true for a public bucket";
    let bucket = builder
        .build()
        .map_err(|error| unusable(prefix, &error, remedy))?;
    Ok(CloudStore::shared(Arc::new(bucket), prefix, config))
}

/// The store below a prefix in Azure Blob Storage.
///
/// # Errors
/// If the environment or an option is unusable.
#[cfg(feature = "az")]
pub(super) fn azure(
    prefix: &CloudLocation,
    config: &CloudConfig,
) -> Result<Arc<dyn ObjectStore>, StorageError> {
    use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_container_name(&prefix.bucket)
        .with_http_connector(connector(config))
        .with_retry(retries(config));
    for (name, value) in &config.options {
        if let Ok(key) = name.parse::<AzureConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    let remedy = "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN; for a public container AZURE_SKIP_SIGNATURE=true";
    let bucket = builder
        .build()
        .map_err(|error| unusable(prefix, &error, remedy))?;
    Ok(CloudStore::shared(Arc::new(bucket), prefix, config))
}

fn connector(config: &CloudConfig) -> Connector {
    Connector {
        patience: config.timeout,
    }
}

fn retries(config: &CloudConfig) -> RetryConfig {
    RetryConfig {
        max_retries: config.attempts.saturating_sub(1) as usize,
        retry_timeout: config.timeout.saturating_mul(config.attempts),
        ..RetryConfig::default()
    }
}

fn unusable(prefix: &CloudLocation, error: &Error, remedy: &str) -> StorageError {
    let words = words(error);
    StorageError::denied(format!(
        "failed to open {}: {words}; {remedy}",
        prefix.uri()
    ))
}

impl CloudStore {
    fn shared(
        bucket: Arc<dyn Bucket>,
        prefix: &CloudLocation,
        config: &CloudConfig,
    ) -> Arc<dyn ObjectStore> {
        Arc::new(Self {
            bucket,
            prefix: prefix.clone(),
            patience: config.timeout,
        })
    }

    fn place(&self, key: &str) -> CloudLocation {
        self.prefix.with_key(format!("{}{key}", self.prefix.key))
    }

    fn path(&self, key: &str) -> Result<Path, StorageError> {
        let place = self.place(key);
        Path::parse(&place.key).map_err(|error| {
            let message = format!("{}: {error}; rename the object", place.uri());
            StorageError::invalid_source(message)
        })
    }

    async fn write(&self, key: &str, content: Bytes, mode: PutMode) -> Result<(), StorageError> {
        let (path, payload) = (self.path(key)?, PutPayload::from(content));
        match self.bucket.put_opts(&path, payload, mode.into()).await {
            Ok(_) => Ok(()),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {
                Err(StorageError::lost_race(self.locate(key)))
            }
            Err(error) => Err(failed("write", &self.place(key), &error)),
        }
    }

    /// The object whose key equals a prefix. Azure's listings omit it.
    async fn named(&self, place: &CloudLocation) -> Result<Option<ObjectMeta>, StorageError> {
        if place.key.is_empty() || place.key.ends_with('/') {
            return Ok(None);
        }
        let Ok(path) = Path::parse(&place.key) else {
            return Ok(None);
        };
        match self.bucket.head(&path).await {
            Ok(found) => Ok(Some(found)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed("list", place, &error)),
        }
    }

    /// Whether the object is shorter than `end`.
    async fn ends_before(&self, path: &Path, end: u64) -> bool {
        let head = self.bucket.head(path).await;
        head.is_ok_and(|head| head.size < end)
    }
}

impl fmt::Debug for CloudStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix.uri())
    }
}

#[async_trait]
impl ObjectStore for CloudStore {
    fn locate(&self, key: &str) -> String {
        self.place(key).uri()
    }

    fn within(&self, folder: &str) -> Arc<dyn ObjectStore> {
        Arc::new(Self {
            prefix: self.place(&format!("{folder}/")),
            ..self.clone()
        })
    }

    async fn get(&self, key: &str, wanted: Get) -> Result<Bytes, StorageError> {
        let (place, path) = (self.place(key), self.path(key)?);
        let Get {
            range,
            if_match,
            at_most,
        } = wanted;
        if range.as_ref().is_some_and(std::ops::Range::is_empty) {
            return Ok(Bytes::new());
        }
        let too_short = || {
            let message = format!(
                "failed to fetch {}: it ends before the requested bytes",
                place.uri()
            );
            StorageError::new(StorageErrorKind::NotAFile, message)
        };
        let options = GetOptions {
            range: range.clone().map(GetRange::Bounded),
            if_match: if_match.map(|etag| format!("\"{etag}\"")),
            ..GetOptions::default()
        };
        let answer = match self.bucket.get_opts(&path, options).await {
            Ok(answer) => answer,
            Err(Error::Precondition { .. }) => return Err(StorageError::changed(place.uri())),
            Err(error) => {
                // A range that begins after the end is refused entirely.
                let end = range.filter(|_| matches!(error, Error::Generic { .. }));
                return Err(match end {
                    Some(range) if self.ends_before(&path, range.end).await => too_short(),
                    _ => failed("fetch", &place, &error),
                });
            }
        };
        let size = answer.range.end - answer.range.start;
        if range.is_some_and(|range| range.end - range.start != size) {
            return Err(too_short());
        }
        if let Some(limit) = at_most.filter(|limit| size > *limit) {
            return Err(StorageError::too_large(place.uri(), size, limit));
        }
        let mut bytes = BytesMut::with_capacity(usize::try_from(size).unwrap_or(0));
        let mut body = answer.into_stream();
        loop {
            let chunk = timeout(self.patience, body.try_next()).await;
            let chunk = chunk.map_err(|_| {
                StorageError::unavailable(format!("failed to fetch {}: it stalled", place.uri()))
            })?;
            match chunk.map_err(|error| failed("fetch", &place, &error))? {
                Some(chunk) => bytes.extend_from_slice(&chunk),
                None => break,
            }
        }
        match bytes.len() as u64 == size {
            true => Ok(bytes.freeze()),
            false => Err(StorageError::unavailable(format!(
                "failed to fetch {}: {} bytes came where there should be {size}",
                place.uri(),
                bytes.len()
            ))),
        }
    }

    fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
    ) -> BoxStream<'static, Result<Object, StorageError>> {
        let (store, below) = (self.clone(), self.place(prefix));
        let after = after.map(|after| self.place(after).key);
        stream::try_unfold(Some(None), move |page| {
            let (store, below, after) = (store.clone(), below.clone(), after.clone());
            async move {
                let Some(page_token) = page else {
                    return Ok(None);
                };
                let named = match page_token {
                    None => store.named(&below).await?,
                    Some(_) => None,
                };
                let options = PaginatedListOptions {
                    offset: after.clone(),
                    page_token,
                    ..PaginatedListOptions::default()
                };
                let listed = store.bucket.list_paginated(Some(&below.key), options).await;
                let listed = listed.map_err(|error| failed("list", &below, &error))?;
                let root = store.prefix.key.len();
                let others = listed.result.objects.into_iter();
                let others = others.filter(move |object| object.location.as_ref() != below.key);
                let objects = named.into_iter().chain(others).filter_map(move |object| {
                    let key = object.location.as_ref();
                    // Not every store honours the start of a listing.
                    let behind = after.as_deref().is_none_or(|after| key > after);
                    Some(Object {
                        key: key.get(root..).filter(|_| behind)?.to_owned(),
                        size: object.size,
                        etag: object.e_tag.map(|etag| etag.trim_matches('"').to_owned()),
                    })
                });
                let next = listed.page_token.map(Some);
                Ok(Some((stream::iter(objects.map(Ok)), next)))
            }
        })
        .try_flatten()
        .boxed()
    }

    async fn put_if_absent(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.write(key, content, PutMode::Create).await
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.write(key, content, PutMode::Overwrite).await
    }

    async fn replace(&self, key: &str, old: &Bytes, content: Bytes) -> Result<(), StorageError> {
        let place = self.place(key);
        let found = match self.bucket.get(&self.path(key)?).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Err(StorageError::lost_race(place.uri())),
            Err(error) => return Err(failed("fetch", &place, &error)),
        };
        let version = UpdateVersion {
            e_tag: found.meta.e_tag.clone(),
            version: found.meta.version.clone(),
        };
        let bytes = found.bytes().await;
        let bytes = bytes.map_err(|error| failed("fetch", &place, &error))?;
        match bytes {
            bytes if bytes == content => Ok(()),
            bytes if bytes == *old => self.write(key, content, PutMode::Update(version)).await,
            _ => Err(StorageError::lost_race(place.uri())),
        }
    }

    async fn delete(&self, key: &str) -> Result<(), StorageError> {
        match self.bucket.delete(&self.path(key)?).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed("remove", &self.place(key), &error)),
        }
    }

    async fn honours_preconditions(&self, key: &str, content: Bytes) -> Result<bool, StorageError> {
        match self.put_if_absent(key, content).await {
            Ok(()) => Ok(false),
            Err(error) if error.kind() == StorageErrorKind::LostRace => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// The meaning of a failed request.
fn failed(verb: &str, place: &CloudLocation, error: &Error) -> StorageError {
    let (kind, reason) = match error {
        Error::NotFound { .. } => (
            StorageErrorKind::NotFound,
            "the object or its bucket does not exist".to_owned(),
        ),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => (
            StorageErrorKind::PermissionDenied,
            "the store refuses access; check the credentials and what they allow".to_owned(),
        ),
        Error::InvalidPath { .. } => (
            StorageErrorKind::InvalidSource,
            format!("{}; rename the object", words(error)),
        ),
        error => (StorageErrorKind::Unreadable, words(error)),
    };
    StorageError::new(kind, format!("failed to {verb} {}: {reason}", place.uri()))
}
