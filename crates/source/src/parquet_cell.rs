//! Single cells of Parquet files.

use std::collections::VecDeque;
use std::fmt::Display;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder, RowSelection,
    RowSelector,
};
use parquet::basic::Compression;
use parquet::file::metadata::ParquetMetaData;
use trommel_storage::{StorageError, StorageErrorKind};

use crate::parquet_pages::Pages;
use crate::parquet_value::bytes;
use crate::stored::Stored;
use crate::stores::Stores;

/// Bytes of cells decoded together, judging by the file's averages.
const BATCH_BYTES: u64 = 4 << 20;
/// Most rows decoded together.
const BATCH_ROWS: u64 = 64;
/// Most bytes of a batch if all its rows are the same large dictionary value.
const REPEATED_BYTES: u64 = 256 << 20;
/// Bytes of decoded cells kept per file, for readers slightly out of order.
const KEPT_BYTES: usize = 32 << 20;
/// Most batches kept per file.
const KEPT_BATCHES: usize = 512;
/// Rows that are read through before a reader is reopened at the wanted row.
const LEAP: u64 = 512;
/// Files kept open.
const OPEN_FILES: usize = 4;

/// Reads single cells. Near-sequential reads decode each row once; a file is read by one caller at
/// a time, different files concurrently. Uses memory for some batches of rows of each of the last
/// few files, about 40 MB per file, whatever its size.
pub(super) struct CellReader {
    stores: Stores,
    /// Those in use or used last, oldest first.
    columns: Mutex<Vec<(Key, Shared)>>,
}

/// A file and a column in it.
type Key = (String, String);
/// An open column, unless its reader has failed.
pub(super) type Shared = Arc<Mutex<Option<OpenColumn>>>;

/// The image in a cell.
#[derive(Clone, Copy)]
pub(super) struct Image<'a> {
    /// Its name in errors.
    pub(super) uri: &'a str,
    /// The listed version of the file.
    pub(super) etag: Option<&'a str>,
    /// Size limit.
    pub(super) limit: u64,
}

impl Image<'_> {
    fn damaged(&self, reason: impl Display) -> StorageError {
        let message = format!("failed to read {}: {reason}", self.uri);
        StorageError::new(StorageErrorKind::NotAFile, message)
    }
}

impl CellReader {
    pub(super) fn new(stores: &Stores) -> Self {
        Self {
            stores: stores.clone(),
            columns: Mutex::default(),
        }
    }

