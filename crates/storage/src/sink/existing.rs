use std::collections::HashSet;

use roaring::RoaringTreemap;
use xxhash_rust::xxh3::Xxh3;

use crate::source::Found;

/// The images that have a row already, whatever their index: by uri, and by etag where both the row
/// and the listing have one. Takes 16 to 32 bytes a row.
#[derive(Default)]
pub struct Existing {
    /// Hashes of uris, and of uris with etags, of 128 bits.
    known: HashSet<u128>,
    committed: RoaringTreemap,
    next: u64,
}

impl Existing {
    /// Of an output with rows of these indices.
    pub(super) fn new(committed: RoaringTreemap) -> Self {
        Self {
            known: HashSet::new(),
            committed,
            next: 0,
        }
    }

    pub(super) fn add(&mut self, uri: &str, etag: Option<&str>) {
        self.known.insert(hash(uri, etag));
        if etag.is_some() {
            // For a listing that has none.
            self.known.insert(hash(uri, Some("")));
        }
    }

    /// The index for the row of an image of the listing; `None` if it has one.
    pub fn index_for(&mut self, found: &Found) -> Option<u64> {
        let is_known = |etag| self.known.contains(&hash(&found.uri, etag));
        let has_row = match found.etag.as_deref() {
            // A row without an etag stands for the image whatever it is now.
            Some(etag) => is_known(Some(etag)) || is_known(None),
            None => is_known(None) || is_known(Some("")),
        };
        if has_row {
            return None;
        }
        while self.committed.contains(self.next) {
            self.next += 1;
        }
        self.next += 1;
        Some(self.next - 1)
    }
}

fn hash(uri: &str, etag: Option<&str>) -> u128 {
    let mut hash = Xxh3::default();
    hash.update(&(uri.len() as u64).to_le_bytes());
    hash.update(uri.as_bytes());
    if let Some(etag) = etag {
        hash.update(b"\0");
        hash.update(etag.as_bytes());
    }
    hash.digest128()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(uri: &str, etag: Option<&str>) -> Found {
        Found {
            uri: uri.to_owned(),
            content: trommel_types::Content::Whole,
            etag: etag.map(str::to_owned),
            size: None,
            columns: Vec::new(),
        }
    }

    #[test]
    fn new_and_changed_images_get_the_indices_that_are_free() {
        let mut existing = Existing::new([0, 1, 3].into_iter().collect());
        existing.add("a", Some("1"));
        existing.add("b", None);
        existing.add("c", Some("1"));
        for (uri, etag, index) in [
            ("a", Some("1"), None),
            ("a", Some("2"), Some(2)),
            ("a", None, None),
            ("b", Some("9"), None),
            ("b", None, None),
            ("d", None, Some(4)),
            ("c", Some("1"), None),
            ("e", Some("1"), Some(5)),
        ] {
            assert_eq!(
                existing.index_for(&found(uri, etag)),
                index,
                "{uri} {etag:?}"
            );
        }
    }
}
