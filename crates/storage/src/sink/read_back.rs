//! Reads results of any format back.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float32Type, Float64Type, Int32Type, Int64Type, TimestampMicrosecondType,
};
use arrow_array::{Array, RecordBatch};
use arrow_schema::{DataType, TimeUnit};
use jiff::Timestamp;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Value};
use trommel_types::TopLabel;

use crate::sink::finish::Summary;
use crate::sink::folder::{SUCCESS, SUMMARY};
use crate::sink::row::{COLUMNS, is_vector};
use crate::sink::{Format, part};
use crate::{StorageError, StorageErrorKind};

/// One row of a result.
#[derive(Debug, Clone, PartialEq)]
pub struct ResultRow {
    /// Place in the source's listing.
    pub index: u64,
    /// Where the image was.
    pub uri: String,
    /// The store's version of the object.
    pub etag: Option<String>,
    /// `ok` or `failed`.
    pub status: String,
    /// Why there is no label.
    pub error_kind: Option<String>,
    /// The same in words.
    pub error: Option<String>,
    /// The best class.
    pub label: Option<String>,
    /// Its score; NaN also where JSON could not write what it was.
    pub score: Option<f32>,
    /// When the row was finished, in microseconds since the Unix epoch, UTC.
    pub finished_at: Option<i64>,
    /// The best classes, highest score first.
    pub top: Vec<TopLabel>,
    /// Pass-through columns as text, without nulls.
    pub columns: BTreeMap<String, String>,
}

type Rows = Box<dyn Iterator<Item = Result<ResultRow, StorageError>>>;

/// Reads the rows of a result file, or of a folder of parts in the order of their numbers. Rows are
/// sorted by index within a part, not over all parts.
///
/// # Errors
/// When there is no such result, here; when a file turns out to be none, in the iterator.
pub fn read_rows(path: &Path) -> Result<Rows, StorageError> {
    if !path.is_dir() {
        let format = Format::of_path(path).ok_or_else(|| {
            StorageError::new(
                StorageErrorKind::InvalidSource,
                format!(
                    "{} is no result: expected .parquet, .jsonl (.ndjson), .csv or a folder of parts",
                    path.display()
                ),
            )
        })?;
        return read_file(path, format, Wanted::All);
    }
    let counted = counted_parts(path)?;
    let mut parts: Vec<(u64, PathBuf, Format)> = Vec::new();
    for entry in path
        .read_dir()
        .map_err(|error| StorageError::read(path.display(), error))?
    {
        let entry = entry.map_err(|error| StorageError::read(path.display(), error))?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if counted
            .as_ref()
            .is_some_and(|counted| !counted.contains(name))
        {
            continue;
        }
        for format in Format::ALL {
            let number = part::number(name, format).or_else(|| part::claimed_number(name, format));
            parts.extend(number.map(|number| (number, entry.path(), format)));
        }
    }
    // A finished job may have had no image.
    if parts.is_empty() && !path.join(SUCCESS).exists() {
        return Err(StorageError::new(
            StorageErrorKind::NotFound,
            format!("{} holds no parts", path.display()),
        ));
    }
    parts.sort_by_key(|part| part.0);
    Ok(Box::new(parts.into_iter().flat_map(|(_, path, format)| {
        read_file(&path, format, Wanted::All)
            .unwrap_or_else(|error| Box::new(std::iter::once(Err(error))))
    })))
}

/// Names of the parts that count, where a summary says so.
fn counted_parts(folder: &Path) -> Result<Option<HashSet<String>>, StorageError> {
    let path = folder.join(SUMMARY);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(StorageError::read(path.display(), error)),
    };
    let summary: Summary =
        serde_json::from_slice(&text).map_err(|error| StorageError::corrupt(&path, error))?;
    Ok(Some(
        summary.parts.into_iter().map(|part| part.name).collect(),
    ))
}

/// Which columns are read, where the format allows a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// All but vectors, which outweigh everything else and no reader of rows asks for.
    All,
    /// Those that tell an image.
    Identity,
}

impl Wanted {
    fn column(self, name: &str) -> bool {
        match self {
            Self::All => !is_vector(name),
            Self::Identity => ["index", "uri", "etag", "status"].contains(&name),
        }
    }
}

/// Hands uri and etag of each row of a part to `each`.
pub(super) fn for_each_image(
    path: &Path,
    format: Format,
    mut each: impl FnMut(&str, Option<&str>),
) -> Result<(), StorageError> {
    for row in read_file(path, format, Wanted::Identity)? {
        let row = row?;
        each(&row.uri, row.etag.as_deref());
    }
    Ok(())
}

/// Reads the rows of one file.
fn read_file(path: &Path, format: Format, wanted: Wanted) -> Result<Rows, StorageError> {
    let file = File::open(path).map_err(|error| StorageError::read(path.display(), error))?;
    let path = path.to_owned();
    match format {
        Format::Jsonl => Ok(Box::new(BufReader::new(file).lines().map(move |line| {
            let line = line.map_err(|error| StorageError::read(path.display(), error))?;
            let fields = serde_json::from_str(&line).map_err(|error| no_result(&path, error))?;
            row(fields).ok_or_else(|| not_a_row(&path))
        }))),
        Format::Csv => {
            let mut reader = csv::Reader::from_reader(BufReader::new(file));
            let header = reader
                .headers()
                .map_err(|error| no_result(&path, error))?
                .clone();
            Ok(Box::new(reader.into_records().map(move |record| {
                let record = record.map_err(|error| no_result(&path, error))?;
                let fields = header
                    .iter()
                    .zip(&record)
                    .map(|(name, field)| csv_field(name, field));
                row(fields.collect()).ok_or_else(|| not_a_row(&path))
            })))
        }
        Format::Parquet => {
            let failed = |error| no_result(&path, error);
            let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(failed)?;
            let roots = builder.parquet_schema().root_schema().get_fields();
            let wanted: Vec<usize> = (0..roots.len())
                .filter(|root| wanted.column(roots[*root].name()))
                .collect();
            let mask = ProjectionMask::roots(builder.parquet_schema(), wanted);
            let reader = builder
                .with_projection(mask)
                .with_batch_size(1024)
                .build()
                .map_err(failed)?;
            Ok(Box::new(reader.flat_map(move |batch| -> Rows {
                let path = path.clone();
                match batch {
                    Err(error) => Box::new(std::iter::once(Err(no_result(&path, error)))),
                    Ok(batch) => Box::new((0..batch.num_rows()).map(move |number| {
                        row(batch_row(&batch, number)).ok_or_else(|| not_a_row(&path))
                    })),
                }
            })))
        }
    }
}

