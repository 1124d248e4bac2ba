//! What can be listed and fetched.

mod archive;
mod csv_manifest;
mod fetch;
mod file;
mod folder;
mod inventory;
mod json_fields;
mod json_manifest;
mod line_manifest;
mod lines;
mod listing;
mod local;
mod manifest;
mod options;
mod parquet_cell;
mod parquet_file;
mod parquet_value;
mod pattern;
mod s3_prefix;
mod stored;
mod union;

use std::fs::Metadata;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use trommel_types::{Column, Content, ImageRef, Scalar};

use self::archive::Archive;
use self::csv_manifest::CsvManifest;
use self::file::SingleFile;
use self::folder::Folder;
use self::inventory::Inventory;
use self::json_manifest::JsonManifest;
use self::line_manifest::LineManifest;
use self::listing::Listing;
use self::local::LocalSource;
use self::manifest::not_read;
pub use self::options::SourceOptions;
use self::options::is_image_suffix;
use self::parquet_file::ParquetFile;
use self::pattern::Pattern;
use self::s3_prefix::S3Prefix;
use self::stored::Stored;
use crate::StorageError;
use crate::s3::{Location, S3};
use crate::uri::{remote_scheme, to_path};

/// An image in a listing: an [`ImageRef`] before it has a job and an index.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Where it is, as rows show it.
    pub uri: String,
    /// Which bytes there are the image.
    pub content: Content,
    /// The store's version of the object.
    pub etag: Option<String>,
    /// Encoded size in bytes.
    pub size: Option<u64>,
    /// Values of the source's columns, in their order.
    pub columns: Vec<Scalar>,
}

/// Where images come from.
#[async_trait]
pub trait Source: Send + Sync {
    /// What is listed, in words that are part of a job's identity.
    fn describe(&self) -> String;

    /// The pass-through columns of every image.
    fn columns(&self) -> &[Column];

    /// Lists the images, in the same order every time as long as nothing changes. Dropping the
    /// stream ends the listing. Standard input can be listed once.
    fn list(&self) -> BoxStream<'static, Result<Found, StorageError>>;

    /// Lists the images behind the first `passed`, of which `last_uri` was the last.
    ///
    /// A single S3 prefix goes on behind that key; everything else is listed again from its
    /// beginning, and the stream fails with [`SourceChanged`](crate::StorageErrorKind::SourceChanged)
    /// where another image stands there now.
    fn list_from(
        &self,
        passed: u64,
        last_uri: Option<String>,
    ) -> BoxStream<'static, Result<Found, StorageError>>;

    /// Reads the bytes of an image, at most `limit` of them. Never blocks an async thread.
    ///
    /// # Errors
    /// When there is no such image, it cannot be read, holds nothing, or is larger than `limit`.
    async fn fetch(&self, image: &ImageRef, limit: u64) -> Result<Bytes, StorageError>;

    /// Files that the last listing has passed over by suffix or size.
    fn skipped(&self) -> u64;
}

/// Opens what a user named, one source after another. The columns are those of all, in order of
/// first appearance; an image of a source without one of them has null there.
///
/// A source is a file, a folder, a pattern such as `photos/**/*.jpg`, a manifest (`.txt`, `.csv`,
/// `.jsonl`, `.parquet`), a `.tar` archive, `s3://bucket/prefix`, any of these lists and archives
/// in S3, the `manifest.json` of an S3 Inventory, or `-` for a list of paths on standard input.
/// Blocking:
/// folders are looked through for a first image, manifests read from their beginning, JSON Lines
/// once in whole.
///
/// # Errors
/// When one is not there, cannot be read, or is of a kind that is not read.
pub fn open_source(
    specs: &[String],
    options: &SourceOptions,
) -> Result<Arc<dyn Source>, StorageError> {
    open_all(specs, options, LineManifest::standard_input)
}

/// Reads images that another process has listed; lists nothing itself.
pub fn fetcher(options: &SourceOptions) -> Arc<dyn Source> {
    Arc::new(LocalSource::new(&[], Vec::new(), options.clone()))
}

/// Opens sources, `-` as `standard_input` gives it.
fn open_all(
    specs: &[String],
    options: &SourceOptions,
    standard_input: impl Fn() -> LineManifest,
) -> Result<Arc<dyn Source>, StorageError> {
    if specs.is_empty() {
        return Err(StorageError::invalid_source(
            "no source is named; name a file or a folder",
        ));
    }
    if specs.iter().filter(|spec| *spec == "-").count() > 1 {
        return Err(StorageError::invalid_source(
            "standard input (-) is named twice but can be listed only once",
        ));
    }
    let listings = specs.iter().map(|spec| match spec.as_str() {
        "-" => Ok(Box::new(standard_input()) as Box<dyn Listing>),
        spec => open(spec, options),
    });
    let listings = listings.collect::<Result<_, _>>()?;
    Ok(Arc::new(LocalSource::new(specs, listings, options.clone())))
}