    /// The bytes of a cell, and when reading them began. Blocking.
    pub(super) fn read(
        &self,
        image: Image<'_>,
        file: &str,
        column: &str,
        row: u64,
    ) -> Result<(Vec<u8>, Instant), StorageError> {
        let shared = self.shared(file, column);
        let mut held = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        // Removed, so that nothing remains of a reader that has failed.
        let mut known = held.take();
        let mut most_rows = BATCH_ROWS;
        loop {
            let was_known = known.is_some();
            let mut open = match known.take() {
                Some(open) if most_rows > 1 && open.serves(&image, row) => open,
                known => {
                    let stored = Stored::at(&self.stores, file)?;
                    OpenColumn::open(known, &image, stored, column, row, most_rows)?
                }
            };
            match open.cell(&image, row) {
                Ok(cell) => {
                    *held = Some(open);
                    return Ok((cell?, start));
                }
                // Without a specified version, the current one is used.
                Err(error)
                    if was_known
                        && image.etag.is_none()
                        && error.kind() == StorageErrorKind::Changed => {}
                // It may be the page of another image in the same batch.
                Err(error) if most_rows > 1 && error.kind() == StorageErrorKind::TooLarge => {
                    most_rows = 1;
                    known = Some(open);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The reader of a column. If there are many, an unused one makes room for it.
    pub(super) fn shared(&self, file: &str, column: &str) -> Shared {
        let mut columns = self.columns.lock().unwrap_or_else(PoisonError::into_inner);
        let place = columns
            .iter()
            .position(|((known, name), _)| known == file && name == column);
        let entry = match place {
            Some(place) => columns.remove(place),
            None => {
                let idle = |(_, shared): &(Key, Shared)| Arc::strong_count(shared) == 1;
                while columns.len() >= OPEN_FILES
                    && let Some(idle) = columns.iter().position(idle)
                {
                    columns.remove(idle);
                }
                ((file.to_owned(), column.to_owned()), Shared::default())
            }
        };
        let shared = Arc::clone(&entry.1);
        columns.push(entry);
        shared
    }
}

/// A column of a file, read forward from some row.
pub(super) struct OpenColumn {
    stored: Stored,
    metadata: ArrowReaderMetadata,
    /// The version of the file in use.
    version: Option<String>,
    pages: Pages,
    limit: u64,
    reader: ParquetRecordBatchReader,
    next_row: u64,
    /// Batches with their rows, oldest first.
    kept: VecDeque<(Range<u64>, ArrayRef)>,
}

impl OpenColumn {
    /// Opens at a row; the metadata of `former` is reused if the file is unchanged.
    fn open(
        former: Option<Self>,
        image: &Image<'_>,
        stored: Stored,
        column: &str,
        row: u64,
        most_rows: u64,
    ) -> Result<Self, StorageError> {
        if let Stored::File(path) = &stored {
            path.metadata()
                .map_err(|error| StorageError::read(image.uri, error))?;
        }
        let version = stored.version();
        if image.etag.is_some() && version.is_some() && image.etag != version.as_deref() {
            return Err(StorageError::changed(image.uri));
        }
        let metadata = match former {
            Some(former) if former.version == version => former.metadata,
            _ => ArrowReaderMetadata::load(&stored, Default::default())
                .map_err(|error| image.damaged(error))?,
        };
        let parquet = metadata.metadata();
        let schema = parquet.file_metadata().schema_descr();
        let leaf = schema
            .columns()
            .iter()
            .position(|leaf| leaf.path().string() == column)
            .ok_or_else(|| {
                image.damaged(format_args!("its file has no column `{column}` any more"))
            })?;
        let (group, group_row) = group_of(parquet, row)
            .ok_or_else(|| image.damaged(format_args!("its file has no row {row} any more")))?;
        let rows = batch_rows(parquet, group, leaf).min(most_rows);
        // Rows just before the wanted one are often wanted soon.
        let skipped = (row - group_row) - (row - group_row) % rows;
        let selection = RowSelection::from(vec![
            RowSelector::skip(skipped as usize),
            RowSelector::select((rows_from(parquet, group) - skipped) as usize),
        ]);
        let mask = ProjectionMask::leaves(schema, [leaf]);
        let groups: Vec<usize> = (group..parquet.num_row_groups()).collect();
        let is_gzip = groups.iter().any(|group| {
            let codec = parquet.row_group(*group).column(leaf).compression();
            matches!(codec, Compression::GZIP(_))
        });
        let pages = Pages::new(&stored, image.limit, is_gzip);
        let reader =
            ParquetRecordBatchReaderBuilder::new_with_metadata(pages.clone(), metadata.clone())
                .with_row_groups(groups)
                .with_projection(mask)
                .with_row_selection(selection)
                .with_batch_size(rows as usize)
                .build()
                .map_err(|error| image.damaged(error))?;
        Ok(Self {
            stored,
            metadata,
            version,
            pages,
            limit: image.limit,
            reader,
            next_row: group_row + skipped,
            kept: VecDeque::new(),
        })
    }

    /// Whether it has the wanted version, and reading on is the cheapest way to the row.
    fn serves(&self, image: &Image<'_>, row: u64) -> bool {
        let is_version =
            image.etag.is_none() || self.version.is_none() || image.etag == self.version.as_deref();
        is_version && self.limit == image.limit && self.reaches(row)
    }

    /// Whether reading on is the cheapest way to a row.
    fn reaches(&self, row: u64) -> bool {
        let kept = self.kept.iter().any(|(rows, _)| rows.contains(&row));
        kept || (row >= self.next_row && row - self.next_row < LEAP)
    }

    /// The bytes of a row that is kept or still to come. The outer error is that of the reader, the
    /// inner one of the cell.
    fn cell(
        &mut self,
        image: &Image<'_>,
        row: u64,
    ) -> Result<Result<Vec<u8>, StorageError>, StorageError> {
        while !self.kept.iter().any(|(rows, _)| rows.contains(&row)) {
            let batch = self.reader.next();
            // A file may be replaced while it is read, which invalidates what was read. Objects are
            // requested by version.
            if let Stored::File(_) = self.stored
                && self.stored.version() != self.version
            {
                return Err(StorageError::changed(image.uri));
            }
            let batch = match batch {
                Some(Ok(batch)) => batch,
                Some(Err(error)) => {
                    let Some(fault) = self.pages.take_fault() else {
                        return Err(image.damaged(error));
                    };
                    let message = format!("failed to read {}: {fault}", image.uri);
                    return Err(StorageError::new(fault.kind(), message));
                }
                None => {
                    let reason = format_args!("its file has no row {row} any more");
                    return Err(image.damaged(reason));
                }
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
        let cell = found.and_then(|(rows, cells)| bytes(cells, (row - rows.start) as usize));
        Ok(match cell {
            Some(cell) if cell.len() as u64 > image.limit => Err(StorageError::too_large(
                image.uri,
                cell.len() as u64,
                image.limit,
            )),
            Some(cell) => Ok(cell.to_vec()),
            None => Err(image.damaged("its cell is null")),
        })
    }

    fn kept_bytes(&self) -> usize {
        let sizes = self
            .kept
            .iter()
            .map(|(_, cells)| cells.get_array_memory_size());
        sizes.sum()
    }
}

/// The row group of a row, and the group's first row.
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

/// Rows of a row group and all following ones.
fn rows_from(metadata: &ParquetMetaData, group: usize) -> u64 {
    let groups = metadata.row_groups().iter().skip(group);
    groups.map(|group| group.num_rows().max(0) as u64).sum()
}

/// How many rows of a column are decoded together.
fn batch_rows(metadata: &ParquetMetaData, group: usize, leaf: usize) -> u64 {
    let group = metadata.row_group(group);
    let column = group.column(leaf);
    let bytes = column.uncompressed_size().max(1) as u64;
    let rows = group.num_rows().max(1) as u64;
    let most = match column.dictionary_page_offset() {
        // Each row may be the same large value of the dictionary.
        Some(_) => (REPEATED_BYTES / bytes).clamp(1, BATCH_ROWS),
        None => BATCH_ROWS,
    };
    (BATCH_BYTES.saturating_mul(rows) / bytes).clamp(1, most)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::mpsc;
    use std::time::Duration;

    use arrow_array::{BinaryArray, RecordBatch};
    use parquet::arrow::ArrowWriter;

    use super::*;
    use crate::SourceOptions;

    /// R42: one lock over all files made each reader wait for the slowest.
    #[test]
    fn a_file_that_is_being_read_keeps_no_other_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("images.parquet");
        let cells: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"one", b"two"]));
        let batch = RecordBatch::try_from_iter([("image", cells)]).unwrap();
        let mut writer =
            ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();

        let reader = Arc::new(CellReader::new(&Stores::new(&SourceOptions::default())));
        let slow = reader.shared("slow.parquet", "image");
        let held = slow.lock().unwrap();
        let (sender, read) = mpsc::sync_channel(1);
        let (other, file) = (Arc::clone(&reader), path.to_str().unwrap().to_owned());
        std::thread::spawn(move || {
            let image = Image {
                uri: "images.parquet#1",
                etag: None,
                limit: 100,
            };
            let cell = other.read(image, &file, "image", 1).map(|(cell, _)| cell);
            sender.send(cell).unwrap();
        });
        let cell = read.recv_timeout(Duration::from_secs(300));
        assert_eq!(cell.expect("it waits for another file").unwrap(), b"two");
        drop(held);
        // The file itself is read by one caller at a time.
        assert!(Arc::ptr_eq(&slow, &reader.shared("slow.parquet", "image")));
    }
}
