//! Reads results of any format back.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use roaring::RoaringTreemap;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::{ColumnKind, Scalar, TopLabel};

use crate::format::{Input, Wanted};
use crate::generations::FailedRow;
use crate::part::PartName;
use crate::row::{COLUMNS, is_vector};
use crate::takeover::{JOB, SUCCESS, SUMMARY, retry_of};
use crate::{FailedImage, Format, JobRecord, Retry, Summary};

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
    /// Why there is no label: the kind.
    pub error_kind: Option<String>,
    /// The message.
    pub error: Option<String>,
    /// The best class.
    pub label: Option<String>,
    /// Its score; NaN also if JSON could not represent it.
    pub score: Option<f32>,
    /// When the row was finished, in microseconds since the Unix epoch, UTC.
    pub finished_at: Option<i64>,
    /// The best classes, highest score first.
    pub top: Vec<TopLabel>,
    /// Pass-through columns as text, without nulls.
    pub columns: BTreeMap<String, String>,
}

/// Rows of one kind in sequence.
pub(crate) type Items<T> = Box<dyn Iterator<Item = Result<T, StorageError>>>;
type Rows = Items<ResultRow>;

/// Reads the rows of a result file, or of a folder of parts in order of their numbers. Rows are
/// sorted by index within a part, not across parts. Of several rows with the same index, the one of
/// the latest finished retry is read.
///
/// # Errors
/// At once if there is no such result; in the iterator if a file is malformed.
pub fn read_rows(path: &Path) -> Result<Rows, StorageError> {
    over_parts(path, read_file, |row: &ResultRow| row.index)
}

/// A file of a result, without rows superseded by a later retry.
pub(crate) struct StoredPart {
    pub(crate) path: PathBuf,
    pub(crate) format: Format,
    pub(crate) superseded: Arc<RoaringTreemap>,
}

/// The rows of a result, with `read` for each of its files; of several rows with the same index,
/// that of the latest retry.
pub(crate) fn over_parts<T: 'static>(
    path: &Path,
    read: impl Fn(&Path, Format) -> Result<Items<T>, StorageError> + Clone + 'static,
    index: fn(&T) -> u64,
) -> Result<Items<T>, StorageError> {
    if !path.is_dir() {
        return read(path, format_of(path)?);
    }
    let parts = stored_parts(path)?.into_iter();
    Ok(Box::new(parts.flat_map(move |part| {
        let rows = read(&part.path, part.format);
        let rows = rows.unwrap_or_else(|error| Box::new(std::iter::once(Err(error))));
        rows.filter(move |row| {
            row.as_ref()
                .map_or(true, |row| !part.superseded.contains(index(row)))
        })
    })))
}

fn format_of(file: &Path) -> Result<Format, StorageError> {
    Format::of_path(file).ok_or_else(|| {
        StorageError::new(
            StorageErrorKind::InvalidSource,
            format!(
                "{} is not a file of results: expected .parquet, .jsonl (.ndjson), .csv or a folder of parts",
                file.display()
            ),
        )
    })
}

/// The valid files of a result, in order of their numbers; those of retries come after the job's.
///
/// # Errors
/// If there is no such result, or a retry cannot be read.
pub(crate) fn stored_parts(path: &Path) -> Result<Vec<StoredPart>, StorageError> {
    if !path.is_dir() {
        return Ok(vec![StoredPart {
            path: path.to_owned(),
            format: format_of(path)?,
            superseded: Arc::default(),
        }]);
    }
    let first = parts_of(path)?;
    // A finished job may have had no images.
    if first.is_empty() && !path.join(SUCCESS).exists() {
        return Err(StorageError::new(
            StorageErrorKind::NotFound,
            format!(
                "{} has no results in it; give the file or folder that trommel classify wrote with --output",
                path.display()
            ),
        ));
    }
    let mut generations = vec![first];
    let job = stored::<Job>(path, JOB)?;
    for folder in retries(path)? {
        if is_finished(&folder, job.as_ref())? {
            generations.push(parts_of(&folder)?);
        }
    }
    let mut later = RoaringTreemap::new();
    let mut all: Vec<Vec<StoredPart>> = Vec::new();
    while let Some(parts) = generations.pop() {
        let superseded = Arc::new(later.clone());
        if !generations.is_empty() {
            for (path, format) in &parts {
                later.extend(indices(path, *format)?);
            }
        }
        let parts = parts.into_iter().map(|(path, format)| StoredPart {
            path,
            format,
            superseded: Arc::clone(&superseded),
        });
        all.push(parts.collect());
    }
    Ok(all.into_iter().rev().flatten().collect())
}

