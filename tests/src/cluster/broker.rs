//! Reads and changes the state of a cluster's broker without its workers.

use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use trommel_queue::{Broker, BrokerConfig, Stream};

use super::Cluster;

impl Cluster {
    /// Waits until the streams of the pipeline are empty. The last acks to the broker are
    /// still in flight when a job ends.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.left_in_broker() > 0 {
            assert!(
                Instant::now() < deadline,
                "{} messages are left in the broker",
                self.left_in_broker()
            );
            sleep(Duration::from_millis(50));
        }
    }

    fn left_in_broker(&self) -> u64 {
        self.ask(async |broker| {
            let mut left = 0;
            for stream in [
                Stream::Jobs,
                Stream::Tasks,
                Stream::Tensors,
                Stream::Results,
            ] {
                left += broker.stream_stats(stream).await.unwrap().unwrap().messages;
            }
            left
        })
    }

    /// Removes all messages of a stream, as if the broker had lost them.
    pub fn purge(&self, stream: Stream) {
        self.ask(async |broker| {
            broker.purge_subject(stream, ">").await.unwrap();
        });
    }

    /// Writes records of jobs that have ended, `ended-0` first.
    pub fn write_ended_jobs(&self, jobs: usize) {
        self.ask(async |broker| {
            let kv = broker.kv().await.unwrap();
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            let now = u64::try_from(since.as_micros()).unwrap();
            let begin = now - 1000 * u64::try_from(jobs).unwrap();
            for (number, at) in (begin..).step_by(1000).take(jobs).enumerate() {
                let job = serde_json::json!({
                    "spec": {"request": {
                        "id": format!("ended-{number}"), "sources": ["s3://photos/"],
                        "models": ["digits"], "output": format!("s3://rows/{number}/"),
                    }},
                    "state": "complete", "submitted_at": at, "finished_at": at,
                });
                let key = format!("job.ended-{number}");
                kv.put(&key, job.to_string().into()).await.unwrap();
            }
        });
    }

    /// The stored checkpoint of a job, if there is one.
    pub fn checkpoint(&self, id: &str) -> Option<Value> {
        self.ask(async |broker| {
            let kv = broker.kv().await.unwrap();
            let entry = kv.get(&format!("progress.{id}")).await.unwrap()?;
            Some(serde_json::from_slice(&entry.value).unwrap())
        })
    }

    /// Writes the checkpoint of a job that nobody holds.
    pub fn write_checkpoint(&self, id: &str, checkpoint: &Value) {
        self.ask(async |broker| {
            let kv = broker.kv().await.unwrap();
            let value = checkpoint.to_string().into();
            kv.put(&format!("progress.{id}"), value).await.unwrap();
        });
    }

    /// Publishes bytes to a subject.
    pub fn publish(&self, subject: &str, payload: &[u8]) {
        self.ask(async |broker| {
            let payload = payload.to_vec().into();
            let headers = Default::default();
            broker
                .publish_event(subject, payload, headers)
                .await
                .unwrap();
            broker.flush().await.unwrap();
        });
    }

    /// Creates a stream that captures a subject, as its publisher would.
    pub fn create_stream(&self, name: &str, subject: &str) {
        self.ask(async |broker| {
            let config = serde_json::json!({
                "name": name, "subjects": [subject], "retention": "limits", "storage": "file",
                "discard": "old", "max_consumers": -1, "max_msgs": -1, "max_bytes": -1, "max_age": 0,
                "num_replicas": 1,
            });
            let api = format!("$JS.API.STREAM.CREATE.{name}");
            let made = broker.client().request(api, config.to_string().into());
            let made = String::from_utf8_lossy(&made.await.unwrap().payload).into_owned();
            assert!(!made.contains("\"error\""), "{made}");
        });
    }

    /// Messages that wait for a consumer; `None` when there is no such consumer.
    pub fn waiting(&self, stream: Stream, consumer: &str) -> Option<u64> {
        self.ask(async |broker| {
            let stats = broker.consumer_stats(stream, consumer).await.unwrap();
            stats.map(|stats| stats.waiting)
        })
    }

    fn ask<T>(&self, question: impl AsyncFnOnce(Broker) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let config = BrokerConfig {
                url: self.nats.url(),
                ..BrokerConfig::default()
            };
            question(Broker::connect(&config, "test").await.unwrap()).await
        })
    }
}
