//! Reads stored messages without consuming them, from the stream's leader.
//!
//! A direct get may be answered by a lagging replica; this reads the leader's state.

use async_nats::HeaderMap;
use async_nats::jetstream::message::StreamMessage;
use async_nats::jetstream::stream::RawMessage;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use trommel_types::Stream;

use super::answers::ErrorCode;
use super::broker::Broker;
use crate::{QueueError, QueueErrorKind};

/// A stored message.
#[derive(Debug, Clone)]
pub struct Held {
    /// Its sequence in the stream.
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

impl Broker {
    /// The first message from a sequence on whose subject matches, if one exists.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub async fn peek(
        &self,
        stream: Stream,
        subject: &str,
        from: u64,
    ) -> Result<Option<Held>, QueueError> {
        let question = json!({ "seq": from, "next_by_subj": subject });
        read(self, &self.stream_name(stream), &question).await
    }
}

/// The newest message of a stream whose subject matches, wildcards included.
pub(super) async fn newest(
    broker: &Broker,
    stream: &str,
    subject: &str,
) -> Result<Option<Held>, QueueError> {
    read(broker, stream, &json!({ "last_by_subj": subject })).await
}

async fn read(broker: &Broker, stream: &str, question: &Value) -> Result<Option<Held>, QueueError> {
    #[derive(Deserialize)]
    struct Answer {
        message: RawMessage,
    }
    let api = format!("STREAM.MSG.GET.{stream}");
    let none = [ErrorCode::NO_MESSAGE_FOUND];
    let Some(Answer { message }) = broker.ask(&api, question, &none).await? else {
        return Ok(None);
    };
    let (subject, sequence) = (message.subject.clone(), message.sequence);
    let message = StreamMessage::try_from(message).map_err(|error| {
        let text =
            format!("message {sequence} of stream {stream} on {subject} is invalid: {error}");
        QueueError::new(QueueErrorKind::Misconfigured, text)
    })?;
    Ok(Some(Held {
        sequence,
        subject,
        stored_at: i64::try_from(message.time.unix_timestamp_nanos() / 1000).unwrap_or(0),
        headers: message.headers,
        payload: message.payload,
    }))
}
