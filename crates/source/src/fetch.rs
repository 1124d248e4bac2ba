//! The bytes of single images.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use tokio::time::timeout;
use trommel_storage::{
    StorageError, StorageErrorKind,
    uri::{remote_scheme, to_path},
};
use trommel_types::{Content, ImageRef};

use crate::file::etag;
use crate::frames::{Frame, Frames};
use crate::manifest::not_read;
use crate::parquet_cell::{CellReader, Image};
use crate::stores::{Remote, Stores};
use crate::streams::{Streams, Wanted};
use crate::zip_member::ZipMember;
use crate::{FetchLimits, Fetched, VideoConfig};

/// Reads images from this machine, S3 or the web.
pub(super) struct Fetcher {
    cells: Arc<CellReader>,
    streams: Streams,
    frames: Frames,
    stores: Stores,
    hung: Arc<AtomicUsize>,
}

impl Fetcher {
    pub(super) fn new(stores: &Stores, video: &VideoConfig) -> Self {
        Self {
            cells: Arc::new(CellReader::new(stores)),
            streams: Streams::new(stores),
            frames: Frames::new(stores, video),
            stores: stores.clone(),
            hung: Arc::default(),
        }
    }

    /// Threads still reading for callers that gave up.
    pub(super) fn hung(&self) -> usize {
        self.hung.load(Ordering::Relaxed)
    }

    pub(super) async fn fetch(
        &self,
        image: &ImageRef,
        limits: FetchLimits,
    ) -> Result<Fetched, StorageError> {
        match &image.content {
            Content::Inline(bytes) => {
                check_size(&image.uri, bytes.len() as u64, limits.bytes)?;
                filled(&image.uri, bytes.clone(), Instant::now())
            }
            Content::Unpacked {
                archive,
                packing,
                offset,
                length,
            } => {
                check_size(&image.uri, *length, limits.bytes)?;
                if *length == 0 {
                    return Err(empty(&image.uri));
                }
                let wanted = Wanted {
                    uri: image.uri.clone(),
                    archive: archive.clone(),
                    packing: *packing,
                    etag: image.etag.clone(),
                    offset: *offset,
                    length: *length,
                };
                let (bytes, took) = self.streams.read(&wanted, limits.time).await?;
                Ok(Fetched { bytes, took })
            }
            Content::Frame {
                video,
                rate,
                number,
            } => {
                let frame = Frame {
                    uri: image.uri.clone(),
                    video: video.clone(),
                    etag: image.etag.clone(),
                    rate: *rate,
                    number: *number,
                };
                self.frames.read(&frame, limits).await
            }
            Content::ParquetCell { .. } => self.blocking(image, limits).await,
            Content::Whole | Content::Range { .. } | Content::ZipMember { .. } => {
                let uri = image.content.container().unwrap_or(&image.uri);
                match Remote::parse(uri)? {
                    Some(place) => self.remote(image, &place, limits).await,
                    None => self.blocking(image, limits).await,
                }
            }
        }
    }

    /// Reads an object in a store.
    async fn remote(
        &self,
        image: &ImageRef,
        place: &Remote,
        limits: FetchLimits,
    ) -> Result<Fetched, StorageError> {
        let get = |range, limit, time| {
            let etag = image.etag.clone();
            self.stores.fetch(place, range, etag, limit, time)
        };
        let member = ZipMember::of(&image.uri, &image.content, limits.bytes)?;
        let Some(member) = member else {
            let range = match &image.content {
                Content::Range { offset, length, .. } => Some((*offset, *length)),
                _ => None,
            };
            let (bytes, took) = get(range, limits.bytes, limits.time).await?;
            return match bytes.is_empty() {
                true => Err(empty(&image.uri)),
                false => Ok(Fetched { bytes, took }),
            };
        };
        if member.is_empty() {
            return Err(empty(&image.uri));
        }
        let first = member.first_range();
        let (mut bytes, mut took) = get(Some(first), first.1, limits.time).await?;
        if let Some(rest) = member.rest(&image.uri, &bytes)? {
            let left = limits.time.saturating_sub(took);
            let (more, also_took) = get(Some(rest), rest.1, left).await?;
            bytes = [bytes, more].concat().into();
            took += also_took;
        }
        let uri = image.uri.clone();
        let unpack = tokio::task::spawn_blocking(move || member.unpack(&uri, &bytes));
        let bytes = unpack.await.unwrap_or_else(|_| Err(ended(&image.uri)))?;
        Ok(Fetched {
            bytes: bytes.into(),
            took,
        })
    }

