//! Images from events: notifications of S3-compatible stores, published to NATS
//! (<https://docs.aws.amazon.com/AmazonS3/latest/userguide/notification-content-structure.html>).

use std::collections::VecDeque;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use trommel_queue::{Feed, FeedReader, Held, LIVE_FRAME_TIME};
use trommel_source::{Found, SourceOptions};
use trommel_storage::StorageError;
use trommel_types::{Column, ColumnKind, Content, Scalar};

/// Prefix of a source that is a subject of events.
const SCHEME: &str = "nats://";
/// Time to wait for the next event, and after an error.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The subject of events in a job's sources, if there is one.
pub(crate) fn subject_of(sources: &[String]) -> Option<&str> {
    match sources {
        [source] => source.strip_prefix(SCHEME),
        _ => None,
    }
}

/// The columns that events add to rows.
pub(crate) fn columns() -> Vec<Column> {
    ["event_name", "event_time", "event_id"]
        .map(|name| Column {
            name: name.to_owned(),
            kind: ColumnKind::String,
        })
        .into()
}

/// The position in the feed after an image is published: its event's id.
pub(crate) fn mark(found: &Found) -> String {
    match found.columns.last() {
        Some(Scalar::String(id)) => id.clone(),
        _ => String::new(),
    }
}

/// A notification in the format of AWS, which other stores follow.
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
    /// Percent-encoded, as in a query string.
    key: String,
    size: Option<u64>,
    #[serde(rename = "eTag")]
    etag: Option<String>,
}

/// The images of a feed after the position of the last published one. Never ends.
pub(crate) fn images(
    feed: Feed,
    last: Option<&str>,
    options: SourceOptions,
) -> BoxStream<'static, Result<Found, StorageError>> {
    let last = last.and_then(|mark| {
        let (sequence, record) = mark.split_once('.')?;
        Some((sequence.parse::<u64>().ok()?, record.parse::<usize>().ok()?))
    });
    // The last message may contain records that were not published.
    let after = last.map_or(0, |(sequence, _)| sequence.saturating_sub(1));
    let state = State {
        feed: feed.read_after(after),
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
    feed: FeedReader,
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
            match self.feed.next(LOOK_EVERY).await {
                Ok(Some(held)) => self.found = images_of(&held, &self.options, self.passed).into(),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "events are looked for again");
                    tokio::time::sleep(LOOK_EVERY).await;
                }
            }
        }
    }
}

/// Whether a subject belongs to a live source, `….live.SOURCE`, whose messages are frames.
fn is_live(subject: &str) -> bool {
    subject.rsplit('.').nth(1) == Some("live")
}

/// The images in an event: created objects with the requested suffixes and sizes.
fn images_of(held: &Held, options: &SourceOptions, passed: Option<(u64, usize)>) -> Vec<Found> {
    if is_live(&held.subject) {
        return frame_of(held, options, passed).into_iter().collect();
    }
    let notification: Notification = match serde_json::from_slice(&held.payload) {
        Ok(notification) => notification,
        Err(error) => {
            tracing::warn!(subject = held.subject, sequence = held.sequence, %error,
                "skipped an event that is not an S3 notification");
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

/// The event for a message that is itself an image.
const FRAME: &str = "Frame";

/// An image that is itself the message, such as a frame of a live source.
fn frame_of(held: &Held, options: &SourceOptions, passed: Option<(u64, usize)>) -> Option<Found> {
    let size = held.payload.len() as u64;
    let is_new = passed.is_none_or(|passed| (held.sequence, 0) > passed);
    if !is_new || !options.takes_size(Some(size)) {
        return None;
    }
    let time = held
        .headers
        .get(LIVE_FRAME_TIME)
        .map_or("", |time| time.as_str());
    let id = format!("{}.0", held.sequence);
    Some(Found {
        uri: format!("{SCHEME}{}#{}", held.subject, held.sequence),
        content: Content::Inline(held.payload.to_vec()),
        etag: None,
        size: Some(size),
        columns: [FRAME, time, &id]
            .map(|text| Scalar::String(text.to_owned()))
            .into(),
    })
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

    /// A message that is not an image gets a failed row, like any other file.
    #[test]
    fn a_message_of_a_live_source_is_an_image() {
        let mut frame = event("", &[]);
        frame.subject = "trommel.live.cam1".into();
        frame.payload = "a camera that sends text".into();
        frame.headers.insert(LIVE_FRAME_TIME, "1795000000000");
        let found = images_of(&frame, &SourceOptions::default(), None).remove(0);
        assert_eq!(found.uri, "nats://trommel.live.cam1#7");
        assert_eq!(found.content, Content::Inline(frame.payload.to_vec()));
        assert_eq!(mark(&found), "7.0");
        assert!(uris(&frame, Some((7, 0))).is_empty());
        let large = SourceOptions {
            min_size: Some(1000),
            ..SourceOptions::default()
        };
        assert!(images_of(&frame, &large, None).is_empty());
    }

    #[test]
    fn everything_else_is_passed_over() {
        assert!(uris(&event("s3:ObjectRemoved:Delete", &["a.jpg"]), None).is_empty());
        for payload in ["{no json", "no notification"] {
            let noise = Held {
                payload: payload.into(),
                ..event("", &[])
            };
            assert!(uris(&noise, None).is_empty());
        }
    }
}
