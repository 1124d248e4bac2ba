use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions, Resizer};
use image::RgbImage;
use trommel_types::Shape;

use crate::geometry::{Window, crop_offset};
use crate::kernel::{self, Arithmetic, Axis, Level};
use crate::{ChannelOrder, Crop, Plan, Resample};

/// Resizes and crops, and reuses its buffers.
pub(crate) struct Scaler {
    level: Level,
    /// For processors without kernel instructions.
    resizer: Resizer,
    /// Cached for the most recent sizes.
    axes: HashMap<AxisKey, Arc<Axis>>,
    /// After the first pass.
    halfway: Vec<u8>,
}

/// An upright RGB image, or its decoded part.
pub(crate) struct Source<'a> {
    pub(crate) pixels: &'a RgbImage,
    /// `(width, height)` of the whole image.
    pub(crate) size: (u32, u32),
    /// The part in the pixels.
    pub(crate) window: &'a Window,
}

/// Number of cached sizes.
const KEPT_AXES: usize = 16;

/// The parameters of an [`Axis`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct AxisKey {
    from: u32,
    to: u32,
    given: Range<u32>,
    kept: Range<u32>,
    filter: Resample,
    arithmetic: Arithmetic,
}

impl Scaler {
    pub(crate) fn new() -> Self {
        Self::at(Level::detect())
    }

    fn at(level: Level) -> Self {
        Self {
            level,
            resizer: Resizer::new(),
            axes: HashMap::new(),
            halfway: Vec::new(),
        }
    }

    /// Bytes of memory in the buffers.
    pub(crate) fn held(&self) -> usize {
        self.halfway.capacity() + self.resizer.size_of_internal_buffers()
    }

    /// The pixels of an image of `size` that [`Scaler::run`] needs.
    pub(crate) fn needs(&self, size: (u32, u32), target: (u32, u32), plan: &Plan) -> Window {
        if self.level == Level::Scalar {
            return Window::whole(size); // `fast_image_resize` takes all of it
        }
        let kept = self.kept(target, plan);
        let reach = |from, to, kept| kernel::reach((from, to), kept, plan.resample);
        Window {
            columns: reach(size.0, target.0, &kept.columns),
            rows: reach(size.1, target.1, &kept.rows),
        }
    }

    /// The size `(width, height)` of the result for an image that is scaled to `target`.
    pub(crate) fn makes(&self, target: (u32, u32), plan: &Plan) -> (u32, u32) {
        let kept = self.kept(target, plan);
        (kept.columns.len() as u32, kept.rows.len() as u32)
    }

    /// The tensor of an image that is scaled to `target`: `HWC u8`.
    pub(crate) fn run(
        &mut self,
        source: &Source<'_>,
        target: (u32, u32),
        plan: &Plan,
    ) -> (Vec<u8>, Shape) {
        let (width, height) = plan.crop.map_or(target, |crop| (crop.width, crop.height));
        let kept = self.kept(target, plan);
        let scaled = self.scale(source, target, &kept, plan);
        let scaled = Picture {
            pixels: scaled,
            width: kept.columns.len(),
            height: kept.rows.len(),
        };
        let place = place(target, plan);
        let place = (
            place.0 - i64::from(kept.columns.start),
            place.1 - i64::from(kept.rows.start),
        );
        let mut pixels = match plan.crop {
            Some(crop) => cut(scaled, place, crop),
            None => scaled.pixels,
        };
        if plan.channel_order == ChannelOrder::Bgr {
            let (pixels, _) = pixels.as_chunks_mut::<3>();
            pixels.iter_mut().for_each(|pixel| pixel.swap(0, 2));
        }
        (
            pixels,
            Shape {
                height,
                width,
                channels: 3,
            },
        )
    }

