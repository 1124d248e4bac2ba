//! The stores of remote images, lists and archives.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use trommel_storage::{
    Get, StorageError, StorageErrorKind,
    cloud::{CloudLocation, Clouds},
    http::{Http, HttpUrl},
    s3::{Location, S3},
};

use crate::SourceOptions;

/// A client of each kind of store.
#[derive(Clone)]
pub(super) struct Stores {
    pub(super) s3: S3,
    pub(super) clouds: Clouds,
    pub(super) http: Http,
}

impl Stores {
    pub(super) fn new(options: &SourceOptions) -> Self {
        Self {
            s3: S3::new(&options.s3),
            clouds: Clouds::new(&options.cloud),
            http: Http::new(&options.http, options.rule.clone()),
        }
    }

    /// Reads an object, or `range` of it (offset and length), at most `limit` bytes, and only in
    /// the version `etag`, if given. Also returns the time that it took, at most `time`.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) async fn fetch(
        &self,
        place: &Remote,
        range: Option<(u64, u64)>,
        etag: Option<String>,
        limit: u64,
        time: Duration,
    ) -> Result<(Bytes, Duration), StorageError> {
        match place {
            Remote::S3(place) => self.s3.fetch(place.clone(), range, etag, limit, time).await,
            Remote::Cloud(place) => {
                let wanted = Get {
                    range: range.map(range_of),
                    if_match: etag,
                    at_most: Some(limit),
                };
                self.clouds.fetch(place.clone(), wanted, time).await
            }
            Remote::Web(url) => self.http.fetch(url, range, etag, limit, time).await,
        }
    }
}

/// The bytes of an offset and a length.
pub(super) fn range_of((offset, length): (u64, u64)) -> Range<u64> {
    offset..offset.saturating_add(length)
}

/// A location in a store.
#[derive(Debug, Clone)]
pub(super) enum Remote {
    S3(Location),
    Cloud(CloudLocation),
    Web(HttpUrl),
}

impl Remote {
    /// The location of an object; `None` if its uri does not belong to a store.
    ///
    /// # Errors
    /// If the uri is malformed.
    pub(super) fn parse(uri: &str) -> Result<Option<Self>, StorageError> {
        if HttpUrl::is_url(uri) {
            let url = HttpUrl::parse(uri).map_err(|reason| {
                let message = format!("failed to fetch {uri}: {reason}");
                StorageError::new(StorageErrorKind::NotAFile, message)
            })?;
            return Ok(Some(Self::Web(url)));
        }
        if let Some(place) = CloudLocation::parse(uri) {
            return Ok(Some(Self::Cloud(place)));
        }
        Ok(Location::parse(uri).map(Self::S3))
    }
}
