//! Lists of uris as text, CSV and JSON Lines.

use futures::StreamExt;

use super::*;

fn with_uri_column(name: &str) -> SourceOptions {
    SourceOptions {
        uri_column: Some(name.to_owned()),
        ..SourceOptions::default()
    }
}

#[tokio::test]
async fn a_text_list_names_files_relative_to_itself() {
    let place = Place::with(&["d/a b.jpg", "d/sub/c.jpg", "e.jpg", "d/caf.jpg"]);
    let absolute = place.spec("e.jpg");
    let url = format!("file://{}", place.spec("d/a%20b.jpg"));
    let list_text =
        format!("\u{feff}a b.jpg\r\n\n  \nsub/c.jpg\n{absolute}\n{url}\nmissing.jpg\na b.jpg");
    place.write("d/list.txt", list_text);
    let source = place.open("d/list.txt");
    let expected = [
        "d/a b.jpg",
        "d/sub/c.jpg",
        "e.jpg",
        "d/a b.jpg",
        "d/missing.jpg",
        "d/a b.jpg",
    ];
    assert_eq!(place.uris(&source).await, expected);
    assert!(source.columns().is_empty());
    let found = list(&source).await.unwrap();
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), "d/a b.jpg");
    assert_eq!(found[0].size, Some(9));
    assert!(found[0].etag.is_some());
    assert_eq!(
        failure(&source, &found[4]).await,
        StorageErrorKind::NotFound
    );
}

#[tokio::test]
async fn a_text_list_may_name_paths_that_are_not_utf_8() {
    use std::os::unix::ffi::OsStrExt;
    let place = Place::new();
    let name = b"caf\xe9.jpg";
    place.write(std::ffi::OsStr::from_bytes(name), "image");
    place.write("list.txt", [&name[..], b"\n"].concat());
    let source = place.open("list.txt");
    let found = list(&source).await.unwrap();
    assert!(found[0].uri.ends_with("/caf%E9.jpg"), "{}", found[0].uri);
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), "image");
}

#[tokio::test]
async fn csv_columns_pass_through_as_text() {
    let place = Place::with(&["d/a.jpg", "d/b.jpg"]);
    place.write(
        "d/list.csv",
        "\u{feff}id,Image,\"the, note\"\n007,a.jpg,\"two\nlines\"\n8,b.jpg,\n",
    );
    let source = place.open("d/list.csv");
    assert_eq!(place.uris(&source).await, ["d/a.jpg", "d/b.jpg"]);
    let expected = [
        column("id", ColumnKind::String),
        column("the, note", ColumnKind::String),
    ];
    assert_eq!(source.columns(), expected);
    let found = list(&source).await.unwrap();
    assert_eq!(found[0].columns, [text("007"), text("two\nlines")]);
    assert_eq!(found[1].columns, [text("8"), text("")]);
}

#[tokio::test]
async fn the_uri_column_is_found_by_name_or_named() {
    let place = Place::with(&["a.jpg", "b.jpg"]);
    for name in [
        "uri",
        "path",
        "image",
        "file",
        "filename",
        "url",
        "image_path",
        "URI",
        "File_Name",
    ] {
        place.write("list.csv", format!("n,{name}\n1,a.jpg\n"));
        assert_eq!(
            place.uris(&place.open("list.csv")).await,
            ["a.jpg"],
            "{name}"
        );
    }
    place.write("list.csv", "url,path,mine\nhttps://host/x,a.jpg,b.jpg\n");
    assert_eq!(
        place.uris(&place.open("list.csv")).await,
        ["a.jpg"],
        "path goes before url"
    );
    let source = place.open_with("list.csv", with_uri_column("mine"));
    assert_eq!(place.uris(&source).await, ["b.jpg"]);
    assert_eq!(source.columns().len(), 2);
    let refusal = place.refusal_with("list.csv", with_uri_column("none"));
    assert_says(&refusal, &["list.csv", "`none`", "url, path, mine"]);
    place.write("list.csv", "left,right\na.jpg,b.jpg\n");
    assert_says(
        &place.refusal("list.csv"),
        &["list.csv", "--uri-column", "left, right"],
    );
}

