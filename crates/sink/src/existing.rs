use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use roaring::RoaringTreemap;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// The images that already have a row, by uri, and by etag if both the row and the listing have
/// one. Takes about 50 bytes per row.
#[derive(Default)]
pub struct Existing {
    /// By hash of the uri; of several rows with the same uri, the first.
    rows: HashMap<u128, Known>,
    /// The other rows.
    more: HashMap<u128, VecDeque<Known>>,
    /// All their indices.
    taken: RoaringTreemap,
    next: u64,
}

/// A row that counts.
struct Known {
    index: u64,
    /// A hash of the etag, if it has one.
    etag: Option<u64>,
    /// Whether another model lacks this row, so that the image has to be classified again.
    is_lacking: bool,
}

impl Known {
    /// Whether the row belongs to the image in its current version. A row without an etag matches
    /// any version.
    fn is_of(&self, etag: Option<u64>) -> bool {
        !self.is_lacking && (self.etag.is_none() || etag.is_none() || self.etag == etag)
    }
}

impl Existing {
    /// Adds a row. Its index is not given to new images.
    pub(crate) fn add(&mut self, uri: &str, etag: Option<&str>, index: u64) {
        let known = Known {
            index,
            etag: etag.map(hash),
            is_lacking: false,
        };
        self.taken.insert(index);
        self.next = self.next.max(index + 1);
        let uri = hash_of(uri);
        match self.rows.entry(uri) {
            Entry::Vacant(place) => {
                place.insert(known);
            }
            Entry::Occupied(_) => self.more.entry(uri).or_default().push_back(known),
        }
    }

    /// Adds the row of an image that has changed and whose new row replaces it.
    pub(crate) fn add_replaced(&mut self, uri: &str, index: u64) {
        self.add(uri, None, index);
        let uri = hash_of(uri);
        let known = match self.more.get_mut(&uri).and_then(VecDeque::back_mut) {
            Some(last) => Some(last),
            None => self.rows.get_mut(&uri),
        };
        if let Some(known) = known {
            known.is_lacking = true;
        }
    }

    /// No new image gets an index below `first`.
    pub(crate) fn begin_at(&mut self, first: u64) {
        self.next = self.next.max(first);
    }

    /// New images get unused indices from `first` on. An interrupted run has committed rows in any
    /// order; repeating it gives the others the same indices again.
    pub(crate) fn fill_from(&mut self, first: u64) {
        self.next = first;
    }

    /// Merges the images of two models of one job: those that one of them lacks, or has in another
    /// version, are classified again under the same index.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.next = self.next.max(other.next);
        self.taken |= other.taken;
        for (uri, known) in &mut self.rows {
            let is_same = |other: &Known| other.index == known.index && other.etag == known.etag;
            if !other.rows.get(uri).is_some_and(is_same) {
                known.is_lacking = true;
                let more = self.more.get_mut(uri).into_iter().flatten();
                more.for_each(|known| known.is_lacking = true);
            }
        }
        for (uri, known) in other.rows {
            self.rows.entry(uri).or_insert(Known {
                is_lacking: true,
                ..known
            });
        }
        self
    }

    /// The index for the row of a listed image; `None` if it has a row. A changed image takes the
    /// index of its old row, a new image the next free one. The same listing always gives the same
    /// indices.
    pub fn index_for(&mut self, uri: &str, etag: Option<&str>) -> Option<u64> {
        let (uri, etag) = (hash_of(uri), etag.map(hash));
        let Some(known) = self.rows.get_mut(&uri) else {
            while self.taken.contains(self.next) {
                self.next += 1;
            }
            self.next += 1;
            return Some(self.next - 1);
        };
        let more = self.more.get_mut(&uri);
        let mut others = more.iter().flat_map(|more| more.iter());
        if known.is_of(etag) || others.any(|other| other.is_of(etag)) {
            return None;
        }
        let index = known.index;
        // A uri that is listed as often as it has rows takes each of their indices once.
        match more.and_then(VecDeque::pop_front) {
            Some(next) => *known = next,
            None => drop(self.rows.remove(&uri)),
        }
        Some(index)
    }
}

/// The uri in a form that every output can store: PostgreSQL has no NUL.
fn hash_of(uri: &str) -> u128 {
    match uri.contains('\0') {
        true => xxh3_128(uri.replace('\0', "\u{FFFD}").as_bytes()),
        false => xxh3_128(uri.as_bytes()),
    }
}

fn hash(etag: &str) -> u64 {
    xxh3_64(etag.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_was_replaced_already_is_replaced_again() {
        let mut existing = Existing::default();
        existing.add("a", Some("1"), 0);
        existing.add_replaced("b", 1);
        existing.add("c", Some("1"), 2);
        existing.add_replaced("c", 3);
        existing.begin_at(7);
        let listed = ["a", "b", "b", "c", "d"].map(|uri| existing.index_for(uri, Some("1")));
        assert_eq!(listed, [None, Some(1), Some(7), None, Some(8)]);
    }

    #[test]
    fn an_interrupted_run_gives_the_others_the_same_indices_again() {
        let mut existing = Existing::default();
        for (uri, index) in [("a", 0), ("b", 1), ("e", 4), ("f", 5)] {
            existing.add(uri, Some("1"), index);
        }
        existing.fill_from(2);
        let listed = ["c", "e", "d", "f", "g"].map(|uri| existing.index_for(uri, Some("1")));
        assert_eq!(listed, [Some(2), None, Some(3), None, Some(6)]);
    }

    #[test]
    fn what_one_of_two_models_lacks_comes_again_under_its_index() {
        let of = |rows: &[(&str, u64, &str)]| {
            let mut existing = Existing::default();
            for (uri, index, etag) in rows {
                existing.add(uri, Some(etag), *index);
            }
            existing
        };
        let one = of(&[("a", 0, "1"), ("b", 1, "1"), ("d", 3, "1")]);
        let other = of(&[("a", 0, "1"), ("c", 2, "1"), ("d", 3, "2")]);
        let mut both = one.and(other);
        let indices = ["a", "b", "c", "d", "e"].map(|uri| both.index_for(uri, Some("1")));
        assert_eq!(indices, [None, Some(1), Some(2), Some(3), Some(4)]);
    }

    #[test]
    fn a_new_image_comes_last_and_a_changed_one_takes_its_place() {
        let mut existing = Existing::default();
        for (uri, etag, index) in [
            ("a", Some("1"), 0),
            ("b", None, 1),
            ("c", Some("1"), 3),
            ("twice", Some("1"), 4),
            ("twice", Some("1"), 5),
        ] {
            existing.add(uri, etag, index);
        }
        for (uri, etag, index) in [
            ("a", Some("1"), None),
            ("a", None, None),
            ("a", Some("2"), Some(0)),
            ("b", Some("9"), None),
            ("b", None, None),
            ("d", None, Some(6)),
            ("c", Some("1"), None),
            ("e", Some("1"), Some(7)),
            ("twice", Some("1"), None),
            ("twice", Some("2"), Some(4)),
            ("twice", Some("2"), Some(5)),
            ("twice", Some("2"), Some(8)),
        ] {
            assert_eq!(existing.index_for(uri, etag), index, "{uri} {etag:?}");
        }
    }
}
