//! Counting and removing by subject, and reading many records at once.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use bytes::Bytes;
use common::broker;
use futures::StreamExt;
use trommel_queue::test_server::NatsServer;
use trommel_queue::{Broker, Kv, Stream};

/// Stores a message on each subject, many at a time.
async fn store_many(broker: &Broker, subjects: impl Iterator<Item = String>) {
    let context = async_nats::jetstream::new(broker.client().clone());
    let stores = subjects.map(|subject| {
        let context = context.clone();
        async move {
            context
                .publish(subject, Bytes::from_static(b"x"))
                .await?
                .await
        }
    });
    let mut stored = futures::stream::iter(stores).buffer_unordered(500);
    while let Some(stored) = stored.next().await {
        stored.unwrap();
    }
}

async fn fill(kv: &Kv, prefix: &str, count: usize) {
    let puts = (0..count).map(|number| {
        let (kv, key) = (kv.clone(), format!("{prefix}{number:05}"));
        async move { kv.put(&key, number.to_string().into()).await.unwrap() }
    });
    let put: Vec<_> = futures::stream::iter(puts)
        .buffer_unordered(256)
        .collect()
        .await;
    assert_eq!(put.len(), count);
}

/// The server answers 100,000 subjects at a time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_subjects_are_counted_than_one_answer_holds() {
    const JOBS: usize = 100_100;
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let subject = |job| format!("trommel.results.job-{job}.m");
    store_many(&broker, (0..JOBS).map(subject)).await;
    store_many(&broker, (0..10).map(subject)).await;
    let counts = broker
        .subject_counts(Stream::Results, "trommel.results.*.m")
        .await
        .unwrap();
    let subjects: std::collections::BTreeSet<_> =
        counts.iter().map(|(subject, _)| subject).collect();
    assert_eq!(subjects.len(), JOBS);
    let all = broker.subject_count(Stream::Results, "trommel.results.>");
    assert_eq!(all.await.unwrap(), JOBS as u64 + 10);
    let one = broker.subject_counts(Stream::Results, "trommel.results.job-7.*");
    assert_eq!(one.await.unwrap(), [(subject(7), 2)]);
}

/// R17: what a job has left in a shared stream is counted and removed, whatever model and lane.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jobs_messages_are_purged_from_all_models_and_lanes() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let subjects = ["m@1.high.a", "m@1.low.a", "n@2.low.a", "m@1.high.b"];
    let tensors = subjects.map(|rest| format!("trommel.tensors.{rest}"));
    store_many(&broker, tensors.clone().into_iter()).await;
    store_many(&broker, ["trommel.tasks.high.a".to_owned()].into_iter()).await;
    let filter = "trommel.tensors.*.*.a";
    let count = broker.subject_count(Stream::Tensors, filter);
    assert_eq!(count.await.unwrap(), 3);
    let purged = broker.purge_subject(Stream::Tensors, filter);
    assert_eq!(purged.await.unwrap(), 3);
    let left = broker.subject_counts(Stream::Tensors, "trommel.tensors.>");
    assert_eq!(left.await.unwrap(), [(tensors[3].clone(), 1)]);
    let tasks = broker.purge_subject(Stream::Tasks, "trommel.tasks.*.a");
    assert_eq!(tasks.await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_records_are_read_in_one_pass() {
    const RECORDS: usize = 20_000;
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let kv = broker.kv().await.unwrap();
    assert!(kv.scan("job.").await.unwrap().is_empty());
    fill(&kv, "job.", RECORDS).await;
    kv.put("other.1", "unseen".into()).await.unwrap();
    kv.put("job.00003", "changed".into()).await.unwrap();
    kv.delete("job.00004").await.unwrap();
    let start = std::time::Instant::now();
    let entries = kv.scan("job.").await.unwrap();
    eprintln!("{} records in {:?}", entries.len(), start.elapsed());
    assert_eq!(entries.len(), RECORDS - 1);
    assert!(entries.is_sorted_by(|a, b| a.key < b.key));
    assert_eq!(
        (&*entries[3].key, &entries[3].value[..]),
        ("job.00003", &b"changed"[..])
    );
    assert_eq!(
        Some(&entries[9]),
        kv.get("job.00010").await.unwrap().as_ref()
    );
    assert_eq!(kv.keys("job.").await.unwrap().len(), RECORDS - 1);
    assert!(kv.scan("job").await.is_err(), "a prefix ends with a dot");
    // No consumer is left behind.
    let api = async_nats::jetstream::new(broker.client().clone());
    let stream = api.get_stream("KV_trommel-jobs").await.unwrap();
    assert_eq!(stream.cached_info().state.consumer_count, 0);
}

/// R60: 50,000 claims left as many marks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_removed_leaves_no_mark() {
    let server = NatsServer::start();
    let broker = broker(&server).await;
    let kv = broker.kv().await.unwrap();
    fill(&kv, "claim.a.", 100).await;
    fill(&kv, "claim.b.", 3).await;
    kv.delete("claim.a.00001").await.unwrap();
    assert_eq!(kv.remove("claim.a.").await.unwrap(), 100);
    assert_eq!(kv.remove("claim.b.00001").await.unwrap(), 1);
    assert_eq!(kv.remove("claim.b.00001").await.unwrap(), 0);
    let api = async_nats::jetstream::new(broker.client().clone());
    let stream = api.get_stream("KV_trommel-jobs").await.unwrap();
    assert_eq!(stream.cached_info().state.messages, 2);
    let again = kv.create("claim.b.00001", "2".into()).await.unwrap();
    assert!(again.is_some());
    for invalid in ["", ".", ">", "claim.*.", "a..b"] {
        assert!(kv.remove(invalid).await.is_err(), "{invalid:?}");
    }
}
