//! Parquet, whose footer contains the record of a part.

mod answers;
mod columns;
mod halves;
mod job_ids;
mod levels;
mod parts;
mod planned;
mod read;
mod relabel;
mod rewritten;
mod shape;
mod vectors;

use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_schema::DataType;
use bytes::Bytes;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReaderBuilder, RowSelection, RowSelector};
use parquet::arrow::{ARROW_SCHEMA_META_KEY, ArrowWriter, parquet_to_arrow_schema};
use parquet::basic::{Compression, ZstdLevel};
use parquet::column::writer::ColumnCloseResult;
use parquet::errors::ParquetError;
use parquet::file::metadata::{
    ColumnChunkMetaData, KeyValue, ParquetMetaData, ParquetMetaDataReader,
};
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder};
use parquet::file::reader::ChunkReader;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::ColumnPath;
use roaring::RoaringTreemap;

pub use self::answers::{Answers, Classes};
use self::columns::{
    ELEMENT, batch, schema, score_column, text_column, top_column, vectors, width,
};
pub use self::parts::{EncodedPart, EncodedParts};
pub use self::planned::{RowGroups, StoredColumns};
use self::read::{Floats, embedded_rows, floats, indices, projected, rows};
pub use self::relabel::{RelabelError, RelabelledGroup, RowGroup};

use super::{
    EmbeddedRows, Encoding, FieldRows, Indices, Input, MergeError, MergePart, Tail, Wanted,
};
use crate::JobRecord;
use crate::owner::Owner;
use crate::part::PartRecord;
use crate::row::{EMBEDDING, Row};

/// Footer key of the job, as JSON.
const JOB_KEY: &str = "trommel.job";
/// Footer key of the indices that a part commits: a JSON list of [`Runs`](crate::Runs).
const RANGES_KEY: &str = "trommel.ranges";
/// Footer key of a part's failures by kind, as JSON.
const FAILURES_KEY: &str = "trommel.failures";
/// Footer key, in the single file, of a hash of all indices and uris.
const FINGERPRINT_KEY: &str = "trommel.fingerprint";
/// Bytes at the end of a part that usually contain its footer.
const FOOTER: u64 = 64 << 10;
/// Estimated bytes of rows converted to columns at once: a text column is limited to 2 GiB.
const BATCH: usize = 256 << 20;

pub(super) struct Parquet;

