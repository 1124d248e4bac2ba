//! The members of a tar archive, by their headers alone. One that is compressed is unpacked from
//! beginning to end for it.
//!
//! Not by the entries of the `tar` crate, which read a long name or an extended header into memory
//! whatever size it claims.

use std::io::{self, BufReader, Read};

use tar::{EntryType, Header, PaxExtensions};
use trommel_storage::{StorageError, uri};
use trommel_types::Packing;

use crate::listing::Stop;
use crate::member::{At, Member, SIBLING_LIMIT, sibling_text};
use crate::packed::Unpacker;
use crate::stored::{Reader, Stored};

/// Longest name, or extended header, in bytes.
const NAME_LIMIT: u64 = 64 << 10;
const BLOCK: u64 = 512;

/// Walks over the headers of an archive; only the content of siblings is read.
pub(super) fn for_each_member(
    stored: &Stored,
    packing: Option<Packing>,
    each: &mut dyn FnMut(Member) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let input = match packing {
        None => Input::Plain(BufReader::with_capacity(1 << 12, stored.open()?)),
        Some(packing) => Input::Packed(BufReader::with_capacity(
            1 << 16,
            Unpacker::open(stored, packing)?,
        )),
    };
    let mut walk = Walk {
        packing,
        input,
        position: 0,
        next: 0,
        name: None,
        extensions: Vec::new(),
    };
    loop {
        let member = walk.next().map_err(|error| match error.downcast() {
            Ok(error) => error,
            Err(error) => StorageError::invalid_source(format!(
                "source {stored} cannot be read as tar: {error}"
            )),
        })?;
        match member {
            Some(member) => each(member)?,
            None => return Ok(()),
        }
    }
}

/// What an archive is read from.
enum Input {
    Plain(BufReader<Reader>),
    /// Forward only, as a walk goes.
    Packed(BufReader<Unpacker>),
}

impl Input {
    fn skip(&mut self, length: u64) -> io::Result<()> {
        let input = match self {
            Self::Plain(input) => {
                let mut left = length;
                while left > 0 {
                    let by = left.min(i64::MAX as u64);
                    input.seek_relative(by as i64)?;
                    left -= by;
                }
                return Ok(());
            }
            Self::Packed(input) => input,
        };
        let skipped = io::copy(&mut input.take(length), &mut io::sink())?;
        match skipped == length {
            true => Ok(()),
            false => Err(io::Error::other("it ends within a member")),
        }
    }
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(input) => input.read(buffer),
            Self::Packed(input) => input.read(buffer),
        }
    }
}

struct Walk {
    packing: Option<Packing>,
    input: Input,
    /// Where `input` stands.
    position: u64,
    /// Where the next header begins.
    next: u64,
    /// The name of the member that follows, from a header of its own.
    name: Option<Vec<u8>>,
    /// Extended headers of the member that follows.
    extensions: Vec<u8>,
}

impl Walk {
    /// The next member that is a file or a link.
    fn next(&mut self) -> io::Result<Option<Member>> {
        while let Some(header) = self.header()? {
            let kind = header.entry_type();
            let knows_extensions = header.as_gnu().is_some() || header.as_ustar().is_some();
            let is_extension = knows_extensions
                && (kind.is_gnu_longname()
                    || kind.is_gnu_longlink()
                    || kind.is_pax_local_extensions()
                    || kind.is_pax_global_extensions());
            let size = match self.extended_size().filter(|_| !is_extension) {
                Some(size) => size,
                None => header.entry_size()?,
            };
            let content = self.next;
            self.next = size
                .checked_next_multiple_of(BLOCK)
                .and_then(|padded| content.checked_add(padded))
                .ok_or_else(|| io::Error::other("a size is larger than any file"))?;
            if is_extension {
                match kind {
                    EntryType::GNULongName => self.name = Some(self.read(content, size, "a name")?),
                    EntryType::XHeader => {
                        self.extensions = self.read(content, size, "an extended header")?;
                    }
                    _ => {}
                }
                continue;
            }
            let member = self.member(&header, content, size)?;
            self.name = None;
            self.extensions.clear();
            if member.is_some() {
                return Ok(member);
            }
        }
        if self.name.is_some() || !self.extensions.is_empty() {
            return Err(io::Error::other("it ends behind the name of a member"));
        }
        Ok(None)
    }

