//! Objects on the web: what is asked, how often, and what each answer becomes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use trommel_storage::http::{Http, HttpConfig, HttpUrl};
use trommel_storage::testsuite::{Reply, WebServer};
use trommel_storage::{PlaceRule, StorageError, StorageErrorKind, background};

const LIMIT: u64 = 1 << 20;
const TIME: Duration = Duration::from_secs(20);

fn http(config: &HttpConfig) -> Http {
    Http::new(config, PlaceRule::default())
}

fn get(http: &Http, url: &str) -> Result<Vec<u8>, StorageError> {
    let url = HttpUrl::parse(url).unwrap();
    let fetched = background::wait(http.fetch(&url, None, None, LIMIT, TIME));
    fetched.map(|(bytes, _)| bytes.to_vec())
}

fn text(text: &str) -> Vec<u8> {
    text.as_bytes().to_vec()
}

#[test]
fn redirects_are_followed_so_far() {
    let server = WebServer::start(|asked| match asked.target.as_str() {
        "/a" => Reply::with(302, "location", "/b?x=1"),
        "/b?x=1" => Reply::with(308, "location", "c"),
        "/c" => Reply::object(asked, b"there", "\"1\""),
        "/loop" => Reply::with(301, "location", "/loop"),
        "/out" => Reply::with(301, "location", "ftp://elsewhere/x"),
        _ => Reply::status(404),
    });
    let http = http(&server.config());
    assert_eq!(get(&http, &server.url("/a")).unwrap(), b"there");
    let error = get(&http, &server.url("/loop")).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::NotAFile);
    assert!(error.to_string().contains("more than 10 times"), "{error}");
    let error = get(&http, &server.url("/out")).unwrap_err();
    assert!(error.to_string().contains("ftp://"), "{error}");
    // One connection has served them all.
    assert_eq!(server.requests(), 3 + 11 + 1);
}

#[test]
fn what_is_private_is_refused_before_it_is_connected_to() {
    let server = WebServer::start(|asked| match asked.target.as_str() {
        "/in" => Reply::with(302, "location", "http://169.254.169.254/latest/meta-data/"),
        _ => Reply::object(asked, b"secret", "\"1\""),
    });
    let refused = http(&HttpConfig::default());
    for host in [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "0x7f.1",
        "[::ffff:127.0.0.1]",
    ] {
        let url = format!("http://{host}:{}/", server.port());
        let error = get(&refused, &url).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::PermissionDenied, "{error}");
        assert!(error.to_string().contains("http.allow-private"), "{error}");
    }
    assert_eq!(server.requests(), 0);
    let allowed = http(&server.config());
    assert_eq!(get(&allowed, &server.url("/")).unwrap(), b"secret");
}

#[test]
fn what_a_redirect_leads_to_is_asked_about() {
    let server = WebServer::start(|asked| match asked.target.as_str() {
        "/a" => Reply::with(302, "location", "/private/b"),
        "/c" => Reply::with(302, "location", "/d"),
        _ => Reply::object(asked, b"there", "\"1\""),
    });
    let rule = PlaceRule::new(|uri| match uri.contains("/private/") {
        true => Err(format!("{uri} is not allowed")),
        false => Ok(()),
    });
    let http = Http::new(&server.config(), rule);
    assert_eq!(get(&http, &server.url("/c")).unwrap(), b"there");
    let error = get(&http, &server.url("/a")).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::PermissionDenied);
    assert!(
        error.to_string().contains("/private/b is not allowed"),
        "{error}"
    );
}

#[test]
fn each_fault_has_its_kind() {
    use StorageErrorKind::{NotAFile, NotFound, PermissionDenied, TimedOut, TooLarge, Unreadable};
    let page = "\n<!doctype html><title>Sign in</title>";
    let server = WebServer::start(move |asked| match asked.target.as_str() {
        "/404" => Reply::status(404),
        "/403" => Reply::status(403),
        "/500" => Reply::status(500),
        "/reset" => Reply::Reset,
        "/cut" => Reply::Cut(vec![7; 1000]),
        "/stall" => Reply::Stall(vec![7; 1000]),
        "/late" => Reply::Late(Duration::from_secs(600), Vec::new()),
        "/large" => Reply::object(asked, &vec![7; LIMIT as usize + 1], "\"1\""),
        "/gzip" => Reply::with(200, "content-encoding", "gzip"),
        _ => Reply::object(asked, page.as_bytes(), "\"1\""),
    });
    let http = http(&HttpConfig {
        timeout: Duration::from_millis(200),
        ..server.config()
    });
    for (path, kind, words) in [
        ("/404", NotFound, "404"),
        ("/403", PermissionDenied, "403"),
        ("/500", Unreadable, "500"),
        ("/reset", Unreadable, ""),
        ("/cut", Unreadable, ""),
        ("/stall", TimedOut, "stalled"),
        ("/large", TooLarge, "preprocess.max-bytes"),
        ("/gzip", NotAFile, "compressed it (gzip)"),
        ("/page", NotAFile, "HTML page"),
    ] {
        let url = server.url(path);
        let error = get(&http, &url).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        let message = error.to_string();
        assert!(
            message.contains(words) && message.contains(&url),
            "{message}"
        );
    }
    let url = HttpUrl::parse(&server.url("/late")).unwrap();
    let time = Duration::from_millis(50);
    let fetched = http.fetch(&url, None, None, LIMIT, time);
    let error = background::wait(fetched).unwrap_err();
    assert_eq!(error.kind(), TimedOut, "{error}");
    let nowhere = get(&http, "http://no-such-host.invalid/a.jpg");
    let kind = nowhere.unwrap_err().kind();
    assert!(matches!(kind, NotFound | Unreadable), "{kind:?}");
}

