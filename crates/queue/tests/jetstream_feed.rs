//! Following what other programs publish.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use async_nats::jetstream::{self, stream};
use common::{LONG, broker};
use trommel_queue::test_server::NatsServer;
use trommel_queue::{FeedReader, QueueErrorKind};

async fn next(reader: &mut FeedReader) -> (u64, String) {
    let held = reader.next(LONG).await.unwrap().expect("silent");
    (
        held.sequence,
        String::from_utf8(held.payload.to_vec()).unwrap(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_feed_reads_in_order_over_restarts_and_leaves_no_consumer() {
    let mut server = NatsServer::start();
    let broker = broker(&server).await;
    let context = jetstream::new(broker.client().clone());
    let config = stream::Config {
        name: "EVENTS".to_owned(),
        subjects: vec!["events.>".to_owned()],
        ..stream::Config::default()
    };
    context.create_stream(config).await.unwrap();
    let publish = async |text: &'static str| {
        let stored = context
            .publish("events.created", text.into())
            .await
            .unwrap();
        stored.await.unwrap();
    };
    publish("a").await;
    publish("b").await;
    let feed = broker.feed("events.created", "trommel-job").await.unwrap();
    let mut reader = feed.clone().read_after(0);
    assert_eq!(next(&mut reader).await, (1, "a".to_owned()));
    assert_eq!(next(&mut reader).await, (2, "b".to_owned()));
    server.restart();
    publish("c").await;
    assert_eq!(next(&mut reader).await, (3, "c".to_owned()));
    drop(reader);
    let mut reader = feed.clone().read_after(1);
    assert_eq!(next(&mut reader).await, (2, "b".to_owned()));
    drop(reader);
    feed.remove().await.unwrap();
    feed.remove().await.unwrap();
    let found = context.get_stream("EVENTS").await.unwrap();
    assert_eq!(found.cached_info().state.consumer_count, 0);
}

/// R33: a feed made a stream on any subject, Trommel's own API included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_feed_makes_no_stream_and_reads_nothing_of_trommels_own() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let refused = async |subject: &str| {
        let error = broker
            .feed(subject, "trommel-job")
            .await
            .map(drop)
            .unwrap_err();
        assert_eq!(error.kind(), QueueErrorKind::Misconfigured);
        error.to_string()
    };
    for subject in [
        "trommel.api.>",
        "trommel.tasks.normal.a",
        ">",
        "*.created",
        "_INBOX.>",
        "$JS.API.>",
        "$KV.trommel-jobs.>",
        "$SYS.>",
    ] {
        let text = refused(subject).await;
        assert!(text.contains("cannot be followed"), "{text}");
    }
    let text = refused("events.created").await;
    assert!(text.contains("nats stream add"), "{text}");
    let context = jetstream::new(broker.client().clone());
    let narrow = stream::Config {
        name: "EVENTS".to_owned(),
        subjects: vec!["events.created".to_owned()],
        retention: stream::RetentionPolicy::WorkQueue,
        ..stream::Config::default()
    };
    context.create_stream(narrow).await.unwrap();
    // It captures only a part of these.
    let text = refused("events.*").await;
    assert!(text.contains("nats stream add"), "{text}");
    let text = refused("events.created").await;
    assert!(text.contains("removes what is read"), "{text}");
}
