//! Formats values of Parquet columns as text: the same text as the crate `arrow-cast`, which takes
//! longer to build than all of this crate.

use std::fmt::Debug;

use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_array::{Array, ArrowPrimitiveType, PrimitiveArray};
use arrow_schema::{ArrowError, DataType, TimeUnit};

/// The text of a value; empty if it is null. Times are ISO 8601, those with a zone in UTC.
///
/// # Errors
/// If it is an impossible time, or of a type without a text.
pub(super) fn text(column: &dyn Array, row: usize) -> Result<String, ArrowError> {
    if column.is_null(row) {
        return Ok(String::new());
    }
    macro_rules! number {
        ($kind:ty) => {
            column.as_primitive::<$kind>().value(row).to_string()
        };
    }
    // With a decimal point, so that it stays a float.
    macro_rules! float {
        ($kind:ty) => {
            format!("{:?}", column.as_primitive::<$kind>().value(row))
        };
    }
    macro_rules! temporal {
        ($kind:ty, $as:ident) => {{
            let column = column.as_primitive::<$kind>();
            known(column, row, column.$as(row))?
        }};
    }
    macro_rules! duration {
        ($kind:ty) => {{
            let duration = column.as_primitive::<$kind>().value_as_duration(row);
            duration.map_or_else(|| "<invalid>".to_owned(), |time| time.to_string())
        }};
    }
    macro_rules! by_key {
        ($($key:pat => $kind:ty),*) => {
            match column.data_type() {
                $(DataType::Dictionary(key, _) if matches!(**key, $key) => {
                    let column = column.as_dictionary::<$kind>();
                    match column.key(row) {
                        Some(key) => text(column.values(), key)?,
                        None => String::new(),
                    }
                })*
                other => return Err(unknown(other)),
            }
        };
    }
    Ok(match column.data_type() {
        DataType::Null => String::new(),
        DataType::Boolean => column.as_boolean().value(row).to_string(),
        DataType::Int8 => number!(Int8Type),
        DataType::Int16 => number!(Int16Type),
        DataType::Int32 => number!(Int32Type),
        DataType::Int64 => number!(Int64Type),
        DataType::UInt8 => number!(UInt8Type),
        DataType::UInt16 => number!(UInt16Type),
        DataType::UInt32 => number!(UInt32Type),
        DataType::UInt64 => number!(UInt64Type),
        DataType::Float16 => number!(Float16Type),
        DataType::Float32 => float!(Float32Type),
        DataType::Float64 => float!(Float64Type),
        DataType::Utf8 => column.as_string::<i32>().value(row).to_owned(),
        DataType::LargeUtf8 => column.as_string::<i64>().value(row).to_owned(),
        DataType::Utf8View => column.as_string_view().value(row).to_owned(),
        DataType::Decimal32(..) => decimal::<Decimal32Type>(column, row),
        DataType::Decimal64(..) => decimal::<Decimal64Type>(column, row),
        DataType::Decimal128(..) => decimal::<Decimal128Type>(column, row),
        DataType::Decimal256(..) => decimal::<Decimal256Type>(column, row),
        DataType::Date32 => temporal!(Date32Type, value_as_date),
        DataType::Date64 => temporal!(Date64Type, value_as_datetime),
        DataType::Time32(TimeUnit::Second) => temporal!(Time32SecondType, value_as_time),
        DataType::Time32(_) => temporal!(Time32MillisecondType, value_as_time),
        DataType::Time64(TimeUnit::Nanosecond) => temporal!(Time64NanosecondType, value_as_time),
        DataType::Time64(_) => temporal!(Time64MicrosecondType, value_as_time),
        DataType::Timestamp(unit, zone) => {
            let moment = match unit {
                TimeUnit::Second => temporal!(TimestampSecondType, value_as_datetime),
                TimeUnit::Millisecond => temporal!(TimestampMillisecondType, value_as_datetime),
                TimeUnit::Microsecond => temporal!(TimestampMicrosecondType, value_as_datetime),
                TimeUnit::Nanosecond => temporal!(TimestampNanosecondType, value_as_datetime),
            };
            // The stored value is UTC, whatever its display zone.
            moment + zone.as_ref().map_or("", |_| "Z")
        }
        DataType::Duration(TimeUnit::Second) => duration!(DurationSecondType),
        DataType::Duration(TimeUnit::Millisecond) => duration!(DurationMillisecondType),
        DataType::Duration(TimeUnit::Microsecond) => duration!(DurationMicrosecondType),
        DataType::Duration(TimeUnit::Nanosecond) => duration!(DurationNanosecondType),
        DataType::Dictionary(..) => by_key!(
            DataType::Int8 => Int8Type, DataType::Int16 => Int16Type,
            DataType::Int32 => Int32Type, DataType::Int64 => Int64Type,
            DataType::UInt8 => UInt8Type, DataType::UInt16 => UInt16Type,
            DataType::UInt32 => UInt32Type, DataType::UInt64 => UInt64Type
        ),
        other => return Err(unknown(other)),
    })
}

fn known<T: ArrowPrimitiveType>(
    column: &PrimitiveArray<T>,
    row: usize,
    value: Option<impl Debug>,
) -> Result<String, ArrowError> {
    let value = value.map(|value| format!("{value:?}"));
    value.ok_or_else(|| {
        let (value, kind) = (column.value(row), column.data_type());
        ArrowError::CastError(format!("{value:?} is no time of type {kind}"))
    })
}

