use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_nats::{HeaderMap, Subject};
use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};
use trommel_types::Message;

use super::broker::{Broker, Reply};
use super::lease::{Keeper, Lease};
use super::publish::Publisher;
use super::spec::QueueSpec;
use crate::delivery::Handle;
use crate::{Disposition, KeepAlive, QueueError};

/// Bytes of a message in its dead letter; a larger one is reduced to what identifies it.
const DEAD_PAYLOAD: usize = 64 << 10;
/// Longest reason in a dead letter, in bytes.
const DEAD_REASON: usize = 1024;

/// The shared state of a queue and its deliveries.
pub(super) struct Shared<T> {
    pub(super) broker: Broker,
    pub(super) spec: QueueSpec<T>,
    pub(super) publisher: Publisher,
    pub(super) keeper: Option<Arc<Keeper>>,
    pub(super) dead_letters: AtomicU64,
}

/// A delivery of a JetStream consumer.
pub(super) struct JetStreamHandle<T> {
    pub(super) shared: Arc<Shared<T>>,
    pub(super) message: Arc<T>,
    pub(super) receipt: Receipt,
}

/// The state needed to settle a delivery.
pub(super) struct Receipt {
    pub(super) reply: Subject,
    pub(super) subject: Subject,
    /// The id that the message was published with.
    pub(super) id: Option<String>,
    pub(super) lease: Arc<Lease>,
    pub(super) attempt: u32,
    /// The message's sequence in its stream.
    pub(super) sequence: u64,
}

#[async_trait]
impl<T: Message> Handle for JetStreamHandle<T> {
    async fn settle(self: Box<Self>, disposition: Disposition) -> Result<(), QueueError> {
        self.receipt.lease.check(self.receipt.attempt)?;
        match disposition {
            Disposition::Done if !self.shared.confirm_acks() => {
                let ack = Bytes::from_static(b"+ACK");
                self.shared.send(&self.receipt, ack).await
            }
            Disposition::Done => {
                let ack = Bytes::from_static(b"+ACK");
                self.shared.confirm(&self.receipt, ack).await
            }
            Disposition::Retry { after } => {
                // Confirmed, so that a following pull comes after it.
                let nanos = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
                let nak = match nanos {
                    0 => "-NAK".to_owned(),
                    _ => format!(r#"-NAK {{"delay":{nanos}}}"#),
                };
                self.shared.confirm(&self.receipt, nak.into()).await
            }
            Disposition::DeadLetter { reason } => {
                let dead_subject = (self.shared.spec.dead_subject)(&self.message);
                let payload = Bytes::from(self.message.encode_remains());
                // A truncated message does not decode; headers and subject identify it.
                let payload = Some(payload).filter(|payload| payload.len() <= DEAD_PAYLOAD);
                self.shared
                    .dead_letter(&self.receipt, &dead_subject, &reason, payload)
                    .await
            }
        }
    }

    async fn extend(&self) -> Result<(), QueueError> {
        self.receipt.lease.check(self.receipt.attempt)?;
        if !self.receipt.lease.may_be_extended() {
            return Err(QueueError::expired(self.receipt.attempt));
        }
        let asked_at = Instant::now();
        let progress = Bytes::from_static(b"+WPI");
        self.shared.send(&self.receipt, progress).await?;
        self.receipt.lease.renew(asked_at);
        Ok(())
    }

    fn keep_alive(&self) -> KeepAlive {
        let (reply, lease) = (self.receipt.reply.clone(), Arc::clone(&self.receipt.lease));
        match &self.shared.keeper {
            Some(keeper) => KeepAlive::new(keeper.guard(reply, lease)),
            None => KeepAlive::new(()),
        }
    }
}

impl<T> Shared<T> {
    /// The ack deadline of a delivery; `None` without a consumer.
    fn ack_wait(&self) -> Duration {
        let consumer = self.spec.consumer.as_ref();
        consumer.map_or(Duration::ZERO, |consumer| consumer.ack_wait)
    }

    fn confirm_acks(&self) -> bool {
        let consumer = self.spec.consumer.as_ref();
        consumer.is_some_and(|consumer| consumer.confirm_acks)
    }

