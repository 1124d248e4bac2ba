//! Images from S3, answered by a second make of store.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{image, wait};
use futures::StreamExt;
use trommel_source::{SourceOptions, open_source};
use trommel_storage::StorageErrorKind;
use trommel_storage::testsuite::MotoServer;
use trommel_types::{Content, ImageRef};

#[test]
fn a_bucket_is_listed_and_read() {
    let server = MotoServer::start();
    server.create_bucket("bucket");
    for number in 0..1020 {
        server.put(
            "bucket",
            &format!("images/{}/{number:04}.jpg", number % 2),
            b"0123456789",
        );
    }
    let options = SourceOptions {
        s3: server.config(),
        ..SourceOptions::default()
    };
    let source = open_source(&["s3://bucket/images/".to_owned()], &options).unwrap();
    let found: Vec<_> = wait(source.list().map(Result::unwrap).collect());
    let mut expected: Vec<_> = (0..1020)
        .map(|number| format!("s3://bucket/images/{}/{number:04}.jpg", number % 2))
        .collect();
    expected.sort();
    let uris: Vec<_> = found.iter().map(|found| found.uri.clone()).collect();
    assert_eq!(uris, expected);
    let rest = source.list_from(600, Some(expected[599].clone()));
    let rest: Vec<_> = wait(rest.map(|found| found.unwrap().uri).collect());
    assert_eq!(rest, expected[600..]);
    let range = ImageRef {
        uri: "s3://bucket/x.tar#1.jpg".to_owned(),
        content: Content::Range {
            archive: expected[0].clone(),
            offset: 3,
            length: 4,
        },
        ..image("", Content::Whole)
    };
    assert_eq!(wait(source.fetch(&range, 100)).unwrap(), &b"3456"[..]);
    let beyond = ImageRef {
        content: Content::Range {
            archive: expected[0].clone(),
            offset: 8,
            length: 4,
        },
        ..range
    };
    let error = wait(source.fetch(&beyond, 100)).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::NotAFile, "{error}");
}
