//! Images from S3 and rows to it, against a store that checks signatures.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Barrier, Mutex, MutexGuard};

use common::{image, open, record, row, server, wait};
use futures::{FutureExt, StreamExt};
use trommel_storage::testsuite::S3Server;
use trommel_storage::{
    BucketDestination, BucketSink, Claim, Claims, Format, Found, JobRecord, Opened, S3Config,
    Source, SourceOptions, StorageError, StorageErrorKind, Summary, open_source,
};
use trommel_types::{Classification, Content, ImageRef};

fn uris(source: &dyn Source, from: Option<(u64, &str)>) -> Vec<String> {
    let listing = match from {
        None => source.list(),
        Some((passed, last)) => source.list_from(passed, Some(last.to_owned())),
    };
    let found: Vec<Found> = wait(listing.map(Result::unwrap).collect());
    found.into_iter().map(|found| found.uri).collect()
}

#[test]
fn a_listing_is_paged_in_the_order_of_the_keys() {
    let server = server();
    let mut keys: Vec<_> = (0..2500)
        .map(|n| format!("a/{n}/é {}.jpg", n % 7))
        .collect();
    for key in &keys {
        server.put("bucket", key, b"x");
    }
    server.put("bucket", "a/notes.txt", b"no image");
    server.put("bucket", "b/other.jpg", b"not asked for");
    keys.sort();
    let source = open(&server, "s3://bucket/a/").unwrap();
    let expected: Vec<_> = keys
        .iter()
        .map(|key| format!("s3://bucket/{key}"))
        .collect();
    assert_eq!(uris(source.as_ref(), None), expected);
    assert_eq!(source.skipped(), 1);
    // Behind an image, with fewer requests than from the beginning.
    let before = server.requests();
    let rest = uris(source.as_ref(), Some((2400, &expected[2399])));
    assert_eq!(rest, expected[2400..]);
    assert_eq!(server.requests() - before, 1);
    assert_eq!(
        uris(source.as_ref(), Some((2500, &expected[2499]))),
        Vec::<String>::new()
    );
    assert_eq!(uris(source.as_ref(), Some((0, ""))), expected);
}

#[test]
fn a_listing_of_files_goes_on_behind_an_image_only_if_it_is_still_there() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.jpg", "b.jpg", "c.jpg"] {
        std::fs::write(folder.path().join(name), "x").unwrap();
    }
    let spec = folder.path().to_str().unwrap().to_owned();
    let source = open_source(std::slice::from_ref(&spec), &SourceOptions::default()).unwrap();
    let b = format!("{spec}/b.jpg");
    assert_eq!(
        uris(source.as_ref(), Some((2, &b))),
        [format!("{spec}/c.jpg")]
    );
    let mut changed = source.list_from(1, Some(b));
    let error = wait(changed.next()).unwrap().unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::SourceChanged, "{error}");
}

#[test]
fn filters_and_sizes_are_those_of_files() {
    let server = server();
    for (key, size) in [("a.jpg", 10), ("b.png", 1000), ("c.gif", 5), ("d.txt", 10)] {
        server.put("bucket", key, &vec![7; size]);
    }
    let options = SourceOptions {
        suffixes: Some(vec!["jpg".to_owned(), "png".to_owned()]),
        min_size: Some(11),
        s3: server.config(),
        ..SourceOptions::default()
    };
    let source = open_source(&["s3://bucket".to_owned()], &options).unwrap();
    let found: Vec<Found> = wait(source.list().map(Result::unwrap).collect());
    assert_eq!(found.len(), 1);
    assert_eq!(
        (found[0].uri.as_str(), found[0].size),
        ("s3://bucket/b.png", Some(1000))
    );
    // A key that is named in full is taken whatever it is called, unless it is a list.
    server.put("bucket", "d.image", b"x");
    let named = open(&server, "s3://bucket/d.image").unwrap();
    assert_eq!(uris(named.as_ref(), None), ["s3://bucket/d.image"]);
    let error = open(&server, "s3://bucket/z").err().unwrap().to_string();
    assert!(error.contains("spelling"), "{error}");
}

