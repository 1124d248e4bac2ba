//! Parts as Parquet, whose footer says what they commit.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use arrow_array::builder::{
    BooleanBuilder, Float32Builder, Float64Builder, Int32Builder, Int64Builder, ListBuilder,
    StringBuilder, StructBuilder, TimestampMicrosecondBuilder,
};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Fields, Schema, TimeUnit};
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::{KeyValue, ParquetMetaData, ParquetMetaDataReader};
use parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};
use trommel_types::{Classification, ColumnKind, Outcome, Scalar};

use crate::StorageError;
use crate::sink::part::PartRecord;
use crate::sink::row::{JobRecord, Vector, signed, signed_32, status, typed};

/// Footer key of the job, as JSON.
pub(super) const JOB_KEY: &str = "trommel.job";
/// Footer key of the indices that a part commits: a JSON list of [`Runs`](crate::sink::Runs).
pub(super) const RANGES_KEY: &str = "trommel.ranges";
/// Footer key of a part's failures by kind, as JSON.
pub(super) const FAILURES_KEY: &str = "trommel.failures";
/// Footer key, in the single file, of a hash of all indices and uris.
pub(super) const FINGERPRINT_KEY: &str = "trommel.fingerprint";

pub(super) fn write(
    out: &mut (impl Write + Send),
    path: &Path,
    job: &JobRecord,
    rows: &[Classification],
    record: &PartRecord,
) -> Result<(), StorageError> {
    let failed = |error: ParquetError| write_error(path, error);
    let batch = batch(job, rows).map_err(|error| failed(error.into()))?;
    let footer = vec![
        pair(JOB_KEY, to_json(job)),
        pair(RANGES_KEY, to_json(&record.runs)),
        pair(FAILURES_KEY, to_json(&record.failures)),
    ];
    let properties = properties().set_key_value_metadata(Some(footer)).build();
    let mut writer = ArrowWriter::try_new(out, batch.schema(), Some(properties)).map_err(failed)?;
    writer.write(&batch).map_err(failed)?;
    writer.close().map_err(failed)?;
    Ok(())
}

/// What a part commits, from its footer alone.
pub(super) fn read_record(path: &Path, job_id: &str) -> Result<PartRecord, StorageError> {
    let file = File::open(path).map_err(|error| StorageError::read(path.display(), error))?;
    let metadata = ParquetMetaDataReader::new()
        .parse_and_finish(&file)
        .map_err(|error| StorageError::corrupt(path, error))?;
    record_of(&metadata, path, job_id)
}

/// The same from the end of a file of `size` bytes; how many bytes of it are needed when these
/// are too few.
pub(super) fn read_record_from(
    end: Bytes,
    size: u64,
    path: &Path,
    job_id: &str,
) -> Result<Result<PartRecord, u64>, StorageError> {
    let mut reader = ParquetMetaDataReader::new();
    match reader.try_parse_sized(&end, size) {
        Ok(()) => {}
        Err(ParquetError::NeedMoreData(needed)) => return Ok(Err(needed as u64)),
        Err(error) => return Err(StorageError::corrupt(path, error)),
    }
    let metadata = reader
        .finish()
        .map_err(|error| StorageError::corrupt(path, error))?;
    record_of(&metadata, path, job_id).map(Ok)
}

fn record_of(
    metadata: &ParquetMetaData,
    path: &Path,
    job_id: &str,
) -> Result<PartRecord, StorageError> {
    let footer = metadata.file_metadata();
    let value = |key| {
        value(footer.key_value_metadata(), key)
            .ok_or_else(|| StorageError::corrupt(path, format!("its footer has no {key}")))
    };
    let damaged = |error| StorageError::corrupt(path, error);
    let job: JobId = serde_json::from_str(value(JOB_KEY)?).map_err(damaged)?;
    if job.job_id != job_id {
        return Err(StorageError::corrupt(
            path,
            format!("it is of another job, {}", job.job_id),
        ));
    }
    Ok(PartRecord {
        rows: u64::try_from(footer.num_rows()).unwrap_or_default(),
        runs: serde_json::from_str(value(RANGES_KEY)?).map_err(damaged)?,
        failures: serde_json::from_str(value(FAILURES_KEY)?).map_err(damaged)?,
    })
}

/// The id of the job that a file is the result of; `None` for a file of anyone else's.
pub(super) fn job_of(path: &Path) -> Option<String> {
    let metadata = ParquetMetaDataReader::new()
        .parse_and_finish(&File::open(path).ok()?)
        .ok()?;
    let text = value(metadata.file_metadata().key_value_metadata(), JOB_KEY)?;
    serde_json::from_str::<JobId>(text)
        .ok()
        .map(|job| job.job_id)
}

