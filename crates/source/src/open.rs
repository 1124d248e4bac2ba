//! Opens the sources given by a user.

use std::fs::Metadata;
use std::path::Path;

use trommel_storage::{
    StorageError, StorageErrorKind, background,
    cloud::CloudLocation,
    http::HttpUrl,
    uri::{self, remote_scheme, to_path},
};
use trommel_types::Content;

use crate::archive::Archive;
use crate::cloud_prefix::CloudPrefix;
use crate::csv_manifest::CsvManifest;
use crate::file::SingleFile;
use crate::folder::Folder;
use crate::inventory::Inventory;
use crate::json_manifest::JsonManifest;
use crate::kinds::Kind;
use crate::line_manifest::LineManifest;
use crate::listing::{Listing, Stop, Visitor};
use crate::manifest::not_read;
use crate::parquet_file::ParquetFile;
use crate::pattern::Pattern;
use crate::s3_prefix::S3Prefix;
use crate::stored::Stored;
use crate::stores::Stores;
use crate::video::Video;
use crate::{Found, SourceOptions};

type Opened = Result<Box<dyn Listing>, StorageError>;

/// Opens a spec: one listing, or one for each list or archive that a pattern matches.
pub(super) fn open(
    spec: &str,
    stores: &Stores,
    options: &SourceOptions,
    listings: &mut Vec<Box<dyn Listing>>,
) -> Result<(), StorageError> {
    if spec.is_empty() {
        return Err(StorageError::invalid_source(
            "a source is empty; name a file or a folder",
        ));
    }
    if HttpUrl::is_url(spec) {
        listings.push(open_web(spec, stores, options)?);
        return Ok(());
    }
    if remote_scheme(spec) == Some("s3") {
        return open_bucket(spec, None, stores, options, listings);
    }
    if let Some(place) = CloudLocation::parse(spec) {
        return open_bucket(spec, Some(place), stores, options, listings);
    }
    if let Some(scheme) = remote_scheme(spec) {
        let reason = not_read(spec, scheme);
        return Err(StorageError::invalid_source(format!("source {reason}")));
    }
    let path = to_path(spec);
    let is_pattern = || Pattern::is_pattern(spec);
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => {
            listings.push(Box::new(Folder::open(&path, options)?));
        }
        Ok(metadata) => listings.push(open_file(&path, &metadata, options)?),
        // A dangling link is an image that fails, not a typing error.
        Err(_) if path.is_symlink() => listings.push(Box::new(SingleFile::new(&path))),
        Err(_) if is_pattern() && Kind::of(spec).is_list() => {
            for path in Folder::matches(spec, options)? {
                let allowed = options.rule.check(&uri::of_path(&path));
                allowed.map_err(StorageError::denied)?;
                let metadata = path.metadata();
                let metadata = metadata.map_err(|error| StorageError::source(&path, error))?;
                listings.push(open_file(&path, &metadata, options)?);
            }
        }
        Err(_) if is_pattern() => listings.push(Box::new(Folder::matching(spec, options)?)),
        Err(error) => return Err(StorageError::source(&path, error)),
    }
    Ok(())
}

fn open_file(path: &Path, metadata: &Metadata, options: &SourceOptions) -> Opened {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let kind = Kind::of(&name);
    if !metadata.is_file() && !crate::options::has_image_suffix(&name) {
        return Err(StorageError::invalid_source(format!(
            "source {}: it is a pipe, socket or device; pipe a list of paths to `-` instead",
            path.display()
        )));
    }
    match kind {
        Kind::Image => Ok(Box::new(SingleFile::new(path))),
        kind => open_list(&path.into(), kind, options),
    }
}

/// Opens a uri in S3, or in the cloud store of `place`: the list or archive with this key, all
/// objects whose keys have this prefix, or those that match a pattern.
fn open_bucket(
    spec: &str,
    place: Option<CloudLocation>,
    stores: &Stores,
    options: &SourceOptions,
    listings: &mut Vec<Box<dyn Listing>>,
) -> Result<(), StorageError> {
    let kind = Kind::of(spec);
    if kind != Kind::Image {
        if let Some(stored) = Stored::object(stores, spec)? {
            listings.push(match Inventory::is_manifest(spec) {
                true => Box::new(Inventory::open(stores, &stored)?),
                false => open_list(&stored, kind, options)?,
            });
            return Ok(());
        }
        if kind.is_list() && Pattern::is_pattern(spec) {
            let uris = match &place {
                Some(place) => CloudPrefix::matches(place, stores)?,
                None => S3Prefix::matches(spec, stores)?,
            };
            for uri in uris {
                options.rule.check(&uri).map_err(StorageError::denied)?;
                let stored = Stored::at(stores, &uri)?;
                listings.push(open_list(&stored, kind, options)?);
            }
            return Ok(());
        }
    }
    listings.push(match place {
        Some(place) => CloudPrefix::open(place, stores, options)?,
        None => S3Prefix::open(spec, stores, options)?,
    });
    Ok(())
}

/// Opens a url: a list or an archive by its suffix, else an image.
fn open_web(spec: &str, stores: &Stores, options: &SourceOptions) -> Opened {
    let refused = |reason: &str| {
        let message = format!("source {spec}: {reason}");
        StorageError::invalid_source(message)
    };
    let url = HttpUrl::parse(spec).map_err(|reason| refused(&reason))?;
    let kind = Kind::of(url.path());
    if kind == Kind::Image {
        let looked = background::wait(stores.http.look(&url))?;
        return Ok(Box::new(WebImage(Found {
            uri: spec.to_owned(),
            content: Content::Whole,
            etag: looked.etag,
            size: looked.size,
            columns: Vec::new(),
        })));
    }
    let stored = Stored::object(stores, spec)?;
    let stored = stored.ok_or_else(|| refused("the object does not exist"))?;
    open_list(&stored, kind, options)
}

/// One image on the web, in the version found when it was opened.
struct WebImage(Found);

impl Listing for WebImage {
    fn list(&self, _: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        visitor.found(self.0.clone())
    }
}

/// Opens a list or an archive.
fn open_list(stored: &Stored, kind: Kind, options: &SourceOptions) -> Opened {
    let refused = |reason: &str| {
        let message = format!("source {stored}: {reason}");
        Err(StorageError::new(StorageErrorKind::InvalidSource, message))
    };
    Ok(match kind {
        Kind::Lines => Box::new(LineManifest::open(stored, options)?),
        Kind::Csv => Box::new(CsvManifest::open(stored, b',', options)?),
        Kind::Tsv => Box::new(CsvManifest::open(stored, b'\t', options)?),
        Kind::Json => Box::new(JsonManifest::array(stored, options)?),
        Kind::JsonLines => Box::new(JsonManifest::lines(stored, options)?),
        Kind::Parquet => Box::new(ParquetFile::open(stored, options)?),
        Kind::Archive => Box::new(Archive::open(stored, options)?),
        Kind::Video => Box::new(Video::open(stored, options)?),
        Kind::Compressed => {
            return refused(
                "unsupported compression; decompress it first, or make it a .tar.gz, .tar.zst, .zip, .csv.gz or .jsonl.gz",
            );
        }
        Kind::NotRead | Kind::Image => {
            return refused(
                "no source of this kind is read; turn it into a .txt, .csv, .tsv, .json, .jsonl, .parquet, .tar, .zip or .mp4",
            );
        }
    })
}
