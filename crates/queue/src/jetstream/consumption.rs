use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::{Message, StatusCode, Subject, Subscriber};
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};
use trommel_types::Stream;

use super::backoff::Backoff;
use super::broker::Broker;
use super::connect::{Begun, Interruption};
use super::consumer::ConsumerSpec;
use super::denial::Denial;
use super::lease::{Lease, lock};
use super::streams::ensure_one;
use crate::{QueueError, QueueErrorKind};

/// Time that a request for messages is valid at the server. A lost request is noticed a second
/// later.
const REQUEST_STANDS: Duration = Duration::from_secs(3);
const REQUEST_GRACE: Duration = Duration::from_secs(1);
/// Most bytes per request. Above every `max_payload` (64 MiB at most, and rare), as the server
/// would otherwise return nothing for such a request.
const REQUEST_BYTES: usize = 16 << 20;

/// The receiving side of a queue: requests as many messages from the server as pulls wait for, and
/// keeps surplus ones.
///
/// A server sends what was requested even if the requester is gone. So a separate task requests and
/// receives, and a pull only takes from what has arrived: dropping it loses nothing.
pub(super) struct Consumption {
    state: Mutex<State>,
    /// Notified when a pull begins to wait.
    wanted: Notify,
    /// Notified when messages have arrived.
    came: Notify,
}

#[derive(Default)]
struct State {
    buffer: VecDeque<Received>,
    buffered_bytes: usize,
    /// Number of messages that the waiting pulls would take.
    wanted: usize,
    /// When the last of them gives up.
    until: Option<Instant>,
    /// A denial by the server, for the next pull to report.
    denied: Option<QueueError>,
}

/// A received message.
pub(super) struct Received {
    pub(super) message: Message,
    pub(super) reply: Subject,
    pub(super) lease: Arc<Lease>,
}

impl Consumption {
    /// Creates the consumer and starts receiving. Ends, returning unclaimed messages, once `closed`
    /// is true or its sender is gone.
    pub(super) async fn start(
        broker: &Broker,
        stream: Stream,
        spec: &ConsumerSpec,
        closed: watch::Receiver<bool>,
    ) -> Result<Arc<Self>, QueueError> {
        broker.ensure_consumer(stream, spec).await?;
        let consumption = Arc::new(Self {
            state: Mutex::default(),
            wanted: Notify::new(),
            came: Notify::new(),
        });
        let (inbox, subscriber) = subscribe(broker).await?;
        let receiver = Receiver {
            consumption: Arc::clone(&consumption),
            broker: broker.clone(),
            stream,
            spec: spec.clone(),
            ask_on: format!(
                "$JS.API.CONSUMER.MSG.NEXT.{}.{}",
                broker.stream_name(stream),
                spec.durable
            )
            .into(),
            inbox,
            subscriber,
            closed,
            asked: 0,
            asked_until: Instant::now(),
            not_before: Instant::now(),
            backoff: Backoff::new(),
            check_consumer: false,
            begun: broker.link().now(),
        };
        tokio::spawn(receiver.run());
        Ok(consumption)
    }

    /// Takes up to `limit` received messages, waiting until `end` for the first. Cancel-safe.
    ///
    /// # Errors
    /// If the server denies a permission to receive or to settle.
    pub(super) async fn take(
        &self,
        limit: usize,
        end: Instant,
    ) -> Result<Vec<Received>, QueueError> {
        let mut waiting = None;
        loop {
            let mut came = std::pin::pin!(self.came.notified());
            came.as_mut().enable(); // from here on no arrival goes unseen
            let (taken, more) = self.take_now(limit);
            if more {
                self.came.notify_one(); // one notice may stand for many messages
            }
            if !taken.is_empty() {
                return Ok(taken);
            }
            if let Some(denied) = lock(&self.state).denied.take() {
                return Err(denied);
            }
            if Instant::now() >= end {
                return Ok(taken);
            }
            waiting.get_or_insert_with(|| Waiting::new(self, limit, end));
            // Timed out or not: check again.
            drop(tokio::time::timeout_at(end, came).await);
        }
    }

    fn take_now(&self, limit: usize) -> (Vec<Received>, bool) {
        let mut state = lock(&self.state);
        let mut taken = Vec::with_capacity(limit.min(state.buffer.len()));
        while taken.len() < limit
            && let Some(received) = state.pop()
        {
            // Expired messages here are on their way to another delivery.
            if !received.lease.left().is_zero() {
                taken.push(received);
            }
        }
        (taken, !state.buffer.is_empty())
    }
}

impl State {
    fn push(&mut self, received: Received) {
        self.buffered_bytes += received.message.payload.len();
        self.buffer.push_back(received);
    }

