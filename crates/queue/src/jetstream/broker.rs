use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::response::Response;
use async_nats::jetstream::{Context, ErrorCode, consumer, context::ContextBuilder, stream};
use async_nats::{Client, HeaderMap};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::{info, warn};
use trommel_types::Message;

use super::backoff::Backoff;
use super::connect::{Link, check_version, open};
use super::consumer::ensure_consumer;
use super::kv::Kv;
use super::queue::{ConsumerSpec, JetStreamQueue, QueueSpec};
use super::streams::{self, StreamName};
use super::{BrokerConfig, ServerVersion};
use crate::{QueueError, QueueErrorKind};

/// Time the server may take for one answer.
pub(super) const ANSWER: Duration = Duration::from_secs(2);
/// Time a question is repeated before it is given up.
const PATIENCE: Duration = Duration::from_secs(15);

/// A connection to a NATS server with JetStream. Clones share it.
#[derive(Clone)]
pub struct Broker {
    inner: Arc<Inner>,
}

struct Inner {
    client: Client,
    context: Context,
    config: BrokerConfig,
    version: ServerVersion,
    link: Link,
}

/// One message of core NATS, heard by those who listen when it is sent.
#[derive(Debug, Clone)]
pub struct Event {
    /// Where it was sent.
    pub subject: String,
    /// What it says.
    pub payload: Bytes,
    /// Its headers, if it has any.
    pub headers: Option<HeaderMap>,
}

/// What a [`Broker::subscribe`] hears. It goes on after the connection was lost, without what was
/// said meanwhile.
pub struct Subscription {
    subscriber: async_nats::Subscriber,
}

impl Subscription {
    /// The next event; `None` when the broker was drained. Cancel-safe.
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

/// What a stream holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamStats {
    /// Messages, those in flight included.
    pub messages: u64,
    /// Their bytes as stored.
    pub bytes: u64,
    /// Sequence of the oldest one.
    pub first_sequence: u64,
    /// Sequence of the newest one that was ever stored.
    pub last_sequence: u64,
}

/// What a durable consumer has before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConsumerStats {
    /// Messages never delivered so far.
    pub waiting: u64,
    /// Messages delivered and not settled, those whose retry is delayed included.
    pub in_flight: u64,
    /// Of those in flight, the ones that were delivered more than once.
    pub redelivered: u64,
    /// Sequence up to which all messages are settled.
    pub settled_up_to: u64,
}

impl Broker {
    /// Connects, as `name` in the server's monitoring, and makes sure that the broker can be used.
    /// Afterwards the connection is made again whenever it is lost, for ever.
    ///
    /// # Errors
    /// [`Unreachable`](QueueErrorKind::Unreachable), [`Refused`](QueueErrorKind::Refused),
    /// [`Unsupported`](QueueErrorKind::Unsupported) (a server that is too old, or without JetStream)
    /// or [`Misconfigured`](QueueErrorKind::Misconfigured); each names what to change.
    pub async fn connect(config: &BrokerConfig, name: &str) -> Result<Self, QueueError> {
        config.validate()?;
        let url = config.redacted_url();
        let (client, link) = open(config, name).await?;
        let context = ContextBuilder::new()
            .timeout(ANSWER)
            .ack_timeout(ANSWER)
            .build(client.clone());
        let version = check_version(&client.server_info().version, config.replicas, &url)?;
        let broker = Self {
            inner: Arc::new(Inner {
                client,
                context,
                config: config.clone(),
                version,
                link,
            }),
        };
        broker.check_jetstream(&url).await?;
        info!(%url, %version, max_payload = broker.max_payload(), "connected to the broker");
        Ok(broker)
    }

    /// Creates the streams and the bucket that are absent. One that exists stays as it is: what it
    /// limits differently is logged.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) when an existing stream takes other subjects
    /// or has another retention, storage or discard policy; the error names stream, difference and
    /// remedy.
    pub async fn ensure_streams(&self) -> Result<(), QueueError> {
        streams::ensure_all(self).await
    }

    /// A queue on one of the streams. Creates its consumer if absent; of one that exists only the
    /// ack deadline and the most it may have in flight are brought up to date.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) when the consumer cannot be made or one of
    /// its name takes something else.
    pub async fn queue<T: Message>(
        &self,
        spec: QueueSpec<T>,
    ) -> Result<JetStreamQueue<T>, QueueError> {
        JetStreamQueue::open(self, spec).await
    }

    /// The bucket of job records, checkpoints and leases.
    ///
    /// # Errors
    /// When it is not there: call [`Broker::ensure_streams`] first.
    pub async fn kv(&self) -> Result<Kv, QueueError> {
        Kv::open(self).await
    }

