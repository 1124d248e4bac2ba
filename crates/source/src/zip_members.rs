//! The members of a zip archive, by its directory alone, which is never held whole.

use std::io::{self, BufReader, Read, Seek, SeekFrom};

use parquet::file::reader::Length;
use trommel_storage::{StorageError, uri};
use trommel_types::Content;

use crate::listing::Stop;
use crate::stored::{Reader, Stored};

const END: u32 = 0x0605_4b50;
const END_64: u32 = 0x0606_4b50;
const LOCATOR_64: u32 = 0x0706_4b50;
const ENTRY: u32 = 0x0201_4b50;
/// Sizes of these records, without what varies.
const END_SIZE: usize = 22;
const LOCATOR_SIZE: u64 = 20;
const END_64_SIZE: u64 = 56;
const ENTRY_SIZE: usize = 46;
/// Longest comment behind the end record.
const COMMENT: u64 = 0xffff;
/// What a field of 32 bits holds whose value is in the extra fields.
const ELSEWHERE: u32 = u32::MAX;

/// A file in a zip archive.
pub(super) struct ZipEntry {
    pub(super) name: String,
    /// Bytes of the name as it is stored.
    name_length: u16,
    offset: u64,
    packed: u64,
    pub(super) size: u64,
    method: u16,
    checksum: u32,
    encrypted: bool,
}

impl ZipEntry {
    /// Where its bytes are in an archive.
    pub(super) fn content(&self, archive: &str) -> Content {
        Content::ZipMember {
            archive: archive.to_owned(),
            offset: self.offset,
            name_length: self.name_length,
            length: self.packed,
            size: self.size,
            method: self.method,
            checksum: self.checksum,
            encrypted: self.encrypted,
        }
    }
}

/// Walks over the directory of an archive. Folders are passed over; links have no bytes.
pub(super) fn for_each_entry(
    stored: &Stored,
    each: &mut dyn FnMut(ZipEntry) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let failed = |error: io::Error| match error.downcast() {
        Ok(error) => error,
        Err(error) => {
            StorageError::invalid_source(format!("source {stored} cannot be read as zip: {error}"))
        }
    };
    let mut walk = Walk::open(stored).map_err(failed)?;
    while let Some(entry) = walk.next().map_err(failed)? {
        each(entry)?;
    }
    Ok(())
}

/// The directory of an archive.
struct Directory {
    offset: u64,
    size: u64,
    entries: u64,
    /// Bytes before the archive, which its offsets do not count.
    before: u64,
}

struct Walk {
    input: BufReader<Reader>,
    /// Bytes of the directory that are not read yet.
    left: u64,
    entries: u64,
    before: u64,
    /// Where the directory begins, before which all members lie.
    directory: u64,
}

impl Walk {
    fn open(stored: &Stored) -> io::Result<Self> {
        let mut input = stored.open().map_err(io::Error::other)?;
        let directory = Directory::find(&mut input, stored.len())?;
        let begin = directory.before + directory.offset;
        input.seek(SeekFrom::Start(begin))?;
        Ok(Self {
            input: BufReader::with_capacity(1 << 16, input),
            left: directory.size,
            entries: directory.entries,
            before: directory.before,
            directory: begin,
        })
    }

