use std::sync::Arc;

use async_nats::HeaderMap;
use bytes::Bytes;
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::warn;

use super::answers::{Refusal, Verdict, check_size, too_large};
use super::backoff::Backoff;
use super::broker::{Broker, Reply};
use crate::{Published, QueueError, QueueErrorKind, metrics};

/// Unconfirmed bytes per queue.
const OUTSTANDING_BYTES: usize = 8 << 20;
/// Unconfirmed messages per queue.
const OUTSTANDING_MESSAGES: usize = 1024;
/// The unit for counting bytes.
const BLOCK: usize = 1024;

/// The result of one attempt to store a message.
pub(super) enum Attempt {
    Stored {
        sequence: u64,
        duplicate: bool,
    },
    /// The subject's newest message is not the expected one.
    Conflict,
    /// The stream is full.
    Full,
    /// The account or the server is full.
    AccountLimit(QueueError),
    /// Whether it is stored is unknown.
    Unanswered(String),
}

#[derive(Debug, Deserialize)]
struct Answer {
    #[serde(default, rename = "seq")]
    sequence: u64,
    #[serde(default)]
    duplicate: bool,
    error: Option<Refusal>,
}

/// Sends a message to its stream once.
///
/// # Errors
/// Permanent ones.
pub(super) async fn store(
    broker: &Broker,
    subject: &str,
    headers: &HeaderMap,
    payload: &Bytes,
) -> Result<Attempt, QueueError> {
    check_size(subject, headers, payload.len(), broker.max_payload())?;
    let sent = broker.request(subject, Some(headers.clone()), payload.clone());
    let message = match sent.await? {
        Reply::Answer(message) => message,
        Reply::Nobody => {
            let reason = "no stream takes the subject; is the server starting?".to_owned();
            return Ok(Attempt::Unanswered(reason));
        }
        Reply::Silence(reason) => return Ok(Attempt::Unanswered(reason)),
    };
    let refusal = match serde_json::from_slice(&message.payload) {
        Ok(Answer {
            error: Some(refusal),
            ..
        }) => refusal,
        Ok(Answer {
            sequence,
            duplicate,
            ..
        }) => {
            return Ok(Attempt::Stored {
                sequence,
                duplicate,
            });
        }
        Err(error) => return Ok(Attempt::Unanswered(format!("invalid answer: {error}"))),
    };
    match refusal.verdict() {
        Verdict::Full => Ok(Attempt::Full),
        Verdict::AccountLimit => Ok(Attempt::AccountLimit(refusal.account_limit(subject))),
        Verdict::Busy => Ok(Attempt::Unanswered(refusal.description)),
        Verdict::Conflict => Ok(Attempt::Conflict),
        Verdict::TooLarge => Err(too_large(subject, payload.len(), broker.max_payload())),
        Verdict::Refused => Err(QueueError::new(
            QueueErrorKind::Misconfigured,
            format!("stream refuses {subject}: {}", refusal.description),
        )),
    }
}

/// Stores messages in streams, repeating each under its id until the server confirms it.
#[derive(Clone)]
pub(super) struct Publisher {
    broker: Broker,
    /// The publishing stage, as named in metrics.
    stage: &'static str,
    outstanding: Arc<Semaphore>,
}

impl Publisher {
    pub(super) fn new(broker: Broker, stage: &'static str) -> Self {
        // A message takes at least its share of the blocks, which limits the number of messages as
        // well.
        let outstanding = Arc::new(Semaphore::new(OUTSTANDING_BYTES / BLOCK));
        Self {
            broker,
            stage,
            outstanding,
        }
    }

    /// Returns once the message is stored. Waits while the stream or the account is full or the
    /// server is unreachable, indefinitely. Cancel-safe.
    pub(super) async fn publish(
        &self,
        subject: &str,
        id: &str,
        payload: Bytes,
        mut headers: HeaderMap,
    ) -> Result<Published, QueueError> {
        headers.insert(async_nats::header::NATS_MESSAGE_ID, id);
        let blocks = (payload.len() / BLOCK).clamp(
            OUTSTANDING_BYTES / BLOCK / OUTSTANDING_MESSAGES,
            OUTSTANDING_BYTES / BLOCK,
        );
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let room = self.outstanding.acquire_many(blocks).await;
        let _room = room.expect("the semaphore is never closed");

        let mut full = Backoff::new();
        let mut away = Backoff::new();
        loop {
            match store(&self.broker, subject, &headers, &payload).await? {
                Attempt::Stored {
                    duplicate: true, ..
                } => return Ok(Published::Duplicate),
                Attempt::Stored { .. } => return Ok(Published::Stored),
                Attempt::Full => self.wait_for_room(&mut full).await,
                Attempt::AccountLimit(error) => {
                    if full.warn_now() {
                        warn!(subject, id, %error, "waiting for room");
                    }
                    self.wait_for_room(&mut full).await;
                }
                Attempt::Conflict => {
                    let text = format!("stream refuses {subject}: it expects another sequence");
                    return Err(QueueError::new(QueueErrorKind::Misconfigured, text));
                }
                Attempt::Unanswered(reason) => {
                    // The lost connection has been reported; the next attempt waits for it.
                    if self.broker.link().is_up() && away.warn_now() {
                        warn!(subject, id, reason, "not stored yet, publishing again");
                    }
                    away.wait().await;
                }
            }
        }
    }

    async fn wait_for_room(&self, full: &mut Backoff) {
        let start = Instant::now();
        full.wait().await;
        metrics::waited_for_room(self.stage, start.elapsed());
    }
}
