//! Printing colours: cyan, magenta, yellow and black.

use std::io::{Cursor, ErrorKind as IoErrorKind};

use tiff::TiffError;
use tiff::decoder::{Decoder, DecodingResult, Limits};
use trommel_types::ErrorKind;

use crate::PrepareError;

/// Decodes a TIFF file with four interleaved inks to RGB, which `image` would round differently.
///
/// If the inks are not interleaved, the length of the result is not three bytes per pixel.
pub(crate) fn decode_tiff(bytes: &[u8], memory: usize) -> Result<Vec<u8>, PrepareError> {
    let mut limits = Limits::default();
    limits.decoding_buffer_size = memory;
    limits.intermediate_buffer_size = memory;
    let result = Decoder::new(Cursor::new(bytes))
        .and_then(|decoder| decoder.with_limits(limits).read_image())
        .map_err(|error| failed(&error))?;
    let DecodingResult::U8(mut pixels) = result else {
        return Ok(Vec::new());
    };
    pixels.iter_mut().for_each(|ink| *ink = 255 - *ink);
    multiply_out(&mut pixels);
    Ok(pixels)
}

fn failed(error: &TiffError) -> PrepareError {
    let kind = match error {
        TiffError::IoError(error) if error.kind() == IoErrorKind::UnexpectedEof => {
            ErrorKind::Truncated
        }
        TiffError::UnsupportedError(_) => ErrorKind::Unsupported,
        TiffError::LimitsExceeded => ErrorKind::TooManyPixels,
        _ => ErrorKind::Corrupt,
    };
    PrepareError::new(kind, format!("TIFF: {error}"))
}

/// CMYK to RGB like Pillow, in place: the first three quarters of `light` are the result.
///
/// `light` has the inverted inks, `255 − C` and so on: `R = (255 − C) × (255 − K) ÷ 255`, rounded
/// like Pillow's `MULDIV255`.
pub(crate) fn multiply_out(light: &mut Vec<u8>) {
    let count = light.len() / 4;
    for index in 0..count {
        let value = |channel: usize| u32::from(light[4 * index + channel]);
        let rgb = [0, 1, 2].map(|channel| {
            let product = value(channel) * value(3) + 128;
            (((product >> 8) + product) >> 8) as u8
        });
        light[3 * index..3 * index + 3].copy_from_slice(&rgb);
    }
    light.truncate(3 * count);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn black_ink_takes_light_from_every_colour() {
        let mut light = vec![255, 128, 0, 255, 255, 128, 0, 128, 255, 255, 255, 0];
        multiply_out(&mut light);
        assert_eq!(light, [255, 128, 0, 128, 64, 0, 0, 0, 0]);
    }
}
