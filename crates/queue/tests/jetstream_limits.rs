//! What the server does not take, permit, or have room for ends as an error that says so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fmt::Debug;
use std::sync::Arc;

use bytes::Bytes;
use common::{LONG, Load, SECOND, config, load, queue, spec};
use tempfile::NamedTempFile;
use tokio::time::timeout;
use trommel_queue::test_server::NatsServer;
use trommel_queue::{
    Broker, BrokerConfig, Disposition, Queue, QueueError, QueueErrorKind, QueueSpec, Stream,
};

/// A server with a configuration of its own.
fn configured(text: &str) -> (NatsServer, NamedTempFile) {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let path = file.path().to_str().unwrap();
    (NatsServer::start_with(&["-js", "-c", path]), file)
}

/// One user for each thing that is denied; `all` is denied nothing.
const USERS: &str = r#"
authorization { users: [
  { user: all, password: x }
  { user: tasks, password: x, permissions { publish { deny: "trommel.tasks.>" } } }
  { user: info, password: x, permissions { publish { deny: "$JS.API.STREAM.INFO.>" } } }
  { user: pull, password: x, permissions { publish { deny: "$JS.API.CONSUMER.MSG.NEXT.>" } } }
  { user: acks, password: x, permissions { publish { deny: "$JS.ACK.>" } } }
  { user: records, password: x, permissions { publish { deny: "$KV.>" } } }
  { user: watch, password: x, permissions { publish { deny: ["$JS.API.CONSUMER.CREATE.KV_trommel-jobs", "$JS.API.CONSUMER.CREATE.KV_trommel-jobs.>"] } } }
  { user: events, password: x, permissions { subscribe { deny: "trommel.events.>" } } }
  { user: inbox, password: x, permissions { subscribe { deny: "_INBOX.>" } } }
] }
"#;

async fn connect(server: &NatsServer, user: &str) -> Result<Broker, QueueError> {
    let url = server
        .url()
        .replace("nats://", &format!("nats://{user}:x@"));
    let config = BrokerConfig {
        url,
        ..config(server)
    };
    Broker::connect(&config, user).await
}

/// The error of what the server denies, which names the subject and comes well before any patience
/// ends.
async fn denied<T: Debug>(what: impl Future<Output = Result<T, QueueError>>, subject: &str) {
    let ended = timeout(10 * SECOND, what).await;
    let error = ended.expect("it waits on").unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::Forbidden, "{error}");
    let text = error.to_string();
    assert!(
        text.contains(subject) && text.contains("permissions"),
        "{text}"
    );
}

/// R57: a role that lacks a permission waited with warnings, for good.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_denies_is_an_error_that_names_the_subject() {
    let (server, _file) = configured(USERS);
    let all = connect(&server, "all").await.unwrap();
    all.ensure_streams().await.unwrap();
    let open = queue(&all, 30 * SECOND).await;
    open.publish("load-1", load(1)).await.unwrap();
    let connect = async |user: &str| connect(&server, user).await.unwrap();

    let broker = connect("tasks").await;
    let closed = broker
        .queue(QueueSpec {
            consumer: None,
            ..spec(SECOND)
        })
        .await
        .unwrap();
    denied(
        closed.publish("load-2", load(2)),
        "publish to trommel.tasks.normal.job:",
    )
    .await;

    let broker = connect("info").await;
    denied(broker.ensure_streams(), "$JS.API.STREAM.INFO.TROMMEL_JOBS").await;

    let broker = connect("pull").await;
    let closed = queue(&broker, 30 * SECOND).await;
    denied(
        closed.pull(1, LONG),
        "$JS.API.CONSUMER.MSG.NEXT.TROMMEL_TASKS.normal",
    )
    .await;

    let broker = connect("records").await;
    let kv = broker.kv().await.unwrap();
    denied(kv.put("a.b", Bytes::new()), "$KV.trommel-jobs.a.b").await;
    denied(kv.create("a.b", Bytes::new()), "$KV.trommel-jobs.a.b").await;

    let broker = connect("watch").await;
    let kv = broker.kv().await.unwrap();
    denied(kv.watch("a."), "$JS.API.CONSUMER.CREATE.KV_trommel-jobs").await;
    all.kv()
        .await
        .unwrap()
        .put("a.b", "1".into())
        .await
        .unwrap();
    denied(kv.scan("a."), "$JS.API.CONSUMER.CREATE.KV_trommel-jobs").await;

    let broker = connect("events").await;
    let subscribed = broker.subscribe("trommel.events.>").await.map(drop);
    denied(async { subscribed }, "subscribe to trommel.events.>").await;

    let broker = connect("acks").await;
    let closed = queue(&broker, 30 * SECOND).await;
    let delivery = closed.pull(1, LONG).await.unwrap().remove(0);
    let after = SECOND;
    denied(delivery.settle(Disposition::Retry { after }), "$JS.ACK.").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_without_an_inbox_is_refused_at_start() {
    let (server, _file) = configured(USERS);
    let connected = connect(&server, "inbox").await.map(drop);
    denied(async { connected }, "subscribe to _INBOX.>").await;
}

