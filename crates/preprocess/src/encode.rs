//! Encodes images as files for servers.

use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::{ExtendedColorType, ImageEncoder};
use serde::Serialize;
use trommel_types::{ErrorKind, Shape};
use turbojpeg::{Image, PixelFormat, Subsamp};

use crate::PrepareError;

/// The format of a prepared image's pixels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// Raw pixels, `HWC u8`.
    #[default]
    Raw,
    /// JPEG of this quality, 1 to 100, with half-size chroma up to 90 and full size above.
    Jpeg(u8),
    /// PNG, lossless.
    Png,
}

impl Encoding {
    /// Whether pixels are not encoded.
    pub fn is_raw(&self) -> bool {
        *self == Self::Raw
    }

    /// Encodes RGB pixels of this shape.
    pub(crate) fn encode(self, pixels: Vec<u8>, shape: Shape) -> Result<Vec<u8>, PrepareError> {
        let failed = |reason: String| PrepareError::new(ErrorKind::Unsupported, reason);
        match self {
            Self::Raw => Ok(pixels),
            Self::Jpeg(quality) => {
                let image = Image {
                    pixels: &*pixels,
                    width: shape.width as usize,
                    pitch: shape.width as usize * 3,
                    height: shape.height as usize,
                    format: PixelFormat::RGB,
                };
                let chroma = match quality {
                    91.. => Subsamp::None,
                    _ => Subsamp::Sub2x2,
                };
                let written = turbojpeg::compress(image, quality.into(), chroma);
                let written = written.map_err(|error| {
                    failed(format!("cannot be written as JPEG for the server: {error}"))
                })?;
                Ok(written.to_vec())
            }
            Self::Png => {
                let mut written = Vec::new();
                PngEncoder::new_with_quality(
                    &mut written,
                    CompressionType::Fast,
                    FilterType::Adaptive,
                )
                .write_image(&pixels, shape.width, shape.height, ExtendedColorType::Rgb8)
                .map_err(|error| failed(format!("cannot be written as PNG: {error}")))?;
                Ok(written)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        height: 30,
        width: 40,
        channels: 3,
    };

    fn pixels() -> Vec<u8> {
        (0..SHAPE.len()).map(|value| (value / 40) as u8).collect()
    }

    #[test]
    fn a_png_has_every_pixel_and_a_jpeg_nearly() {
        let png = Encoding::Png.encode(pixels(), SHAPE).unwrap();
        let read = image::load_from_memory(&png).unwrap().to_rgb8();
        assert_eq!(read.into_raw(), pixels());
        let jpeg = Encoding::Jpeg(95).encode(pixels(), SHAPE).unwrap();
        let read: turbojpeg::Image<Vec<u8>> =
            turbojpeg::decompress(&jpeg, PixelFormat::RGB).unwrap();
        assert_eq!((read.width, read.height), (40, 30));
        let off = read.pixels.iter().zip(pixels());
        let worst = off.map(|(read, pixel)| read.abs_diff(pixel)).max();
        assert!(worst.unwrap() < 12, "{worst:?}");
        assert_eq!(Encoding::Raw.encode(pixels(), SHAPE).unwrap(), pixels());
    }
}
