//! Reads the newest message of every subject in one pass.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use bytes::Bytes;
use futures::StreamExt;

use super::broker::Broker;
use crate::QueueError;

/// The header of a record that only marks the removal of its key.
pub(super) const OPERATION: &str = "KV-Operation";
/// Records per request.
const BATCH: usize = 4096;
/// Time after which the server removes an unused consumer.
const ABANDONED: Duration = Duration::from_secs(30);

/// The newest message of a subject.
pub(super) struct Record {
    pub(super) subject: String,
    pub(super) sequence: u64,
    pub(super) payload: Bytes,
    /// It is only the marker of a removed key.
    pub(super) is_mark: bool,
}

/// The result of a scan.
pub(super) enum Scanned<T> {
    /// All messages, folded.
    Whole(T),
    /// It has to be repeated, with the reason.
    Broken(String),
}

/// The newest messages of matching subjects, each passed to `fold` as it arrives, from a temporary
/// consumer.
pub(super) async fn scan<T: Default>(
    broker: &Broker,
    stream: &str,
    subject: &str,
    headers_only: bool,
    fold: impl FnMut(&mut T, Record),
) -> Result<Scanned<T>, QueueError> {
    let begun = broker.link().up().await;
    let work = read_all(broker, stream, subject, headers_only, fold);
    Ok(match broker.uninterrupted(begun, stream, work).await? {
        Some(Ok(all)) => Scanned::Whole(all),
        Some(Err(error)) => Scanned::Broken(error.to_string()),
        None => Scanned::Broken("the connection was lost".to_owned()),
    })
}

async fn read_all<T: Default>(
    broker: &Broker,
    stream: &str,
    subject: &str,
    headers_only: bool,
    mut fold: impl FnMut(&mut T, Record),
) -> Result<T, async_nats::Error> {
    let stream = broker.context().get_stream_no_info(stream).await?;
    let config = pull::Config {
        filter_subject: subject.to_owned(),
        deliver_policy: DeliverPolicy::LastPerSubject,
        ack_policy: AckPolicy::None,
        memory_storage: true,
        num_replicas: 1,
        inactive_threshold: ABANDONED,
        headers_only,
        ..pull::Config::default()
    };
    let consumer = stream.create_consumer(config).await?;
    let mut left = consumer.cached_info().num_pending;
    let (mut all, mut count) = (T::default(), 0);
    while left > 0 {
        let mut batch = consumer.fetch().max_messages(BATCH).messages().await?;
        let before = count;
        while let Some(message) = batch.next().await {
            let message = message?;
            let info = message.info()?;
            count += 1;
            if info.consumer_sequence != count {
                return Err("messages were lost on the way".into());
            }
            left = info.pending;
            let headers = message.headers.as_ref();
            let record = Record {
                subject: message.subject.to_string(),
                sequence: info.stream_sequence,
                is_mark: headers.is_some_and(|headers| headers.get(OPERATION).is_some()),
                payload: message.message.payload,
            };
            fold(&mut all, record);
        }
        if count == before {
            break;
        }
    }
    let name = consumer.cached_info().name.clone();
    // If one is left behind, the server removes it.
    drop(stream.delete_consumer(&name).await);
    Ok(all)
}