#[test]
fn another_version_is_noticed() {
    let version = Arc::new(AtomicU64::new(1));
    let now = Arc::clone(&version);
    let server = WebServer::start(move |asked| {
        let version = now.load(Ordering::Relaxed);
        match asked.target.as_str() {
            "/strong" => Reply::object(asked, b"0123456789", &format!("\"{version}\"")),
            "/weak" => Reply::object(asked, b"0123456789", &format!("W/\"{version}\"")),
            _ => Reply::Answer {
                status: 200,
                headers: vec![(
                    "last-modified",
                    format!("Sun, 06 Nov {} 08:49:37 GMT", 1993 + version),
                )],
                body: b"0123456789".to_vec(),
            },
        }
    });
    let http = http(&server.config());
    for path in ["/strong", "/weak", "/date"] {
        version.store(1, Ordering::Relaxed);
        let url = HttpUrl::parse(&server.url(path)).unwrap();
        let looked = background::wait(http.look(&url)).unwrap();
        assert_eq!(
            (looked.size, looked.has_ranges),
            (Some(10), path != "/date")
        );
        let etag = looked.etag.clone();
        assert!(etag.is_some(), "{path}");
        let fetch = || background::wait(http.fetch(&url, None, etag.clone(), LIMIT, TIME));
        assert_eq!(fetch().unwrap().0, "0123456789");
        version.store(2, Ordering::Relaxed);
        let error = fetch().unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Changed, "{path}: {error}");
    }
}

#[test]
fn a_part_is_that_part_or_an_error() {
    let server = WebServer::start(|asked| match asked.target.as_str() {
        "/ranges" => Reply::object(asked, b"0123456789", "\"1\""),
        "/other" => Reply::Answer {
            status: 206,
            headers: vec![("content-range", "bytes 5-8/10".to_owned())],
            body: text("5678"),
        },
        _ => Reply::Answer {
            status: 200,
            headers: Vec::new(),
            body: text("0123456789"),
        },
    });
    let http = http(&server.config());
    let part = |path: &str, range| {
        let url = HttpUrl::parse(&server.url(path)).unwrap();
        let fetched = background::wait(http.fetch(&url, Some(range), None, LIMIT, TIME));
        fetched.map(|(bytes, _)| bytes)
    };
    assert_eq!(part("/ranges", (2, 4)).unwrap(), "2345");
    assert_eq!(part("/ranges", (2, 0)).unwrap(), "");
    for (path, range) in [
        ("/ranges", (8, 4)),
        ("/ranges", (10, 1)),
        ("/other", (2, 4)),
        ("/none", (2, 4)),
    ] {
        let error = part(path, range).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::NotAFile, "{path}: {error}");
    }
}

#[test]
fn a_busy_host_is_asked_again_when_it_wants_to() {
    let server = WebServer::start(|asked| match (asked.target.as_str(), asked.before) {
        ("/once", 0) => Reply::with(503, "retry-after", "1"),
        ("/twice", 0 | 1) => Reply::status(429),
        ("/always", _) => Reply::with(429, "retry-after", "0"),
        _ => Reply::object(asked, b"there", "\"1\""),
    });
    let http = http(&server.config());
    let start = Instant::now();
    assert_eq!(get(&http, &server.url("/once")).unwrap(), b"there");
    assert!(start.elapsed() >= Duration::from_secs(1));
    assert_eq!(get(&http, &server.url("/twice")).unwrap(), b"there");
    // In the end it is a fault that passes, and counts as one attempt.
    let before = server.requests();
    let error = get(&http, &server.url("/always")).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unreadable);
    assert!(error.to_string().contains("429"), "{error}");
    assert_eq!(server.requests() - before, 9);
}

#[test]
fn a_host_gets_so_many_requests_at_once() {
    let server = WebServer::start(|_| Reply::Late(Duration::from_millis(20), text("there")));
    let http = http(&HttpConfig {
        max_per_host: 3,
        ..server.config()
    });
    let urls: Vec<String> = (0..60)
        .map(|number| server.url(&format!("/{number}")))
        .collect();
    let fetched = urls.iter().map(async |url| {
        let url = HttpUrl::parse(url).unwrap();
        http.fetch(&url, None, None, LIMIT, TIME).await
    });
    let fetched = background::wait(futures::future::join_all(fetched));
    assert!(
        fetched
            .into_iter()
            .all(|fetched| fetched.unwrap().0 == "there")
    );
    assert_eq!(server.requests(), 60);
    assert_eq!(server.most_under_way(), 3);
}
