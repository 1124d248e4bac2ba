//! HEIC and AVIF, by libheif.

use image::RgbImage;
use libheif_rs::{
    ColorSpace, HeifContext, HeifError, HeifErrorCode, HeifErrorSubCode, LibHeif, RgbChroma,
};
use trommel_types::ErrorKind;

use crate::{Limits, PrepareError};

/// Decodes the primary image to 8-bit RGB, upright, into `pixels`.
pub(crate) fn decode(
    bytes: &[u8],
    limits: &Limits,
    mut pixels: Vec<u8>,
) -> Result<RgbImage, PrepareError> {
    let failed = |error| failed(bytes, &error);
    let mut context = HeifContext::new().map_err(failed)?;
    // libheif checks these before it allocates memory for the sizes stated in the file.
    let mut security = context.security_limits();
    security.set_max_image_size_pixels(limits.max_pixels);
    context.set_security_limits(&security).map_err(failed)?;
    // The stage already has one thread per core.
    context.set_max_decoding_threads(0);
    context.read_bytes(bytes).map_err(failed)?;
    let handle = context.primary_image_handle().map_err(failed)?;
    limits.check_size(handle.width(), handle.height())?;

    let image = LibHeif::new()
        .decode(&handle, ColorSpace::Rgb(RgbChroma::Rgb), None)
        .map_err(failed)?;
    let planes = image.planes();
    let plane = planes.interleaved.ok_or_else(|| {
        PrepareError::new(ErrorKind::Corrupt, "HEIF: its image has no RGB pixels")
    })?;
    pixels.clear();
    for row in plane.data.chunks(plane.stride).take(plane.height as usize) {
        pixels.extend_from_slice(&row[..3 * plane.width as usize]);
    }
    RgbImage::from_raw(plane.width, plane.height, pixels)
        .ok_or_else(|| PrepareError::new(ErrorKind::Corrupt, "HEIF: rows of its image are missing"))
}

fn failed(bytes: &[u8], error: &HeifError) -> PrepareError {
    let kind = match (error.code, error.sub_code) {
        (_, HeifErrorSubCode::SecurityLimitExceeded) => ErrorKind::TooManyPixels,
        (HeifErrorCode::UnsupportedFileType | HeifErrorCode::UnsupportedFeature, _) => {
            ErrorKind::Unsupported
        }
        (_, HeifErrorSubCode::EndOfData) => ErrorKind::Truncated,
        _ if ends_early(bytes) => ErrorKind::Truncated,
        _ => ErrorKind::Corrupt,
    };
    PrepareError::new(kind, format!("HEIF: {}", error.message))
}

/// Whether the last box extends beyond the end of the file. A box begins with its size in 32 bits
/// and its name (ISO/IEC 14496-12, 4.2); a size of 1 is followed by a 64-bit size, 0 means up to
/// the end of the file.
fn ends_early(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    while let Some((size, content)) = rest.split_first_chunk() {
        let size = match u32::from_be_bytes(*size) {
            0 => return false,
            1 => match content.get(4..12).and_then(|size| size.first_chunk()) {
                Some(size) => u64::from_be_bytes(*size),
                None => return true,
            },
            size => size.into(),
        };
        match usize::try_from(size).ok().and_then(|size| rest.get(size..)) {
            Some(_) if size < 8 => return false,
            Some(next) => rest = next,
            None => return true,
        }
    }
    !rest.is_empty()
}
