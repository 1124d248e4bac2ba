//! Requests over core NATS, which are not stored.

use std::collections::HashSet;
use std::time::Duration;

use async_nats::client::RequestErrorKind;
use async_nats::{HeaderMap, Message, Subscriber};
use bytes::Bytes;
use futures::{FutureExt, StreamExt};

use super::answers::{check_size, check_subject, too_large};
use super::broker::Broker;
use super::connect::{ANSWER, Interruption};
use crate::origin::trace_headers;
use crate::{Origin, QueueError, QueueErrorKind};

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answered {
    /// This is the reply.
    With(Bytes),
    /// There are no responders.
    ByNobody,
    /// No reply came in time, or the connection was lost.
    Not,
}

/// A received request, to be answered once.
pub struct Request {
    message: Message,
    broker: Broker,
}

impl Request {
    /// Its payload.
    pub fn payload(&self) -> &Bytes {
        &self.message.payload
    }

    /// A header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        let value = self.message.headers.as_ref()?.get(name)?;
        Some(value.as_str())
    }

    /// Its trace.
    pub fn origin(&self) -> Origin {
        Origin::of(self.message.headers.as_ref(), None)
    }

    /// Replies. A request without a reply subject gets none.
    ///
    /// # Errors
    /// [`TooLarge`](QueueErrorKind::TooLarge), or an invalid subject of the reply.
    pub async fn answer(self, payload: Bytes) -> Result<(), QueueError> {
        let Some(reply) = self.message.reply else {
            return Ok(());
        };
        self.broker
            .publish_event(&reply, payload, HeaderMap::new())
            .await
    }
}

/// The requests on a subject that this process shares with others of its group. Dropping it loses
/// those on their way; [`Requests::leave`] does not.
pub struct Requests {
    subscriber: Subscriber,
    subject: String,
    broker: Broker,
}

impl Requests {
    /// The next one; `None` once the broker is drained. Cancel-safe.
    pub async fn next(&mut self) -> Option<Request> {
        let message = self.subscriber.next().await?;
        Some(self.request(message))
    }

    /// The next one that has already arrived.
    pub fn next_now(&mut self) -> Option<Request> {
        self.next().now_or_never().flatten()
    }

    /// Leaves the group. Returns the requests that arrived and were not taken, each of which must
    /// be answered; a request that is delivered to another process at this moment may be among
    /// them, and is answered by both.
    ///
    /// # Errors
    /// If the connection is closed.
    pub async fn leave(mut self) -> Result<Vec<Request>, QueueError> {
        let copies = self.broker.copies(&[self.subject.clone()]).await?;
        self.subscriber.unsubscribe().await.map_err(closed)?;
        let mut messages = Vec::new();
        while let Some(message) = self.subscriber.next().await {
            messages.push(message);
        }
        let missed = copies.not_among(&messages).await?;
        messages.extend(missed);
        let Self { broker, .. } = self;
        let request = |message| Request {
            message,
            broker: broker.clone(),
        };
        Ok(messages.into_iter().map(request).collect())
    }

    fn request(&self, message: Message) -> Request {
        Request {
            message,
            broker: self.broker.clone(),
        }
    }
}

/// Copies of all requests on some subjects, regardless of who answers them.
///
/// The client library forgets a subscription as soon as it is to end, with the messages that the
/// server has sent and nobody has read. Copies received meanwhile reveal them.
pub struct Copies {
    subscribers: Vec<Subscriber>,
    broker: Broker,
}

impl Copies {
    /// The requests since the start of the copies that are not in `taken`: call it once the ending
    /// subscriptions have ended, with everything that they received.
    ///
    /// # Errors
    /// If the connection is closed.
    pub async fn not_among<'a>(
        self,
        taken: impl IntoIterator<Item = &'a Message>,
    ) -> Result<Vec<Message>, QueueError> {
        self.broker.round_trip().await;
        let replies: HashSet<&str> = taken
            .into_iter()
            .filter_map(|message| message.reply.as_deref())
            .collect();
        let mut missed = Vec::new();
        for mut subscriber in self.subscribers {
            subscriber.unsubscribe().await.map_err(closed)?;
            while let Some(message) = subscriber.next().await {
                let waits = message.reply.as_deref();
                if waits.is_some_and(|reply| !replies.contains(reply)) {
                    missed.push(message);
                }
            }
        }
        Ok(missed)
    }
}

