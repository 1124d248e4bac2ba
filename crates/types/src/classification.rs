use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::image_ref::cut_text;
use crate::{ErrorKind, ImageRef, Scalar};

/// The outcome of one image under one model: the message from infer (or, for an image that could
/// not be prepared, from preprocess) to the sink, and the content of one result row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Classification {
    /// The image, without inline bytes.
    pub image: ImageRef,
    /// The model's name.
    pub model: Arc<str>,
    /// The model's version: the first 12 hex digits of its content hash.
    pub model_version: Arc<str>,
    /// Encoded bytes that were read, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Size of the image as stored, if it was decoded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub original: Option<ImageSize>,
    /// Labels, or the error.
    pub outcome: Outcome,
    /// Number of deliveries over all stages; 1 per stage if each succeeded at once.
    pub attempts: u32,
    /// When the outcome was known, in microseconds since the Unix epoch, UTC.
    pub finished_at: i64,
}

impl Classification {
    /// The failed row of an image whose row is too large for a message. A failure keeps its kind.
    pub fn cut(&self, reason: &str) -> Self {
        let failure = match &self.outcome {
            Outcome::Failed(failure) => Failure {
                kind: failure.kind,
                error: cut_text(&failure.error),
            },
            Outcome::Ok(_) => Failure {
                kind: ErrorKind::TooLarge,
                error: cut_text(reason),
            },
        };
        Self {
            image: self.image.cut(),
            outcome: Outcome::Failed(failure),
            ..self.clone()
        }
    }

    /// Approximate bytes of the row, from its text and its vectors.
    pub fn approx_bytes(&self) -> usize {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let floats =
            |values: &Option<Vec<f32>>| values.as_ref().map_or(0, |values| 4 * values.len());
        let columns = self.image.columns.iter().map(|value| match value {
            Scalar::String(text) => text.len(),
            _ => 8,
        });
        let outcome = match &self.outcome {
            Outcome::Ok(scores) => {
                let top = scores.top.iter().map(|top| top.label.len() + 8);
                top.sum::<usize>() + floats(&scores.logits) + floats(&scores.embedding)
            }
            Outcome::Failed(failure) => failure.error.len(),
        };
        // Ids, numbers and times.
        128 + self.image.uri.len() + text(&self.image.etag) + columns.sum::<usize>() + outcome
    }
}

/// Width and height in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSize {
    /// Columns.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

/// Labels, or the error.
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
    /// The best classes, highest score first; empty for a model without classes.
    pub top: Vec<TopLabel>,
    /// The model's raw output, one value per class, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logits: Option<Vec<f32>>,
    /// What the model knows about the image in addition to its classes, if requested.
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