    /// The next entry that is a file or a link.
    fn next(&mut self) -> io::Result<Option<ZipEntry>> {
        while self.entries > 0 {
            self.entries -= 1;
            if let Some(entry) = self.entry()? {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    fn entry(&mut self) -> io::Result<Option<ZipEntry>> {
        let mut header = [0; ENTRY_SIZE];
        self.read(&mut header)?;
        if u32_at(&header, 0) != ENTRY {
            return Err(io::Error::other("its directory is damaged"));
        }
        let flags = u16_at(&header, 8);
        if flags & 1 << 13 != 0 {
            return Err(io::Error::other(
                "its directory is encrypted; unpack it with its password first",
            ));
        }
        let name_length = u16_at(&header, 28);
        let mut name = vec![0; name_length.into()];
        self.read(&mut name)?;
        let mut extra = vec![0; u16_at(&header, 30).into()];
        self.read(&mut extra)?;
        let mut comment = vec![0; u16_at(&header, 32).into()];
        self.read(&mut comment)?;
        if name.ends_with(b"/") {
            return Ok(None);
        }
        let mut wide = wide_values(&extra);
        let mut value = |place: usize| match u32_at(&header, place) {
            ELSEWHERE => wide
                .next()
                .ok_or_else(|| io::Error::other("a size of more than 32 bits is missing")),
            value => Ok(value.into()),
        };
        // In the order in which the extra fields have them.
        let (size, packed, offset) = (value(24)?, value(20)?, value(42)?);
        let start = self.before.checked_add(offset);
        let end = start.and_then(|start| start.checked_add(packed));
        let (Some(offset), Some(_)) = (start, end.filter(|end| *end <= self.directory)) else {
            return Err(io::Error::other("a member lies outside of it"));
        };
        let is_unix = header[5] == 3;
        let is_link = is_unix && (u32_at(&header, 38) >> 16) & 0o170_000 == 0o120_000;
        Ok(Some(ZipEntry {
            name: uri::of_bytes(&name),
            name_length,
            offset,
            packed: if is_link { 0 } else { packed },
            size: if is_link { 0 } else { size },
            method: u16_at(&header, 10),
            checksum: u32_at(&header, 16),
            encrypted: flags & 1 != 0,
        }))
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let length = buffer.len() as u64;
        self.left = self
            .left
            .checked_sub(length)
            .ok_or_else(|| io::Error::other("its directory ends within an entry"))?;
        self.input.read_exact(buffer)
    }
}

impl Directory {
    /// Finds the directory by the record at the end of the file.
    fn find(input: &mut Reader, length: u64) -> io::Result<Self> {
        let tail_start = length.saturating_sub(END_SIZE as u64 + COMMENT);
        let mut tail = Vec::new();
        input.seek(SeekFrom::Start(tail_start))?;
        input.take(length - tail_start).read_to_end(&mut tail)?;
        let is_end = |place: &usize| {
            let record = &tail[*place..];
            u32_at(record, 0) == END && usize::from(u16_at(record, 20)) + END_SIZE <= record.len()
        };
        let last = tail.len().checked_sub(END_SIZE);
        let place = last
            .and_then(|last| (0..=last).rev().find(is_end))
            .ok_or_else(|| {
                io::Error::other("it has no directory at its end; it may be cut short")
            })?;
        let (record, position) = (&tail[place..], tail_start + place as u64);
        let numbers = [u16_at(record, 4), u16_at(record, 6)];
        let (entries, size, offset) = (u16_at(record, 10), u32_at(record, 12), u32_at(record, 16));
        let is_wide = entries == u16::MAX || size == ELSEWHERE || offset == ELSEWHERE;
        let wide = match position.checked_sub(LOCATOR_SIZE).filter(|_| is_wide) {
            Some(locator) => Self::find_wide(input, locator)?,
            None => None,
        };
        if let Some(directory) = wide {
            return Ok(directory);
        }
        if numbers != [0, 0] {
            return Err(io::Error::other(
                "it is one of several volumes; join them first (zip -s 0)",
            ));
        }
        Self::new(offset.into(), size.into(), entries.into(), position)
    }

    /// The directory as a record for large archives has it, if there is one.
    fn find_wide(input: &mut Reader, locator: u64) -> io::Result<Option<Self>> {
        let mut record = [0; LOCATOR_SIZE as usize];
        input.seek(SeekFrom::Start(locator))?;
        input.read_exact(&mut record)?;
        if u32_at(&record, 0) != LOCATOR_64 {
            return Ok(None);
        }
        // Where bytes come before the archive, the record is not where the locator says.
        let named = u64_at(&record, 8);
        let before_locator = locator.saturating_sub(END_64_SIZE);
        for position in [named, before_locator] {
            let mut record = [0; END_64_SIZE as usize];
            input.seek(SeekFrom::Start(position))?;
            if input.read_exact(&mut record).is_ok() && u32_at(&record, 0) == END_64 {
                let (entries, size, offset) = (
                    u64_at(&record, 32),
                    u64_at(&record, 40),
                    u64_at(&record, 48),
                );
                return Self::new(offset, size, entries, position).map(Some);
            }
        }
        Err(io::Error::other("its directory is damaged"))
    }

    /// A directory that ends at `end`.
    fn new(offset: u64, size: u64, entries: u64, end: u64) -> io::Result<Self> {
        let before = offset
            .checked_add(size)
            .and_then(|stated_end| end.checked_sub(stated_end));
        Ok(Self {
            offset,
            size,
            entries,
            before: before.ok_or_else(|| io::Error::other("its directory is damaged"))?,
        })
    }
}

/// The values of more than 32 bits in an entry's extra fields.
fn wide_values(extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut rest = extra;
    let mut values: &[u8] = &[];
    while rest.len() >= 4 {
        let length = usize::from(u16_at(rest, 2)).min(rest.len() - 4);
        if u16_at(rest, 0) == 1 {
            values = &rest[4..4 + length];
        }
        rest = &rest[4 + length..];
    }
    let (values, _) = values.as_chunks::<8>();
    values.iter().map(|value| u64::from_le_bytes(*value))
}

pub(super) fn u16_at(bytes: &[u8], place: usize) -> u16 {
    u16::from_le_bytes([bytes[place], bytes[place + 1]])
}

pub(super) fn u32_at(bytes: &[u8], place: usize) -> u32 {
    u32::from(u16_at(bytes, place)) | u32::from(u16_at(bytes, place + 2)) << 16
}

fn u64_at(bytes: &[u8], place: usize) -> u64 {
    u64::from(u32_at(bytes, place)) | u64::from(u32_at(bytes, place + 4)) << 32
}
