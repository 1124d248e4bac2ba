use std::sync::Arc;

use async_trait::async_trait;
use trommel_storage::StorageError;

/// Whether a store honours requests not to overwrite. Decided once per job, when its output is
/// first opened: sinks that disagree would not see each other's parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preconditions {
    /// Unknown; probe the store.
    #[default]
    Probe,
    /// It refuses to overwrite.
    Honoured,
    /// It overwrites, so parts are claimed elsewhere first.
    Ignored,
}

/// A part number claimed by a sink, on a store that ignores preconditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The part's number.
    pub part: u64,
    /// Changes whenever the claim changes.
    pub revision: u64,
    /// The object committed under it; `None` while the part is being written.
    pub committed: Option<String>,
}

/// Claims of the part numbers of one output, and of the output itself, in a place with
/// compare-and-set.
#[async_trait]
pub trait Claims: Send + Sync {
    /// Whether the output still belongs to this job: a later job has not taken it over.
    ///
    /// # Errors
    /// If that cannot be read.
    async fn hold_output(&self) -> Result<bool, StorageError> {
        Ok(true)
    }

    /// All claims.
    ///
    /// # Errors
    /// If they cannot be read.
    async fn list(&self) -> Result<Vec<Claim>, StorageError>;

    /// Claims a number; `replaces` is the revision of a claim that was not committed. Returns the
    /// claim's revision, which is unique for this output.
    ///
    /// # Errors
    /// [`LostRace`](trommel_storage::StorageErrorKind::LostRace) if another sink has it.
    async fn open(&self, part: u64, replaces: Option<u64>) -> Result<u64, StorageError>;

    /// Commits a claim.
    ///
    /// # Errors
    /// [`LostRace`](trommel_storage::StorageErrorKind::LostRace) if another sink has taken it over.
    async fn commit(&self, part: u64, revision: u64, object: &str) -> Result<(), StorageError>;

    /// Removes all claims, without leaving delete markers.
    ///
    /// # Errors
    /// If they cannot be removed.
    async fn clear(&self) -> Result<(), StorageError>;
}

/// The claims, and the uncommitted one on the next number, if any.
pub(crate) struct Claimed {
    pub(crate) claims: Arc<dyn Claims>,
    pub(crate) replaces: Option<u64>,
}
