//! Single cells of Parquet files.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder, RowSelection,
    RowSelector,
};
use parquet::file::metadata::ParquetMetaData;

use crate::s3::S3;
use crate::source::parquet_value::bytes;
use crate::source::stored::Stored;
use crate::{StorageError, StorageErrorKind};

/// Bytes of cells decoded together, as far as the file's own averages tell.
const BATCH_BYTES: u64 = 4 << 20;
/// Most rows decoded together.
const BATCH_ROWS: u64 = 64;
/// Bytes of decoded cells kept of a file, for readers that come a little out of order.
const KEPT_BYTES: usize = 32 << 20;
/// Most batches kept of a file.
const KEPT_BATCHES: usize = 64;
/// Rows read on through before a reader is opened anew at the row that is wanted.
const LEAP: u64 = 512;
/// Files kept open.
const OPEN_FILES: usize = 4;

/// Reads single cells. Near-sequential reads decode each row once. Memory is that of some batches
/// of rows for each of the few files read last, about 40 MB a file, whatever its size.
pub(super) struct CellReader {
    s3: S3,
    columns: Mutex<HashMap<(String, String), OpenColumn>>,
}

impl CellReader {
    pub(super) fn new(s3: &S3) -> Self {
        Self {
            s3: s3.clone(),
            columns: Mutex::default(),
        }
    }

    /// The bytes of a cell, at most `limit`, for the image called `image`. Blocking.
    pub(super) fn read(
        &self,
        image: &str,
        file: &str,
        column: &str,
        row: u64,
        limit: u64,
    ) -> Result<Vec<u8>, StorageError> {
        let mut columns = self.columns.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (file.to_owned(), column.to_owned());
        if columns.len() >= OPEN_FILES && !columns.contains_key(&key) {
            columns.clear();
        }
        // Taken out, so that nothing stays of a reader that has failed.
        let known = columns.remove(&key);
        let failed = |reason: String| {
            let message = format!("failed to read {image}: {reason}");
            StorageError::new(StorageErrorKind::NotAFile, message)
        };
        let mut open = match known {
            Some(open) if open.reaches(row) => open,
            known => OpenColumn::open(known, image, &Stored::at(&self.s3, file)?, column, row)?,
        };
        let cell = open.cell(row).map_err(failed)?;
        let cell = match cell {
            Some(cell) if cell.len() as u64 > limit => {
                Err(StorageError::too_large(image, cell.len() as u64, limit))
            }
            Some(cell) => Ok(cell.to_vec()),
            None => Err(failed("its cell is null".to_owned())),
        };
        columns.insert(key, open);
        cell
    }
}

/// A column of a file, read forward from some row.
struct OpenColumn {
    metadata: ArrowReaderMetadata,
    /// The version of the file that `metadata` is of.
    version: Option<String>,
    reader: ParquetRecordBatchReader,
    next_row: u64,
    /// Batches with the rows they hold, oldest first.
    kept: VecDeque<(Range<u64>, ArrayRef)>,
}

