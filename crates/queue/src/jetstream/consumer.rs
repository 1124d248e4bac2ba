use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::consumer::{self, AckPolicy, IntoConsumerConfig, pull};
use serde_json::json;

use super::queue::ConsumerSpec;
use super::{Broker, StreamName};
use crate::{QueueError, QueueErrorKind};

/// Creates the consumer, or brings the ack deadline and the most in flight of one up to date.
pub(super) async fn ensure_consumer(
    broker: &Broker,
    stream: StreamName,
    spec: &ConsumerSpec,
) -> Result<(), QueueError> {
    let stream = broker.stream_name(stream);
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
    if let Some(found) = broker
        .ask::<consumer::Info>(&api, &json!({}), &gone)
        .await?
    {
        let found = found.config;
        if found.filter_subject != spec.filter_subject || found.ack_policy != AckPolicy::Explicit {
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
    broker.ask::<consumer::Info>(&api, &question, &[]).await?;
    Ok(())
}
