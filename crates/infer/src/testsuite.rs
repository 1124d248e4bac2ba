//! An engine's work on images before inference, on its own, for instruction counts.

use std::time::{Duration, Instant};

use bytes::Bytes;
use trommel_types::{Lane, Normalization, Shape};

use crate::lanes::Lanes;
use crate::pack::{Packed, Packer};
use crate::signature::{InputType, Layout};

/// Longest wait of a batch; here only full batches close.
const WAIT: Duration = Duration::MAX;

/// Batches as formed by an engine on a CPU, written as the planes of `f32` that most models take.
pub struct Assembly {
    lanes: Lanes<Bytes>,
    packer: Packer,
    batch: usize,
}

impl Assembly {
    /// Batches of `batch` images, at least 1, of a shape of three channels.
    pub fn new(shape: Shape, normalization: &Normalization, batch: usize) -> Self {
        Self {
            lanes: Lanes::new(batch, WAIT, WAIT),
            packer: Packer::new(shape, Layout::Nchw, InputType::F32, normalization),
            batch,
        }
    }

    /// Adds an image, HWC bytes. Returns the tensor `f32[batch, 3, height, width]` that it
    /// completes.
    pub fn push(&mut self, pixels: Bytes) -> Option<&[f32]> {
        let now = Instant::now();
        self.lanes.push(Lane::Normal, pixels, now);
        let (_, images) = self.lanes.take(now, self.batch, None)?;
        self.packer.reserve(images.len());
        for (place, image) in images.iter().enumerate() {
            self.packer.write(place, image);
        }
        match self.packer.images(images.len()) {
            Packed::F32(values) => Some(values),
            Packed::F16(_) | Packed::U8(_) => None,
        }
    }
}