impl Encoding for Parquet {
    fn write(
        &self,
        out: &mut (dyn Write + Send),
        job: &JobRecord,
        rows: &[Row],
        record: &PartRecord,
    ) -> io::Result<()> {
        let footer = footer(job, record);
        let properties = properties().set_key_value_metadata(Some(footer)).build();
        let schema = Arc::new(schema(job, width(rows)?));
        let mut writer =
            ArrowWriter::try_new(out, Arc::clone(&schema), Some(properties)).map_err(io_error)?;
        let mut rest = rows;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(fitting(rest, BATCH));
            let batch = batch(job, now, &schema).map_err(|error| io_error(error.into()))?;
            writer.write(&batch).map_err(io_error)?;
            if !later.is_empty() {
                writer.flush().map_err(io_error)?;
            }
            rest = later;
        }
        writer.close().map_err(io_error)?;
        Ok(())
    }

    fn tail(&self) -> Option<u64> {
        Some(FOOTER)
    }

    fn read_record(&self, end: Bytes, size: u64, job: &JobRecord) -> Result<Tail, String> {
        let mut reader = ParquetMetaDataReader::new();
        match reader.try_parse_sized(&end, size) {
            Ok(()) => {}
            Err(ParquetError::NeedMoreData(needed)) => return Ok(Tail::More(needed as u64)),
            Err(error) => return Err(error.to_string()),
        }
        let metadata = reader.finish().map_err(|error| error.to_string())?;
        let footer = metadata.file_metadata();
        let value = |key| {
            value(footer.key_value_metadata(), key)
                .ok_or_else(|| format!("its footer has no {key}"))
        };
        let damaged = |error: serde_json::Error| error.to_string();
        let found: JobId = serde_json::from_str(value(JOB_KEY)?).map_err(damaged)?;
        if found.job_id != job.job_id {
            return Err(format!("it is of another job, {}", found.job_id));
        }
        let record = PartRecord {
            rows: u64::try_from(footer.num_rows()).unwrap_or_default(),
            runs: serde_json::from_str(value(RANGES_KEY)?).map_err(damaged)?,
            failures: serde_json::from_str(value(FAILURES_KEY)?).map_err(damaged)?,
        };
        record.check().map(Tail::Record)
    }

    fn rows(&self, input: Input, wanted: Wanted) -> Result<FieldRows, String> {
        match input {
            Input::File(file) => rows(file, wanted),
            Input::Bytes(bytes) => rows(bytes, wanted),
        }
        .map_err(|error| error.to_string())
    }

    fn embedded_rows(&self, input: Input, wanted: Wanted) -> Result<EmbeddedRows, String> {
        match input {
            Input::File(file) => embedded_rows(file, wanted),
            Input::Bytes(bytes) => embedded_rows(bytes, wanted),
        }
        .map_err(|error| error.to_string())
    }

    fn indices(&self, input: Input) -> Result<Indices, String> {
        match input {
            Input::File(file) => indices(file),
            Input::Bytes(bytes) => indices(bytes),
        }
        .map_err(|error| error.to_string())
    }

    fn job(&self, file: File) -> Option<JobRecord> {
        let metadata = ParquetMetaDataReader::new().parse_and_finish(&file).ok()?;
        let text = value(metadata.file_metadata().key_value_metadata(), JOB_KEY)?;
        serde_json::from_str(text).ok()
    }

    fn owner(&self, file: File) -> Owner {
        let job_id = || {
            let metadata = ParquetMetaDataReader::new().parse_and_finish(&file).ok()?;
            let text = value(metadata.file_metadata().key_value_metadata(), JOB_KEY)?;
            let job: JobId = serde_json::from_str(text).ok()?;
            Some(job.job_id)
        };
        job_id().map_or(Owner::Foreign, Owner::Job)
    }

    /// Copies row groups without decoding them, except in parts with superseded rows.
    fn merge(
        &self,
        parts: &[MergePart],
        out: &mut (dyn Write + Send),
        job: &JobRecord,
        fingerprint: &str,
    ) -> Result<(), MergeError> {
        let failed = |error| MergeError::Out(io_error(error));
        let mut footer = vec![pair(JOB_KEY, to_json(job))];
        let Some(first) = parts.first() else {
            footer.push(pair(FINGERPRINT_KEY, fingerprint.to_owned()));
            let properties = properties().set_key_value_metadata(Some(footer));
            let schema = Arc::new(schema(job, None));
            let writer = ArrowWriter::try_new(out, schema, Some(properties.build()));
            writer.and_then(ArrowWriter::close).map_err(failed)?;
            return Ok(());
        };
        let open = |part: &MergePart| {
            let damaged = |error: &dyn std::fmt::Display| MergeError::part(part, error);
            let file = File::open(&part.path).map_err(|error| damaged(&error))?;
            let metadata = metadata_of(&file).map_err(|error| damaged(&error))?;
            Ok::<_, MergeError>((file, metadata))
        };
        let (_, mut model) = open(first)?;
        if job.embedding {
            // Failed rows alone do not tell how many values an embedding has.
            for part in parts {
                let (_, metadata) = open(part)?;
                if has_width(&metadata).map_err(|error| MergeError::part(part, error))? {
                    model = metadata;
                    break;
                }
            }
        }
        // Readers take the Arrow types from this pair.
        let pairs = model.file_metadata().key_value_metadata();
        // A retry changes no index and no uri of the file that it is merged into.
        let fingerprint = value(pairs, FINGERPRINT_KEY).unwrap_or(fingerprint);
        footer.push(pair(FINGERPRINT_KEY, fingerprint.to_owned()));
        let arrow = pairs.into_iter().flatten();
        footer.extend(
            arrow
                .filter(|pair| pair.key == ARROW_SCHEMA_META_KEY)
                .cloned(),
        );
        let properties = properties().set_key_value_metadata(Some(footer)).build();
        let schema = model.file_metadata().schema_descr().root_schema_ptr();
        let mut writer =
            SerializedFileWriter::new(out, schema, Arc::new(properties)).map_err(failed)?;
        for part in parts {
            let (file, metadata) = open(part)?;
            if part.superseded.is_empty() {
                copy_row_groups(&mut writer, &file, &metadata).map_err(failed)?;
                continue;
            }
            let damaged = |error| MergeError::part(part, error);
            let rest = without(file, &part.superseded).map_err(damaged)?;
            let metadata = metadata_of(&rest).map_err(damaged)?;
            copy_row_groups(&mut writer, &rest, &metadata).map_err(failed)?;
        }
        writer.close().map_err(failed)?;
        Ok(())
    }
}

/// The record from the end of a part.
fn footer(job: &JobRecord, record: &PartRecord) -> Vec<KeyValue> {
    vec![
        pair(JOB_KEY, to_json(job)),
        pair(RANGES_KEY, to_json(&record.runs)),
        pair(FAILURES_KEY, to_json(&record.failures)),
    ]
}

