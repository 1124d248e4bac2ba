//! Objects in Google Cloud Storage (`gs://bucket/key`) and in Azure Blob Storage (`az://container/key`).
//!
//! Requires the features `gs` and `az`; without them, such places are refused by name.

#[cfg(any(feature = "gs", feature = "az"))]
mod connect;
#[cfg(any(feature = "gs", feature = "az"))]
mod store;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::TryStreamExt;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::s3::Object;
use crate::uri::remote_scheme;
use crate::{Get, ObjectStore, StorageError, background};

/// Connection to Google Cloud Storage and Azure Blob Storage. Accounts, credentials and endpoints
/// come from the environment, in the variables documented by `object_store`, such as
/// `GOOGLE_APPLICATION_CREDENTIALS` and `AZURE_STORAGE_ACCOUNT_NAME`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct CloudConfig {
    /// Concurrent requests for images. Default: 64.
    pub max_concurrency: usize,
    /// Time without a byte after which a request counts as stalled. Default: `30s`.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// Attempts per request, with exponential back-off and jitter. Default: 5.
    pub attempts: u32,
    /// Options by name that override the environment; never read from a file.
    #[serde(skip)]
    pub options: Vec<(String, String)>,
}

impl fmt::Debug for CloudConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CloudConfig")
            .field("max_concurrency", &self.max_concurrency)
            .field("timeout", &self.timeout)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}

impl Default for CloudConfig {
    fn default() -> Self {
        Self {
            max_concurrency: 64,
            timeout: Duration::from_secs(30),
            attempts: 5,
            options: Vec::new(),
        }
    }
}

impl CloudConfig {
    /// All problems, one sentence each; empty if it is valid.
    pub fn problems(&self) -> Vec<String> {
        match self.max_concurrency == 0 || self.attempts == 0 || self.timeout.is_zero() {
            true => vec!["cloud.max-concurrency, attempts, timeout: must not be 0".to_owned()],
            false => Vec::new(),
        }
    }
}

/// A kind of cloud store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cloud {
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage, whose containers are the buckets here.
    Az,
}

impl Cloud {
    /// The scheme of its uris.
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Gs => "gs",
            Self::Az => "az",
        }
    }

    /// Whether this build includes its client.
    fn is_built_in(self) -> bool {
        match self {
            Self::Gs => cfg!(feature = "gs"),
            Self::Az => cfg!(feature = "az"),
        }
    }

    /// The store with this scheme, if any.
    pub fn of_scheme(scheme: &str) -> Option<Self> {
        [Self::Gs, Self::Az]
            .into_iter()
            .find(|cloud| cloud.scheme() == scheme)
    }
}

/// The location of an object, or a prefix of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloudLocation {
    /// The kind of store.
    pub cloud: Cloud,
    /// The bucket or container.
    pub bucket: String,
    /// The key.
    pub key: String,
}

impl CloudLocation {
    /// Parses `gs://bucket/key` or `az://container/key`; the key may be empty.
    pub fn parse(uri: &str) -> Option<Self> {
        let cloud = Cloud::of_scheme(remote_scheme(uri)?)?;
        let (_, place) = uri.split_once("://")?;
        let (bucket, key) = place.split_once('/').unwrap_or((place, ""));
        (!bucket.is_empty()).then(|| Self {
            cloud,
            bucket: bucket.to_owned(),
            key: key.to_owned(),
        })
    }

    /// `gs://bucket/key`.
    pub fn uri(&self) -> String {
        format!("{}://{}/{}", self.cloud.scheme(), self.bucket, self.key)
    }

    /// Another key in the same bucket.
    #[must_use]
    pub fn with_key(&self, key: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            ..self.clone()
        }
    }

    /// Checks that this build can read it.
    ///
    /// # Errors
    /// Names the missing feature.
    pub fn check_built_in(&self) -> Result<(), StorageError> {
        match self.cloud.is_built_in() {
            true => Ok(()),
            false => Err(self.not_built_in()),
        }
    }

    fn not_built_in(&self) -> StorageError {
        let scheme = self.cloud.scheme();
        StorageError::invalid_source(format!(
            "{}: this build cannot read {scheme}://; install the Python package, the tarball or the Debian package, or build with --features {scheme}",
            self.uri()
        ))
    }
}

/// A client for all buckets. Cheap to clone; connects on first use.
#[derive(Clone)]
pub struct Clouds {
    shared: Arc<Shared>,
}

