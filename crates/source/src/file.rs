//! Single files, and what is known about them without opening them.

use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use trommel_storage::uri;
use trommel_types::{Content, Scalar};

use crate::listing::{Listing, Stop, Visitor};
use crate::{Found, SourceOptions};

/// One file named by the user, whatever its suffix.
pub(super) struct SingleFile {
    path: PathBuf,
}

impl SingleFile {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }
}

impl Listing for SingleFile {
    fn list(&self, _: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        visitor.found(image_at(&self.path, Vec::new()))
    }
}

/// The image at a path, with what is known without opening it.
pub(super) fn image_at(path: &Path, columns: Vec<Scalar>) -> Found {
    Found {
        columns,
        ..image_of(uri::of_path(path), path.metadata().ok().as_ref())
    }
}

/// The image at a uri. Unreadable entries, and entries that are not files, have no size.
pub(super) fn image_of(uri: String, metadata: Option<&Metadata>) -> Found {
    let file = metadata.filter(|metadata| metadata.is_file());
    Found {
        uri,
        content: Content::Whole,
        etag: file.and_then(etag),
        size: file.map(Metadata::len),
        columns: Vec::new(),
    }
}

/// The version of a local file: its modification time in nanoseconds since 1970, and its size in
/// bytes, both hexadecimal.
pub(super) fn etag(metadata: &Metadata) -> Option<String> {
    let changed = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!("{:x}-{:x}", changed.as_nanos(), metadata.len()))
}
