use std::borrow::Cow;
use std::collections::VecDeque;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use trommel_storage::{StorageError, StorageErrorKind};
use xxhash_rust::xxh3::Xxh3;

/// The committed indices, as runs of consecutive ones with a hash of their uris.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Runs(Vec<Run>);

/// A run of consecutive indices in a part, with a hash of their uris.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Run {
    /// First index.
    start: u64,
    /// Last index.
    end: u64,
    /// XXH3 (64 bits) of each uri's length (8 bytes, little endian) and bytes, with NUL replaced by
    /// U+FFFD. Hexadecimal in JSON, because many readers lose digits of such numbers.
    #[serde(serialize_with = "to_hex", deserialize_with = "from_hex")]
    hash: u64,
}

impl Runs {
    /// The runs of rows sorted by index.
    pub(crate) fn of<'a>(rows: impl IntoIterator<Item = (u64, &'a str)>) -> Self {
        let mut builder = RunsBuilder::default();
        rows.into_iter()
            .for_each(|(index, uri)| builder.add(index, uri));
        builder.finish()
    }

    /// First and last index of each run, in the order of the parts.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|run| (run.start, run.end))
    }

    pub(crate) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    /// A hash of all indices and uris, independent of how they are split into parts.
    pub(crate) fn fingerprint(&self) -> String {
        let mut runs = self.0.clone();
        runs.sort_unstable_by_key(|run| run.start);
        let mut hash = Xxh3::default();
        for run in runs {
            [run.start, run.end, run.hash]
                .iter()
                .for_each(|word| hash.update(&word.to_le_bytes()));
        }
        hex(hash.digest())
    }
}

/// Collects runs of rows that arrive sorted by index.
#[derive(Default)]
pub(crate) struct RunsBuilder {
    done: Vec<Run>,
    open: Option<(u64, u64, UriHash)>,
}

impl RunsBuilder {
    pub(crate) fn add(&mut self, index: u64, uri: &str) {
        match &mut self.open {
            Some((_, end, hash)) if end.checked_add(1) == Some(index) => {
                *end = index;
                hash.add(uri);
            }
            _ => {
                self.close();
                let mut hash = UriHash::default();
                hash.add(uri);
                self.open = Some((index, index, hash));
            }
        }
    }

    pub(crate) fn finish(mut self) -> Runs {
        self.close();
        Runs(self.done)
    }

    fn close(&mut self) {
        let open = self.open.take();
        self.done.extend(open.map(|(start, end, hash)| Run {
            start,
            end,
            hash: hash.finish(),
        }));
    }
}

#[derive(Default)]
struct UriHash(Xxh3);

impl UriHash {
    fn add(&mut self, uri: &str) {
        // PostgreSQL stores no NUL, and a listing must compare with what is read from there.
        let uri: Cow<'_, str> = match uri.contains('\0') {
            true => uri.replace('\0', "\u{FFFD}").into(),
            false => uri.into(),
        };
        // The length distinguishes ["ab", "c"] from ["a", "bc"].
        self.0.update(&(uri.len() as u64).to_le_bytes());
        self.0.update(uri.as_bytes());
    }

    fn finish(&self) -> u64 {
        self.0.digest()
    }
}

fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

fn to_hex<S: Serializer>(hash: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&hex(*hash))
}

fn from_hex<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    u64::from_str_radix(&text, 16).map_err(serde::de::Error::custom)
}

/// Compares a listing with the committed rows, so that no row gets another image's index. When an
/// uncommitted index is observed, every committed one before it has been compared. A committed run
/// is judged at its end, so an index between two runs may be handed out before a later change is
/// found; its row still has its own uri.
#[derive(Default)]
pub struct SourceCheck {
    /// Sorted by index, without overlaps.
    runs: VecDeque<Run>,
    hash: UriHash,
}

impl SourceCheck {
    /// Compares with these runs, from the first image of the listing on.
    pub fn new(mut runs: Runs) -> Self {
        runs.0.sort_unstable_by_key(|run| run.start);
        Self {
            runs: runs.0.into(),
            hash: UriHash::default(),
        }
    }

    /// Observes the next image of the listing, and returns whether its row is committed. `index`
    /// counts up from 0.
    ///
    /// # Errors
    /// [`SourceChanged`](StorageErrorKind::SourceChanged) at the end of the first run whose uris
    /// have changed.
    pub fn observe(&mut self, index: u64, uri: &str) -> Result<bool, StorageError> {
        let Some(run) = self.runs.front().filter(|run| run.start <= index).copied() else {
            return Ok(false);
        };
        self.hash.add(uri);
        if run.end == index {
            if self.hash.finish() != run.hash {
                return Err(changed(format!(
                    "lists other images than before at indices {} to {}",
                    run.start, run.end
                )));
            }
            self.runs.pop_front();
            self.hash = UriHash::default();
        }
        Ok(true)
    }

