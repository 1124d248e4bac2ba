use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{ImageRef, ImageSize};

/// Height, width and channels of a prepared image, in that order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// Rows.
    pub height: u32,
    /// Columns.
    pub width: u32,
    /// Values a pixel.
    pub channels: u32,
}

impl Shape {
    /// Number of values.
    pub fn len(self) -> usize {
        self.height as usize * self.width as usize * self.channels as usize
    }

    /// Whether it holds no value.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// An image as the tensor a model expects: the message from preprocess to infer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreparedImage {
    /// The image this was made from, without inline bytes.
    pub image: ImageRef,
    /// The model it was prepared for.
    pub model: Arc<str>,
    /// That model's version.
    pub model_version: Arc<str>,
    /// `HWC u8`, RGB unless the model's configuration asks for BGR; not yet normalised.
    pub pixels: Bytes,
    /// Shape of `pixels`.
    pub shape: Shape,
    /// Encoded bytes that were read.
    pub bytes: u64,
    /// Size of the image as stored, after its EXIF orientation is applied.
    pub original: ImageSize,
    /// Deliveries it took so far; 1 when the first succeeded.
    pub attempts: u32,
    /// When its deadline passes, in microseconds since the Unix epoch, UTC, if its job gives it one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due_at: Option<i64>,
}
