//! The bytes of single images.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use trommel_types::{Content, ImageRef};

use crate::s3::{Location, S3};
use crate::source::manifest::not_read;
use crate::source::parquet_cell::CellReader;
use crate::uri::{remote_scheme, to_path};
use crate::{S3Config, StorageError, StorageErrorKind};

/// Reads images, on this machine or in S3.
pub(super) struct Fetcher {
    cells: Arc<CellReader>,
    s3: S3,
}

impl Fetcher {
    pub(super) fn new(s3: &S3Config) -> Self {
        let s3 = S3::new(s3);
        Self {
            cells: Arc::new(CellReader::new(&s3)),
            s3,
        }
    }

    pub(super) async fn fetch(&self, image: &ImageRef, limit: u64) -> Result<Bytes, StorageError> {
        if let Content::Inline(bytes) = &image.content {
            check_size(&image.uri, bytes.len() as u64, limit)?;
            return filled(&image.uri, bytes.clone());
        }
        if let Some((object, range)) = in_s3(image) {
            let bytes = self.s3.fetch(object, range, limit).await?;
            return if bytes.is_empty() {
                Err(empty(&image.uri))
            } else {
                Ok(bytes)
            };
        }
        let cells = Arc::clone(&self.cells);
        let (uri, content) = (image.uri.clone(), image.content.clone());
        let read = tokio::task::spawn_blocking(move || {
            let bytes = match content {
                Content::Inline(bytes) => bytes,
                Content::Whole => whole(&uri, limit)?,
                Content::Range {
                    archive,
                    offset,
                    length,
                } => range(&uri, &to_path(&archive), offset, length, limit)?,
                Content::ParquetCell { file, column, row } => {
                    cells.read(&uri, &file, &column, row, limit)?
                }
            };
            filled(&uri, bytes)
        });
        read.await.unwrap_or_else(|_| {
            let message = format!("failed to read {}: the reading thread ended", image.uri);
            Err(StorageError::new(StorageErrorKind::Unreadable, message))
        })
    }
}

/// The object of an image, and the part of it that is the image, if it is in S3.
fn in_s3(image: &ImageRef) -> Option<(Location, Option<(u64, u64)>)> {
    match &image.content {
        Content::Whole => Some((Location::parse(&image.uri)?, None)),
        Content::Range {
            archive,
            offset,
            length,
        } => Some((Location::parse(archive)?, Some((*offset, *length)))),
        Content::ParquetCell { .. } | Content::Inline(_) => None,
    }
}

fn whole(uri: &str, limit: u64) -> Result<Vec<u8>, StorageError> {
    if let Some(scheme) = remote_scheme(uri) {
        let message = format!("failed to read {}", not_read(uri, scheme));
        return Err(StorageError::new(StorageErrorKind::NotAFile, message));
    }
    let failed = |error| StorageError::read(uri, error);
    let path = to_path(uri);
    // Looked at before it is opened: opening a pipe would wait for its writer.
    let metadata = path.metadata().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => failed(error),
        _ if path.is_symlink() => {
            let message = format!("failed to read {uri}: the link leads nowhere ({error})");
            StorageError::new(StorageErrorKind::NotFound, message)
        }
        _ => failed(error),
    })?;
    if metadata.is_dir() {
        path.read_dir().map_err(failed)?;
        return Err(not_a_file(uri, "a folder"));
    }
    if !metadata.is_file() {
        return Err(not_a_file(uri, "a pipe, socket or device"));
    }
    let mut bytes = room_for(uri, metadata.len(), limit)?;
    // One more byte than allowed tells a file that has grown.
    let file = File::open(&path).map_err(failed)?;
    file.take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    check_size(uri, bytes.len() as u64, limit)?;
    Ok(bytes)
}

fn range(
    uri: &str,
    archive: &Path,
    offset: u64,
    length: u64,
    limit: u64,
) -> Result<Vec<u8>, StorageError> {
    let mut bytes = room_for(uri, length, limit)?;
    bytes.resize(length as usize, 0);
    let file = File::open(archive).map_err(|error| StorageError::read(uri, error))?;
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            let end = "cut off: its archive ends before it does";
            Err(not_a_file(uri, end))
        }
        Err(error) => Err(StorageError::read(uri, error)),
    }
}

/// Memory for an image, if it is allowed and there is so much.
fn room_for(uri: &str, size: u64, limit: u64) -> Result<Vec<u8>, StorageError> {
    check_size(uri, size, limit)?;
    let mut bytes = Vec::new();
    match usize::try_from(size).map(|size| bytes.try_reserve_exact(size)) {
        Ok(Ok(())) => Ok(bytes),
        _ => {
            let message = format!("{uri} holds {size} bytes, for which there is no memory");
            Err(StorageError::new(StorageErrorKind::TooLarge, message))
        }
    }
}

fn check_size(uri: &str, size: u64, limit: u64) -> Result<(), StorageError> {
    if size > limit {
        return Err(StorageError::too_large(uri, size, limit));
    }
    Ok(())
}

fn filled(uri: &str, bytes: Vec<u8>) -> Result<Bytes, StorageError> {
    if bytes.is_empty() {
        return Err(empty(uri));
    }
    Ok(bytes.into())
}

fn empty(uri: &str) -> StorageError {
    StorageError::new(StorageErrorKind::Empty, format!("{uri} holds no bytes"))
}

fn not_a_file(uri: &str, what: &str) -> StorageError {
    StorageError::new(
        StorageErrorKind::NotAFile,
        format!("failed to read {uri}: it is {what}"),
    )
}