    fn pop(&mut self) -> Option<Received> {
        let received = self.buffer.pop_front()?;
        self.buffered_bytes -= received.message.payload.len();
        Some(received)
    }
}

/// A waiting pull; its messages are requested while this lives.
struct Waiting<'a> {
    consumption: &'a Consumption,
    limit: usize,
}

impl<'a> Waiting<'a> {
    fn new(consumption: &'a Consumption, limit: usize, end: Instant) -> Self {
        {
            let mut state = lock(&consumption.state);
            state.wanted += limit;
            state.until = Some(state.until.map_or(end, |until| until.max(end)));
        }
        consumption.wanted.notify_one();
        Self { consumption, limit }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.consumption.state);
        state.wanted -= self.limit;
        if state.wanted == 0 {
            state.until = None;
        }
    }
}

/// Why a [`Receiver`] stops waiting.
enum Happened {
    Message(Option<Message>),
    /// A pull has begun to wait.
    Wanted,
    Interrupted(Interruption),
    Closed,
    Nothing,
}

/// The task behind a [`Consumption`].
struct Receiver {
    consumption: Arc<Consumption>,
    broker: Broker,
    stream: Stream,
    spec: ConsumerSpec,
    ask_on: Subject,
    inbox: Subject,
    subscriber: Subscriber,
    closed: watch::Receiver<bool>,
    /// Requested messages that have not arrived, as far as known.
    asked: usize,
    /// When the last request expires at the server.
    asked_until: Instant,
    /// Earliest time of the next request, after a failed one.
    not_before: Instant,
    backoff: Backoff,
    /// The consumer may no longer exist.
    check_consumer: bool,
    begun: Begun,
}

impl Receiver {
    async fn run(mut self) {
        let link = self.broker.link().clone();
        let acks = format!(
            "$JS.ACK.{}.{}.",
            self.broker.stream_name(self.stream),
            self.spec.durable
        );
        let ask_on = self.ask_on.clone();
        let concerns =
            |denial: &Denial| denial.subject == *ask_on || denial.subject.starts_with(&acks);
        loop {
            if self.check_consumer && Instant::now() >= self.not_before && link.is_up() {
                self.restore_consumer().await;
            }
            self.ask().await;
            let next = self.next_look();
            let consumption = Arc::clone(&self.consumption);
            let happened = tokio::select! {
                message = self.subscriber.next() => Happened::Message(message),
                () = consumption.wanted.notified() => Happened::Wanted,
                interruption = link.interrupted(self.begun, concerns) => {
                    Happened::Interrupted(interruption)
                }
                _ = self.closed.wait_for(|closed| *closed) => Happened::Closed,
                () = sleep_until(next) => Happened::Nothing,
            };
            match happened {
                Happened::Message(Some(message)) => self.receive(message),
                Happened::Message(None) => return, // the client is closed
                Happened::Wanted => {}
                Happened::Interrupted(Interruption::Lost) => {
                    // The server forgets requests of a lost connection.
                    self.begun = link.up().await;
                    self.asked = 0;
                }
                Happened::Interrupted(Interruption::Denied(error)) => {
                    self.begun = link.now();
                    self.asked = 0;
                    self.not_before = Instant::now() + self.backoff.step();
                    lock(&self.consumption.state).denied = Some(error);
                    self.consumption.came.notify_one();
                }
                Happened::Closed => break,
                Happened::Nothing => {
                    self.give_back(|received| received.lease.is_below(0.5))
                        .await
                }
            }
        }
        self.close().await;
    }

    /// Requests the messages that are waited for and neither here nor on their way.
    async fn ask(&mut self) {
        let now = Instant::now();
        if self.asked > 0 && now >= self.asked_until {
            debug!(consumer = self.spec.durable, "a request was lost");
            self.asked = 0;
            self.check_consumer = true;
        }
        let (wanted, until) = {
            let state = lock(&self.consumption.state);
            let wanted = match state.wanted {
                0 => 0,
                wanted => wanted + self.spec.prefetch,
            };
            let here = state.buffer.len() + self.asked;
            let full = state.buffered_bytes >= REQUEST_BYTES;
            let wanted = if full { 0 } else { wanted.saturating_sub(here) };
            (wanted, state.until.unwrap_or(now))
        };
        let stands = until.saturating_duration_since(now).min(REQUEST_STANDS);
        if wanted == 0 || now < self.not_before || stands.is_zero() || !self.broker.link().is_up() {
            return;
        }
        let request = json!({
            "batch": wanted,
            "max_bytes": REQUEST_BYTES.max(2 * self.broker.max_payload()),
            // The server treats a request that ends at once as one that does not wait.
            "expires": stands.max(Duration::from_millis(5)).as_nanos() as u64,
        });
        let client = self.broker.client();
        let asked = client.publish_with_reply(
            self.ask_on.clone(),
            self.inbox.clone(),
            Bytes::from(request.to_string()),
        );
        if asked.await.is_ok() {
            self.asked += wanted;
            self.asked_until = self.asked_until.max(now + stands + REQUEST_GRACE);
        }
    }

