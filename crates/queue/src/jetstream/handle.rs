use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::client::Request;
use async_nats::{HeaderMap, Subject};
use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;
use trommel_types::Message;

use super::broker::ANSWER;
use super::lease::Lease;
use super::queue::Shared;
use crate::delivery::Handle;
use crate::{Disposition, KeepAlive, QueueError};

/// A delivery of a JetStream consumer.
pub(super) struct JetStreamHandle<T> {
    pub(super) shared: Arc<Shared<T>>,
    pub(super) message: Arc<T>,
    pub(super) word: Word,
}

/// What is needed to tell the server about a delivery.
pub(super) struct Word {
    pub(super) reply: Subject,
    pub(super) subject: Subject,
    pub(super) lease: Arc<Lease>,
    pub(super) attempt: u32,
    /// The message's place in its stream.
    pub(super) sequence: u64,
}

#[async_trait]
impl<T: Message> Handle for JetStreamHandle<T> {
    async fn settle(self: Box<Self>, disposition: Disposition) -> Result<(), QueueError> {
        self.word.lease.check(self.word.attempt)?;
        match disposition {
            Disposition::Done if !self.shared.confirm_acks() => {
                let ack = Bytes::from_static(b"+ACK");
                self.shared.tell(&self.word, ack).await
            }
            Disposition::Done => {
                let ack = Bytes::from_static(b"+ACK");
                self.shared.tell_for_sure(&self.word, ack).await
            }
            Disposition::Retry { after } => {
                // Said for sure, so that a pull which follows comes after it.
                let nanos = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
                let nak = match nanos {
                    0 => "-NAK".to_owned(),
                    _ => format!(r#"-NAK {{"delay":{nanos}}}"#),
                };
                self.shared.tell_for_sure(&self.word, nak.into()).await
            }
            Disposition::DeadLetter { reason } => {
                let dead_subject = (self.shared.spec.dead_subject)(&self.message);
                let payload = Bytes::from(self.message.encode());
                self.shared
                    .dead_letter(&self.word, &dead_subject, &reason, payload)
                    .await
            }
        }
    }

    async fn extend(&self) -> Result<(), QueueError> {
        self.word.lease.check(self.word.attempt)?;
        let asked_at = Instant::now();
        let progress = Bytes::from_static(b"+WPI");
        self.shared.tell(&self.word, progress).await?;
        self.word.lease.renew(asked_at);
        Ok(())
    }

    fn keep_alive(&self) -> KeepAlive {
        let (reply, lease) = (self.word.reply.clone(), Arc::clone(&self.word.lease));
        match &self.shared.keeper {
            Some(keeper) => KeepAlive::new(keeper.guard(reply, lease)),
            None => KeepAlive::new(()),
        }
    }
}

impl<T: Message> Shared<T> {
    /// Sends a word without waiting for the server. Lost, it costs a repeat.
    async fn tell(&self, word: &Word, what: Bytes) -> Result<(), QueueError> {
        // Only a client that is closed, or whose buffers are full for ever, fails here.
        let told = self.broker.client().publish(word.reply.clone(), what);
        match timeout(word.lease.left(), told).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(QueueError::expired(word.attempt)),
        }
    }

    /// Sends a word until the server confirms it, at most until the deadline, and no longer than the
    /// delivery was once granted: a server that crashed may have forgotten the delivery, and then never
    /// answers, however long it is kept alive here.
    async fn tell_for_sure(&self, word: &Word, what: Bytes) -> Result<(), QueueError> {
        let link = self.broker.link();
        let start = Instant::now();
        loop {
            word.lease.check(word.attempt)?;
            let patience = self.ack_wait().saturating_sub(start.elapsed());
            if patience.is_zero() {
                return Err(QueueError::expired(word.attempt));
            }
            let told = async {
                let losses = link.up().await;
                let request = Request::new().payload(what.clone()).timeout(Some(ANSWER));
                tokio::select! {
                    answer = self.broker.client().send_request(word.reply.clone(), request) => answer.is_ok(),
                    () = link.lost(losses) => false,
                }
            };
            match timeout(word.lease.left().min(patience), told).await {
                Ok(true) => return Ok(()),
                Ok(false) => sleep(Duration::from_millis(50)).await,
                Err(_) => return Err(QueueError::expired(word.attempt)),
            }
        }
    }

    /// Stores a dead letter, then ends the message. A crash between the two repeats both, and the
    /// second letter is dropped as a duplicate.
    pub(super) async fn dead_letter(
        &self,
        word: &Word,
        dead_subject: &str,
        reason: &str,
        payload: Bytes,
    ) -> Result<(), QueueError> {
        let _kept = self
            .keeper
            .as_ref()
            .map(|keeper| keeper.guard(word.reply.clone(), Arc::clone(&word.lease)));
        let stream = self.broker.stream_name(self.spec.stream);
        let mut headers = HeaderMap::new();
        // A header is one line.
        headers.insert("Trommel-Reason", reason.replace(['\r', '\n'], " "));
        headers.insert("Trommel-Attempt", word.attempt.to_string());
        headers.insert("Trommel-Subject", word.subject.as_str());
        headers.insert("Trommel-Stream", stream.as_str());
        headers.insert("Trommel-Sequence", word.sequence.to_string());
        let headers_size: usize = headers
            .iter()
            .flat_map(|(name, values)| values.iter().map(move |value| (name, value)))
            .map(|(name, value)| AsRef::<str>::as_ref(name).len() + value.as_str().len() + 4)
            .sum();
        let room = self.broker.max_payload().saturating_sub(headers_size + 256);
        let payload = if payload.len() > room {
            warn!(subject = %word.subject, "the dead letter leaves its message out: both are too large");
            headers.insert("Trommel-Left-Out", payload.len().to_string());
            Bytes::new()
        } else {
            payload
        };
        let id = format!("dead-{stream}-{}", word.sequence);
        let stored = self.publisher.publish(dead_subject, &id, payload, headers);
        stored.await?;
        self.tell_for_sure(word, Bytes::from_static(b"+TERM"))
            .await?;
        self.dead_letters.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
