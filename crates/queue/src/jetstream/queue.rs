use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use async_nats::header::NATS_MESSAGE_ID;
use async_nats::jetstream;
use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;
use trommel_types::{DecodeError, Message};

use super::broker::Broker;
use super::consumption::{Consumption, Received};
use super::handle::{JetStreamHandle, Receipt, Shared};
use super::lease::Keeper;
use super::publish::Publisher;
use super::spec::QueueSpec;
use crate::origin::{self, Origin};
use crate::{Delivery, Published, Queue, QueueError, QueueErrorKind, QueueStats};

/// A work queue on a stream of a [`Broker`].
///
/// Dropping it, or [`close`](Self::close), returns messages that were requested and not taken.
/// Deliveries in flight stay valid.
pub struct JetStreamQueue<T> {
    shared: Arc<Shared<T>>,
    consumption: Option<Arc<Consumption>>,
    closed: watch::Sender<bool>,
}

impl Broker {
    /// A queue on one of the streams. Creates its consumer if it does not exist; for an existing
    /// one only the ack deadline and the limit in flight are updated.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) if the consumer cannot be created or one of
    /// its name has other subjects.
    pub async fn queue<T: Message>(
        &self,
        spec: QueueSpec<T>,
    ) -> Result<JetStreamQueue<T>, QueueError> {
        JetStreamQueue::open(self, spec).await
    }
}

impl<T: Message> JetStreamQueue<T> {
    async fn open(broker: &Broker, spec: QueueSpec<T>) -> Result<Self, QueueError> {
        let (closed, is_closed) = watch::channel(false);
        let (consumption, keeper) = match &spec.consumer {
            Some(consumer) => {
                let consumption = Consumption::start(broker, spec.stream, consumer, is_closed);
                let (client, link) = (broker.client().clone(), broker.link().clone());
                let consumption = consumption.await?;
                let keeper = Keeper::start(client, link, consumer.ack_wait);
                (Some(consumption), Some(keeper))
            }
            None => (None, None),
        };
        let publisher = Publisher::new(broker.clone(), spec.stream.publisher());
        let shared = Arc::new(Shared {
            broker: broker.clone(),
            spec,
            publisher,
            keeper,
            dead_letters: AtomicU64::new(0),
        });
        Ok(Self {
            shared,
            consumption,
            closed,
        })
    }

    /// Returns messages that were requested and not taken to the server, so that others get them at
    /// once. Returns when the server has them; later pulls take nothing.
    pub async fn close(&self) {
        self.closed.send_replace(true);
        // The receiver is dropped when its task ends.
        self.closed.closed().await;
    }

    /// The delivery of a received message, or `None` if it does not decode: then it is
    /// dead-lettered.
    fn delivery(&self, received: Received) -> Option<Delivery<T>> {
        let Received {
            message,
            reply,
            lease,
        } = received;
        let message = jetstream::Message {
            message,
            context: self.shared.broker.context().clone(),
        };
        let (attempt, sequence, stored) = match message.info() {
            Ok(info) => (
                u32::try_from(info.delivered).unwrap_or(u32::MAX),
                info.stream_sequence,
                SystemTime::from(info.published),
            ),
            Err(error) => {
                warn!(%reply, %error, "dropped a message that no consumer sent");
                return None;
            }
        };
        let headers = message.headers.as_ref();
        let id = headers.and_then(|headers| headers.get(NATS_MESSAGE_ID));
        let receipt = Receipt {
            reply,
            subject: message.subject.clone(),
            id: id.map(|id| id.as_str().to_owned()),
            lease,
            attempt,
            sequence,
        };
        match T::decode(&message.payload) {
            Ok(decoded) => {
                let decoded = Arc::new(decoded);
                let handle = JetStreamHandle {
                    shared: Arc::clone(&self.shared),
                    message: Arc::clone(&decoded),
                    receipt,
                };
                let origin = Origin::of(headers, Some(stored));
                Some(Delivery::new(decoded, attempt, origin, Box::new(handle)))
            }
            Err(error) => {
                self.malformed(receipt, message.payload.clone(), &error);
                None
            }
        }
    }

    fn malformed(&self, receipt: Receipt, payload: Bytes, error: &DecodeError) {
        let subject = &receipt.subject;
        warn!(%subject, sequence = receipt.sequence, %error, "dead-lettered a malformed message");
        if let Some(on_malformed) = &self.shared.spec.on_malformed {
            on_malformed(&payload, error, subject);
        }
        let shared = Arc::clone(&self.shared);
        let reason = error.to_string();
        // The pull does not wait for this: dropping it must not leave this half-done.
        tokio::spawn(async move {
            if let Err(error) = shared.malformed(&receipt, &reason, payload).await {
                warn!(subject = %receipt.subject, %error, "failed to dead-letter; the message will be redelivered");
            }
        });
    }
}

#[async_trait]
impl<T: Message> Queue<T> for JetStreamQueue<T> {
    async fn publish(&self, id: &str, message: T) -> Result<Published, QueueError> {
        let subject = (self.shared.spec.subject)(&message);
        let payload = Bytes::from(message.encode());
        drop(message);
        let headers = origin::trace_headers();
        let publisher = &self.shared.publisher;
        let published = publisher.publish(&subject, id, payload, headers);
        published.await
    }

    async fn pull(&self, limit: usize, expiry: Duration) -> Result<Vec<Delivery<T>>, QueueError> {
        let Some(consumption) = &self.consumption else {
            return Err(QueueError::new(
                QueueErrorKind::Misconfigured,
                format!(
                    "the queue on {} has no consumer to pull by",
                    self.shared.spec.stream
                ),
            ));
        };
        let end = Instant::now() + expiry;
        loop {
            let received = consumption.take(limit, end).await?;
            let came = !received.is_empty();
            let deliveries: Vec<_> = received
                .into_iter()
                .filter_map(|received| self.delivery(received))
                .collect();
            if !deliveries.is_empty() || !came {
                return Ok(deliveries);
            }
        }
    }

    /// Delayed retries count as in flight, as the server cannot tell them apart. Dead letters are
    /// those of this object; [`Broker::subject_count`] counts all. Without a consumer the whole
    /// stream counts as waiting.
    async fn stats(&self) -> Result<QueueStats, QueueError> {
        let spec = &self.shared.spec;
        let dead_letters = self.shared.dead_letters.load(Ordering::Relaxed);
        let (waiting, in_flight) = match &spec.consumer {
            Some(consumer) => {
                let stats = self
                    .shared
                    .broker
                    .consumer_stats(spec.stream, &consumer.durable);
                let stats = stats.await?;
                stats.map_or((0, 0), |stats| (stats.waiting, stats.in_flight))
            }
            None => {
                let stats = self.shared.broker.stream_stats(spec.stream).await?;
                (stats.map_or(0, |stats| stats.messages), 0)
            }
        };
        Ok(QueueStats {
            waiting,
            in_flight,
            dead_letters,
        })
    }
}

impl<T> Drop for JetStreamQueue<T> {
    fn drop(&mut self) {
        self.closed.send_replace(true);
    }
}

impl<T> fmt::Debug for JetStreamQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JetStreamQueue")
            .field("stream", &self.shared.spec.stream)
            .field("consumer", &self.shared.spec.consumer)
            .finish_non_exhaustive()
    }
}