    /// Reads a local file, on a thread that may block.
    async fn blocking(
        &self,
        image: &ImageRef,
        limits: FetchLimits,
    ) -> Result<Fetched, StorageError> {
        let cells = Arc::clone(&self.cells);
        let (uri, content) = (image.uri.clone(), image.content.clone());
        let etag = image.etag.clone();
        let waiter = Watched::new(&self.hung);
        let reader = waiter.reader();
        let read = tokio::task::spawn_blocking(move || {
            let _reader = reader;
            let version = etag.as_deref();
            read_local(&cells, &uri, &content, version, limits.bytes)
        });
        let read = match timeout(limits.time, read).await {
            Ok(read) => read,
            Err(_) => return Err(StorageError::timed_out(&image.uri, limits.time)),
        };
        drop(waiter);
        read.unwrap_or_else(|_| Err(ended(&image.uri)))
    }
}

/// Reads a local image, or a cell from anywhere. Blocking.
fn read_local(
    cells: &CellReader,
    uri: &str,
    content: &Content,
    etag: Option<&str>,
    limit: u64,
) -> Result<Fetched, StorageError> {
    let start = Instant::now();
    let bytes = match content {
        Content::ParquetCell { file, column, row } => {
            let image = Image { uri, etag, limit };
            let (bytes, start) = cells.read(image, file, column, *row)?;
            return filled(uri, bytes, start);
        }
        Content::Range {
            archive,
            offset,
            length,
        } => range(uri, &to_path(archive), (*offset, *length), etag, limit)?,
        Content::ZipMember { archive, .. } => zip_member(uri, archive, content, etag, limit)?,
        // The others are read elsewhere.
        _ => whole(uri, etag, limit)?,
    };
    filled(uri, bytes, start)
}

fn zip_member(
    uri: &str,
    archive: &str,
    content: &Content,
    etag: Option<&str>,
    limit: u64,
) -> Result<Vec<u8>, StorageError> {
    let Some(member) = ZipMember::of(uri, content, limit)? else {
        return Err(not_a_file(uri, "no member of a zip"));
    };
    if member.is_empty() {
        return Ok(Vec::new());
    }
    let path = to_path(archive);
    let first = member.first_range();
    let mut bytes = range(uri, &path, first, etag, first.1)?;
    if let Some(rest) = member.rest(uri, &bytes)? {
        bytes.extend(range(uri, &path, rest, etag, rest.1)?);
    }
    member.unpack(uri, &bytes)
}

fn ended(uri: &str) -> StorageError {
    let message = format!("failed to read {uri}: the reading thread ended");
    StorageError::new(StorageErrorKind::Unreadable, message)
}

/// The two sides of a blocking read: the waiting caller and the reading thread. A thread that
/// continues after its caller gave up is counted.
struct Watched {
    /// Whether one side is gone.
    gone: Arc<AtomicBool>,
    hung: Arc<AtomicUsize>,
    is_reader: bool,
}

impl Watched {
    /// The waiting side.
    fn new(hung: &Arc<AtomicUsize>) -> Self {
        Self {
            gone: Arc::default(),
            hung: Arc::clone(hung),
            is_reader: false,
        }
    }

