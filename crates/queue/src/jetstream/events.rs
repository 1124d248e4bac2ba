//! Messages of core NATS, received by current subscribers.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::client::PublishErrorKind;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::time::timeout;

use super::answers::{check_size, check_subject};
use super::broker::Broker;
use super::connect::Interruption;
use crate::{QueueError, QueueErrorKind};

/// Time for the client library to report a denial after the server has sent it.
const DENIAL_WITHIN: Duration = Duration::from_millis(50);

/// A message of core NATS, received by current subscribers.
#[derive(Debug, Clone)]
pub struct Event {
    /// Its subject.
    pub subject: String,
    /// Its payload.
    pub payload: Bytes,
    /// Its headers, if it has any.
    pub headers: Option<HeaderMap>,
}

/// The subscription of [`Broker::subscribe`]. It continues after a lost connection, without the
/// messages sent meanwhile.
pub struct Subscription {
    subscriber: async_nats::Subscriber,
}

impl Subscription {
    /// The next event; `None` once the broker is drained. Cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        StreamExt::next(self).await
    }
}

impl Stream for Subscription {
    type Item = Event;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Event>> {
        self.subscriber.poll_next_unpin(cx).map(|message| {
            message.map(|message| Event {
                subject: message.subject.to_string(),
                payload: message.payload,
                headers: message.headers,
            })
        })
    }
}

impl Broker {
    /// Sends to all current subscribers. Having none is not an error, and a denied subject is only
    /// logged: nothing waits for an answer.
    ///
    /// # Errors
    /// [`TooLarge`](QueueErrorKind::TooLarge), or an invalid subject.
    pub async fn publish_event(
        &self,
        subject: &str,
        payload: Bytes,
        headers: HeaderMap,
    ) -> Result<(), QueueError> {
        check_subject(subject)?;
        check_size(subject, &headers, payload.len(), self.max_payload())?;
        let client = self.client();
        let published = client.publish_with_headers(subject.to_owned(), headers, payload);
        published.await.map_err(|error| {
            let kind = match error.kind() {
                PublishErrorKind::MaxPayloadExceeded => QueueErrorKind::TooLarge,
                _ => QueueErrorKind::Misconfigured,
            };
            QueueError::new(kind, format!("failed to send event {subject}: {error}"))
        })
    }

    /// Subscribes to a subject, wildcards included. This includes messages on their way to a
    /// stream.
    ///
    /// # Errors
    /// An invalid subject, or one that the server denies ([`Forbidden`](QueueErrorKind::Forbidden)).
    pub async fn subscribe(&self, subject: &str) -> Result<Subscription, QueueError> {
        check_subject(subject)?;
        let begun = self.link().now();
        let subscribed = self.client().subscribe(subject.to_owned()).await;
        let subscriber = subscribed.map_err(|error| {
            let message = format!("failed to subscribe to {subject}: {error}");
            QueueError::new(QueueErrorKind::Misconfigured, message)
        })?;
        // The server confirms nothing: it denies, or stays silent. A denial precedes its answer to
        // the flush.
        if self.link().is_up() && self.flush().await.is_ok() {
            let denied = self
                .link()
                .interrupted(begun, |denial| denial.subject == subject);
            if let Ok(Interruption::Denied(error)) = timeout(DENIAL_WITHIN, denied).await {
                return Err(error);
            }
        }
        Ok(Subscription { subscriber })
    }
}
