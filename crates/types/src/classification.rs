use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{ErrorKind, ImageRef};

/// What became of one image under one model: the message from infer (or, for an image that could
/// not be prepared, from preprocess) to the sink, and the content of one result row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Classification {
    /// The image, without inline bytes.
    pub image: ImageRef,
    /// The model's name.
    pub model: Arc<str>,
    /// The model's version: the first 12 hex digits of its content hash.
    pub model_version: Arc<str>,
    /// Encoded bytes that were read, if they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Size of the image as stored, if it was decoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original: Option<ImageSize>,
    /// Labels, or why there are none.
    pub outcome: Outcome,
    /// Deliveries it took over all stages; 1 when each succeeded at once.
    pub attempts: u32,
    /// When the outcome was known, in microseconds since the Unix epoch, UTC.
    pub finished_at: i64,
}

/// Width and height in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSize {
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

/// Labels, or why there are none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The model's answer.
    Ok(Scores),
    /// The image has no label.
    Failed(Failure),
}

/// A model's answer for one image.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// The best classes, highest score first; never empty.
    pub top: Vec<TopLabel>,
    /// The model's raw output, one value a class, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logits: Option<Vec<f32>>,
    /// What the model knows of the image beside its classes, if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding: Option<Vec<f32>>,
}

/// One class with its score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopLabel {
    /// The class's name.
    pub label: Arc<str>,
    /// The class's number in the model's output.
    pub class: u32,
    /// Softmax or sigmoid of the logit, 0 to 1.
    pub score: f32,
}

/// Why an image has no label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The closed set that scripts group by.
    pub kind: ErrorKind,
    /// A sentence for people, naming the object.
    pub error: String,
}
