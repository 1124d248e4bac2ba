//! Tar archives and WebDataset shards, whose members are read by byte range.

use std::io::{self, BufReader, Read};

use tar::EntryType;
use trommel_types::{Column, ColumnKind, Content, Scalar};

use crate::source::listing::{Listing, Stop, Visitor};
use crate::source::stored::Stored;
use crate::source::{Found, SourceOptions};
use crate::{StorageError, uri};

/// Suffixes of the members of a WebDataset sample that pass through, which are also the names of
/// their columns.
const SIBLINGS: [&str; 3] = ["json", "cls", "txt"];
/// Members looked at to learn which siblings there are.
const LOOKED_AT: usize = 1000;
/// Longest sibling in bytes that passes through.
const SIBLING_LIMIT: u64 = 1 << 20;

/// A tar archive. Members whose names are the same up to the first dot of the base name, and stand
/// together, are one WebDataset sample: its `.json`, `.cls` and `.txt` pass through with its image.
///
/// Names that are not UTF-8 appear percent-encoded. Links and sparse members have no bytes of their
/// own: such an image is listed and fails as empty.
pub(super) struct Archive {
    stored: Stored,
    columns: Vec<Column>,
}

impl Archive {
    /// # Errors
    /// When the file cannot be read, is compressed, is no tar archive, or holds no image.
    pub(super) fn open(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        refuse_compressed(stored)?;
        let mut found = [false; SIBLINGS.len()];
        let mut images = 0;
        let mut looked_at = 0;
        let ended = for_each_member(stored, &mut |member| {
            if let Some(sibling) = member.sibling() {
                found[sibling] = true;
            }
            images += usize::from(options.takes_suffix(member.name.as_ref()));
            looked_at += 1;
            // Beyond the first members only a first image is still looked for.
            if looked_at >= LOOKED_AT && images > 0 {
                return Err(Stop::Unwanted);
            }
            Ok(())
        });
        if let Err(Stop::Failed(error)) = ended {
            return Err(error);
        }
        if images == 0 {
            return Err(StorageError::invalid_source(format!(
                "source {stored} holds no images by their suffixes; name others with --suffixes"
            )));
        }
        let present = SIBLINGS.iter().zip(found).filter(|(_, found)| *found);
        let columns = present
            .map(|(name, _)| Column {
                name: (*name).to_owned(),
                kind: ColumnKind::String,
            })
            .collect();
        Ok(Self {
            stored: stored.clone(),
            columns,
        })
    }
}

impl Listing for Archive {
    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        let container = Container {
            uri: self.stored.uri(),
            etag: self.stored.version(),
            columns: &self.columns,
        };
        let mut sample = Sample::default();
        let mut warned = false;
        for_each_member(&self.stored, &mut |mut member| {
            if member.key() != sample.key {
                let next = Sample {
                    key: member.key().to_owned(),
                    ..Sample::default()
                };
                std::mem::replace(&mut sample, next).hand_on(&container, visitor)?;
            }
            if options.takes_suffix(member.name.as_ref()) {
                sample.images.push(member);
            } else if let Some(sibling) = member.sibling() {
                let unknown = !self
                    .columns
                    .iter()
                    .any(|column| column.name == SIBLINGS[sibling]);
                if (unknown || member.text.is_none()) && !warned {
                    tracing::warn!(
                        archive = container.uri,
                        member = member.name,
                        "left out a member that is too long, or first of its kind far into the archive"
                    );
                    warned = true;
                }
                sample.siblings[sibling] = member.text.take();
            } else {
                visitor.skipped()?;
            }
            Ok(())
        })?;
        sample.hand_on(&container, visitor)
    }
}

/// What the members of an archive have in common.
struct Container<'a> {
    uri: String,
    etag: Option<String>,
    columns: &'a [Column],
}

/// The members that stand together under one key.
#[derive(Default)]
struct Sample {
    key: String,
    images: Vec<Member>,
    siblings: [Option<String>; SIBLINGS.len()],
}

