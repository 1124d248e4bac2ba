use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use async_nats::jetstream;
use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;
use trommel_types::{DecodeError, Message};

use super::consumption::{Consumption, Received};
use super::handle::{JetStreamHandle, Word};
use super::lease::Keeper;
use super::publish::Publisher;
use super::{Broker, StreamName};
use crate::origin::{self, Origin};
use crate::{Delivery, Published, Queue, QueueError, QueueErrorKind, QueueStats};

/// Says a message's subject.
pub type SubjectOf<T> = Arc<dyn Fn(&T) -> String + Send + Sync>;

/// Is told of a message that is none: its bytes, what is wrong, and its subject.
pub type OnMalformed = Arc<dyn Fn(&[u8], &DecodeError, &str) + Send + Sync>;

/// What a [`JetStreamQueue`] stores where, and what it takes.
pub struct QueueSpec<T> {
    /// The stream.
    pub stream: StreamName,
    /// Where in it a message is stored.
    pub subject: SubjectOf<T>,
    /// Where its dead letter is stored.
    pub dead_subject: SubjectOf<T>,
    /// What pulls take; `None` for a queue that only publishes.
    pub consumer: Option<ConsumerSpec>,
    /// Is told of each malformed message, before it is dead-lettered.
    pub on_malformed: Option<OnMalformed>,
}

/// A durable consumer: whoever pulls by the same name shares its messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerSpec {
    /// Its name; see [`subject_token`](super::subject_token).
    pub durable: String,
    /// What it takes of the stream. In a work queue no two consumers may take the same.
    pub filter_subject: String,
    /// Time a delivery may stay unsettled before it is repeated.
    pub ack_wait: Duration,
    /// Deliveries that all who share the consumer may have in flight together.
    pub max_ack_pending: NonZeroU32,
    /// Messages to ask for beyond what pulls wait for. Each counts as delivered and is handed out
    /// before repeats that become due meanwhile, so 0 keeps the order of the contract.
    pub prefetch: usize,
    /// Whether a settle as done waits until the server has it. Costs a round trip; without it a
    /// word that is lost costs a repeat.
    pub confirm_acks: bool,
}

impl ConsumerSpec {
    /// A consumer with an ack deadline of 30 s, at most 1,000 deliveries in flight, no prefetch, and
    /// settles that are not confirmed.
    pub fn new(durable: impl Into<String>, filter_subject: impl Into<String>) -> Self {
        Self {
            durable: durable.into(),
            filter_subject: filter_subject.into(),
            ack_wait: Duration::from_secs(30),
            max_ack_pending: NonZeroU32::new(1000).expect("1000 is not zero"),
            prefetch: 0,
            confirm_acks: false,
        }
    }
}

/// A work queue on a stream of a [`Broker`].
///
/// Dropping it, or [`close`](Self::close), gives back what was asked for and not taken. Deliveries
/// in hand stay valid.
pub struct JetStreamQueue<T> {
    shared: Arc<Shared<T>>,
    consumption: Option<Arc<Consumption>>,
    closed: watch::Sender<bool>,
}

/// What a queue and its deliveries need.
pub(super) struct Shared<T> {
    pub(super) broker: Broker,
    pub(super) spec: QueueSpec<T>,
    pub(super) publisher: Publisher,
    pub(super) keeper: Option<Arc<Keeper>>,
    pub(super) dead_letters: AtomicU64,
}

impl<T> Shared<T> {
    /// Time that a delivery is granted; none without a consumer.
    pub(super) fn ack_wait(&self) -> Duration {
        let consumer = self.spec.consumer.as_ref();
        consumer.map_or(Duration::ZERO, |consumer| consumer.ack_wait)
    }

    pub(super) fn confirm_acks(&self) -> bool {
        let consumer = self.spec.consumer.as_ref();
        consumer.is_some_and(|consumer| consumer.confirm_acks)
    }
}

impl<T: Message> JetStreamQueue<T> {
    pub(super) async fn open(broker: &Broker, spec: QueueSpec<T>) -> Result<Self, QueueError> {
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

    /// Gives messages that were asked for and not taken back to the server, for others to get at
    /// once. Returns when the server has them; pulls take nothing from then on.
    pub async fn close(&self) {
        self.closed.send_replace(true);
        // The receiver is dropped when its task ends.
        self.closed.closed().await;
    }

    /// The delivery of what came, or `None` for what is no message: that is dead-lettered meanwhile.
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
        let word = Word {
            reply,
            subject: message.subject.clone(),
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
                    word,
                };
                let origin = Origin::of(message.headers.as_ref(), Some(stored));
                Some(Delivery::new(decoded, attempt, origin, Box::new(handle)))
            }
            Err(error) => {
                self.malformed(word, message.payload.clone(), &error);
                None
            }
        }
    }

    fn malformed(&self, word: Word, payload: Bytes, error: &DecodeError) {
        let subject = &word.subject;
        warn!(%subject, sequence = word.sequence, %error, "dead-lettered a message that is none");
        if let Some(on_malformed) = &self.shared.spec.on_malformed {
            on_malformed(&payload, error, subject);
        }
        let shared = Arc::clone(&self.shared);
        let reason = error.to_string();
        // Not awaited by the pull: one that is dropped must not leave this half-done.
        tokio::spawn(async move {
            let stage = format!("dead.malformed.{}", shared.spec.stream);
            let dead_subject = shared.broker.subject(&stage);
            let buried = shared.dead_letter(&word, &dead_subject, &reason, payload);
            if let Err(error) = buried.await {
                warn!(subject = %word.subject, %error, "failed to dead-letter; it comes again");
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
            let received = consumption.take(limit, end).await;
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
    /// those of this object; [`Broker::subject_count`] tells those of all. Without a consumer the
    /// whole stream counts as waiting.
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
