//! Where images come from: folders, S3 and other clouds, the web, lists, archives and videos.
//!
//! A [`Source`] lists images as [`Found`]s, in the same order every time, and fetches the bytes of
//! each.
//!
//! Guarantees. Listing holds the names of one folder a level, never of a whole tree, and a listing
//! that is cut short ends in an error.
//!
//! Deliberately absent: retries and queues, which are the worker's, and any knowledge of what the
//! images show.
//!
//! ```no_run
//! use futures::StreamExt;
//! use trommel_source::{SourceOptions, open_source};
//!
//! # async fn example() -> Result<(), trommel_storage::StorageError> {
//! let source = open_source(&["photos".to_owned()], &SourceOptions::default())?;
//! let mut listing = source.list();
//! while let Some(found) = listing.next().await {
//!     println!("{}", found?.uri);
//! }
//! # Ok(())
//! # }
//! ```

mod archive;
mod camera;
mod cloud_prefix;
mod csv_manifest;
mod csv_records;
mod fetch;
mod ffmpeg;
mod file;
mod folder;
mod frames;
mod inventory;
mod json_array;
mod json_fields;
mod json_manifest;
mod keys;
mod kinds;
mod line_manifest;
mod lines;
mod listing;
mod local;
mod loopback;
mod manifest;
mod member;
mod open;
mod options;
mod packed;
mod parquet_cell;
mod parquet_file;
mod parquet_pages;
mod parquet_text;
mod parquet_value;
mod pattern;
mod s3_prefix;
mod stored;
mod stores;
mod streams;
mod tar_members;
mod union;
mod video;
mod zip_member;
mod zip_members;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use trommel_storage::StorageError;
use trommel_types::{Column, Content, ImageRef, Scalar};

pub use self::camera::{Camera, CameraConfig};
pub use self::ffmpeg::{Ffmpeg, Killer, VideoConfig};
use self::kinds::{Kind, packing_of};
use self::line_manifest::LineManifest;
use self::listing::Listing;
use self::local::LocalSource;
pub use self::options::{NOT_IN_THIS_BUILD, SourceOptions};
use self::stores::Stores;

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

/// What fetching an image may cost.
#[derive(Debug, Clone, Copy)]
pub struct FetchLimits {
    /// Most encoded bytes.
    pub bytes: u64,
    /// Longest time, not counting the wait for a free connection.
    pub time: Duration,
}

/// The bytes of an image.
#[derive(Debug, Clone)]
pub struct Fetched {
    /// As they are stored.
    pub bytes: Bytes,
    /// Time that reading took, without what was spent waiting for a thread, a connection or other
    /// readers of the same file.
    pub took: Duration,
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

    /// Counts the images by a separate listing, which may run in parallel with another. Not for standard
    /// input.
    ///
    /// # Errors
    /// Those that end the listing.
    async fn count(&self) -> Result<u64, StorageError>;

    /// Lists the images behind the first `passed`, of which `last_uri` was the last.
    ///
    /// A single S3 prefix goes on behind that key; everything else is listed again from its
    /// beginning, and the stream fails with [`SourceChanged`](trommel_storage::StorageErrorKind::SourceChanged)
    /// where another image stands there now.
    fn list_from(
        &self,
        passed: u64,
        last_uri: Option<String>,
    ) -> BoxStream<'static, Result<Found, StorageError>>;

    /// Reads the bytes of an image. Never blocks an async thread.
    ///
    /// # Errors
    /// When there is no such image, it was changed since it was listed, it cannot be read, holds
    /// nothing, is larger or takes longer than it may.
    async fn fetch_within(
        &self,
        image: &ImageRef,
        limits: FetchLimits,
    ) -> Result<Fetched, StorageError>;

    /// Reads the bytes of an image, at most `limit` of them, however long it takes.
    ///
    /// # Errors
    /// As [`Source::fetch_within`].
    async fn fetch(&self, image: &ImageRef, limit: u64) -> Result<Bytes, StorageError> {
        let limits = FetchLimits {
            bytes: limit,
            time: Duration::MAX,
        };
        Ok(self.fetch_within(image, limits).await?.bytes)
    }

    /// Threads still reading for callers that have given up.
    fn hung(&self) -> usize {
        0
    }

    /// Files that the last listing has passed over by suffix or size.
    fn skipped(&self) -> u64;
}

/// Opens what a user named, one source after another. The columns are those of all, in order of
/// first appearance; an image of a source without one of them has null there.
///
/// A source is a file, a folder, a pattern such as `photos/**/*.jpg`, a manifest (`.txt`, `.csv`,
/// `.tsv`, `.json`, `.jsonl`, `.parquet`), an archive (`.tar`, `.tar.gz`, `.tar.zst`, `.zip`), a video,
/// `s3://bucket/prefix`, `gs://bucket/prefix` and `az://container/prefix` in builds that have them,
/// `https://host/path`, any of these lists, archives and videos in a bucket or on the web,
/// the `manifest.json` of an S3 Inventory, or `-` for a list of paths on standard input. Of a pattern
/// that matches lists or archives, each is a source. Blocking: folders are looked through for a first
/// image, manifests read from their beginning, JSON once in whole.
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
    let stores = Stores::new(options);
    Arc::new(LocalSource::new(&[], Vec::new(), &stores, options.clone()))
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
    if let Some(suffix) = options.suffixes.iter().flatten().find(|suffix| {
        let name = format!("x.{}", suffix.trim().trim_start_matches('.'));
        Kind::of(&name).is_list() || packing_of(&name).is_some()
    }) {
        return Err(StorageError::invalid_source(format!(
            "--suffixes {suffix}: lists, archives and videos are separate sources; name them, as in 'FOLDER/*.{suffix}'"
        )));
    }
    let stores = Stores::new(options);
    let mut listings = Vec::new();
    for spec in specs {
        match spec.as_str() {
            "-" => listings.push(Box::new(standard_input()) as Box<dyn Listing>),
            spec => open::open(spec, &stores, options, &mut listings)?,
        }
    }
    Ok(Arc::new(LocalSource::new(
        specs,
        listings,
        &stores,
        options.clone(),
    )))
}
