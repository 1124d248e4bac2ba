use std::sync::Arc;
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::client::{Request, RequestErrorKind};
use bytes::Bytes;
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::warn;

use super::Broker;
use super::backoff::Backoff;
use crate::{Published, QueueError, QueueErrorKind, metrics};

/// Bytes that one queue may have sent and not seen stored.
const OUTSTANDING_BYTES: usize = 8 << 20;
/// Messages that one queue may have sent and not seen stored.
const OUTSTANDING_MESSAGES: usize = 1024;
/// Time to wait for the word that a message is stored. A server that restarts never gives it.
const STORED_WITHIN: Duration = Duration::from_secs(2);
/// The unit in which bytes are counted.
const BLOCK: usize = 1024;

/// Stores messages in streams, each repeated under its id until the server says that it is stored.
#[derive(Clone)]
pub(super) struct Publisher {
    broker: Broker,
    /// The stage that publishes, as metrics name it.
    stage: &'static str,
    outstanding: Arc<Semaphore>,
}

#[derive(Debug, Deserialize)]
struct Answer {
    #[serde(default)]
    duplicate: bool,
    error: Option<Refusal>,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    #[serde(default)]
    code: u64,
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// Room will come.
    Full,
    /// The server is busy with itself.
    Unwell,
    TooLarge,
    Refused,
}

impl Refusal {
    fn verdict(&self) -> Verdict {
        match (self.err_code, self.description.as_str()) {
            // One code stands for every limit that refuses a message; only the text tells which.
            (10077, text) if text.contains("per subject") => Verdict::Refused,
            (10077, text) if text.starts_with("maximum") => Verdict::Full,
            (10054, _) => Verdict::TooLarge,
            _ if self.code >= 500 => Verdict::Unwell,
            _ => Verdict::Refused,
        }
    }
}

impl Publisher {
    pub(super) fn new(broker: Broker, stage: &'static str) -> Self {
        // A message takes at least its share of the blocks, which bounds the messages as well.
        let outstanding = Arc::new(Semaphore::new(OUTSTANDING_BYTES / BLOCK));
        Self {
            broker,
            stage,
            outstanding,
        }
    }

    /// Returns once the message is stored. Waits while the stream is full and while the server is
    /// away, for ever. Cancel-safe.
    pub(super) async fn publish(
        &self,
        subject: &str,
        id: &str,
        payload: Bytes,
        mut headers: HeaderMap,
    ) -> Result<Published, QueueError> {
        let size = payload.len();
        headers.insert(async_nats::header::NATS_MESSAGE_ID, id);
        let blocks = (size / BLOCK).clamp(
            OUTSTANDING_BYTES / BLOCK / OUTSTANDING_MESSAGES,
            OUTSTANDING_BYTES / BLOCK,
        );
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let room = self.outstanding.acquire_many(blocks).await;
        let _room = room.expect("the semaphore is never closed");

        let client = self.broker.client();
        let link = self.broker.link();
        let mut full = Backoff::new();
        let mut away = Backoff::new();
        loop {
            // While the connection is down the client would queue every repeat.
            let losses = link.up().await;
            let request = Request::new()
                .payload(payload.clone())
                .headers(headers.clone())
                .timeout(Some(STORED_WITHIN));
            let answer = tokio::select! {
                answer = client.send_request(subject.to_owned(), request) => answer,
                () = link.lost(losses) => continue,
            };
            let reason = match answer {
                Ok(message) => match serde_json::from_slice(&message.payload) {
                    Ok(Answer {
                        error: Some(refusal),
                        ..
                    }) => match refusal.verdict() {
                        Verdict::Full => {
                            let start = Instant::now();
                            full.wait().await;
                            metrics::waited_for_room(self.stage, start.elapsed());
                            continue;
                        }
                        Verdict::Unwell => refusal.description,
                        Verdict::TooLarge => return Err(self.too_large(subject, size)),
                        Verdict::Refused => {
                            return Err(QueueError::new(
                                QueueErrorKind::Misconfigured,
                                format!("stream refuses {subject}: {}", refusal.description),
                            ));
                        }
                    },
                    Ok(Answer {
                        duplicate: true, ..
                    }) => return Ok(Published::Duplicate),
                    Ok(_) => return Ok(Published::Stored),
                    Err(error) => format!("answer is none: {error}"),
                },
                Err(error) => match error.kind() {
                    RequestErrorKind::MaxPayloadExceeded => {
                        return Err(self.too_large(subject, size));
                    }
                    RequestErrorKind::InvalidSubject => {
                        return Err(QueueError::new(
                            QueueErrorKind::Misconfigured,
                            format!("subject {subject:?} is none"),
                        ));
                    }
                    RequestErrorKind::NoResponders => {
                        "no stream takes the subject; is the server starting?".to_owned()
                    }
                    RequestErrorKind::TimedOut | RequestErrorKind::Other => error.to_string(),
                },
            };
            if away.warn_now() {
                warn!(subject, id, reason, "not stored yet, publishing again");
            }
            away.wait().await;
        }
    }

    fn too_large(&self, subject: &str, size: usize) -> QueueError {
        QueueError::new(
            QueueErrorKind::TooLarge,
            format!(
                "message of {size} bytes for {subject} is larger than the broker takes: raise \
                 `max_payload` (now {} bytes) in the configuration of nats-server",
                self.broker.max_payload()
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_stream_is_told_from_other_refusals() {
        let verdict = |text: &str| serde_json::from_str::<Refusal>(text).unwrap().verdict();
        for text in ["maximum messages exceeded", "maximum bytes exceeded"] {
            let full = format!(r#"{{"code":503,"err_code":10077,"description":"{text}"}}"#);
            assert_eq!(verdict(&full), Verdict::Full);
        }
        assert_eq!(
            verdict(
                r#"{"code":503,"err_code":10077,"description":"maximum messages per subject exceeded"}"#
            ),
            Verdict::Refused
        );
        assert_eq!(
            verdict(
                r#"{"code":400,"err_code":10054,"description":"message size exceeds maximum allowed"}"#
            ),
            Verdict::TooLarge
        );
        assert_eq!(
            verdict(
                r#"{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}"#
            ),
            Verdict::Unwell
        );
    }
}