    /// Sends an ack without waiting for the server. If it is lost, the message is repeated.
    async fn send(&self, receipt: &Receipt, ack: Bytes) -> Result<(), QueueError> {
        // This fails only if the client is closed, or its buffers stay full.
        let sent = self.broker.client().publish(receipt.reply.clone(), ack);
        match timeout(receipt.lease.left(), sent).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(QueueError::expired(receipt.attempt)),
        }
    }

    /// Sends an ack until the server confirms it, at most until the deadline, and no longer than
    /// the ack deadline: a server that crashed may have forgotten the delivery, and then never
    /// answers, however long it is kept alive here.
    async fn confirm(&self, receipt: &Receipt, ack: Bytes) -> Result<(), QueueError> {
        let start = Instant::now();
        loop {
            receipt.lease.check(receipt.attempt)?;
            let patience = self.ack_wait().saturating_sub(start.elapsed());
            if patience.is_zero() {
                return Err(QueueError::expired(receipt.attempt));
            }
            let confirmed = self.broker.request(&receipt.reply, None, ack.clone());
            match timeout(receipt.lease.left().min(patience), confirmed).await {
                Ok(Ok(Reply::Answer(_))) => return Ok(()),
                Ok(Ok(Reply::Nobody | Reply::Silence(_))) => {
                    sleep(Duration::from_millis(50)).await;
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => return Err(QueueError::expired(receipt.attempt)),
            }
        }
    }

    /// Stores a dead letter, then terminates the message. A crash between the two repeats both, and
    /// the second letter is dropped as a duplicate. Without a payload it notes that the message was
    /// left out.
    pub(super) async fn dead_letter(
        &self,
        receipt: &Receipt,
        dead_subject: &str,
        reason: &str,
        payload: Option<Bytes>,
    ) -> Result<(), QueueError> {
        let _kept = self
            .keeper
            .as_ref()
            .map(|keeper| keeper.guard(receipt.reply.clone(), Arc::clone(&receipt.lease)));
        let stream = self.broker.stream_name(self.spec.stream);
        let mut headers = HeaderMap::new();
        headers.insert("Trommel-Reason", header_text(reason));
        headers.insert("Trommel-Attempt", receipt.attempt.to_string());
        headers.insert("Trommel-Subject", receipt.subject.as_str());
        headers.insert("Trommel-Stream", stream.as_str());
        headers.insert("Trommel-Sequence", receipt.sequence.to_string());
        if let Some(id) = &receipt.id {
            headers.insert("Trommel-Id", id.as_str());
        }
        let payload = payload.unwrap_or_else(|| {
            headers.insert("Trommel-Left-Out", "message");
            Bytes::new()
        });
        let id = format!("dead-{stream}-{}", receipt.sequence);
        let stored = self.publisher.publish(dead_subject, &id, payload, headers);
        stored.await?;
        self.confirm(receipt, Bytes::from_static(b"+TERM")).await?;
        self.dead_letters.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Dead-letters malformed bytes; for long ones, the first bytes show what they were.
    pub(super) async fn malformed(
        &self,
        receipt: &Receipt,
        reason: &str,
        payload: Bytes,
    ) -> Result<(), QueueError> {
        let stage = format!("dead.malformed.{}", self.spec.stream);
        let payload = payload.slice(..payload.len().min(DEAD_PAYLOAD));
        self.dead_letter(receipt, &self.broker.subject(&stage), reason, Some(payload))
            .await
    }
}

/// The start of a text as a single line for a header.
fn header_text(text: &str) -> String {
    let end = text.floor_char_boundary(DEAD_REASON);
    let (kept, cut) = text.split_at(end);
    let kept = kept.replace(|c: char| c.is_control(), " ");
    if cut.is_empty() {
        return kept;
    }
    format!("{kept}… ({} bytes more)", cut.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R16: a reason of any length becomes a header.
    #[test]
    fn a_reason_becomes_one_short_line() {
        assert_eq!(header_text("two\r\nlines"), "two  lines");
        let long = header_text(&"ä".repeat(50_000));
        assert!(long.len() < DEAD_REASON + 40, "{}", long.len());
        assert!(long.ends_with("ä… (98976 bytes more)"), "{long}");
    }
}
