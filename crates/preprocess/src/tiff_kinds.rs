//! Kinds of TIFF that `image` does not read, or reads differently from Pillow.

use std::io::{Cursor, ErrorKind as IoErrorKind};

use tiff::TiffError;
use tiff::decoder::{Decoder, DecodingResult, Limits};
use trommel_types::ErrorKind;

use crate::PrepareError;
use crate::tiff_tags::{BLACK_IS_ZERO, PALETTE, RGB, Tags, WHITE_IS_ZERO};

/// How samples become colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A colour map index of this many bits.
    Palette(u8),
    /// Gray of two or four bits, and whether white is zero.
    Gray(u8, bool),
    /// Gray clipped at 255: 16 or 32 bits, signed or unsigned, or floating point.
    Clipped,
    /// Gray with an additional sample that is dropped.
    GrayAnd,
    /// 8-bit colours premultiplied by their alpha.
    Associated8,
    /// The same with 16 bits.
    Associated16,
}

impl Kind {
    /// The kind of an image that is read here.
    pub(crate) fn of(tags: &Tags) -> Option<Self> {
        let bits = tags.bits.as_slice();
        if !tags.interleaved && tags.samples > 1 {
            return None;
        }
        Some(match (tags.photometric, tags.format, bits) {
            (PALETTE, 1, [bits @ (1 | 2 | 4 | 8)]) => Self::Palette(*bits as u8),
            (WHITE_IS_ZERO | BLACK_IS_ZERO, 1, [bits @ (2 | 4)]) => {
                Self::Gray(*bits as u8, tags.photometric == WHITE_IS_ZERO)
            }
            // Pillow does not invert these.
            (WHITE_IS_ZERO, 1, [16]) | (WHITE_IS_ZERO | BLACK_IS_ZERO, 3, [32]) => Self::Clipped,
            (BLACK_IS_ZERO, 2, [16]) | (BLACK_IS_ZERO, 1 | 2, [32]) => Self::Clipped,
            (BLACK_IS_ZERO, 1, [8, 8]) if matches!(tags.extra[..], [0 | 2]) => Self::GrayAnd,
            (RGB, 1, [8, 8, 8, 8]) if tags.extra == [1] => Self::Associated8,
            (RGB, 1, [16, 16, 16, 16]) if tags.extra == [1] => Self::Associated16,
            _ => return None,
        })
    }
}

/// Decodes an image of a kind that is read here to RGB, like Pillow's `convert("RGB")`.
///
/// # Errors
/// If it is truncated, damaged, takes more than `memory` bytes, or has an unsupported compression.
pub(crate) fn decode(
    bytes: &[u8],
    tags: &Tags,
    kind: Kind,
    (width, height): (u32, u32),
    memory: usize,
) -> Result<Vec<u8>, PrepareError> {
    let mut limits = Limits::default();
    limits.decoding_buffer_size = memory;
    limits.intermediate_buffer_size = memory;
    let photometric = match kind {
        Kind::Associated8 | Kind::Associated16 => RGB,
        _ => BLACK_IS_ZERO,
    };
    let patched = tags.with_photometric(bytes, photometric);
    let result = Decoder::new(Cursor::new(&*patched))
        .and_then(|decoder| decoder.with_limits(limits).read_image())
        .map_err(|error| failed(tags, &error))?;
    let pixels = (width as usize) * (height as usize);
    let rgb = match (kind, result) {
        (Kind::Palette(bits), DecodingResult::U8(samples)) => {
            let map = &tags.color_map;
            let colors = map.len() / 3;
            let color = |index: u8| {
                let channel = |number: usize| match usize::from(index) < colors {
                    true => (map[number * colors + usize::from(index)] >> 8) as u8,
                    false => 0,
                };
                [channel(0), channel(1), channel(2)]
            };
            expand(&samples, bits, width, color)
        }
        (Kind::Gray(bits, inverted), DecodingResult::U8(samples)) => {
            let most = (1_u8 << bits) - 1;
            expand(&samples, bits, width, |value| {
                let light = value * (255 / most);
                [if inverted { 255 - light } else { light }; 3]
            })
        }
        (Kind::Clipped, result) => gray(clipped(result)?),
        (Kind::GrayAnd, DecodingResult::U8(samples)) => gray(samples.iter().step_by(2).copied()),
        (Kind::Associated8, DecodingResult::U8(samples)) => divided(samples),
        // Pillow keeps the high bytes before it divides.
        (Kind::Associated16, DecodingResult::U16(samples)) => {
            divided(samples.iter().map(|sample| (sample >> 8) as u8).collect())
        }
        _ => return Err(unsupported(tags)),
    };
    match rgb.len() == 3 * pixels {
        true => Ok(rgb),
        false => Err(unsupported(tags)),
    }
}

