//! Folders, patterns and single files.

use std::ffi::OsStr;
use std::fs::Permissions;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use trommel_types::Content;

use super::*;

#[tokio::test]
async fn a_folder_is_listed_in_byte_order_of_each_name() {
    let paths = [
        "photos/B.jpg",
        "photos/a-/1.jpg",
        "photos/a.jpg",
        "photos/a/2/deep/x.JPEG",
        "photos/a/3.png",
        "photos/a0.webp",
        "photos/é.gif",
    ];
    let place = Place::with(&paths);
    for other in ["photos/notes.txt", "photos/a/none", "photos/list.csv"] {
        place.write(other, "");
    }
    let source = place.open("photos");
    let mut expected = paths.map(str::to_owned);
    // By component, `a` comes before `a-`, although `/` comes behind `-`.
    expected.sort_by(|first, second| first.split('/').cmp(second.split('/')));
    assert_eq!(place.uris(&source).await, expected);
    assert_eq!(source.skipped(), 3);
    for found in list(&source).await.unwrap() {
        assert!(
            found
                .uri
                .ends_with(str::from_utf8(&fetch(&source, &found).await.unwrap()).unwrap())
        );
        assert_eq!(found.content, Content::Whole);
        assert!(
            found
                .etag
                .unwrap()
                .ends_with(&format!("-{:x}", found.size.unwrap()))
        );
    }
}

#[tokio::test]
async fn the_order_does_not_depend_on_the_order_of_creation() {
    let names: Vec<String> = (0..300)
        .map(|number| format!("{}.jpg", number * 7919 % 1000))
        .collect();
    let paths: Vec<&str> = names.iter().map(String::as_str).collect();
    let forth = Place::with(&paths);
    let back = Place::with(&paths.iter().rev().copied().collect::<Vec<_>>());
    let listed = forth.uris(&forth.open("")).await;
    assert!(listed.is_sorted() && listed.len() == 300);
    assert_eq!(back.uris(&back.open("")).await, listed);
    assert_eq!(back.uris(&back.open("")).await, listed);
}

#[tokio::test]
async fn an_etag_changes_with_the_file() {
    let place = Place::with(&["a.jpg"]);
    let etag = async || {
        list(&place.open("a.jpg")).await.unwrap()[0]
            .etag
            .clone()
            .unwrap()
    };
    let first = etag().await;
    assert_eq!(etag().await, first);
    place.write("a.jpg", "another length");
    assert_ne!(etag().await, first);
}

/// N21: what no decoder of the build reads became failed rows.
#[tokio::test]
async fn formats_that_the_build_does_not_read_are_passed_over_unless_they_are_named() {
    let place = Place::with(&["a.jpg", "b.heic", "c.HEIF", "d/e.avif"]);
    let source = place.open("");
    let all = ["a.jpg", "b.heic", "c.HEIF", "d/e.avif"];
    let (taken, passed_over) = match NOT_IN_THIS_BUILD {
        Some(_) => (&all[..1], 3),
        None => (&all[..], 0),
    };
    assert_eq!(place.uris(&source).await, taken);
    assert_eq!(source.skipped(), passed_over);
    assert_eq!(place.uris(&place.open("b.heic")).await, ["b.heic"]);
    let named = SourceOptions {
        suffixes: Some(vec!["avif".to_owned()]),
        ..SourceOptions::default()
    };
    assert_eq!(place.uris(&place.open_with("", named)).await, ["d/e.avif"]);
    place.write("list.txt", "b.heic\n");
    assert_eq!(place.uris(&place.open("list.txt")).await, ["b.heic"]);
}

#[tokio::test]
async fn suffixes_that_are_given_replace_the_usual_ones() {
    let place = Place::with(&["a.jpg", "b.DAT", "c", "d.png"]);
    let with = |suffixes: &[&str]| SourceOptions {
        suffixes: Some(suffixes.iter().map(|suffix| (*suffix).to_owned()).collect()),
        ..SourceOptions::default()
    };
    let source = place.open_with("", with(&[".dat", "png"]));
    assert_eq!(place.uris(&source).await, ["b.DAT", "d.png"]);
    assert_eq!(source.skipped(), 2);
    let source = place.open_with("", with(&["*"]));
    assert_eq!(place.uris(&source).await, ["a.jpg", "b.DAT", "c", "d.png"]);
    assert_says(
        &place.refusal_with("", with(&["bmp"])),
        &["no images", "--suffixes"],
    );
}

