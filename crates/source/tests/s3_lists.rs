//! Lists, archives and inventories that lie in S3, and listings that are fanned out.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::Write;
use std::sync::Arc;

use arrow_array::{ArrayRef, BinaryArray, BooleanArray, Int64Array, RecordBatch, StringArray};
use common::{open, server, wait};
use flate2::Compression;
use flate2::write::GzEncoder;
use futures::StreamExt;
use parquet::arrow::ArrowWriter;
use tar::{Builder, Header};
use trommel_source::{Found, Source};
use trommel_types::{ImageRef, Lane, Scalar};

fn list(source: &dyn Source) -> Vec<Found> {
    wait(source.list().map(Result::unwrap).collect())
}

fn uris(source: &dyn Source) -> Vec<String> {
    list(source).into_iter().map(|found| found.uri).collect()
}

fn fetch(source: &dyn Source, found: &Found) -> Vec<u8> {
    let image = ImageRef {
        job: "job".into(),
        index: 0,
        lane: Lane::Normal,
        uri: found.uri.clone(),
        content: found.content.clone(),
        etag: None,
        size: None,
        columns: Vec::new(),
    };
    wait(source.fetch(&image, 100 << 20)).unwrap().to_vec()
}

fn parquet(columns: Vec<(&str, ArrayRef)>) -> Vec<u8> {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    bytes
}

#[test]
fn manifests_in_a_bucket_name_images_beside_them_and_elsewhere() {
    let server = server();
    server.put("bucket", "set/a.jpg", b"a");
    server.put("bucket", "other/b.jpg", b"b");
    let uri: ArrayRef = Arc::new(StringArray::from(vec!["a.jpg", "s3://bucket/other/b.jpg"]));
    let site: ArrayRef = Arc::new(StringArray::from(vec!["north", "south"]));
    for (name, content, columns) in [
        ("list.txt", b"a.jpg\ns3://bucket/other/b.jpg\n".to_vec(), 0),
        (
            "list.csv",
            b"site,uri\nnorth,a.jpg\nsouth,s3://bucket/other/b.jpg\n".to_vec(),
            1,
        ),
        (
            "list.jsonl",
            b"{\"uri\":\"a.jpg\",\"site\":\"north\"}\n{\"uri\":\"s3://bucket/other/b.jpg\",\"site\":\"south\"}\n".to_vec(),
            1,
        ),
        ("list.parquet", parquet(vec![("uri", uri), ("site", site)]), 1),
    ] {
        server.put("bucket", &format!("set/{name}"), &content);
        let source = open(&server, &format!("s3://bucket/set/{name}")).unwrap();
        let found = list(source.as_ref());
        let uris: Vec<_> = found.iter().map(|found| found.uri.as_str()).collect();
        assert_eq!(uris, ["s3://bucket/set/a.jpg", "s3://bucket/other/b.jpg"], "{name}");
        assert_eq!(fetch(source.as_ref(), &found[0]), b"a");
        assert_eq!(fetch(source.as_ref(), &found[1]), b"b");
        if columns > 0 {
            assert_eq!(found[1].columns, [Scalar::String("south".to_owned())], "{name}");
        }
    }
    server.put("bucket", "set/bad.csv", b"uri,site\na.jpg,north\n,south\n");
    let error = open(&server, "s3://bucket/set/bad.csv").err().unwrap();
    assert!(
        error.to_string().contains("s3://bucket/set/bad.csv:3"),
        "{error}"
    );
    for (name, words) in [
        ("images.rar", "no source of this kind"),
        ("set.tar.xz", "unsupported compression"),
        ("noise.zip", "cannot be read as zip"),
    ] {
        server.put("bucket", name, b"x");
        let error = open(&server, &format!("s3://bucket/{name}")).err().unwrap();
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn members_of_a_shard_in_a_bucket_are_read_by_range() {
    let server = server();
    let mut archive = Builder::new(Vec::new());
    let content = |number: usize| vec![number as u8; 200_000 + 77_777 * (number % 30)];
    for number in 0..40 {
        for (suffix, content) in [
            ("jpg", content(number)),
            ("json", format!("{{\"n\": {number}}}").into_bytes()),
        ] {
            let mut header = Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            let name = format!("{number:03}.{suffix}");
            archive
                .append_data(&mut header, name, &content[..])
                .unwrap();
        }
    }
    server.put("bucket", "shards/0.tar", &archive.into_inner().unwrap());
    let source = open(&server, "s3://bucket/shards/0.tar").unwrap();
    let found = list(source.as_ref());
    assert_eq!(found.len(), 40);
    for (number, found) in found.iter().enumerate() {
        assert_eq!(
            found.uri,
            format!("s3://bucket/shards/0.tar#{number:03}.jpg")
        );
        assert_eq!(
            found.columns,
            [Scalar::String(format!("{{\"n\": {number}}}"))]
        );
        assert_eq!(fetch(source.as_ref(), found), content(number));
    }
}

#[test]
fn images_in_a_parquet_column_of_an_object_are_read() {
    let server = server();
    let content = |row: u8| vec![row; 30_000];
    let images: ArrayRef = Arc::new(BinaryArray::from_iter_values((0..100).map(content)));
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100));
    server.put(
        "bucket",
        "table.parquet",
        &parquet(vec![("image", images), ("id", ids)]),
    );
    let source = open(&server, "s3://bucket/table.parquet").unwrap();
    let found = list(source.as_ref());
    assert_eq!(found.len(), 100);
    assert_eq!(found[7].uri, "s3://bucket/table.parquet#7");
    assert_eq!(found[7].columns, [Scalar::Int(7)]);
    for row in [0, 7, 99, 3] {
        assert_eq!(fetch(source.as_ref(), &found[row]), content(row as u8));
    }
}