#[test]
fn images_are_fetched_whole_and_by_range() {
    let server = server();
    server.put("bucket", "a b#1.jpg", b"0123456789");
    let source = open(&server, "s3://bucket/").unwrap();
    let whole = image("s3://bucket/a b#1.jpg", Content::Whole);
    let fetch = |image: &ImageRef, limit| wait(source.fetch(image, limit));
    assert_eq!(fetch(&whole, 100).unwrap(), &b"0123456789"[..]);
    let range = |offset, length| {
        let archive = "s3://bucket/a b#1.jpg".to_owned();
        image(
            "s3://bucket/a b#1.jpg#x",
            Content::Range {
                archive,
                offset,
                length,
            },
        )
    };
    assert_eq!(fetch(&range(3, 4), 100).unwrap(), &b"3456"[..]);
    for (image, limit, kind) in [
        (whole.clone(), 9, StorageErrorKind::TooLarge),
        (range(8, 4), 100, StorageErrorKind::NotAFile),
        (range(80, 4), 100, StorageErrorKind::NotAFile),
        (range(8, 0), 100, StorageErrorKind::Empty),
        (
            image("s3://bucket/none.jpg", Content::Whole),
            100,
            StorageErrorKind::NotFound,
        ),
    ] {
        let error = fetch(&image, limit).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains("s3://bucket/"), "{error}");
    }
    // A store that is overloaded for a moment is asked again.
    server.be_unavailable(2);
    assert_eq!(fetch(&whole, 100).unwrap(), &b"0123456789"[..]);
}

#[test]
fn what_cannot_be_reached_is_told_at_once() {
    let server = server();
    let error = open(&server, "s3://nonesuch/x/").err().unwrap();
    assert!(error.to_string().contains("no such bucket"), "{error}");
    let wrong = SourceOptions {
        s3: server
            .config()
            .with_credentials(S3Server::ACCESS_KEY, "wrong"),
        ..SourceOptions::default()
    };
    let error = open_source(&["s3://bucket/".to_owned()], &wrong)
        .err()
        .unwrap();
    assert_eq!(error.kind(), StorageErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains("credentials"), "{error}");
    let nowhere = SourceOptions {
        s3: S3Config {
            endpoint: Some("http://127.0.0.1:1".to_owned()),
            attempts: 1,
            ..server.config()
        },
        ..SourceOptions::default()
    };
    let error = open_source(&["s3://bucket/".to_owned()], &nowhere)
        .err()
        .unwrap();
    assert_eq!(error.kind(), StorageErrorKind::Unreadable, "{error}");
}

#[test]
fn a_manifest_may_name_images_in_s3() {
    let server = server();
    server.put("bucket", "x.jpg", b"bytes");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("list.txt");
    std::fs::write(&path, "s3://bucket/x.jpg\n").unwrap();
    let source = open(&server, path.to_str().unwrap()).unwrap();
    assert_eq!(uris(source.as_ref(), None), ["s3://bucket/x.jpg"]);
    let found = image("s3://bucket/x.jpg", Content::Whole);
    assert_eq!(wait(source.fetch(&found, 100)).unwrap(), &b"bytes"[..]);
}

fn rows(indices: impl IntoIterator<Item = u64>) -> Vec<Classification> {
    let row = |index| row(index, &format!("s3://bucket/images/{index}.jpg"));
    indices.into_iter().map(row).collect()
}

fn destination(server: &S3Server, text: &str) -> BucketDestination {
    BucketDestination::parse(text, Format::Parquet, &server.config())
        .unwrap()
        .unwrap()
}

type Claimed = Option<Arc<dyn Claims>>;

#[track_caller]
fn sink(to: &BucketDestination, claims: &Claimed) -> BucketSink {
    match BucketSink::open(to, record(), false, claims.clone()).unwrap() {
        Opened::Ready(sink) => *sink,
        Opened::Complete(_) => panic!("it is complete"),
    }
}

/// Claims as a broker keeps them.
#[derive(Default)]
struct KeptClaims(Mutex<(u64, BTreeMap<u64, Claim>)>);

