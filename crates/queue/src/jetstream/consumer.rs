use std::num::NonZeroU32;
use std::time::Duration;

use async_nats::jetstream::consumer::{self, AckPolicy, IntoConsumerConfig, pull};
use serde_json::{Value, json};
use trommel_types::Stream;

use super::answers::ErrorCode;
use super::broker::Broker;
use crate::{QueueError, QueueErrorKind};

/// A durable consumer: whoever pulls by the same name shares its messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerSpec {
    /// Its name; see [`subject_token`](super::subject_token).
    pub durable: String,
    /// What it takes of the stream. In a work queue no two consumers may take the same.
    pub filter_subject: String,
    /// Time a delivery may stay unsettled before it is repeated.
    pub ack_wait: Duration,
    /// Deliveries that all who share the consumer may have in flight together.
    pub max_ack_pending: NonZeroU32,
    /// Time from delivery after which a delivery is extended no more, however long it is kept alive:
    /// work that hangs comes again elsewhere.
    pub max_work: Duration,
    /// Messages to ask for beyond what pulls wait for. Each counts as delivered and is handed out
    /// before repeats that become due meanwhile, so 0 keeps the order of the contract; see
    /// `design.md`.
    pub prefetch: usize,
    /// Whether a settle as done waits until the server has it. Costs a round trip; without it an ack
    /// that is lost costs a repeat.
    pub confirm_acks: bool,
}

impl ConsumerSpec {
    /// A consumer with an ack deadline of 30 s, 15 minutes of work at most, at most 1,000 deliveries in
    /// flight, no prefetch, and settles that are not confirmed.
    pub fn new(durable: impl Into<String>, filter_subject: impl Into<String>) -> Self {
        Self {
            durable: durable.into(),
            filter_subject: filter_subject.into(),
            ack_wait: Duration::from_secs(30),
            max_ack_pending: NonZeroU32::new(1000).expect("1000 is not zero"),
            max_work: crate::MAX_WORK,
            prefetch: 0,
            confirm_acks: false,
        }
    }
}

impl Broker {
    /// Creates a consumer, or brings the ack deadline and the most in flight of one up to date, without
    /// taking anything by it. Who scales workers by its backlog needs it before the first of them.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) when one of this name takes something else, or
    /// the broker does not answer.
    pub async fn ensure_consumer(
        &self,
        stream: Stream,
        spec: &ConsumerSpec,
    ) -> Result<(), QueueError> {
        let stream = self.stream_name(stream);
        let wanted = pull::Config {
            durable_name: Some(spec.durable.clone()),
            filter_subject: spec.filter_subject.clone(),
            ack_policy: AckPolicy::Explicit,
            ack_wait: spec.ack_wait,
            max_ack_pending: spec.max_ack_pending.get().into(),
            // Attempts are limited by the worker, which dead-letters: the server would leave the message.
            max_deliver: -1,
            ..pull::Config::default()
        };
        let api = format!("CONSUMER.INFO.{stream}.{}", spec.durable);
        let gone = [ErrorCode::CONSUMER_NOT_FOUND];
        if let Some(found) = self.ask::<consumer::Info>(&api, &json!({}), &gone).await? {
            let found = found.config;
            if found.filter_subject != spec.filter_subject
                || found.ack_policy != AckPolicy::Explicit
            {
                return Err(QueueError::new(
                    QueueErrorKind::Misconfigured,
                    format!(
                        "consumer {durable} of stream {stream} exists and takes {:?}, not {:?}; remove it \
                         (`nats consumer rm {stream} {durable}`) or choose another broker prefix",
                        found.filter_subject,
                        spec.filter_subject,
                        durable = spec.durable,
                    ),
                ));
            }
            if found.ack_wait == spec.ack_wait && found.max_ack_pending == wanted.max_ack_pending {
                return Ok(());
            }
        }
        let api = format!(
            "CONSUMER.CREATE.{stream}.{}.{}",
            spec.durable, spec.filter_subject
        );
        let question = json!({ "stream_name": stream, "config": wanted.into_consumer_config() });
        self.ask::<consumer::Info>(&api, &question, &[]).await?;
        Ok(())
    }

    /// Removes a durable consumer; returns whether there was one. What it had not settled stays in the
    /// stream for the next consumer of the same subjects.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn delete_consumer(&self, stream: Stream, durable: &str) -> Result<bool, QueueError> {
        let subject = format!("CONSUMER.DELETE.{}.{durable}", self.stream_name(stream));
        let gone = [ErrorCode::CONSUMER_NOT_FOUND, ErrorCode::STREAM_NOT_FOUND];
        let deleted: Option<Value> = self.ask(&subject, &json!({}), &gone).await?;
        Ok(deleted.is_some())
    }
}
