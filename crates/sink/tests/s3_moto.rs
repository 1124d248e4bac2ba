//! Rows in S3, at a second make of store.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::{Arc, Barrier};

use common::{KeptClaims, Sink, open_leased, ready, row};
use trommel_sink::{Destination, Format, JobRecord, Opened};
use trommel_storage::testsuite::{MotoServer, S3Server};
use trommel_storage::{S3Config, StorageErrorKind};
use trommel_types::{Classification, ErrorKind, Failure, Outcome};

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

fn destination(config: &S3Config, output: &str) -> Destination {
    Destination::in_bucket(output, Format::Jsonl, config)
        .unwrap()
        .unwrap()
}

fn sink(config: &S3Config, output: &str) -> Sink {
    let claims = Arc::new(KeptClaims::default());
    ready(open_leased(destination(config, output), record(), false, &claims).unwrap())
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
                    let to = destination(&config, "s3://out/rows/");
                    let claims = Arc::new(KeptClaims::default());
                    match open_leased(to, record(), false, &claims) {
                        Ok(Opened::Ready(sink)) => break Sink(sink),
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
    let part = read("rows/part-00000000-0a1b2c3d.jsonl");
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