/// Whether the columns fix the length of an embedding.
fn has_width(metadata: &ParquetMetaData) -> Result<bool, ParquetError> {
    let footer = metadata.file_metadata();
    let schema = parquet_to_arrow_schema(footer.schema_descr(), footer.key_value_metadata())?;
    let field = schema.field_with_name(EMBEDDING);
    Ok(field.is_ok_and(|field| matches!(field.data_type(), DataType::FixedSizeList(_, _))))
}

/// How many of the rows together take this many bytes; at least one.
fn fitting(rows: &[Row], limit: usize) -> usize {
    let mut bytes = 0_usize;
    let fits = |row: &&Row| {
        bytes = bytes.saturating_add(row.approx_bytes());
        bytes <= limit
    };
    rows.iter().take_while(fits).count().max(1)
}

/// The rows of a file without these indices, as a file.
fn without(file: File, superseded: &RoaringTreemap) -> Result<Bytes, ParquetError> {
    let input = || {
        file.try_clone()
            .map_err(|error| ParquetError::External(error.into()))
    };
    let builder = ParquetRecordBatchReaderBuilder::try_new(input()?)?;
    let mut selectors = Vec::new();
    for batch in projected(builder, |name| name == "index")? {
        let batch = batch?;
        let indices = batch.column(0).as_primitive::<Int64Type>();
        selectors.extend(indices.values().iter().map(|index| {
            let is_superseded = u64::try_from(*index).is_ok_and(|index| superseded.contains(index));
            match is_superseded {
                true => RowSelector::skip(1),
                false => RowSelector::select(1),
            }
        }));
    }
    let builder = ParquetRecordBatchReaderBuilder::try_new(input()?)?;
    let (schema, mut rest) = (Arc::clone(builder.schema()), Vec::new());
    let reader = builder
        .with_row_selection(RowSelection::from(selectors))
        .build()?;
    let mut writer = ArrowWriter::try_new(&mut rest, schema, Some(properties().build()))?;
    for batch in reader {
        writer.write(&batch?)?;
    }
    writer.close()?;
    Ok(rest.into())
}

fn metadata_of(input: &impl ChunkReader) -> Result<ParquetMetaData, ParquetError> {
    ParquetMetaDataReader::new().parse_and_finish(input)
}

fn copy_row_groups(
    writer: &mut SerializedFileWriter<impl Write + Send>,
    input: &impl ChunkReader,
    metadata: &ParquetMetaData,
) -> Result<(), ParquetError> {
    for group in metadata.row_groups() {
        let mut copy = writer.next_row_group()?;
        for column in group.columns() {
            copy.append_column(input, closed(column, group.num_rows()))?;
        }
        copy.close()?;
    }
    Ok(())
}

/// A column of this many rows that is already written.
fn closed(column: &ColumnChunkMetaData, rows: i64) -> ColumnCloseResult {
    ColumnCloseResult {
        bytes_written: u64::try_from(column.compressed_size()).unwrap_or_default(),
        rows_written: u64::try_from(rows).unwrap_or_default(),
        metadata: column.clone(),
        bloom_filter: None,
        column_index: None,
        offset_index: None,
    }
}

#[derive(serde::Deserialize)]
struct JobId {
    job_id: String,
}

fn value<'a>(pairs: Option<&'a Vec<KeyValue>>, key: &str) -> Option<&'a str> {
    pairs?.iter().find(|pair| pair.key == key)?.value.as_deref()
}

fn pair(key: &str, value: String) -> KeyValue {
    KeyValue::new(key.to_owned(), value)
}

fn properties() -> WriterPropertiesBuilder {
    // Values of embeddings never repeat: looking for repetitions costs readers more time than it
    // saves.
    let embedding = || ColumnPath::new([EMBEDDING, "list", ELEMENT].map(str::to_owned).to_vec());
    // Scores hardly ever repeat either: their dictionary would be as long as the column, and be
    // abandoned after much work.
    let score = || ColumnPath::new(vec!["score".to_owned()]);
    let top_score = || {
        ColumnPath::new(
            ["top", "list", ELEMENT, "score"]
                .map(str::to_owned)
                .to_vec(),
        )
    };
    WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_column_dictionary_enabled(score(), false)
        .set_column_dictionary_enabled(top_score(), false)
        .set_column_compression(embedding(), Compression::UNCOMPRESSED)
        .set_column_dictionary_enabled(embedding(), false)
        .set_column_statistics_enabled(embedding(), EnabledStatistics::None)
}

/// The cause, whose kind says whether the disk is full.
fn io_error(error: ParquetError) -> io::Error {
    match error {
        ParquetError::External(inner) => match inner.downcast::<io::Error>() {
            Ok(error) => *error,
            Err(other) => io::Error::other(other),
        },
        other => io::Error::other(other),
    }
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("records hold text, numbers and lists of them")
}
