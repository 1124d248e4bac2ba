//! Parquet files: manifests with a column of uris, and tables that hold the images themselves.

use arrow_array::RecordBatch;
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use trommel_types::{Column, Content, Scalar};

use crate::StorageError;
use crate::source::listing::{Listing, Stop, Visitor, probe};
use crate::source::manifest::{Entries, Manifest, PROBED, repeated};
use crate::source::parquet_value::{is_binary, kind, scalar};
use crate::source::stored::Stored;
use crate::source::{Found, SourceOptions};

/// A Parquet file as a source. All columns but that of the images or uris pass through, except
/// binary ones, which no row can show.
pub(super) struct ParquetFile {
    stored: Stored,
    manifest: Manifest,
    images: Images,
    columns: Vec<Column>,
    /// The columns of the file that a listing reads, in its order.
    read: Vec<usize>,
    /// Where `columns` stand among those that are read.
    places: Vec<usize>,
}

enum Images {
    /// In this binary column; `a.b` is field b of struct column a.
    Cells(String),
    /// At the uris in the column at this place among those that are read.
    Uris(usize),
}

impl ParquetFile {
    /// # Errors
    /// When the file cannot be read, or has neither images nor uris.
    pub(super) fn open(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        let manifest = Manifest::new(stored, Entries::Rows);
        let builder = builder(stored)?;
        let schema = builder.schema();
        let names: Vec<&str> = schema
            .fields()
            .iter()
            .map(|field| field.name().as_str())
            .collect();
        if let Some(name) = repeated(&names) {
            let reason = format!("two columns are called `{name}`; rename one of them");
            return Err(manifest.invalid(reason));
        }
        let cells = cells(&manifest, schema, options)?;
        let taken = match &cells {
            Some((position, _)) => *position,
            None => manifest.uri_column(&names, options)?,
        };
        if cells.is_some() && (options.min_size.is_some() || options.max_size.is_some()) {
            return Err(manifest.invalid(
                "the sizes of images in a column are not known before they are read; leave out --min-size and --max-size",
            ));
        }
        let passing: Vec<(usize, Column)> = schema
            .fields()
            .iter()
            .enumerate()
            .filter(|(position, _)| *position != taken)
            .filter_map(|(position, field)| {
                let name = field.name().clone();
                kind(field.data_type()).map(|kind| (position, Column { name, kind }))
            })
            .collect();
        let mut read: Vec<usize> = passing.iter().map(|(position, _)| *position).collect();
        if cells.is_none() {
            read.push(taken);
            read.sort_unstable();
        }
        // Among the columns that are read, those before a column move it there.
        let place = |position: usize| read.partition_point(|other| *other < position);
        let images = match cells {
            Some((_, column)) => Images::Cells(column),
            None => Images::Uris(place(taken)),
        };
        let places = passing
            .iter()
            .map(|(position, _)| place(*position))
            .collect();
        let file = Self {
            stored: stored.clone(),
            manifest,
            images,
            columns: passing.into_iter().map(|(_, column)| column).collect(),
            read,
            places,
        };
        probe(&file, options, PROBED)?;
        Ok(file)
    }

    fn take(
        &self,
        batch: &RecordBatch,
        place: usize,
        row: u64,
        etag: Option<&str>,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let value = |column: usize| {
            scalar(batch.column(column).as_ref(), place)
                .map_err(|error| self.manifest.at(row, error))
        };
        let values = self.places.iter().map(|column| value(*column));
        let columns = values.collect::<Result<_, _>>()?;
        match &self.images {
            Images::Uris(column) => {
                let uri = match value(*column)? {
                    Scalar::String(uri) => uri,
                    _ => return Err(self.manifest.at(row, "it has no uri").into()),
                };
                self.manifest
                    .take(row, uri.as_bytes(), columns, options, visitor)
            }
            Images::Cells(column) => {
                let file = self.stored.uri();
                visitor.found(Found {
                    uri: format!("{file}#{row}"),
                    content: Content::ParquetCell {
                        file,
                        column: column.clone(),
                        row,
                    },
                    etag: etag.map(str::to_owned),
                    size: None,
                    columns,
                })
            }
        }
    }
}

impl Listing for ParquetFile {
    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        let etag = self.stored.version();
        let builder = builder(&self.stored)?;
        let mask = ProjectionMask::roots(builder.parquet_schema(), self.read.iter().copied());
        let reader = builder
            .with_projection(mask)
            .build()
            .map_err(|error| damaged(&self.stored, error))?;
        let mut row = 0;
        for batch in reader {
            let batch = batch.map_err(|error| damaged(&self.stored, error))?;
            for place in 0..batch.num_rows() {
                self.take(&batch, place, row, etag.as_deref(), options, visitor)?;
                row += 1;
            }
        }
        Ok(())
    }
}

fn builder(stored: &Stored) -> Result<ParquetRecordBatchReaderBuilder<Stored>, StorageError> {
    drop(stored.open()?); // a missing file has an error of its own
    ParquetRecordBatchReaderBuilder::try_new(stored.clone()).map_err(|error| damaged(stored, error))
}

/// A file that is there but is no whole Parquet file.
fn damaged(stored: &Stored, error: impl std::fmt::Display) -> StorageError {
    StorageError::invalid_source(format!(
        "source {stored} cannot be read as Parquet: {error}"
    ))
}

/// The column that holds images, and its path in the file: the one that was named, else the only
/// binary one, or the only struct with a binary field `bytes` (as Hugging Face data sets store
/// images).
fn cells(
    manifest: &Manifest,
    schema: &Schema,
    options: &SourceOptions,
) -> Result<Option<(usize, String)>, StorageError> {
    let fields = schema.fields().iter().enumerate();
    let mut candidates: Vec<(usize, String)> = fields
        .filter_map(|(position, field)| binary_column(field).map(|column| (position, column)))
        .collect();
    let names = |candidates: &[(usize, String)]| {
        let names: Vec<&str> = candidates
            .iter()
            .map(|(_, column)| column.as_str())
            .collect();
        names.join(", ")
    };
    if let Some(wanted) = &options.image_column {
        let found = candidates.iter().position(|(position, column)| {
            column == wanted || schema.field(*position).name() == wanted
        });
        return match found {
            Some(found) => Ok(Some(candidates.swap_remove(found))),
            None => Err(manifest.invalid(format_args!(
                "it has no binary column `{wanted}` (--image-column); its binary columns: {}",
                names(&candidates)
            ))),
        };
    }
    match candidates.len() {
        _ if options.uri_column.is_some() => Ok(None),
        0 | 1 => Ok(candidates.pop()),
        _ => Err(manifest.invalid(format_args!(
            "it has several binary columns ({}); name that of the images with --image-column",
            names(&candidates)
        ))),
    }
}

/// The path of the binary column that a field is or holds.
fn binary_column(field: &Field) -> Option<String> {
    match field.data_type() {
        kind if is_binary(kind) => Some(field.name().clone()),
        DataType::Struct(inner) => inner
            .iter()
            .any(|inner| inner.name() == "bytes" && is_binary(inner.data_type()))
            .then(|| format!("{}.bytes", field.name())),
        _ => None,
    }
}