    /// The part of the scaled image that is computed: only that inside the crop.
    fn kept(&self, target: (u32, u32), plan: &Plan) -> Window {
        let Some(crop) = plan.crop else {
            return Window::whole(target);
        };
        if self.level == Level::Scalar {
            return Window::whole(target); // `fast_image_resize` makes all of it
        }
        let part = |to: u32, place: i64, crop: u32| {
            let end = (place + i64::from(crop)).min(to.into());
            place.max(0) as u32..end as u32
        };
        let place = place(target, plan);
        Window {
            columns: part(target.0, place.0, crop.width),
            rows: part(target.1, place.1, crop.height),
        }
    }

    /// The kept part of an image scaled to `target`.
    ///
    /// One axis at a time with bytes between: the references round and clip between the passes, so
    /// one call over both would differ by up to 23 levels.
    fn scale(
        &mut self,
        source: &Source<'_>,
        target: (u32, u32),
        kept: &Window,
        plan: &Plan,
    ) -> Vec<u8> {
        let &Source { size, window, .. } = source;
        let source = source.pixels.as_raw().as_slice();
        let axis = |(from, to), given: &Range<u32>, kept: &Range<u32>| AxisKey {
            from,
            to,
            given: given.clone(),
            kept: kept.clone(),
            filter: plan.resample,
            arithmetic: plan.arithmetic,
        };
        let columns = self.pass(axis((size.0, target.0), &window.columns, &kept.columns));
        let rows = self.pass(axis((size.1, target.1), &window.rows, &kept.rows));
        let (needed, given) = (rows.needs(), window.columns.len());
        let (resizer, halfway) = (&mut self.resizer, &mut self.halfway);
        let mut scaled = Vec::new();

        if rows_first(size, target, plan.arithmetic) {
            let middle = match rows.rows(resizer, (source, 0), given, halfway) {
                true => halfway.as_slice(),
                false => lines(source, 0, given, &needed),
            };
            if !columns.columns(resizer, middle, &mut scaled) {
                scaled = middle.to_vec();
            }
        } else {
            let source = lines(source, 0, given, &needed);
            let middle = match columns.columns(resizer, source, halfway) {
                true => halfway.as_slice(),
                false => source,
            };
            let width = kept.columns.len();
            if !rows.rows(resizer, (middle, needed.start), width, &mut scaled) {
                scaled = lines(middle, needed.start, width, &needed).to_vec();
            }
        }
        scaled
    }

    /// The operation along one axis.
    fn pass(&mut self, key: AxisKey) -> Pass {
        let level = self.level;
        let scaling = (key.from != key.to).then(|| {
            if self.axes.len() >= KEPT_AXES && !self.axes.contains_key(&key) {
                self.axes.clear();
            }
            let axis = self.axes.entry(key.clone()).or_insert_with(|| {
                let size = (key.from, key.to);
                Arc::new(Axis::new(
                    size,
                    (key.given.clone(), key.kept.clone()),
                    key.filter,
                    key.arithmetic,
                    level,
                ))
            });
            Arc::clone(axis)
        });
        Pass {
            key,
            scaling,
            level,
        }
    }
}

/// One axis of an image, and its scaling.
struct Pass {
    key: AxisKey,
    /// `None` if its pixels stay unchanged.
    scaling: Option<Arc<Axis>>,
    level: Level,
}

impl Pass {
    /// The required source pixels, relative to the first given one.
    fn needs(&self) -> Range<u32> {
        match &self.scaling {
            Some(axis) => axis.needs(),
            None => {
                let AxisKey { given, kept, .. } = &self.key;
                kept.start - given.start..kept.end - given.start
            }
        }
    }

