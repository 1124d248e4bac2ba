//! Turns image bytes into the tensor a model expects. Pure: no clock, no network, no async.
//!
//! A [`Plan`] is read from a model's directory and describes the preprocessing; a [`Preparer`]
//! executes it, one image at a time, and reuses its buffers; a [`Prepared`] is the tensor, `HWC
//! u8`, not yet normalised. [`Limits`] bound the cost of one image, and are checked against its
//! header before memory is allocated.
//!
//! The tensor is the one that the model's reference processor gives, byte for byte: decoding by
//! libjpeg-turbo with its default flags, resizing one axis at a time with bytes between and the
//! reference's weights, sizes and crop offsets rounded as the processor's family rounds them.
//! References are Pillow 13, the processors of Transformers 5.23 with Pillow and with torchvision
//! 0.29 (see [`Arithmetic`]), and timm 1.0. Where the processor has none of AVX2, AVX-512 and NEON,
//! large images are resized by `fast_image_resize`, to one grey level (of noise and hard edges, 3
//! values of 36 million were two levels off). Colour follows Pillow's
//! `convert("RGB")`: alpha is dropped and not blended, a palette is looked up, 16-bit gray is
//! clipped at 255, as is gray of 32 bits and floating point, 16-bit colour keeps its high byte, CMYK
//! is multiplied out, and what was multiplied by its alpha is divided by it. The image is
//! turned upright by its EXIF or XMP orientation, as by Pillow's `exif_transpose`; of an animation
//! the first frame counts. Of a JPEG only the region is decoded that the plans look at, with the
//! pixels that it has in the whole image.
//!
//! Kinds: JPEG, PNG, WebP, GIF, BMP, TIFF; JPEG XL with the feature `jxl` (the pixels of lossless
//! images are Pillow's, those of lossy ones 4 levels off at most where it was tried), HEIC and AVIF
//! with the feature `heif`, which needs libheif 1.19 or later (HEIC has the pixels of `pillow-heif`; AVIF
//! with halved chroma differs from Pillow's at the edges of colours, by up to 67 levels and 2.6 on
//! average in a small drawing, as libheif brings chroma to full size in another way).
//!
//! A file that ends before its image does is an error. Otherwise damaged JPEGs are decoded as far
//! as libjpeg goes, like Pillow; in other formats damage is an error, even where Pillow continues
//! (such as after a wrong checksum in PNG). A PNG that only lacks its end chunk is complete.
//!
//! Damage that only takes time is bounded too: a progressive JPEG with very many scans is refused,
//! and only the first frame of an animation is read. [`Mode::Fast`] trades exactness for speed.
//!
//! For a model on a server, a [`Budget`] sets the size of sent images, and [`Encoding`] their
//! format.
//!
//! Deliberately absent: normalisation, which is done next to the model (see
//! [`Plan::normalization`]), and colour profiles, which the reference processors ignore too.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//! use trommel_preprocess::{Limits, Plan, Preparer, Reference};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let plan = Arc::new(Plan::load(Path::new("models/digits"), Reference::Auto)?);
//! let mut preparer = Preparer::new(plan, Limits::default());
//! let tensor = preparer.prepare(&std::fs::read("seven.jpg")?)?;
//! assert_eq!(tensor.pixels.len(), tensor.shape.len());
//! # Ok(())
//! # }
//! ```

mod bmp;
mod budget;
mod config;
mod decode;
mod encode;
mod error;
mod geometry;
mod gif;
#[cfg(feature = "heif")]
mod heif;
mod ink;
mod jpeg;
#[cfg(feature = "jxl")]
mod jxl;
mod kernel;
mod markers;
mod phash;
mod plan;
mod preparer;
mod resize;
mod thumbnail;
mod tiff_kinds;
mod tiff_tags;

pub use budget::{Budget, Family};
pub use encode::Encoding;
pub use error::{ConfigError, PrepareError};
pub use geometry::{Crop, Resize, Rounding};
pub use kernel::Arithmetic;
pub use plan::{ChannelOrder, Plan, Resample};
pub use preparer::{Limits, Prepared, Preparer};

pub use thumbnail::thumbnail;
pub use trommel_types::{Mode, Reference};
