//! The single file that parts become.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::arrow::ArrowWriter;
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::file::writer::SerializedFileWriter;

use crate::StorageError;
use crate::sink::parquet_part::{self, FINGERPRINT_KEY, JOB_KEY};
use crate::sink::{Format, JobRecord, text_part};

/// The parts of a job, in the order of their numbers.
pub(super) struct Parts<'a> {
    pub(super) paths: Vec<PathBuf>,
    pub(super) format: Format,
    pub(super) job: &'a JobRecord,
    /// A hash of all indices and uris.
    pub(super) fingerprint: String,
}

impl Parts<'_> {
    /// Writes the rows of all parts to `out`, which is to become `target`.
    pub(super) fn merge(
        &self,
        out: &mut (impl Write + Send),
        target: &Path,
    ) -> Result<(), StorageError> {
        match self.format {
            Format::Parquet => self.merge_parquet(out, target),
            Format::Jsonl => self.merge_text(out, target, &[]),
            Format::Csv => {
                let header = text_part::csv_header(self.job);
                out.write_all(&header)
                    .map_err(|error| StorageError::write(target, error))?;
                self.merge_text(out, target, &header)
            }
        }
    }

    /// Copies row groups without decoding them.
    fn merge_parquet(
        &self,
        out: &mut (impl Write + Send),
        target: &Path,
    ) -> Result<(), StorageError> {
        let failed = |error| parquet_part::write_error(target, error);
        let mut footer = vec![
            parquet_part::pair(JOB_KEY, parquet_part::to_json(self.job)),
            parquet_part::pair(FINGERPRINT_KEY, self.fingerprint.clone()),
        ];
        let Some(first) = self.paths.first() else {
            let properties = parquet_part::properties().set_key_value_metadata(Some(footer));
            let schema = Arc::new(parquet_part::schema(self.job));
            let writer = ArrowWriter::try_new(out, schema, Some(properties.build()));
            writer.and_then(ArrowWriter::close).map_err(failed)?;
            return Ok(());
        };
        let (_, model) = open_parquet(first)?;
        // Readers take the Arrow types from this pair.
        let pairs = model
            .file_metadata()
            .key_value_metadata()
            .into_iter()
            .flatten();
        footer.extend(
            pairs
                .filter(|pair| pair.key == parquet::arrow::ARROW_SCHEMA_META_KEY)
                .cloned(),
        );
        let properties = parquet_part::properties()
            .set_key_value_metadata(Some(footer))
            .build();
        let schema = model.file_metadata().schema_descr().root_schema_ptr();
        let mut writer =
            SerializedFileWriter::new(out, schema, Arc::new(properties)).map_err(failed)?;
        for path in &self.paths {
            let (input, metadata) = open_parquet(path)?;
            copy_row_groups(&mut writer, &input, &metadata).map_err(failed)?;
        }
        writer.close().map_err(failed)?;
        Ok(())
    }

    /// Copies bytes, of each part those behind its `header`.
    fn merge_text(
        &self,
        out: &mut impl Write,
        target: &Path,
        header: &[u8],
    ) -> Result<(), StorageError> {
        for path in &self.paths {
            let read = |error| StorageError::read(path.display(), error);
            let mut input = BufReader::new(File::open(path).map_err(read)?);
            let mut start = vec![0; header.len()];
            input.read_exact(&mut start).map_err(read)?;
            if start != header {
                return Err(StorageError::corrupt(
                    path,
                    "its header is not the one of this job",
                ));
            }
            io::copy(&mut input, out).map_err(|error| StorageError::write(target, error))?;
        }
        Ok(())
    }
}

fn open_parquet(path: &Path) -> Result<(File, ParquetMetaData), StorageError> {
    let file = File::open(path).map_err(|error| StorageError::read(path.display(), error))?;
    let metadata = ParquetMetaDataReader::new()
        .parse_and_finish(&file)
        .map_err(|error| StorageError::corrupt(path, error))?;
    Ok((file, metadata))
}

fn copy_row_groups(
    writer: &mut SerializedFileWriter<impl Write + Send>,
    input: &File,
    metadata: &ParquetMetaData,
) -> Result<(), ParquetError> {
    for group in metadata.row_groups() {
        let mut copy = writer.next_row_group()?;
        for column in group.columns() {
            let closed = ColumnCloseResult {
                bytes_written: u64::try_from(column.compressed_size()).unwrap_or_default(),
                rows_written: u64::try_from(group.num_rows()).unwrap_or_default(),
                metadata: column.clone(),
                bloom_filter: None,
                column_index: None,
                offset_index: None,
            };
            copy.append_column(input, closed)?;
        }
        copy.close()?;
    }
    Ok(())
}
