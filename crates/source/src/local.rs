//! Sources on this machine, in order, listed by their own thread.

use std::collections::{BTreeMap, BinaryHeap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use async_trait::async_trait;
use futures::future;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::{Column, ImageRef, Scalar};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::fetch::Fetcher;
use crate::listing::{Listing, Stop, Visitor};
use crate::stores::Stores;
use crate::union::{Place, Union};
use crate::{FetchLimits, Fetched, Found, Source, SourceOptions};

/// Images per chunk from the listing thread, to save wake-ups.
const CHUNK: usize = 128;
/// Buffered chunks between the listing thread and the stream.
const CHUNKS: usize = 4;

/// Sources on this machine, in order.
pub(super) struct LocalSource {
    specs: Vec<String>,
    shared: Arc<Shared>,
    fetcher: Fetcher,
}

struct Shared {
    parts: Vec<Part>,
    columns: Vec<Column>,
    options: SourceOptions,
    skipped: Arc<AtomicU64>,
}

/// A listing, and the positions of its columns among all.
struct Part {
    listing: Box<dyn Listing>,
    places: Vec<Place>,
}

impl LocalSource {
    pub(super) fn new(
        specs: &[String],
        listings: Vec<Box<dyn Listing>>,
        stores: &Stores,
        options: SourceOptions,
    ) -> Self {
        let mut union = Union::default();
        for listing in &listings {
            union.add(listing.columns());
        }
        let columns = union.into_columns();
        let parts = listings
            .into_iter()
            .map(|listing| Part {
                places: Place::of_each(listing.columns(), &columns),
                listing,
            })
            .collect();
        let shared = Shared {
            parts,
            columns,
            options,
            skipped: Arc::default(),
        };
        Self {
            specs: specs.to_vec(),
            fetcher: Fetcher::new(stores, &shared.options.video),
            shared: Arc::new(shared),
        }
    }
}

#[async_trait]
impl Source for LocalSource {
    fn describe(&self) -> String {
        let specs: Vec<_> = self.specs.iter().map(|spec| quoted(spec)).collect();
        format!("{}{}", specs.join(" "), self.shared.options.describe())
    }

    fn columns(&self) -> &[Column] {
        &self.shared.columns
    }

    fn list(&self) -> BoxStream<'static, Result<Found, StorageError>> {
        self.list_behind(None, &self.shared.skipped)
    }

    async fn count(&self) -> Result<u64, StorageError> {
        // A separate listing, so that skipped files are not counted twice.
        let listing = self.list_behind(None, &Arc::default());
        listing
            .try_fold(0, |images, _| future::ready(Ok(images + 1)))
            .await
    }

    fn list_from(
        &self,
        passed: u64,
        last_uri: Option<String>,
    ) -> BoxStream<'static, Result<Found, StorageError>> {
        match (passed, last_uri) {
            (0, _) => self.list(),
            (_, Some(last_uri)) if self.shared.can_go_on() => {
                self.list_behind(Some(last_uri), &self.shared.skipped)
            }
            (_, last_uri) => skip(self.list(), passed, last_uri),
        }
    }

    async fn fetch_within(
        &self,
        image: &ImageRef,
        limits: FetchLimits,
    ) -> Result<Fetched, StorageError> {
        self.fetcher.fetch(image, limits).await
    }

    fn hung(&self) -> usize {
        self.fetcher.hung()
    }

    fn skipped(&self) -> u64 {
        self.shared.skipped.load(Ordering::Relaxed)
    }
}