fn decimal<T: DecimalType>(column: &dyn Array, row: usize) -> String {
    column.as_primitive::<T>().value_as_string(row)
}

fn unknown(kind: &DataType) -> ArrowError {
    ArrowError::NotYetImplemented(format!("values of type {kind} are not read"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::*;

    use super::*;

    fn check(column: impl Array, expected: &[&str]) {
        let texts: Vec<_> = (0..column.len())
            .map(|row| text(&column, row).unwrap())
            .collect();
        assert_eq!(texts, expected, "{}", column.data_type());
    }

    #[test]
    fn numbers_and_texts_are_written_as_the_crate_arrow_cast_does() {
        check(NullArray::new(2), &["", ""]);
        check(BooleanArray::from(vec![Some(true), None]), &["true", ""]);
        check(Int8Array::from(vec![i8::MIN]), &["-128"]);
        check(UInt64Array::from(vec![u64::MAX]), &["18446744073709551615"]);
        check(
            Float32Array::from(vec![1.0, 0.1, -2.5e-9, f32::INFINITY]),
            &["1.0", "0.1", "-2.5e-9", "inf"],
        );
        check(
            Float64Array::from(vec![1.0, 0.1, 1e21, 123_456.789]),
            &["1.0", "0.1", "1e21", "123456.789"],
        );
        let decimal = Decimal128Array::from(vec![Some(-12_345), Some(7), None]);
        let decimal = decimal.with_precision_and_scale(10, 3).unwrap();
        check(decimal, &["-12.345", "0.007", ""]);
        check(LargeStringArray::from(vec!["é\n"]), &["é\n"]);
        let long = "a text that is longer than a view";
        check(StringViewArray::from(vec![long]), &[long]);
        let keys = Int32Array::from(vec![Some(1), None, Some(0), Some(2)]);
        let values: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), Some("b"), None]));
        check(DictionaryArray::new(keys, values), &["b", "", "a", ""]);
    }

    #[test]
    fn dates_and_times_of_day_are_iso_8601() {
        let days = Date32Array::from(vec![None, Some(0), Some(-1), Some(86_399)]);
        check(days, &["", "1970-01-01", "1969-12-31", "2206-07-22"]);
        check(
            Date64Array::from(vec![0, 1_704_164_645_001]),
            &["1970-01-01T00:00:00", "2024-01-02T03:04:05.001"],
        );
        let seconds = Time32SecondArray::from(vec![86_399, 0]);
        check(seconds, &["23:59:59", "00:00:00"]);
        let millis = Time32MillisecondArray::from(vec![86_399_001]);
        check(millis, &["23:59:59.001"]);
        let micros = Time64MicrosecondArray::from(vec![1, 60_000_000]);
        check(micros, &["00:00:00.000001", "00:01:00"]);
        check(
            Time64NanosecondArray::from(vec![1]),
            &["00:00:00.000000001"],
        );
    }

    #[test]
    fn timestamps_have_the_digits_they_need_and_a_z_where_they_have_a_zone() {
        check(
            TimestampSecondArray::from(vec![0, -1, 253_402_300_800]),
            &[
                "1970-01-01T00:00:00",
                "1969-12-31T23:59:59",
                "+10000-01-01T00:00:00",
            ],
        );
        check(
            TimestampMillisecondArray::from(vec![Some(1), None]),
            &["1970-01-01T00:00:00.001", ""],
        );
        let micros = TimestampMicrosecondArray::from(vec![-1, 1_704_164_645_000_001]);
        check(
            micros.clone(),
            &["1969-12-31T23:59:59.999999", "2024-01-02T03:04:05.000001"],
        );
        check(
            micros.with_timezone("+02:00"),
            &["1969-12-31T23:59:59.999999Z", "2024-01-02T03:04:05.000001Z"],
        );
        check(
            TimestampNanosecondArray::from(vec![1_704_164_645_000_001]).with_timezone("+00:00"),
            &["1970-01-20T17:22:44.645000001Z"],
        );
    }

    #[test]
    fn durations_are_iso_8601() {
        check(DurationSecondArray::from(vec![90, -1]), &["PT90S", "-PT1S"]);
        check(DurationMillisecondArray::from(vec![1]), &["PT0.001S"]);
        check(
            DurationMicrosecondArray::from(vec![Some(0), Some(1_704_164_645_000_001), None]),
            &["P0D", "PT1704164645.000001S", ""],
        );
        check(
            DurationNanosecondArray::from(vec![86_399]),
            &["PT0.000086399S"],
        );
    }

    #[test]
    fn what_has_no_text_is_refused_by_its_type() {
        let far: ArrayRef = Arc::new(TimestampSecondArray::from(vec![i64::MAX]));
        let error = text(&far, 0).unwrap_err().to_string();
        assert!(error.contains("is no time of type"), "{error}");
        let months: ArrayRef = Arc::new(IntervalYearMonthArray::from(vec![14]));
        let error = text(&months, 0).unwrap_err().to_string();
        assert!(error.contains("Interval"), "{error}");
    }
}
