//! S3 Inventory reports, which list buckets of any size without a LIST request per thousand keys
//! (<https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-inventory.html>).

use std::io::{BufReader, Read};

use csv::ByteRecord;
use flate2::read::MultiGzDecoder;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use trommel_storage::{StorageError, s3::Location};
use trommel_types::{Content, Scalar};

use crate::csv_records::{Malformed, Records};
use crate::listing::{Listing, Stop, Visitor};
use crate::parquet_value::scalar;
use crate::stored::Stored;
use crate::stores::Stores;
use crate::{Found, SourceOptions};

/// A report, named by its `manifest.json`. Its objects are listed in the order of the report's
/// files; deleted and older versions are left out.
pub(super) struct Inventory {
    manifest: String,
    files: Vec<Stored>,
    format: Format,
    fields: Fields,
}

/// The contents of a report's `manifest.json`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    destination_bucket: String,
    file_format: String,
    #[serde(default)]
    file_schema: String,
    files: Vec<File>,
}

#[derive(Deserialize)]
struct File {
    key: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Csv,
    Parquet,
}

/// The columns of a report, by their positions in CSV.
struct Fields {
    bucket: usize,
    key: usize,
    size: Option<usize>,
    etag: Option<usize>,
    is_latest: Option<usize>,
    is_delete_marker: Option<usize>,
}

impl Inventory {
    /// Whether an object may be a report's manifest.
    pub(super) fn is_manifest(key: &str) -> bool {
        key.rsplit('/').next() == Some("manifest.json")
    }

    /// # Errors
    /// If the manifest or a file in it does not exist, or has an unsupported format.
    pub(super) fn open(stores: &Stores, manifest: &Stored) -> Result<Self, StorageError> {
        let invalid =
            |reason: String| StorageError::invalid_source(format!("source {manifest}: {reason}"));
        let read: Manifest = serde_json::from_reader(BufReader::new(manifest.open()?))
            .map_err(|error| invalid(format!("not a manifest of an S3 Inventory: {error}")))?;
        let format = match read.file_format.as_str() {
            "CSV" => Format::Csv,
            "Parquet" => Format::Parquet,
            other => {
                return Err(invalid(format!(
                    "reports in {other} are not read; have S3 write CSV or Parquet"
                )));
            }
        };
        let names: Vec<String> = read
            .file_schema
            .split(',')
            .map(|name| name.trim().to_ascii_lowercase())
            .collect();
        let place = |name: &str| names.iter().position(|other| other == name);
        let needed = |name: &str| match format {
            Format::Csv => place(name)
                .ok_or_else(|| invalid(format!("its schema has no {name} ({})", read.file_schema))),
            Format::Parquet => Ok(0),
        };
        let fields = Fields {
            bucket: needed("bucket")?,
            key: needed("key")?,
            size: place("size"),
            etag: place("etag"),
            is_latest: place("islatest"),
            is_delete_marker: place("isdeletemarker"),
        };
        // An ARN, such as arn:aws:s3:::bucket.
        let bucket = read.destination_bucket;
        let bucket = bucket.rsplit(':').next().unwrap_or(&bucket);
        let files = read.files.into_iter().map(|file| {
            let place = Location {
                bucket: bucket.to_owned(),
                key: file.key,
            };
            let uri = place.uri();
            Stored::object(stores, &uri)?
                .ok_or_else(|| invalid(format!("its file {uri} does not exist")))
        });
        Ok(Self {
            manifest: manifest.to_string(),
            files: files.collect::<Result<_, _>>()?,
            format,
            fields,
        })
    }