/// The folders of a result's retries, the first one first.
pub(crate) fn retries(folder: &Path) -> Result<Vec<PathBuf>, StorageError> {
    let names = names(folder)?.into_iter();
    let retries = names.filter_map(|name| Some((retry_of(&name)?, folder.join(name))));
    let retries: BTreeMap<u32, PathBuf> = retries.collect();
    Ok(retries.into_values().collect())
}

/// The fields of a record that identify the run whose parts count.
#[derive(Deserialize)]
struct Job {
    run: String,
    retry: Option<Retry>,
}

/// Whether a folder has a finished retry of this job.
fn is_finished(folder: &Path, job: Option<&Job>) -> Result<bool, StorageError> {
    if !folder.join(SUCCESS).exists() {
        return Ok(false);
    }
    let retry = stored::<Job>(folder, JOB)?;
    let summary = stored::<Summary>(folder, SUMMARY)?;
    let (Some(retry), Some(summary)) = (retry, summary) else {
        return Ok(false);
    };
    let is_of = |retry: &Retry| job.is_none_or(|job| job.run == retry.of_run);
    Ok(summary.run == retry.run && retry.retry.as_ref().is_some_and(is_of))
}

/// Indices of the rows of a part.
pub(crate) fn indices(path: &Path, format: Format) -> Result<RoaringTreemap, StorageError> {
    let file = File::open(path).map_err(|error| StorageError::read(path.display(), error))?;
    let indices = format.encoding().indices(Input::File(file));
    let mut all = RoaringTreemap::new();
    for some in indices.map_err(|reason| no_result(path, reason))? {
        all.extend(some.map_err(|reason| no_result(path, reason))?);
    }
    Ok(all)
}

/// The valid parts, in order of their numbers.
fn parts_of(folder: &Path) -> Result<Vec<(PathBuf, Format)>, StorageError> {
    let run = stored::<Job>(folder, JOB)?.map(|job| job.run);
    // The summary of another run was left by a sink that stopped before the output was taken over.
    let summary = stored::<Summary>(folder, SUMMARY)?
        .filter(|summary| run.as_ref().is_none_or(|run| summary.run == *run));
    let counts = |text: &str, name: &PartName| match (&summary, &run) {
        (Some(summary), _) => summary.parts.iter().any(|part| part.name == text),
        (None, Some(run)) => name.run == *run,
        (None, None) => true,
    };
    let names = names(folder)?.into_iter();
    let mut parts: Vec<(PartName, String)> = names
        .filter_map(|text| Some((PartName::parse(&text)?, text)))
        .filter(|(name, text)| counts(text, name))
        .collect();
    parts.sort_by_key(|(name, _)| name.number);
    let parts = parts.into_iter();
    Ok(parts
        .map(|(name, text)| (folder.join(text), name.format))
        .collect())
}

fn names(folder: &Path) -> Result<Vec<String>, StorageError> {
    let failed = |error| StorageError::read(folder.display(), error);
    let entries = folder.read_dir().map_err(failed)?;
    entries
        .map(|entry| {
            let name = entry.map_err(failed)?.file_name();
            Ok(name.to_string_lossy().into_owned())
        })
        .collect()
}

/// A record in a folder of parts, if present.
pub(crate) fn stored<T: DeserializeOwned>(
    folder: &Path,
    name: &str,
) -> Result<Option<T>, StorageError> {
    let path = folder.join(name);
    match std::fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| StorageError::corrupt(&path, error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(StorageError::read(path.display(), error)),
    }
}

/// The fields that identify an image in its row.
pub(crate) struct Image {
    pub(crate) index: u64,
    pub(crate) uri: String,
    pub(crate) etag: Option<String>,
}

/// Reads the images of a part's rows.
pub(crate) fn images(
    input: Input,
    format: Format,
    job: &JobRecord,
) -> Result<impl Iterator<Item = Result<Image, String>>, String> {
    let text = unescape(format, job);
    let rows = format.encoding().rows(input, Wanted::Identity)?;
    Ok(rows.map(move |fields| {
        let row = row(fields?).ok_or(NO_ROW)?;
        Ok(Image {
            index: row.index,
            uri: text(row.uri),
            etag: row.etag.map(text),
        })
    }))
}

/// Undoes escaping.
fn unescape(format: Format, job: &JobRecord) -> impl Fn(String) -> String + Copy + use<> {
    let (encoding, escapes) = (format.encoding(), job.escape_formulas);
    move |text| match escapes {
        true => encoding.unescaped(&text).to_owned(),
        false => text,
    }
}

