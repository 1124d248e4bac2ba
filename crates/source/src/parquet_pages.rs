//! Limits the memory of a Parquet file's pages by their size in the file.

use std::io::{self, BufReader, Read};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use flate2::read::MultiGzDecoder;
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use trommel_storage::{StorageError, StorageErrorKind};

use crate::stored::{Reader, Stored};

/// Largest ratio of a page to its compressed size, beyond the limit of an image. Encoded images do
/// not compress, and raw ones by less than this.
const INFLATION: u64 = 16;
/// A page's header begins with its type and its two sizes: one byte and at most five for each.
const SIZES: usize = 18;

/// A Parquet file whose page sizes are checked before memory is allocated. Errors are kept, because
/// the decoder only passes on their text.
#[derive(Clone)]
pub(super) struct Pages {
    stored: Stored,
    limit: u64,
    /// Whether pages are compressed with gzip, whose decoder ignores the size in the header.
    is_gzip: bool,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    fault: Option<StorageError>,
    /// The sizes in the last page header, uncompressed and compressed.
    sizes: Option<(u64, u64)>,
}

impl Pages {
    /// For images, or other values, of at most `limit` bytes.
    pub(super) fn new(stored: &Stored, limit: u64, is_gzip: bool) -> Self {
        Self {
            stored: stored.clone(),
            limit,
            is_gzip,
            state: Arc::default(),
        }
    }

    /// The first error since the last call.
    pub(super) fn take_fault(&self) -> Option<StorageError> {
        self.state().fault.take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an error and returns one that stops the decoder.
    fn fail(&self, error: StorageError) -> io::Error {
        let words = error.to_string();
        self.state().fault.get_or_insert(error);
        io::Error::other(words)
    }

    /// The storage error, if it was one.
    fn fault_of(&self, error: io::Error) -> StorageError {
        match error.downcast::<StorageError>() {
            Ok(error) => error,
            Err(error) => StorageError::read(&self.stored, error),
        }
    }

    /// Refuses a page that expands far beyond its size in the file.
    fn check(&self, compressed: u64, uncompressed: u64) -> Result<(), StorageError> {
        if uncompressed <= self.limit.max(compressed.saturating_mul(INFLATION)) {
            return Ok(());
        }
        Err(StorageError::new(
            StorageErrorKind::TooLarge,
            format!(
                "a page inflates from {compressed} to {uncompressed} bytes, more than the {} that are allowed (preprocess.max-bytes)",
                self.limit
            ),
        ))
    }
}

impl Length for Pages {
    fn len(&self) -> u64 {
        self.stored.len()
    }
}

impl ChunkReader for Pages {
    type T = PageStart;

    fn get_read(&self, start: u64) -> Result<PageStart, ParquetError> {
        Ok(PageStart {
            pages: self.clone(),
            inner: self.stored.get_read(start)?,
            begin: Vec::new(),
            passed: None,
        })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        // Not before: skipped pages do no harm.
        let sizes = self.state().sizes.take();
        if let Some((uncompressed, compressed)) = sizes {
            self.check(compressed, uncompressed)
                .map_err(|error| self.fail(error))?;
        }
        let bytes = self.stored.read_at(start, length);
        let bytes = bytes.map_err(|error| self.fail(error))?;
        if self.is_gzip {
            let allowed = self.limit.max((length as u64).saturating_mul(INFLATION));
            let mut inflated = MultiGzDecoder::new(&bytes[..]).take(allowed + 1);
            // The decoder refuses invalid gzip.
            let size = io::copy(&mut inflated, &mut io::sink()).unwrap_or(0);
            self.check(length as u64, size)
                .map_err(|error| self.fail(error))?;
        }
        Ok(bytes)
    }
}

/// Reads the header of a page, and records its sizes. The decoder uses streams only for headers.
pub(super) struct PageStart {
    pages: Pages,
    inner: BufReader<Reader>,
    /// The bytes read to learn the sizes.
    begin: Vec<u8>,
    /// How many of them have been passed on.
    passed: Option<usize>,
}

impl Read for PageStart {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let passed = match self.passed {
            Some(passed) => passed,
            None => {
                let mut begin = (&mut self.inner).take(SIZES as u64);
                let read = begin.read_to_end(&mut self.begin);
                if let Err(error) = read {
                    return Err(self.pages.fail(self.pages.fault_of(error)));
                }
                let sizes = sizes(&self.begin).ok_or_else(|| {
                    self.pages.fail(StorageError::new(
                        StorageErrorKind::NotAFile,
                        "a page's header does not begin with its sizes",
                    ))
                })?;
                self.pages.state().sizes = Some(sizes);
                0
            }
        };
        let rest = &self.begin[passed..];
        if rest.is_empty() {
            self.passed = Some(passed);
            return self.inner.read(buffer);
        }
        let length = rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&rest[..length]);
        self.passed = Some(passed + length);
        Ok(length)
    }
}

/// The sizes of a page, uncompressed and compressed, from the beginning of its header: the fields
/// 1 to 3 of a Thrift struct in the compact protocol, each an `i32`.
fn sizes(begin: &[u8]) -> Option<(u64, u64)> {
    /// A field of type `i32` whose number is one more than the last one's.
    const NEXT_I32: u8 = 0x15;
    let mut rest = begin;
    let mut next = || {
        let (first, behind) = rest.split_first()?;
        if *first != NEXT_I32 {
            return None;
        }
        let length = behind.iter().take(5).position(|byte| byte & 0x80 == 0)? + 1;
        let (digits, behind) = behind.split_at(length);
        rest = behind;
        let digits = digits.iter().rev();
        let zigzag = digits.fold(0_u64, |sum, byte| (sum << 7) | u64::from(byte & 0x7f));
        // Zigzag: odd numbers are negative, which sizes are not.
        (zigzag % 2 == 0).then_some(zigzag / 2)
    };
    let _kind = next()?;
    Some((next()?, next()?))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::write::GzEncoder;

    use super::*;

    /// R30: a decoder that ignores the header does not get such a page.
    #[test]
    fn gzip_that_inflates_beyond_its_header_is_refused() {
        let mut gzip = GzEncoder::new(Vec::new(), flate2::Compression::default());
        gzip.write_all(&vec![0; 8 << 20]).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes = gzip.finish().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        let stored: Stored = file.path().into();
        let pages = |limit| Pages::new(&stored, limit, true);
        assert_eq!(pages(8 << 20).get_bytes(0, bytes.len()).unwrap(), bytes);
        let pages = pages(1 << 20);
        assert!(pages.get_bytes(0, bytes.len()).is_err());
        let fault = pages.take_fault().unwrap();
        assert_eq!(fault.kind(), StorageErrorKind::TooLarge, "{fault}");
    }

    #[test]
    fn sizes_are_read_as_thrift_writes_them() {
        // A data page of 300 bytes, compressed to 64.
        let header = [0x15, 0x00, 0x15, 0xd8, 0x04, 0x15, 0x80, 0x01, 0x2c];
        assert_eq!(sizes(&header), Some((300, 64)));
        assert_eq!(sizes(&header[..6]), None);
        assert_eq!(
            sizes(&[0x15, 0x00, 0x15, 0x01, 0x15, 0x00]),
            None,
            "negative"
        );
        assert_eq!(sizes(&[0x25, 0x00]), None);
        assert_eq!(sizes(&[0x15, 0xff, 0xff, 0xff, 0xff, 0xff]), None);
    }
}
