//! Files that name or hold images: on this machine, or as objects in S3.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};

use crate::background::{self, Pending};
use crate::s3::{Location, S3};
use crate::source::file::etag;
use crate::{StorageError, uri};

/// Bytes of an object that are asked for at once.
const CHUNK: u64 = 1 << 20;

/// A file that names or holds images.
#[derive(Clone)]
pub(super) enum Stored {
    /// On this machine.
    File(PathBuf),
    /// In S3.
    Object(Arc<Object>),
}

/// An object in S3, as it was when it was looked at.
pub(super) struct Object {
    s3: S3,
    place: Location,
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
            Self::Object(object) => f.write_str(&object.place.uri()),
        }
    }
}

impl Stored {
    /// The object of this name; `None` if there is none. Blocking.
    ///
    /// # Errors
    /// When the bucket cannot be listed.
    pub(super) fn object(s3: &S3, place: Location) -> Result<Option<Self>, StorageError> {
        let page = background::wait(s3.list(&place, None, None))?;
        let first = page.objects.into_iter().next();
        Ok(first.filter(|first| first.key == place.key).map(|first| {
            Self::Object(Arc::new(Object {
                s3: s3.clone(),
                place,
                size: first.size,
                etag: first.etag,
            }))
        }))
    }

    /// The file at a uri, which is there as far as anybody knows. Blocking.
    ///
    /// # Errors
    /// When it is in S3 and cannot be looked at.
    pub(super) fn at(s3: &S3, uri: &str) -> Result<Self, StorageError> {
        let Some(place) = Location::parse(uri) else {
            return Ok(Self::File(uri::to_path(uri)));
        };
        Self::object(s3, place)?.ok_or_else(|| {
            let gone = io::Error::new(io::ErrorKind::NotFound, "there is no such object");
            StorageError::read(uri, gone)
        })
    }

    /// Its uri, as rows show it.
    pub(super) fn uri(&self) -> String {
        match self {
            Self::File(path) => uri::of_path(path),
            Self::Object(object) => object.place.uri(),
        }
    }

    /// Its version.
    pub(super) fn version(&self) -> Option<String> {
        match self {
            Self::File(path) => etag(&path.metadata().ok()?),
            Self::Object(object) => object.etag.clone(),
        }
    }

    /// The key of a name that is relative to this object's folder; `None` for a file.
    pub(super) fn beside(&self, name: &str) -> Option<Location> {
        let Self::Object(object) = self else {
            return None;
        };
        let key = &object.place.key;
        let folder = key.rfind('/').map_or("", |slash| &key[..=slash]);
        Some(object.place.with_key(format!("{folder}{name}")))
    }

    /// Opens it at its beginning.
    ///
    /// # Errors
    /// When it is a file that cannot be opened.
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
        if let Self::Object(object) = self {
            let bytes = object.get(start, length as u64);
            return bytes.map_err(|error| ParquetError::External(error.into()));
        }
        let mut bytes = vec![0; length];
        self.get_read(start)?.read_exact(&mut bytes)?;
        Ok(bytes.into())
    }
}

impl Object {
    fn get(self: &Arc<Self>, start: u64, length: u64) -> Result<Bytes, StorageError> {
        self.start_get(start, length).wait()
    }

    fn start_get(self: &Arc<Self>, start: u64, length: u64) -> Pending<Bytes> {
        let object = Arc::clone(self);
        background::start(async move {
            let range = Some((start, length));
            object.s3.get(&object.place, range, length).await
        })
    }
}

/// Reads a file or an object. Blocking.
pub(super) enum Reader {
    /// On this machine.
    File(File),
    /// In S3, by ranges.
    Object(ObjectReader),
}

/// Reads an object in chunks from wherever it is put. What follows closely on a chunk is asked for
/// before it is wanted.
pub(super) struct ObjectReader {
    object: Arc<Object>,
    position: u64,
    /// Bytes that are here, and where they begin.
    chunk: (u64, Bytes),
    /// Bytes on their way, and where they begin.
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