#[tokio::test]
async fn a_name_that_is_not_utf_8_becomes_a_url_that_is_fetched() {
    let place = Place::new();
    for name in [&b"caf\xe9 #1%.jpg"[..], b"\xff/\xfe.png", b"z.jpg"] {
        place.write(OsStr::from_bytes(name), name);
    }
    for spec in ["", "**/*.*"] {
        let source = place.open(spec);
        let found = list(&source).await.unwrap();
        assert!(found[0].uri.starts_with("file:///"), "{}", found[0].uri);
        assert!(
            found[0].uri.ends_with("/caf%E9%20%231%25.jpg"),
            "{}",
            found[0].uri
        );
        assert!(found[1].uri.ends_with("z.jpg"), "{}", found[1].uri);
        assert!(found[2].uri.ends_with("/%FF/%FE.png"), "{}", found[2].uri);
        assert_eq!(
            fetch(&source, &found[0]).await.unwrap(),
            &b"caf\xe9 #1%.jpg"[..]
        );
        assert_eq!(
            fetch(&source, &found[2]).await.unwrap(),
            &b"\xff/\xfe.png"[..]
        );
    }
}

#[tokio::test]
async fn links_are_followed_but_not_in_circles() {
    let place = Place::with(&["in/a.jpg", "in/sub/b.jpg", "out/c.jpg"]);
    symlink(".", place.path("in/here")).unwrap();
    symlink("..", place.path("in/sub/up")).unwrap();
    symlink("../../out", place.path("in/sub/zout")).unwrap();
    symlink("../in", place.path("out/back")).unwrap();
    symlink("self.jpg", place.path("in/self.jpg")).unwrap();
    for spec in ["in", "in/**/*.jpg"] {
        let source = place.open(spec);
        let expected = [
            "in/a.jpg",
            "in/self.jpg",
            "in/sub/b.jpg",
            "in/sub/zout/c.jpg",
        ];
        assert_eq!(place.uris(&source).await, expected, "{spec}");
        assert_eq!(source.skipped(), 3);
        let found = list(&source).await.unwrap();
        assert_eq!(
            failure(&source, &found[1]).await,
            StorageErrorKind::NotFound
        );
    }
}

#[tokio::test]
async fn what_cannot_be_fetched_is_listed_all_the_same() {
    let place = Place::with(&["a.jpg", "z.jpg"]);
    symlink("nowhere", place.path("broken.jpg")).unwrap();
    place.write("empty.jpg", "");
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mkfifoat(rustix::fs::CWD, place.path("pipe.jpg"), mode).unwrap();
    let _socket = UnixListener::bind(place.path("socket.jpg")).unwrap();
    symlink("/dev/zero", place.path("zero.jpg")).unwrap();
    let source = place.open("");
    let found = list(&source).await.unwrap();
    let by_name: BTreeMap<&str, &Found> = found
        .iter()
        .map(|found| (found.uri.rsplit('/').next().unwrap(), found))
        .collect();
    assert_eq!(by_name.len(), 7);
    for (name, kind) in [
        ("broken.jpg", StorageErrorKind::NotFound),
        ("empty.jpg", StorageErrorKind::Empty),
        ("pipe.jpg", StorageErrorKind::NotAFile),
        ("socket.jpg", StorageErrorKind::NotAFile),
        ("zero.jpg", StorageErrorKind::NotAFile),
    ] {
        let error = fetch(&source, by_name[name]).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_says(&error.to_string(), &[name]);
        assert!(by_name[name].size.is_none_or(|size| size == 0), "{name}");
    }
    assert_eq!(fetch(&source, by_name["z.jpg"]).await.unwrap(), "z.jpg");
    // Named one by one, as a shell expands a pattern, they are rows as well.
    for name in ["broken.jpg", "pipe.jpg", "zero.jpg"] {
        assert_eq!(place.uris(&place.open(name)).await, [name]);
    }
}