/// The samples of byte-aligned rows, as colours.
fn expand(samples: &[u8], bits: u8, width: u32, color: impl Fn(u8) -> [u8; 3]) -> Vec<u8> {
    let row = (width as usize * usize::from(bits)).div_ceil(8);
    let mask = (1_u16 << bits) - 1;
    let colors = samples.chunks_exact(row.max(1)).flat_map(|row| {
        let each = row.iter().flat_map(|byte| {
            let places = (0..8 / bits).rev();
            places.map(move |place| (u16::from(*byte) >> (place * bits) & mask) as u8)
        });
        each.take(width as usize)
    });
    colors.flat_map(color).collect()
}

fn gray(values: impl IntoIterator<Item = u8>) -> Vec<u8> {
    values.into_iter().flat_map(|value| [value; 3]).collect()
}

/// Values clipped at 0 and 255; floats are truncated.
fn clipped(samples: DecodingResult) -> Result<Vec<u8>, PrepareError> {
    fn all<T: Copy>(samples: &[T], to_byte: impl Fn(T) -> u8) -> Vec<u8> {
        samples.iter().map(|sample| to_byte(*sample)).collect()
    }
    Ok(match samples {
        DecodingResult::U16(samples) => all(&samples, |value| value.min(255) as u8),
        DecodingResult::I16(samples) => all(&samples, |value| value.clamp(0, 255) as u8),
        // Pillow reads them as signed.
        DecodingResult::U32(samples) => all(&samples, |value| (value as i32).clamp(0, 255) as u8),
        DecodingResult::I32(samples) => all(&samples, |value| value.clamp(0, 255) as u8),
        DecodingResult::F32(samples) => all(&samples, |value| value as u8),
        _ => {
            let message = "TIFF: its samples are of an unexpected kind";
            return Err(PrepareError::new(ErrorKind::Unsupported, message));
        }
    })
}

/// Colours divided by their premultiplied alpha.
fn divided(samples: Vec<u8>) -> Vec<u8> {
    let (pixels, _) = samples.as_chunks::<4>();
    let color = |&[red, green, blue, alpha]: &[u8; 4]| {
        [red, green, blue].map(|value| match alpha {
            0 => 0,
            alpha => (u32::from(value) * 255 / u32::from(alpha)).min(255) as u8,
        })
    };
    pixels.iter().flat_map(color).collect()
}

/// Describes an unsupported TIFF, and the remedy.
pub(crate) fn unsupported(tags: &Tags) -> PrepareError {
    let message = format!(
        "TIFF: {} is not read; convert it to 8-bit RGB with LZW compression (such as by `magick IN -depth 8 -compress LZW OUT.tif`)",
        tags.describe()
    );
    PrepareError::new(ErrorKind::Unsupported, message)
}

fn failed(tags: &Tags, error: &TiffError) -> PrepareError {
    let kind = match error {
        TiffError::UnsupportedError(_) => return unsupported(tags),
        TiffError::IoError(error) if error.kind() == IoErrorKind::UnexpectedEof => {
            ErrorKind::Truncated
        }
        TiffError::LimitsExceeded => ErrorKind::TooManyPixels,
        _ => ErrorKind::Corrupt,
    };
    PrepareError::new(kind, format!("TIFF: {error}"))
}
