//! Part numbers claimed elsewhere, for stores that honour no preconditions.

use std::sync::Arc;

use bytes::Bytes;

use crate::sink::bucket::BucketDestination;
use crate::sink::part;
use crate::{StorageError, StorageErrorKind};

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

/// Claims of part numbers, kept where compare-and-set works. Blocking.
pub trait Claims: Send + Sync {
    /// All claims of the destination.
    ///
    /// # Errors
    /// When they cannot be read.
    fn list(&self) -> Result<Vec<Claim>, StorageError>;

    /// Claims a number, `replaces` being the revision of a claim that was not committed. Gives the
    /// claim's revision.
    ///
    /// # Errors
    /// [`LostRace`](StorageErrorKind::LostRace) when another has it.
    fn open(&self, part: u64, replaces: Option<u64>) -> Result<u64, StorageError>;

    /// Commits a claim.
    ///
    /// # Errors
    /// [`LostRace`](StorageErrorKind::LostRace) when another has taken it over.
    fn commit(&self, part: u64, revision: u64, object: &str) -> Result<(), StorageError>;
}
/// The claims, and the one on the next number that was never committed.
pub(super) struct Claimed {
    pub(super) claims: Arc<dyn Claims>,
    pub(super) replaces: Option<u64>,
}

impl Claimed {
    /// Writes a part under a claim of its number.
    pub(super) fn store(
        &mut self,
        destination: &BucketDestination,
        number: u64,
        encode: impl FnOnce(&str) -> Result<Bytes, StorageError>,
    ) -> Result<String, StorageError> {
        let revision = self.claims.open(number, self.replaces.take())?;
        let name = part::claimed_name(number, revision, destination.format);
        destination.write(&name, encode(&name)?, false)?;
        if let Err(error) = self.claims.commit(number, revision, &name) {
            if error.kind() == StorageErrorKind::LostRace {
                // Nobody else writes this name, and it never counts. The heir removes it otherwise.
                drop(destination.remove(&name));
            }
            return Err(error);
        }
        Ok(name)
    }
}
