//! Reads complete rows of any format back as they were written, with their embeddings.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use trommel_storage::StorageError;
use trommel_types::{
    Classification, Column, ColumnKind, Content, ErrorKind, Failure, ImageRef, ImageSize, Lane,
    Outcome, Scores,
};

use crate::JobRecord;
use crate::format::{Input, Wanted};
use crate::format_name::Format;
use crate::read_back::{
    NO_ROW, fields, microseconds, no_result, over_parts, scalar, stored, top_labels,
};
use crate::row::{COLUMNS, is_vector};
use crate::takeover::JOB;

/// Rows used to infer the types of pass-through columns if nothing else specifies them.
const LOOKED_AT: usize = 256;

/// The rows of a result as they were written: pass-through columns with their types, and embeddings
/// if requested.
pub struct StoredRows {
    /// The pass-through columns that every row has a value for, in order.
    pub columns: Vec<Column>,
    /// Whether CSV text is escaped against spreadsheets.
    pub escape_formulas: bool,
    /// The options that affected the rows, as [`JobRecord::options`]; `None` if the results have no
    /// record of their job.
    pub options: Option<BTreeMap<String, String>>,
    rows: Box<dyn Iterator<Item = Result<Classification, StorageError>>>,
}

impl Iterator for StoredRows {
    type Item = Result<Classification, StorageError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.rows.next()
    }
}

/// Reads the rows of a result file, or of a folder of parts, like [`read_rows`](crate::read_rows),
/// in bounded memory.
///
/// # Errors
/// At once if there is no such result; in the iterator if a file is malformed.
pub fn read_stored(path: &Path, embeddings: bool) -> Result<StoredRows, StorageError> {
    let record = record(path)?;
    let names: Vec<(String, ColumnKind)> = match &record {
        Some(record) => {
            let kinds = record.columns.iter().map(|column| column.kind);
            record.column_names().into_iter().zip(kinds).collect()
        }
        None => guessed(path)?,
    };
    let columns = match &record {
        Some(record) => record.columns.clone(),
        None => {
            let columns = names.iter().cloned();
            columns.map(|(name, kind)| Column { name, kind }).collect()
        }
    };
    let escapes = record.as_ref().is_some_and(|record| record.escape_formulas);
    let reader = Arc::new(Reader {
        columns: names,
        escapes,
        wanted: match embeddings {
            true => Wanted::Embedded,
            false => Wanted::All,
        },
    });
    let rows = over_parts(
        path,
        move |path, format| Reader::read(&reader, path, format),
        |row: &Classification| row.image.index,
    )?;
    Ok(StoredRows {
        columns,
        escape_formulas: escapes,
        options: record.map(|record| record.options),
        rows,
    })
}

/// The job record in the results, if there is one.
fn record(path: &Path) -> Result<Option<JobRecord>, StorageError> {
    if path.is_dir() {
        return stored(path, JOB);
    }
    let Some(format) = Format::of_path(path) else {
        return Ok(None); // reading says so
    };
    let file = File::open(path).map_err(|error| StorageError::read(path.display(), error))?;
    Ok(format.encoding().job(file))
}

/// The pass-through columns of rows without a record, inferred from the first rows.
fn guessed(path: &Path) -> Result<Vec<(String, ColumnKind)>, StorageError> {
    let read = |path: &Path, format| fields(path, format, Wanted::All);
    let fields = over_parts(path, read, |fields: &Map<String, Value>| {
        let index = fields.get("index").and_then(Value::as_u64);
        index.unwrap_or_default()
    })?;
    let mut columns: Vec<(String, Option<ColumnKind>)> = Vec::new();
    for fields in fields.take(LOOKED_AT) {
        for (name, value) in fields? {
            // The table's own column for retries.
            if COLUMNS.contains(&&*name) || is_vector(&name) || name == "generation" {
                continue;
            }
            let kind = match &value {
                Value::Null => None,
                Value::Bool(_) => Some(ColumnKind::Bool),
                Value::Number(number) if number.is_i64() => Some(ColumnKind::Int),
                Value::Number(_) => Some(ColumnKind::Float),
                _ => Some(ColumnKind::String),
            };
            match columns.iter_mut().find(|(known, _)| *known == name) {
                None => columns.push((name, kind)),
                Some((_, known)) if known.is_none() => *known = kind,
                // An integer among floats is a float.
                Some((_, known @ Some(ColumnKind::Int))) if kind == Some(ColumnKind::Float) => {
                    *known = kind;
                }
                Some(_) => {}
            }
        }
    }
    let columns = columns.into_iter();
    Ok(columns
        .map(|(name, kind)| (name, kind.unwrap_or(ColumnKind::String)))
        .collect())
}

