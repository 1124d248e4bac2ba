//! Checks that the rows of a result are numbered as an output requires: each index once, from 0 on.

use std::fs::File;
use std::path::{Path, PathBuf};

use roaring::RoaringTreemap;
use trommel_storage::StorageError;

use crate::format::Input;
use crate::read_back::{no_result, stored_parts};

/// A problem with the indices of a result.
#[derive(Debug, PartialEq, Eq)]
pub enum Misnumbered {
    /// The first index without a row although a later one has a row.
    Missing {
        /// The index.
        index: u64,
    },
    /// Two valid rows have the same index.
    Twice {
        /// The index.
        index: u64,
        /// The file of the second row.
        file: PathBuf,
    },
}

/// Reads the indices of a result file, or of a folder of parts like
/// [`read_rows`](crate::read_rows). In Parquet, this is one column.
///
/// # Errors
/// If there is no such result, or a file is malformed.
pub fn misnumbered(path: &Path) -> Result<Option<Misnumbered>, StorageError> {
    let mut all = RoaringTreemap::new();
    for part in stored_parts(path)? {
        let damaged = |reason: String| no_result(&part.path, reason);
        let file = File::open(&part.path)
            .map_err(|error| StorageError::read(part.path.display(), error))?;
        let indices = part.format.encoding().indices(Input::File(file));
        for index in indices.map_err(damaged)? {
            let index = index.map_err(damaged)?;
            if !part.superseded.contains(index) && !all.insert(index) {
                let file = part.path;
                return Ok(Some(Misnumbered::Twice { index, file }));
            }
        }
    }
    Ok(first_missing(&all).map(|index| Misnumbered::Missing { index }))
}

/// The first missing index below the last one.
pub(crate) fn first_missing(indices: &RoaringTreemap) -> Option<u64> {
    let last = indices.max()?;
    if indices.len().checked_sub(1) == Some(last) {
        return None;
    }
    let mut places = (0..).zip(indices);
    places.find_map(|(place, index)| (place != index).then_some(place))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_gap_is_found() {
        for (indices, missing) in [
            (&[][..], None),
            (&[0, 1, 2], None),
            (&[1, 2], Some(0)),
            (&[0, 1, 4, 9], Some(2)),
        ] {
            let indices: RoaringTreemap = indices.iter().collect();
            assert_eq!(first_missing(&indices), missing, "{indices:?}");
        }
    }
}