    /// Scales or crops rows of pixels; `false` if there is nothing to do.
    fn columns(&self, resizer: &mut Resizer, source: &[u8], target: &mut Vec<u8>) -> bool {
        let AxisKey {
            from, given, kept, ..
        } = &self.key;
        if self.scaling.is_none() && kept == given {
            return false;
        }
        let pitch = 3 * given.len();
        let rows = source.len() / pitch;
        target.resize(3 * kept.len() * rows, 0);
        match &self.scaling {
            Some(_) if self.is_fast(target.len()) => {
                let size = |width| (width, rows as u32);
                fast(
                    resizer,
                    self.key.filter,
                    (source, size(*from)),
                    (target, size(self.key.to)),
                );
            }
            Some(axis) => axis.horizontal(source, target),
            None => {
                let needed = self.needs();
                let bytes = 3 * needed.start as usize..3 * needed.end as usize;
                let lines = source.chunks_exact(pitch);
                for (from, to) in lines.zip(target.chunks_exact_mut(3 * kept.len())) {
                    to.copy_from_slice(&from[bytes.clone()]);
                }
            }
        }
        true
    }

    /// Scales columns of pixels; `source` has the rows from a number on; `false` if there is
    /// nothing to do.
    fn rows(
        &self,
        resizer: &mut Resizer,
        (source, first): (&[u8], u32),
        width: usize,
        target: &mut Vec<u8>,
    ) -> bool {
        let Some(axis) = &self.scaling else {
            return false;
        };
        let pitch = 3 * width;
        target.resize(self.key.kept.len() * pitch, 0);
        if self.is_fast(target.len()) {
            let size = |height| (width as u32, height);
            let (from, to) = (size(self.key.from), size(self.key.to));
            fast(resizer, self.key.filter, (source, from), (target, to));
        } else {
            axis.vertical(source, first, pitch, target);
        }
        true
    }

    /// Whether `fast_image_resize` is used for a pass: if the kernel has no instructions of this
    /// processor for it, and the image is large.
    ///
    /// Its weights have fewer bits than Pillow's, so about 3 values in a thousand differ by one
    /// level. Enlarging in a second pass can double that, and its `Box` and `Nearest` choose other
    /// pixels than Pillow's: those passes, and small ones, are computed exactly.
    fn is_fast(&self, length: usize) -> bool {
        let AxisKey {
            from,
            to,
            ref given,
            ref kept,
            filter,
            ..
        } = self.key;
        let is_whole = kept.len() == to as usize && given.len() == from as usize;
        let exact_only = matches!(filter, Resample::Nearest | Resample::Box);
        let work = kernel::taps(from, to, filter) * length as f64;
        self.level == Level::Scalar
            && is_whole
            && from > to
            && !exact_only
            && work > EXACT_MULTIPLICATIONS
    }
}

/// Most multiplications of a pass in the scalar kernel: about 0.2 ms.
const EXACT_MULTIPLICATIONS: f64 = 300_000.0;

/// Some rows of an image of `width` columns; `source` has those from `first` on.
fn lines<'a>(source: &'a [u8], first: u32, width: usize, rows: &Range<u32>) -> &'a [u8] {
    let at = |row: u32| 3 * width * (row - first) as usize;
    &source[at(rows.start)..at(rows.end)]
}

/// Whether rows are scaled before columns. Pillow 13 does so if the height shrinks, and by more than
/// twice as many pixels as the width (`ImagingResampleInner`); torchvision never does.
fn rows_first(size: (u32, u32), target: (u32, u32), arithmetic: Arithmetic) -> bool {
    let shrinks = |from: u32, to: u32| i64::from(from) - i64::from(to);
    let (width, height) = (shrinks(size.0, target.0), shrinks(size.1, target.1));
    arithmetic == Arithmetic::Pillow && height > 0 && height > 2 * width
}

