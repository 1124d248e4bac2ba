//! Files that are compressed as a whole, read from beginning to end.

use std::io::{self, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::read::MultiGzDecoder;
use trommel_storage::StorageError;
use trommel_types::Packing;

use crate::stored::Stored;

/// Largest ratio of the content of a file to what was read of it, beyond an allowance. Encoded
/// images hardly compress further, and blank bitmaps by less than this.
const INFLATION: u64 = 500;
/// What any file may unpack to.
const ALLOWANCE: u64 = 64 << 20;

/// Decompresses a file. Ends in an error if the content grows beyond reason.
pub(super) struct Unpacker {
    input: Box<dyn Read + Send>,
    /// Bytes read of the file.
    packed: Arc<AtomicU64>,
    unpacked: u64,
}

impl Unpacker {
    /// Starts at the beginning.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub(super) fn open(stored: &Stored, packing: Packing) -> Result<Self, StorageError> {
        Self::new(stored.open()?, packing).map_err(|error| StorageError::read(stored, error))
    }

    pub(super) fn new(input: impl Read + Send + 'static, packing: Packing) -> io::Result<Self> {
        let packed = Arc::new(AtomicU64::new(0));
        let input = Counted {
            input,
            count: Arc::clone(&packed),
        };
        let input = BufReader::with_capacity(1 << 16, input);
        Ok(Self {
            input: match packing {
                Packing::Gzip => Box::new(MultiGzDecoder::new(input)),
                Packing::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(input)?),
            },
            packed,
            unpacked: 0,
        })
    }
}

impl Read for Unpacker {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.unpacked += read as u64;
        let packed = self.packed.load(Ordering::Relaxed);
        if self.unpacked > ALLOWANCE.saturating_add(packed.saturating_mul(INFLATION)) {
            return Err(io::Error::other(format!(
                "it unpacks to more than {INFLATION} times its size, as decompression bombs do; unpack it yourself if you trust it"
            )));
        }
        Ok(read)
    }
}

struct Counted<R> {
    input: R,
    count: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// The kind of an archive by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Archived {
    /// A zip.
    Zip,
    /// An uncompressed tar.
    Tar,
    /// A compressed tar.
    Packed(Packing),
}

/// Examines the first bytes of an archive.
///
/// # Errors
/// If it cannot be read, or has an unsupported compression.
pub(super) fn archived(stored: &Stored) -> Result<Archived, StorageError> {
    let mut begin = Vec::new();
    let read = stored.open()?.take(6).read_to_end(&mut begin);
    read.map_err(|error| match stored {
        Stored::File(path) => StorageError::source(path, error),
        Stored::Object(_) => StorageError::read(stored, error),
    })?;
    let not_read: [(&[u8], &str); 4] = [
        (b"\xfd7zXZ\0", "xz -dk"),
        (b"BZh", "bzip2 -dk"),
        (b"\x04\x22\x4d\x18", "lz4 -d"),
        (b"Rar!", "unrar x"),
    ];
    if let Some((_, command)) = not_read.iter().find(|(magic, _)| begin.starts_with(magic)) {
        return Err(StorageError::invalid_source(format!(
            "source {stored}: unsupported compression; decompress it first ({command} {stored})"
        )));
    }
    let is_zip_by_name = || stored.uri().to_ascii_lowercase().ends_with(".zip");
    Ok(match begin.as_slice() {
        [0x1f, 0x8b, ..] => Archived::Packed(Packing::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Archived::Packed(Packing::Zstd),
        [b'P', b'K', 3 | 5 | 6 | 7, ..] => Archived::Zip,
        // A self-extracting one begins with the program.
        _ if is_zip_by_name() => Archived::Zip,
        _ => Archived::Tar,
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_grows_beyond_reason_ends_in_an_error() {
        let zeros = io::repeat(0).take(ALLOWANCE + (64 << 20));
        let bomb = zstd::stream::encode_all(zeros, 3).unwrap();
        assert!(bomb.len() < 100_000, "{}", bomb.len());
        let mut unpacker = Unpacker::new(io::Cursor::new(bomb), Packing::Zstd).unwrap();
        let error = io::copy(&mut unpacker, &mut io::sink()).unwrap_err();
        assert!(error.to_string().contains("500 times"), "{error}");
    }

    #[test]
    fn what_is_cut_short_is_no_whole_file() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&[7; 100_000]).unwrap();
        let gzip = gzip.finish().unwrap();
        let zstd = zstd::stream::encode_all(&[7; 100_000][..], 3).unwrap();
        for (packed, packing) in [(gzip, Packing::Gzip), (zstd, Packing::Zstd)] {
            let read = |length: usize| {
                let part = packed[..length].to_vec();
                let mut unpacker = Unpacker::new(io::Cursor::new(part), packing).unwrap();
                io::copy(&mut unpacker, &mut io::sink())
            };
            assert_eq!(read(packed.len()).unwrap(), 100_000);
            let error = read(packed.len() - 1).unwrap_err();
            assert_eq!(
                error.kind(),
                io::ErrorKind::UnexpectedEof,
                "{packing:?}: {error}"
            );
        }
    }
}
