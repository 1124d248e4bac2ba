//! Looks at stored messages without taking them.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::stream::{self, DiscardPolicy, RawMessageErrorKind, StorageType};
use bytes::Bytes;
use serde_json::{Value, json};

use super::{Broker, StreamName};
use crate::{QueueError, QueueErrorKind};

/// Time that events of other programs are kept for jobs that follow them.
const EVENTS_MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// A message that a stream holds.
#[derive(Debug, Clone)]
pub struct Held {
    /// Its place in the stream.
    pub sequence: u64,
    /// Its subject.
    pub subject: String,
    /// When it was stored, in microseconds since the Unix epoch, UTC.
    pub stored_at: i64,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its payload.
    pub payload: Bytes,
}

/// A stream of messages that other programs publish, to be read from any place on.
#[derive(Debug, Clone)]
pub struct Feed {
    stream: stream::Stream<()>,
    subject: String,
}

impl Broker {
    /// The first message at or behind a sequence whose subject matches; `None` if there is none.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn peek(
        &self,
        stream: StreamName,
        subject: &str,
        from: u64,
    ) -> Result<Option<Held>, QueueError> {
        let name = self.stream_name(stream);
        let stream = self.context().get_stream_no_info(&name).await;
        let stream = stream.map_err(|error| unreadable(&name, &error))?;
        first(&stream, subject, from).await
    }

    /// The feed of a subject. Messages are kept by the stream that stores the subject already; if
    /// none does, one is made that keeps them for seven days.
    ///
    /// # Errors
    /// When the subject is none, or no stream can be made for it.
    pub async fn feed(&self, subject: &str) -> Result<Feed, QueueError> {
        let names: Option<Value> = self
            .ask("STREAM.NAMES", &json!({ "subject": subject }), &[])
            .await
            .map_err(|error| unfollowed(subject, &error))?;
        let taker = names.and_then(|names| Some(names["streams"].get(0)?.as_str()?.to_owned()));
        let name = match taker {
            Some(name) => name,
            None => self.make_feed(subject).await?,
        };
        let stream = self.context().get_stream_no_info(name).await;
        Ok(Feed {
            stream: stream.map_err(|error| unreadable(subject, &error))?,
            subject: subject.to_owned(),
        })
    }

    /// Makes a stream that keeps what is published on a subject; gives its name.
    async fn make_feed(&self, subject: &str) -> Result<String, QueueError> {
        let name: String = subject
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        let prefix = &self.config().prefix;
        let name = format!("{prefix}_FEED_{name}").to_ascii_uppercase();
        let config = stream::Config {
            name: name.clone(),
            subjects: vec![subject.to_owned()],
            storage: StorageType::File,
            discard: DiscardPolicy::Old,
            max_age: EVENTS_MAX_AGE,
            num_replicas: self.config().replicas,
            ..stream::Config::default()
        };
        let _made: Option<Value> = self
            .ask(&format!("STREAM.CREATE.{name}"), &json!(config), &[])
            .await
            .map_err(|error| unfollowed(subject, &error))?;
        Ok(name)
    }
}

impl Feed {
    /// The first message at or behind a sequence; `None` if there is none yet.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn first_from(&self, sequence: u64) -> Result<Option<Held>, QueueError> {
        first(&self.stream, &self.subject, sequence).await
    }
}

async fn first(
    stream: &stream::Stream<()>,
    subject: &str,
    from: u64,
) -> Result<Option<Held>, QueueError> {
    match stream.get_first_raw_message_by_subject(subject, from).await {
        Ok(message) => Ok(Some(Held {
            sequence: message.sequence,
            subject: message.subject.to_string(),
            stored_at: i64::try_from(message.time.unix_timestamp_nanos() / 1000).unwrap_or(0),
            headers: message.headers,
            payload: message.payload,
        })),
        Err(error) if matches!(error.kind(), RawMessageErrorKind::NoMessageFound) => Ok(None),
        Err(error) => Err(unreadable(subject, &error)),
    }
}

fn unfollowed(subject: &str, error: &QueueError) -> QueueError {
    let message = format!("events on {subject} cannot be followed: {error}");
    QueueError::new(error.kind(), message)
}

fn unreadable(what: &str, error: &dyn std::fmt::Display) -> QueueError {
    QueueError::new(
        QueueErrorKind::Unreachable,
        format!("failed to look at {what}: {error}"),
    )
}
