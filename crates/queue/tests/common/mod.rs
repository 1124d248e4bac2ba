//! What tests of the JetStream queue begin with.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses some of it")]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trommel_queue::test_server::NatsServer;
use trommel_queue::{Broker, BrokerConfig, ConsumerSpec, JetStreamQueue, QueueSpec, Stream};
use trommel_types::Message;

pub(crate) const LONG: Duration = Duration::from_secs(60);
pub(crate) const SECOND: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Load {
    pub(crate) number: u64,
    #[serde(with = "serde_bytes")]
    pub(crate) filling: Vec<u8>,
}

impl Message for Load {}

pub(crate) fn load(number: u64) -> Load {
    let filling = vec![number as u8; 100];
    Load { number, filling }
}

pub(crate) fn config(server: &NatsServer) -> BrokerConfig {
    BrokerConfig {
        url: server.url(),
        // The server sets aside what a stream may hold.
        tensors_max_bytes: 100 << 20,
        results_max_bytes: 100 << 20,
        dead_max_bytes: 10 << 20,
        ..BrokerConfig::default()
    }
}

pub(crate) async fn broker(server: &NatsServer) -> Broker {
    let broker = Broker::connect(&config(server), "test").await.unwrap();
    broker.ensure_streams().await.unwrap();
    broker
}

pub(crate) fn spec(ack_wait: Duration) -> QueueSpec<Load> {
    let consumer = ConsumerSpec {
        ack_wait,
        max_ack_pending: NonZeroU32::new(1000).unwrap(),
        ..ConsumerSpec::new("normal", "trommel.tasks.normal.*")
    };
    QueueSpec {
        stream: Stream::Tasks,
        subject: Arc::new(|_| "trommel.tasks.normal.job".to_owned()),
        dead_subject: Arc::new(|load| format!("trommel.dead.test.{}", load.number)),
        consumer: Some(consumer),
        on_malformed: None,
    }
}

pub(crate) async fn queue(broker: &Broker, ack_wait: Duration) -> JetStreamQueue<Load> {
    broker.queue(spec(ack_wait)).await.unwrap()
}
