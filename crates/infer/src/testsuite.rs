//! What an engine does to images before it computes, on its own, for those who count what it costs.

use std::time::{Duration, Instant};

use bytes::Bytes;
use trommel_types::{Lane, Normalization, Shape};

use crate::lanes::Lanes;
use crate::pack::{Packed, Packer};
use crate::signature::{InputType, Layout};

/// Longest time that a batch waits; only a full one closes here.
const WAIT: Duration = Duration::MAX;

/// Batches as an engine on a processor forms them, written as the planes of `f32` that most models take.
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

    /// Takes an image, HWC bytes. Gives the tensor `f32[batch, 3, height, width]` that it completes.
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
