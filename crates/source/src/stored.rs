//! Files with names or contents of images: on this machine, in S3 or on the web.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use trommel_storage::{
    Get, StorageError, StorageErrorKind,
    background::{self, Pending},
    uri,
};

use crate::file::etag;
use crate::stores::{Remote, Stores, range_of};

/// Bytes requested at once.
const CHUNK: u64 = 1 << 20;

/// A file with names or contents of images.
#[derive(Clone)]
pub(super) enum Stored {
    /// On this machine.
    File(PathBuf),
    /// In a store.
    Object(Arc<Object>),
}

/// An object in a store, in the version found when it was opened.
pub(super) struct Object {
    stores: Stores,
    place: Remote,
    uri: String,
    size: u64,
    etag: Option<String>,
}

impl From<&Path> for Stored {
    fn from(path: &Path) -> Self {
        Self::File(path.to_owned())
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Object(object) => f.write_str(&object.uri),
        }
    }
}

impl Stored {
    /// The object at a uri, if one exists. Blocking.
    ///
    /// # Errors
    /// If it is not the uri of a store, or the store cannot be reached or has no byte ranges.
    pub(super) fn object(stores: &Stores, uri: &str) -> Result<Option<Self>, StorageError> {
        let Some(place) = Remote::parse(uri)? else {
            return Ok(None);
        };
        let found = match &place {
            Remote::S3(place) => {
                let page = background::wait(stores.s3.list(place, None, None))?;
                let first = page.objects.into_iter().next();
                let first = first.filter(|first| first.key == place.key);
                first.map(|first| (first.size, first.etag))
            }
            Remote::Cloud(place) => {
                let found = background::wait(stores.clouds.look(place))?;
                found.map(|found| (found.size, found.etag))
            }
            Remote::Web(url) => {
                let looked = background::wait(stores.http.look(url))?;
                match looked.size.filter(|_| looked.has_ranges) {
                    Some(size) => Some((size, looked.etag)),
                    None => {
                        return Err(StorageError::invalid_source(format!(
                            "source {uri}: its server gives no byte ranges; download it first (curl -LO)"
                        )));
                    }
                }
            }
        };
        Ok(found.map(|(size, etag)| {
            Self::Object(Arc::new(Object {
                stores: stores.clone(),
                place,
                uri: uri.to_owned(),
                size,
                etag,
            }))
        }))
    }

    /// The file at a uri, assumed to exist. Blocking.
    ///
    /// # Errors
    /// If it is in a store and cannot be examined.
    pub(super) fn at(stores: &Stores, uri: &str) -> Result<Self, StorageError> {
        if Remote::parse(uri)?.is_none() {
            return Ok(Self::File(uri::to_path(uri)));
        }
        Self::object(stores, uri)?.ok_or_else(|| {
            let gone = io::Error::new(io::ErrorKind::NotFound, "the object does not exist");
            StorageError::read(uri, gone)
        })
    }

    /// Its uri, as rows show it.
    pub(super) fn uri(&self) -> String {
        match self {
            Self::File(path) => uri::of_path(path),
            Self::Object(object) => object.uri.clone(),
        }
    }

    /// Its version.
    pub(super) fn version(&self) -> Option<String> {
        match self {
            Self::File(path) => etag(&path.metadata().ok()?),
            Self::Object(object) => object.etag.clone(),
        }
    }

    /// The uri of a name relative to this object's folder; `None` for a file.
    ///
    /// # Errors
    /// If there is no such uri.
    pub(super) fn beside(&self, name: &str) -> Result<Option<String>, String> {
        let Self::Object(object) = self else {
            return Ok(None);
        };
        match &object.place {
            Remote::S3(place) => Ok(Some(place.with_key(beside(&place.key, name)).uri())),
            Remote::Cloud(place) => Ok(Some(place.with_key(beside(&place.key, name)).uri())),
            Remote::Web(url) => url.join(name).map(|url| Some(url.to_string())),
        }
    }

    /// Opens it at its beginning.
    ///
    /// # Errors
    /// If it is a file that cannot be opened.
    pub(super) fn open(&self) -> Result<Reader, StorageError> {
        Ok(match self {
            Self::File(path) => {
                Reader::File(File::open(path).map_err(|error| StorageError::source(path, error))?)
            }
            Self::Object(object) => Reader::Object(ObjectReader {
                object: Arc::clone(object),
                position: 0,
                chunk: (0, Bytes::new()),
                ahead: None,
            }),
        })
    }
}

/// The key of a name relative to the folder of another key.
fn beside(key: &str, name: &str) -> String {
    let folder = key.rfind('/').map_or("", |slash| &key[..=slash]);
    format!("{folder}{name}")
}

