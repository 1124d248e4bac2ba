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
        for some in indices.map_err(damaged)? {
            let some = some.map_err(damaged)?;
            if let Some(index) = add(&mut all, &some, &part.superseded) {
                let file = part.path;
                return Ok(Some(Misnumbered::Twice { index, file }));
            }
        }
    }
    Ok(first_missing(&all).map(|index| Misnumbered::Missing { index }))
}

/// Adds the indices that are not superseded, up to the first one that is already there, which is
/// returned.
fn add(all: &mut RoaringTreemap, indices: &[u64], superseded: &RoaringTreemap) -> Option<u64> {
    for run in indices.chunk_by(|a, b| a.checked_add(1) == Some(*b)) {
        // Most results are in order, and a run takes no longer than an index.
        if superseded.is_empty() && all.max().is_none_or(|last| last < run[0]) {
            all.insert_range(run[0]..=run[run.len() - 1]);
            continue;
        }
        let mut counted = run.iter().filter(|index| !superseded.contains(**index));
        if let Some(index) = counted.find(|index| !all.insert(**index)) {
            return Some(*index);
        }
    }
    None
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
    fn an_index_that_comes_again_is_found_in_any_order() {
        let superseded: RoaringTreemap = [2, 3].into_iter().collect();
        for (indices, again, count) in [
            (&[0, 1, 4, 5, 9][..], None, 5),
            (&[0, 1, 2, 4, 3, 2], Some(2), 5),
            (&[7, 8, 9, 0, 1, 2, 8], Some(8), 6),
            (&[5, 6, 7, 6, 7, 8], Some(6), 3),
            (&[4, 4], Some(4), 1),
            (&[u64::MAX, 0, u64::MAX], Some(u64::MAX), 2),
        ] {
            let (none, mut all) = (RoaringTreemap::new(), RoaringTreemap::new());
            assert_eq!(add(&mut all, indices, &none), again, "{indices:?}");
            assert_eq!(all.len(), count, "{indices:?}");
        }
        let mut all = RoaringTreemap::new();
        assert_eq!(add(&mut all, &[1, 2, 3, 2], &superseded), None);
        assert_eq!(add(&mut all, &[3, 4, 1], &superseded), Some(1));
        assert_eq!(all.iter().collect::<Vec<_>>(), [1, 4]);
    }

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