/// Skips the first images of a listing, the last of which must be `last_uri`.
fn skip(
    listing: BoxStream<'static, Result<Found, StorageError>>,
    passed: u64,
    last_uri: Option<String>,
) -> BoxStream<'static, Result<Found, StorageError>> {
    let numbered = stream::iter(1..).zip(listing);
    let kept = numbered.filter_map(move |(number, found): (u64, _)| {
        let kept = match found {
            Ok(found)
                if number == passed && last_uri.as_ref().is_some_and(|uri| *uri != found.uri) =>
            {
                Some(Err(StorageError::new(
                    StorageErrorKind::SourceChanged,
                    format!(
                        "the source lists {} where it listed {} before; submit a new job",
                        found.uri,
                        last_uri.clone().unwrap_or_default()
                    ),
                )))
            }
            Ok(_) if number <= passed => None,
            found => Some(found),
        };
        future::ready(kept)
    });
    kept.boxed()
}

impl LocalSource {
    /// Lists from the beginning, or after an image if the single listing supports that.
    fn list_behind(
        &self,
        last_uri: Option<String>,
        skipped: &Arc<AtomicU64>,
    ) -> BoxStream<'static, Result<Found, StorageError>> {
        let (sender, receiver) = mpsc::channel(CHUNKS);
        let (shared, skipped) = (Arc::clone(&self.shared), Arc::clone(skipped));
        // Not one of the runtime's blocking threads: the runtime waits for those at the end, and a
        // read from a terminal may never return.
        let thread = thread::Builder::new().name("trommel-list".to_owned());
        match thread.spawn(move || shared.send(sender, last_uri.as_deref(), &skipped)) {
            Ok(_) => ReceiverStream::new(receiver).flat_map(stream::iter).boxed(),
            Err(error) => {
                let error = StorageError::read("the source: no thread to list it", error);
                stream::iter([Err(error)]).boxed()
            }
        }
    }
}

/// A spec, quoted if it could be mistaken for several, or for an option.
fn quoted(spec: &str) -> String {
    let plain = !spec.starts_with("--") && !spec.contains([' ', '"', '\n', '\\']);
    if plain {
        spec.to_owned()
    } else {
        format!("{spec:?}")
    }
}

impl Shared {
    /// Sends the whole listing, followed by the error that ended it early, if any.
    fn send(&self, sender: mpsc::Sender<Chunk>, last_uri: Option<&str>, skipped: &AtomicU64) {
        skipped.store(0, Ordering::Relaxed);
        let mut outbox = Outbox {
            sender,
            skipped,
            chunk: Vec::new(),
            wanted: 1,
        };
        // A listing that merely ended would look complete.
        let ended = catch_unwind(AssertUnwindSafe(|| match self.options.sample {
            None => self.list(last_uri, &mut outbox),
            Some(count) => self.list_sample(count, &mut outbox),
        }));
        match ended {
            Ok(Ok(()) | Err(Stop::Unwanted)) => {}
            Ok(Err(Stop::Failed(error))) => outbox.chunk.push(Err(error)),
            Err(_) => outbox.chunk.push(Err(StorageError::new(
                StorageErrorKind::Unreadable,
                "listing the source panicked; this is a defect, please report it",
            ))),
        }
        // If this fails, the receiver is gone.
        drop(outbox.flush());
    }

    /// Whether a listing can continue after an image without repeating what precedes.
    fn can_go_on(&self) -> bool {
        self.options.sample.is_none() && self.parts.len() == 1 && self.parts[0].listing.can_go_on()
    }

    fn list(&self, last_uri: Option<&str>, next: &mut dyn Visitor) -> Result<(), Stop> {
        for part in &self.parts {
            let mut sieve = Sieve {
                shared: self,
                part,
                next,
            };
            match last_uri {
                None => part.listing.list(&self.options, &mut sieve)?,
                Some(last_uri) => part
                    .listing
                    .list_from(last_uri, &self.options, &mut sieve)?,
            }
        }
        Ok(())
    }

    fn list_sample(&self, count: u64, outbox: &mut Outbox<'_>) -> Result<(), Stop> {
        let mut sample = Sample {
            count,
            seed: self.options.sample_seed,
            chosen: BinaryHeap::new(),
            held: BTreeMap::new(),
            ordinal: 0,
            outbox,
        };
        self.list(None, &mut sample)?;
        let held = sample.held;
        held.into_values().try_for_each(|found| outbox.found(found))
    }
}

