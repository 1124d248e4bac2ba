//! Gives a row group new classes: embeddings are read directly from their pages, changed columns
//! are encoded, and all others are copied in encoded form.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_schema::SchemaRef;
use bytes::Bytes;
use parquet::arrow::ArrowWriter;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::arrow::arrow_writer::{ArrowColumnWriter, compute_leaves};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::ChunkReader;
use parquet::file::writer::SerializedRowGroupWriter;
use trommel_storage::StorageError;

use super::answers::{Answers, Classes};
use super::job_ids::{JOB_ID, JobIds};
use super::rewritten::rewritten;
use super::shape::{OUTCOME, Shape, only_text};
use super::vectors::Vectors;
use super::{closed, properties, score_column, text_column, top_column};
use crate::part::PartRecord;
use crate::read_back::{NO_ROW, no_result};
use crate::runs::RunsBuilder;

/// Embeddings classified at once: they fit into a core's cache.
const BLOCK: usize = 256;
/// Rows of other columns decoded at once.
const BATCH: usize = 8192;

/// Rows of one file that get new classes.
pub struct RowGroup {
    pub(super) path: PathBuf,
    pub(super) metadata: ArrowReaderMetadata,
    /// Number in the file.
    pub(super) number: usize,
    /// The rows to keep, sorted by index; `None` for all.
    pub(super) kept: Option<Vec<u64>>,
    pub(super) shape: Arc<Shape>,
    pub(super) job_ids: Arc<JobIds>,
    /// The indices of these rows.
    pub(super) indices: Vec<u64>,
}

/// Encoded rows with new classes.
pub struct RelabelledGroup {
    /// A file with only this row group.
    pub(super) file: Bytes,
    pub(super) metadata: ParquetMetaData,
    pub(super) record: PartRecord,
    /// First and last index.
    pub(super) range: (u64, u64),
}

/// Why rows could not get new classes.
pub enum RelabelError {
    /// The results cannot be read.
    Storage(StorageError),
    /// The embedding of this image comes from another model.
    OtherModel {
        /// Of the image.
        uri: String,
        /// The model that made the embedding.
        model: String,
        /// Its version.
        version: String,
    },
    /// This image was classified but has no embedding.
    NoEmbedding {
        /// Of the image.
        uri: String,
    },
    /// The embedding of this image has the wrong length.
    Width {
        /// Of the image.
        uri: String,
        /// How many there are.
        width: usize,
    },
}

/// A file that can be opened by several readers.
pub(super) trait Again: ChunkReader + Sized + 'static {
    fn again(&self) -> io::Result<Self>;
}

impl Again for File {
    fn again(&self) -> io::Result<Self> {
        self.try_clone()
    }
}

impl Again for Bytes {
    fn again(&self) -> io::Result<Self> {
        Ok(self.clone())
    }
}

/// Some columns of a row group.
pub(super) fn columns<R: Again>(
    input: &R,
    metadata: &ArrowReaderMetadata,
    group: usize,
    batch: usize,
    names: &[&str],
) -> Result<ParquetRecordBatchReader, ParquetError> {
    let schema = metadata.metadata().file_metadata().schema_descr();
    let roots = schema.root_schema().get_fields().iter().enumerate();
    let roots = roots.filter(|(_, root)| names.contains(&root.name()));
    let mask = ProjectionMask::roots(schema, roots.map(|(place, _)| place));
    ParquetRecordBatchReaderBuilder::new_with_metadata(input.again()?, metadata.clone())
        .with_row_groups(vec![group])
        .with_projection(mask)
        .with_batch_size(batch)
        .build()
}

impl RowGroup {
    /// The rows with new classes.
    ///
    /// # Errors
    /// If the file is damaged, or embeddings are missing, from another model, or of another length.
    pub fn relabel(&self, classes: &mut dyn Classes) -> Result<RelabelledGroup, RelabelError> {
        let damaged = |error: ParquetError| no_result(&self.path, error);
        let file = File::open(&self.path)
            .map_err(|error| StorageError::read(self.path.display(), error))?;
        let Some(kept) = &self.kept else {
            return self
                .reading(file, self.metadata.clone(), self.number)
                .relabel(classes);
        };
        let (file, metadata) =
            rewritten(&file, &self.metadata, self.number, kept).map_err(damaged)?;
        self.reading(file, metadata, 0).relabel(classes)
    }