fn account(limit: &str) -> String {
    format!(
        "accounts {{ A {{ jetstream {{ {limit} }}, users: [ {{ user: a, password: a }} ] }} }}\n\
         no_auth_user: a\n"
    )
}

fn small(server: &NatsServer) -> BrokerConfig {
    BrokerConfig {
        tensors_max_bytes: 100_000,
        results_max_bytes: 100_000,
        dead_max_bytes: 100_000,
        ..config(server)
    }
}

/// R28: an account limit became failed rows, or ended the worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_account_without_room_is_refused_at_start() {
    let (server, _file) = configured(&account("max_store: 250KB"));
    let broker = Broker::connect(&small(&server), "test").await.unwrap();
    let error = broker.ensure_streams().await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::AccountLimit, "{error}");
    assert!(error.to_string().contains("`max_file`"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensors_in_memory_need_room_there() {
    let (server, _file) = configured(&account("max_mem: 50KB, max_store: 1MB"));
    let config = BrokerConfig {
        tensors_in_memory: true,
        ..small(&server)
    };
    let broker = Broker::connect(&config, "test").await.unwrap();
    let error = broker.ensure_streams().await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::AccountLimit, "{error}");
    assert!(error.to_string().contains("`max_mem`"), "{error}");

    // Nor does a worker use a stream in files instead.
    let broker = Broker::connect(&small(&server), "test").await.unwrap();
    broker.ensure_streams().await.unwrap();
    let broker = Broker::connect(&config, "test").await.unwrap();
    let error = broker.ensure_streams().await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("not Memory"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_account_makes_publishers_wait() {
    let (server, _file) = configured(&account("max_store: 1MB"));
    let broker = Broker::connect(&small(&server), "test").await.unwrap();
    broker.ensure_streams().await.unwrap();
    let queue = Arc::new(queue(&broker, 30 * SECOND).await);
    let mut publishing = tokio::spawn({
        let queue = Arc::clone(&queue);
        async move {
            for number in 0..30 {
                let filling = vec![0; 50_000];
                let (id, load) = (format!("load-{number}"), Load { number, filling });
                queue.publish(&id, load).await.unwrap();
            }
        }
    });
    // 1.5 MB do not fit.
    let ended = timeout(3 * SECOND, &mut publishing).await;
    assert!(ended.is_err(), "the limit did not hold");
    let full = broker.stream_stats(Stream::Tasks).await.unwrap().unwrap();
    assert!((5..30).contains(&full.messages), "{full:?}");
    let purged = broker.purge_subject(Stream::Tasks, ">").await.unwrap();
    assert_eq!(purged, full.messages);
    let ended = timeout(LONG, publishing).await;
    ended.expect("it sleeps on").unwrap();
}

/// R16, R22: neither is sent; the server would drop the connection for the subject.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_beyond_what_the_server_takes_are_refused() {
    let server = NatsServer::start();
    let broker = common::broker(&server).await;
    let long = "j".repeat(5000);
    let subject = format!("trommel.tasks.normal.{long}");
    let spec = QueueSpec {
        subject: Arc::new(move |_| subject.clone()),
        ..spec(SECOND)
    };
    let queue = broker.queue(spec).await.unwrap();
    let error = queue.publish("load-1", load(1)).await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::TooLarge);
    let error = broker.subscribe(&long).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::TooLarge);
    let kv = broker.kv().await.unwrap();
    let error = kv.put(&long, Bytes::new()).await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::TooLarge);
    // R23: a record beyond `max_payload` was tried for good.
    let error = kv.put("job.a", vec![0; 2 << 20].into()).await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::TooLarge);
    let id = "i".repeat(70_000);
    let other = common::queue(&broker, SECOND).await;
    let error = other.publish(&id, load(1)).await.unwrap_err();
    assert_eq!(error.kind(), QueueErrorKind::TooLarge);
    assert!(broker.is_connected());
    other.publish("load-2", load(2)).await.unwrap();
}