type Chunk = Vec<Result<Found, StorageError>>;

/// Sends images in chunks; the first ones are short, so that work begins at once.
struct Outbox<'a> {
    sender: mpsc::Sender<Chunk>,
    skipped: &'a AtomicU64,
    chunk: Chunk,
    wanted: usize,
}

impl Outbox<'_> {
    fn flush(&mut self) -> Result<(), Stop> {
        if self.chunk.is_empty() {
            return self.wanted();
        }
        let chunk = std::mem::take(&mut self.chunk);
        self.sender.blocking_send(chunk).map_err(|_| Stop::Unwanted)
    }

    /// Whether there is still a receiver.
    fn wanted(&self) -> Result<(), Stop> {
        if self.sender.is_closed() {
            return Err(Stop::Unwanted);
        }
        Ok(())
    }
}

impl Visitor for Outbox<'_> {
    fn found(&mut self, found: Found) -> Result<(), Stop> {
        self.chunk.push(Ok(found));
        if self.chunk.len() < self.wanted {
            return Ok(());
        }
        self.wanted = (2 * self.wanted).min(CHUNK);
        self.flush()
    }

    fn skipped(&mut self) -> Result<(), Stop> {
        self.skipped.fetch_add(1, Ordering::Relaxed);
        self.wanted()
    }

    fn waiting(&mut self) -> Result<(), Stop> {
        self.flush()
    }
}

/// Passes on images within the size limits, with their values in the columns of all sources.
struct Sieve<'a> {
    shared: &'a Shared,
    part: &'a Part,
    next: &'a mut dyn Visitor,
}

impl Visitor for Sieve<'_> {
    fn found(&mut self, mut found: Found) -> Result<(), Stop> {
        if !self.shared.options.takes_size(found.size) {
            return self.next.skipped();
        }
        let mut columns = vec![Scalar::Null; self.shared.columns.len()];
        for (place, value) in self.part.places.iter().zip(found.columns) {
            columns[place.position] = place.widened(value);
        }
        found.columns = columns;
        self.next.found(found)
    }

    fn skipped(&mut self) -> Result<(), Stop> {
        self.next.skipped()
    }

    fn waiting(&mut self) -> Result<(), Stop> {
        self.next.waiting()
    }
}

/// Keeps the `count` images with the lowest hashes of their uris, by position in the listing.
struct Sample<'a, 'b> {
    count: u64,
    seed: u64,
    chosen: BinaryHeap<(u64, u64)>,
    held: BTreeMap<u64, Found>,
    ordinal: u64,
    outbox: &'a mut Outbox<'b>,
}

impl Visitor for Sample<'_, '_> {
    fn found(&mut self, found: Found) -> Result<(), Stop> {
        let hash = xxh3_64_with_seed(found.uri.as_bytes(), self.seed);
        let ordinal = self.ordinal;
        self.ordinal += 1;
        let is_full = self.chosen.len() as u64 >= self.count;
        if is_full {
            match self.chosen.peek() {
                Some(highest) if (hash, ordinal) < *highest => {}
                _ => return self.outbox.wanted(),
            }
            if let Some((_, dropped)) = self.chosen.pop() {
                self.held.remove(&dropped);
            }
        }
        self.chosen.push((hash, ordinal));
        self.held.insert(ordinal, found);
        self.outbox.wanted()
    }

