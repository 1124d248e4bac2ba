//! What every store promises, shown of each kind.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use bytes::Bytes;
use futures::{FutureExt, StreamExt, TryStreamExt};
use trommel_storage::cloud::{self, CloudLocation};
use trommel_storage::local::LocalStore;
use trommel_storage::s3::{Location, S3Store};
use trommel_storage::testsuite::{MotoServer, S3Server};
use trommel_storage::{Get, ObjectStore, S3Config, StorageErrorKind};

type Store = Arc<dyn ObjectStore>;

/// Runs a test on each kind of store.
fn on_each<T: Future<Output = ()>>(test: impl Fn(Store) -> T) {
    let folder = tempfile::tempdir().unwrap();
    let new = LocalStore::new(folder.path().join("new/folder"));
    wait(test(Arc::new(new)));
    let server = S3Server::start();
    server.create_bucket("bucket");
    wait(test(bucket(server.config())));
    let moto = MotoServer::start();
    moto.create_bucket("bucket");
    wait(test(bucket(moto.config())));
    for uri in ["gs://bucket/some/other/", "az://bucket/some/other/"] {
        let place = CloudLocation::parse(uri).unwrap();
        wait(test(cloud::open(&place, &moto.clouds()).unwrap()));
    }
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().unwrap().block_on(future)
}

fn bucket(config: S3Config) -> Store {
    let config = S3Config {
        multipart_bytes: 5 << 20,
        ..config
    };
    let prefix = Location::parse("s3://bucket/some/prefix/").unwrap();
    Arc::new(S3Store::new(&config, prefix))
}

async fn keys(store: &Store, prefix: &str, after: Option<&str>) -> Vec<String> {
    let listed = store.list(prefix, after).map_ok(|object| object.key);
    listed.try_collect().await.unwrap()
}

#[test]
fn what_is_put_is_listed_read_and_removed() {
    on_each(async |store| {
        assert_eq!(keys(&store, "", None).await, [""; 0]);
        let missing = store.get("a", Get::default()).await.unwrap_err();
        assert_eq!(missing.kind(), StorageErrorKind::NotFound, "{missing}");
        store.delete("a").await.unwrap();

        for key in ["b/x", "b.txt", "a", "b/y/z", "c"] {
            store.put(key, Bytes::from(key.repeat(3))).await.unwrap();
        }
        assert_eq!(
            keys(&store, "", None).await,
            ["a", "b.txt", "b/x", "b/y/z", "c"]
        );
        assert_eq!(keys(&store, "b/", None).await, ["b/x", "b/y/z"]);
        assert_eq!(keys(&store, "", Some("b/x")).await, ["b/y/z", "c"]);
        assert_eq!(keys(&store, "b", Some("b.txt")).await, ["b/x", "b/y/z"]);
        let below = store.within("b");
        assert_eq!(keys(&below, "", None).await, ["x", "y/z"]);
        assert_eq!(below.get("x", Get::default()).await.unwrap(), "b/xb/xb/x");
        assert!(store.locate("b/x").ends_with("b/x"));

        store
            .put("a", Bytes::from_static(b"0123456789"))
            .await
            .unwrap();
        let part = Get {
            range: Some(3..7),
            ..Get::default()
        };
        assert_eq!(store.get("a", part).await.unwrap(), "3456");
        for range in [8..12, 12..20] {
            let beyond = Get {
                range: Some(range),
                ..Get::default()
            };
            let error = store.get("a", beyond).await.unwrap_err();
            assert_eq!(error.kind(), StorageErrorKind::NotAFile, "{error}");
        }
        for (at_most, fits) in [(10, true), (9, false)] {
            let limited = Get {
                at_most: Some(at_most),
                ..Get::default()
            };
            let got = store.get("a", limited).await.map_err(|error| error.kind());
            match fits {
                true => assert_eq!(got.unwrap(), "0123456789"),
                false => assert_eq!(got.unwrap_err(), StorageErrorKind::TooLarge),
            }
        }
        assert_eq!(keys(&store, "a", None).await, ["a"]);

        store.delete("b/x").await.unwrap();
        assert_eq!(keys(&store, "b/", None).await, ["b/y/z"]);
    });
}

#[test]
fn a_version_that_is_gone_is_not_read() {
    on_each(async |store| {
        store.put("a", Bytes::from_static(b"one")).await.unwrap();
        let listed = store.list("", None).next().await.unwrap().unwrap();
        assert_eq!((listed.key.as_str(), listed.size), ("a", 3));
        if listed.etag.is_none() {
            return; // s3s-fs lists no versions
        }
        let version = Get {
            if_match: listed.etag,
            ..Get::default()
        };
        assert_eq!(store.get("a", version.clone()).await.unwrap(), "one");
        store.put("a", Bytes::from_static(b"other")).await.unwrap();
        let error = store.get("a", version).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::Changed, "{error}");
    });
}

