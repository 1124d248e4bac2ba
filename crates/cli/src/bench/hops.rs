//! Measures how tensors get from preprocess to infer, alone.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use trommel_queue::{
    Broker, BrokerConfig, ConsumerSpec, Disposition, MemoryQueue, MemoryQueueConfig, Queue,
    QueueSpec, Stream,
};
use trommel_types::PreparedImage;

use super::measures::HopRate;
use super::spread::Times;

/// Tensors sent through a queue in this process.
const LOCAL: usize = 20_000;
/// Tensors sent through a broker.
const BROKER: usize = 2_000;
/// Tensors in flight.
const WINDOW: usize = 64;

/// In memory.
///
/// # Errors
/// Those of an in-memory queue, which has none.
pub(super) async fn local(tensor: &PreparedImage) -> Result<HopRate> {
    let queue = MemoryQueue::new(MemoryQueueConfig {
        capacity: 2 * WINDOW,
        ..MemoryQueueConfig::default()
    });
    measure("local", Arc::new(queue), tensor, LOCAL).await
}

/// Through temporary streams with their own name.
///
/// # Errors
/// If the broker cannot be reached, or refuses the streams.
pub(super) async fn jetstream(config: &BrokerConfig, tensor: &PreparedImage) -> Result<HopRate> {
    let prefix = format!("bench{}", uuid::Uuid::now_v7().simple());
    let config = BrokerConfig {
        prefix: prefix.clone(),
        ..config.clone()
    };
    let broker = Broker::connect(&config, "trommel bench").await?;
    broker.ensure_streams().await?;
    let measured = through(&broker, tensor).await;
    let removed = remove_streams(&broker, &prefix).await;
    let measured = measured?;
    removed?;
    Ok(measured)
}

async fn through(broker: &Broker, tensor: &PreparedImage) -> Result<HopRate> {
    let subject = broker.subject("tensors.bench.normal");
    let consumer = ConsumerSpec {
        max_ack_pending: NonZeroU32::new(10_000).context("10,000 is not 0")?,
        ..ConsumerSpec::new("bench-normal", subject.clone())
    };
    let dead = broker.subject("dead.infer.bench");
    let spec = QueueSpec {
        stream: Stream::Tensors,
        subject: Arc::new(move |_: &PreparedImage| subject.clone()),
        dead_subject: Arc::new(move |_| dead.clone()),
        consumer: Some(consumer),
        on_malformed: None,
    };
    let queue = broker.queue(spec).await?;
    measure("jetstream", Arc::new(queue), tensor, BROKER).await
}

/// Removes the streams with our own prefix.
async fn remove_streams(broker: &Broker, prefix: &str) -> Result<()> {
    let context = async_nats::jetstream::new(broker.client().clone());
    let names: Vec<String> = context
        .stream_names()
        .try_collect()
        .await
        .context("failed to list the streams of the benchmark")?;
    let own = prefix.to_uppercase();
    for name in names
        .iter()
        .filter(|name| name.to_uppercase().contains(&own))
    {
        context
            .delete_stream(name)
            .await
            .with_context(|| format!("failed to remove stream {name}; remove it by hand"))?;
    }
    Ok(())
}

/// Publishes and consumes `count` tensors concurrently.
async fn measure(
    hop: &str,
    queue: Arc<dyn Queue<PreparedImage>>,
    tensor: &PreparedImage,
    count: usize,
) -> Result<HopRate> {
    let start = Instant::now();
    let publish = async {
        let sent = stream::iter(0..count as u64).map(async |index| {
            let mut tensor = tensor.clone();
            tensor.image.index = index;
            // The send time travels in a field that is otherwise unused here.
            tensor.image.etag = Some(start.elapsed().as_nanos().to_string());
            queue.publish(&index.to_string(), tensor).await.map(drop)
        });
        sent.buffer_unordered(WINDOW).try_collect::<()>().await
    };
    let take = async {
        let (mut times, mut taken) = (Times::default(), 0);
        while taken < count {
            for delivery in queue.pull(WINDOW, Duration::from_secs(5)).await? {
                let sent = delivery.message().image.etag.as_deref();
                let sent = sent
                    .and_then(|nanos| nanos.parse().ok())
                    .map(Duration::from_nanos);
                times.add(start.elapsed().saturating_sub(sent.unwrap_or_default()));
                taken += 1;
                delivery.settle(Disposition::Done).await?;
            }
        }
        Ok(times)
    };
    let ((), times) = futures::try_join!(publish, take)?;
    Ok(HopRate {
        hop: hop.to_owned(),
        images_per_second: count as f64 / start.elapsed().as_secs_f64(),
        milliseconds: times.spread(),
    })
}
