//! Frames of live sources: an in-memory stream with the newest frame of each.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::stream::{self, DiscardPolicy, RetentionPolicy, StorageType};
use bytes::Bytes;
use futures::StreamExt;
use tokio::time::sleep;
use tracing::warn;

use super::backoff::Backoff;
use super::broker::Broker;
use super::connect::Begun;
use super::streams::ensure;
use crate::{QueueError, QueueErrorKind};

/// Most bytes of frames in the stream.
const MOST_BYTES: i64 = 256 << 20;
/// Age at which a frame is useless.
const MOST_AGE: Duration = Duration::from_secs(600);
/// Frames per request.
const BATCH: usize = 64;
/// Time after which the server removes an unused consumer.
const ABANDONED: Duration = Duration::from_secs(300);
/// The part of subjects before the source.
const SUBJECTS: &str = "live";

/// Room for the subject and the headers in a message.
const OVERHEAD: usize = 1024;

/// The header with the number of a frame, counted by its publisher.
pub const LIVE_FRAME: &str = "Trommel-Frame";
/// The header with the time when a frame was taken, in milliseconds since the Unix epoch.
pub const LIVE_FRAME_TIME: &str = "Trommel-Frame-Time";

/// Metadata of a published frame.
#[derive(Debug, Clone, Copy)]
pub struct LiveSent {
    /// Its number, from 0.
    pub number: u64,
    /// When it was taken, in milliseconds since the Unix epoch.
    pub taken: u64,
}

/// A frame of a live source.
#[derive(Debug, Clone)]
pub struct LiveFrame {
    /// Its source: the last token of its subject.
    pub source: String,
    /// Its sequence in the stream.
    pub sequence: u64,
    /// Its arrival at the broker, in microseconds since the Unix epoch, UTC.
    pub stored_at: i64,
    /// Its headers.
    pub headers: HeaderMap,
    /// The encoded image.
    pub payload: Bytes,
    /// Frames of any source replaced by newer ones since the last one read, if known.
    pub replaced: u64,
}

/// Reads frames of live sources. Processes with the same consumer name share them.
pub struct LiveReader {
    broker: Broker,
    durable: String,
    sources: Vec<String>,
    reading: Option<Reading>,
    /// The last frame: its sequences in the stream and for the consumer.
    last: Option<(u64, u64)>,
}

/// A consumer to read from.
struct Reading {
    begun: Begun,
    messages: pull::Stream,
}

impl Broker {
    /// The name of the stream of live frames on the server.
    pub fn live_stream(&self) -> String {
        live_stream(&self.config().prefix)
    }

    /// The subject of a source's frames.
    pub fn live_subject(&self, source: &str) -> String {
        self.subject(&format!("{SUBJECTS}.{source}"))
    }

    /// The subject of a source's results.
    pub fn live_results(&self, source: &str) -> String {
        self.subject(&format!("{SUBJECTS}.results.{source}"))
    }

    /// Creates the stream of live frames if it does not exist.
    ///
    /// # Errors
    /// As [`Broker::ensure_streams`].
    pub async fn ensure_live_stream(&self) -> Result<(), QueueError> {
        let wanted = stream::Config {
            name: self.live_stream(),
            subjects: vec![self.live_subject("*")],
            retention: RetentionPolicy::Limits,
            storage: StorageType::Memory,
            discard: DiscardPolicy::Old,
            max_messages: -1,
            max_messages_per_subject: 1,
            max_bytes: MOST_BYTES,
            max_age: MOST_AGE,
            duplicate_window: Duration::from_secs(60),
            num_replicas: 1,
            ..stream::Config::default()
        };
        ensure(self, wanted).await
    }

    /// Publishes a frame without waiting for the ack: the next one follows soon.
    ///
    /// # Errors
    /// [`TooLarge`](QueueErrorKind::TooLarge) if it does not fit into a message,
    /// [`Unreachable`](QueueErrorKind::Unreachable) if the connection is closed.
    pub async fn publish_live(
        &self,
        source: &str,
        sent: LiveSent,
        frame: Bytes,
    ) -> Result<(), QueueError> {
        let (size, most) = (frame.len(), self.max_payload());
        if size + OVERHEAD > most {
            let message = format!(
                "a frame holds {size} bytes, more than max_payload = {most} of the server takes"
            );
            return Err(QueueError::new(QueueErrorKind::TooLarge, message));
        }
        let mut headers = HeaderMap::new();
        headers.insert(LIVE_FRAME, sent.number.to_string());
        headers.insert(LIVE_FRAME_TIME, sent.taken.to_string());
        let subject = self.live_subject(source);
        let published = self.client().publish_with_headers(subject, headers, frame);
        published.await.map_err(|error| {
            let message = format!("failed to publish a frame: {error}");
            QueueError::new(QueueErrorKind::Unreachable, message)
        })
    }

