//! Rows as columns of Arrow.

use std::io;
use std::sync::Arc;

use arrow_array::builder::{
    ArrayBuilder, BooleanBuilder, FixedSizeListBuilder, Float16Builder, Float32Builder,
    Float64Builder, Int32Builder, Int64Builder, ListBuilder, StringBuilder,
    TimestampMicrosecondBuilder,
};
use arrow_array::{ArrayRef, ListArray, RecordBatch, StructArray};
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_schema::{DataType, Field, Fields, Schema, TimeUnit};
use half::f16;
use trommel_types::{Classification, ColumnKind, EmbeddingType, Outcome, Scalar};

use crate::JobRecord;
use crate::row::{EMBEDDING, Row, Vector, signed, signed_32, status, typed};

/// The name that the Parquet specification gives to the values of a list.
pub(super) const ELEMENT: &str = "element";

fn top_fields() -> Fields {
    Fields::from(vec![
        Field::new("label", DataType::Utf8, false),
        Field::new("class", DataType::Int32, false),
        Field::new("score", DataType::Float32, false),
    ])
}

/// Length of the embeddings in these rows.
///
/// # Errors
/// If their lengths differ.
pub(super) fn width(rows: &[Row]) -> io::Result<Option<i32>> {
    let mut vectors = rows.iter().filter_map(|row| match &row.outcome {
        Outcome::Ok(scores) => scores.embedding.as_ref(),
        Outcome::Failed(_) => None,
    });
    let Some(first) = vectors.next() else {
        return Ok(None);
    };
    if let Some(other) = vectors.find(|other| other.len() != first.len()) {
        return Err(io::Error::other(format!(
            "embeddings of {} and of {} values in one part; a model's are of one length",
            first.len(),
            other.len()
        )));
    }
    i32::try_from(first.len())
        .map(Some)
        .map_err(io::Error::other)
}

/// The type of a column of vectors. If no row has an embedding, its length is unknown, and the type
/// is a list of any length.
fn vector_type(job: &JobRecord, vector: &Vector, width: Option<i32>) -> DataType {
    if vector.name != EMBEDDING {
        return DataType::List(Arc::new(Field::new(ELEMENT, DataType::Float32, false)));
    }
    let value = match job.embedding_type {
        EmbeddingType::Float32 => DataType::Float32,
        EmbeddingType::Float16 => DataType::Float16,
    };
    let item = Arc::new(Field::new(ELEMENT, value, false));
    match width {
        Some(width) => DataType::FixedSizeList(item, width),
        None => DataType::List(item),
    }
}

/// The schema of a job's rows, whose embeddings have `width` values each.
pub(super) fn schema(job: &JobRecord, width: Option<i32>) -> Schema {
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
        let list = vector_type(job, vector, width);
        fields.push(Field::new(vector.name, list, true));
    }
    Schema::new(fields)
}

/// The rows as columns.
pub(super) fn batch(
    job: &JobRecord,
    rows: &[Row],
    schema: &Arc<Schema>,
) -> Result<RecordBatch, arrow_schema::ArrowError> {
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
        // Over all rows: a batch may consist of failed rows, which do not show the length of an
        // embedding.
        let data_type = schema.field(columns.len()).data_type();
        columns.push(vectors(rows, vector, data_type));
    }
    RecordBatch::try_new(Arc::clone(schema), columns)
}

fn best(row: &Classification) -> Option<&trommel_types::TopLabel> {
    match &row.outcome {
        Outcome::Ok(scores) => scores.top.first(),
        Outcome::Failed(_) => None,
    }
}

fn text<'a>(rows: &'a [Row], of: impl Fn(&'a Classification) -> Option<&'a str>) -> ArrayRef {
    text_column(rows.iter().map(|row| of(row)))
}

pub(super) fn text_column<'a>(values: impl Iterator<Item = Option<&'a str>>) -> ArrayRef {
    let mut column = StringBuilder::new();
    values.for_each(|value| column.append_option(value));
    Arc::new(column.finish())
}

fn ints(rows: &[Row], of: impl Fn(&Classification) -> Option<i64>) -> ArrayRef {
    let mut column = Int64Builder::new();
    rows.iter().for_each(|row| column.append_option(of(row)));
    Arc::new(column.finish())
}

