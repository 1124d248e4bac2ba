use std::sync::Arc;
use std::time::Duration;

use async_nats::client::{Request, RequestErrorKind};
use async_nats::jetstream::{Context, context::ContextBuilder};
use async_nats::{Client, HeaderMap, Message};
use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use super::answers::{ErrorCode, Refusal, Verdict, check_subject, too_large};
use super::backoff::Backoff;
use super::config::BrokerConfig;
use super::connect::{ANSWER, Begun, Interruption, Link, check_version, open};
use super::denial::Denial;
use crate::{QueueError, QueueErrorKind};

/// Time for the client library to report an error of the server.
const SETTLING: Duration = Duration::from_millis(50);
/// Time for which a request is repeated before it fails.
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
    link: Link,
}

/// The result of a request.
pub(super) enum Reply {
    Answer(Message),
    /// There are no responders.
    Nobody,
    /// No answer, with the reason.
    Silence(String),
}

/// A response of the JetStream API.
#[derive(Deserialize)]
#[serde(untagged)]
enum Answer<T> {
    Refused { error: Refusal },
    Given(T),
}

impl Broker {
    /// Connects, as `name` in the server's monitoring, and checks that the broker can be used. A
    /// lost connection is re-established, indefinitely.
    ///
    /// # Errors
    /// [`Unreachable`](QueueErrorKind::Unreachable), [`Refused`](QueueErrorKind::Refused),
    /// [`Forbidden`](QueueErrorKind::Forbidden),
    /// [`Unsupported`](QueueErrorKind::Unsupported) (a server that is too old, or without JetStream)
    /// or [`Misconfigured`](QueueErrorKind::Misconfigured); each names what to change.
    pub async fn connect(config: &BrokerConfig, name: &str) -> Result<Self, QueueError> {
        let broker = Self::connect_core(config, name).await?;
        broker.check_jetstream(&config.redacted_url()).await?;
        Ok(broker)
    }

