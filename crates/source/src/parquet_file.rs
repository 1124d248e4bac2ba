//! Parquet files: manifests with a uri column, and tables that contain the images.

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};
use parquet::file::metadata::ParquetMetaData;
use parquet::file::statistics::Statistics;
use trommel_storage::StorageError;
use trommel_types::{Column, Content, Scalar};

use crate::listing::{Listing, Stop, Visitor};
use crate::manifest::{Entries, Manifest, repeated};
use crate::parquet_pages::Pages;
use crate::parquet_value::{bytes, is_binary, kind, scalar};
use crate::stored::Stored;
use crate::{Found, SourceOptions};

/// Most bytes of a page of uris or pass-through columns, unless its file has as many.
const PAGE_LIMIT: u64 = 256 << 20;

/// Rows read together if they include images.
const FEW_ROWS: usize = 32;

/// A Parquet file as a source. All columns except that of the images or uris pass through, without
/// binary ones, which rows cannot show.
pub(super) struct ParquetFile {
    stored: Stored,
    manifest: Manifest,
    images: Images,
    columns: Vec<Column>,
    /// The columns that a listing reads, in file order.
    read: Vec<usize>,
    /// The positions of `columns` among those read.
    places: Vec<usize>,
}

enum Images {
    /// In this binary column; `a.b` is field b of struct column a.
    Cells(String),
    /// At the uris in the column at this position among those read.
    Uris(usize),
    /// In the field `bytes` of the struct column at this position among those read, or, if that is
    /// null, at the uri in its field `path`.
    Either { column: String, place: usize },
}

impl ParquetFile {
    /// # Errors
    /// If the file cannot be read, or has neither images nor uris.
    pub(super) fn open(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        let manifest = Manifest::new(stored, Entries::Rows);
        let (builder, _) = builder(stored)?;
        let schema = builder.schema();
        let parquet = builder.metadata();
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
        let cells = match cells {
            // Next to uris, a column of bytes may contain anything.
            Some((position, column))
                if options.image_column.is_none()
                    && is_binary(schema.field(position).data_type())
                    && has_text(schema, options.uri_column(&names))
                    && !holds_images(stored, &column)? =>
            {
                tracing::info!(
                    table = %stored,
                    column,
                    "holds no images; those at the uris of the table are taken"
                );
                None
            }
            cells => cells,
        };
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
        let with_paths = cells.as_ref().is_some_and(|(position, column)| {
            has_path(schema.field(*position)) && may_be_null(parquet, column)
        });
        let mut read: Vec<usize> = passing.iter().map(|(position, _)| *position).collect();
        if cells.is_none() || with_paths {
            read.push(taken);
            read.sort_unstable();
        }
        // Preceding columns shift its position among those read.
        let place = |position: usize| read.partition_point(|other| *other < position);
        let images = match cells {
            Some((_, column)) if with_paths => Images::Either {
                column,
                place: place(taken),
            },
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
        file.manifest.probe(&file, options)?;
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
            Images::Either { column, place: at } => {
                match path_of(batch.column(*at).as_ref(), place) {
                    Some(path) => {
                        self.manifest
                            .take(row, path.as_bytes(), columns, options, visitor)
                    }
                    None => visitor.found(self.cell(column, row, etag, columns)),
                }
            }
            Images::Cells(column) => visitor.found(self.cell(column, row, etag, columns)),
        }
    }

    fn cell(&self, column: &str, row: u64, etag: Option<&str>, columns: Vec<Scalar>) -> Found {
        let file = self.stored.uri();
        Found {
            uri: format!("{file}#{row}"),
            content: Content::ParquetCell {
                file,
                column: column.to_owned(),
                row,
            },
            etag: etag.map(str::to_owned),
            size: None,
            columns,
        }
    }
}

impl Listing for ParquetFile {
    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        let etag = self.stored.version();
        let (builder, pages) = builder(&self.stored)?;
        let mask = ProjectionMask::roots(builder.parquet_schema(), self.read.iter().copied());
        let builder = match self.images {
            // These are read with the images themselves.
            Images::Either { .. } => builder.with_batch_size(FEW_ROWS),
            _ => builder,
        };
        let reader = builder
            .with_projection(mask)
            .build()
            .map_err(|error| damaged(&self.stored, error))?;
        let mut row = 0;
        for batch in reader {
            let failed = |error| match pages.take_fault() {
                Some(fault) => StorageError::new(
                    fault.kind(),
                    format!("source {} cannot be read: {fault}", self.stored),
                ),
                None => damaged(&self.stored, error),
            };
            let batch = batch.map_err(failed)?;
            for place in 0..batch.num_rows() {
                self.take(&batch, place, row, etag.as_deref(), options, visitor)?;
                row += 1;
            }
        }
        Ok(())
    }
}

