//! A file in an archive.

use trommel_types::{Content, Packing};

use crate::zip_members::ZipEntry;

/// Suffixes of WebDataset members that become columns, named after them.
pub(super) const SIBLINGS: [&str; 3] = ["json", "cls", "txt"];
/// Longest sibling in a column, in bytes.
pub(super) const SIBLING_LIMIT: u64 = 1 << 20;

/// A file in an archive.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) at: At,
    /// Uncompressed size of the file.
    pub(super) length: u64,
    /// The content of a sibling, unless it is too long.
    pub(super) text: Option<String>,
}

/// The location of a member's bytes.
pub(super) enum At {
    /// From this byte of the archive on.
    Range { offset: u64 },
    /// From this byte of the unpacked archive on.
    Unpacked { offset: u64, packing: Packing },
    /// According to a zip's directory.
    Zip(ZipEntry),
}

impl Member {
    /// Where its bytes are in an archive.
    pub(super) fn content(&self, archive: &str) -> Content {
        let (archive, length) = (archive.to_owned(), self.length);
        match &self.at {
            At::Range { offset } => Content::Range {
                archive,
                offset: *offset,
                length,
            },
            At::Unpacked { offset, packing } => Content::Unpacked {
                archive,
                packing: *packing,
                offset: *offset,
                length,
            },
            At::Zip(entry) => entry.content(&archive),
        }
    }

    /// The name up to the first dot of its base name, and the part after the dot.
    fn split(&self) -> (&str, Option<&str>) {
        let base = self.name.rfind('/').map_or(0, |slash| slash + 1);
        match self.name[base..].find('.') {
            Some(dot) => (&self.name[..base + dot], Some(&self.name[base + dot + 1..])),
            None => (&self.name, None),
        }
    }

    /// The common part of the names in a sample.
    pub(super) fn key(&self) -> &str {
        self.split().0
    }

    /// The suffix of the sibling.
    pub(super) fn sibling(&self) -> Option<usize> {
        let suffix = self.split().1?;
        SIBLINGS
            .iter()
            .position(|known| known.eq_ignore_ascii_case(suffix))
    }
}

/// The content of a sibling as shown in its column.
pub(super) fn sibling_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_owned()
}
