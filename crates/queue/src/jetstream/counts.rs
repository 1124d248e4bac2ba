//! Counts and removes messages of streams and consumers.

use async_nats::jetstream::{consumer, stream};
use serde_json::{Value, json};
use trommel_types::Stream;

use super::answers::ErrorCode;
use super::broker::Broker;
use crate::QueueError;

/// The contents of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamStats {
    /// Number of messages, including those in flight.
    pub messages: u64,
    /// Their bytes as stored.
    pub bytes: u64,
    /// Sequence of the oldest one.
    pub first_sequence: u64,
    /// Sequence of the newest one ever stored.
    pub last_sequence: u64,
}

/// The backlog of a durable consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConsumerStats {
    /// Messages never delivered.
    pub waiting: u64,
    /// Messages delivered and not settled, including delayed retries.
    pub in_flight: u64,
    /// Of those in flight, those delivered more than once.
    pub redelivered: u64,
    /// Sequence below which all messages are settled.
    pub settled_up_to: u64,
}

impl Broker {
    /// Removes all messages of a stream whose subject matches, wildcards included; returns how many.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub async fn purge_subject(&self, stream: Stream, subject: &str) -> Result<u64, QueueError> {
        self.purge(&self.stream_name(stream), subject).await
    }

    /// As [`Broker::purge_subject`], for any stream.
    pub(super) async fn purge(&self, stream: &str, subject: &str) -> Result<u64, QueueError> {
        let api = format!("STREAM.PURGE.{stream}");
        let gone = [ErrorCode::STREAM_NOT_FOUND];
        let purged: Option<Value> = self.ask(&api, &json!({ "filter": subject }), &gone).await?;
        Ok(purged
            .and_then(|purged| purged["purged"].as_u64())
            .unwrap_or(0))
    }

    /// The backlog of a durable consumer; `None` if it does not exist.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub async fn consumer_stats(
        &self,
        stream: Stream,
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

    /// The contents of a stream; `None` if it does not exist.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub async fn stream_stats(&self, stream: Stream) -> Result<Option<StreamStats>, QueueError> {
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

    /// Number of messages of a stream whose subject matches, wildcards included.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub async fn subject_count(&self, stream: Stream, subject: &str) -> Result<u64, QueueError> {
        let counts = self.subject_counts(stream, subject).await?;
        Ok(counts.iter().map(|(_, count)| count).sum())
    }

    /// The subjects of a stream that match, wildcards included, each with its number of messages;
    /// in no order. The stream's leader answers, a page of subjects at a time: while messages come
    /// and go, a subject at the edge of a page may be missed or counted twice.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub async fn subject_counts(
        &self,
        stream: Stream,
        subject: &str,
    ) -> Result<Vec<(String, u64)>, QueueError> {
        #[derive(serde::Deserialize)]
        struct Page {
            #[serde(default)]
            total: usize,
            state: Subjects,
        }
        #[derive(serde::Deserialize)]
        struct Subjects {
            #[serde(default)]
            subjects: Option<std::collections::HashMap<String, u64>>,
        }
        let api = format!("STREAM.INFO.{}", self.stream_name(stream));
        let gone = [ErrorCode::STREAM_NOT_FOUND];
        let mut counts: Vec<(String, u64)> = Vec::new();
        loop {
            let question = json!({ "subjects_filter": subject, "offset": counts.len() });
            let page: Option<Page> = self.ask(&api, &question, &gone).await?;
            let total = page.as_ref().map_or(0, |page| page.total);
            let subjects = page.and_then(|page| page.state.subjects);
            let subjects = subjects.unwrap_or_default();
            let ended = subjects.is_empty();
            counts.extend(subjects);
            if ended || counts.len() >= total {
                return Ok(counts);
            }
        }
    }
}
