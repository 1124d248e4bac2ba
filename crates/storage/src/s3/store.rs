use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};

use super::{Location, Object, S3, S3Config};
use crate::{Get, ObjectStore, StorageError, StorageErrorKind};

/// A bucket prefix as a store. The prefix is empty or ends with a slash.
#[derive(Clone)]
pub struct S3Store {
    s3: S3,
    prefix: Location,
}

impl S3Store {
    /// The store below this prefix.
    pub fn new(config: &S3Config, prefix: Location) -> Self {
        Self {
            s3: S3::new(config),
            prefix,
        }
    }

    fn object(&self, key: &str) -> Location {
        self.prefix.with_key(format!("{}{key}", self.prefix.key))
    }
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.prefix.uri())
    }
}

#[async_trait]
impl ObjectStore for S3Store {
    fn locate(&self, key: &str) -> String {
        self.object(key).uri()
    }

    fn within(&self, folder: &str) -> Arc<dyn ObjectStore> {
        Arc::new(Self {
            s3: self.s3.clone(),
            prefix: self.object(&format!("{folder}/")),
        })
    }

    async fn get(&self, key: &str, wanted: Get) -> Result<Bytes, StorageError> {
        let range = wanted
            .range
            .map(|range| (range.start, range.end.saturating_sub(range.start)));
        let etag = wanted.if_match.as_deref();
        let limit = wanted.at_most.unwrap_or(u64::MAX);
        let object = self.object(key);
        match self.s3.get_version(&object, range, etag, limit).await {
            Err(error) if error.kind() == StorageErrorKind::NotFound => {
                // A missing bucket is a different error.
                self.s3.list(&object, None, None).await?;
                Err(error)
            }
            got => got,
        }
    }

    fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
    ) -> BoxStream<'static, Result<Object, StorageError>> {
        let (store, below) = (self.clone(), self.object(prefix));
        let after = after.map(|after| self.object(after).key);
        let first = Some((after, None));
        stream::try_unfold(first, move |at| {
            let (store, below) = (store.clone(), below.clone());
            async move {
                let Some((after, page)) = at else {
                    return Ok(None);
                };
                let page = store.s3.list(&below, after, page).await?;
                let root = store.prefix.key.len();
                let objects = page.objects.into_iter().map(move |object| Object {
                    key: object.key[root..].to_owned(),
                    ..object
                });
                let next = page.next.map(|next| (None, Some(next)));
                Ok(Some((stream::iter(objects.map(Ok)), next)))
            }
        })
        .try_flatten()
        .boxed()
    }

    async fn put_if_absent(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.s3.put(&self.object(key), content, true).await
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.s3.put(&self.object(key), content, false).await
    }

    async fn replace(&self, key: &str, old: &Bytes, content: Bytes) -> Result<(), StorageError> {
        self.s3.replace(&self.object(key), old, content).await
    }

    async fn delete(&self, key: &str) -> Result<(), StorageError> {
        self.s3.remove(&self.object(key)).await
    }

    async fn honours_preconditions(&self, key: &str, content: Bytes) -> Result<bool, StorageError> {
        let object = self.object(key);
        // Some stores honour the header for one request but not for the other.
        let whole = self.s3.put_whole(&object, content.clone(), true).await;
        if !is_refused(whole)? {
            return Ok(false);
        }
        is_refused(self.s3.put_in_pieces(&object, content, true).await)
    }
}

/// Whether a write was refused because the object exists.
fn is_refused(written: Result<(), StorageError>) -> Result<bool, StorageError> {
    match written {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == StorageErrorKind::LostRace => Ok(true),
        Err(error) => Err(error),
    }
}