impl OpenColumn {
    /// Opens at a row; the metadata of `former` serves again if the file is still the same.
    fn open(
        former: Option<Self>,
        image: &str,
        stored: &Stored,
        column: &str,
        row: u64,
    ) -> Result<Self, StorageError> {
        let damaged = |error| {
            let message = format!("failed to read {image}: {error}");
            StorageError::new(StorageErrorKind::NotAFile, message)
        };
        if let Stored::File(path) = stored {
            path.metadata()
                .map_err(|error| StorageError::read(image, error))?;
        }
        let version = stored.version();
        let metadata = match former {
            Some(former) if former.version == version => former.metadata,
            _ => ArrowReaderMetadata::load(stored, Default::default()).map_err(damaged)?,
        };
        let parquet = metadata.metadata();
        let schema = parquet.file_metadata().schema_descr();
        let leaf = schema
            .columns()
            .iter()
            .position(|leaf| leaf.path().string() == column)
            .ok_or_else(|| damaged(not_there(format!("column `{column}`"))))?;
        let (group, group_row) =
            group_of(parquet, row).ok_or_else(|| damaged(not_there(format!("row {row}"))))?;
        let rows = batch_rows(parquet, group, leaf);
        // Rows just before the one that is wanted are often wanted soon.
        let skipped = (row - group_row) - (row - group_row) % rows;
        let selection = RowSelection::from(vec![
            RowSelector::skip(skipped as usize),
            RowSelector::select((rows_from(parquet, group) - skipped) as usize),
        ]);
        let mask = ProjectionMask::leaves(schema, [leaf]);
        let groups = (group..parquet.num_row_groups()).collect();
        let reader =
            ParquetRecordBatchReaderBuilder::new_with_metadata(stored.clone(), metadata.clone())
                .with_row_groups(groups)
                .with_projection(mask)
                .with_row_selection(selection)
                .with_batch_size(rows as usize)
                .build()
                .map_err(damaged)?;
        Ok(Self {
            metadata,
            version,
            reader,
            next_row: group_row + skipped,
            kept: VecDeque::new(),
        })
    }

    /// Whether reading on is the cheapest way to a row.
    fn reaches(&self, row: u64) -> bool {
        let kept = self.kept.iter().any(|(rows, _)| rows.contains(&row));
        kept || (row >= self.next_row && row - self.next_row < LEAP)
    }

    /// The bytes of a row that is kept or still comes; none where it is null.
    fn cell(&mut self, row: u64) -> Result<Option<&[u8]>, String> {
        while !self.kept.iter().any(|(rows, _)| rows.contains(&row)) {
            let batch = match self.reader.next() {
                Some(Ok(batch)) => batch,
                Some(Err(error)) => return Err(error.to_string()),
                None => return Err(format!("its file has no row {row} any more")),
            };
            let mut cells = batch.column(0).clone();
            while let DataType::Struct(_) = cells.data_type() {
                cells = cells.as_struct().column(0).clone();
            }
            let rows = self.next_row..self.next_row + cells.len() as u64;
            self.next_row = rows.end;
            self.kept.push_back((rows, cells));
            while self.kept.len() > KEPT_BATCHES
                || (self.kept.len() > 1 && self.kept_bytes() > KEPT_BYTES)
            {
                self.kept.pop_front();
            }
        }
        let found = self.kept.iter().find(|(rows, _)| rows.contains(&row));
        Ok(found.and_then(|(rows, cells)| bytes(cells, (row - rows.start) as usize)))
    }

    fn kept_bytes(&self) -> usize {
        let sizes = self
            .kept
            .iter()
            .map(|(_, cells)| cells.get_array_memory_size());
        sizes.sum()
    }
}

fn not_there(what: String) -> parquet::errors::ParquetError {
    parquet::errors::ParquetError::General(format!("its file has no {what} any more"))
}

/// The row group that holds a row, and the group's first row.
fn group_of(metadata: &ParquetMetaData, row: u64) -> Option<(usize, u64)> {
    let mut first = 0;
    for (group, rows) in metadata.row_groups().iter().enumerate() {
        let next = first + rows.num_rows().max(0) as u64;
        if row < next {
            return Some((group, first));
        }
        first = next;
    }
    None
}

/// Rows of a row group and all behind it.
fn rows_from(metadata: &ParquetMetaData, group: usize) -> u64 {
    let groups = metadata.row_groups().iter().skip(group);
    groups.map(|group| group.num_rows().max(0) as u64).sum()
}

/// How many rows of a column are decoded together.
fn batch_rows(metadata: &ParquetMetaData, group: usize, leaf: usize) -> u64 {
    let group = metadata.row_group(group);
    let bytes = group.column(leaf).uncompressed_size().max(1) as u64;
    let rows = group.num_rows().max(1) as u64;
    (BATCH_BYTES * rows / bytes).clamp(1, BATCH_ROWS)
}