    /// Starts reading frames of these sources, `*` for all, with a consumer of this name.
    ///
    /// # Errors
    /// If the stream cannot be created, or the consumer is denied.
    pub async fn read_live(
        &self,
        durable: &str,
        sources: &[String],
    ) -> Result<LiveReader, QueueError> {
        self.ensure_live_stream().await?;
        let mut reader = LiveReader {
            broker: self.clone(),
            durable: durable.to_owned(),
            sources: sources.to_vec(),
            reading: None,
            last: None,
        };
        match reader.begin().await? {
            Ok(reading) => reader.reading = Some(reading),
            Err(reason) => {
                let message = format!("live frames cannot be read: {reason}");
                return Err(QueueError::new(QueueErrorKind::Misconfigured, message));
            }
        }
        Ok(reader)
    }
}

/// The name of the stream of live frames of an installation.
pub fn live_stream(prefix: &str) -> String {
    format!("{prefix}_{SUBJECTS}").to_ascii_uppercase()
}

impl LiveReader {
    /// Waits for the next frame, and for an unreachable broker. Cancel-safe.
    ///
    /// # Errors
    /// Permanent ones.
    pub async fn next(&mut self) -> Result<LiveFrame, QueueError> {
        let mut backoff = Backoff::new();
        loop {
            let reason = match self.read().await? {
                Ok(frame) => return Ok(frame),
                Err(reason) => reason,
            };
            self.reading = None;
            if backoff.warn_now() {
                warn!(reason, "live frames are requested again");
            }
            sleep(backoff.step()).await;
        }
    }

    async fn read(&mut self) -> Result<Result<LiveFrame, String>, QueueError> {
        if self.reading.is_none() {
            // The broker may have lost its in-memory state.
            self.broker.ensure_live_stream().await?;
            match self.begin().await? {
                Ok(reading) => self.reading = Some(reading),
                Err(reason) => return Ok(Err(reason)),
            }
        }
        let Some(reading) = &mut self.reading else {
            return Ok(Err("there is no consumer".to_owned()));
        };
        let (begun, next) = (reading.begun, reading.messages.next());
        let stream = self.broker.live_stream();
        let message = match self.broker.uninterrupted(begun, &stream, next).await? {
            Some(Some(Ok(message))) => message,
            Some(Some(Err(error))) => return Ok(Err(error.to_string())),
            Some(None) => return Ok(Err("the consumer ended".to_owned())),
            None => return Ok(Err("the connection was lost".to_owned())),
        };
        let info = match message.info() {
            Ok(info) => info,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let (sequence, given) = (info.stream_sequence, info.consumer_sequence);
        let stored_at = i64::try_from(info.published.unix_timestamp_nanos() / 1000).unwrap_or(0);
        let source = message.subject.rsplit('.').next().unwrap_or_default();
        let source = source.to_owned();
        // Frames between two successive ones of a consumer were delivered to nobody.
        let all = self.sources.iter().any(|source| source == "*");
        let replaced = match self.last {
            Some((last, before)) if all && given == before + 1 => sequence.saturating_sub(last + 1),
            _ => 0,
        };
        self.last = Some((sequence, given));
        Ok(Ok(LiveFrame {
            source,
            sequence,
            stored_at,
            replaced,
            headers: message.message.headers.unwrap_or_default(),
            payload: message.message.payload,
        }))
    }

    /// Creates the consumer, or finds that of another process.
    async fn begin(&self) -> Result<Result<Reading, String>, QueueError> {
        let begun = self.broker.link().up().await;
        let subjects = self.sources.iter();
        let config = pull::Config {
            durable_name: Some(self.durable.clone()),
            description: Some("live frames that are classified".to_owned()),
            filter_subjects: subjects
                .map(|source| self.broker.live_subject(source))
                .collect(),
            deliver_policy: DeliverPolicy::LastPerSubject,
            // A lost frame is followed by a newer one.
            ack_policy: AckPolicy::None,
            inactive_threshold: ABANDONED,
            memory_storage: true,
            ..pull::Config::default()
        };
        let name = self.broker.live_stream();
        let opened = async {
            let stream = self.broker.context().get_stream_no_info(&name).await;
            let stream = stream.map_err(|error| error.to_string())?;
            let consumer = stream.create_consumer(config).await;
            let consumer = consumer.map_err(|error| error.to_string())?;
            let messages = consumer.stream().max_messages_per_batch(BATCH).messages();
            messages.await.map_err(|error| error.to_string())
        };
        let opened = self.broker.uninterrupted(begun, &name, opened).await?;
        Ok(opened
            .unwrap_or_else(|| Err("the connection was lost".to_owned()))
            .map(|messages| Reading { begun, messages }))
    }
}
