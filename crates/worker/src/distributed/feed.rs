//! Images that come as events: notifications of S3-compatible stores, published to NATS
//! (<https://docs.aws.amazon.com/AmazonS3/latest/userguide/notification-content-structure.html>).

use std::collections::VecDeque;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use trommel_queue::{Feed, Held};
use trommel_storage::{Found, SourceOptions, StorageError};
use trommel_types::{Column, ColumnKind, Content, Scalar};

/// What a source that is a subject of events begins with.
const SCHEME: &str = "nats://";
/// Time between two looks for new events.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// The subject of events that a job's sources name, if they do.
pub(crate) fn subject_of(sources: &[String]) -> Option<&str> {
    match sources {
        [source] => source.strip_prefix(SCHEME),
        _ => None,
    }
}

/// The columns of rows that events lead to.
pub(crate) fn columns() -> Vec<Column> {
    ["event_name", "event_time", "event_id"]
        .map(|name| Column {
            name: name.to_owned(),
            kind: ColumnKind::String,
        })
        .into()
}

/// What the place in the feed is noted as, once an image of it is published: its event's id.
pub(crate) fn mark(found: &Found) -> String {
    match found.columns.last() {
        Some(Scalar::String(id)) => id.clone(),
        _ => String::new(),
    }
}

/// A notification, as AWS and the stores that follow it write it.
#[derive(Deserialize)]
struct Notification {
    #[serde(rename = "Records", default)]
    records: Vec<Record>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    event_name: String,
    #[serde(default)]
    event_time: String,
    s3: Entity,
}

#[derive(Deserialize)]
struct Entity {
    bucket: Bucket,
    object: Object,
}

#[derive(Deserialize)]
struct Bucket {
    name: String,
}

#[derive(Deserialize)]
struct Object {
    /// Percent-encoded, as in a query.
    key: String,
    size: Option<u64>,
    #[serde(rename = "eTag")]
    etag: Option<String>,
}

/// The images of a feed behind the mark of the last one that was published. Never ends.
pub(crate) fn images(
    feed: Feed,
    last: Option<&str>,
    options: SourceOptions,
) -> BoxStream<'static, Result<Found, StorageError>> {
    let last = last.and_then(|mark| {
        let (sequence, record) = mark.split_once('.')?;
        Some((sequence.parse::<u64>().ok()?, record.parse::<usize>().ok()?))
    });
    let state = State {
        feed,
        next: last.map_or(0, |(sequence, _)| sequence),
        passed: last,
        found: VecDeque::new(),
        options,
    };
    stream::unfold(state, |mut state| async {
        let found = state.next_image().await;
        Some((Ok(found), state))
    })
    .boxed()
}

struct State {
    feed: Feed,
    /// Sequence of the next message to look at.
    next: u64,
    /// The last record that was published.
    passed: Option<(u64, usize)>,
    found: VecDeque<Found>,
    options: SourceOptions,
}

impl State {
    async fn next_image(&mut self) -> Found {
        loop {
            if let Some(found) = self.found.pop_front() {
                return found;
            }
            match self.feed.first_from(self.next).await {
                Ok(Some(held)) => {
                    self.next = held.sequence + 1;
                    self.found = images_of(&held, &self.options, self.passed).into();
                }
                Ok(None) => tokio::time::sleep(LOOK_EVERY).await,
                Err(error) => {
                    tracing::warn!(%error, "events are looked for again");
                    tokio::time::sleep(LOOK_EVERY).await;
                }
            }
        }
    }
}

/// The images that an event tells of: objects that were created, of the suffixes and sizes asked for.
fn images_of(held: &Held, options: &SourceOptions, passed: Option<(u64, usize)>) -> Vec<Found> {
    let notification: Notification = match serde_json::from_slice(&held.payload) {
        Ok(notification) => notification,
        Err(error) => {
            tracing::warn!(subject = held.subject, sequence = held.sequence, %error,
                "an event is no S3 notification and is passed over");
            return Vec::new();
        }
    };
    let records = notification.records.into_iter().enumerate();
    let images = records.filter_map(|(number, record)| {
        let is_new = passed.is_none_or(|passed| (held.sequence, number) > passed);
        let name = record.event_name.trim_start_matches("s3:");
        if !is_new || !name.starts_with("ObjectCreated:") {
            return None;
        }
        let Object { key, size, etag } = record.s3.object;
        let key = percent_decode_str(&key.replace('+', " "))
            .decode_utf8_lossy()
            .into_owned();
        if !options.takes(&key, size) {
            return None;
        }
        let id = format!("{}.{number}", held.sequence);
        Some(Found {
            uri: format!("s3://{}/{key}", record.s3.bucket.name),
            content: Content::Whole,
            etag: etag.map(|etag| etag.trim_matches('"').to_owned()),
            size,
            columns: [record.event_name, record.event_time, id]
                .map(Scalar::String)
                .into(),
        })
    });
    images.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, keys: &[&str]) -> Held {
        let records: Vec<_> = keys
            .iter()
            .map(|key| {
                serde_json::json!({
                    "eventName": name,
                    "eventTime": "2026-11-21T08:00:00.000Z",
                    "s3": {"bucket": {"name": "in"}, "object": {"key": key, "size": 9, "eTag": "\"e\""}},
                })
            })
            .collect();
        Held {
            sequence: 7,
            subject: "events".to_owned(),
            stored_at: 0,
            headers: Default::default(),
            payload: serde_json::json!({"EventName": name, "Records": records})
                .to_string()
                .into(),
        }
    }

    fn uris(held: &Held, passed: Option<(u64, usize)>) -> Vec<String> {
        let images = images_of(held, &SourceOptions::default(), passed);
        images.into_iter().map(|found| found.uri).collect()
    }

    #[test]
    fn objects_that_were_created_are_images() {
        let held = event(
            "s3:ObjectCreated:Put",
            &["a+b/%C3%BC.jpg", "notes.txt", "c.png"],
        );
        assert_eq!(uris(&held, None), ["s3://in/a b/ü.jpg", "s3://in/c.png"]);
        assert_eq!(uris(&held, Some((7, 0))), ["s3://in/c.png"]);
        assert_eq!(uris(&held, Some((7, 2))), Vec::<String>::new());
        let found = images_of(&held, &SourceOptions::default(), None).remove(1);
        assert_eq!((found.etag.as_deref(), found.size), (Some("e"), Some(9)));
        assert_eq!(mark(&found), "7.2");
    }

    #[test]
    fn everything_else_is_passed_over() {
        assert!(uris(&event("s3:ObjectRemoved:Delete", &["a.jpg"]), None).is_empty());
        let noise = Held {
            payload: "no json".into(),
            ..event("", &[])
        };
        assert!(uris(&noise, None).is_empty());
    }
}
