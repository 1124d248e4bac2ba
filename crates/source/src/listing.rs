use trommel_storage::StorageError;
use trommel_types::Column;

use crate::{Found, SourceOptions};

/// One named source. Blocking.
pub(super) trait Listing: Send + Sync {
    /// The pass-through columns of this source.
    fn columns(&self) -> &[Column] {
        &[]
    }

    /// Passes every image to `visitor`, in order, with a value for each of `columns`.
    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop>;

    /// Whether [`Listing::list_from`] avoids listing what precedes.
    fn can_go_on(&self) -> bool {
        false
    }

    /// Passes every image after `last_uri` to `visitor`. Called only if [`Listing::can_go_on`].
    fn list_from(
        &self,
        _last_uri: &str,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        self.list(options, visitor)
    }
}

/// Receives a listing.
pub(super) trait Visitor {
    /// Receives an image.
    fn found(&mut self, found: Found) -> Result<(), Stop>;

    /// Counts a skipped file.
    fn skipped(&mut self) -> Result<(), Stop>;

    /// Called when the next image may take long.
    fn waiting(&mut self) -> Result<(), Stop> {
        Ok(())
    }
}

/// Why a listing ends early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The receiver is gone.
    Unwanted,
    /// The rest cannot be listed.
    Failed(StorageError),
}

impl From<StorageError> for Stop {
    fn from(error: StorageError) -> Self {
        Self::Failed(error)
    }
}

/// Lists until `count` images are found, to detect problems with a source before any work. Returns
/// how many were found.
pub(super) fn probe(
    listing: &dyn Listing,
    options: &SourceOptions,
    count: u64,
) -> Result<u64, StorageError> {
    let mut probe = Probe { found: 0, count };
    match listing.list(options, &mut probe) {
        Ok(()) | Err(Stop::Unwanted) => Ok(probe.found),
        Err(Stop::Failed(error)) => Err(error),
    }
}

struct Probe {
    found: u64,
    count: u64,
}

impl Visitor for Probe {
    fn found(&mut self, _: Found) -> Result<(), Stop> {
        self.found += 1;
        if self.found >= self.count {
            return Err(Stop::Unwanted);
        }
        Ok(())
    }

    fn skipped(&mut self) -> Result<(), Stop> {
        Ok(())
    }
}
