//! Reads messages of other programs from their streams.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::stream::{self, RetentionPolicy};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::warn;

use super::answers::ErrorCode;
use super::backoff::Backoff;
use super::broker::Broker;
use super::connect::Begun;
use super::peek::Held;
use super::subject::{covers, overlap};
use crate::{QueueError, QueueErrorKind};

/// Messages per request.
const BATCH: usize = 256;
/// Time after which the server removes an unused consumer of a feed.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);

/// Messages of a stream that other programs own, in order, from any position on.
#[derive(Clone)]
pub struct Feed {
    broker: Broker,
    stream: String,
    subject: String,
    durable: String,
}

/// Reads a [`Feed`] with its own durable consumer, which shows its progress in the server's
/// monitoring.
///
/// The consumer stores no position: the reader records the last sequence and continues after it.
pub struct FeedReader {
    feed: Feed,
    /// The newest message read.
    last: u64,
    reading: Option<Reading>,
}

/// A consumer to read from.
struct Reading {
    begun: Begun,
    messages: pull::Stream,
    /// Messages received from it.
    came: u64,
}

impl Broker {
    /// The feed of a subject, wildcards included, to be read with a consumer of this name, which is
    /// created when reading begins. Nothing else is created.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) if no stream captures the subject, if that
    /// stream deletes messages when they are read, or if the subject is used by Trommel or the
    /// server.
    pub async fn feed(&self, subject: &str, durable: &str) -> Result<Feed, QueueError> {
        let refused = |text: String| Err(QueueError::new(QueueErrorKind::Misconfigured, text));
        let own = format!("{}.>", self.config().prefix);
        let is_live = covers(&self.live_subject("*"), subject);
        let reserved = [
            &*own, "$JS.>", "$KV.>", "$SYS.>", "$O.>", "$SRV.>", "_INBOX.>",
        ];
        let mut reserved = reserved.iter().filter(|_| !is_live);
        if let Some(taken) = reserved.find(|taken| overlap(taken, subject)) {
            return refused(format!(
                "subject {subject} cannot be followed: it takes in messages of {taken}, which are not \
                 events; name the subject that the events are published on"
            ));
        }
        let question = json!({ "subject": subject });
        let named: Option<Value> = self.ask("STREAM.NAMES", &question, &[]).await?;
        let named = named.and_then(|named| Some(named["streams"].as_array()?.clone()));
        for name in named.iter().flatten().filter_map(Value::as_str) {
            let api = format!("STREAM.INFO.{name}");
            let gone = [ErrorCode::STREAM_NOT_FOUND];
            let info: Option<stream::Info> = self.ask(&api, &json!({}), &gone).await?;
            let Some(stream::Info { config, .. }) = info else {
                continue;
            };
            if !config.subjects.iter().any(|held| covers(held, subject)) {
                continue;
            }
            if config.retention != RetentionPolicy::Limits {
                return refused(format!(
                    "stream {name} cannot be followed: it removes what is read; make a stream with \
                     limits retention for {subject}"
                ));
            }
            return Ok(Feed {
                broker: self.clone(),
                stream: name.to_owned(),
                subject: subject.to_owned(),
                durable: durable.to_owned(),
            });
        }
        refused(format!(
            "no stream captures {subject}: create one (`nats stream add EVENTS --subjects \
             '{subject}'`) before events are published"
        ))
    }
}

impl Feed {
    /// Starts reading after a sequence; 0 is the start of the stream.
    pub fn read_after(self, sequence: u64) -> FeedReader {
        FeedReader {
            feed: self,
            last: sequence,
            reading: None,
        }
    }

    /// Removes the consumer of a finished feed.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub async fn remove(&self) -> Result<(), QueueError> {
        let gone = [ErrorCode::CONSUMER_NOT_FOUND, ErrorCode::STREAM_NOT_FOUND];
        let api = format!("CONSUMER.DELETE.{}.{}", self.stream, self.durable);
        let removed: Option<Value> = self.broker.ask(&api, &json!({}), &gone).await?;
        drop(removed);
        Ok(())
    }

    /// Creates the consumer again, to continue after the last message read.
    async fn begin(&self, after: u64) -> Result<Result<Reading, String>, QueueError> {
        let begun = self.broker.link().up().await;
        self.remove().await?;
        let config = pull::Config {
            durable_name: Some(self.durable.clone()),
            description: Some("events that a Trommel job follows".to_owned()),
            filter_subject: self.subject.clone(),
            deliver_policy: DeliverPolicy::ByStartSequence {
                start_sequence: after + 1,
            },
            // Lost messages are read again by a new consumer.
            ack_policy: AckPolicy::None,
            inactive_threshold: ABANDONED,
            ..pull::Config::default()
        };
        let opened = async {
            let stream = self.broker.context().get_stream_no_info(&self.stream).await;
            let stream = stream.map_err(|error| error.to_string())?;
            let consumer = stream.create_consumer(config).await;
            let consumer = consumer.map_err(|error| error.to_string())?;
            let messages = consumer.stream().max_messages_per_batch(BATCH).messages();
            messages.await.map_err(|error| error.to_string())
        };
        let opened = self
            .broker
            .uninterrupted(begun, &self.stream, opened)
            .await?;
        Ok(opened
            .unwrap_or_else(|| Err("the connection was lost".to_owned()))
            .map(|messages| Reading {
                begun,
                messages,
                came: 0,
            }))
    }
}

impl FeedReader {
    /// The next message; `None` if none arrived within `expiry`. Waits for an unreachable broker.
    /// Cancel-safe.
    ///
    /// # Errors
    /// Permanent ones.
    pub async fn next(&mut self, expiry: Duration) -> Result<Option<Held>, QueueError> {
        let end = Instant::now() + expiry;
        let mut backoff = Backoff::new();
        loop {
            let Ok(read) = timeout_at(end, self.read()).await else {
                return Ok(None);
            };
            let reason = match read? {
                Ok(held) => {
                    self.last = held.sequence;
                    return Ok(Some(held));
                }
                Err(reason) => reason,
            };
            self.reading = None;
            if backoff.warn_now() {
                warn!(
                    subject = self.feed.subject,
                    reason, "events are requested again"
                );
            }
            sleep(backoff.step().min(end - Instant::now())).await;
        }
    }

    /// The next message, or why this consumer has none.
    async fn read(&mut self) -> Result<Result<Held, String>, QueueError> {
        let reading = match &mut self.reading {
            Some(reading) => reading,
            None => match self.feed.begin(self.last).await? {
                Ok(reading) => self.reading.insert(reading),
                Err(reason) => return Ok(Err(reason)),
            },
        };
        let next = reading.messages.next();
        let message = match self
            .feed
            .broker
            .uninterrupted(reading.begun, &self.feed.stream, next)
            .await?
        {
            Some(Some(Ok(message))) => message,
            Some(Some(Err(error))) => return Ok(Err(error.to_string())),
            Some(None) => return Ok(Err("the consumer ended".to_owned())),
            None => return Ok(Err("the connection was lost".to_owned())),
        };
        let info = match message.info() {
            Ok(info) => info,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let (sequence, published) = (info.stream_sequence, info.published);
        let in_order = info.consumer_sequence == reading.came + 1;
        reading.came += 1;
        if !in_order {
            return Ok(Err("messages were lost on the way".to_owned()));
        }
        Ok(Ok(Held {
            sequence,
            subject: message.subject.to_string(),
            stored_at: i64::try_from(published.unix_timestamp_nanos() / 1000).unwrap_or(0),
            headers: message.message.headers.unwrap_or_default(),
            payload: message.message.payload,
        }))
    }
}
