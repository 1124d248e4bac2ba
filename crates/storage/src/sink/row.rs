use std::borrow::Cow;
use std::io::{self, Write};

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use trommel_types::{Classification, Column, ColumnKind, Outcome, Scalar, Scores, TopLabel};

use crate::StorageError;
use crate::sink::Format;

/// One job as its rows and its folder name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The job's id, the same over all its runs.
    pub job_id: String,
    /// What is classified, in words that a resumed job must repeat.
    pub source: String,
    /// The model's name.
    pub model: String,
    /// The first digits of the model's content hash.
    pub model_version: String,
    /// Whatever else changes rows, such as `top-k=5`.
    pub options: String,
    /// Encoding of the parts; [`PartSink::open`](crate::PartSink::open) takes it from the
    /// destination.
    pub format: Format,
    /// The source's pass-through columns.
    pub columns: Vec<Column>,
    /// Whether rows hold the model's raw output.
    pub logits: bool,
    /// Whether rows hold the images' embeddings.
    #[serde(default)]
    pub embedding: bool,
    /// When the job was created, in microseconds since the Unix epoch, UTC.
    pub created_at: i64,
}

/// The columns of every row, before the pass-through columns and the vectors.
pub(super) const COLUMNS: [&str; 17] = [
    "job_id",
    "index",
    "uri",
    "etag",
    "bytes",
    "width",
    "height",
    "status",
    "error_kind",
    "error",
    "label",
    "score",
    "top",
    "model",
    "model_version",
    "attempts",
    "finished_at",
];
/// A column of vectors.
pub(super) struct Vector {
    pub(super) name: &'static str,
    is_in: fn(&JobRecord) -> bool,
    pub(super) of: fn(&Scores) -> Option<&[f32]>,
}

/// The columns after all others, each if asked for.
pub(super) const VECTORS: [Vector; 2] = [
    Vector {
        name: "logits",
        is_in: |job| job.logits,
        of: |scores| scores.logits.as_deref(),
    },
    Vector {
        name: "embedding",
        is_in: |job| job.embedding,
        of: |scores| scores.embedding.as_deref(),
    },
];

/// Whether this is the name of a column of vectors.
pub(super) fn is_vector(name: &str) -> bool {
    VECTORS.iter().any(|vector| vector.name == name)
}

impl JobRecord {
    /// Names of the pass-through columns in rows: as the source has them, with `source_` before a
    /// name that is one of Trommel's, or that another column has got this way.
    pub(super) fn column_names(&self) -> Vec<String> {
        let is_own = |name: &str| is_vector(name) || COLUMNS.contains(&name);
        let mut names: Vec<String> = Vec::with_capacity(self.columns.len());
        for (position, column) in self.columns.iter().enumerate() {
            let mut name = column.name.clone();
            let is_later = |name: &str| {
                self.columns[position + 1..]
                    .iter()
                    .any(|later| later.name == name)
            };
            while is_own(&name) || names.contains(&name) || (name != column.name && is_later(&name))
            {
                name.insert_str(0, "source_");
            }
            names.push(name);
        }
        names
    }

    /// The columns of vectors in rows of this job.
    pub(super) fn vectors(&self) -> impl Iterator<Item = &'static Vector> {
        VECTORS.iter().filter(|vector| (vector.is_in)(self))
    }

    /// Names of all columns, in order.
    pub(super) fn all_names(&self) -> Vec<String> {
        COLUMNS
            .map(str::to_owned)
            .into_iter()
            .chain(self.column_names())
            .chain(self.vectors().map(|vector| vector.name.to_owned()))
            .collect()
    }
}

/// A value as a pass-through column of this kind holds it, the same in every format: text holds
/// everything, a float column integers too, and what does not fit is null.
pub(super) fn typed(kind: ColumnKind, value: &Scalar) -> Cow<'_, Scalar> {
    let text = |text: String| Cow::Owned(Scalar::String(text));
    match (kind, value) {
        (ColumnKind::String, Scalar::Bool(value)) => text(value.to_string()),
        (ColumnKind::String, Scalar::Int(value)) => text(value.to_string()),
        (ColumnKind::String, Scalar::Float(value)) => text(value.to_string()),
        (ColumnKind::Float, Scalar::Int(value)) => Cow::Owned(Scalar::Float(*value as f64)),
        (ColumnKind::String, Scalar::String(_))
        | (ColumnKind::Int, Scalar::Int(_))
        | (ColumnKind::Float, Scalar::Float(_))
        | (ColumnKind::Bool, Scalar::Bool(_)) => Cow::Borrowed(value),
        _ => Cow::Owned(Scalar::Null),
    }
}