fn open(spec: &str, options: &SourceOptions) -> Result<Box<dyn Listing>, StorageError> {
    if spec.is_empty() {
        return Err(StorageError::invalid_source(
            "a source is empty; name a file or a folder",
        ));
    }
    if remote_scheme(spec) == Some("s3") {
        return open_s3(spec, options);
    }
    if let Some(scheme) = remote_scheme(spec) {
        let reason = not_read(spec, scheme);
        return Err(StorageError::invalid_source(format!("source {reason}")));
    }
    let path = to_path(spec);
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => Ok(Box::new(Folder::open(&path, options)?)),
        Ok(metadata) => open_file(&path, &metadata, options),
        // A link that leads nowhere is an image that fails, not a spelling mistake.
        Err(_) if path.is_symlink() => Ok(Box::new(SingleFile::new(&path))),
        Err(_) if Pattern::is_pattern(spec) => Ok(Box::new(Folder::matching(spec, options)?)),
        Err(error) => Err(StorageError::source(&path, error)),
    }
}

/// Suffixes of lists and archives that are not read, so that such a file is not taken for an image.
const NOT_READ: [&str; 22] = [
    "tsv", "json", "xls", "xlsx", "ods", "yaml", "yml", "xml", "toml", "arrow", "feather", "avro",
    "orc", "db", "sqlite", "tfrecord", "npz", "hdf5", "h5", "zip", "rar", "7z",
];

fn open_file(
    path: &Path,
    metadata: &Metadata,
    options: &SourceOptions,
) -> Result<Box<dyn Listing>, StorageError> {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_ascii_lowercase();
    let suffix = name.rsplit_once('.').map_or("", |(_, suffix)| suffix);
    if is_image_suffix(suffix) {
        return Ok(Box::new(SingleFile::new(path)));
    }
    let refused = |reason: &str| {
        Err(StorageError::invalid_source(format!(
            "source {}: {reason}",
            path.display()
        )))
    };
    if !metadata.is_file() {
        return refused("it is a pipe, socket or device; pipe a list of paths to `-` instead");
    }
    let list = open_list(&path.into(), suffix, options)?;
    Ok(list.unwrap_or_else(|| Box::new(SingleFile::new(path))))
}

/// Opens what a uri in S3 names: the list or archive of this key, or all objects whose keys begin
/// like this.
fn open_s3(spec: &str, options: &SourceOptions) -> Result<Box<dyn Listing>, StorageError> {
    let suffix = spec.rsplit_once('.').map_or("", |(_, suffix)| suffix);
    let suffix = suffix.to_ascii_lowercase();
    if let Some(place) = Location::parse(spec).filter(|_| is_list_suffix(&suffix)) {
        let s3 = S3::new(&options.s3);
        let is_inventory = Inventory::is_manifest(&place.key);
        if let Some(stored) = Stored::object(&s3, place)? {
            if is_inventory {
                return Ok(Box::new(Inventory::open(&s3, &stored)?));
            }
            if let Some(list) = open_list(&stored, &suffix, options)? {
                return Ok(list);
            }
        }
    }
    Ok(Box::new(S3Prefix::open(spec, options)?))
}

const COMPRESSED: [&str; 8] = ["gz", "bz2", "xz", "zst", "tgz", "tbz2", "txz", "tzst"];
const LISTS: [&str; 6] = ["txt", "csv", "jsonl", "ndjson", "parquet", "tar"];

fn is_list_suffix(suffix: &str) -> bool {
    LISTS.contains(&suffix) || COMPRESSED.contains(&suffix) || NOT_READ.contains(&suffix)
}

/// Opens a list or an archive; `None` if its suffix is that of neither.
fn open_list(
    stored: &Stored,
    suffix: &str,
    options: &SourceOptions,
) -> Result<Option<Box<dyn Listing>>, StorageError> {
    let refused = |reason: &str| {
        Err(StorageError::invalid_source(format!(
            "source {stored}: {reason}"
        )))
    };
    Ok(Some(match suffix {
        "txt" => Box::new(LineManifest::open(stored, options)?),
        "csv" => Box::new(CsvManifest::open(stored, options)?),
        "jsonl" | "ndjson" => Box::new(JsonManifest::open(stored, options)?),
        "parquet" => Box::new(ParquetFile::open(stored, options)?),
        "tar" => Box::new(Archive::open(stored, options)?),
        _ if COMPRESSED.contains(&suffix) => {
            return refused(
                "it is compressed, so what is in it cannot be read by byte range; decompress it first",
            );
        }
        _ if NOT_READ.contains(&suffix) => {
            return refused(
                "no source of this kind is read; turn it into a .txt, .csv, .jsonl, .parquet or .tar",
            );
        }
        _ => return Ok(None),
    }))
}
