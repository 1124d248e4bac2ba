use std::borrow::Cow;
use std::io::{self, Write};
use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use trommel_storage::StorageError;
use trommel_types::{Classification, ColumnKind, Outcome, Scalar, Scores, TopLabel};

use crate::JobRecord;

/// A row in flight, shared with the message that brought it.
pub(crate) type Row = Arc<Classification>;

/// The columns of every row, before pass-through columns and vectors.
pub(crate) const COLUMNS: [&str; 17] = [
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
pub(crate) struct Vector {
    pub(crate) name: &'static str,
    is_in: fn(&JobRecord) -> bool,
    pub(crate) of: fn(&Scores) -> Option<&[f32]>,
}

impl Vector {
    /// The row's value in the column.
    pub(crate) fn values<'a>(&self, row: &'a Classification) -> Option<&'a [f32]> {
        match &row.outcome {
            Outcome::Ok(scores) => (self.of)(scores),
            Outcome::Failed(_) => None,
        }
    }
}

/// The column of embeddings.
pub(crate) const EMBEDDING: &str = "embedding";

/// The columns after all others, each on request.
pub(crate) const VECTORS: [Vector; 2] = [
    Vector {
        name: "logits",
        is_in: |job| job.logits,
        of: |scores| scores.logits.as_deref(),
    },
    Vector {
        name: EMBEDDING,
        is_in: |job| job.embedding,
        of: |scores| scores.embedding.as_deref(),
    },
];

/// Whether this is the name of a column of vectors.
pub(crate) fn is_vector(name: &str) -> bool {
    VECTORS.iter().any(|vector| vector.name == name)
}

impl JobRecord {
    /// Names of the pass-through columns in rows: as in the source, with the prefix `source_` if
    /// the name is one of Trommel's or already taken.
    pub(crate) fn column_names(&self) -> Vec<String> {
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

    /// The vector columns in rows of this job.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = &'static Vector> {
        VECTORS.iter().filter(|vector| (vector.is_in)(self))
    }

    /// Names of all columns, in order.
    pub(crate) fn all_names(&self) -> Vec<String> {
        COLUMNS
            .map(str::to_owned)
            .into_iter()
            .chain(self.column_names())
            .chain(self.vectors().map(|vector| vector.name.to_owned()))
            .collect()
    }
}

/// A value as stored in a pass-through column of this kind, the same in every format: text stores
/// everything, float columns also integers, and other mismatches are null.
pub(crate) fn typed(kind: ColumnKind, value: &Scalar) -> Cow<'_, Scalar> {
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
pub(crate) enum Value<'a> {
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
pub(crate) struct TextRow<'a> {
    pub(crate) job: &'a JobRecord,
    /// [`JobRecord::all_names`].
    pub(crate) names: &'a [String],
    pub(crate) row: &'a Classification,
}

impl<'a> TextRow<'a> {
    /// The values in the order of [`JobRecord::all_names`].
    pub(crate) fn values(&self) -> Vec<Value<'a>> {
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

/// The value of the column `status`.
pub(crate) fn status(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Ok(_) => "ok",
        Outcome::Failed(_) => "failed",
    }
}

/// Rows have signed integers only; none of our counts reaches 2⁶³.
pub(crate) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// As [`signed`], for the 32-bit columns.
pub(crate) fn signed_32(value: u32) -> i32 {
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

/// The columns of a job's rows, for writing rows one by one.
#[derive(Debug, Clone)]
pub struct RowShape {
    job: JobRecord,
    names: Vec<String>,
}

impl RowShape {
    /// Those of this job.
    pub fn new(job: JobRecord) -> Self {
        let names = job.all_names();
        Self { job, names }
    }

    /// A row as a map, equal to a line of JSON Lines: all columns in order, including nulls.
    pub fn row<'a>(&'a self, row: &'a Classification) -> impl Serialize + 'a {
        TextRow {
            job: &self.job,
            names: &self.names,
            row,
        }
    }
}

/// Rows as JSON Lines on a stream.
pub struct JsonLines;

impl JsonLines {
    /// Writes one JSON object per line for each row, in the given order, including nulls. Numbers
    /// that JSON lacks (NaN, infinities) are null.
    ///
    /// # Errors
    /// If the stream does not accept them.
    pub fn write_rows(
        out: &mut impl Write,
        job: &JobRecord,
        rows: &[Row],
    ) -> Result<(), StorageError> {
        write_json_lines(out, job, rows).map_err(|error| StorageError::stream("the output", error))
    }
}

/// The encoder of [`JsonLines`], with the plain error.
pub(crate) fn write_json_lines(
    out: &mut impl Write,
    job: &JobRecord,
    rows: &[Row],
) -> io::Result<()> {
    let names = job.all_names();
    // Complete lines at a time, so that an unbuffered stream gets few calls.
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
    use trommel_types::Column;

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
            run: String::new(),
            spec_hash: String::new(),
            options: Default::default(),
            format: crate::Format::Csv,
            columns: ["label", "site", "source_label", "logits", "site"]
                .map(column)
                .to_vec(),
            logits: true,
            embedding: true,
            embedding_type: Default::default(),
            escape_formulas: false,
            retry: None,
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