fn scores(rows: &[Row]) -> ArrayRef {
    score_column(rows.iter().map(|row| best(row).map(|best| best.score)))
}

pub(super) fn score_column(values: impl Iterator<Item = Option<f32>>) -> ArrayRef {
    let mut column = Float32Builder::new();
    values.for_each(|value| column.append_option(value));
    Arc::new(column.finish())
}

fn top(rows: &[Row]) -> ArrayRef {
    top_column(rows.iter().map(|row| match &row.outcome {
        Outcome::Failed(_) => None,
        Outcome::Ok(scores) => {
            let top = scores.top.iter();
            Some(top.map(|label| (&*label.label, label.class, label.score)))
        }
    }))
}

/// The best classes of rows as label, class and score; null for a row without an answer.
pub(super) fn top_column<'a>(
    rows: impl Iterator<Item = Option<impl Iterator<Item = (&'a str, u32, f32)>>>,
) -> ArrayRef {
    let (mut labels, mut classes, mut scores) = (
        StringBuilder::new(),
        Int32Builder::new(),
        Float32Builder::new(),
    );
    let (mut lengths, mut is_there) = (Vec::new(), Vec::new());
    for row in rows {
        let begin = classes.len();
        is_there.push(row.is_some());
        for (label, class, score) in row.into_iter().flatten() {
            labels.append_value(label);
            classes.append_value(signed_32(class));
            scores.append_value(score);
        }
        lengths.push(classes.len() - begin);
    }
    let columns: Vec<ArrayRef> = vec![
        Arc::new(labels.finish()),
        Arc::new(classes.finish()),
        Arc::new(scores.finish()),
    ];
    let item = Field::new(ELEMENT, DataType::Struct(top_fields()), false);
    Arc::new(ListArray::new(
        Arc::new(item),
        OffsetBuffer::from_lengths(lengths),
        Arc::new(StructArray::new(top_fields(), columns, None)),
        Some(NullBuffer::from(is_there)),
    ))
}

pub(super) fn vectors(rows: &[Row], vector: &Vector, data_type: &DataType) -> ArrayRef {
    match data_type {
        DataType::FixedSizeList(item, width) if *item.data_type() == DataType::Float16 => {
            let builder = Float16Builder::new();
            let mut column =
                FixedSizeListBuilder::new(builder, *width).with_field(Arc::clone(item));
            for row in rows {
                let values = vector.values(row);
                let found = values.into_iter().flatten().copied().map(f16::from_f32);
                let found: Vec<f16> = padded(found, values.is_none(), *width);
                column.values().append_slice(&found);
                column.append(values.is_some());
            }
            Arc::new(column.finish())
        }
        DataType::FixedSizeList(item, width) => {
            let builder = Float32Builder::new();
            let mut column =
                FixedSizeListBuilder::new(builder, *width).with_field(Arc::clone(item));
            for row in rows {
                let values = vector.values(row);
                let found = values.into_iter().flatten().copied();
                let found: Vec<f32> = padded(found, values.is_none(), *width);
                column.values().append_slice(&found);
                column.append(values.is_some());
            }
            Arc::new(column.finish())
        }
        DataType::List(item) if *item.data_type() == DataType::Float16 => {
            let builder = ListBuilder::new(Float16Builder::new());
            let mut column = builder.with_field(Arc::clone(item));
            rows.iter().for_each(|_| column.append(false));
            Arc::new(column.finish())
        }
        _ => {
            let item = Field::new(ELEMENT, DataType::Float32, false);
            let mut column = ListBuilder::new(Float32Builder::new()).with_field(item);
            for row in rows {
                let values = vector.values(row);
                column.values().append_slice(values.unwrap_or_default());
                column.append(values.is_some());
            }
            Arc::new(column.finish())
        }
    }
}

/// The values of a row in a column of fixed length; zeros if it has none.
fn padded<T: Default + Clone>(
    values: impl Iterator<Item = T>,
    is_null: bool,
    width: i32,
) -> Vec<T> {
    match is_null {
        true => vec![T::default(); usize::try_from(width).unwrap_or_default()],
        false => values.collect(),
    }
}

fn pass_through(rows: &[Row], position: usize, kind: ColumnKind) -> ArrayRef {
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
