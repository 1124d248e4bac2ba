//! Images, lists and archives on the web.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{image, wait};
use futures::{StreamExt, TryStreamExt, stream};
use trommel_source::{FetchLimits, Found, Source, SourceOptions, open_source};
use trommel_storage::testsuite::{Asked, Reply, WebServer};
use trommel_storage::{HttpConfig, StorageError, StorageErrorKind};

fn open(server: &WebServer, spec: &str) -> Result<Arc<dyn Source>, StorageError> {
    let options = SourceOptions {
        http: server.config(),
        ..SourceOptions::default()
    };
    open_source(&[spec.to_owned()], &options)
}

fn list(source: &Arc<dyn Source>) -> Vec<Found> {
    wait(source.list().try_collect()).unwrap()
}

fn fetch(source: &Arc<dyn Source>, found: &Found) -> Result<Vec<u8>, StorageError> {
    let mut image = image(&found.uri, found.content.clone());
    image.etag = found.etag.clone();
    wait(source.fetch(&image, 1 << 20)).map(Vec::from)
}

fn refusal(opened: Result<Arc<dyn Source>, StorageError>) -> String {
    opened.map(|_| ()).unwrap_err().to_string()
}

#[test]
fn a_url_is_an_image_a_list_or_an_archive() {
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(6);
    header.set_mode(0o644);
    archive
        .append_data(&mut header, "x.jpg", &b"member"[..])
        .unwrap();
    let archive = archive.into_inner().unwrap();
    let server = WebServer::start(move |asked| match asked.target.as_str() {
        "/cat?w=100" | "/d/a%20b.jpg" => Reply::object(asked, b"a cat", "\"1\""),
        "/d/list.csv?token=x" => Reply::object(asked, b"url,n\na b.jpg,1\n/cat?w=100,2\n", "\"2\""),
        "/a.tar" => Reply::object(asked, &archive, "\"3\""),
        "/whole.csv" => Reply::with(200, "etag", "\"4\""),
        _ => Reply::status(404),
    });
    let cat = open(&server, &server.url("/cat?w=100")).unwrap();
    let found = list(&cat);
    assert_eq!(
        (found[0].size, found[0].etag.as_deref()),
        (Some(5), Some("\"1\""))
    );
    assert_eq!(fetch(&cat, &found[0]).unwrap(), b"a cat");

    let csv = open(&server, &server.url("/d/list.csv?token=x")).unwrap();
    let found = list(&csv);
    assert_eq!(found[0].uri, server.url("/d/a%20b.jpg"));
    assert_eq!(fetch(&csv, &found[0]).unwrap(), b"a cat");

    let tar = open(&server, &server.url("/a.tar")).unwrap();
    let found = list(&tar);
    assert_eq!(found[0].uri, server.url("/a.tar#x.jpg"));
    assert_eq!(fetch(&tar, &found[0]).unwrap(), b"member");

    let missing = refusal(open(&server, &server.url("/missing.jpg")));
    assert!(missing.contains("404"), "{missing}");
    let whole = refusal(open(&server, &server.url("/whole.csv")));
    assert!(
        whole.contains("byte ranges") && whole.contains("download"),
        "{whole}"
    );
    let user = refusal(open(&server, "https://me:secret@host/a.jpg"));
    assert!(user.contains("password"), "{user}");
}

#[test]
fn what_changes_on_the_web_is_noticed() {
    let changed = Arc::new(AtomicBool::new(false));
    let now = Arc::clone(&changed);
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(6);
    header.set_mode(0o644);
    archive
        .append_data(&mut header, "x.jpg", &b"member"[..])
        .unwrap();
    let archive = archive.into_inner().unwrap();
    let server = WebServer::start(move |asked| {
        let etag = match now.load(Ordering::Relaxed) {
            true => "\"new\"",
            false => "\"old\"",
        };
        Reply::object(asked, &archive, etag)
    });
    for path in ["/a.tar", "/cat.jpg"] {
        changed.store(false, Ordering::Relaxed);
        let source = open(&server, &server.url(path)).unwrap();
        let found = list(&source);
        assert!(fetch(&source, &found[0]).is_ok());
        changed.store(true, Ordering::Relaxed);
        let error = fetch(&source, &found[0]).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Changed, "{path}");
    }
}