#[test]
fn an_object_is_replaced_only_while_it_holds_what_was_read() {
    on_each(async |store| {
        let [one, two, three] = ["one", "two", "three"].map(Bytes::from);
        let missing = store.replace("a", &one, two.clone()).await.unwrap_err();
        assert_eq!(missing.kind(), StorageErrorKind::LostRace, "{missing}");
        store.put("a", one.clone()).await.unwrap();
        store.replace("a", &one, two.clone()).await.unwrap();
        // As a writer that does not know of its success.
        store.replace("a", &one, two.clone()).await.unwrap();
        let late = store.replace("a", &one, three.clone()).await.unwrap_err();
        assert_eq!(late.kind(), StorageErrorKind::LostRace, "{late}");
        assert_eq!(store.get("a", Get::default()).await.unwrap(), two);

        let writers = (0..8_u8).map(|writer| {
            let (store, old) = (Arc::clone(&store), two.clone());
            tokio::spawn(async move { store.replace("a", &old, vec![writer; 9].into()).await })
        });
        let written = futures::future::join_all(writers).await;
        let winners = written
            .iter()
            .filter(|written| matches!(written, Ok(Ok(()))));
        assert!(winners.count() >= 1);
        assert_eq!(keys(&store, "", None).await, ["a"]);
    });
}

#[test]
fn of_many_writers_of_one_key_one_wins_small_and_large() {
    on_each(async |store| {
        for (key, size) in [("small", 100), ("large", 6 << 20)] {
            let writers = (0..8_u8).map(|writer| {
                let (store, content) = (Arc::clone(&store), Bytes::from(vec![writer; size]));
                tokio::spawn(async move { store.put_if_absent(key, content).await })
            });
            let mut winners = Vec::new();
            for (writer, written) in futures::future::join_all(writers)
                .await
                .into_iter()
                .enumerate()
            {
                match written.unwrap() {
                    Ok(()) => winners.push(writer as u8),
                    Err(error) => assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}"),
                }
            }
            assert_eq!(winners.len(), 1, "{key}");
            let content = store.get(key, Get::default()).await.unwrap();
            assert!(content.len() == size && content.iter().all(|byte| *byte == winners[0]));
        }
    });
}

#[test]
fn asking_for_preconditions_leaves_nothing() {
    on_each(async |store| {
        let content = Bytes::from_static(b"{}");
        store
            .put_if_absent("record", content.clone())
            .await
            .unwrap();
        assert!(
            store
                .honours_preconditions("record", content.clone())
                .await
                .unwrap()
        );
        assert_eq!(keys(&store, "", None).await, ["record"]);
        assert_eq!(store.get("record", Get::default()).await.unwrap(), content);
    });
    let server = S3Server::start();
    server.create_bucket("bucket");
    server.ignore_preconditions(true);
    let (store, content) = (bucket(server.config()), Bytes::from_static(b"{}"));
    let honours = wait(async {
        store.put("record", content.clone()).await.unwrap();
        store.honours_preconditions("record", content).await
    });
    assert!(!honours.unwrap());
}

/// R13: the second attempt finds the upload gone, though the object is there.
#[test]
fn an_upload_in_pieces_whose_answer_was_lost_has_not_failed() {
    let server = S3Server::start();
    server.create_bucket("bucket");
    let store = bucket(server.config());
    let content = Bytes::from(vec![7; 6 << 20]);
    server.lose_answers(1);
    wait(async {
        store.put_if_absent("part", content.clone()).await.unwrap();
        assert!(store.get("part", Get::default()).await.unwrap() == content);
        // Not so when the object is another's.
        let other = Bytes::from(vec![8; 6 << 20]);
        let error = store.put_if_absent("part", other).await.unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
    });
}

#[test]
fn a_listing_ends_when_nobody_wants_the_rest() {
    on_each(async |store| {
        for number in 0..20 {
            store
                .put(&format!("{number:02}"), Bytes::new())
                .await
                .unwrap();
        }
        let mut listing = store.list("", None);
        assert_eq!(listing.next().await.unwrap().unwrap().key, "00");
        drop(listing);
        assert!(
            store
                .list("", Some("99"))
                .next()
                .now_or_never()
                .flatten()
                .is_none()
        );
    });
}

/// Files of writers that crashed show nowhere, and can be removed.
#[test]
fn leftovers_are_hidden_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let store: Store = Arc::new(LocalStore::new(folder.path()));
    let leftover = folder.path().join(".part.7-0.tmp");
    std::fs::write(&leftover, "half").unwrap();
    assert_eq!(wait(keys(&store, "", None)), [""; 0]);
    wait(store.tidy()).unwrap();
    assert!(!leftover.exists());
}