struct Shared {
    config: CloudConfig,
    stores: Mutex<HashMap<(Cloud, String), Arc<dyn ObjectStore>>>,
    fetches: Semaphore,
}

impl Clouds {
    /// A client of these stores.
    pub fn new(config: &CloudConfig) -> Self {
        Self {
            shared: Arc::new(Shared {
                config: config.clone(),
                stores: Mutex::default(),
                fetches: Semaphore::new(config.max_concurrency.max(1)),
            }),
        }
    }

    /// The whole bucket of a place as a store.
    ///
    /// # Errors
    /// If this build has no client for it, or the environment has no usable settings.
    pub fn bucket(&self, place: &CloudLocation) -> Result<Arc<dyn ObjectStore>, StorageError> {
        let stores = self.shared.stores.lock();
        let mut stores = stores.unwrap_or_else(PoisonError::into_inner);
        let name = (place.cloud, place.bucket.clone());
        if let Some(store) = stores.get(&name) {
            return Ok(Arc::clone(store));
        }
        let store = open(&place.with_key(""), &self.shared.config)?;
        stores.insert(name, Arc::clone(&store));
        Ok(store)
    }

    /// Reads an object, without a limit on concurrency. For callers on a thread of [`background`].
    ///
    /// # Errors
    /// As [`ObjectStore::get`].
    pub async fn get(&self, place: &CloudLocation, wanted: Get) -> Result<Bytes, StorageError> {
        self.bucket(place)?.get(&place.key, wanted).await
    }

    /// Reads an object and returns the time that it took, which is at most `time`, not counting the
    /// wait for a connection.
    ///
    /// # Errors
    /// As [`ObjectStore::get`], and if the time limit is exceeded.
    pub async fn fetch(
        &self,
        place: CloudLocation,
        wanted: Get,
        time: Duration,
    ) -> Result<(Bytes, Duration), StorageError> {
        let clouds = self.clone();
        background::run(async move {
            let _permit = clouds.shared.fetches.acquire().await;
            let start = Instant::now();
            match timeout(time, clouds.get(&place, wanted)).await {
                Ok(fetched) => Ok((fetched?, start.elapsed())),
                Err(_) => Err(StorageError::timed_out(place.uri(), time)),
            }
        })
        .await
    }

    /// The object at a location, if it exists.
    ///
    /// # Errors
    /// If the bucket cannot be listed.
    pub async fn look(&self, place: &CloudLocation) -> Result<Option<Object>, StorageError> {
        let first = self
            .bucket(place)?
            .list(&place.key, None)
            .try_next()
            .await?;
        Ok(first.filter(|first| first.key == place.key))
    }
}

/// The store below a prefix, which is empty or ends with a slash.
///
/// # Errors
/// If this build has no client for it, or the environment has no usable settings.
pub fn open(
    prefix: &CloudLocation,
    config: &CloudConfig,
) -> Result<Arc<dyn ObjectStore>, StorageError> {
    match (prefix.cloud, config) {
        #[cfg(feature = "gs")]
        (Cloud::Gs, config) => store::google(prefix, config),
        #[cfg(feature = "az")]
        (Cloud::Az, config) => store::azure(prefix, config),
        #[allow(unreachable_patterns, reason = "a build may have both")]
        _ => Err(prefix.not_built_in()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_written() {
        let place = CloudLocation::parse("az://images/a/b c#.jpg").unwrap();
        assert_eq!(place.cloud, Cloud::Az);
        assert_eq!(
            (place.bucket.as_str(), place.key.as_str()),
            ("images", "a/b c#.jpg")
        );
        assert_eq!(place.uri(), "az://images/a/b c#.jpg");
        assert_eq!(CloudLocation::parse("gs://bucket").unwrap().key, "");
        for other in ["gs:///key", "s3://bucket/key", "photos/x.jpg"] {
            assert_eq!(CloudLocation::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_build_without_a_store_names_the_feature() {
        let place = CloudLocation::parse("gs://bucket/cats/").unwrap();
        let error = place.not_built_in().to_string();
        assert!(place.check_built_in().is_ok(), "tests are built with it");
        assert!(error.starts_with("gs://bucket/cats/: "), "{error}");
        assert!(error.ends_with("--features gs"), "{error}");
    }

    #[test]
    fn settings_that_stop_every_request_are_problems() {
        assert!(CloudConfig::default().problems().is_empty());
        let config = CloudConfig {
            attempts: 0,
            ..CloudConfig::default()
        };
        assert_eq!(config.problems().len(), 1);
    }
}
