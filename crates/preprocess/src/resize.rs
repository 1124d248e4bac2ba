use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use image::RgbImage;
use trommel_types::Shape;

use crate::geometry::crop_offset;
use crate::{ChannelOrder, Crop, Plan, Resample, kernel};

/// Resizes and crops, and keeps its buffers for the next image.
pub(crate) struct Scaler {
    resizer: Resizer,
    /// After the first pass.
    halfway: Vec<u8>,
    /// After the second pass.
    scaled: Vec<u8>,
}

impl Scaler {
    pub(crate) fn new() -> Self {
        Self {
            resizer: Resizer::new(),
            halfway: Vec::new(),
            scaled: Vec::new(),
        }
    }

    /// Bytes of memory that the buffers hold.
    pub(crate) fn held(&self) -> usize {
        self.halfway.capacity() + self.scaled.capacity() + self.resizer.size_of_internal_buffers()
    }

    /// The tensor of an upright RGB image: `HWC u8`.
    pub(crate) fn run(&mut self, image: &RgbImage, plan: &Plan) -> (Vec<u8>, Shape) {
        let size = image.dimensions();
        let target = plan.resize.target(size.0, size.1);
        let target = (target.0.max(1), target.1.max(1));
        let Self {
            resizer,
            halfway,
            scaled,
        } = self;
        let filter = plan.resample;

        // One axis at a time with bytes between: Pillow rounds and clips between the passes, so one
        // call over both would differ by up to 23 levels.
        let middle = if rows_first(size, target) {
            (size.0, target.1)
        } else {
            (target.0, size.1)
        };
        let source = image.as_raw().as_slice();
        let source = pass(resizer, filter, source, size, halfway, middle);
        let source = pass(resizer, filter, source, middle, scaled, target);

        let mut pixels = match plan.crop {
            Some(crop) => cut(source, target, crop),
            None => source.to_vec(),
        };
        if plan.channel_order == ChannelOrder::Bgr {
            pixels
                .as_chunks_mut::<3>()
                .0
                .iter_mut()
                .for_each(|pixel| pixel.swap(0, 2));
        }
        let (width, height) = plan.crop.map_or(target, |crop| (crop.width, crop.height));
        (
            pixels,
            Shape {
                height,
                width,
                channels: 3,
            },
        )
    }
}

/// Whether Pillow scales the rows before the columns: where the height shrinks, and by more than
/// twice as many pixels as the width (Pillow 13, `ImagingResampleInner`).
fn rows_first(size: (u32, u32), target: (u32, u32)) -> bool {
    let shrinks = |from: u32, to: u32| i64::from(from) - i64::from(to);
    let (width, height) = (shrinks(size.0, target.0), shrinks(size.1, target.1));
    height > 0 && height > 2 * width
}

/// Multiplications up to which a pass is done by the kernel that equals Pillow's: about 0.2 ms.
const EXACT_MULTIPLICATIONS: f64 = 300_000.0;

/// Scales one axis of `source` into `buffer`, or hands it on where there is nothing to scale.
fn pass<'a>(
    resizer: &mut Resizer,
    filter: Resample,
    source: &'a [u8],
    from: (u32, u32),
    buffer: &'a mut Vec<u8>,
    to: (u32, u32),
) -> &'a [u8] {
    if from == to {
        return source;
    }
    let length = 3 * to.0 as usize * to.1 as usize;
    buffer.resize(length, 0);
    if !is_fast(filter, from, to, length) {
        if from.0 == to.0 {
            kernel::vertical(source, from.0, (from.1, to.1), buffer, filter);
        } else {
            kernel::horizontal(source, from.0, buffer, to.0, filter);
        }
        return buffer;
    }
    let source = ImageRef::new(from.0, from.1, source, PixelType::U8x3)
        .expect("a decoded image has three bytes a pixel");
    let mut target = Image::from_slice_u8(to.0, to.1, buffer, PixelType::U8x3)
        .expect("the buffer was sized for the target");
    resizer
        .resize(&source, &mut target, &options(filter))
        .expect("both images have the same pixel type and no crop box is set");
    buffer
}

/// Whether a pass is done by `fast_image_resize`.
///
/// Its weights have fewer bits than Pillow's, so about 3 values in a thousand are one level off.
/// Where an image is enlarged a second pass can double that, and its `Box` and `Nearest` take other
/// pixels than Pillow's: those are done exactly, and so is what is small.
fn is_fast(filter: Resample, from: (u32, u32), to: (u32, u32), length: usize) -> bool {
    let enlarges = from.0 < to.0 || from.1 < to.1;
    let taps = kernel::taps(from.0, to.0, filter).max(kernel::taps(from.1, to.1, filter));
    let exact_only = matches!(filter, Resample::Nearest | Resample::Box);
    !enlarges && !exact_only && taps * length as f64 > EXACT_MULTIPLICATIONS
}

fn options(filter: Resample) -> ResizeOptions {
    let algorithm = match filter {
        Resample::Nearest => ResizeAlg::Nearest,
        Resample::Box => ResizeAlg::Convolution(FilterType::Box),
        Resample::Bilinear => ResizeAlg::Convolution(FilterType::Bilinear),
        Resample::Hamming => ResizeAlg::Convolution(FilterType::Hamming),
        Resample::Bicubic => ResizeAlg::Convolution(FilterType::CatmullRom),
        Resample::Lanczos => ResizeAlg::Convolution(FilterType::Lanczos3),
    };
    ResizeOptions::new().resize_alg(algorithm).use_alpha(false)
}

/// Cuts the middle out of an image, filled up where it is smaller.
fn cut(source: &[u8], (width, height): (u32, u32), crop: Crop) -> Vec<u8> {
    let left = crop_offset(width, crop.width, crop.rounding);
    let top = crop_offset(height, crop.height, crop.rounding);
    // Columns of the source that are kept, and where they land.
    let from = left.max(0) as usize;
    let to = (-left).max(0) as usize;
    let count = (width as usize - from).min(crop.width as usize - to);

    let row_bytes = 3 * width as usize;
    let length = 3 * crop.width as usize * crop.height as usize;
    let mut pixels = match crop.fill {
        [0, 0, 0] => vec![0; length],
        fill => fill.repeat(length / 3),
    };
    for (row, output) in (top..).zip(pixels.chunks_exact_mut(3 * crop.width as usize)) {
        if (0..i64::from(height)).contains(&row) {
            let start = row as usize * row_bytes + 3 * from;
            output[3 * to..3 * (to + count)].copy_from_slice(&source[start..start + 3 * count]);
        }
    }
    pixels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Rounding;

    #[test]
    fn a_crop_beyond_the_image_is_filled() {
        let source = [9; 3 * 2 * 2];
        let crop = Crop {
            height: 4,
            width: 3,
            rounding: Rounding::Transformers,
            fill: [1, 2, 3],
        };
        let pixels = cut(&source, (2, 2), crop);
        let red: Vec<_> = pixels.chunks(3).map(|pixel| pixel[0]).collect();
        assert_eq!(red, [1, 1, 1, 1, 9, 9, 1, 9, 9, 1, 1, 1]);
        assert_eq!(pixels[..3], [1, 2, 3]);
    }
}
