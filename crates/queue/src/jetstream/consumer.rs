use std::num::NonZeroU32;
use std::time::Duration;

use async_nats::jetstream::consumer::{self, AckPolicy, IntoConsumerConfig, pull};
use serde_json::{Value, json};
use trommel_types::Stream;

use super::answers::ErrorCode;
use super::broker::Broker;
use crate::{QueueError, QueueErrorKind};

/// A durable consumer: everyone who pulls with the same name shares its messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumerSpec {
    /// Its name; see [`subject_token`](super::subject_token).
    pub durable: String,
    /// Its subjects in the stream. In a work queue those of two consumers may not overlap.
    pub filter_subject: String,
    /// Time a delivery may stay unsettled before it is repeated.
    pub ack_wait: Duration,
    /// Most deliveries in flight over all processes that share the consumer.
    pub max_ack_pending: NonZeroU32,
    /// Time from delivery after which a delivery is no longer extended: work that hangs is
    /// redelivered elsewhere.
    pub max_work: Duration,
    /// Messages to request in addition to those that pulls wait for. Each counts as delivered and
    /// is handed out before repeats that become due meanwhile, so 0 preserves the order in the
    /// contract; see `design.md`.
    pub prefetch: usize,
    /// Whether settling as done waits for the server's confirmation. Costs a round trip; without it
    /// a lost ack costs a repeat.
    pub confirm_acks: bool,
}

impl ConsumerSpec {
    /// A consumer with an ack deadline of 30 s, at most 15 minutes of work, at most 1,000
    /// deliveries in flight, no prefetch, and unconfirmed settles.
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
    /// Creates a consumer, or updates the ack deadline and the limit in flight of an existing one,
    /// without pulling from it. Autoscaling by its backlog needs it before the first worker.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) if one with this name has other subjects,
    /// or the broker does not answer.
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
            // The worker limits attempts and dead-letters: the server would leave the message.
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

    /// Removes a durable consumer; returns whether it existed. Unsettled messages stay in the
    /// stream for the next consumer of the same subjects.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub async fn delete_consumer(&self, stream: Stream, durable: &str) -> Result<bool, QueueError> {
        let subject = format!("CONSUMER.DELETE.{}.{durable}", self.stream_name(stream));
        let gone = [ErrorCode::CONSUMER_NOT_FOUND, ErrorCode::STREAM_NOT_FOUND];
        let deleted: Option<Value> = self.ask(&subject, &json!({}), &gone).await?;
        Ok(deleted.is_some())
    }
}