    /// As [`Broker::connect`], for core NATS only: the server need not have JetStream.
    ///
    /// # Errors
    /// As [`Broker::connect`].
    pub async fn connect_core(config: &BrokerConfig, name: &str) -> Result<Self, QueueError> {
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
                link,
            }),
        };
        info!(%url, %version, max_payload = broker.max_payload(), "connected to the broker");
        Ok(broker)
    }

    /// Waits until the server has received everything sent: settled deliveries and events.
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

    /// Sends pending data and closes the connection. All clones end.
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

    /// Largest message that the server accepts, including headers, in bytes.
    pub fn max_payload(&self) -> usize {
        self.inner.client.max_payload()
    }

    /// The connection itself, for features without a wrapper here (a NATS service).
    pub fn client(&self) -> &Client {
        &self.inner.client
    }

    /// Whether the connection is up now.
    pub fn is_connected(&self) -> bool {
        self.inner.client.connection_state() == async_nats::connection::State::Connected
    }

    /// Its configuration.
    pub fn config(&self) -> &BrokerConfig {
        &self.inner.config
    }

    /// A subject under the prefix: `subject("tasks.high")` is `trommel.tasks.high`.
    pub fn subject(&self, rest: &str) -> String {
        format!("{}.{rest}", self.inner.config.prefix)
    }

    /// The client library's JetStream context.
    pub(super) fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(super) fn link(&self) -> &Link {
        &self.inner.link
    }

    /// Waits until the server has processed all subscriptions of this connection, and reports one
    /// that it denies.
    ///
    /// # Errors
    /// [`Forbidden`](QueueErrorKind::Forbidden) if it denies one below `prefix`.
    pub async fn check_subscriptions(&self, prefix: &str) -> Result<(), QueueError> {
        self.flush().await?;
        tokio::time::sleep(SETTLING).await;
        let is_ours = |denial: &Denial| denial.subject.starts_with(prefix);
        match self.inner.link.denied(is_ours) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Sends one request, once the connection is up, and waits for its answer.
    ///
    /// # Errors
    /// Permanent errors: a subject that is invalid, too long or denied, or a payload that is too
    /// large.
    pub(super) async fn request(
        &self,
        subject: &str,
        headers: Option<HeaderMap>,
        payload: Bytes,
    ) -> Result<Reply, QueueError> {
        check_subject(subject)?;
        // While the connection is down the client would queue every repeat.
        let begun = self.inner.link.up().await;
        let size = payload.len();
        let request = Request {
            payload: Some(payload),
            headers,
            timeout: Some(Some(ANSWER)),
            inbox: None,
        };
        let is_ours = |denial: &Denial| denial.subject == subject;
        let answer = tokio::select! {
            answer = self.inner.client.send_request(subject.to_owned(), request) => answer,
            interruption = self.inner.link.interrupted(begun, is_ours) => {
                return match interruption {
                    Interruption::Lost => Ok(Reply::Silence("the connection was lost".to_owned())),
                    Interruption::Denied(error) => Err(error),
                };
            }
        };
        let error = match answer {
            Ok(message) => return Ok(Reply::Answer(message)),
            Err(error) => error,
        };
        match error.kind() {
            RequestErrorKind::NoResponders => Ok(Reply::Nobody),
            RequestErrorKind::TimedOut | RequestErrorKind::Other => {
                Ok(Reply::Silence(error.to_string()))
            }
            RequestErrorKind::MaxPayloadExceeded => {
                Err(too_large(subject, size, self.max_payload()))
            }
            RequestErrorKind::InvalidSubject => Err(QueueError::new(
                QueueErrorKind::Misconfigured,
                format!("subject {subject:?} is invalid"),
            )),
        }
    }

    /// Calls the JetStream API, and retries for a while without an answer. An error among `absent` is `None`.
    pub(super) async fn ask<R: DeserializeOwned>(
        &self,
        subject: &str,
        question: &Value,
        absent: &[ErrorCode],
    ) -> Result<Option<R>, QueueError> {
        let api = format!("$JS.API.{subject}");
        let question = Bytes::from(question.to_string());
        let give_up = Instant::now() + PATIENCE;
        let mut backoff = Backoff::new();
        loop {
            let asked = timeout_at(give_up, self.request(&api, None, question.clone())).await;
            let reason = match asked {
                Ok(reply) => match reply? {
                    Reply::Answer(message) => match serde_json::from_slice(&message.payload) {
                        Ok(Answer::Given(answer)) => return Ok(Some(answer)),
                        Ok(Answer::Refused { error }) if error.is(absent) => return Ok(None),
                        Ok(Answer::Refused { error }) => match error.verdict() {
                            Verdict::Busy => error.description,
                            Verdict::AccountLimit => return Err(error.account_limit(subject)),
                            _ => {
                                let text =
                                    format!("broker refused {subject}: {}", error.description);
                                return Err(QueueError::new(QueueErrorKind::Misconfigured, text));
                            }
                        },
                        Err(error) => format!("invalid answer: {error}"),
                    },
                    Reply::Nobody => "no answer".to_owned(),
                    Reply::Silence(reason) => reason,
                },
                Err(_) => "the connection is down".to_owned(),
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

    /// Waits for an operation that the client library performs with its own requests about a
    /// stream; `None` if the connection has been lost since `begun`.
    ///
    /// # Errors
    /// If the server denies one of those requests.
    pub(super) async fn uninterrupted<T>(
        &self,
        begun: Begun,
        stream: &str,
        work: impl Future<Output = T>,
    ) -> Result<Option<T>, QueueError> {
        let is_ours = |denial: &Denial| {
            let mut tokens = denial.subject.split('.');
            tokens.next() == Some("$JS") && tokens.any(|token| token == stream)
        };
        tokio::select! {
            done = work => Ok(Some(done)),
            interruption = self.inner.link.interrupted(begun, is_ours) => match interruption {
                Interruption::Lost => Ok(None),
                Interruption::Denied(error) => Err(error),
            },
        }
    }

    /// Checks for JetStream. Waits while a cluster elects its leader.
    async fn check_jetstream(&self, url: &str) -> Result<(), QueueError> {
        let off = || {
            let text = format!(
                "JetStream is not enabled on {url}: start nats-server with -js, or enable it for this \
                 account"
            );
            QueueError::new(QueueErrorKind::Unsupported, text)
        };
        if let Reply::Nobody = self.request("$JS.API.INFO", None, Bytes::new()).await? {
            return Err(off());
        }
        let disabled = [ErrorCode::NOT_ENABLED, ErrorCode::NOT_ENABLED_FOR_ACCOUNT];
        let account: Option<Value> = self.ask("INFO", &json!({}), &disabled).await?;
        account.map(drop).ok_or_else(off)
    }
}