impl Stored {
    /// A range of it. Blocking.
    ///
    /// # Errors
    /// If it cannot be read, or ends earlier.
    pub(super) fn read_at(&self, start: u64, length: usize) -> Result<Bytes, StorageError> {
        if let Self::Object(object) = self {
            return object.get(start, length as u64);
        }
        let mut bytes = Vec::new();
        let mut reader = self.open()?;
        let read = reader
            .seek(SeekFrom::Start(start))
            .and_then(|_| reader.take(length as u64).read_to_end(&mut bytes));
        read.map_err(|error| StorageError::read(self, error))?;
        if bytes.len() < length {
            return Err(StorageError::new(
                StorageErrorKind::NotAFile,
                format!("failed to read {self}: it ends too early"),
            ));
        }
        Ok(bytes.into())
    }
}

impl Length for Stored {
    fn len(&self) -> u64 {
        match self {
            Self::File(path) => path.metadata().map_or(0, |metadata| metadata.len()),
            Self::Object(object) => object.size,
        }
    }
}

impl ChunkReader for Stored {
    type T = BufReader<Reader>;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let mut reader = self
            .open()
            .map_err(|error| ParquetError::External(error.into()))?;
        reader.seek(SeekFrom::Start(start))?;
        Ok(BufReader::new(reader))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        self.read_at(start, length)
            .map_err(|error| ParquetError::External(error.into()))
    }
}

impl Object {
    fn get(self: &Arc<Self>, start: u64, length: u64) -> Result<Bytes, StorageError> {
        self.start_get(start, length).wait()
    }

    fn start_get(self: &Arc<Self>, start: u64, length: u64) -> Pending<Bytes> {
        let object = Arc::clone(self);
        background::start(async move {
            let etag = object.etag.as_deref();
            let range = (start, length);
            let Stores { s3, clouds, http } = &object.stores;
            match &object.place {
                Remote::S3(place) => s3.get_version(place, Some(range), etag, length).await,
                Remote::Cloud(place) => {
                    let wanted = Get {
                        range: Some(range_of(range)),
                        if_match: object.etag.clone(),
                        at_most: None,
                    };
                    clouds.get(place, wanted).await
                }
                Remote::Web(url) => http.get_version(url, range, etag).await,
            }
        })
    }
}

/// Reads a file or an object. Blocking.
pub(super) enum Reader {
    /// On this machine.
    File(File),
    /// In a store, by ranges.
    Object(ObjectReader),
}

/// Reads an object in chunks from any position. The following chunk is requested in advance.
pub(super) struct ObjectReader {
    object: Arc<Object>,
    position: u64,
    /// Available bytes, and their position.
    chunk: (u64, Bytes),
    /// Requested bytes, and their position.
    ahead: Option<(u64, Pending<Bytes>)>,
}

impl ObjectReader {
    fn fill(&mut self) -> Result<(), StorageError> {
        let size = self.object.size;
        let length = |start: u64| CHUNK.min(size - start);
        let end = self.chunk.0 + self.chunk.1.len() as u64;
        let ahead = self
            .ahead
            .take()
            .filter(|(start, _)| (*start..start + CHUNK).contains(&self.position));
        self.chunk = match ahead {
            Some((start, pending)) => (start, pending.wait()?),
            None => {
                let start = self.position;
                (start, self.object.get(start, length(start))?)
            }
        };
        let goes_on = (end..end + CHUNK).contains(&self.position);
        let next = self.chunk.0 + self.chunk.1.len() as u64;
        if goes_on && next < size {
            self.ahead = Some((next, self.object.start_get(next, length(next))));
        }
        Ok(())
    }
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let reader = match self {
            Self::File(file) => return file.read(buffer),
            Self::Object(reader) => reader,
        };
        if reader.position >= reader.object.size || buffer.is_empty() {
            return Ok(0);
        }
        let is_here = |reader: &ObjectReader| {
            let (start, bytes) = &reader.chunk;
            (*start..start + bytes.len() as u64).contains(&reader.position)
        };
        if !is_here(reader) {
            reader.fill().map_err(io::Error::other)?;
        }
        let (start, bytes) = &reader.chunk;
        let offset = usize::try_from(reader.position - start).unwrap_or(usize::MAX);
        let rest = bytes.get(offset..).unwrap_or_default();
        let length = rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&rest[..length]);
        reader.position += length as u64;
        Ok(length)
    }
}

impl Seek for Reader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let reader = match self {
            Self::File(file) => return file.seek(to),
            Self::Object(reader) => reader,
        };
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::Current(by) => reader.position.checked_add_signed(by),
            SeekFrom::End(by) => reader.object.size.checked_add_signed(by),
        };
        reader.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(reader.position)
    }
}