/// A value of a row in the text formats.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Value<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Score(f32),
    Text(Cow<'a, str>),
    Top(&'a [TopLabel]),
    Vector(&'a [f32]),
}

/// A row in the text formats.
pub(super) struct TextRow<'a> {
    pub(super) job: &'a JobRecord,
    /// [`JobRecord::all_names`].
    pub(super) names: &'a [String],
    pub(super) row: &'a Classification,
}

impl<'a> TextRow<'a> {
    /// The values in the order of [`JobRecord::all_names`].
    pub(super) fn values(&self) -> Vec<Value<'a>> {
        let Classification {
            image,
            original,
            outcome,
            ..
        } = self.row;
        let text = |text: &'a str| Value::Text(Cow::Borrowed(text));
        let opt_int = |int: Option<u64>| int.map_or(Value::Null, |int| Value::Int(signed(int)));
        let (ok, failed) = match outcome {
            Outcome::Ok(scores) => (Some(scores), None),
            Outcome::Failed(failure) => (None, Some(failure)),
        };
        let best = ok.and_then(|scores| scores.top.first());
        let mut values = vec![
            text(&self.job.job_id),
            Value::Int(signed(image.index)),
            text(&image.uri),
            image.etag.as_deref().map_or(Value::Null, text),
            opt_int(self.row.bytes),
            opt_int(original.map(|size| size.width.into())),
            opt_int(original.map(|size| size.height.into())),
            text(status(outcome)),
            failed.map_or(Value::Null, |failure| text(failure.kind.as_str())),
            failed.map_or(Value::Null, |failure| text(&failure.error)),
            best.map_or(Value::Null, |best| text(&best.label)),
            best.map_or(Value::Null, |best| Value::Score(best.score)),
            ok.map_or(Value::Null, |scores| Value::Top(&scores.top)),
            text(&self.row.model),
            text(&self.row.model_version),
            Value::Int(self.row.attempts.into()),
            Value::Text(Cow::Owned(timestamp(self.row.finished_at))),
        ];
        for (position, column) in self.job.columns.iter().enumerate() {
            let value = image.columns.get(position).unwrap_or(&Scalar::Null);
            values.push(match typed(column.kind, value) {
                Cow::Borrowed(Scalar::String(value)) => text(value),
                value => match value.into_owned() {
                    Scalar::Null => Value::Null,
                    Scalar::Bool(value) => Value::Bool(value),
                    Scalar::Int(value) => Value::Int(value),
                    Scalar::Float(value) => Value::Float(value),
                    Scalar::String(value) => Value::Text(Cow::Owned(value)),
                },
            });
        }
        for vector in self.job.vectors() {
            let vector = ok.and_then(vector.of);
            values.push(vector.map_or(Value::Null, Value::Vector));
        }
        values
    }
}

impl Serialize for TextRow<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let values = self.values();
        let mut map = serializer.serialize_map(Some(values.len()))?;
        for (name, value) in self.names.iter().zip(values) {
            map.serialize_entry(name, &value)?;
        }
        map.end()
    }
}

/// The word of the column `status`.
pub(super) fn status(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Ok(_) => "ok",
        Outcome::Failed(_) => "failed",
    }
}

/// Rows hold signed integers only; no count of ours reaches 2⁶³.
pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// As [`signed`], for the 32-bit columns.
pub(super) fn signed_32(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// RFC 3339, UTC, microseconds.
fn timestamp(micros: i64) -> String {
    match jiff::Timestamp::from_microsecond(micros) {
        Ok(timestamp) => format!("{timestamp:.6}"),
        // Beyond the year 9999, which RFC 3339 cannot write.
        Err(_) => micros.to_string(),
    }
}

/// Rows as JSON Lines on a stream.
pub struct JsonLines;

impl JsonLines {
    /// Writes one JSON object a line for each row, in the order given, nulls included. Numbers that
    /// JSON does not have (NaN, infinities) are null.
    ///
    /// # Errors
    /// When the stream does not take them.
    pub fn write_rows(
        out: &mut impl Write,
        job: &JobRecord,
        rows: &[Classification],
    ) -> Result<(), StorageError> {
        write_json_lines(out, job, rows).map_err(|error| StorageError::stream("the output", error))
    }
}

/// The encoder of [`JsonLines`], with the plain error.
pub(super) fn write_json_lines(
    out: &mut impl Write,
    job: &JobRecord,
    rows: &[Classification],
) -> io::Result<()> {
    let names = job.all_names();
    // Whole lines at a time, so that a stream without a buffer takes few calls.
    let mut line = Vec::new();
    for row in rows {
        line.clear();
        serde_json::to_writer(
            &mut line,
            &TextRow {
                job,
                names: &names,
                row,
            },
        )?;
        line.push(b'\n');
        out.write_all(&line)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_ours_is_prefixed_until_it_is_free() {
        let column = |name: &str| Column {
            name: name.to_owned(),
            kind: ColumnKind::String,
        };
        let job = JobRecord {
            job_id: String::new(),
            source: String::new(),
            model: String::new(),
            model_version: String::new(),
            options: String::new(),
            format: Format::Csv,
            columns: ["label", "site", "source_label", "logits", "site"]
                .map(column)
                .to_vec(),
            logits: true,
            embedding: true,
            created_at: 0,
        };
        let names = job.column_names();
        assert_eq!(
            names,
            [
                "source_source_label",
                "site",
                "source_label",
                "source_logits",
                "source_site"
            ]
        );
        assert_eq!(job.all_names().len(), 17 + 5 + 2);
    }

    #[test]
    fn a_column_holds_one_type() {
        let typed = |kind, value| typed(kind, &value).into_owned();
        assert_eq!(
            typed(ColumnKind::String, Scalar::Int(7)),
            Scalar::String("7".to_owned())
        );
        assert_eq!(typed(ColumnKind::Float, Scalar::Int(7)), Scalar::Float(7.0));
        assert_eq!(typed(ColumnKind::Int, Scalar::Float(7.5)), Scalar::Null);
        assert_eq!(
            typed(ColumnKind::Bool, Scalar::Bool(true)),
            Scalar::Bool(true)
        );
        assert_eq!(typed(ColumnKind::String, Scalar::Null), Scalar::Null);
    }

    #[test]
    fn times_are_rfc_3339_with_microseconds() {
        assert_eq!(
            timestamp(1_700_000_000_000_001),
            "2023-11-14T22:13:20.000001Z"
        );
        assert_eq!(timestamp(0), "1970-01-01T00:00:00.000000Z");
    }
}
