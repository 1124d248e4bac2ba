//! The bytes of one member of a zip archive.

use std::io::{self, Read};

use flate2::read::DeflateDecoder;
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::Content;

use crate::zip_members::{u16_at, u32_at};

/// Size of a local header, without the name and the extra fields behind it.
const HEADER: u64 = 30;
/// Bytes of extra fields that are read ahead. At least as many follow on the last member, whose
/// entry in the directory alone is larger.
const EXTRA: u64 = 60;
const SIGNATURE: u32 = 0x0403_4b50;

/// A member as a listing has found it.
#[derive(Debug, Clone)]
pub(super) struct ZipMember {
    offset: u64,
    name_length: u16,
    length: u64,
    size: u64,
    method: u16,
    checksum: u32,
}

impl ZipMember {
    /// The member that an image is; `None` if it is something else.
    ///
    /// # Errors
    /// When it is of a kind that is not read, or larger than `limit`.
    pub(super) fn of(
        uri: &str,
        content: &Content,
        limit: u64,
    ) -> Result<Option<Self>, StorageError> {
        let Content::ZipMember {
            offset,
            name_length,
            length,
            size,
            method,
            checksum,
            encrypted,
            ..
        } = content
        else {
            return Ok(None);
        };
        if *encrypted {
            return Err(damaged(
                uri,
                "it is encrypted; unpack the archive with its password first",
            ));
        }
        if let Some(name) = unread_method(*method) {
            let reason = format!(
                "it is packed by {name}, which is not read; write the archive again with deflate (zip -r)"
            );
            return Err(damaged(uri, &reason));
        }
        if *size.max(length) > limit {
            return Err(StorageError::too_large(uri, *size.max(length), limit));
        }
        Ok(Some(Self {
            offset: *offset,
            name_length: *name_length,
            length: *length,
            size: *size,
            method: *method,
            checksum: *checksum,
        }))
    }

    /// Whether it has no bytes.
    pub(super) fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// What to read first, as offset and length: nearly always all of it.
    pub(super) fn first_range(&self) -> (u64, u64) {
        let length = HEADER + u64::from(self.name_length) + EXTRA + self.length;
        (self.offset, length)
    }

    /// What is still missing when the first range was read; `None` when that is nothing.
    ///
    /// # Errors
    /// When the member is not where it was.
    pub(super) fn rest(&self, uri: &str, first: &[u8]) -> Result<Option<(u64, u64)>, StorageError> {
        let end = self.start(uri, first)?.saturating_add(self.length);
        let read = first.len() as u64;
        Ok((end > read).then(|| (self.offset + read, end - read)))
    }

    /// Where its bytes begin behind its header.
    fn start(&self, uri: &str, read: &[u8]) -> Result<u64, StorageError> {
        if (read.len() as u64) < HEADER || u32_at(read, 0) != SIGNATURE {
            return Err(damaged(uri, "its archive has no member there"));
        }
        Ok(HEADER + u64::from(u16_at(read, 26)) + u64::from(u16_at(read, 28)))
    }

    /// Unpacks it from what was read, from its header on. Never gives more than the directory says.
    ///
    /// # Errors
    /// When it is damaged, or holds more or less than it says.
    pub(super) fn unpack(&self, uri: &str, read: &[u8]) -> Result<Vec<u8>, StorageError> {
        let start = usize::try_from(self.start(uri, read)?).unwrap_or(usize::MAX);
        let packed = read.get(start..).unwrap_or_default();
        let packed = packed
            .get(..self.length as usize)
            .ok_or_else(|| damaged(uri, "its archive ends before it does"))?;
        let mut bytes = Vec::new();
        let reserved = bytes.try_reserve_exact(self.size.min(64 << 20) as usize);
        if reserved.is_err() {
            let message = format!(
                "{uri} holds {} bytes, more than the available memory",
                self.size
            );
            return Err(StorageError::new(StorageErrorKind::TooLarge, message));
        }
        let unpacked = match self.method {
            8 => read_all(DeflateDecoder::new(packed), self.size, &mut bytes),
            93 => zstd::stream::read::Decoder::new(packed)
                .and_then(|input| read_all(input, self.size, &mut bytes)),
            _ => read_all(packed, self.size, &mut bytes),
        };
        unpacked.map_err(|error| damaged(uri, &format!("it cannot be unpacked: {error}")))?;
        if bytes.len() as u64 != self.size {
            let reason = format!(
                "it does not unpack to the {} bytes that its archive states",
                self.size
            );
            return Err(damaged(uri, &reason));
        }
        if crc32fast::hash(&bytes) != self.checksum {
            return Err(damaged(
                uri,
                "its checksum is wrong, so its archive is damaged",
            ));
        }
        Ok(bytes)
    }
}

/// Reads one byte more than there should be at most.
fn read_all(input: impl Read, size: u64, bytes: &mut Vec<u8>) -> io::Result<()> {
    input.take(size.saturating_add(1)).read_to_end(bytes)?;
    Ok(())
}

/// The name of a method that is not read.
fn unread_method(method: u16) -> Option<String> {
    let name = match method {
        0 | 8 | 93 => return None,
        9 => "Deflate64",
        12 => "bzip2",
        14 => "LZMA",
        95 => "xz",
        98 => "PPMd",
        99 => "AES encryption",
        other => return Some(format!("method {other}")),
    };
    Some(format!("{name} (method {method})"))
}

fn damaged(uri: &str, reason: &str) -> StorageError {
    let message = format!("failed to read {uri}: {reason}");
    StorageError::new(StorageErrorKind::NotAFile, message)
}
