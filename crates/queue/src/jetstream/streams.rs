use std::fmt;

use async_nats::jetstream::stream::{self, DiscardPolicy, RetentionPolicy, StorageType};
use async_nats::jetstream::{ErrorCode, kv};
use serde_json::{Value, json};
use tracing::{info, warn};

use super::{Broker, BrokerConfig};
use crate::{QueueError, QueueErrorKind};

/// The streams of an installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamName {
    /// Jobs to be listed: `trommel.jobs.<lane>`.
    Jobs,
    /// Images to be prepared: `trommel.tasks.<lane>`.
    Tasks,
    /// Tensors to be classified: `trommel.tensors.<model>.<lane>`.
    Tensors,
    /// Results to be stored: `trommel.results.<job>.<model>`.
    Results,
    /// What could not be worked on: `trommel.dead.<stage>.<job>`.
    Dead,
}

impl StreamName {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Jobs,
        Self::Tasks,
        Self::Tensors,
        Self::Results,
        Self::Dead,
    ];

    /// The word in subjects: `tasks`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Jobs => "jobs",
            Self::Tasks => "tasks",
            Self::Tensors => "tensors",
            Self::Results => "results",
            Self::Dead => "dead",
        }
    }

    /// The stage that publishes into it, as metrics name it.
    pub(super) fn publisher(self) -> &'static str {
        match self {
            Self::Jobs => "submit",
            Self::Tasks => "ingest",
            Self::Tensors => "preprocess",
            Self::Results => "infer",
            Self::Dead => "dead",
        }
    }

    pub(super) fn on_server(self, prefix: &str) -> String {
        format!("{prefix}_{}", self.as_str()).to_ascii_uppercase()
    }

    fn config(self, config: &BrokerConfig) -> stream::Config {
        let prefix = &config.prefix;
        let tokens = match self {
            Self::Jobs | Self::Tasks => "*",
            Self::Tensors | Self::Results | Self::Dead => ">",
        };
        let wanted = stream::Config {
            name: self.on_server(prefix),
            subjects: vec![format!("{prefix}.{}.{tokens}", self.as_str())],
            retention: RetentionPolicy::WorkQueue,
            storage: StorageType::File,
            discard: DiscardPolicy::New,
            num_replicas: config.replicas,
            duplicate_window: config.duplicate_window,
            max_messages: -1,
            max_bytes: -1,
            ..stream::Config::default()
        };
        // `BrokerConfig::problems` has ruled out what does not fit.
        let limit = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        match self {
            Self::Jobs => wanted,
            Self::Tasks => stream::Config {
                max_messages: limit(config.tasks_max_messages),
                ..wanted
            },
            Self::Tensors => stream::Config {
                max_bytes: limit(config.tensors_max_bytes),
                num_replicas: 1,
                ..wanted
            },
            Self::Results => stream::Config {
                max_bytes: limit(config.results_max_bytes),
                ..wanted
            },
            Self::Dead => stream::Config {
                retention: RetentionPolicy::Limits,
                discard: DiscardPolicy::Old,
                max_age: config.dead_max_age,
                duplicate_window: config.duplicate_window.min(config.dead_max_age),
                ..wanted
            },
        }
    }
}

impl fmt::Display for StreamName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The name of the bucket of an installation.
pub(super) fn bucket_name(prefix: &str) -> String {
    format!("{prefix}-jobs")
}

pub(super) async fn ensure_all(broker: &Broker) -> Result<(), QueueError> {
    for stream in StreamName::ALL {
        ensure(broker, stream.config(broker.config())).await?;
    }
    let bucket = bucket_name(&broker.config().prefix);
    if info(broker, &format!("KV_{bucket}")).await?.is_some() {
        return Ok(());
    }
    let config = kv::Config {
        bucket: bucket.clone(),
        history: 1,
        storage: StorageType::File,
        num_replicas: broker.config().replicas,
        ..kv::Config::default()
    };
    if let Err(error) = broker.context().create_key_value(config).await
        // Another process may have been faster.
        && info(broker, &format!("KV_{bucket}")).await?.is_none()
    {
        return Err(QueueError::new(
            QueueErrorKind::Misconfigured,
            format!("failed to create bucket {bucket}: {error}"),
        ));
    }
    info!(bucket, "created the bucket");
    Ok(())
}

/// Creates the stream of this name again if it has gone.
pub(super) async fn ensure_one(broker: &Broker, stream: StreamName) -> Result<(), QueueError> {
    ensure(broker, stream.config(broker.config())).await
}

async fn ensure(broker: &Broker, wanted: stream::Config) -> Result<(), QueueError> {
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

/// Refuses what would break the guarantees, and logs limits that differ.
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
