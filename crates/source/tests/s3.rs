//! Images from S3, against a store that checks signatures.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{image, open, server, wait};
use futures::{FutureExt, StreamExt};
use trommel_source::{FetchLimits, Found, Source, SourceOptions, open_source};
use trommel_storage::testsuite::S3Server;
use trommel_storage::{S3Config, StorageErrorKind};
use trommel_types::{Content, ImageRef};

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
    server.put("bucket", "b/other.jpg", b"not requested");
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
    assert!(
        error.to_string().contains("the bucket does not exist"),
        "{error}"
    );
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
        "another listing begins again"
    );
}

/// R9: whole objects and parts of them are requested by the version that was listed.
#[test]
fn an_object_that_was_changed_since_it_was_listed_is_not_read() {
    let server = server();
    let content = b"0123456789";
    server.put("bucket", "a.jpg", content);
    let source = open(&server, "s3://bucket/").unwrap();
    let part = Content::Range {
        archive: "s3://bucket/a.jpg".to_owned(),
        offset: 3,
        length: 4,
    };
    let listed = |content| ImageRef {
        etag: Some("781e5e245d69b566979b86e28d23f2c7".to_owned()), // its MD5
        ..image("s3://bucket/a.jpg", content)
    };
    let fetch = |image: &ImageRef| wait(source.fetch(image, 100));
    let (whole, part) = (listed(Content::Whole), listed(part));
    assert_eq!(fetch(&whole).unwrap(), &content[..]);
    assert_eq!(fetch(&part).unwrap(), &content[3..7]);
    server.put("bucket", "a.jpg", b"9876543210");
    // Not every store heeds the precondition.
    for ignores in [false, true] {
        server.ignore_preconditions(ignores);
        for image in [&whole, &part] {
            let error = fetch(image).unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::Changed, "{error}");
            assert!(error.to_string().contains("s3://bucket/a.jpg"), "{error}");
        }
    }
}

/// R26: a store that is busy is asked again, and its image is not given up for good.
#[test]
fn faults_that_pass_are_tried_again() {
    let server = server();
    server.put("bucket", "a.jpg", b"bytes");
    let source = open(&server, "s3://bucket/").unwrap();
    let impatient = SourceOptions {
        s3: S3Config {
            attempts: 1,
            ..server.config()
        },
        ..SourceOptions::default()
    };
    let impatient = open_source(&["s3://bucket/".to_owned()], &impatient).unwrap();
    let found = image("s3://bucket/a.jpg", Content::Whole);
    for (status, code) in [
        (429, ""),
        (408, ""),
        (409, "OperationAborted"),
        (503, "SlowDown"),
        (400, "RequestTimeout"),
        (400, "ExpiredToken"),
        (403, "RequestTimeTooSkewed"),
        (500, "InternalError"),
    ] {
        server.refuse(1, status, code);
        assert_eq!(
            wait(source.fetch(&found, 100)).unwrap(),
            &b"bytes"[..],
            "{code}"
        );
        server.refuse(1, status, code);
        let error = wait(impatient.fetch(&found, 100)).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Unreadable, "{error}");
    }
    let before = server.requests();
    server.refuse(1, 403, "AccessDenied");
    let error = wait(source.fetch(&found, 100)).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::PermissionDenied, "{error}");
    assert_eq!(
        server.requests() - before,
        1,
        "a refusal is not tried again"
    );
}

/// R20: a store that hangs costs an image its time, not the worker.
#[test]
fn an_object_that_takes_too_long_times_out() {
    let server = server();
    server.put("bucket", "a.jpg", b"bytes");
    let source = open(&server, "s3://bucket/").unwrap();
    server.slow_down(Duration::from_secs(600));
    let found = image("s3://bucket/a.jpg", Content::Whole);
    let limits = FetchLimits {
        bytes: 100,
        time: Duration::from_millis(50),
    };
    let error = wait(source.fetch_within(&found, limits)).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::TimedOut, "{error}");
    assert!(error.to_string().contains("fetch-timeout"), "{error}");
}