#[test]
fn malformed_csv_is_refused_with_its_line() {
    let place = Place::with(&["a.jpg"]);
    let refusal = |content: &[u8]| {
        place.write("list.csv", content);
        place.refusal("list.csv")
    };
    for line_end in ["\n", "\r\n"] {
        let lines = ["uri,n", "a.jpg,1", "a.jpg,\"2", "3\"", "a.jpg"].join(line_end);
        let short = refusal(lines.as_bytes());
        assert_says(&short, &["list.csv:5: ", "fields: 1", "2 in the header"]);
    }
    assert_says(
        &refusal(b"uri,n\na.jpg,1\n,2\n"),
        &["list.csv:3: ", "uri is empty"],
    );
    assert_says(
        &refusal(b"uri,n\na.jpg,\xff\n"),
        &["list.csv:2: ", "`n`", "UTF-8"],
    );
    assert_says(&refusal(b"uri,n,n\n"), &["list.csv", "`n`", "rename"]);
    assert_says(&refusal(b""), &["list.csv", "empty"]);
    assert_says(
        &refusal(b"uri\nwasb://b/k.jpg\n"),
        &["list.csv:2: ", "wasb://b/k.jpg", "az://container/key"],
    );
}

#[tokio::test]
async fn a_malformed_line_far_into_a_list_ends_the_listing_with_its_number() {
    let place = Place::with(&["a.jpg"]);
    let lines = "a.jpg,1\n".repeat(5000);
    place.write("list.csv", format!("uri,n\n{lines}a.jpg\n{lines}"));
    let source = place.open("list.csv");
    let mut listed: Vec<_> = source.list().collect().await;
    let error = listed.pop().unwrap().unwrap_err();
    let found: Vec<Found> = listed.into_iter().map(Result::unwrap).collect();
    assert_eq!(found.len(), 5000, "what comes before is listed");
    assert_says(&error.to_string(), &["list.csv:5002: "]);
}

