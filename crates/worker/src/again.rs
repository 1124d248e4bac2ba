//! Finds the images of failed rows in the current listing of the source.

use std::collections::HashMap;

use roaring::RoaringTreemap;
use trommel_sink::FailedImage;
use trommel_source::Found;
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::{ErrorKind, Failure};

/// Most images found at other positions than before: each is held until the listing ends.
const MOST_MOVED: usize = 500_000;

/// Images with failed rows that are classified again.
///
/// If the source is unchanged, a listing finds each at its position. A moved image is recognised by
/// its uri, if the source lists that only once.
#[derive(Default)]
pub(crate) struct Again {
    /// Sorted by index.
    images: Vec<FailedImage>,
    /// Number of images with each uri, by its hash.
    uris: HashMap<u64, u32>,
    /// The positions in `images` of those that were found at their place.
    found: RoaringTreemap,
    /// Images found at other positions, by uri.
    moved: HashMap<String, (Found, u32)>,
}

/// The fate of an image that was not at its position.
pub(crate) enum Late {
    /// It is at another position.
    Moved(u64, Found),
    /// It was not found; its new row says so.
    Gone(FailedImage, Failure),
}

impl Again {
    /// Looks for these images, which are sorted by index.
    pub(crate) fn new(images: Vec<FailedImage>) -> Self {
        let mut uris = HashMap::new();
        for image in &images {
            *uris.entry(hash(&image.uri)).or_default() += 1;
        }
        Self {
            images,
            uris,
            ..Self::default()
        }
    }

    /// Whether there is nothing to look for.
    pub(crate) fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// If the listed image is one of these, returns its index and the image.
    ///
    /// # Errors
    /// If too many have moved.
    pub(crate) fn observe(
        &mut self,
        place: u64,
        found: Found,
    ) -> Result<Option<(u64, Found)>, StorageError> {
        if !self.uris.contains_key(&hash(&found.uri)) {
            return Ok(None);
        }
        let here = self
            .images
            .binary_search_by_key(&place, |image| image.index);
        if let Ok(position) = here
            && self.images[position].uri == found.uri
        {
            self.found.insert(position as u64);
            return Ok(Some((place, found)));
        }
        if let Some((_, times)) = self.moved.get_mut(&found.uri) {
            *times += 1;
            return Ok(None);
        }
        if self.moved.len() == MOST_MOVED {
            return Err(StorageError::new(
                StorageErrorKind::SourceChanged,
                format!(
                    "the source lists more than {MOST_MOVED} of the failed images at other places than before; submit it again with another output"
                ),
            ));
        }
        self.moved.insert(found.uri.clone(), (found, 1));
        Ok(None)
    }

    /// The images that the finished listing did not show at their positions.
    pub(crate) fn finish(mut self) -> impl Iterator<Item = Late> {
        for position in &self.found {
            let image = usize::try_from(position).ok();
            if let Some(image) = image.and_then(|position| self.images.get(position)) {
                self.uris
                    .entry(hash(&image.uri))
                    .and_modify(|count| *count -= 1);
            }
        }
        let Self {
            images,
            uris,
            found,
            mut moved,
        } = self;
        let rest = (0..).zip(images);
        let rest = rest.filter(move |(position, _)| !found.contains(*position));
        rest.map(move |(_, image)| {
            let same = uris.get(&hash(&image.uri)).copied().unwrap_or_default();
            let (kind, error) = match (moved.remove(&image.uri), same) {
                (None, _) => (
                    ErrorKind::NotFound,
                    format!("{} is not listed by the source any more", image.uri),
                ),
                (Some((found, 1)), 1) => return Late::Moved(image.index, found),
                (Some(several), _) => {
                    moved.insert(image.uri.clone(), several);
                    (
                        ErrorKind::Changed,
                        format!(
                            "{} is listed more than once, and not at place {} any more, so it is unknown which one its row is of",
                            image.uri, image.index
                        ),
                    )
                }
            };
            Late::Gone(image, Failure { kind, error })
        })
    }
}

fn hash(uri: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(uri.as_bytes())
}

#[cfg(test)]
mod tests {
    use trommel_types::Content;

    use super::*;

    fn failed(images: &[(u64, &str)]) -> Again {
        let image = |(index, uri): &(u64, &str)| FailedImage {
            index: *index,
            uri: (*uri).to_owned(),
            etag: None,
            columns: Vec::new(),
        };
        Again::new(images.iter().map(image).collect())
    }

    /// Images found at once, and late, with the size to tell them apart.
    fn look(mut again: Again, uris: &[&str]) -> (Vec<u64>, Vec<(u64, String)>) {
        let mut at_once = Vec::new();
        for (place, uri) in (0..).zip(uris) {
            let found = Found {
                uri: (*uri).to_owned(),
                content: Content::Whole,
                etag: None,
                size: Some(place),
                columns: Vec::new(),
            };
            if let Some((index, found)) = again.observe(place, found).unwrap() {
                assert_eq!(found.size, Some(index));
                at_once.push(index);
            }
        }
        let late = again.finish().map(|late| match late {
            Late::Moved(index, found) => (index, format!("at {}", found.size.unwrap())),
            Late::Gone(image, failure) => (image.index, failure.kind.to_string()),
        });
        (at_once, late.collect())
    }

    #[test]
    fn what_is_at_its_place_is_found_at_once() {
        let (at_once, late) = look(failed(&[(1, "b"), (3, "b")]), &["a", "b", "c", "b", "b"]);
        assert_eq!((at_once, late.len()), (vec![1, 3], 0));
    }

    #[test]
    fn what_is_elsewhere_is_found_by_its_uri_and_what_is_gone_says_so() {
        let again = failed(&[(0, "a"), (1, "b"), (2, "c"), (4, "e")]);
        let (at_once, late) = look(again, &["new", "a", "c", "b"]);
        assert_eq!(at_once, [2]);
        let expected = [(0, "at 1"), (1, "at 3"), (4, "not_found")];
        assert_eq!(late, expected.map(|(index, what)| (index, what.to_owned())));
    }

    #[test]
    fn of_a_uri_that_is_listed_twice_nobody_guesses_which_one_it_is() {
        let changed = |index| (index, "changed".to_owned());
        // Both may have been at 1.
        let (_, late) = look(failed(&[(1, "b")]), &["b", "a", "b"]);
        assert_eq!(late, [changed(1)]);
        // Two rows, one image.
        let (_, late) = look(failed(&[(1, "b"), (3, "b")]), &["b", "a"]);
        assert_eq!(late, [changed(1), changed(3)]);
        // Where one is at its place, the other is the one that is left.
        let (at_once, late) = look(failed(&[(1, "b"), (3, "b")]), &["a", "b", "b"]);
        assert_eq!(at_once, [1]);
        assert_eq!(late, [(3, "at 2".to_owned())]);
    }
}
