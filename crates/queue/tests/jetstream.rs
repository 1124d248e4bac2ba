//! The JetStream queue keeps the contract of every queue, against a real server.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use trommel_queue::test_server::NatsServer;
use trommel_queue::testsuite::{self, ACK_WAIT, Fixture, MAX_WORK, Note};
use trommel_queue::{Broker, BrokerConfig, ConsumerSpec, Queue, QueueSpec, Stream};

/// Makes queues that each have streams of their own.
struct JetStream {
    server: NatsServer,
    queues: AtomicU64,
}

#[async_trait]
impl Fixture for JetStream {
    async fn queue(&self, capacity: usize) -> Arc<dyn Queue<Note>> {
        let number = self.queues.fetch_add(1, Ordering::Relaxed);
        let config = BrokerConfig {
            url: self.server.url(),
            prefix: format!("contract{number}"),
            tasks_max_messages: capacity as u64,
            // The server sets aside what a stream may hold, and there are many of them here.
            tensors_max_bytes: 1 << 20,
            results_max_bytes: 1 << 20,
            dead_max_bytes: 1 << 20,
            ..BrokerConfig::default()
        };
        let broker = Broker::connect(&config, "contract").await.unwrap();
        broker.ensure_streams().await.unwrap();
        let subject = broker.subject("tasks.normal.contract");
        let dead_subject = broker.subject("dead.test.contract");
        let consumer = ConsumerSpec {
            ack_wait: ACK_WAIT,
            max_work: MAX_WORK,
            max_ack_pending: NonZeroU32::new(1000).unwrap(),
            // The last ack of a test is to be in its counts.
            confirm_acks: true,
            ..ConsumerSpec::new("normal", subject.clone())
        };
        let spec = QueueSpec {
            stream: Stream::Tasks,
            subject: Arc::new(move |_| subject.clone()),
            dead_subject: Arc::new(move |_| dead_subject.clone()),
            consumer: Some(consumer),
            on_malformed: None,
        };
        Arc::new(broker.queue(spec).await.unwrap())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_the_contract() {
    let fixture = JetStream {
        server: NatsServer::start(),
        queues: AtomicU64::new(0),
    };
    testsuite::all(&fixture).await;
}