/// Scales one axis by `fast_image_resize`. The type of the pixels is named here: the call that finds
/// it out compiles the code of all types, which takes minutes.
fn fast(
    resizer: &mut Resizer,
    filter: Resample,
    (source, from): (&[u8], (u32, u32)),
    (target, to): (&mut [u8], (u32, u32)),
) {
    let source = TypedImageRef::<U8x3>::from_buffer(from.0, from.1, source)
        .expect("a decoded image has three bytes a pixel");
    let mut target = TypedImage::<U8x3>::from_buffer(to.0, to.1, target)
        .expect("the buffer was sized for the target");
    resizer
        .resize_typed(&source, &mut target, &options(filter))
        .expect("no crop box is set");
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

/// The start of the crop in an image scaled to `target`: column and row.
fn place(target: (u32, u32), plan: &Plan) -> (i64, i64) {
    plan.crop.map_or((0, 0), |crop| {
        let offset = |size, kept| crop_offset(size, kept, crop.rounding);
        (offset(target.0, crop.width), offset(target.1, crop.height))
    })
}

/// RGB pixels.
struct Picture {
    pixels: Vec<u8>,
    width: usize,
    height: usize,
}

/// The window of a crop that begins at `place`, padded if the picture is smaller.
fn cut(picture: Picture, (left, top): (i64, i64), crop: Crop) -> Vec<u8> {
    let is_whole = (picture.width, picture.height) == (crop.width as usize, crop.height as usize);
    if is_whole && (left, top) == (0, 0) {
        return picture.pixels;
    }
    // The kept columns of the picture, and their destination.
    let from = left.max(0) as usize;
    let to = (-left).max(0) as usize;
    let count = (picture.width - from).min(crop.width as usize - to);

    let row_bytes = 3 * picture.width;
    let length = 3 * crop.width as usize * crop.height as usize;
    let mut pixels = match crop.fill {
        [0, 0, 0] => vec![0; length],
        fill => fill.repeat(length / 3),
    };
    for (row, output) in (top..).zip(pixels.chunks_exact_mut(3 * crop.width as usize)) {
        if (0..picture.height as i64).contains(&row) {
            let start = row as usize * row_bytes + 3 * from;
            output[3 * to..3 * (to + count)]
                .copy_from_slice(&picture.pixels[start..start + 3 * count]);
        }
    }
    pixels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{Resize, Rounding};

    /// Large passes use `fast_image_resize` if the kernel has no instructions.
    #[test]
    fn without_instructions_for_the_kernel_it_is_one_level_at_most() {
        let pixel = |x: u32, y: u32| image::Rgb([x, y, x * y].map(|value| (value * 7 % 251) as u8));
        let image = RgbImage::from_fn(700, 500, pixel);
        let mut plan = Plan {
            crop: Some(Crop {
                height: 224,
                width: 224,
                rounding: Rounding::Transformers,
                fill: [0; 3],
            }),
            ..Plan::plain(Resize::ShortestEdge(256))
        };
        for resample in [Resample::Bilinear, Resample::Bicubic, Resample::Lanczos] {
            plan.resample = resample;
            let source = Source {
                pixels: &image,
                size: (700, 500),
                window: &Window::whole((700, 500)),
            };
            let tensor = |level| Scaler::at(level).run(&source, (358, 256), &plan).0;
            let (exact, plain) = (tensor(Level::detect()), tensor(Level::Scalar));
            let differences = exact.iter().zip(&plain).map(|(a, b)| a.abs_diff(*b));
            assert!(differences.max() <= Some(1), "{resample:?}");
        }
    }

    #[test]
    fn a_crop_beyond_the_image_is_filled() {
        let picture = Picture {
            pixels: vec![9; 3 * 2 * 2],
            width: 2,
            height: 2,
        };
        let crop = Crop {
            height: 4,
            width: 3,
            rounding: Rounding::Transformers,
            fill: [1, 2, 3],
        };
        let pixels = cut(picture, (-1, -1), crop);
        let red: Vec<_> = pixels.chunks(3).map(|pixel| pixel[0]).collect();
        assert_eq!(red, [1, 1, 1, 1, 9, 9, 1, 9, 9, 1, 1, 1]);
        assert_eq!(pixels[..3], [1, 2, 3]);
    }
}