#[tokio::test]
async fn what_may_not_be_read_is_listed_and_fails() {
    if !permissions_bind("files::what_may_not_be_read_is_listed_and_fails") {
        return;
    }
    let place = Place::with(&[
        "closed/a.jpg",
        "dim/b.jpg",
        "dim/sub/c.jpg",
        "secret.jpg",
        "z.jpg",
    ]);
    let forbid = |path, mode| {
        std::fs::set_permissions(place.path(path), Permissions::from_mode(mode)).unwrap();
    };
    forbid("closed", 0o000);
    forbid("dim", 0o600); // names can be read, what they stand for cannot
    forbid("secret.jpg", 0o000);
    for spec in ["", "**/*.jpg"] {
        let source = place.open(spec);
        let expected = ["closed/", "dim/b.jpg", "dim/sub/", "secret.jpg", "z.jpg"];
        assert_eq!(place.uris(&source).await, expected, "{spec}");
        let found = list(&source).await.unwrap();
        for found in &found[..4] {
            let kind = failure(&source, found).await;
            assert_eq!(kind, StorageErrorKind::PermissionDenied, "{}", found.uri);
        }
        assert_eq!(fetch(&source, &found[4]).await.unwrap(), "z.jpg");
    }
    assert_says(
        &place.refusal("closed"),
        &["closed", "denied", "right to read"],
    );
    forbid("closed", 0o700);
    forbid("dim", 0o700);
}

#[tokio::test]
async fn a_pattern_lists_each_match_once() {
    let place = Place::with(&[
        "x/a.jpg",
        "x/x/b.jpg",
        "y/c.jpg",
        "y/d.png",
        "e.jpg",
        "y/n.md",
    ]);
    let uris = async |spec: &str| place.uris(&place.open(spec)).await;
    assert_eq!(uris("*.jpg").await, ["e.jpg"]);
    assert_eq!(
        uris("**/*.jpg").await,
        ["e.jpg", "x/a.jpg", "x/x/b.jpg", "y/c.jpg"]
    );
    assert_eq!(uris("**/x/**/*.jpg").await, ["x/a.jpg", "x/x/b.jpg"]);
    assert_eq!(uris("[xy]/?.jpg").await, ["x/a.jpg", "y/c.jpg"]);
    assert_eq!(
        uris("y/*.md").await,
        ["y/n.md"],
        "the pattern names the suffix"
    );
    let all = place.open("y/*");
    assert_eq!(place.uris(&all).await, ["y/c.jpg", "y/d.png"]);
    assert_eq!(all.skipped(), 1);
    assert_says(&place.refusal("*.bmp"), &["*.bmp", "no file matches"]);
    assert_says(
        &place.refusal("nowhere/*.jpg"),
        &["nowhere", "No such file"],
    );
    assert_says(&place.refusal("a[.jpg"), &["a[.jpg"]);
}

#[tokio::test]
async fn names_may_look_like_patterns_and_urls_may_name_files() {
    let place = Place::with(&["a[1]*.jpg", "b c.jpg"]);
    assert_eq!(place.uris(&place.open("a[1]*.jpg")).await, ["a[1]*.jpg"]);
    let url = format!("file://{}", place.spec("b%20c.jpg"));
    let source = open_source(&[url], &SourceOptions::default()).unwrap();
    assert_eq!(place.uris(&source).await, ["b c.jpg"]);
}

#[tokio::test]
async fn uris_begin_as_the_user_has_typed_them() {
    let place = Place::with(&["p/a.jpg"]);
    for typed in ["p", "p/", "./p", "p/../p", "p/*.jpg"] {
        let typed = place.spec(typed);
        let source = open_source(std::slice::from_ref(&typed), &SourceOptions::default()).unwrap();
        let folder = typed.trim_end_matches("*.jpg").trim_end_matches('/');
        assert_eq!(
            list(&source).await.unwrap()[0].uri,
            format!("{folder}/a.jpg")
        );
    }
}

#[tokio::test]
async fn the_limit_is_checked_before_memory_is_taken() {
    let place = Place::with(&["a.jpg"]);
    let sparse = std::fs::File::create(place.path("sparse.jpg")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    let source = place.open("");
    let found = list(&source).await.unwrap();
    assert_eq!(
        failure(&source, &found[1]).await,
        StorageErrorKind::TooLarge
    );
    let error = source.fetch(&image(&found[0]), 4).await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::TooLarge);
    assert_says(&error.to_string(), &["a.jpg", "5 bytes", "4 allows"]);
    assert_eq!(source.fetch(&image(&found[0]), 5).await.unwrap(), "a.jpg");
}

#[tokio::test]
async fn bytes_in_the_message_are_given_back() {
    let place = Place::with(&["a.jpg"]);
    let source = place.open("");
    let inline = |bytes: &[u8]| Found {
        uri: "upload".to_owned(),
        content: Content::Inline(bytes.to_vec()),
        etag: None,
        size: None,
        columns: Vec::new(),
    };
    assert_eq!(fetch(&source, &inline(b"bytes")).await.unwrap(), "bytes");
    assert_eq!(
        failure(&source, &inline(b"")).await,
        StorageErrorKind::Empty
    );
    let large = source.fetch(&image(&inline(b"bytes")), 4).await;
    assert_eq!(large.unwrap_err().kind(), StorageErrorKind::TooLarge);
}

