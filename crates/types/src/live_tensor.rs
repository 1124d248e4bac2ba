use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Failure, Message, RowOptions, Scores, Shape};

/// An image of a request as the tensor a model expects: the message from serve to infer.
///
/// It is sent as a core NATS request and stored nowhere; a [`LiveAnswer`] is the reply.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LiveTensor {
    /// The id of the request, for logs.
    pub request: Arc<str>,
    /// The model it was prepared for.
    pub model: Arc<str>,
    /// That model's version.
    pub model_version: Arc<str>,
    /// What the row should hold; only options that concern scores apply.
    #[serde(default)]
    pub rows: RowOptions,
    /// `HWC u8`, as in [`PreparedImage`](crate::PreparedImage).
    pub pixels: Bytes,
    /// Shape of `pixels`.
    pub shape: Shape,
    /// Milliseconds after the arrival of this message when the client stops waiting.
    /// A duration, so that clocks need not agree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// Images for this model that the sender is still preprocessing: a batch may wait for them.
    #[serde(default)]
    pub coming: u32,
}

/// The outcome of a [`LiveTensor`]: the reply from infer to serve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LiveAnswer {
    /// Scores, or the error.
    pub outcome: LiveOutcome,
}

/// How the work on a [`LiveTensor`] ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LiveOutcome {
    /// The model's scores.
    Ok(Scores),
    /// The model failed on this image; its row says so.
    Failed(Failure),
    /// No row could be made.
    Refused(LiveRefusal),
}

/// Why an infer worker returns no row for a [`LiveTensor`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRefusal {
    /// The reason, for programs.
    pub reason: RefusalReason,
    /// The reason, for people.
    pub error: String,
}

/// The reasons of a [`LiveRefusal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefusalReason {
    /// The queue is as long as the worker can answer in time.
    Full,
    /// The deadline has passed.
    Deadline,
    /// The model cannot give such rows, or the message is malformed.
    Settings,
    /// The worker is stopping, or its device is lost; another one may answer.
    Unavailable,
}

/// What an infer worker replies to an empty request on a model's subject: the model is warm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmModel {
    /// The model.
    pub model: Arc<str>,
    /// Its version.
    pub model_version: Arc<str>,
    /// Its classes. Omitted if the request has the header `Trommel-Labels: no`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<Arc<str>>,
}

impl LiveAnswer {
    /// An answer without a row.
    pub fn refused(reason: RefusalReason, error: impl Into<String>) -> Self {
        Self {
            outcome: LiveOutcome::Refused(LiveRefusal {
                reason,
                error: error.into(),
            }),
        }
    }
}

impl Message for LiveTensor {
    fn approx_bytes(&self) -> usize {
        size_of::<Self>() + self.pixels.len()
    }
}
impl Message for LiveAnswer {}
impl Message for WarmModel {}