#[test]
fn an_inventory_lists_a_bucket_without_asking_it() {
    let server = server();
    server.create_bucket("reports");
    server.put("bucket", "a b/ü.jpg", b"bytes");
    let mut gz = GzEncoder::new(Vec::new(), Compression::fast());
    gz.write_all(
        b"\"bucket\",\"a+b/%C3%BC.jpg\",\"v1\",\"true\",\"false\",\"5\",\"e1\"\n\
          \"bucket\",\"old.jpg\",\"v0\",\"false\",\"false\",\"5\",\"e0\"\n\
          \"bucket\",\"gone.jpg\",\"v2\",\"true\",\"true\",\"\",\"\"\n\
          \"bucket\",\"notes.txt\",\"v3\",\"true\",\"false\",\"5\",\"e3\"\n",
    )
    .unwrap();
    server.put("reports", "data/1.csv.gz", &gz.finish().unwrap());
    let column = |values: &[&str]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    let bools = |values: &[bool]| -> ArrayRef { Arc::new(BooleanArray::from(values.to_vec())) };
    server.put(
        "reports",
        "data/1.parquet",
        &parquet(vec![
            ("bucket", column(&["bucket", "bucket", "bucket", "bucket"])),
            (
                "key",
                column(&["a b/ü.jpg", "old.jpg", "gone.jpg", "notes.txt"]),
            ),
            ("size", Arc::new(Int64Array::from(vec![5, 5, 0, 5]))),
            ("is_latest", bools(&[true, false, true, true])),
            ("is_delete_marker", bools(&[false, false, true, false])),
            ("e_tag", column(&["e1", "e0", "", "e3"])),
        ]),
    );
    let manifest = |format: &str, key: &str| {
        serde_json::json!({
            "sourceBucket": "bucket",
            "destinationBucket": "arn:aws:s3:::reports",
            "version": "2016-11-30",
            "fileFormat": format,
            "fileSchema": "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, ETag",
            "files": [{"key": key, "size": 1, "MD5checksum": ""}],
        })
        .to_string()
        .into_bytes()
    };
    for (format, key) in [("CSV", "data/1.csv.gz"), ("Parquet", "data/1.parquet")] {
        server.put(
            "reports",
            "bucket/daily/manifest.json",
            &manifest(format, key),
        );
        let source = open(&server, "s3://reports/bucket/daily/manifest.json").unwrap();
        let found = list(source.as_ref());
        assert_eq!(found.len(), 1, "{format}: {found:?}");
        assert_eq!(found[0].uri, "s3://bucket/a b/ü.jpg");
        assert_eq!(
            (found[0].size, found[0].etag.as_deref()),
            (Some(5), Some("e1"))
        );
        assert_eq!(source.skipped(), 1, "{format}");
        assert_eq!(fetch(source.as_ref(), &found[0]), b"bytes");
    }
    for (format, key, words) in [
        ("ORC", "data/1.orc", "CSV or Parquet"),
        (
            "CSV",
            "data/2.csv.gz",
            "s3://reports/data/2.csv.gz does not exist",
        ),
    ] {
        server.put(
            "reports",
            "bucket/daily/manifest.json",
            &manifest(format, key),
        );
        let error = open(&server, "s3://reports/bucket/daily/manifest.json")
            .err()
            .unwrap();
        assert!(error.to_string().contains(words), "{error}");
    }
    server.put("reports", "bucket/daily/manifest.json", b"{}");
    let error = open(&server, "s3://reports/bucket/daily/manifest.json")
        .err()
        .unwrap();
    assert!(
        error
            .to_string()
            .contains("not a manifest of an S3 Inventory"),
        "{error}"
    );
}

