//! Converts values of Parquet columns to the scalars in rows.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type,
};
use arrow_array::{Array, ArrayRef, StructArray};
use arrow_schema::{ArrowError, DataType};
use serde_json::{Map, Number, Value};
use trommel_types::{ColumnKind, Scalar};

use crate::parquet_text::text;

/// Whether a column of this type may hold images.
pub(super) fn is_binary(kind: &DataType) -> bool {
    matches!(
        kind,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView
    )
}

/// The type of a column in rows, or `None` for bytes, which rows cannot hold. Dates, times,
/// decimals and unsigned 64-bit integers are text, times with a zone in UTC; lists, structs and
/// maps are JSON text.
pub(super) fn kind(kind: &DataType) -> Option<ColumnKind> {
    Some(match kind {
        DataType::Boolean => ColumnKind::Bool,
        DataType::Float16 | DataType::Float32 | DataType::Float64 => ColumnKind::Float,
        DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 => ColumnKind::Int,
        DataType::UInt8 | DataType::UInt16 | DataType::UInt32 => ColumnKind::Int,
        kind if holds_bytes(kind) => return None,
        _ => ColumnKind::String,
    })
}

fn holds_bytes(kind: &DataType) -> bool {
    match kind {
        DataType::FixedSizeBinary(_) => true,
        DataType::List(inner)
        | DataType::LargeList(inner)
        | DataType::FixedSizeList(inner, _)
        | DataType::Map(inner, _) => holds_bytes(inner.data_type()),
        DataType::Struct(fields) => fields.iter().any(|field| holds_bytes(field.data_type())),
        DataType::Dictionary(_, value) => holds_bytes(value),
        kind => is_binary(kind),
    }
}

/// The value of a row in the type that [`kind`] gives its column.
pub(super) fn scalar(column: &dyn Array, row: usize) -> Result<Scalar, ArrowError> {
    if column.is_null(row) {
        return Ok(Scalar::Null);
    }
    Ok(match column.data_type() {
        DataType::Boolean => Scalar::Bool(column.as_boolean().value(row)),
        DataType::Float16 => Scalar::Float(column.as_primitive::<Float16Type>().value(row).into()),
        DataType::Float32 => Scalar::Float(column.as_primitive::<Float32Type>().value(row).into()),
        DataType::Float64 => Scalar::Float(column.as_primitive::<Float64Type>().value(row)),
        DataType::Int8 => Scalar::Int(column.as_primitive::<Int8Type>().value(row).into()),
        DataType::Int16 => Scalar::Int(column.as_primitive::<Int16Type>().value(row).into()),
        DataType::Int32 => Scalar::Int(column.as_primitive::<Int32Type>().value(row).into()),
        DataType::Int64 => Scalar::Int(column.as_primitive::<Int64Type>().value(row)),
        DataType::UInt8 => Scalar::Int(column.as_primitive::<UInt8Type>().value(row).into()),
        DataType::UInt16 => Scalar::Int(column.as_primitive::<UInt16Type>().value(row).into()),
        DataType::UInt32 => Scalar::Int(column.as_primitive::<UInt32Type>().value(row).into()),
        DataType::Utf8 => Scalar::String(column.as_string::<i32>().value(row).to_owned()),
        kind if kind.is_nested() => Scalar::String(json(column, row)?.to_string()),
        _ => Scalar::String(text(column, row)?),
    })
}

/// The bytes of a cell of a binary column; `None` if it is null.
pub(super) fn bytes(cells: &dyn Array, row: usize) -> Option<&[u8]> {
    if cells.is_null(row) {
        return None;
    }
    match cells.data_type() {
        DataType::Binary => Some(cells.as_binary::<i32>().value(row)),
        DataType::LargeBinary => Some(cells.as_binary::<i64>().value(row)),
        DataType::BinaryView => Some(cells.as_binary_view().value(row)),
        _ => None,
    }
}

fn json(column: &dyn Array, row: usize) -> Result<Value, ArrowError> {
    if column.is_null(row) {
        return Ok(Value::Null);
    }
    match column.data_type() {
        DataType::List(_) => list(&column.as_list::<i32>().value(row)),
        DataType::LargeList(_) => list(&column.as_list::<i64>().value(row)),
        DataType::FixedSizeList(..) => list(&column.as_fixed_size_list().value(row)),
        DataType::Struct(_) => object(column.as_struct(), row),
        DataType::Map(..) => map(&column.as_map().value(row)),
        _ => Ok(match scalar(column, row)? {
            Scalar::Null => Value::Null,
            Scalar::Bool(value) => Value::Bool(value),
            Scalar::Int(value) => Value::from(value),
            // JSON has no infinity.
            Scalar::Float(value) => Number::from_f64(value).map_or(Value::Null, Value::Number),
            Scalar::String(value) => Value::String(value),
        }),
    }
}

fn list(values: &ArrayRef) -> Result<Value, ArrowError> {
    let values = (0..values.len()).map(|place| json(values, place));
    values.collect::<Result<_, _>>().map(Value::Array)
}

fn object(values: &StructArray, row: usize) -> Result<Value, ArrowError> {
    let fields = values.fields().iter().zip(values.columns());
    let fields = fields.map(|(field, column)| Ok((field.name().clone(), json(column, row)?)));
    fields.collect::<Result<Map<_, _>, _>>().map(Value::Object)
}

fn map(entries: &StructArray) -> Result<Value, ArrowError> {
    let entry = |place: usize| {
        let name = text(entries.column(0), place)?;
        Ok((name, json(entries.column(1), place)?))
    };
    let entries = (0..entries.len()).map(entry);
    entries.collect::<Result<Map<_, _>, _>>().map(Value::Object)
}

#[cfg(test)]
mod tests {
    use arrow_array::TimestampMicrosecondArray;

    use super::*;

    #[test]
    fn times_are_told_in_utc_whatever_their_zone() {
        for zone in ["UTC", "Europe/Berlin", "+02:00"] {
            let times = TimestampMicrosecondArray::from(vec![None, Some(1_704_164_645_000_001)]);
            let times = times.with_timezone(zone);
            assert_eq!(scalar(&times, 0).unwrap(), Scalar::Null);
            let text = "2024-01-02T03:04:05.000001Z".to_owned();
            assert_eq!(scalar(&times, 1).unwrap(), Scalar::String(text), "{zone}");
        }
    }
}