    fn member(&mut self, header: &Header, content: u64, size: u64) -> io::Result<Option<Member>> {
        let own_bytes = match header.entry_type() {
            EntryType::Regular | EntryType::Continuous => true,
            EntryType::Link | EntryType::Symlink => false,
            EntryType::GNUSparse => {
                self.skip_sparse_headers(header, content)?;
                false
            }
            _ => return Ok(None),
        };
        let name = match (&self.name, self.extended("path")) {
            (Some(name), _) => name.strip_suffix(b"\0").unwrap_or(name),
            (None, Some(name)) => name,
            (None, None) => &header.path_bytes(),
        };
        let name = uri::of_bytes(name);
        if name.ends_with('/') {
            return Ok(None); // how old archives write folders
        }
        let mut member = Member {
            name,
            at: match self.packing {
                None => At::Range { offset: content },
                Some(packing) => At::Unpacked {
                    offset: content,
                    packing,
                },
            },
            length: if own_bytes { size } else { 0 },
            text: None,
        };
        if member.sibling().is_some() && member.length <= SIBLING_LIMIT {
            self.seek(content)?;
            member.text = Some(sibling_text(&self.take(member.length)?));
        }
        Ok(Some(member))
    }

    /// Reads the next header; none at the end.
    fn header(&mut self) -> io::Result<Option<Header>> {
        self.seek(self.next)?;
        let bytes = self.take(BLOCK)?;
        if bytes.is_empty() || bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let mut header = Header::new_old();
        if bytes.len() as u64 != BLOCK {
            return Err(io::Error::other("it ends within a header"));
        }
        header.as_mut_bytes().copy_from_slice(&bytes);
        // The checksum counts its own bytes as spaces.
        let others = bytes[..148].iter().chain(&bytes[156..]);
        let sum = others.map(|byte| u32::from(*byte)).sum::<u32>() + 8 * u32::from(b' ');
        if header.cksum()? != sum {
            return Err(io::Error::other("a header's checksum does not match"));
        }
        self.next += BLOCK;
        Ok(Some(header))
    }

    /// Skips the continuation of a sparse file's header, which its size does not include.
    fn skip_sparse_headers(&mut self, header: &Header, content: u64) -> io::Result<()> {
        let mut goes_on = header.as_gnu().is_some_and(tar::GnuHeader::is_extended);
        let mut position = content;
        while goes_on {
            self.seek(position)?;
            let bytes = self.take(BLOCK)?;
            goes_on = bytes.get(504) == Some(&1);
            position += BLOCK;
            self.next += BLOCK;
        }
        Ok(())
    }

    /// What describes the next member, unless it claims to be larger than it can be.
    fn read(&mut self, start: u64, size: u64, what: &str) -> io::Result<Vec<u8>> {
        if size > NAME_LIMIT {
            let reason = format!(
                "{what} at byte {start} claims {size} bytes, more than the {NAME_LIMIT} that are read; write the archive again"
            );
            return Err(io::Error::other(reason));
        }
        self.seek(start)?;
        self.take(size)
    }

    fn take(&mut self, length: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        (&mut self.input).take(length).read_to_end(&mut bytes)?;
        self.position += bytes.len() as u64;
        Ok(bytes)
    }

    /// Goes on to a byte, within what is read ahead where it can.
    fn seek(&mut self, to: u64) -> io::Result<()> {
        let by = to.checked_sub(self.position);
        self.input
            .skip(by.ok_or_else(|| io::Error::other("its members overlap"))?)?;
        self.position = to;
        Ok(())
    }

    fn extended(&self, key: &str) -> Option<&[u8]> {
        let extensions = PaxExtensions::new(&self.extensions).flatten();
        let mut values = extensions.filter(|extension| extension.key_bytes() == key.as_bytes());
        values.next().map(|extension| extension.value_bytes())
    }

    fn extended_size(&self) -> Option<u64> {
        str::from_utf8(self.extended("size")?).ok()?.parse().ok()
    }
}