/// What a server on a bad day does with each of ten thousand urls.
fn bad_day(asked: &Asked) -> Reply {
    let number: u64 = asked
        .target
        .rsplit('/')
        .next()
        .and_then(|name| name.strip_suffix(".jpg")?.parse().ok())
        .unwrap_or(u64::MAX);
    let image = || Reply::object(asked, format!("image {number}").as_bytes(), "\"1\"");
    match (number % 100, asked.before) {
        (0, _) => Reply::status(404),
        (1, _) => Reply::object(asked, b"<!DOCTYPE html><title>Gone</title>", "\"1\""),
        (2, _) => Reply::with(302, "location", asked.target.clone()),
        (3, _) => Reply::status(403),
        (4, 0) => Reply::status(500),
        (5, 0) => Reply::Reset,
        (6, 0) => Reply::Cut(vec![1; 1000]),
        (7, _) => Reply::with(
            302,
            "location",
            format!("/moved/{}.jpg", number + 1000 * 100),
        ),
        (8, 0) if number % 1000 == 8 => Reply::with(429, "retry-after", "0"),
        (9, 0) if number % 1000 == 9 => Reply::status(503),
        (10, _) if number % 2500 == 10 => Reply::Stall(vec![1; 1000]),
        (11, _) => Reply::status(500),
        (12, _) => Reply::object(asked, b"", "\"1\""),
        _ => image(),
    }
}

/// Exactly one outcome for each of ten thousand urls, of the right kind; what passes is gone after
/// another attempt.
#[test]
fn ten_thousand_urls_of_a_flaky_server_have_an_outcome_each() {
    let server = WebServer::start(bad_day);
    let folder = tempfile::tempdir().unwrap();
    let list_path = folder.path().join("urls.csv");
    let mut text = "id,url\n".to_owned();
    for number in 0..10_000 {
        text += &format!("{number},{}\n", server.url(&format!("/{number}.jpg")));
    }
    std::fs::write(&list_path, text).unwrap();
    let options = SourceOptions {
        http: HttpConfig {
            timeout: Duration::from_millis(300),
            ..server.config()
        },
        ..SourceOptions::default()
    };
    let source = open_source(&[list_path.to_str().unwrap().to_owned()], &options).unwrap();
    let found = list(&source);
    assert_eq!(found.len(), 10_000);
    let limits = FetchLimits {
        bytes: 1 << 20,
        time: Duration::from_secs(20),
    };
    let fetch = async |(number, found): (usize, &Found)| {
        let image = image(&found.uri, found.content.clone());
        let mut outcome = source.fetch_within(&image, limits).await;
        // As a worker does with what may pass.
        for _ in 0..3 {
            match outcome.as_ref().map_err(StorageError::kind) {
                Err(StorageErrorKind::Unreadable | StorageErrorKind::TimedOut) => {}
                _ => break,
            }
            outcome = source.fetch_within(&image, limits).await;
        }
        let outcome = outcome.map(|fetched| String::from_utf8(fetched.bytes.to_vec()).unwrap());
        (number, outcome.map_err(|error| error.kind()))
    };
    let fetches = stream::iter(found.iter().enumerate()).map(fetch);
    let outcomes: Vec<_> = wait(fetches.buffer_unordered(128).collect());
    assert_eq!(outcomes.len(), 10_000);
    let outcomes: BTreeMap<_, _> = outcomes.into_iter().collect();
    assert_eq!(outcomes.len(), 10_000);
    for (number, outcome) in outcomes {
        use StorageErrorKind::{Empty, NotAFile, NotFound, PermissionDenied, TimedOut, Unreadable};
        let expected = match number % 100 {
            0 => Err(NotFound),
            1 | 2 => Err(NotAFile),
            3 => Err(PermissionDenied),
            7 => Err(NotAFile), // leads on and on
            10 if number % 2500 == 10 => Err(TimedOut),
            11 => Err(Unreadable),
            12 => Err(Empty),
            _ => Ok(format!("image {number}")),
        };
        assert_eq!(outcome, expected, "url {number}");
    }
    assert!(server.most_under_way() <= 8, "{}", server.most_under_way());
}
