//! What a broker has to be, and its records and events, over restarts too.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use bytes::Bytes;
use common::{LONG, SECOND, broker, config};
use tokio::time::timeout;
use trommel_queue::test_server::NatsServer;
use trommel_queue::{Broker, BrokerConfig, QueueErrorKind};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_cannot_be_used_is_refused_at_start() {
    let refused = async |config: BrokerConfig| {
        let error = Broker::connect(&config, "test").await.err();
        let error = error.expect("it connected");
        (error.kind(), error.to_string())
    };
    let server = NatsServer::start_with(&[]);
    let (kind, text) = refused(config(&server)).await;
    assert_eq!(kind, QueueErrorKind::Unsupported);
    assert!(text.contains("start nats-server with -js"), "{text}");

    let mut dead = NatsServer::start();
    dead.kill();
    let (kind, text) = refused(config(&dead)).await;
    assert_eq!(kind, QueueErrorKind::Unreachable);
    assert!(text.contains(&dead.url()), "{text}");

    let locked = NatsServer::start_with(&["-js", "--user", "me", "--pass", "s@cret"]);
    let (kind, text) = refused(config(&locked)).await;
    assert_eq!(kind, QueueErrorKind::Refused);
    assert!(text.contains("credentials"), "{text}");
    let url = locked.url().replace("nats://", "nats://me:s%40cret@");
    let open = BrokerConfig {
        url,
        ..config(&locked)
    };
    Broker::connect(&open, "test").await.unwrap();
    let wrong = open.url.replace("s%40cret", "hush-hush");
    let (kind, text) = refused(BrokerConfig { url: wrong, ..open }).await;
    assert_eq!(kind, QueueErrorKind::Refused);
    assert!(!text.contains("hush-hush"), "{text}");

    let credentials = Some("/no/such.creds".into());
    let (kind, text) = refused(BrokerConfig {
        credentials,
        ..config(&server)
    })
    .await;
    assert_eq!(kind, QueueErrorKind::Refused);
    assert!(text.contains("/no/such.creds"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_differs_is_refused_and_never_changed() {
    use async_nats::jetstream::{self, stream};
    let server = NatsServer::start();
    let broker = Broker::connect(&config(&server), "test").await.unwrap();
    let context = jetstream::new(broker.client().clone());
    context
        .create_stream(stream::Config {
            name: "TROMMEL_TASKS".to_owned(),
            subjects: vec!["trommel.tasks.>".to_owned()],
            discard: stream::DiscardPolicy::New,
            ..stream::Config::default()
        })
        .await
        .unwrap();
    let error = broker.ensure_streams().await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::Misconfigured);
    let text = error.to_string();
    for part in [
        "TROMMEL_TASKS",
        "retention is Limits, not WorkQueue",
        "nats stream rm",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert!(!text.contains("discard policy"), "{text}");
    context.delete_stream("TROMMEL_TASKS").await.unwrap();
    broker.ensure_streams().await.unwrap();

    // Another limit is no reason to refuse, and none to change it.
    let other = BrokerConfig {
        tasks_max_messages: 5,
        ..config(&server)
    };
    let other = Broker::connect(&other, "test").await.unwrap();
    other.ensure_streams().await.unwrap();
    let found = context.get_stream("TROMMEL_TASKS").await.unwrap();
    assert_eq!(found.cached_info().config.max_messages, 10_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_sixteen_wins_a_compare_and_set() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let kv = broker.kv().await.unwrap();
    let race = async |revision: Option<u64>| {
        let contenders = (0..16).map(|contender| {
            let kv = kv.clone();
            tokio::spawn(async move {
                let value = Bytes::from(format!("owner-{contender}"));
                let won = match revision {
                    None => kv.create("leases.a", value.clone()).await,
                    Some(revision) => kv.update("leases.a", value.clone(), revision).await,
                };
                won.unwrap().map(|revision| (revision, value))
            })
        });
        let ended = futures::future::join_all(contenders).await;
        let winners: Vec<_> = ended.into_iter().filter_map(|won| won.unwrap()).collect();
        assert_eq!(winners.len(), 1, "{winners:?}");
        let entry = kv.get("leases.a").await.unwrap().unwrap();
        assert_eq!((entry.revision, entry.value), winners[0].clone());
        winners[0].0
    };
    let created = race(None).await;
    let updated = race(Some(created)).await;
    assert!(updated > created);
    assert_eq!(
        kv.update("leases.a", "late".into(), created).await.unwrap(),
        None
    );

    kv.put("jobs.b", "2".into()).await.unwrap();
    kv.put("jobs.a", "1".into()).await.unwrap();
    assert_eq!(kv.keys("jobs.").await.unwrap(), ["jobs.a", "jobs.b"]);
    kv.delete("jobs.a").await.unwrap();
    assert_eq!(kv.remove("jobs.b").await.unwrap(), 1);
    assert_eq!(kv.get("jobs.a").await.unwrap(), None);
    assert_eq!(kv.keys("jobs.").await.unwrap(), Vec::<String>::new());
    assert!(kv.create("jobs.a", "again".into()).await.unwrap().is_some());
    let error = kv.put("no key", Bytes::new()).await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::Misconfigured);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_outlives_a_restart_and_misses_nothing() {
    let mut server = NatsServer::start();
    let broker = broker(&server).await;
    let kv = broker.kv().await.unwrap();
    kv.put("jobs.a", "before".into()).await.unwrap();
    let mut watch = kv.watch("jobs.").await.unwrap();
    let mut told = async || {
        let change = timeout(20 * SECOND, watch.next()).await.expect("silent");
        let change = change.expect("ended");
        let value = change
            .value
            .map(|value| String::from_utf8_lossy(&value).into_owned());
        (change.key, value)
    };
    let pair = |key: &str, value: Option<&str>| (key.to_owned(), value.map(str::to_owned));
    assert_eq!(told().await, pair("jobs.a", Some("before")));
    kv.put("other.a", "unseen".into()).await.unwrap();
    kv.put("jobs.b", "live".into()).await.unwrap();
    assert_eq!(told().await, pair("jobs.b", Some("live")));
    server.restart();
    kv.put("jobs.c", "after".into()).await.unwrap();
    assert_eq!(told().await, pair("jobs.c", Some("after")));
    server.restart();
    kv.delete("jobs.b").await.unwrap();
    assert_eq!(told().await, pair("jobs.b", None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_heard() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let mut heard = broker.subscribe("trommel.events.*.progress").await.unwrap();
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("traceparent", "00-1-2-01");
    let subject = broker.subject("events.job.progress");
    broker
        .publish_event(&subject, "42".into(), headers)
        .await
        .unwrap();
    let event = timeout(LONG, heard.next()).await.unwrap().unwrap();
    assert_eq!(event.subject, "trommel.events.job.progress");
    assert_eq!(&event.payload[..], b"42");
    assert_eq!(
        event.headers.unwrap().get("traceparent").unwrap().as_str(),
        "00-1-2-01"
    );
}
