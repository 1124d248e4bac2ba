//! Reads rows of a file as fields, and embeddings as vectors.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int32Type, Int64Type, TimestampMicrosecondType,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, TimeUnit};
use half::slice::HalfFloatSliceExt;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::errors::ParquetError;
use parquet::file::reader::ChunkReader;
use serde_json::{Map, Value};

use crate::format::{EmbeddedRows, FieldRows, Indices, Wanted};
use crate::read_back::NO_ROW;
use crate::row::EMBEDDING;

pub(super) fn projected<T: ChunkReader + 'static>(
    builder: ParquetRecordBatchReaderBuilder<T>,
    wanted: impl Fn(&str) -> bool,
) -> Result<ParquetRecordBatchReader, ParquetError> {
    let roots = builder.parquet_schema().root_schema().get_fields();
    let wanted: Vec<usize> = (0..roots.len())
        .filter(|root| wanted(roots[*root].name()))
        .collect();
    let mask = ProjectionMask::roots(builder.parquet_schema(), wanted);
    builder.with_projection(mask).with_batch_size(1024).build()
}

pub(super) fn rows(
    input: impl ChunkReader + 'static,
    wanted: Wanted,
) -> Result<FieldRows, ParquetError> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(input)?;
    let reader = projected(builder, |name| wanted.column(name))?;
    Ok(Box::new(reader.flat_map(|batch| -> FieldRows {
        match batch {
            Err(error) => Box::new(std::iter::once(Err(error.to_string()))),
            Ok(batch) => {
                let count = batch.num_rows();
                Box::new((0..count).map(move |number| Ok(fields(&batch, number))))
            }
        }
    })))
}

/// Only the column of indices.
pub(super) fn indices(input: impl ChunkReader + 'static) -> Result<Indices, ParquetError> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(input)?;
    let reader = projected(builder, |name| name == "index")?;
    Ok(Box::new(reader.map(|batch| {
        let batch = batch.map_err(|error| error.to_string())?;
        let found = batch.columns().first().and_then(indices_of);
        found.ok_or_else(|| NO_ROW.to_owned())
    })))
}

/// The values of a column of indices, unless one of them is not an index.
pub(super) fn indices_of(column: &ArrayRef) -> Option<Vec<u64>> {
    match column.as_primitive_opt::<Int64Type>() {
        Some(indices) if indices.null_count() == 0 => {
            let indices = indices.values().iter();
            indices.map(|index| u64::try_from(*index).ok()).collect()
        }
        // As rewritten by other programs.
        _ => {
            let rows = 0..column.len();
            rows.map(|row| cell(column.as_ref(), row).as_u64())
                .collect()
        }
    }
}

/// Embeddings are not converted to `Value`s, each of which takes more memory than a whole
/// embedding.
pub(super) fn embedded_rows(
    input: impl ChunkReader + 'static,
    wanted: Wanted,
) -> Result<EmbeddedRows, ParquetError> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(input)?;
    let reader = projected(builder, |name| wanted.column(name))?;
    Ok(Box::new(reader.flat_map(|batch| -> EmbeddedRows {
        let read = batch
            .map_err(|error| error.to_string())
            .and_then(|mut batch| {
                let place = batch.schema().index_of(EMBEDDING).ok();
                let vectors = place
                    .map(|place| floats(&batch.remove_column(place)))
                    .transpose()?;
                Ok((batch, vectors))
            });
        match read {
            Err(error) => Box::new(std::iter::once(Err(error))),
            Ok((batch, vectors)) => Box::new((0..batch.num_rows()).map(move |row| {
                let vector = vectors.as_ref().and_then(|vectors| vectors.row(row));
                Ok((fields(&batch, row), vector))
            })),
        }
    })))
}

/// The values of a column of lists.
pub(super) struct Floats {
    values: Vec<f32>,
    /// Begin and end of each row's values; empty for null.
    pub(super) rows: Vec<Option<(usize, usize)>>,
}

impl Floats {
    pub(super) fn row(&self, row: usize) -> Option<Vec<f32>> {
        let (start, end) = (*self.rows.get(row)?)?;
        Some(self.values[start..end].to_vec())
    }
}

pub(super) fn floats(column: &ArrayRef) -> Result<Floats, String> {
    let range = |row: usize| -> Option<(usize, usize)> {
        if column.is_null(row) {
            return None;
        }
        Some(match column.data_type() {
            DataType::FixedSizeList(_, width) => {
                let width = usize::try_from(*width).ok()?;
                let start = column.as_fixed_size_list().value_offset_at(row);
                (start, start + width)
            }
            DataType::LargeList(_) => {
                let offsets = column.as_list::<i64>().value_offsets();
                (
                    usize::try_from(offsets[row]).ok()?,
                    usize::try_from(offsets[row + 1]).ok()?,
                )
            }
            _ => {
                let offsets = column.as_list::<i32>().value_offsets();
                (
                    usize::try_from(offsets[row]).ok()?,
                    usize::try_from(offsets[row + 1]).ok()?,
                )
            }
        })
    };
    let values = match column.data_type() {
        DataType::FixedSizeList(_, _) => column.as_fixed_size_list().values(),
        DataType::LargeList(_) => column.as_list::<i64>().values(),
        DataType::List(_) => column.as_list::<i32>().values(),
        other => return Err(format!("its embeddings are {other}, not lists")),
    };
    let values = match values.data_type() {
        DataType::Float16 => {
            let halves = values.as_primitive::<Float16Type>().values();
            let mut wide = vec![0.0; halves.len()];
            halves.convert_to_f32_slice(&mut wide);
            wide
        }
        DataType::Float32 => values.as_primitive::<Float32Type>().values().to_vec(),
        DataType::Float64 => {
            let values = values.as_primitive::<Float64Type>().values();
            values.iter().map(|value| *value as f32).collect()
        }
        other => {
            return Err(format!(
                "its embeddings are lists of {other}, not of numbers"
            ));
        }
    };
    Ok(Floats {
        values,
        rows: (0..column.len()).map(range).collect(),
    })
}

fn fields(batch: &RecordBatch, number: usize) -> Map<String, Value> {
    let schema = batch.schema();
    let columns = schema.fields().iter().zip(batch.columns());
    columns
        .map(|(field, column)| (field.name().clone(), cell(column.as_ref(), number)))
        .collect()
}

/// A cell of the types in our rows; anything else is null.
fn cell(column: &dyn Array, row: usize) -> Value {
    if column.is_null(row) {
        return Value::Null;
    }
    match column.data_type() {
        DataType::Utf8 => column.as_string::<i32>().value(row).into(),
        // As rewritten by other programs.
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
        DataType::FixedSizeList(_, _) => cells(column.as_fixed_size_list().value(row).as_ref()),
        DataType::Float16 => {
            let value = column.as_primitive::<Float16Type>().value(row);
            value.to_f32().into()
        }
        _ => Value::Null,
    }
}

fn cells(items: &dyn Array) -> Value {
    (0..items.len()).map(|item| cell(items, item)).collect()
}