impl Broker {
    /// Sends a request to a subject, in the trace of the current span, and waits up to `limit` for
    /// the reply.
    ///
    /// # Errors
    /// Permanent errors: a subject that is invalid or denied, or a payload that is too large.
    pub async fn ask_once(
        &self,
        subject: &str,
        headers: &[(&str, &str)],
        payload: Bytes,
        limit: Duration,
    ) -> Result<Answered, QueueError> {
        check_subject(subject)?;
        if !self.is_connected() {
            return Ok(Answered::Not); // the client would send it when nobody waits any more
        }
        let mut all = trace_headers();
        for (name, value) in headers {
            all.insert(*name, *value);
        }
        check_size(subject, &all, payload.len(), self.max_payload())?;
        let begun = self.link().now();
        let size = payload.len();
        let request = async_nats::client::Request {
            payload: Some(payload),
            headers: Some(all),
            timeout: Some(Some(limit)),
            inbox: None,
        };
        let is_ours = |denial: &super::denial::Denial| denial.subject == subject;
        let answer = tokio::select! {
            answer = self.client().send_request(subject.to_owned(), request) => answer,
            interruption = self.link().interrupted(begun, is_ours) => return match interruption {
                Interruption::Lost => Ok(Answered::Not),
                Interruption::Denied(error) => Err(error),
            },
        };
        let error = match answer {
            Ok(message) => return Ok(Answered::With(message.payload)),
            Err(error) => error,
        };
        match error.kind() {
            RequestErrorKind::NoResponders => Ok(Answered::ByNobody),
            RequestErrorKind::TimedOut | RequestErrorKind::Other => Ok(Answered::Not),
            RequestErrorKind::MaxPayloadExceeded => {
                Err(too_large(subject, size, self.max_payload()))
            }
            RequestErrorKind::InvalidSubject => Err(QueueError::new(
                QueueErrorKind::Misconfigured,
                format!("subject {subject:?} is invalid"),
            )),
        }
    }

    /// Shares the requests on a subject with all processes in the same group.
    ///
    /// # Errors
    /// An invalid subject, or one that the server denies ([`Forbidden`](QueueErrorKind::Forbidden)).
    pub async fn requests(&self, subject: &str, group: &str) -> Result<Requests, QueueError> {
        check_subject(subject)?;
        let subscribed = self
            .client()
            .queue_subscribe(subject.to_owned(), group.to_owned());
        let subscriber = subscribed.await.map_err(|error| {
            let message = format!("failed to subscribe to {subject}: {error}");
            QueueError::new(QueueErrorKind::Misconfigured, message)
        })?;
        self.check_subscriptions(subject).await?;
        Ok(Requests {
            subscriber,
            subject: subject.to_owned(),
            broker: self.clone(),
        })
    }

    /// Receives all requests on these subjects from now on.
    ///
    /// # Errors
    /// If the connection is closed.
    pub async fn copies(&self, subjects: &[String]) -> Result<Copies, QueueError> {
        let mut subscribers = Vec::with_capacity(subjects.len());
        for subject in subjects {
            let subscribed = self.client().subscribe(subject.clone()).await;
            subscribers.push(subscribed.map_err(closed)?);
        }
        self.round_trip().await;
        Ok(Copies {
            subscribers,
            broker: self.clone(),
        })
    }

    /// Waits until the server has processed what it was sent before, and what it had sent by then
    /// has been passed on. Gives up with the connection.
    async fn round_trip(&self) {
        if !self.is_connected() {
            return;
        }
        // Every user may send this. Without JetStream there is no responder, which is an answer
        // too.
        let request = async_nats::client::Request {
            payload: Some(Bytes::new()),
            headers: None,
            timeout: Some(Some(ANSWER)),
            inbox: None,
        };
        let asked = self.client().send_request("$JS.API.INFO", request).await;
        if let Err(error) = asked {
            tracing::debug!(%error, "the broker gave no account of itself");
        }
    }
}

fn closed(error: impl std::fmt::Display) -> QueueError {
    QueueError::new(
        QueueErrorKind::Unreachable,
        format!("the connection to the broker is closed: {error}"),
    )
}
