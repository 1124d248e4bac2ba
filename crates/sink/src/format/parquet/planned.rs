//! Plans which rows of a result get new classes, and in which order.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use parquet::errors::ParquetError;
use roaring::RoaringTreemap;
use trommel_storage::StorageError;

use super::job_ids::JobIds;
use super::read::indices_of;
use super::relabel::{RowGroup, columns};
use super::rewritten::options;
use super::shape::Shape;
use crate::JobRecord;
use crate::format_name::Format;
use crate::read_back::{NO_ROW, StoredPart, no_result, stored_parts};

/// Indices decoded at once.
const BATCH: usize = 8192;

/// A result whose rows can get new classes by column: Parquet as Trommel writes it.
pub struct StoredColumns {
    parts: Vec<StoredPart>,
    shape: Shape,
}

impl StoredColumns {
    /// Checks the columns of all files of a result. `None` if a file is not Parquet, or its columns
    /// have other types than rows of this job.
    ///
    /// # Errors
    /// If there is no such result, or a file is damaged.
    pub fn open(path: &Path, job: &JobRecord) -> Result<Option<Self>, StorageError> {
        let parts = stored_parts(path)?;
        let mut shape = None;
        for part in &parts {
            if part.format != Format::Parquet {
                return Ok(None);
            }
            let damaged = |error: ParquetError| no_result(&part.path, error);
            let metadata = metadata(&part.path)?;
            let metadata = metadata.metadata();
            if shape.is_none() {
                shape = Shape::of(job, metadata).map_err(damaged)?;
            }
            if !shape.as_ref().is_some_and(|shape| shape.fits(metadata)) {
                return Ok(None);
            }
        }
        Ok(shape.map(|shape| Self { parts, shape }))
    }

    /// The row groups in the order of the result, without rows with these indices; of duplicate
    /// indices, only the first.
    pub fn row_groups(self, job_id: &str, committed: RoaringTreemap) -> RowGroups {
        RowGroups {
            parts: self.parts.into_iter(),
            shape: Arc::new(self.shape),
            job_ids: Arc::new(JobIds::new(job_id)),
            taken: committed,
            open: None,
        }
    }
}

fn metadata(path: &Path) -> Result<ArrowReaderMetadata, StorageError> {
    let file = File::open(path).map_err(|error| StorageError::read(path.display(), error))?;
    ArrowReaderMetadata::load(&file, options()).map_err(|error| no_result(path, error))
}

/// The row groups of a result, without duplicate indices.
pub struct RowGroups {
    parts: std::vec::IntoIter<StoredPart>,
    shape: Arc<Shape>,
    job_ids: Arc<JobIds>,
    taken: RoaringTreemap,
    open: Option<Open>,
}

/// A file being read.
struct Open {
    path: PathBuf,
    file: File,
    metadata: ArrowReaderMetadata,
    superseded: Arc<RoaringTreemap>,
    next: usize,
}

impl Open {
    fn of(part: StoredPart) -> Result<Self, StorageError> {
        let file = File::open(&part.path)
            .map_err(|error| StorageError::read(part.path.display(), error))?;
        let metadata = ArrowReaderMetadata::load(&file, options())
            .map_err(|error| no_result(&part.path, error))?;
        Ok(Self {
            path: part.path,
            file,
            metadata,
            superseded: part.superseded,
            next: 0,
        })
    }

    /// The indices of the next row group.
    fn indices(&self) -> Result<Vec<u64>, StorageError> {
        let damaged = |error: ParquetError| no_result(&self.path, error);
        let reader = columns(&self.file, &self.metadata, self.next, BATCH, &["index"]);
        let mut indices = Vec::new();
        for batch in reader.map_err(damaged)? {
            let batch = batch.map_err(|error| no_result(&self.path, error))?;
            let found = batch.columns().first().and_then(indices_of);
            indices.extend(found.ok_or_else(|| no_result(&self.path, NO_ROW))?);
        }
        Ok(indices)
    }
}

impl RowGroups {
    fn advance(&mut self) -> Result<Option<RowGroup>, StorageError> {
        loop {
            let Some(open) = &mut self.open else {
                let Some(part) = self.parts.next() else {
                    return Ok(None);
                };
                self.open = Some(Open::of(part)?);
                continue;
            };
            if open.next == open.metadata.metadata().num_row_groups() {
                self.open = None;
                continue;
            }
            let indices = open.indices()?;
            let number = open.next;
            open.next += 1;
            let Some((kept, indices)) = kept(indices, &open.superseded, &mut self.taken) else {
                continue;
            };
            return Ok(Some(RowGroup {
                path: open.path.clone(),
                metadata: open.metadata.clone(),
                number,
                kept,
                shape: Arc::clone(&self.shape),
                job_ids: Arc::clone(&self.job_ids),
                indices,
            }));
        }
    }
}

impl Iterator for RowGroups {
    type Item = Result<RowGroup, StorageError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance().transpose()
    }
}

/// Positions of the rows sorted by index, or `None` if all are in order, with their indices;
/// nothing if there are no rows.
type Kept = Option<(Option<Vec<u64>>, Vec<u64>)>;

/// The rows of a row group that are neither superseded nor taken; marks them as taken.
fn kept(indices: Vec<u64>, superseded: &RoaringTreemap, taken: &mut RoaringTreemap) -> Kept {
    let (first, last) = (*indices.first()?, *indices.last()?);
    let is_free = |set: &RoaringTreemap| {
        let before = first.checked_sub(1).map_or(0, |before| set.rank(before));
        set.rank(last) == before
    };
    let is_sorted = indices.is_sorted_by(|a, b| a < b);
    if is_sorted && is_free(superseded) && is_free(taken) {
        for run in indices.chunk_by(|a, b| a + 1 == *b) {
            taken.insert_range(run[0]..=run[run.len() - 1]);
        }
        return Some((None, indices));
    }
    let mut rows: Vec<(u64, u64)> = Vec::new();
    for (place, index) in (0..).zip(indices) {
        if !superseded.contains(index) && taken.insert(index) {
            rows.push((index, place));
        }
    }
    rows.sort_unstable();
    if rows.is_empty() {
        return None;
    }
    let (indices, places) = rows.into_iter().unzip();
    Some((Some(places), indices))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_kept_once_and_by_index() {
        let (none, mut taken) = (RoaringTreemap::new(), RoaringTreemap::new());
        let some = Some((None, vec![3, 4, 6]));
        assert_eq!(kept(vec![3, 4, 6], &none, &mut taken), some);
        // 4 is taken, and 9 is a duplicate.
        let some = Some((Some(vec![3, 0, 1]), vec![1, 5, 9]));
        assert_eq!(kept(vec![5, 9, 9, 1, 4], &none, &mut taken), some);
        assert_eq!(taken.iter().collect::<Vec<_>>(), [1, 3, 4, 5, 6, 9]);
        assert_eq!(kept(vec![3, 4], &none, &mut taken), None);
        let later: RoaringTreemap = [11].into_iter().collect();
        let some = Some((Some(vec![0, 2]), vec![10, 12]));
        assert_eq!(kept(vec![10, 11, 12], &later, &mut taken), some);
        assert_eq!(kept(Vec::new(), &none, &mut taken), None);
    }
}