impl KeptClaims {
    fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, Claim>)> {
        self.0.lock().unwrap()
    }

    fn set(
        &self,
        part: u64,
        expected: Option<u64>,
        committed: Option<&str>,
    ) -> Result<u64, StorageError> {
        let mut kept = self.lock();
        if kept.1.get(&part).map(|claim| claim.revision) != expected {
            return Err(StorageError::lost_race(format!("the claim of part {part}")));
        }
        kept.0 += 1;
        let claim = Claim {
            part,
            revision: kept.0,
            committed: committed.map(str::to_owned),
        };
        kept.1.insert(part, claim);
        Ok(kept.0)
    }
}

impl Claims for KeptClaims {
    fn list(&self) -> Result<Vec<Claim>, StorageError> {
        Ok(self.lock().1.values().cloned().collect())
    }

    fn open(&self, part: u64, replaces: Option<u64>) -> Result<u64, StorageError> {
        self.set(part, replaces, None)
    }

    fn commit(&self, part: u64, revision: u64, object: &str) -> Result<(), StorageError> {
        self.set(part, Some(revision), Some(object)).map(drop)
    }
}

/// Runs a test on a store that honours preconditions, and on one that ignores them.
fn on_both_kinds_of_store(test: impl Fn(&S3Server, &BucketDestination, &Claimed)) {
    for ignores in [false, true] {
        let server = server();
        server.ignore_preconditions(ignores);
        let claims: Claimed = Some(Arc::new(KeptClaims::default()));
        test(&server, &destination(&server, "s3://bucket/rows/"), &claims);
    }
}

#[test]
fn rows_are_committed_once_and_a_job_is_resumed() {
    on_both_kinds_of_store(|server, to, claims| {
        let mut first = sink(to, claims);
        assert_eq!(first.commit(rows(0..100)).unwrap().rows, 100);
        assert_eq!(first.commit(rows(50..150)).unwrap().rows, 50);
        assert_eq!(first.commit(rows(0..10)).unwrap().part, None);
        drop(first);
        let mut second = sink(to, claims);
        assert_eq!(second.committed().len(), 150);
        second.commit(rows(151..200)).unwrap();
        let error = sink(to, claims).finish().unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Incomplete, "{error}");
        second.commit(rows(150..151)).unwrap();
        let summary = second.finish().unwrap();
        assert_eq!((summary.images, summary.failed), (200, 200));
        assert!(server.path("bucket", "rows/_SUCCESS").exists());
        let stored = std::fs::read(server.path("bucket", "rows/_summary.json")).unwrap();
        let stored: Summary = serde_json::from_slice(&stored).unwrap();
        assert_eq!(stored, summary);
        assert!(matches!(
            BucketSink::open(to, record(), false, claims.clone()).unwrap(),
            Opened::Complete(complete) if *complete == summary
        ));
    });
}

#[test]
fn a_sink_that_has_lost_its_job_commits_nothing_twice() {
    on_both_kinds_of_store(|server, to, claims| {
        let mut zombie = sink(to, claims);
        zombie.commit(rows(0..10)).unwrap();
        let mut heir = sink(to, claims);
        heir.commit(rows(5..20)).unwrap();
        let error = zombie.commit(rows(10..30)).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
        // The other way round: the heir is late, reads again and goes on.
        let mut zombie = sink(to, claims);
        zombie.commit(rows(20..25)).unwrap();
        let error = heir.commit(rows(20..30)).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
        let mut heir = sink(to, claims);
        assert_eq!(heir.commit(rows(20..30)).unwrap().rows, 5);
        let summary = heir.finish().unwrap();
        assert_eq!(summary.images, 30);
        let total: u64 = summary.parts.iter().map(|part| part.rows).sum();
        assert_eq!(total, 30);
        let there = std::fs::read_dir(server.path("bucket", "rows")).unwrap();
        let names = there.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name.starts_with("part-")).collect();
        names.sort();
        let counted: Vec<_> = summary.parts.iter().map(|part| part.name.clone()).collect();
        assert_eq!(names, counted, "parts that do not count are removed");
    });
}