    /// Removes a durable consumer; says whether there was one. What it had not settled stays in the
    /// stream for the next consumer of the same subjects.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn delete_consumer(
        &self,
        stream: StreamName,
        durable: &str,
    ) -> Result<bool, QueueError> {
        let subject = format!("CONSUMER.DELETE.{}.{durable}", self.stream_name(stream));
        let gone = [ErrorCode::CONSUMER_NOT_FOUND, ErrorCode::STREAM_NOT_FOUND];
        let deleted: Option<Value> = self.ask(&subject, &json!({}), &gone).await?;
        Ok(deleted.is_some())
    }

    /// Removes all messages of a stream whose subject matches; says how many.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn purge_subject(
        &self,
        stream: StreamName,
        subject: &str,
    ) -> Result<u64, QueueError> {
        let api = format!("STREAM.PURGE.{}", self.stream_name(stream));
        let gone = [ErrorCode::STREAM_NOT_FOUND];
        let purged: Option<Value> = self.ask(&api, &json!({ "filter": subject }), &gone).await?;
        Ok(purged
            .and_then(|purged| purged["purged"].as_u64())
            .unwrap_or(0))
    }

    /// What a durable consumer has before it; `None` when it does not exist.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn consumer_stats(
        &self,
        stream: StreamName,
        durable: &str,
    ) -> Result<Option<ConsumerStats>, QueueError> {
        let subject = format!("CONSUMER.INFO.{}.{durable}", self.stream_name(stream));
        let gone = [ErrorCode::CONSUMER_NOT_FOUND, ErrorCode::STREAM_NOT_FOUND];
        let info: Option<consumer::Info> = self.ask(&subject, &json!({}), &gone).await?;
        Ok(info.map(|info| ConsumerStats {
            waiting: info.num_pending,
            in_flight: info.num_ack_pending as u64,
            redelivered: info.num_redelivered as u64,
            settled_up_to: info.ack_floor.stream_sequence,
        }))
    }

    /// What a stream holds; `None` when it does not exist.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn stream_stats(
        &self,
        stream: StreamName,
    ) -> Result<Option<StreamStats>, QueueError> {
        let subject = format!("STREAM.INFO.{}", self.stream_name(stream));
        let gone = [ErrorCode::STREAM_NOT_FOUND];
        let info: Option<stream::Info> = self.ask(&subject, &json!({}), &gone).await?;
        Ok(info.map(|info| StreamStats {
            messages: info.state.messages,
            bytes: info.state.bytes,
            first_sequence: info.state.first_sequence,
            last_sequence: info.state.last_sequence,
        }))
    }

    /// Messages of a stream whose subject matches.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn subject_count(
        &self,
        stream: StreamName,
        subject: &str,
    ) -> Result<u64, QueueError> {
        let api = format!("STREAM.INFO.{}", self.stream_name(stream));
        let gone = [ErrorCode::STREAM_NOT_FOUND];
        let (mut count, mut offset) = (0, 0);
        loop {
            let question = json!({ "subjects_filter": subject, "offset": offset });
            let info: Option<Value> = self.ask(&api, &question, &gone).await?;
            // The server answers a page of subjects at a time.
            let page = info.as_ref().map(|info| &info["state"]["subjects"]);
            let Some(subjects) = page.and_then(Value::as_object) else {
                return Ok(count);
            };
            count += subjects.values().filter_map(Value::as_u64).sum::<u64>();
            offset += subjects.len();
            let total = info.as_ref().and_then(|info| info["total"].as_u64());
            if subjects.is_empty() || offset as u64 >= total.unwrap_or(0) {
                return Ok(count);
            }
        }
    }

    /// Tells all who listen now. Nobody listening is no error.
    ///
    /// # Errors
    /// [`TooLarge`](QueueErrorKind::TooLarge), or a subject that is none.
    pub async fn publish_event(
        &self,
        subject: &str,
        payload: Bytes,
        headers: HeaderMap,
    ) -> Result<(), QueueError> {
        let published =
            self.inner
                .client
                .publish_with_headers(subject.to_owned(), headers, payload);
        published.await.map_err(|error| {
            let kind = match error.kind() {
                async_nats::client::PublishErrorKind::MaxPayloadExceeded => {
                    QueueErrorKind::TooLarge
                }
                _ => QueueErrorKind::Misconfigured,
            };
            QueueError::new(kind, format!("failed to send event {subject}: {error}"))
        })
    }

    /// Listens to a subject, wildcards included. Messages on their way to a stream are heard too.
    ///
    /// # Errors
    /// A subject that is none.
    pub async fn subscribe(&self, subject: &str) -> Result<Subscription, QueueError> {
        match self.inner.client.subscribe(subject.to_owned()).await {
            Ok(subscriber) => Ok(Subscription { subscriber }),
            Err(error) => Err(QueueError::new(
                QueueErrorKind::Misconfigured,
                format!("failed to subscribe to {subject}: {error}"),
            )),
        }
    }

    /// Waits until the server has got all that was sent: settled deliveries and events.
    ///
    /// # Errors
    /// When the connection is closed.
    pub async fn flush(&self) -> Result<(), QueueError> {
        self.inner.client.flush().await.map_err(|error| {
            QueueError::new(
                QueueErrorKind::Unreachable,
                format!("failed to flush: {error}"),
            )
        })
    }

    /// Sends what is to be sent and closes the connection. All clones end.
    ///
    /// # Errors
    /// When the connection is closed already.
    pub async fn drain(&self) -> Result<(), QueueError> {
        self.inner.client.drain().await.map_err(|error| {
            QueueError::new(
                QueueErrorKind::Unreachable,
                format!("failed to drain: {error}"),
            )
        })
    }

    /// Bytes of the largest message, headers included, that the server takes.
    pub fn max_payload(&self) -> usize {
        self.inner.client.max_payload()
    }

    /// The version of the server at the time of connecting.
    pub fn server_version(&self) -> ServerVersion {
        self.inner.version
    }

    /// The connection itself, for what this crate has no words for (a NATS service).
    pub fn client(&self) -> &Client {
        &self.inner.client
    }

    /// Creates a consumer, or brings the ack deadline and the most in flight of one up to date, without
    /// taking anything by it. Who scales workers by its backlog needs it before the first of them.
    ///
    /// # Errors
    /// When one of this name takes something else, or the broker does not answer.
    pub async fn ensure_consumer(
        &self,
        stream: StreamName,
        spec: &ConsumerSpec,
    ) -> Result<(), QueueError> {
        ensure_consumer(self, stream, spec).await
    }

    /// Whether the connection is up at this moment.
    pub fn is_connected(&self) -> bool {
        self.inner.client.connection_state() == async_nats::connection::State::Connected
    }

    /// What it was connected by.
    pub fn config(&self) -> &BrokerConfig {
        &self.inner.config
    }

    /// The name of a stream on the server.
    pub fn stream_name(&self, stream: StreamName) -> String {
        stream.on_server(&self.inner.config.prefix)
    }

    /// A subject under the prefix: `subject("tasks.high")` is `trommel.tasks.high`.
    pub fn subject(&self, rest: &str) -> String {
        format!("{}.{rest}", self.inner.config.prefix)
    }

    pub(super) fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(super) fn link(&self) -> &Link {
        &self.inner.link
    }

    /// Asks the JetStream API, again for a while if nobody answers. An error among `absent` is `None`.
    pub(super) async fn ask<R: DeserializeOwned>(
        &self,
        subject: &str,
        question: &Value,
        absent: &[ErrorCode],
    ) -> Result<Option<R>, QueueError> {
        let give_up = Instant::now() + PATIENCE;
        let mut backoff = Backoff::new();
        loop {
            let asked = self.inner.context.request(subject.to_owned(), question);
            let reason = match asked.await {
                Ok(Response::Ok(answer)) => return Ok(Some(answer)),
                Ok(Response::Err { error }) if absent.contains(&error.error_code()) => {
                    return Ok(None);
                }
                Ok(Response::Err { error }) if error.code() < 500 => {
                    return Err(QueueError::new(
                        QueueErrorKind::Misconfigured,
                        format!("broker refused {subject}: {error}"),
                    ));
                }
                Ok(Response::Err { error }) => error.to_string(),
                Err(error) => error.to_string(),
            };
            if Instant::now() >= give_up {
                return Err(QueueError::new(
                    QueueErrorKind::Unreachable,
                    format!("broker does not answer {subject}: {reason}"),
                ));
            }
            if backoff.warn_now() {
                warn!(subject, %reason, "the broker does not answer, asking again");
            }
            backoff.wait().await;
        }
    }

    /// Makes sure that JetStream is there. A cluster that is choosing its leader is waited for.
    async fn check_jetstream(&self, url: &str) -> Result<(), QueueError> {
        use async_nats::jetstream::context::AccountErrorKind as Kind;
        let give_up = Instant::now() + PATIENCE;
        let mut backoff = Backoff::new();
        loop {
            let Err(error) = self.inner.context.query_account().await else {
                return Ok(());
            };
            let off = match error.kind() {
                Kind::JetStreamUnavailable => true,
                Kind::JetStream(error) => [
                    ErrorCode::JETSTREAM_NOT_ENABLED,
                    ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT,
                ]
                .contains(&error.error_code()),
                Kind::TimedOut | Kind::Other => false,
            };
            if off {
                return Err(QueueError::new(
                    QueueErrorKind::Unsupported,
                    format!(
                        "JetStream is not enabled on {url}: start nats-server with -js, or enable \
                         it for this account"
                    ),
                ));
            }
            if Instant::now() >= give_up {
                return Err(QueueError::new(
                    QueueErrorKind::Unreachable,
                    format!("JetStream on {url} does not answer: {error}"),
                ));
            }
            if backoff.warn_now() {
                warn!(%url, %error, "JetStream does not answer, asking again");
            }
            backoff.wait().await;
        }
    }
}