#[derive(serde::Deserialize)]
struct JobId {
    job_id: String,
}

fn value<'a>(pairs: Option<&'a Vec<KeyValue>>, key: &str) -> Option<&'a str> {
    pairs?.iter().find(|pair| pair.key == key)?.value.as_deref()
}

pub(super) fn pair(key: &str, value: String) -> KeyValue {
    KeyValue::new(key.to_owned(), value)
}

pub(super) fn properties() -> WriterPropertiesBuilder {
    WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default()))
}

pub(super) fn write_error(path: &Path, error: ParquetError) -> StorageError {
    let error = match error {
        ParquetError::External(inner) => match inner.downcast::<std::io::Error>() {
            Ok(error) => *error,
            Err(other) => std::io::Error::other(other),
        },
        other => std::io::Error::other(other),
    };
    StorageError::write(path, error)
}

pub(super) fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("records hold text, numbers and lists of them")
}

/// The name that the Parquet specification gives the values of a list.
const ELEMENT: &str = "element";

fn top_fields() -> Fields {
    Fields::from(vec![
        Field::new("label", DataType::Utf8, false),
        Field::new("class", DataType::Int32, false),
        Field::new("score", DataType::Float32, false),
    ])
}

/// The schema of a job's rows.
pub(super) fn schema(job: &JobRecord) -> Schema {
    let text = DataType::Utf8;
    let top = Field::new(ELEMENT, DataType::Struct(top_fields()), false);
    let utc = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    let mut fields = vec![
        Field::new("job_id", text.clone(), false),
        Field::new("index", DataType::Int64, false),
        Field::new("uri", text.clone(), false),
        Field::new("etag", text.clone(), true),
        Field::new("bytes", DataType::Int64, true),
        Field::new("width", DataType::Int32, true),
        Field::new("height", DataType::Int32, true),
        Field::new("status", text.clone(), false),
        Field::new("error_kind", text.clone(), true),
        Field::new("error", text.clone(), true),
        Field::new("label", text.clone(), true),
        Field::new("score", DataType::Float32, true),
        Field::new("top", DataType::List(Arc::new(top)), true),
        Field::new("model", text.clone(), false),
        Field::new("model_version", text.clone(), false),
        Field::new("attempts", DataType::Int32, false),
        Field::new("finished_at", utc, false),
    ];
    for (name, column) in job.column_names().into_iter().zip(&job.columns) {
        let kind = match column.kind {
            ColumnKind::String => DataType::Utf8,
            ColumnKind::Int => DataType::Int64,
            ColumnKind::Float => DataType::Float64,
            ColumnKind::Bool => DataType::Boolean,
        };
        fields.push(Field::new(name, kind, true));
    }
    for vector in job.vectors() {
        let item = Field::new(ELEMENT, DataType::Float32, false);
        let list = DataType::List(Arc::new(item));
        fields.push(Field::new(vector.name, list, true));
    }
    Schema::new(fields)
}

/// The rows as columns.
pub(super) fn batch(
    job: &JobRecord,
    rows: &[Classification],
) -> Result<RecordBatch, arrow_schema::ArrowError> {
    let schema = Arc::new(schema(job));
    let size = |of: fn(&Classification) -> Option<u32>| -> ArrayRef {
        let mut column = Int32Builder::new();
        rows.iter()
            .for_each(|row| column.append_option(of(row).map(signed_32)));
        Arc::new(column.finish())
    };
    let finished_at = {
        let mut column = TimestampMicrosecondBuilder::new().with_timezone("UTC");
        rows.iter()
            .for_each(|row| column.append_value(row.finished_at));
        Arc::new(column.finish())
    };
    let mut columns: Vec<ArrayRef> = vec![
        text(rows, |_| Some(job.job_id.as_str())),
        ints(rows, |row| Some(signed(row.image.index))),
        text(rows, |row| Some(row.image.uri.as_str())),
        text(rows, |row| row.image.etag.as_deref()),
        ints(rows, |row| row.bytes.map(signed)),
        size(|row| row.original.map(|size| size.width)),
        size(|row| row.original.map(|size| size.height)),
        text(rows, |row| Some(status(&row.outcome))),
        text(rows, |row| match &row.outcome {
            Outcome::Ok(_) => None,
            Outcome::Failed(failure) => Some(failure.kind.as_str()),
        }),
        text(rows, |row| match &row.outcome {
            Outcome::Ok(_) => None,
            Outcome::Failed(failure) => Some(failure.error.as_str()),
        }),
        text(rows, |row| best(row).map(|best| &*best.label)),
        scores(rows),
        top(rows),
        text(rows, |row| Some(&*row.model)),
        text(rows, |row| Some(&*row.model_version)),
        size(|row| Some(row.attempts)),
        finished_at,
    ];
    for (position, column) in job.columns.iter().enumerate() {
        columns.push(pass_through(rows, position, column.kind));
    }
    for vector in job.vectors() {
        columns.push(vectors(rows, vector));
    }
    RecordBatch::try_new(schema, columns)
}

