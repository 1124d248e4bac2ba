//! The column of job ids, which is the same for row groups of equal length.

use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::{RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::errors::ParquetError;
use parquet::file::metadata::ColumnChunkMetaData;

use super::properties;

/// The name of the column.
pub(super) const JOB_ID: &str = "job_id";

/// The encoded column of one job. The last one is kept, because encoding looks at each row.
pub(super) struct JobIds {
    job_id: String,
    last: Mutex<Option<Encoded>>,
}

#[derive(Clone)]
struct Encoded {
    rows: usize,
    file: Bytes,
    chunk: ColumnChunkMetaData,
}

impl JobIds {
    pub(super) fn new(job_id: &str) -> Self {
        Self {
            job_id: job_id.to_owned(),
            last: Mutex::new(None),
        }
    }

    /// The column for this many rows: a file, and its place in it.
    pub(super) fn column(&self, rows: usize) -> Result<(Bytes, ColumnChunkMetaData), ParquetError> {
        let last = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let known = last().clone().filter(|known| known.rows == rows);
        let Encoded { file, chunk, .. } = match known {
            Some(known) => known,
            None => last().insert(self.encoded(rows)?).clone(),
        };
        Ok((file, chunk))
    }

    fn encoded(&self, rows: usize) -> Result<Encoded, ParquetError> {
        let field = Field::new(JOB_ID, DataType::Utf8, false);
        let schema = Arc::new(Schema::new(vec![field]));
        let values = std::iter::repeat_n(&self.job_id, rows);
        let column = Arc::new(StringArray::from_iter_values(values));
        let batch = RecordBatch::try_new(Arc::clone(&schema), vec![column])?;
        let properties = properties().set_max_row_group_row_count(None).build();
        let mut file = Vec::new();
        let mut writer = ArrowWriter::try_new(&mut file, schema, Some(properties))?;
        writer.write(&batch)?;
        let metadata = writer.close()?;
        let chunk = metadata.row_groups().first().map(|group| group.column(0));
        let chunk = chunk.ok_or_else(|| ParquetError::General("there are no rows".to_owned()))?;
        Ok(Encoded {
            rows,
            chunk: chunk.clone(),
            file: file.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;
    use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

    use super::*;

    #[test]
    fn each_row_has_the_job_whatever_length_came_before() {
        let ids = JobIds::new("job");
        for rows in [3, 3, 5000, 1, 3] {
            let (file, chunk) = ids.column(rows).unwrap();
            assert_eq!(usize::try_from(chunk.num_values()).unwrap(), rows);
            let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
            let batches = reader.build().unwrap().map(Result::unwrap);
            let found: Vec<String> = batches
                .flat_map(|batch| {
                    let column = batch.column(0).as_string::<i32>().clone();
                    column
                        .iter()
                        .flatten()
                        .map(str::to_owned)
                        .collect::<Vec<_>>()
                })
                .collect();
            assert_eq!(found, vec!["job"; rows]);
        }
    }
}