#[tokio::test]
async fn json_fields_pass_through_with_their_types() {
    let place = Place::with(&["d/a.jpg", "d/b.jpg"]);
    let lines = [
        r#"{"zeta": 1, "file": "a.jpg", "ratio": 1, "tags": ["x",  "y"], "ok": true, "none": null}"#,
        "",
        r#"{"file": "b.jpg", "ratio": 0.5, "zeta": -7, "late": {"b":1, "a":2}, "ok": null}"#,
    ];
    place.write("d/list.jsonl", lines.join("\n"));
    let source = place.open("d/list.jsonl");
    assert_eq!(place.uris(&source).await, ["d/a.jpg", "d/b.jpg"]);
    let expected = [
        column("zeta", ColumnKind::Int),
        column("ratio", ColumnKind::Float),
        column("tags", ColumnKind::String),
        column("ok", ColumnKind::Bool),
        column("none", ColumnKind::String),
        column("late", ColumnKind::String),
    ];
    assert_eq!(source.columns(), expected);
    let found = list(&source).await.unwrap();
    let (null, yes) = (Scalar::Null, Scalar::Bool(true));
    let first = [
        Scalar::Int(1),
        Scalar::Float(1.0),
        text(r#"["x",  "y"]"#),
        yes,
        null.clone(),
        null.clone(),
    ];
    assert_eq!(found[0].columns, first);
    let second = [
        Scalar::Int(-7),
        Scalar::Float(0.5),
        null.clone(),
        null.clone(),
        null,
        text(r#"{"b":1, "a":2}"#),
    ];
    assert_eq!(found[1].columns, second);
}

#[test]
fn malformed_json_is_refused_with_its_line() {
    let place = Place::with(&["a.jpg"]);
    let refusal = |content: &[u8]| {
        place.write("list.jsonl", content);
        place.refusal("list.jsonl")
    };
    let good = "{\"uri\": \"a.jpg\"}\n";
    let after = |bad: &str| refusal(format!("{good}\n{good}{bad}\n{good}").as_bytes());
    assert_says(&after("{\"uri\": \"a.jpg\""), &["list.jsonl:4: "]);
    assert_says(&after("[1]"), &["list.jsonl:4: ", "object"]);
    assert_says(&after("{\"n\": 1}"), &["list.jsonl:4: ", "`uri`"]);
    assert_says(&after("{\"uri\": null}"), &["list.jsonl:4: ", "`uri`"]);
    assert_says(&after("{\"uri\": 7}"), &["list.jsonl:4: ", "`uri`"]);
    assert_says(
        &refusal(b"{\"a\": 1, \"b\": 2}\n"),
        &["list.jsonl", "--uri-column", "a, b"],
    );
    assert_says(&refusal(b"\n"), &["list.jsonl", "empty"]);
    assert_says(&refusal(b"\xff\xfe{\0"), &["list.jsonl:1: ", "UTF-16"]);
    assert_says(
        &refusal(b"{\"uri\": \"\xff\"}"),
        &["list.jsonl:1: ", "utf-8"],
    );
}

#[tokio::test]
async fn suffixes_that_are_given_choose_from_a_list_too() {
    let place = Place::with(&["a.jpg", "b.dat"]);
    place.write("list.txt", "a.jpg\nb.dat\n");
    assert_eq!(
        place.uris(&place.open("list.txt")).await,
        ["a.jpg", "b.dat"]
    );
    let options = SourceOptions {
        suffixes: Some(vec!["jpg".to_owned()]),
        ..SourceOptions::default()
    };
    let source = place.open_with("list.txt", options);
    assert_eq!(place.uris(&source).await, ["a.jpg"]);
    assert_eq!(source.skipped(), 1);
}

#[tokio::test]
async fn a_pipe_is_no_list() {
    let place = Place::new();
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mkfifoat(rustix::fs::CWD, place.path("list.txt"), mode).unwrap();
    assert_says(&place.refusal("list.txt"), &["list.txt", "pipe", "`-`"]);
}

/// R30: one stray quote, or a line without an end, does not make a gigabyte one record.
#[tokio::test]
async fn a_record_that_would_fill_memory_is_refused_by_its_line() {
    let place = Place::with(&["a.jpg"]);
    for (name, begin, words) in [
        (
            "list.csv",
            "uri,site\na.jpg,north\n\"b.jpg,south\n",
            ["list.csv:3", "1048576 bytes", "close the quote"],
        ),
        (
            "list.jsonl",
            "{\"uri\": \"a.jpg\"}\n{\"uri\": \"",
            ["list.jsonl:2", "1048576 bytes", "one image a line"],
        ),
        (
            "list.txt",
            "a.jpg\na",
            ["list.txt:2", "1048576 bytes", "one image a line"],
        ),
    ] {
        place.write(name, begin);
        let file = fs::File::options()
            .write(true)
            .open(place.path(name))
            .unwrap();
        file.set_len(1 << 30).unwrap(); // the rest is a hole
        assert_says(&place.refusal(name), &words);
    }
    // As long as is allowed.
    let long = format!("uri,note\na.jpg,{}\n", "x".repeat(90));
    place.write("long.csv", long);
    let allow = |max_record_bytes| SourceOptions {
        max_record_bytes,
        ..SourceOptions::default()
    };
    let source = place.open_with("long.csv", allow(100));
    assert_eq!(place.uris(&source).await, ["a.jpg"]);
    assert_says(&place.refusal_with("long.csv", allow(50)), &["long.csv:2"]);
}

#[tokio::test]
async fn a_uri_longer_than_any_path_fails_alone() {
    let place = Place::with(&["a.jpg", "b.jpg"]);
    let long = "x".repeat(600_000);
    place.write("list.txt", format!("a.jpg\n{long}.jpg\nb.jpg\n"));
    let source = place.open("list.txt");
    let found = list(&source).await.unwrap();
    assert_eq!(found.len(), 3);
    assert_eq!(found[1].uri.len(), place.spec("").len() + 600_004);
    let kind = failure(&source, &found[1]).await;
    assert_eq!(kind, StorageErrorKind::NotFound);
    assert_eq!(fetch(&source, &found[2]).await.unwrap(), "b.jpg");
}

#[tokio::test]
async fn a_tab_separates_the_fields_of_a_tsv() {
    let place = Place::with(&["a, b.jpg", "c.jpg"]);
    let content = "uri\tnote\na, b.jpg\t1,5\nc.jpg\t\"two\ttabs\"\n";
    place.write("list.tsv", content);
    let source = place.open("list.tsv");
    assert_eq!(place.uris(&source).await, ["a, b.jpg", "c.jpg"]);
    let found = list(&source).await.unwrap();
    assert_eq!(found[0].columns, [text("1,5")]);
    assert_eq!(found[1].columns, [text("two\ttabs")]);
    let short = place.refusal_text("list.tsv", "uri\tn\nc.jpg\n");
    assert_says(&short, &["list.tsv:2: ", "fields: 1"]);
}

#[tokio::test]
async fn a_json_array_holds_objects_or_uris() {
    let place = Place::with(&["a.jpg", "b.jpg"]);
    let objects = r#"
        [
          {"uri": "a.jpg", "n": 1},
          {"uri": "b.jpg", "n": 0.5}
        ]
    "#;
    place.write("list.json", objects);
    let source = place.open("list.json");
    assert_eq!(place.uris(&source).await, ["a.jpg", "b.jpg"]);
    assert_eq!(source.columns(), [column("n", ColumnKind::Float)]);
    place.write("list.json", r#"["a.jpg", "b.jpg"]"#);
    let source = place.open("list.json");
    assert_eq!(place.uris(&source).await, ["a.jpg", "b.jpg"]);
    assert!(source.columns().is_empty());
    // An object a line is what many call so too.
    let lines = "{\"uri\": \"b.jpg\"}\n{\"uri\": \"a.jpg\"}\n";
    place.write("list.json", lines);
    let source = place.open("list.json");
    assert_eq!(place.uris(&source).await, ["b.jpg", "a.jpg"]);
    for (content, words) in [
        (r#"["a.jpg", 7]"#, &["row 1", "object"][..]),
        (r#"["a.jpg", "#, &["row 1", "EOF"]),
        (r#"[{"n": 1}]"#, &["--uri-column", "n"]),
        ("[]", &["empty"]),
        ("", &["EOF"]),
        ("{\n\"images\": []\n}", &["jq"]),
        (
            r#"{"images": [], "n": 1}"#,
            &["--uri-column", "images", "jq"],
        ),
        ("7", &["array"]),
    ] {
        let refusal = place.refusal_text("list.json", content);
        assert_says(&refusal, &[words, &["list.json"]].concat());
    }
}

#[tokio::test]
async fn lists_may_be_compressed() {
    use std::io::Write;
    let place = Place::with(&["a.jpg", "b.jpg"]);
    for (name, content) in [
        ("list.csv", "uri,n\na.jpg,1\nb.jpg,2\n"),
        ("list.txt", "a.jpg\nb.jpg\n"),
        ("list.jsonl", "{\"uri\": \"a.jpg\"}\n{\"uri\": \"b.jpg\"}\n"),
    ] {
        let content = content.as_bytes();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(content).unwrap();
        let zstd = zstd::stream::encode_all(content, 1).unwrap();
        place.write(format!("{name}.gz"), gzip.finish().unwrap());
        place.write(format!("{name}.zst"), zstd);
        for packed in ["gz", "zst"] {
            let source = place.open(&format!("{name}.{packed}"));
            let uris = place.uris(&source).await;
            assert_eq!(uris, ["a.jpg", "b.jpg"], "{name}.{packed}");
        }
    }
    let refusal = place.refusal_text("bad.csv.gz", "uri\na.jpg\n");
    assert_says(&refusal, &["bad.csv.gz", "gzip"]);
}

/// As `find -print0` writes them.
#[tokio::test]
async fn names_may_be_separated_by_zero_bytes() {
    let place = Place::with(&["a\nb.jpg", " c .jpg"]);
    place.write("list.txt", " c .jpg\0a\nb.jpg\0");
    let source = place.open("list.txt");
    assert_eq!(place.uris(&source).await, [" c .jpg", "a\nb.jpg"]);
    let found = list(&source).await.unwrap();
    assert_eq!(fetch(&source, &found[1]).await.unwrap(), "a\nb.jpg");
}

#[tokio::test]
async fn relative_paths_begin_where_the_user_says() {
    let place = Place::with(&["photos/a.jpg", "lists/b.jpg"]);
    place.write("lists/list.csv", "uri\na.jpg\n");
    let with_base = |base: &str| SourceOptions {
        base: Some(base.to_owned()),
        ..SourceOptions::default()
    };
    let source = place.open_with("lists/list.csv", with_base(&place.spec("photos")));
    assert_eq!(place.uris(&source).await, ["photos/a.jpg"]);
    let found = list(&source).await.unwrap();
    assert_eq!(fetch(&source, &found[0]).await.unwrap(), "photos/a.jpg");
    for (base, uri) in [
        ("s3://bucket/photos", "s3://bucket/photos/a.jpg"),
        ("s3://bucket/photos/", "s3://bucket/photos/a.jpg"),
        ("https://host/p", "https://host/p/a.jpg"),
    ] {
        let source = place.open_with("lists/list.csv", with_base(base));
        assert_eq!(list(&source).await.unwrap()[0].uri, uri);
        assert!(source.describe().ends_with(&format!(" --base {base}")));
    }
    // Tests run in the crate's folder, where these are; next to the list they are not.
    let here = "uri\nCargo.toml\nsrc/lib.rs\nmissing.jpg\n";
    let refusal = place.refusal_text("lists/here.csv", here);
    let words = [
        "here.csv",
        "lists",
        "first 3",
        "2 of them are in the current folder",
        "--base .",
    ];
    assert_says(&refusal, &words);
    place.write("lists/some.csv", "uri\nCargo.toml\nb.jpg\n");
    let source = place.open("lists/some.csv");
    assert_eq!(list(&source).await.unwrap().len(), 2);
}