fn best(row: &Classification) -> Option<&trommel_types::TopLabel> {
    match &row.outcome {
        Outcome::Ok(scores) => scores.top.first(),
        Outcome::Failed(_) => None,
    }
}

fn text<'a>(
    rows: &'a [Classification],
    of: impl Fn(&'a Classification) -> Option<&'a str>,
) -> ArrayRef {
    let mut column = StringBuilder::new();
    rows.iter().for_each(|row| column.append_option(of(row)));
    Arc::new(column.finish())
}

fn ints(rows: &[Classification], of: impl Fn(&Classification) -> Option<i64>) -> ArrayRef {
    let mut column = Int64Builder::new();
    rows.iter().for_each(|row| column.append_option(of(row)));
    Arc::new(column.finish())
}

fn scores(rows: &[Classification]) -> ArrayRef {
    let mut column = Float32Builder::new();
    rows.iter()
        .for_each(|row| column.append_option(best(row).map(|best| best.score)));
    Arc::new(column.finish())
}

fn top(rows: &[Classification]) -> ArrayRef {
    let labels = StructBuilder::new(
        top_fields(),
        vec![
            Box::new(StringBuilder::new()),
            Box::new(Int32Builder::new()),
            Box::new(Float32Builder::new()),
        ],
    );
    let item = Field::new(ELEMENT, DataType::Struct(top_fields()), false);
    let mut column = ListBuilder::new(labels).with_field(item);
    for row in rows {
        let Outcome::Ok(scores) = &row.outcome else {
            column.append(false);
            continue;
        };
        let labels = column.values();
        for label in &scores.top {
            const TYPED: &str = "the builders were made for these fields";
            labels
                .field_builder::<StringBuilder>(0)
                .expect(TYPED)
                .append_value(&label.label);
            labels
                .field_builder::<Int32Builder>(1)
                .expect(TYPED)
                .append_value(signed_32(label.class));
            labels
                .field_builder::<Float32Builder>(2)
                .expect(TYPED)
                .append_value(label.score);
            labels.append(true);
        }
        column.append(true);
    }
    Arc::new(column.finish())
}

fn vectors(rows: &[Classification], vector: &Vector) -> ArrayRef {
    let item = Field::new(ELEMENT, DataType::Float32, false);
    let mut column = ListBuilder::new(Float32Builder::new()).with_field(item);
    for row in rows {
        let values = match &row.outcome {
            Outcome::Ok(scores) => (vector.of)(scores),
            Outcome::Failed(_) => None,
        };
        column.values().append_slice(values.unwrap_or_default());
        column.append(values.is_some());
    }
    Arc::new(column.finish())
}

fn pass_through(rows: &[Classification], position: usize, kind: ColumnKind) -> ArrayRef {
    let values = rows.iter().map(|row| {
        typed(
            kind,
            row.image.columns.get(position).unwrap_or(&Scalar::Null),
        )
    });
    match kind {
        ColumnKind::String => {
            let mut column = StringBuilder::new();
            values.for_each(|value| match &*value {
                Scalar::String(value) => column.append_value(value),
                _ => column.append_null(),
            });
            Arc::new(column.finish())
        }
        ColumnKind::Int => {
            let mut column = Int64Builder::new();
            values.for_each(|value| match &*value {
                Scalar::Int(value) => column.append_value(*value),
                _ => column.append_null(),
            });
            Arc::new(column.finish())
        }
        ColumnKind::Float => {
            let mut column = Float64Builder::new();
            values.for_each(|value| match &*value {
                Scalar::Float(value) => column.append_value(*value),
                _ => column.append_null(),
            });
            Arc::new(column.finish())
        }
        ColumnKind::Bool => {
            let mut column = BooleanBuilder::new();
            values.for_each(|value| match &*value {
                Scalar::Bool(value) => column.append_value(*value),
                _ => column.append_null(),
            });
            Arc::new(column.finish())
        }
    }
}