#[test]
fn large_folders_are_listed_side_by_side_in_the_order_of_the_keys() {
    let server = server();
    let mut keys = vec![
        "in/0.jpg".to_owned(),
        "in/b.jpg".to_owned(),
        "in/z.jpg".to_owned(),
    ];
    for folder in ["a", "b", "c-d", "x/y"] {
        keys.extend((0..300).map(|number| format!("in/{folder}/{number:04}.jpg")));
    }
    keys.sort();
    for key in &keys {
        server.put("bucket", key, b"x");
    }
    let expected: Vec<_> = keys
        .iter()
        .map(|key| format!("s3://bucket/{key}"))
        .collect();
    let source = open(&server, "s3://bucket/in/").unwrap();
    assert_eq!(uris(source.as_ref()), expected);
    // From wherever a listing was left.
    for passed in [1, 301, 302, 700, expected.len() - 1] {
        let last = Some(expected[passed - 1].clone());
        let rest = source.list_from(passed as u64, last);
        let rest: Vec<String> = wait(rest.map(|found| found.unwrap().uri).collect());
        assert_eq!(rest, expected[passed..], "from {passed}");
    }
}

/// Archives that are compressed, in a bucket; and all that a pattern matches there.
#[test]
fn compressed_archives_and_patterns_in_a_bucket_are_read() {
    let server = server();
    let mut tar = tar::Builder::new(Vec::new());
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default();
    // Its data begins farther behind its header than is read at first.
    let padded = options.with_alignment(512);
    for (number, options) in [options, padded, options].into_iter().enumerate() {
        let (name, content) = (format!("{number}.jpg"), vec![number as u8; 5000]);
        let mut header = tar::Header::new_gnu();
        header.set_size(5000);
        header.set_mode(0o644);
        tar.append_data(&mut header, &name, &content[..]).unwrap();
        zip.start_file(name, options).unwrap();
        std::io::Write::write_all(&mut zip, &content).unwrap();
    }
    let tar = zstd::stream::encode_all(&tar.into_inner().unwrap()[..], 1).unwrap();
    server.put("bucket", "set/a.tar.zst", &tar);
    server.put("bucket", "set/b.zip", &zip.finish().unwrap().into_inner());
    for name in ["a.tar.zst", "b.zip"] {
        let source = open(&server, &format!("s3://bucket/set/{name}")).unwrap();
        let found = list(source.as_ref());
        assert_eq!(found.len(), 3);
        assert_eq!(found[2].uri, format!("s3://bucket/set/{name}#2.jpg"));
        for (number, found) in found.iter().enumerate() {
            let bytes = fetch(source.as_ref(), found);
            assert!(bytes == vec![number as u8; 5000], "{name}: {number}");
        }
    }

    server.put("bucket", "set/c.tar.zst", &tar);
    server.put("bucket", "p/1/a.jpg", b"a");
    server.put("bucket", "p/2/b.jpg", b"b");
    server.put("bucket", "p/2/._b.jpg", b"left behind");
    server.put("bucket", "p/2/b.png", b"png");
    server.put("bucket", "p/3/x/c.jpg", b"c");
    let members = |archive: &str| [0, 1, 2].map(|number| format!("set/{archive}#{number}.jpg"));
    let shards = [members("a.tar.zst"), members("c.tar.zst")].concat();
    let shards: Vec<&str> = shards.iter().map(String::as_str).collect();
    for (spec, expected) in [
        ("set/*.tar.zst", shards.as_slice()),
        ("p/*/*.jpg", &["p/1/a.jpg", "p/2/b.jpg"]),
        ("p/**/*.jpg", &["p/1/a.jpg", "p/2/b.jpg", "p/3/x/c.jpg"]),
        ("p/[23]/**", &["p/2/b.jpg", "p/2/b.png", "p/3/x/c.jpg"]),
        ("p/2", &["p/2/b.jpg", "p/2/b.png"]),
    ] {
        let source = open(&server, &format!("s3://bucket/{spec}")).unwrap();
        let found = list(source.as_ref());
        let uris: Vec<_> = found.iter().map(|found| found.uri.as_str()).collect();
        let expected: Vec<_> = expected
            .iter()
            .map(|key| format!("s3://bucket/{key}"))
            .collect();
        assert_eq!(uris, expected, "{spec}");
    }
    for spec in ["p/*.gif", "set/*.tar", "p/[x.jpg"] {
        let error = open(&server, &format!("s3://bucket/{spec}")).err().unwrap();
        assert!(error.to_string().contains(spec), "{error}");
    }
}