impl Sample {
    fn hand_on(self, container: &Container<'_>, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        for image in self.images {
            let columns = container.columns.iter().map(|column| {
                let sibling = SIBLINGS.iter().position(|name| *name == column.name);
                let text = sibling.and_then(|sibling| self.siblings[sibling].clone());
                text.map_or(Scalar::Null, Scalar::String)
            });
            visitor.found(Found {
                uri: format!("{}#{}", container.uri, image.name),
                content: Content::Range {
                    archive: container.uri.clone(),
                    offset: image.offset,
                    length: image.length,
                },
                etag: container.etag.clone(),
                size: Some(image.length),
                columns: columns.collect(),
            })?;
        }
        Ok(())
    }
}

struct Member {
    name: String,
    offset: u64,
    length: u64,
    /// The content of a sibling, unless it is too long.
    text: Option<String>,
}

impl Member {
    /// The name up to the first dot of its base name, and what follows the dot.
    fn split(&self) -> (&str, Option<&str>) {
        let base = self.name.rfind('/').map_or(0, |slash| slash + 1);
        match self.name[base..].find('.') {
            Some(dot) => (&self.name[..base + dot], Some(&self.name[base + dot + 1..])),
            None => (&self.name, None),
        }
    }

    /// What the members of a sample have in common.
    fn key(&self) -> &str {
        self.split().0
    }

    /// Which of the siblings it is.
    fn sibling(&self) -> Option<usize> {
        let suffix = self.split().1?;
        SIBLINGS
            .iter()
            .position(|known| known.eq_ignore_ascii_case(suffix))
    }
}

/// Walks over the headers of an archive; only the content of siblings is read.
fn for_each_member(
    stored: &Stored,
    each: &mut dyn FnMut(Member) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let invalid = |error: io::Error| {
        StorageError::invalid_source(format!("source {stored} cannot be read as tar: {error}"))
    };
    let file = stored.open()?;
    // `entries_with_seek` leaps over content; the buffer serves the headers.
    let mut archive = tar::Archive::new(BufReader::with_capacity(1 << 12, file));
    for entry in archive.entries_with_seek().map_err(invalid)? {
        let mut entry = entry.map_err(invalid)?;
        let name = uri::of_bytes(&entry.path_bytes());
        let own_bytes = match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous => true,
            EntryType::Link | EntryType::Symlink | EntryType::GNUSparse => false,
            _ => continue,
        };
        if name.ends_with('/') {
            continue; // how old archives write folders
        }
        let mut member = Member {
            name,
            offset: entry.raw_file_position(),
            length: if own_bytes { entry.size() } else { 0 },
            text: None,
        };
        if member.sibling().is_some() && member.length <= SIBLING_LIMIT {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).map_err(invalid)?;
            member.text = Some(String::from_utf8_lossy(&bytes).trim_end().to_owned());
        }
        each(member)?;
    }
    Ok(())
}

/// Refuses archives whose members have no byte ranges, whatever they are called.
fn refuse_compressed(stored: &Stored) -> Result<(), StorageError> {
    let mut begin = [0; 6];
    let read = stored.open()?.take(begin.len() as u64).read(&mut begin);
    let length = read.map_err(|error| match stored {
        Stored::File(path) => StorageError::source(path, error),
        Stored::Object(_) => StorageError::read(stored, error),
    })?;
    let magic: [(&[u8], &str); 4] = [
        (b"\x1f\x8b", "gzip -dk"),
        (b"\x28\xb5\x2f\xfd", "zstd -dk"),
        (b"\xfd7zXZ\0", "xz -dk"),
        (b"BZh", "bzip2 -dk"),
    ];
    match magic
        .iter()
        .find(|(magic, _)| begin[..length].starts_with(magic))
    {
        None => Ok(()),
        Some((_, command)) => Err(StorageError::invalid_source(format!(
            "source {stored} is compressed, so its members cannot be read by byte range; decompress it first ({command} {stored})"
        ))),
    }
}
