use half::f16;
use trommel_types::{Normalization, Shape};

use crate::signature::{InputType, Layout};

/// Pixels converted at once: three rows of bytes that stay in the L1 cache.
const BLOCK: usize = 1024;

/// The tensor of a batch, written image by image and reused for each batch.
#[derive(Debug)]
pub(crate) struct Packer {
    layout: Layout,
    image: usize,
    tensor: Tensor,
}

/// The values of a batch, in the model's type and order.
#[derive(Debug)]
enum Tensor {
    F32 {
        values: Vec<f32>,
        line: [Line; 3],
    },
    F16 {
        values: Vec<f16>,
        table: Box<[[f16; 256]; 3]>,
    },
    U8 {
        values: Vec<u8>,
    },
}

/// The packed tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Packed<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    U8(&'a [u8]),
}

/// `(pixel × scale − mean) ÷ std` as one multiplication and one addition.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Line {
    pub(crate) factor: f32,
    pub(crate) offset: f32,
}

impl Packer {
    /// Allocates no memory yet. A model with byte inputs gets them unchanged, without
    /// `normalization`, which it does itself.
    pub(crate) fn new(
        shape: Shape,
        layout: Layout,
        input_type: InputType,
        normalization: &Normalization,
    ) -> Self {
        let image = shape.len();
        let line = [0, 1, 2].map(|channel| Line::new(normalization, channel));
        let tensor =
            match input_type {
                InputType::F32 => Tensor::F32 {
                    values: Vec::new(),
                    line,
                },
                InputType::F16 => Tensor::F16 {
                    values: Vec::new(),
                    table: Box::new(line.map(|line| {
                        std::array::from_fn(|pixel| f16::from_f32(line.at(pixel as u8)))
                    })),
                },
                InputType::U8 => Tensor::U8 { values: Vec::new() },
            };
        Self {
            layout,
            image,
            tensor,
        }
    }

    /// Allocates memory for `batch` images, if necessary.
    pub(crate) fn reserve(&mut self, batch: usize) {
        let length = batch * self.image;
        match &mut self.tensor {
            Tensor::F32 { values, .. } if values.len() < length => values.resize(length, 0.0),
            Tensor::F16 { values, .. } if values.len() < length => values.resize(length, f16::ZERO),
            Tensor::U8 { values } if values.len() < length => values.resize(length, 0),
            _ => {}
        }
    }

    /// Writes the HWC pixels of an image at `place` in the batch.
    pub(crate) fn write(&mut self, place: usize, pixels: &[u8]) {
        debug_assert_eq!(pixels.len(), self.image, "an image of the model's shape");
        let range = place * self.image..(place + 1) * self.image;
        match (&mut self.tensor, self.layout) {
            (Tensor::F32 { values, line }, Layout::Nchw) => {
                planes(pixels, &mut values[range], |channel, from, to| {
                    let Line { factor, offset } = line[channel];
                    for (to, from) in to.iter_mut().zip(from) {
                        *to = f32::from(*from) * factor + offset;
                    }
                });
            }
            (Tensor::F32 { values, line }, Layout::Nhwc) => {
                interleaved_f32(pixels, &mut values[range], line);
            }
            (Tensor::F16 { values, table }, Layout::Nchw) => {
                planes(pixels, &mut values[range], |channel, from, to| {
                    let table = &table[channel];
                    for (to, from) in to.iter_mut().zip(from) {
                        *to = table[usize::from(*from)];
                    }
                });
            }
            (Tensor::F16 { values, table }, Layout::Nhwc) => {
                let [red, green, blue] = &**table;
                let (to, _) = values[range].as_chunks_mut::<3>();
                for (to, from) in to.iter_mut().zip(pixels.as_chunks::<3>().0) {
                    let [r, g, b] = from.map(usize::from);
                    *to = [red[r], green[g], blue[b]];
                }
            }
            (Tensor::U8 { values }, Layout::Nchw) => {
                planes(pixels, &mut values[range], |_, from, to| {
                    to.copy_from_slice(from)
                });
            }
            (Tensor::U8 { values }, Layout::Nhwc) => values[range].copy_from_slice(pixels),
        }
    }

    /// Writes zeros from `place` to `end`, so that remains of an earlier batch are not run again.
    pub(crate) fn clear(&mut self, place: usize, end: usize) {
        let range = place * self.image..end * self.image;
        match &mut self.tensor {
            Tensor::F32 { values, .. } => values[range].fill(0.0),
            Tensor::F16 { values, .. } => values[range].fill(f16::ZERO),
            Tensor::U8 { values } => values[range].fill(0),
        }
    }

    /// The first `batch` images.
    pub(crate) fn images(&self, batch: usize) -> Packed<'_> {
        let range = ..batch * self.image;
        match &self.tensor {
            Tensor::F32 { values, .. } => Packed::F32(&values[range]),
            Tensor::F16 { values, .. } => Packed::F16(&values[range]),
            Tensor::U8 { values } => Packed::U8(&values[range]),
        }
    }
}

impl Line {
    pub(crate) fn new(normalization: &Normalization, channel: usize) -> Self {
        let std = f64::from(normalization.std[channel]);
        Self {
            factor: (f64::from(normalization.scale) / std) as f32,
            offset: (-f64::from(normalization.mean[channel]) / std) as f32,
        }
    }

    fn at(self, pixel: u8) -> f32 {
        f32::from(pixel) * self.factor + self.offset
    }
}