    /// Ends the comparison with a listing of `total` images.
    ///
    /// # Errors
    /// [`SourceChanged`](StorageErrorKind::SourceChanged) if rows are committed beyond it.
    pub fn finish(self, total: u64) -> Result<(), StorageError> {
        match self.runs.front() {
            None => Ok(()),
            Some(run) => Err(changed(format!(
                "lists only {total} images now, but rows of indices {} to {} are committed already",
                run.start, run.end
            ))),
        }
    }
}

fn changed(what: String) -> StorageError {
    StorageError::new(
        StorageErrorKind::SourceChanged,
        format!(
            "the source {what}; choose another --output, add rows for the new images with --skip-existing, or start over with --overwrite"
        ),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uri(index: u64) -> String {
        format!("photos/{index}.jpg")
    }

    fn runs_of(indices: impl IntoIterator<Item = u64>) -> Runs {
        let rows: Vec<_> = indices
            .into_iter()
            .map(|index| (index, uri(index)))
            .collect();
        Runs::of(rows.iter().map(|(index, uri)| (*index, uri.as_str())))
    }

    proptest! {
        #[test]
        fn an_unchanged_listing_passes_and_tells_what_is_committed(
            committed in prop::collection::btree_set(0_u64..60, 0..60), part in 1_usize..20,
        ) {
            // Parts as several successive sinks would leave them, the last one first.
            let indices: Vec<_> = committed.iter().copied().collect();
            let mut runs = Runs::default();
            indices.chunks(part).rev().for_each(|part| runs.append(runs_of(part.iter().copied())));
            let mut check = SourceCheck::new(runs);
            for index in 0..60 {
                prop_assert_eq!(check.observe(index, &uri(index)).unwrap(), committed.contains(&index));
            }
            check.finish(60).unwrap();
        }

        #[test]
        fn a_changed_uri_is_found_before_anything_after_its_run(
            committed in prop::collection::btree_set(0_u64..60, 1..60), changed: prop::sample::Index,
        ) {
            let indices: Vec<_> = committed.iter().copied().collect();
            let changed = indices[changed.index(indices.len())];
            let mut check = SourceCheck::new(runs_of(committed));
            let mut found = false;
            for index in 0..60 {
                let listed = if index == changed { "photos/new.jpg".to_owned() } else { uri(index) };
                match check.observe(index, &listed) {
                    Err(error) => {
                        prop_assert_eq!(error.kind(), StorageErrorKind::SourceChanged);
                        found = true;
                        break;
                    }
                    Ok(done) => prop_assert!(done || index < changed, "passed {} unnoticed", changed),
                }
            }
            prop_assert!(found);
        }

        #[test]
        fn runs_are_maximal_cover_their_indices_and_survive_json(
            committed in prop::collection::btree_set(0_u64..100, 0..100),
        ) {
            let runs = runs_of(committed.iter().copied());
            let covered: Vec<_> = runs.ranges().flat_map(|(start, end)| start..=end).collect();
            prop_assert_eq!(covered, committed.into_iter().collect::<Vec<_>>());
            let ranges: Vec<_> = runs.ranges().collect();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 + 1 < pair[1].0));
            let json = serde_json::to_string(&runs).unwrap();
            prop_assert_eq!(serde_json::from_str::<Runs>(&json).unwrap(), runs);
        }

        #[test]
        fn moving_a_letter_from_one_uri_to_the_next_changes_the_hash(
            text in "[a-c]{2,12}", one: prop::sample::Index, other: prop::sample::Index,
        ) {
            let split = |at: usize| Runs::of([(0, &text[..at]), (1, &text[at..])]);
            let (one, other) = (one.index(text.len()), other.index(text.len()));
            prop_assert_eq!(split(one) == split(other), one == other);
        }
    }

    #[test]
    fn a_source_that_has_shrunk_is_refused_and_both_ways_on_are_named() {
        for reached in 0..2 {
            let mut check = SourceCheck::new(Runs::of([(0, "a"), (1, "b")]));
            for index in 0..reached {
                assert!(check.observe(index, "a").unwrap());
            }
            let error = check.finish(reached).unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::SourceChanged, "{error}");
            assert!(error.to_string().contains("indices 0 to 1"), "{error}");
            assert!(error.to_string().contains("another --output"), "{error}");
            assert!(error.to_string().contains("--overwrite"), "{error}");
        }
    }

    #[test]
    fn the_first_run_that_differs_is_named() {
        let mut check = SourceCheck::new(Runs::of([(0, "a"), (2, "c"), (3, "d"), (9, "j")]));
        assert!(check.observe(0, "a").unwrap());
        assert!(!check.observe(1, "b").unwrap());
        assert!(check.observe(2, "other").unwrap());
        let error = check.observe(3, "d").unwrap_err();
        assert!(error.to_string().contains("indices 2 to 3"), "{error}");
    }

    #[test]
    fn the_largest_index_does_not_overflow() {
        let runs = Runs::of([(u64::MAX - 1, "y"), (u64::MAX, "z"), (0, "a")]);
        assert_eq!(
            runs.ranges().collect::<Vec<_>>(),
            [(u64::MAX - 1, u64::MAX), (0, 0)]
        );
    }
}