/// Reads a table, and returns errors of its pages.
fn builder(
    stored: &Stored,
) -> Result<(ParquetRecordBatchReaderBuilder<Pages>, Pages), StorageError> {
    drop(stored.open()?); // a missing file has an error of its own
    let metadata = ArrowReaderMetadata::load(stored, Default::default())
        .map_err(|error| damaged(stored, error))?;
    let pages = Pages::new(stored, PAGE_LIMIT, false);
    let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(pages.clone(), metadata);
    Ok((builder, pages))
}

/// An existing but incomplete Parquet file.
fn damaged(stored: &Stored, error: impl std::fmt::Display) -> StorageError {
    StorageError::invalid_source(format!(
        "source {stored} cannot be read as Parquet: {error}"
    ))
}

/// The column of images, and its path in the file: the specified one, else the only binary one, or
/// the only struct with a binary field `bytes` (as Hugging Face data sets store images).
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

/// The path of the binary column that a field is or contains.
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

/// Number of values of a binary column that are checked for images.
const SNIFFED: usize = 16;

/// Whether a column is text.
fn has_text(schema: &Schema, column: Option<usize>) -> bool {
    column.is_some_and(|column| is_text(schema.field(column).data_type()))
}

fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, value) => is_text(value),
        kind => matches!(
            kind,
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View
        ),
    }
}

/// Whether a struct column has a field for the image's path next to that for its bytes.
fn has_path(field: &Field) -> bool {
    let DataType::Struct(inner) = field.data_type() else {
        return false;
    };
    inner
        .iter()
        .any(|inner| inner.name() == "path" && is_text(inner.data_type()))
}

/// Whether a column may have nulls, according to the metadata of the file.
fn may_be_null(metadata: &ParquetMetaData, column: &str) -> bool {
    let columns = metadata.file_metadata().schema_descr().columns();
    let Some(leaf) = columns
        .iter()
        .position(|leaf| leaf.path().string() == column)
    else {
        return true;
    };
    metadata.row_groups().iter().any(|group| {
        let statistics = group.column(leaf).statistics();
        statistics.and_then(Statistics::null_count_opt) != Some(0)
    })
}

/// The path in a cell with null bytes.
fn path_of(cells: &dyn Array, row: usize) -> Option<String> {
    let cells = cells.as_struct_opt()?;
    let field = |name: &str| cells.column_by_name(name);
    if cells.is_null(row) || bytes(field("bytes")?.as_ref(), row).is_some() {
        return None;
    }
    match scalar(field("path")?.as_ref(), row) {
        Ok(Scalar::String(path)) if !path.is_empty() => Some(path),
        _ => None,
    }
}

/// Whether the first values of a binary column begin like images.
fn holds_images(stored: &Stored, column: &str) -> Result<bool, StorageError> {
    let (builder, _) = builder(stored)?;
    let mask = ProjectionMask::columns(builder.parquet_schema(), [column]);
    let reader = builder
        .with_projection(mask)
        .with_batch_size(SNIFFED)
        .build()
        .map_err(|error| damaged(stored, error))?;
    for batch in reader.take(SNIFFED) {
        let batch = batch.map_err(|error| damaged(stored, error))?;
        let values = batch.column(0);
        let mut first = (0..batch.num_rows()).filter_map(|row| bytes(values.as_ref(), row));
        if let Some(value) = first.next() {
            return Ok(is_image(value));
        }
    }
    // All checked values are null.
    Ok(false)
}

/// Whether bytes begin like a supported image format.
fn is_image(bytes: &[u8]) -> bool {
    let begins: [&[u8]; 10] = [
        b"\xff\xd8\xff",
        b"\x89PNG",
        b"GIF8",
        b"BM",
        b"II*\0",
        b"MM\0*",
        b"II+\0",
        b"MM\0+",
        b"\xff\x0a",
        b"\0\0\0\x0cJXL ",
    ];
    let is_webp = bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP");
    let is_heif = bytes.get(4..8) == Some(b"ftyp");
    is_webp || is_heif || begins.iter().any(|begin| bytes.starts_with(begin))
}
