//! Where images come from: folders, S3 and other clouds, the web, lists, archives and videos.
//!
//! A [`Source`] lists images as [`Found`]s, in the same order every time, and fetches their bytes.
//!
//! Guarantees. Listing holds the names of one folder per level, never of a whole tree, and an
//! incomplete listing ends in an error.
//!
//! Deliberately absent: retries and queues, which belong to the worker, and any knowledge of the
//! images' content.
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
    /// Its uri, as shown in rows.
    pub uri: String,
    /// Where in the object the image is.
    pub content: Content,
    /// The store's version of the object.
    pub etag: Option<String>,
    /// Encoded size in bytes.
    pub size: Option<u64>,
    /// Values of the source's columns, in their order.
    pub columns: Vec<Scalar>,
}

/// Limits for fetching an image.
#[derive(Debug, Clone, Copy)]
pub struct FetchLimits {
    /// Largest encoded size in bytes.
    pub bytes: u64,
    /// Time limit, not counting the wait for a free connection.
    pub time: Duration,
}

/// The bytes of an image.
#[derive(Debug, Clone)]
pub struct Fetched {
    /// The stored bytes.
    pub bytes: Bytes,
    /// Time spent reading, without waits for a thread, a connection or other readers of the same
    /// file.
    pub took: Duration,
}

/// A source of images.
#[async_trait]
pub trait Source: Send + Sync {
    /// A description, which is part of a job's identity.
    fn describe(&self) -> String;

    /// The pass-through columns of every image.
    fn columns(&self) -> &[Column];

    /// Lists the images, in the same order every time unless something changes. Dropping the stream
    /// ends the listing. Standard input can be listed once.
    fn list(&self) -> BoxStream<'static, Result<Found, StorageError>>;

    /// Counts the images in a separate listing, which may run in parallel with another. Not for
    /// standard input.
    ///
    /// # Errors
    /// Those that end the listing.
    async fn count(&self) -> Result<u64, StorageError>;

    /// Lists the images after the first `passed`, the last of which was `last_uri`.
    ///
    /// A single S3 prefix continues after that key; all other sources are listed again from the
    /// beginning, and the stream fails with
    /// [`SourceChanged`](trommel_storage::StorageErrorKind::SourceChanged) if another image is at
    /// that position now.
    fn list_from(
        &self,
        passed: u64,
        last_uri: Option<String>,
    ) -> BoxStream<'static, Result<Found, StorageError>>;

    /// Reads the bytes of an image. Never blocks an async thread.
    ///
    /// # Errors
    /// If the image does not exist, has changed since it was listed, cannot be read, is empty, or
    /// exceeds the size or time limit.
    async fn fetch_within(
        &self,
        image: &ImageRef,
        limits: FetchLimits,
    ) -> Result<Fetched, StorageError>;

    /// Reads the bytes of an image, at most `limit` of them, without a time limit.
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

    /// Threads still reading for callers that gave up.
    fn hung(&self) -> usize {
        0
    }

    /// Files that the last listing skipped by suffix or size.
    fn skipped(&self) -> u64;
}

/// Opens the sources given by a user, in order. The columns are those of all sources, in order of
/// first appearance; images of a source without a column have null there.
///
/// A source is a file, a folder, a pattern such as `photos/**/*.jpg`, a manifest (`.txt`, `.csv`,
/// `.tsv`, `.json`, `.jsonl`, `.parquet`), an archive (`.tar`, `.tar.gz`, `.tar.zst`, `.zip`), a
/// video, `s3://bucket/prefix`, `gs://bucket/prefix` and `az://container/prefix` in builds that
/// support them, `https://host/path`, any of these lists, archives and videos in a bucket or on the
/// web, the `manifest.json` of an S3 Inventory, or `-` for a list of paths on standard input. A
/// pattern that matches lists or archives opens each of them. Blocking: it searches folders for a
/// first image, reads the start of manifests, and reads JSON once completely.
///
/// # Errors
/// If one does not exist, cannot be read, or is of an unsupported kind.
pub fn open_source(
    specs: &[String],
    options: &SourceOptions,
) -> Result<Arc<dyn Source>, StorageError> {
    open_all(specs, options, LineManifest::standard_input)
}

/// Reads images listed by another process; lists nothing itself.
pub fn fetcher(options: &SourceOptions) -> Arc<dyn Source> {
    let stores = Stores::new(options);
    Arc::new(LocalSource::new(&[], Vec::new(), &stores, options.clone()))
}

/// Opens sources; `standard_input` opens `-`.
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