#[tokio::test]
async fn a_file_may_vanish_or_grow_after_the_listing() {
    let place = Place::with(&["a.jpg", "b.jpg"]);
    let source = place.open("");
    let found = list(&source).await.unwrap();
    std::fs::remove_file(place.path("a.jpg")).unwrap();
    place.write("b.jpg", "longer than it was");
    assert_eq!(
        failure(&source, &found[0]).await,
        StorageErrorKind::NotFound
    );
    assert_eq!(failure(&source, &found[1]).await, StorageErrorKind::Changed);
    let nul = Found {
        uri: "a\0b.jpg".to_owned(),
        ..found[0].clone()
    };
    assert_eq!(failure(&source, &nul).await, StorageErrorKind::NotFound);
}

/// R9: a row never has the etag of one file and the label of another.
#[tokio::test]
async fn a_file_that_was_changed_since_it_was_listed_is_not_read() {
    let place = Place::with(&["a.jpg"]);
    let source = place.open("a.jpg");
    let found = list(&source).await.unwrap();
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), "a.jpg");
    place.write("a.jpg", "b.jpg"); // as long as before
    touch(&place.path("a.jpg"));
    let error = fetch(&source, &found[0]).await.unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Changed);
    assert_says(
        &error.to_string(),
        &["a.jpg", "changed since it was listed"],
    );
    // Who does not say which version gets what is there.
    let any = Found {
        etag: None,
        ..found[0].clone()
    };
    assert_eq!(fetch(&source, &any).await.unwrap(), "b.jpg");
}

#[tokio::test]
async fn a_pattern_of_archives_or_lists_opens_each() {
    let place = Place::with(&["p/a.jpg", "p/b.jpg", "p/deep/c.jpg"]);
    place.write("p/2.csv", "uri,n\nb.jpg,2\n");
    place.write("p/1.csv", "uri,site\na.jpg,north\n");
    place.write("p/deep/3.csv", "uri,n\nc.jpg,3\n");
    let source = place.open("p/*.csv");
    assert_eq!(place.uris(&source).await, ["p/a.jpg", "p/b.jpg"]);
    let found = list(&source).await.unwrap();
    assert_eq!(found[0].columns, [text("north"), Scalar::Null]);
    assert_eq!(found[1].columns, [Scalar::Null, text("2")]);
    let source = place.open("p/**/*.csv");
    let all = ["p/a.jpg", "p/b.jpg", "p/deep/c.jpg"];
    assert_eq!(place.uris(&source).await, all);
    assert_says(&place.refusal("p/*.tar"), &["p/*.tar", "no file matches"]);
    let options = SourceOptions {
        rule: trommel_storage::PlaceRule::new(|uri| match uri.ends_with("2.csv") {
            true => Err("not for you".to_owned()),
            false => Ok(()),
        }),
        ..SourceOptions::default()
    };
    assert_says(&place.refusal_with("p/*.csv", options), &["not for you"]);
}

#[test]
fn a_folder_of_shards_says_how_to_name_them() {
    let place = Place::with(&["s/1.tar", "s/2.tar", "s/README.md"]);
    let words = ["no images", "2 lists or archives", "1.tar", "/s/**/*.tar'"];
    assert_says(&place.refusal("s"), &words);
}

#[tokio::test]
async fn what_is_hidden_or_left_by_macos_is_no_image() {
    let place = Place::with(&[
        "p/a.jpg",
        "p/._a.jpg",
        "p/.hidden.jpg",
        "p/.cache/b.jpg",
        "p/__MACOSX/c.jpg",
    ]);
    let source = place.open("p");
    assert_eq!(place.uris(&source).await, ["p/a.jpg"]);
    assert_eq!(source.skipped(), 2, "folders are not looked into");
    for (spec, expected) in [
        ("p/*.jpg", &["p/a.jpg"][..]),
        // What the user names is taken.
        ("p/.cache/*.jpg", &["p/.cache/b.jpg"]),
        ("p/.*.jpg", &["p/._a.jpg", "p/.hidden.jpg"]),
        ("p/.cache", &["p/.cache/b.jpg"]),
        ("p/.hidden.jpg", &["p/.hidden.jpg"]),
    ] {
        let source = place.open(spec);
        assert_eq!(place.uris(&source).await, expected, "{spec}");
    }
}
