//! What S3 is asked for, answered by a second make of store.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::{Arc, Barrier};

use common::{image, row, wait};
use futures::StreamExt;
use trommel_storage::testsuite::{MotoServer, S3Server};
use trommel_storage::{
    BucketDestination, BucketSink, Format, JobRecord, Opened, S3Config, SourceOptions,
    StorageErrorKind, open_source,
};
use trommel_types::{Classification, Content, ErrorKind, Failure, ImageRef, Outcome};

fn rows(indices: std::ops::Range<u64>, error: &str) -> Vec<Classification> {
    let row = |index| Classification {
        outcome: Outcome::Failed(Failure {
            kind: ErrorKind::Empty,
            error: error.to_owned(),
        }),
        ..row(index, &format!("s3://bucket/images/{index}.jpg"))
    };
    indices.map(row).collect()
}

fn record() -> JobRecord {
    JobRecord {
        format: Format::Jsonl,
        ..common::record()
    }
}

fn sink(config: &S3Config, output: &str) -> BucketSink {
    let to = BucketDestination::parse(output, Format::Jsonl, config)
        .unwrap()
        .unwrap();
    match BucketSink::open(&to, record(), false, None).unwrap() {
        Opened::Ready(sink) => *sink,
        Opened::Complete(_) => panic!("it is complete"),
    }
}

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

#[test]
fn racing_sinks_commit_each_part_once() {
    let server = MotoServer::start();
    server.create_bucket("out");
    let barrier = Arc::new(Barrier::new(8));
    let config = server.config();
    let racers: Vec<_> = (0..8)
        .map(|_| {
            let (config, barrier) = (config.clone(), Arc::clone(&barrier));
            std::thread::spawn(move || {
                let mut racer = loop {
                    // Eight first sinks race for the record of the job too.
                    let to = BucketDestination::parse("s3://out/rows/", Format::Jsonl, &config)
                        .unwrap()
                        .unwrap();
                    match BucketSink::open(&to, record(), false, None) {
                        Ok(Opened::Ready(sink)) => break sink,
                        Ok(Opened::Complete(_)) => panic!("it is complete"),
                        Err(error) if error.kind() == StorageErrorKind::LostRace => {}
                        Err(error) => {
                            barrier.wait(); // nobody is to wait for this one
                            panic!("{error}");
                        }
                    }
                };
                barrier.wait();
                racer.commit(rows(0..50, "none")).is_ok()
            })
        })
        .collect();
    let winners = racers.into_iter().map(|racer| racer.join().unwrap());
    assert_eq!(winners.filter(|won| *won).count(), 1);
    let sink = sink(&config, "s3://out/rows/");
    assert_eq!(sink.committed().len(), 50);
    assert_eq!(sink.finish().unwrap().images, 50);
}

/// A part of 12 MB goes in three pieces, once, whole.
fn large_parts(config: S3Config, read: impl Fn(&str) -> Vec<u8>) {
    let config = S3Config {
        multipart_bytes: 5 << 20,
        ..config
    };
    let mut first = sink(&config, "s3://out/rows/");
    let mut second = sink(&config, "s3://out/rows/");
    first.commit(rows(0..12, &"x".repeat(1 << 20))).unwrap();
    let error = second
        .commit(rows(0..12, &"y".repeat(1 << 20)))
        .unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
    let part = read("rows/part-00000000.jsonl");
    assert!(part.len() > 12 << 20);
    assert!(
        !part.windows(4).any(|bytes| bytes == b"yyyy"),
        "the winner's bytes stay"
    );
    assert_eq!(sink(&config, "s3://out/rows/").committed().len(), 12);
}

#[test]
fn a_large_part_is_written_in_pieces() {
    let server = MotoServer::start();
    server.create_bucket("out");
    large_parts(server.config(), |key| server.get("out", key));
}

#[test]
fn a_large_part_is_written_in_pieces_with_signatures_checked() {
    let server = S3Server::start();
    server.create_bucket("out");
    large_parts(server.config(), |key| {
        std::fs::read(server.path("out", key)).unwrap()
    });
}