    fn reading<R>(&self, input: R, metadata: ArrowReaderMetadata, number: usize) -> Reading<'_, R> {
        Reading {
            group: self,
            input,
            metadata,
            number,
        }
    }
}

/// A row group being read.
struct Reading<'a, R> {
    group: &'a RowGroup,
    input: R,
    metadata: ArrowReaderMetadata,
    number: usize,
}

/// What the columns of a row group reveal about its rows.
struct Rows {
    batches: Vec<RecordBatch>,
    /// Whether no row failed, so that the error columns need not be read.
    all_ok: bool,
}

impl Rows {
    fn texts(&self, name: &str) -> impl Iterator<Item = Option<&str>> {
        let batches = self.batches.iter();
        let columns = batches.filter_map(move |batch| batch.column_by_name(name));
        columns.flat_map(|column| column.as_string::<i32>().iter())
    }
}

impl<R: Again> Reading<'_, R> {
    fn relabel(&self, classes: &mut dyn Classes) -> Result<RelabelledGroup, RelabelError> {
        let damaged = |error: ParquetError| no_result(&self.group.path, error);
        if let Some(version) = classes.version() {
            self.check_version(version)?;
        }
        let rows = self.rows().map_err(damaged)?;
        let is_ok = self.outcomes(&rows);
        let mut answers = Answers::default();
        self.answer(&rows, &is_ok, classes, &mut answers)?;
        let record = self.record(&rows, &is_ok, &answers)?;
        let labels = classes.labels();
        let (file, metadata) = self
            .encode(&rows, &is_ok, &answers, labels)
            .map_err(damaged)?;
        Ok(RelabelledGroup {
            file,
            metadata,
            record,
            range: self.range(),
        })
    }

    fn range(&self) -> (u64, u64) {
        let indices = &self.group.indices;
        let ends = indices.first().zip(indices.last());
        ends.map_or((0, 0), |(first, last)| (*first, *last))
    }

    fn only_text(&self, name: &str) -> Option<&[u8]> {
        let metadata = self.metadata.metadata();
        let place = super::shape::leaf(metadata, name)?;
        only_text(metadata.row_group(self.number).column(place))
    }

    fn read(&self, names: &[&str]) -> Result<Vec<RecordBatch>, ParquetError> {
        let reader = columns(&self.input, &self.metadata, self.number, BATCH, names)?;
        reader.map(|batch| Ok(batch?)).collect()
    }

    fn check_version(&self, version: &str) -> Result<(), RelabelError> {
        if self.only_text("model_version") == Some(version.as_bytes()) {
            return Ok(());
        }
        let names = ["uri", "model", "model_version"];
        let batches = self.read(&names);
        let batches = batches.map_err(|error| no_result(&self.group.path, error))?;
        let rows = Rows {
            batches,
            all_ok: true,
        };
        let mut versions = rows.texts("model_version");
        let Some(place) = versions.position(|other| other.unwrap_or_default() != version) else {
            return Ok(());
        };
        let [uri, model, version] = names.map(|name| {
            let text = rows.texts(name).nth(place).flatten();
            text.unwrap_or_default().to_owned()
        });
        Err(RelabelError::OtherModel {
            uri,
            model,
            version,
        })
    }

    fn rows(&self) -> Result<Rows, ParquetError> {
        let all_ok = self.only_text("status") == Some(b"ok");
        let mut names = vec!["uri"];
        if !all_ok {
            names.extend(OUTCOME);
        }
        let batches = self.read(&names)?;
        let count: usize = batches.iter().map(RecordBatch::num_rows).sum();
        match count == self.group.indices.len() {
            true => Ok(Rows { batches, all_ok }),
            false => Err(ParquetError::EOF(
                "there are not as many uris as indices".to_owned(),
            )),
        }
    }

    /// For each row, whether its image was classified.
    fn outcomes(&self, rows: &Rows) -> Vec<bool> {
        match rows.all_ok {
            true => {
                let count = rows.batches.iter().map(RecordBatch::num_rows).sum();
                vec![true; count]
            }
            false => rows
                .texts("status")
                .map(|status| status == Some("ok"))
                .collect(),
        }
    }

    fn answer(
        &self,
        rows: &Rows,
        is_ok: &[bool],
        classes: &mut dyn Classes,
        answers: &mut Answers,
    ) -> Result<(), RelabelError> {
        let damaged = |error: ParquetError| no_result(&self.group.path, error);
        let vectors = Vectors::open(&self.input, &self.metadata, self.number);
        let mut vectors = vectors.map_err(damaged)?;
        let width = classes.width();
        let mut block = vec![0.0; BLOCK * width];
        let mut filled = 0;
        let uri = |row: usize| {
            let uri = rows.texts("uri").nth(row).flatten();
            uri.unwrap_or_default().to_owned()
        };
        for (row, is_ok) in is_ok.iter().enumerate() {
            let out = &mut block[filled..filled + width];
            match (is_ok, vectors.next(out).map_err(damaged)?) {
                (false, _) => continue,
                (true, Some(found)) if found == width => filled += width,
                (true, Some(found)) => {
                    return Err(RelabelError::Width {
                        uri: uri(row),
                        width: found,
                    });
                }
                (true, None) => return Err(RelabelError::NoEmbedding { uri: uri(row) }),
            }
            if filled == block.len() {
                classes.answer(&block, answers);
                filled = 0;
            }
        }
        classes.answer(&block[..filled], answers);
        debug_assert_eq!(
            answers.len(),
            is_ok.iter().filter(|is_ok| **is_ok).count(),
            "an answer for each embedding"
        );
        Ok(())
    }

    /// The record of a part with these rows.
    fn record(
        &self,
        rows: &Rows,
        is_ok: &[bool],
        answers: &Answers,
    ) -> Result<PartRecord, RelabelError> {
        let mut runs = RunsBuilder::default();
        for (index, uri) in self.group.indices.iter().zip(rows.texts("uri")) {
            let uri = uri.ok_or_else(|| no_result(&self.group.path, NO_ROW))?;
            runs.add(*index, uri);
        }
        let mut record = PartRecord {
            rows: is_ok.len() as u64,
            runs: runs.finish(),
            ..PartRecord::default()
        };
        if rows.all_ok && !answers.has_failures() {
            return Ok(record);
        }
        let outcomes = self.failures(rows, is_ok, answers);
        for (outcome, uri) in outcomes.iter().zip(rows.texts("uri")) {
            if let Some((kind, error)) = outcome {
                record.count_failure(kind, 1, uri.unwrap_or_default(), error);
            }
        }
        Ok(record)
    }

    /// For each row, the kind and message of its error.
    fn failures<'b>(
        &self,
        rows: &'b Rows,
        is_ok: &[bool],
        answers: &'b Answers,
    ) -> Vec<Option<(&'b str, &'b str)>> {
        let mut place = 0;
        let mut kinds = rows.texts("error_kind");
        let mut errors = rows.texts("error");
        let outcome = |is_ok: &bool| {
            let stored = (kinds.next().flatten(), errors.next().flatten());
            if !is_ok {
                return Some((stored.0.unwrap_or_default(), stored.1.unwrap_or_default()));
            }
            place += 1;
            match answers.get(place - 1) {
                Ok(_) => None,
                Err((kind, error)) => Some((kind.as_str(), error)),
            }
        };
        is_ok.iter().map(outcome).collect()
    }

    /// The new columns except that of job ids, by name.
    fn new_columns(
        &self,
        rows: &Rows,
        is_ok: &[bool],
        answers: &Answers,
        labels: &[Arc<str>],
    ) -> Vec<(&'static str, ArrayRef)> {
        let mut place = 0;
        let ranked: Vec<Option<&[(u32, f32)]>> = is_ok
            .iter()
            .map(|is_ok| {
                place += usize::from(*is_ok);
                is_ok.then(|| answers.get(place - 1).ok()).flatten()
            })
            .collect();
        let label = |class: u32| &*labels[class as usize];
        let best = || ranked.iter().map(|ranked| ranked.and_then(<[_]>::first));
        let tops = ranked.iter().map(|ranked| {
            let ranked = ranked.as_ref()?.iter();
            Some(ranked.map(move |(class, score)| (label(*class), *class, *score)))
        });
        let mut columns: Vec<(&str, ArrayRef)> = vec![
            (
                "label",
                text_column(best().map(|best| best.map(|(class, _)| label(*class)))),
            ),
            (
                "score",
                score_column(best().map(|best| best.map(|(_, score)| *score))),
            ),
            ("top", top_column(tops)),
        ];
        if answers.has_failures() {
            let failures = self.failures(rows, is_ok, answers);
            let status = failures.iter().map(|failure| match failure {
                None => "ok",
                Some(_) => "failed",
            });
            let kind = failures.iter().map(|failure| failure.map(|(kind, _)| kind));
            let error = failures
                .iter()
                .map(|failure| failure.map(|(_, error)| error));
            columns.push(("status", Arc::new(StringArray::from_iter_values(status))));
            columns.push(("error_kind", text_column(kind)));
            columns.push(("error", text_column(error)));
        }
        columns
    }

    fn encode(
        &self,
        rows: &Rows,
        is_ok: &[bool],
        answers: &Answers,
        labels: &[Arc<str>],
    ) -> Result<(Bytes, ParquetMetaData), ParquetError> {
        let new = self.new_columns(rows, is_ok, answers, labels);
        let shape = &self.group.shape;
        let properties = properties().build();
        let schema: SchemaRef = Arc::clone(&shape.schema);
        let mut out = Vec::new();
        let writer = ArrowWriter::try_new(&mut out, Arc::clone(&schema), Some(properties))?;
        let (mut file, factory) = writer.into_serialized_writer()?;
        let mut writers = factory.create_column_writers(0)?.into_iter();
        let mut sources = shape.sources(self.metadata.metadata()).into_iter();
        let mut group = file.next_row_group()?;
        for field in schema.fields() {
            match new.iter().find(|(name, _)| name == field.name()) {
                None => {
                    let source = sources.next().flatten();
                    writers.next();
                    match field.name() == JOB_ID {
                        true => self.copy_job_ids(is_ok.len(), &mut group)?,
                        false => self.copy(source, &mut group)?,
                    }
                }
                Some((_, column)) => {
                    for leaf in compute_leaves(field, column)? {
                        let writer: Option<ArrowColumnWriter> = writers.next();
                        sources.next();
                        let mut writer = writer.ok_or_else(lacks_column)?;
                        writer.write(&leaf)?;
                        writer.close()?.append_to_row_group(&mut group)?;
                    }
                }
            }
        }
        group.close()?;
        let metadata = file.close()?;
        Ok((out.into(), metadata))
    }

    fn copy_job_ids(
        &self,
        rows: usize,
        group: &mut SerializedRowGroupWriter<'_, &mut Vec<u8>>,
    ) -> Result<(), ParquetError> {
        let (file, chunk) = self.group.job_ids.column(rows)?;
        group.append_column(&file, closed(&chunk, chunk.num_values()))
    }

    /// Copies a column in encoded form.
    fn copy(
        &self,
        source: Option<usize>,
        group: &mut SerializedRowGroupWriter<'_, &mut Vec<u8>>,
    ) -> Result<(), ParquetError> {
        let from = self.metadata.metadata().row_group(self.number);
        let chunk = from.column(source.ok_or_else(lacks_column)?);
        group.append_column(&self.input, closed(chunk, from.num_rows()))
    }
}

fn lacks_column() -> ParquetError {
    ParquetError::General("a column of the rows no longer exists".to_owned())
}

impl From<StorageError> for RelabelError {
    fn from(error: StorageError) -> Self {
        Self::Storage(error)
    }
}
