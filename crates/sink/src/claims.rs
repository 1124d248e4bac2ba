use std::sync::Arc;

use async_trait::async_trait;
use trommel_storage::StorageError;

/// Whether a store refuses to overwrite when it is asked to. A job decides it once, when its output
/// is opened first: sinks that decide differently do not see each other's parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preconditions {
    /// Ask the store.
    #[default]
    Probe,
    /// It refuses.
    Honoured,
    /// It overwrites; parts are claimed elsewhere first.
    Ignored,
}

/// A part number that a sink has taken, on a store that honours no preconditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The part's number.
    pub part: u64,
    /// Changes with every change of the claim.
    pub revision: u64,
    /// The object that was committed under it; none yet when the part is still being written.
    pub committed: Option<String>,
}

/// Claims of the part numbers of one output, and of the output itself, kept where compare-and-set works.
#[async_trait]
pub trait Claims: Send + Sync {
    /// Whether the output is still this job's: a later job has not taken it over.
    ///
    /// # Errors
    /// When that cannot be read.
    async fn hold_output(&self) -> Result<bool, StorageError> {
        Ok(true)
    }

    /// All claims.
    ///
    /// # Errors
    /// When they cannot be read.
    async fn list(&self) -> Result<Vec<Claim>, StorageError>;

    /// Claims a number, `replaces` being the revision of a claim that was not committed. Returns
    /// the claim's revision, which no claim of this output had before.
    ///
    /// # Errors
    /// [`LostRace`](trommel_storage::StorageErrorKind::LostRace) when another has it.
    async fn open(&self, part: u64, replaces: Option<u64>) -> Result<u64, StorageError>;

    /// Commits a claim.
    ///
    /// # Errors
    /// [`LostRace`](trommel_storage::StorageErrorKind::LostRace) when another has taken it over.
    async fn commit(&self, part: u64, revision: u64, object: &str) -> Result<(), StorageError>;

    /// Removes all claims, and leaves no marker of any.
    ///
    /// # Errors
    /// When they cannot be removed.
    async fn clear(&self) -> Result<(), StorageError>;
}

/// The claims, and the one on the next number that was never committed.
pub(crate) struct Claimed {
    pub(crate) claims: Arc<dyn Claims>,
    pub(crate) replaces: Option<u64>,
}
