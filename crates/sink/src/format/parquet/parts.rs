//! Merges encoded row groups into parts.

use std::mem::take;
use std::sync::Arc;

use bytes::Bytes;
use parquet::arrow::ARROW_SCHEMA_META_KEY;
use parquet::file::writer::SerializedFileWriter;
use trommel_storage::StorageError;

use super::relabel::RelabelledGroup;
use super::{copy_row_groups, footer, io_error, properties};
use crate::JobRecord;
use crate::part::PartRecord;

/// Rows in a full part: the most that a stop can lose, and one sync of the disk each.
const ROWS: u64 = 1 << 18;

/// A part whose rows are encoded.
pub struct EncodedPart {
    pub(crate) content: Bytes,
    pub(crate) record: PartRecord,
}

/// Merges row groups into parts whose rows are sorted by index.
pub struct EncodedParts {
    job: JobRecord,
    groups: Vec<RelabelledGroup>,
    rows: u64,
}

impl EncodedParts {
    /// Parts of this job.
    pub fn new(job: JobRecord) -> Self {
        Self {
            job,
            groups: Vec::new(),
            rows: 0,
        }
    }

    /// Adds a row group, and returns the preceding part if it is full.
    ///
    /// # Errors
    /// If the part cannot be encoded.
    pub fn add(&mut self, group: RelabelledGroup) -> Result<Option<EncodedPart>, StorageError> {
        let is_behind = |before: &RelabelledGroup| before.range.1 < group.range.0;
        let fits =
            self.rows + group.record.rows <= ROWS && self.groups.last().is_none_or(is_behind);
        let full = match fits {
            true => None,
            false => self.finish()?,
        };
        self.rows += group.record.rows;
        self.groups.push(group);
        Ok(full)
    }

    /// The part with the last row groups, if any.
    ///
    /// # Errors
    /// If the part cannot be encoded.
    pub fn finish(&mut self) -> Result<Option<EncodedPart>, StorageError> {
        let groups = take(&mut self.groups);
        self.rows = 0;
        if groups.is_empty() {
            return Ok(None);
        }
        let part = join(&self.job, groups);
        part.map(Some)
            .map_err(|error| StorageError::write("a part".as_ref(), io_error(error)))
    }
}

fn join(
    job: &JobRecord,
    groups: Vec<RelabelledGroup>,
) -> Result<EncodedPart, parquet::errors::ParquetError> {
    let mut record = PartRecord::default();
    let model = groups[0].metadata.file_metadata();
    // Readers take the Arrow types from this pair.
    let arrow = model.key_value_metadata().into_iter().flatten();
    let arrow = arrow
        .filter(|pair| pair.key == ARROW_SCHEMA_META_KEY)
        .cloned();
    let properties = properties().set_key_value_metadata(Some(arrow.collect()));
    let schema = model.schema_descr().root_schema_ptr();
    let mut out = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut out, schema, Arc::new(properties.build()))?;
    for group in groups {
        copy_row_groups(&mut writer, &group.file, &group.metadata)?;
        record.add(group.record);
    }
    for pair in footer(job, &record) {
        writer.append_key_value_metadata(pair);
    }
    writer.close()?;
    let content = out.into();
    Ok(EncodedPart { content, record })
}