/// The file may be anyone's, so the message asks nobody to remove it.
fn no_result(path: &Path, reason: impl Display) -> StorageError {
    StorageError::new(
        StorageErrorKind::Corrupt,
        format!(
            "{} cannot be read as rows of trommel's: {reason}",
            path.display()
        ),
    )
}

fn not_a_row(path: &Path) -> StorageError {
    no_result(
        path,
        "a row lacks index, uri or status, or has another type there",
    )
}

/// A row from its fields by name.
fn row(mut fields: Map<String, Value>) -> Option<ResultRow> {
    let text = |fields: &Map<String, Value>, name: &str| {
        fields
            .get(name)
            .and_then(Value::as_str)
            .map(ToOwned::to_owned)
    };
    let top = match fields.remove("top") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(top)) => top_labels(top)?,
        Some(_) => return None,
    };
    Some(ResultRow {
        index: fields.get("index")?.as_u64()?,
        uri: text(&fields, "uri")?,
        etag: text(&fields, "etag"),
        status: text(&fields, "status")?,
        error_kind: text(&fields, "error_kind"),
        error: text(&fields, "error"),
        label: text(&fields, "label"),
        score: fields
            .get("label")
            .and_then(|label| label.as_str().map(|_| score(fields.get("score")))),
        finished_at: fields.get("finished_at").and_then(microseconds),
        top,
        columns: fields
            .into_iter()
            .filter(|(name, value)| {
                !value.is_null() && !COLUMNS.contains(&name.as_str()) && !is_vector(name)
            })
            .map(|(name, value)| match value {
                Value::String(text) => (name, text),
                other => (name, other.to_string()),
            })
            .collect(),
    })
}

/// A time, as a number or in words.
fn microseconds(value: &Value) -> Option<i64> {
    let words = |text: &str| text.parse::<Timestamp>().ok();
    value
        .as_i64()
        .or_else(|| Some(words(value.as_str()?)?.as_microsecond()))
}

/// A row with a label has a score. JSON writes NaN as null.
fn score(value: Option<&Value>) -> f32 {
    value
        .and_then(Value::as_f64)
        .map_or(f32::NAN, |score| score as f32)
}

fn top_labels(top: Vec<Value>) -> Option<Vec<TopLabel>> {
    let label = |top: &Value| {
        Some(TopLabel {
            label: top.get("label")?.as_str()?.into(),
            class: u32::try_from(top.get("class")?.as_u64()?).ok()?,
            score: score(top.get("score")),
        })
    };
    top.iter().map(label).collect()
}

/// A CSV field as the JSON value it was written from; pass-through columns stay text.
fn csv_field(name: &str, field: &str) -> (String, Value) {
    let value = match name {
        _ if field.is_empty() => Value::Null,
        "index" | "score" | "top" => serde_json::from_str(field).unwrap_or(Value::Null),
        _ => Value::String(field.to_owned()),
    };
    (name.to_owned(), value)
}

fn batch_row(batch: &RecordBatch, number: usize) -> Map<String, Value> {
    let schema = batch.schema();
    schema
        .fields()
        .iter()
        .zip(batch.columns())
        .map(|(field, column)| (field.name().clone(), cell(column.as_ref(), number)))
        .collect()
}

/// A cell of the types that rows have; anything else is null.
fn cell(column: &dyn Array, row: usize) -> Value {
    if column.is_null(row) {
        return Value::Null;
    }
    match column.data_type() {
        DataType::Utf8 => column.as_string::<i32>().value(row).into(),
        // As other programs write a result again.
        DataType::LargeUtf8 => column.as_string::<i64>().value(row).into(),
        DataType::Utf8View => column.as_string_view().value(row).into(),
        DataType::Int32 => column.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => column.as_primitive::<Int64Type>().value(row).into(),
        DataType::Float32 => column.as_primitive::<Float32Type>().value(row).into(),
        DataType::Float64 => column.as_primitive::<Float64Type>().value(row).into(),
        DataType::Timestamp(TimeUnit::Microsecond, _) => {
            let times = column.as_primitive::<TimestampMicrosecondType>();
            times.value(row).into()
        }
        DataType::Boolean => column.as_boolean().value(row).into(),
        DataType::Struct(fields) => {
            let columns = column.as_struct().columns();
            let cells = fields.iter().zip(columns);
            cells
                .map(|(field, column)| (field.name().clone(), cell(column.as_ref(), row)))
                .collect()
        }
        DataType::List(_) => cells(column.as_list::<i32>().value(row).as_ref()),
        DataType::LargeList(_) => cells(column.as_list::<i64>().value(row).as_ref()),
        _ => Value::Null,
    }
}

fn cells(items: &dyn Array) -> Value {
    (0..items.len()).map(|item| cell(items, item)).collect()
}
