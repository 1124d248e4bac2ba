//! Images from Google Cloud Storage and from Azure.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use bytes::Bytes;
use common::{image, wait};
use futures::StreamExt;
use trommel_source::{Source, SourceOptions, open_source};
use trommel_storage::StorageErrorKind;
use trommel_storage::cloud::{self, CloudLocation};
use trommel_storage::testsuite::MotoServer;
use trommel_types::{Content, ImageRef};

const CLOUDS: [&str; 2] = ["gs://bucket/", "az://bucket/"];

/// A server with these objects in a bucket of each cloud, each of which holds its own key.
fn server(keys: &[&str]) -> (MotoServer, SourceOptions) {
    let server = MotoServer::start();
    server.create_bucket("bucket");
    let options = SourceOptions {
        cloud: server.clouds(),
        ..SourceOptions::default()
    };
    for root in CLOUDS {
        let place = CloudLocation::parse(root).unwrap();
        let store = cloud::open(&place, &options.cloud).unwrap();
        for key in keys {
            let content = match *key {
                "list.txt" => "cats/1.jpg\ndogs/a b#.png\n",
                key => key,
            };
            wait(store.put(key, Bytes::from(content.to_owned()))).unwrap();
        }
    }
    (server, options)
}

fn open(spec: &str, options: &SourceOptions) -> Arc<dyn Source> {
    open_source(&[spec.to_owned()], options).unwrap()
}

fn uris(source: &Arc<dyn Source>) -> Vec<String> {
    wait(source.list().map(|found| found.unwrap().uri).collect())
}

#[test]
fn buckets_are_listed_by_prefix_and_pattern_and_read() {
    let keys = [
        "cats/1.jpg",
        "cats/2.jpg",
        "cats/notes.md",
        "cats/old/3.png",
        "dogs/a b#.png",
        "list.txt",
    ];
    let (_server, options) = server(&keys);
    for root in CLOUDS {
        let at = |keys: &[&str]| -> Vec<String> {
            keys.iter().map(|key| format!("{root}{key}")).collect()
        };
        for (spec, expected) in [
            ("", at(&[keys[0], keys[1], keys[3], keys[4]])),
            ("cats/", at(&[keys[0], keys[1], keys[3]])),
            ("cats/1", at(&[keys[0]])),
            ("cats/notes.md", at(&[keys[2]])),
            ("cats/*.jpg", at(&[keys[0], keys[1]])),
            ("**/*.png", at(&[keys[3], keys[4]])),
            ("list.txt", at(&[keys[0], keys[4]])),
            ("l*.txt", at(&[keys[0], keys[4]])),
        ] {
            let source = open(&format!("{root}{spec}"), &options);
            assert_eq!(uris(&source), expected, "{root}{spec}");
        }
        let refused = open_source(&[format!("{root}birds/")], &options);
        let refusal = refused.map(|_| ()).unwrap_err().to_string();
        assert!(refusal.contains("birds/: no key"), "{refusal}");

        let source = open(root, &options);
        let last = format!("{root}cats/2.jpg");
        let rest = source.list_from(2, Some(last));
        let rest: Vec<_> = wait(rest.map(|found| found.unwrap().uri).collect());
        assert_eq!(rest, at(&[keys[3], keys[4]]));
    }
}

#[test]
fn images_are_read_in_the_version_that_was_listed() {
    let (_server, options) = server(&["cats/1.jpg"]);
    for root in CLOUDS {
        let source = open(root, &options);
        let found = wait(source.list().next()).unwrap().unwrap();
        let listed = ImageRef {
            etag: found.etag.clone(),
            ..image(&found.uri, Content::Whole)
        };
        assert!(listed.etag.is_some() && found.size == Some(10), "{found:?}");
        assert_eq!(wait(source.fetch(&listed, 10)).unwrap(), "cats/1.jpg");
        let error = wait(source.fetch(&listed, 9)).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::TooLarge, "{error}");
        let range = Content::Range {
            archive: found.uri.clone(),
            offset: 5,
            length: 3,
        };
        let part = image(&format!("{root}x.tar#1.jpg"), range);
        assert_eq!(wait(source.fetch(&part, 10)).unwrap(), "1.j");

        let place = CloudLocation::parse(root).unwrap();
        let store = cloud::open(&place, &options.cloud).unwrap();
        wait(store.put("cats/1.jpg", Bytes::from_static(b"other"))).unwrap();
        let error = wait(source.fetch(&listed, 10)).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Changed, "{error}");
        let gone = image(&format!("{root}gone.jpg"), Content::Whole);
        let error = wait(source.fetch(&gone, 10)).unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::NotFound, "{error}");
    }
}