    /// The reading side.
    fn reader(&self) -> Self {
        Self {
            gone: Arc::clone(&self.gone),
            hung: Arc::clone(&self.hung),
            is_reader: true,
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.is_reader {
            self.hung.fetch_add(1, Ordering::Relaxed);
        }
        let is_last = self.gone.swap(true, Ordering::AcqRel);
        // Whichever side ends last undoes the count.
        if is_last {
            self.hung.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn whole(uri: &str, listed: Option<&str>, limit: u64) -> Result<Vec<u8>, StorageError> {
    if let Some(scheme) = remote_scheme(uri) {
        let message = format!("failed to read {}", not_read(uri, scheme));
        return Err(StorageError::new(StorageErrorKind::NotAFile, message));
    }
    let failed = |error| StorageError::read(uri, error);
    let path = to_path(uri);
    // Checked before opening: opening a pipe would wait for its writer.
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
    let file = File::open(&path).map_err(failed)?;
    check_version(uri, &file, listed)?;
    // One byte more than allowed detects a file that has grown.
    (&file)
        .take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    check_version(uri, &file, listed)?;
    check_size(uri, bytes.len() as u64, limit)?;
    Ok(bytes)
}

/// Refuses a file that is not the listed version; checked before and after reading, so that no
/// change in between is missed.
fn check_version(uri: &str, file: &File, listed: Option<&str>) -> Result<(), StorageError> {
    let Some(listed) = listed else { return Ok(()) };
    let metadata = file
        .metadata()
        .map_err(|error| StorageError::read(uri, error))?;
    match etag(&metadata) {
        Some(found) if found != listed => Err(StorageError::changed(uri)),
        _ => Ok(()),
    }
}

fn range(
    uri: &str,
    archive: &Path,
    (offset, length): (u64, u64),
    listed: Option<&str>,
    limit: u64,
) -> Result<Vec<u8>, StorageError> {
    let mut bytes = room_for(uri, length, limit)?;
    bytes.resize(length as usize, 0);
    let file = File::open(archive).map_err(|error| StorageError::read(uri, error))?;
    check_version(uri, &file, listed)?;
    match file.read_exact_at(&mut bytes, offset) {
        Ok(()) => {
            check_version(uri, &file, listed)?;
            Ok(bytes)
        }
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            let end = "cut off: its archive ends before it does";
            Err(not_a_file(uri, end))
        }
        Err(error) => Err(StorageError::read(uri, error)),
    }
}

/// Memory for an image, if allowed and available.
fn room_for(uri: &str, size: u64, limit: u64) -> Result<Vec<u8>, StorageError> {
    check_size(uri, size, limit)?;
    let mut bytes = Vec::new();
    match usize::try_from(size).map(|size| bytes.try_reserve_exact(size)) {
        Ok(Ok(())) => Ok(bytes),
        _ => {
            let message = format!("{uri} holds {size} bytes, more than the available memory");
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

fn filled(uri: &str, bytes: Vec<u8>, start: Instant) -> Result<Fetched, StorageError> {
    if bytes.is_empty() {
        return Err(empty(uri));
    }
    Ok(Fetched {
        bytes: bytes.into(),
        took: start.elapsed(),
    })
}

fn empty(uri: &str) -> StorageError {
    StorageError::new(StorageErrorKind::Empty, format!("{uri} is empty"))
}

fn not_a_file(uri: &str, what: &str) -> StorageError {
    StorageError::new(
        StorageErrorKind::NotAFile,
        format!("failed to read {uri}: it is {what}"),
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use trommel_types::Lane;

    use super::*;
    use crate::SourceOptions;

    /// R20 and R42: a hanging read fails its image after the time limit, is counted while it hangs,
    /// and does not block other files.
    #[tokio::test]
    #[allow(clippy::await_holding_lock, reason = "it is what hangs")]
    async fn a_read_that_hangs_is_given_up_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("t.parquet").to_str().unwrap().to_owned();
        let other = folder.path().join("u.parquet").to_str().unwrap().to_owned();
        let options = SourceOptions::default();
        let fetcher = Fetcher::new(&Stores::new(&options), &options.video);
        let cell = |file: &str| ImageRef {
            job: "job".into(),
            index: 0,
            lane: Lane::Normal,
            uri: format!("{file}#0"),
            content: Content::ParquetCell {
                file: file.to_owned(),
                column: "jpeg".to_owned(),
                row: 0,
            },
            etag: None,
            size: None,
            columns: Vec::new(),
        };
        let limits = |time| FetchLimits { bytes: 100, time };
        let cells = Arc::clone(&fetcher.cells);
        let hanging = cells.shared(&file, "jpeg");
        let held = hanging.lock().unwrap();
        let (image, time) = (cell(&file), Duration::from_millis(1));
        let error = fetcher.fetch(&image, limits(time)).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::TimedOut, "{error}");
        assert_eq!(fetcher.hung(), 1);
        let read = fetcher.fetch(&cell(&other), limits(Duration::MAX)).await;
        assert_eq!(read.unwrap_err().kind(), StorageErrorKind::NotFound);
        assert_eq!(fetcher.hung(), 1);
        drop(held);
        while fetcher.hung() > 0 {
            tokio::task::yield_now().await;
        }
    }
}
