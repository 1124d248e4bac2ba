//! A file in an archive.

use trommel_types::{Content, Packing};

use crate::zip_members::ZipEntry;

/// Suffixes of the members of a WebDataset sample that pass through, which are also the names of
/// their columns.
pub(super) const SIBLINGS: [&str; 3] = ["json", "cls", "txt"];
/// Longest sibling in bytes that passes through.
pub(super) const SIBLING_LIMIT: u64 = 1 << 20;

/// A file in an archive.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) at: At,
    /// Bytes of the file itself, however it is packed.
    pub(super) length: u64,
    /// The content of a sibling, unless it is too long.
    pub(super) text: Option<String>,
}

/// Where the bytes of a member are.
pub(super) enum At {
    /// From this byte of the archive on.
    Range { offset: u64 },
    /// From this byte on of what the archive unpacks to.
    Unpacked { offset: u64, packing: Packing },
    /// Where a zip's directory says.
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

    /// The name up to the first dot of its base name, and what follows the dot.
    fn split(&self) -> (&str, Option<&str>) {
        let base = self.name.rfind('/').map_or(0, |slash| slash + 1);
        match self.name[base..].find('.') {
            Some(dot) => (&self.name[..base + dot], Some(&self.name[base + dot + 1..])),
            None => (&self.name, None),
        }
    }

    /// What the members of a sample have in common.
    pub(super) fn key(&self) -> &str {
        self.split().0
    }

    /// Which of the siblings it is.
    pub(super) fn sibling(&self) -> Option<usize> {
        let suffix = self.split().1?;
        SIBLINGS
            .iter()
            .position(|known| known.eq_ignore_ascii_case(suffix))
    }
}

/// The content of a sibling as its column shows it.
pub(super) fn sibling_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_owned()
}
