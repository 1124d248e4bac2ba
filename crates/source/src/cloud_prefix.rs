//! The objects under a prefix of a bucket in Google Cloud Storage, or of a container in Azure.

use std::sync::Arc;

use futures::StreamExt;
use tokio::sync::mpsc::{self, error::TryRecvError};
use trommel_storage::cloud::CloudLocation;
use trommel_storage::{ObjectStore, StorageError, background};

use crate::SourceOptions;
use crate::keys::{self, Keys};
use crate::listing::{Listing, Stop, Visitor};
use crate::stores::Stores;

/// Objects that a listing buffers ahead of its reader.
const AHEAD: usize = 4096;

/// All objects whose keys have a prefix, or match a pattern, in byte order of the keys.
pub(super) struct CloudPrefix {
    bucket: Arc<dyn ObjectStore>,
    place: CloudLocation,
    keys: Keys,
}

impl CloudPrefix {
    /// # Errors
    /// If the bucket does not exist or cannot be listed, or no key has the prefix or matches.
    pub(super) fn open(
        place: CloudLocation,
        stores: &Stores,
        options: &SourceOptions,
    ) -> Result<Box<dyn Listing>, StorageError> {
        let bucket = stores.clouds.bucket(&place)?;
        let first = background::wait(async { bucket.list(&place.key, None).next().await });
        let any = first.transpose()?.is_some();
        let (spec, key) = (place.uri(), place.key.clone());
        keys::open(&spec, &key, any, options, |keys| Self {
            bucket,
            place,
            keys,
        })
    }

    /// The uris of all objects that match a pattern, regardless of suffix.
    ///
    /// # Errors
    /// If nothing is found, or the listing fails.
    pub(super) fn matches(
        place: &CloudLocation,
        stores: &Stores,
    ) -> Result<Vec<String>, StorageError> {
        let bucket = stores.clouds.bucket(place)?;
        keys::matches(&place.uri(), &place.key, |keys| Self {
            bucket,
            place: place.clone(),
            keys,
        })
    }

    fn list_behind(
        &self,
        after: Option<String>,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let (sender, mut objects) = mpsc::channel(AHEAD);
        let mut listing = self.bucket.list(&self.keys.prefix, after.as_deref());
        background::spawn(async move {
            while let Some(object) = listing.next().await {
                // The receiver is gone.
                if sender.send(object).await.is_err() {
                    return;
                }
            }
        });
        loop {
            let object = match objects.try_recv() {
                Ok(object) => object,
                Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) => {
                    visitor.waiting()?;
                    match objects.blocking_recv() {
                        Some(object) => object,
                        None => return Ok(()),
                    }
                }
            };
            let uri = |key| self.place.with_key(key).uri();
            self.keys.hand_on(object?, uri, options, visitor)?;
        }
    }
}

impl Listing for CloudPrefix {
    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        self.list_behind(None, options, visitor)
    }

    fn can_go_on(&self) -> bool {
        true
    }

    fn list_from(
        &self,
        last_uri: &str,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let last = CloudLocation::parse(last_uri)
            .filter(|last| last.with_key("") == self.place.with_key(""));
        match last.filter(|last| last.key.starts_with(&self.keys.prefix)) {
            Some(last) => self.list_behind(Some(last.key), options, visitor),
            None => Err(keys::moved(last_uri, &self.place.uri())),
        }
    }
}