    fn list_csv(
        &self,
        file: &Stored,
        each: &mut dyn FnMut(Entry) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let raw = BufReader::new(file.open()?);
        let input: Box<dyn Read> = if file.uri().ends_with(".gz") {
            Box::new(MultiGzDecoder::new(raw))
        } else {
            Box::new(raw)
        };
        let mut records = Records::new(input, false, SourceOptions::MAX_RECORD_BYTES);
        let mut record = ByteRecord::new();
        let invalid = |error: Malformed| {
            let reason = match error {
                Malformed::Invalid(error) => error.to_string(),
                Malformed::TooLong { start, longest } => {
                    format!("the record at byte {start} is longer than {longest} bytes")
                }
            };
            StorageError::invalid_source(format!("source {}: {file}: {reason}", self.manifest))
        };
        while records.next(&mut record).map_err(invalid)? {
            let text = |field: Option<usize>| {
                field.and_then(|field| str::from_utf8(record.get(field)?).ok())
            };
            let is = |field: Option<usize>, value| {
                text(field).is_some_and(|text| text.eq_ignore_ascii_case(value))
            };
            if is(self.fields.is_latest, "false") || is(self.fields.is_delete_marker, "true") {
                continue;
            }
            // Keys in CSV reports are percent-encoded, as in a query string.
            let key = text(Some(self.fields.key))
                .unwrap_or_default()
                .replace('+', " ");
            each(Entry {
                bucket: text(Some(self.fields.bucket))
                    .unwrap_or_default()
                    .to_owned(),
                key: percent_decode_str(&key).decode_utf8_lossy().into_owned(),
                size: text(self.fields.size).and_then(|size| size.parse().ok()),
                etag: text(self.fields.etag).map(str::to_owned),
            })?;
        }
        Ok(())
    }

    fn list_parquet(
        &self,
        file: &Stored,
        each: &mut dyn FnMut(Entry) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let invalid = |error: &dyn std::fmt::Display| {
            StorageError::invalid_source(format!("source {}: {file}: {error}", self.manifest))
        };
        let builder = ParquetRecordBatchReaderBuilder::try_new(file.clone())
            .map_err(|error| invalid(&error))?;
        let wanted = [
            "bucket",
            "key",
            "size",
            "e_tag",
            "is_latest",
            "is_delete_marker",
        ];
        let roots = builder.parquet_schema().root_schema().get_fields();
        let present: Vec<usize> = (0..roots.len())
            .filter(|root| wanted.contains(&roots[*root].name()))
            .collect();
        let mask = ProjectionMask::roots(builder.parquet_schema(), present);
        let reader = builder.with_projection(mask).build();
        for batch in reader.map_err(|error| invalid(&error))? {
            let batch = batch.map_err(|error| invalid(&error))?;
            for row in 0..batch.num_rows() {
                let value = |name: &str| match batch.column_by_name(name) {
                    Some(column) => scalar(column.as_ref(), row).map_err(|error| invalid(&error)),
                    None => Ok(Scalar::Null),
                };
                if value("is_latest")? == Scalar::Bool(false)
                    || value("is_delete_marker")? == Scalar::Bool(true)
                {
                    continue;
                }
                let (Scalar::String(bucket), Scalar::String(key)) =
                    (value("bucket")?, value("key")?)
                else {
                    return Err(invalid(&"a row has no bucket or no key").into());
                };
                each(Entry {
                    bucket,
                    key,
                    size: match value("size")? {
                        Scalar::Int(size) => u64::try_from(size).ok(),
                        _ => None,
                    },
                    etag: match value("e_tag")? {
                        Scalar::String(etag) => Some(etag),
                        _ => None,
                    },
                })?;
            }
        }
        Ok(())
    }
}

/// An object of a report.
struct Entry {
    bucket: String,
    key: String,
    size: Option<u64>,
    etag: Option<String>,
}

impl Listing for Inventory {
    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        let mut each = |entry: Entry| {
            if entry.key.ends_with('/') && entry.size == Some(0) {
                return Ok(()); // how consoles show a folder
            }
            if !options.takes_member(&entry.key) {
                return visitor.skipped();
            }
            let place = Location {
                bucket: entry.bucket,
                key: entry.key,
            };
            visitor.found(Found {
                uri: place.uri(),
                content: Content::Whole,
                etag: entry.etag.map(|etag| etag.trim_matches('"').to_owned()),
                size: entry.size,
                columns: Vec::new(),
            })
        };
        self.files.iter().try_for_each(|file| match self.format {
            Format::Csv => self.list_csv(file, &mut each),
            Format::Parquet => self.list_parquet(file, &mut each),
        })
    }
}