/// How to read the rows of one result.
struct Reader {
    /// Name in rows and kind of each pass-through column.
    columns: Vec<(String, ColumnKind)>,
    escapes: bool,
    wanted: Wanted,
}

type Rows = Box<dyn Iterator<Item = Result<Classification, StorageError>>>;

impl Reader {
    fn read(self: &Arc<Self>, path: &Path, format: Format) -> Result<Rows, StorageError> {
        let file = File::open(path).map_err(|error| StorageError::read(path.display(), error))?;
        let rows = format
            .encoding()
            .embedded_rows(Input::File(file), self.wanted);
        let path = path.to_owned();
        let rows = rows.map_err(|reason| no_result(&path, reason))?;
        let reader = Arc::clone(self);
        Ok(Box::new(rows.map(move |row| {
            let row = row.and_then(|(fields, embedding)| {
                let row = reader.row(fields, embedding, format);
                row.ok_or_else(|| NO_ROW.to_owned())
            });
            row.map_err(|reason| no_result(&path, reason))
        })))
    }

    fn row(
        &self,
        mut fields: Map<String, Value>,
        embedding: Option<Vec<f32>>,
        format: Format,
    ) -> Option<Classification> {
        let unescaped = |text: String| match self.escapes {
            true => format.encoding().unescaped(&text).to_owned(),
            false => text,
        };
        let columns = self.columns.iter();
        let columns = columns
            .map(|(name, kind)| scalar(fields.remove(name), *kind, unescaped))
            .collect();
        let text = |name: &str| {
            let text = fields.get(name).and_then(Value::as_str);
            text.map(|text| unescaped(text.to_owned()))
        };
        // Text formats store numbers as text.
        let number = |name: &str| match fields.get(name)? {
            Value::Number(number) => number.as_u64(),
            Value::String(text) => text.parse().ok(),
            _ => None,
        };
        let side = |name: &str| u32::try_from(number(name)?).ok();
        let outcome = match text("status")?.as_str() {
            "ok" => {
                let top = match fields.get("top") {
                    None | Some(Value::Null) => Vec::new(),
                    Some(Value::Array(top)) => top_labels(top.clone())?,
                    Some(_) => return None,
                };
                Outcome::Ok(Scores {
                    top,
                    logits: None,
                    embedding,
                })
            }
            _ => Outcome::Failed(Failure {
                kind: {
                    let kind = text("error_kind")?;
                    let known = |known: &&ErrorKind| known.as_str() == kind;
                    *ErrorKind::ALL.iter().find(known)?
                },
                error: text("error").unwrap_or_default(),
            }),
        };
        Some(Classification {
            image: ImageRef {
                job: text("job_id").unwrap_or_default().into(),
                index: number("index")?,
                lane: Lane::Normal,
                uri: text("uri")?,
                content: Content::Whole,
                etag: text("etag"),
                size: None,
                columns,
            },
            model: text("model").unwrap_or_default().into(),
            model_version: text("model_version").unwrap_or_default().into(),
            bytes: number("bytes"),
            original: side("width")
                .zip(side("height"))
                .map(|(width, height)| ImageSize { width, height }),
            outcome,
            attempts: side("attempts").unwrap_or(1),
            finished_at: fields
                .get("finished_at")
                .and_then(microseconds)
                .unwrap_or_default(),
        })
    }
}

/// The value of an embedding column in text formats.
pub(crate) fn vector(value: Option<Value>) -> Result<Option<Vec<f32>>, String> {
    let parsed = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(&text),
        Some(value) => serde_json::from_value(value),
    };
    parsed
        .map(Some)
        .map_err(|error| format!("an embedding is not a list of numbers: {error}"))
}
