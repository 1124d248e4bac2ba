//! A row group without some of its rows, or in another order.

use std::sync::Arc;

use arrow_array::UInt64Array;
use arrow_select::concat::concat_batches;
use arrow_select::take::take_record_batch;
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;

use super::properties;
use super::relabel::Again;

/// Reads files by their Parquet types, so that text of all writers has one type.
pub(super) fn options() -> ArrowReaderOptions {
    ArrowReaderOptions::new().with_skip_arrow_metadata(true)
}

/// These rows of a row group, in this order, as a file.
pub(super) fn rewritten<R: Again>(
    input: &R,
    metadata: &ArrowReaderMetadata,
    group: usize,
    rows: &[u64],
) -> Result<(Bytes, ArrowReaderMetadata), ParquetError> {
    let builder =
        ParquetRecordBatchReaderBuilder::new_with_metadata(input.again()?, metadata.clone());
    let schema = Arc::clone(builder.schema());
    let reader = builder.with_row_groups(vec![group]).build()?;
    let batches: Vec<_> = reader.collect::<Result<_, _>>()?;
    let all = concat_batches(&schema, &batches)?;
    drop(batches);
    let taken = take_record_batch(&all, &UInt64Array::from(rows.to_vec()))?;
    let properties = properties().set_max_row_group_row_count(None).build();
    let mut writer = ArrowWriter::try_new(Vec::new(), schema, Some(properties))?;
    writer.write(&taken)?;
    let file = Bytes::from(writer.into_inner()?);
    let metadata = ArrowReaderMetadata::load(&file, options())?;
    Ok((file, metadata))
}
