use std::time::Duration;

use async_nats::jetstream::stream::{self, DiscardPolicy, RetentionPolicy, StorageType};
use serde_json::{Value, json};
use tracing::{info, warn};
use trommel_types::Stream;

use super::answers::ErrorCode;
use super::broker::Broker;
use super::config::BrokerConfig;
use crate::{QueueError, QueueErrorKind};

/// The names of streams on the server.
pub(super) fn on_server(stream: Stream, prefix: &str) -> String {
    format!("{prefix}_{stream}").to_ascii_uppercase()
}

fn config_of(stream: Stream, config: &BrokerConfig) -> stream::Config {
    let prefix = &config.prefix;
    let tokens = match stream {
        Stream::Jobs => "*",
        _ => ">",
    };
    let wanted = stream::Config {
        name: on_server(stream, prefix),
        subjects: vec![format!("{prefix}.{stream}.{tokens}")],
        retention: RetentionPolicy::WorkQueue,
        storage: StorageType::File,
        discard: DiscardPolicy::New,
        num_replicas: config.replicas,
        duplicate_window: config.duplicate_window,
        max_messages: -1,
        max_bytes: -1,
        ..stream::Config::default()
    };
    // `BrokerConfig::problems` has excluded invalid values.
    let limit = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    match stream {
        Stream::Jobs => wanted,
        Stream::Tasks => stream::Config {
            max_messages: limit(config.tasks_max_messages),
            ..wanted
        },
        Stream::Tensors => stream::Config {
            max_bytes: limit(config.tensors_max_bytes),
            num_replicas: 1,
            storage: match config.tensors_in_memory {
                true => StorageType::Memory,
                false => StorageType::File,
            },
            ..wanted
        },
        Stream::Results => stream::Config {
            max_bytes: limit(config.results_max_bytes),
            ..wanted
        },
        Stream::Dead => stream::Config {
            retention: RetentionPolicy::Limits,
            discard: DiscardPolicy::Old,
            max_bytes: limit(config.dead_max_bytes),
            max_age: config.dead_max_age,
            duplicate_window: config.duplicate_window.min(config.dead_max_age),
            ..wanted
        },
    }
}

/// The name of the bucket of an installation.
pub(super) fn bucket_name(prefix: &str) -> String {
    format!("{prefix}-jobs")
}

/// The stream of the bucket.
fn bucket_config(config: &BrokerConfig) -> stream::Config {
    let bucket = bucket_name(&config.prefix);
    stream::Config {
        name: format!("KV_{bucket}"),
        subjects: vec![format!("$KV.{bucket}.>")],
        storage: StorageType::File,
        discard: DiscardPolicy::New,
        num_replicas: config.replicas,
        duplicate_window: Duration::from_secs(120),
        max_messages: -1,
        max_bytes: -1,
        max_messages_per_subject: 1,
        allow_rollup: true,
        deny_delete: true,
        allow_direct: true,
        ..stream::Config::default()
    }
}

impl Broker {
    /// Creates missing streams and the bucket. Existing ones are not changed; different limits are
    /// logged.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) if an existing stream has other subjects,
    /// or another retention, storage or discard policy; the error names stream, difference and
    /// remedy. [`AccountLimit`](QueueErrorKind::AccountLimit) if JetStream has no room for them.
    pub async fn ensure_streams(&self) -> Result<(), QueueError> {
        for stream in Stream::ALL {
            ensure(self, config_of(stream, self.config())).await?;
        }
        ensure(self, bucket_config(self.config())).await
    }

    /// The name of a stream on the server.
    pub fn stream_name(&self, stream: Stream) -> String {
        on_server(stream, &self.config().prefix)
    }
}

/// Recreates the stream with this name if it has gone.
pub(super) async fn ensure_one(broker: &Broker, stream: Stream) -> Result<(), QueueError> {
    ensure(broker, config_of(stream, broker.config())).await
}

pub(super) async fn ensure(broker: &Broker, wanted: stream::Config) -> Result<(), QueueError> {
    if let Some(found) = info(broker, &wanted.name).await? {
        return compare(&wanted, &found.config);
    }
    let api = format!("STREAM.CREATE.{}", wanted.name);
    let question = serde_json::to_value(&wanted).map_err(|error| {
        let message = format!("stream {} has no JSON form: {error}", wanted.name);
        QueueError::new(QueueErrorKind::Misconfigured, message)
    })?;
    // Another process may have been faster, with other settings.
    let taken = [ErrorCode::STREAM_NAME_EXIST];
    let created: Option<Value> = broker.ask(&api, &question, &taken).await?;
    match (created, info(broker, &wanted.name).await?) {
        (Some(_), _) => {
            info!(stream = wanted.name, "created the stream");
            Ok(())
        }
        (None, Some(found)) => compare(&wanted, &found.config),
        (None, None) => Err(QueueError::new(
            QueueErrorKind::Misconfigured,
            format!("stream {} was removed while it was created", wanted.name),
        )),
    }
}

async fn info(broker: &Broker, name: &str) -> Result<Option<stream::Info>, QueueError> {
    let gone = [ErrorCode::STREAM_NOT_FOUND];
    let api = format!("STREAM.INFO.{name}");
    broker.ask(&api, &json!({}), &gone).await
}

/// Refuses differences that would break the guarantees, and logs different limits.
fn compare(wanted: &stream::Config, found: &stream::Config) -> Result<(), QueueError> {
    let sorted = |subjects: &[String]| {
        let mut subjects = subjects.to_vec();
        subjects.sort_unstable();
        subjects.join(" ")
    };
    let matters = [
        (
            "retention",
            format!("{:?}", found.retention),
            format!("{:?}", wanted.retention),
        ),
        (
            "subjects",
            sorted(&found.subjects),
            sorted(&wanted.subjects),
        ),
        (
            "discard policy",
            format!("{:?}", found.discard),
            format!("{:?}", wanted.discard),
        ),
        (
            "storage",
            format!("{:?}", found.storage),
            format!("{:?}", wanted.storage),
        ),
    ];
    let differences: Vec<_> = matters
        .into_iter()
        .filter(|(_, found, wanted)| found != wanted)
        .map(|(what, found, wanted)| format!("{what} is {found}, not {wanted}"))
        .collect();
    if !differences.is_empty() {
        return Err(QueueError::new(
            QueueErrorKind::Misconfigured,
            format!(
                "stream {name} exists and differs: {}; remove it (`nats stream rm {name}` discards \
                 what it holds) or choose another broker prefix",
                differences.join(", "),
                name = wanted.name
            ),
        ));
    }
    let limits = [
        ("max_messages", found.max_messages, wanted.max_messages),
        ("max_bytes", found.max_bytes, wanted.max_bytes),
        (
            "replicas",
            found.num_replicas as i64,
            wanted.num_replicas as i64,
        ),
        (
            "max_age_seconds",
            found.max_age.as_secs() as i64,
            wanted.max_age.as_secs() as i64,
        ),
        (
            "duplicate_window_seconds",
            found.duplicate_window.as_secs() as i64,
            wanted.duplicate_window.as_secs() as i64,
        ),
    ];
    for (limit, found, wanted_limit) in limits {
        if found != wanted_limit {
            let stream = &wanted.name;
            warn!(%stream, limit, found, configured = wanted_limit, "the stream keeps its limit");
        }
    }
    Ok(())
}
