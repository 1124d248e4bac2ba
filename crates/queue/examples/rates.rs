//! Messages a second through a queue on a broker: `rates URL BYTES MESSAGES PUBLISHERS LIMIT`.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde::{Deserialize, Serialize};
use trommel_queue::{Broker, BrokerConfig, ConsumerSpec, Disposition, Queue, QueueSpec, Stream};
use trommel_types::Message;

#[derive(Clone, Serialize, Deserialize)]
struct Load {
    #[serde(with = "serde_bytes")]
    filling: Vec<u8>,
}

impl Message for Load {}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, bytes, messages, publishers, limit] = arguments.as_slice() else {
        panic!("rates URL BYTES MESSAGES PUBLISHERS LIMIT");
    };
    let (bytes, messages): (usize, usize) = (bytes.parse().unwrap(), messages.parse().unwrap());
    let (publishers, limit): (usize, usize) = (publishers.parse().unwrap(), limit.parse().unwrap());
    let config = BrokerConfig {
        url: url.clone(),
        prefix: format!("rates{}", std::process::id()),
        ..BrokerConfig::default()
    };
    let broker = Broker::connect(&config, "rates").await.unwrap();
    broker.ensure_streams().await.unwrap();
    let subject = broker.subject("tensors.m.normal");
    let consumer = ConsumerSpec {
        max_ack_pending: NonZeroU32::new(10_000).unwrap(),
        ..ConsumerSpec::new("m-normal", subject.clone())
    };
    let spec = QueueSpec {
        stream: Stream::Tensors,
        subject: Arc::new(move |_: &Load| subject.clone()),
        dead_subject: Arc::new(|_| unreachable!()),
        consumer: Some(consumer),
        on_malformed: None,
    };
    let queue = Arc::new(broker.queue(spec).await.unwrap());
    let filling = vec![7; bytes];

    let start = Instant::now();
    let mut publishing = Vec::new();
    for publisher in 0..publishers {
        let (queue, filling) = (Arc::clone(&queue), filling.clone());
        publishing.push(tokio::spawn(async move {
            for number in (publisher..messages).step_by(publishers) {
                let filling = filling.clone();
                let stored = queue.publish(&number.to_string(), Load { filling }).await;
                stored.unwrap();
            }
        }));
    }
    futures::stream::iter(publishing)
        .for_each(async |publisher| publisher.await.unwrap())
        .await;
    say("published", messages, bytes, start.elapsed());

    let start = Instant::now();
    let mut pulled = 0;
    while pulled < messages {
        for delivery in queue.pull(limit, Duration::from_secs(5)).await.unwrap() {
            pulled += 1;
            delivery.settle(Disposition::Done).await.unwrap();
        }
    }
    broker.flush().await.unwrap();
    say("pulled and settled", messages, bytes, start.elapsed());
}

fn say(what: &str, messages: usize, bytes: usize, took: Duration) {
    let rate = messages as f64 / took.as_secs_f64();
    println!(
        "{what}: {rate:.0} messages/s of {bytes} B, {:.0} MB/s",
        rate * bytes as f64 / 1e6
    );
}