/// Splits HWC pixels into channels, which `convert` writes to the planes of `to`.
///
/// The two steps are separate because the compiler vectorises a conversion of adjacent bytes, but
/// not of bytes with a stride of three.
fn planes<T>(pixels: &[u8], to: &mut [T], convert: impl Fn(usize, &[u8], &mut [T])) {
    let plane = to.len() / 3;
    let mut channels = [[0u8; BLOCK]; 3];
    for (block, pixels) in pixels.chunks(3 * BLOCK).enumerate() {
        let (pixels, _) = pixels.as_chunks::<3>();
        let length = pixels.len();
        let [red, green, blue] = &mut channels;
        let rows = red.iter_mut().zip(green.iter_mut()).zip(blue.iter_mut());
        for (((red, green), blue), pixel) in rows.zip(pixels) {
            [*red, *green, *blue] = *pixel;
        }
        for (channel, from) in channels.iter().enumerate() {
            let start = channel * plane + block * BLOCK;
            convert(channel, &from[..length], &mut to[start..start + length]);
        }
    }
}

/// Sixteen pixels at a time, so that the factors of three channels fill whole vector registers.
fn interleaved_f32(pixels: &[u8], to: &mut [f32], line: &[Line; 3]) {
    const STEP: usize = 48;
    let factors: [f32; STEP] = std::array::from_fn(|i| line[i % 3].factor);
    let offsets: [f32; STEP] = std::array::from_fn(|i| line[i % 3].offset);
    for (to, from) in to.chunks_mut(STEP).zip(pixels.chunks(STEP)) {
        for (((to, from), factor), offset) in to.iter_mut().zip(from).zip(&factors).zip(&offsets) {
            *to = f32::from(*from) * factor + offset;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Both sides are not multiples of a block or a step, and there is more than one block.
    const SHAPE: Shape = Shape {
        height: 37,
        width: 61,
        channels: 3,
    };
    const IMAGENET: Normalization = Normalization {
        scale: 1.0 / 255.0,
        mean: [0.485, 0.456, 0.406],
        std: [0.229, 0.224, 0.225],
    };

    fn pixels(seed: usize) -> Vec<u8> {
        (0..SHAPE.len())
            .map(|i| (i * 31 + i / 7 * seed) as u8)
            .collect()
    }

    /// The definition, value by value: `(place in the batch's tensor, pixel, channel)`.
    fn placed(layout: Layout, pixels: &[u8]) -> impl Iterator<Item = (usize, u8, usize)> {
        let plane = SHAPE.len() / 3;
        pixels
            .iter()
            .enumerate()
            .map(move |(i, &pixel)| match layout {
                Layout::Nhwc => (i, pixel, i % 3),
                Layout::Nchw => (i % 3 * plane + i / 3, pixel, i % 3),
            })
    }

    fn normalised(pixel: u8, channel: usize) -> f32 {
        (f32::from(pixel) * IMAGENET.scale - IMAGENET.mean[channel]) / IMAGENET.std[channel]
    }

    fn packed(layout: Layout, input_type: InputType) -> Packer {
        let mut packer = Packer::new(SHAPE, layout, input_type, &IMAGENET);
        packer.reserve(2);
        packer.write(0, &pixels(1));
        packer.write(1, &pixels(5));
        packer
    }

    #[test]
    fn every_value_is_where_the_layout_says_and_what_the_definition_says() {
        for layout in [Layout::Nchw, Layout::Nhwc] {
            let f32s = packed(layout, InputType::F32);
            let f16s = packed(layout, InputType::F16);
            let u8s = packed(layout, InputType::U8);
            let (Packed::F32(f32s), Packed::F16(f16s), Packed::U8(u8s)) =
                (f32s.images(2), f16s.images(2), u8s.images(2))
            else {
                panic!("another type than was requested");
            };
            for (image, seed) in [1, 5].into_iter().enumerate() {
                for (place, pixel, channel) in placed(layout, &pixels(seed)) {
                    let place = image * SHAPE.len() + place;
                    let wanted = normalised(pixel, channel);
                    assert!((f32s[place] - wanted).abs() <= 1e-6, "{layout} {place}");
                    assert!(
                        (f16s[place].to_f32() - wanted).abs() <= 2e-3,
                        "{layout} {place}"
                    );
                    assert_eq!(u8s[place], pixel, "{layout} {place}");
                }
            }
        }
    }

    #[test]
    fn clearing_leaves_the_images_before_it() {
        for input_type in [InputType::F32, InputType::F16, InputType::U8] {
            let mut packer = packed(Layout::Nhwc, input_type);
            packer.clear(1, 2);
            let (kept, cleared) = match packer.images(2) {
                Packed::F32(values) => {
                    let (first, second) = values.split_at(SHAPE.len());
                    (
                        first.iter().any(|&v| v != 0.0),
                        second.iter().all(|&v| v == 0.0),
                    )
                }
                Packed::F16(values) => {
                    let (first, second) = values.split_at(SHAPE.len());
                    (
                        first.iter().any(|&v| v != f16::ZERO),
                        second.iter().all(|&v| v == f16::ZERO),
                    )
                }
                Packed::U8(values) => {
                    let (first, second) = values.split_at(SHAPE.len());
                    (
                        first.iter().any(|&v| v != 0),
                        second.iter().all(|&v| v == 0),
                    )
                }
            };
            assert!(kept && cleared, "{input_type:?}");
        }
    }

    #[test]
    fn only_the_images_asked_for_are_given() {
        let packer = packed(Layout::Nchw, InputType::U8);
        let Packed::U8(one) = packer.images(1) else {
            panic!("another type")
        };
        assert_eq!(one.len(), SHAPE.len());
    }
}