#[test]
fn of_sixteen_sinks_one_wins_each_part() {
    on_both_kinds_of_store(|_, to, claims| {
        drop(sink(to, claims));
        let barrier = Barrier::new(16);
        let won: Vec<bool> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16_u64)
                .map(|number| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        let mut sink = sink(to, claims);
                        barrier.wait();
                        match sink.commit(rows(number * 10..number * 10 + 10)) {
                            Ok(_) => true,
                            Err(error) if error.kind() == StorageErrorKind::LostRace => false,
                            Err(error) => panic!("{error}"),
                        }
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert_eq!(won.iter().filter(|won| **won).count(), 1);
        assert_eq!(sink(to, claims).committed().len(), 10);
    });
}

#[test]
fn a_claim_that_was_never_committed_is_taken_over() {
    let server = server();
    server.ignore_preconditions(true);
    let to = destination(&server, "s3://bucket/rows/");
    let kept = Arc::new(KeptClaims::default());
    let claims: Claimed = Some(Arc::clone(&kept) as Arc<dyn Claims>);
    let mut crashed = sink(&to, &claims);
    crashed.commit(rows(0..10)).unwrap();
    // It died between its claim and its part.
    kept.open(1, None).unwrap();
    let mut heir = sink(&to, &claims);
    heir.commit(rows(10..20)).unwrap();
    assert_eq!(heir.finish().unwrap().images, 20);
}

#[test]
fn outputs_that_cannot_be_used_are_refused() {
    let server = server();
    server.put("bucket", "mine/letter.txt", b"hands off");
    let open = |to: &BucketDestination, job: JobRecord, overwrite, claims: Claimed| {
        BucketSink::open(to, job, overwrite, claims)
            .map(drop)
            .unwrap_err()
    };
    let taken = destination(&server, "s3://bucket/mine/");
    let error = open(&taken, record(), true, None);
    assert_eq!(error.kind(), StorageErrorKind::OutputExists, "{error}");
    assert!(error.to_string().contains("letter.txt"), "{error}");

    let error = open(
        &destination(&server, "s3://none/rows/"),
        record(),
        false,
        None,
    );
    assert!(error.to_string().contains("no such bucket"), "{error}");

    let rows_of_one = destination(&server, "s3://bucket/rows/");
    sink(&rows_of_one, &None).commit(rows(0..3)).unwrap();
    let other = || JobRecord {
        job_id: "other".to_owned(),
        ..record()
    };
    let error = open(&rows_of_one, other(), false, None);
    assert_eq!(
        error.kind(),
        StorageErrorKind::OutputOfAnotherJob,
        "{error}"
    );
    let overwritten = BucketSink::open(&rows_of_one, other(), true, None).unwrap();
    assert!(matches!(overwritten, Opened::Ready(sink) if sink.committed().is_empty()));

    server.ignore_preconditions(true);
    let error = open(
        &destination(&server, "s3://bucket/new/"),
        record(),
        false,
        None,
    );
    assert!(error.to_string().contains("If-None-Match"), "{error}");

    for wrong in [
        "s3://bucket/rows.parquet",
        "s3:///x/",
        "s3://bucket/x/?format=xml",
    ] {
        let error = BucketDestination::parse(wrong, Format::Parquet, &server.config());
        let error = error.unwrap_err();
        assert_eq!(
            error.kind(),
            StorageErrorKind::InvalidDestination,
            "{error}"
        );
    }
    let local = BucketDestination::parse("rows/", Format::Parquet, &server.config());
    assert!(local.unwrap().is_none());
}

#[test]
fn text_parts_are_resumed_too() {
    for format in ["jsonl", "csv"] {
        let server = server();
        let to = destination(&server, &format!("s3://bucket/rows/?format={format}"));
        sink(&to, &None).commit(rows(0..7)).unwrap();
        let mut again = sink(&to, &None);
        assert_eq!(again.committed().len(), 7);
        again.commit(rows(5..9)).unwrap();
        assert_eq!(again.finish().unwrap().images, 9);
    }
}

#[test]
fn a_listing_ends_when_nobody_wants_the_rest() {
    let server = server();
    for number in 0..1500 {
        server.put("bucket", &format!("{number:05}.jpg"), b"x");
    }
    let source = open(&server, "s3://bucket/").unwrap();
    let mut listing = source.list();
    assert!(wait(listing.next()).unwrap().is_ok());
    drop(listing);
    assert!(
        source.list().next().now_or_never().is_none(),
        "another listing begins anew"
    );
}