    fn skipped(&mut self) -> Result<(), Stop> {
        self.outbox.skipped()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
    use std::time::Duration;

    use futures::{FutureExt, StreamExt};
    use trommel_types::Content;

    use super::*;
    use crate::line_manifest::LineManifest;

    fn image(number: usize) -> Found {
        Found {
            uri: number.to_string(),
            content: Content::Whole,
            etag: None,
            size: None,
            columns: Vec::new(),
        }
    }

    fn source(listing: impl Listing + 'static, options: SourceOptions) -> LocalSource {
        let stores = Stores::new(&options);
        LocalSource::new(
            &["test".to_owned()],
            vec![Box::new(listing)],
            &stores,
            options,
        )
    }

    /// Lists images, or skips files, until the receiver is gone; then returns how many.
    struct Endless {
        skips: bool,
        ended: SyncSender<usize>,
    }

    impl Listing for Endless {
        fn list(&self, _: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
            for number in 0.. {
                let more = if self.skips && number > 0 {
                    visitor.skipped()
                } else {
                    visitor.found(image(number))
                };
                if let Err(stop) = more {
                    self.ended.send(number).unwrap();
                    return Err(stop);
                }
            }
            Ok(())
        }
    }

    fn endless(skips: bool, sample: Option<u64>) -> (LocalSource, Receiver<usize>) {
        let (ended, has_ended) = sync_channel(1);
        let options = SourceOptions {
            sample,
            ..SourceOptions::default()
        };
        (source(Endless { skips, ended }, options), has_ended)
    }

    #[tokio::test]
    async fn a_listing_is_bounded_and_ends_with_its_stream() {
        let (source, has_ended) = endless(false, None);
        let mut listing = source.list();
        assert_eq!(listing.next().await.unwrap().unwrap().uri, "0");
        assert!(
            has_ended.recv_timeout(Duration::from_millis(50)).is_err(),
            "it waits"
        );
        drop(listing);
        let listed = has_ended.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(
            listed <= CHUNK * (CHUNKS + 2),
            "{listed} images were listed ahead"
        );
    }

    #[tokio::test]
    async fn a_listing_that_finds_nothing_more_ends_with_its_stream() {
        for sample in [None, Some(10)] {
            let (source, has_ended) = endless(true, sample);
            drop(source.list());
            has_ended.recv_timeout(Duration::from_secs(10)).unwrap();
        }
    }

    struct Panicking;

    impl Listing for Panicking {
        fn list(&self, _: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
            visitor.found(image(0))?;
            panic!("on purpose");
        }
    }

    #[tokio::test]
    async fn a_listing_that_panics_does_not_pass_for_a_complete_one() {
        let listed: Vec<_> = source(Panicking, SourceOptions::default())
            .list()
            .collect()
            .await;
        assert_eq!(listed.len(), 2);
        assert!(
            listed[1]
                .as_ref()
                .unwrap_err()
                .to_string()
                .contains("panicked")
        );
    }

    #[tokio::test]
    async fn standard_input_is_listed_line_by_line_and_once() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let manifest = LineManifest::once(Box::new(reader));
        let source = source(manifest, SourceOptions::default());
        let mut listing = source.list();
        assert!(
            listing.next().now_or_never().is_none(),
            "nothing is written yet"
        );
        // Each name arrives although the pipe stays open and no chunk is full.
        for name in ["a.jpg", "b c.jpg", "d.jpg", "e.jpg", "f.jpg"] {
            std::io::Write::write_all(&mut writer, format!("{name}\n").as_bytes()).unwrap();
            let found = tokio::time::timeout(Duration::from_secs(10), listing.next()).await;
            assert_eq!(found.unwrap().unwrap().unwrap().uri, name);
        }
        std::io::Write::write_all(&mut writer, b"ftp://host/key\n").unwrap();
        let error = listing.next().await.unwrap().unwrap_err().to_string();
        assert!(
            error.contains("standard input:6: ftp://host/key"),
            "{error}"
        );
        assert!(error.contains("download"), "{error}");
        assert!(listing.next().await.is_none());
        let again = source.list().next().await.unwrap().unwrap_err().to_string();
        assert!(
            again.contains("standard input") && again.contains("only once"),
            "{again}"
        );
    }

    #[test]
    fn descriptions_tell_one_source_from_two() {
        assert_eq!(quoted("a b"), "\"a b\"");
        assert_eq!(quoted("--sample"), "\"--sample\"");
        assert_eq!(quoted("photos/é.jpg"), "photos/é.jpg");
    }
}