    /// When to check again without any event.
    fn next_look(&self) -> Instant {
        let now = Instant::now();
        let state = lock(&self.consumption.state);
        let mut next = now + Duration::from_secs(60);
        if let Some(oldest) = state.buffer.front() {
            next = next.min(oldest.lease.deadline() - self.spec.ack_wait / 2);
        }
        if state.wanted > 0 {
            if self.asked > 0 {
                next = next.min(self.asked_until);
            }
            if now < self.not_before {
                next = next.min(self.not_before);
            }
            if !self.broker.link().is_up() {
                next = next.min(now + Duration::from_millis(100));
            }
        }
        next.max(now + Duration::from_millis(1))
    }

    /// Receives a message and all that arrived with it.
    fn receive(&mut self, first: Message) {
        let mut next = Some(first);
        let mut came = false;
        while let Some(message) = next {
            match message.status {
                None | Some(StatusCode::OK) => {
                    if let Some(reply) = message.reply.clone() {
                        self.asked = self.asked.saturating_sub(1);
                        self.backoff = Backoff::new();
                        let lease = Lease::new(self.spec.ack_wait, self.spec.max_work);
                        let lease = Arc::new(lease);
                        lock(&self.consumption.state).push(Received {
                            message,
                            reply,
                            lease,
                        });
                        came = true;
                    }
                }
                Some(status) => self.request_ended(status, &message),
            }
            next = self.subscriber.next().now_or_never().flatten();
        }
        if came {
            self.consumption.came.notify_one();
        }
    }

    fn request_ended(&mut self, status: StatusCode, message: &Message) {
        if status == StatusCode::IDLE_HEARTBEAT {
            return;
        }
        let unsent = message
            .headers
            .as_ref()
            .and_then(|headers| headers.get("Nats-Pending-Messages"))
            .and_then(|pending| pending.as_str().parse().ok());
        self.asked = unsent.map_or(0, |unsent| self.asked.saturating_sub(unsent));
        let text = message.description.as_deref().unwrap_or_default();
        let usual = status == StatusCode::TIMEOUT
            || status == StatusCode::NOT_FOUND
            || text.starts_with("Message Size Exceeds")
            || text.starts_with("Batch Completed");
        if !usual {
            self.check_consumer = true;
            self.not_before = Instant::now() + self.backoff.step();
            if self.backoff.warn_now() {
                let consumer = &self.spec.durable;
                warn!(%consumer, %status, text, "the broker ended a request for messages, asking again");
            }
        }
    }

    async fn restore_consumer(&mut self) {
        let restored = async {
            ensure_one(&self.broker, self.stream).await?;
            self.broker.ensure_consumer(self.stream, &self.spec).await
        };
        match restored.await {
            Ok(()) => {
                self.check_consumer = false;
                self.asked = 0;
            }
            Err(error) => {
                self.not_before = Instant::now() + self.backoff.step();
                if self.backoff.warn_now() {
                    let consumer = &self.spec.durable;
                    warn!(%consumer, %error, "the consumer cannot be restored, trying again");
                }
            }
        }
    }

    /// Returns unclaimed messages to the server, so that others get them at once.
    async fn give_back(&self, which: impl Fn(&Received) -> bool) {
        loop {
            let received = {
                let mut state = lock(&self.consumption.state);
                if !state.buffer.front().is_some_and(&which) {
                    return;
                }
                state.pop()
            };
            let Some(received) = received else { return };
            let nak = Bytes::from_static(b"-NAK");
            // If the return is lost, the message is repeated after the ack deadline.
            drop(self.broker.client().publish(received.reply, nak).await);
        }
    }

    async fn close(mut self) {
        // Messages that arrived before the server knew are still read.
        drop(self.subscriber.unsubscribe().await);
        drop(tokio::time::timeout(Duration::from_secs(1), self.broker.client().flush()).await);
        while let Some(Some(message)) = self.subscriber.next().now_or_never() {
            self.receive(message);
        }
        self.give_back(|_| true).await;
        drop(self.broker.client().flush().await);
    }
}

async fn subscribe(broker: &Broker) -> Result<(Subject, Subscriber), QueueError> {
    let inbox: Subject = broker.client().new_inbox().into();
    match broker.client().subscribe(inbox.clone()).await {
        Ok(subscriber) => Ok((inbox, subscriber)),
        Err(error) => Err(QueueError::new(
            QueueErrorKind::Unreachable,
            format!("failed to subscribe to {inbox}: {error}"),
        )),
    }
}
