use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;

use crate::StorageError;
use crate::s3::Object;

/// The part of an object to read, and under which condition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Get {
    /// The range; all bytes by default.
    pub range: Option<Range<u64>>,
    /// Only in this version.
    pub if_match: Option<String>,
    /// Size limit; none by default.
    pub at_most: Option<u64>,
}

/// Objects by key below one root: a folder, or a bucket prefix.
///
/// Writes are atomic, and durable on return. All implementations pass one contract, in
/// `tests/stores.rs`.
#[async_trait]
pub trait ObjectStore: Debug + Send + Sync {
    /// The path or uri of an object, for messages.
    fn locate(&self, key: &str) -> String;

    /// The same store with its root at a folder below this one's, named without a slash.
    fn within(&self, folder: &str) -> Arc<dyn ObjectStore>;

    /// Reads an object.
    ///
    /// # Errors
    /// [`NotFound`](crate::StorageErrorKind::NotFound) when it is absent,
    /// [`Changed`](crate::StorageErrorKind::Changed) when it is another version than the one asked
    /// for, [`NotAFile`](crate::StorageErrorKind::NotAFile) when it ends before the range does,
    /// [`TooLarge`](crate::StorageErrorKind::TooLarge) when there are more bytes than wanted.
    async fn get(&self, key: &str, wanted: Get) -> Result<Bytes, StorageError>;

    /// Lists the objects whose keys begin with `prefix`, in the order of their keys' bytes, those
    /// behind `after` only. Without any, or without a folder, the list is empty.
    fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
    ) -> BoxStream<'static, Result<Object, StorageError>>;

    /// Writes an object unless there is one of this key.
    ///
    /// # Errors
    /// [`LostRace`](crate::StorageErrorKind::LostRace) when there is. A store that ignores
    /// preconditions overwrites it instead; see [`ObjectStore::honours_preconditions`].
    async fn put_if_absent(&self, key: &str, content: Bytes) -> Result<(), StorageError>;

    /// Writes an object in place of whatever is there.
    ///
    /// # Errors
    /// When it cannot be written.
    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError>;

    /// Writes an object in place of one that holds `old`. One that holds `content` already counts as
    /// written by this.
    ///
    /// # Errors
    /// [`LostRace`](crate::StorageErrorKind::LostRace) when it holds something else, or is absent. A
    /// store that ignores preconditions may overwrite what another writes at the same moment.
    async fn replace(&self, key: &str, old: &Bytes, content: Bytes) -> Result<(), StorageError>;

    /// Removes an object, if it is there.
    ///
    /// # Errors
    /// When it cannot be removed.
    async fn delete(&self, key: &str) -> Result<(), StorageError>;

    /// Whether the store refuses to write an object that is there, whole or in pieces. Asked with
    /// an object that holds `content` already, so that the answer leaves nothing behind.
    ///
    /// # Errors
    /// When the store cannot be asked.
    async fn honours_preconditions(&self, key: &str, content: Bytes) -> Result<bool, StorageError>;

    /// Removes what writers that crashed have left and no listing shows.
    ///
    /// # Errors
    /// When something cannot be removed.
    async fn tidy(&self) -> Result<(), StorageError> {
        Ok(())
    }
}