/// Reads the failed rows of a part, or of a single file.
pub(crate) fn failed(
    input: Input,
    format: Format,
    job: &JobRecord,
) -> Result<impl Iterator<Item = Result<FailedRow, String>>, String> {
    let encoding = format.encoding();
    let kinds = job.columns.iter().map(|column| column.kind);
    let columns: Vec<_> = job.column_names().into_iter().zip(kinds).collect();
    let text = unescape(format, job);
    let rows = encoding.rows(input, Wanted::Failure)?;
    let rows = rows.map(move |fields| {
        let mut fields = fields?;
        let columns = columns.iter();
        let columns = columns.map(|(name, kind)| scalar(fields.remove(name), *kind, text));
        let columns = columns.collect();
        let row = row(fields).ok_or(NO_ROW)?;
        let is_failed = row.status == "failed";
        Ok(is_failed.then(|| FailedRow {
            image: FailedImage {
                index: row.index,
                uri: text(row.uri),
                etag: row.etag.map(&text),
                columns,
            },
            kind: row.error_kind.unwrap_or_default(),
            error: row.error.map(&text).unwrap_or_default(),
        }))
    });
    Ok(rows.filter_map(Result::transpose))
}

/// The value of a pass-through column; text formats store all of them as text.
pub(crate) fn scalar(
    value: Option<Value>,
    kind: ColumnKind,
    text: impl Fn(String) -> String,
) -> Scalar {
    fn parsed<T: std::str::FromStr>(text: &str, into: fn(T) -> Scalar) -> Scalar {
        text.parse().map_or(Scalar::Null, into)
    }
    match (kind, value) {
        (ColumnKind::String, Some(Value::String(value))) => Scalar::String(text(value)),
        (ColumnKind::Int, Some(Value::String(value))) => parsed(&value, Scalar::Int),
        (ColumnKind::Float, Some(Value::String(value))) => parsed(&value, Scalar::Float),
        (ColumnKind::Bool, Some(Value::String(value))) => parsed(&value, Scalar::Bool),
        (ColumnKind::Int, Some(Value::Number(value))) => {
            value.as_i64().map_or(Scalar::Null, Scalar::Int)
        }
        (ColumnKind::Float, Some(Value::Number(value))) => {
            value.as_f64().map_or(Scalar::Null, Scalar::Float)
        }
        (ColumnKind::Bool, Some(Value::Bool(value))) => Scalar::Bool(value),
        _ => Scalar::Null,
    }
}

/// The rows of a file.
type Fields = Box<dyn Iterator<Item = Result<Map<String, Value>, StorageError>>>;

/// Reads the rows of one file by the names of their columns.
pub(crate) fn fields(path: &Path, format: Format, wanted: Wanted) -> Result<Fields, StorageError> {
    let file = File::open(path).map_err(|error| StorageError::read(path.display(), error))?;
    let rows = format.encoding().rows(Input::File(file), wanted);
    let path = path.to_owned();
    let rows = rows.map_err(|reason| no_result(&path, reason))?;
    Ok(Box::new(rows.map(move |fields| {
        fields.map_err(|reason| no_result(&path, reason))
    })))
}

/// Reads the rows of one file.
fn read_file(path: &Path, format: Format) -> Result<Rows, StorageError> {
    let path = path.to_owned();
    let rows = fields(&path, format, Wanted::All)?;
    Ok(Box::new(rows.map(move |fields| {
        row(fields?).ok_or_else(|| no_result(&path, NO_ROW))
    })))
}

pub(crate) const NO_ROW: &str = "a row lacks index, uri or status, or has another type there";

/// The file may be foreign, so the message does not suggest removing it.
pub(crate) fn no_result(path: &Path, reason: impl Display) -> StorageError {
    StorageError::new(
        StorageErrorKind::Corrupt,
        format!(
            "{} cannot be read as rows of trommel's: {reason}",
            path.display()
        ),
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

/// A time, as a number or as text.
pub(crate) fn microseconds(value: &Value) -> Option<i64> {
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

pub(crate) fn top_labels(top: Vec<Value>) -> Option<Vec<TopLabel>> {
    let label = |top: &Value| {
        Some(TopLabel {
            label: top.get("label")?.as_str()?.into(),
            class: u32::try_from(top.get("class")?.as_u64()?).ok()?,
            score: score(top.get("score")),
        })
    };
    top.iter().map(label).collect()
}
