//! JPEG XL, by jxl-oxide.

use image::ColorType;
use jxl_oxide::{AllocTracker, JxlImage, JxlThreadPool, PixelFormat};
use trommel_types::ErrorKind;

use crate::{Limits, PrepareError};

/// Memory per pixel: the decoder computes in floating point, with several copies.
const PIXEL_BYTES: u64 = 128;
/// Fixed memory.
const BASE_BYTES: u64 = 64 << 20;

/// Decodes the first frame, upright, to 8 bits per sample. Returns `(width, height)` and the kind
/// of samples.
pub(crate) fn decode(
    bytes: &[u8],
    limits: &Limits,
    samples: &mut Vec<u8>,
) -> Result<((u32, u32), ColorType), PrepareError> {
    let memory = BASE_BYTES + PIXEL_BYTES * limits.max_pixels.min(u64::from(u32::MAX));
    let tracker = AllocTracker::with_limit(usize::try_from(memory).unwrap_or(usize::MAX));
    let image = JxlImage::builder()
        // The stage already has one thread per core.
        .pool(JxlThreadPool::none())
        .alloc_tracker(tracker)
        .read(bytes)
        .map_err(|error| failed(error.as_ref()))?;
    limits.check_size(image.width(), image.height())?;
    if !image.is_loading_done() {
        let message = format!(
            "JPEG XL of {} bytes ends before its image does",
            bytes.len()
        );
        return Err(PrepareError::new(ErrorKind::Truncated, message));
    }
    let color = match image.pixel_format() {
        PixelFormat::Gray => ColorType::L8,
        PixelFormat::Graya => ColorType::La8,
        PixelFormat::Rgb => ColorType::Rgb8,
        PixelFormat::Rgba => ColorType::Rgba8,
        PixelFormat::Cmyk | PixelFormat::Cmyka => {
            let message = "JPEG XL: inks are not read; convert it to RGB";
            return Err(PrepareError::new(ErrorKind::Unsupported, message));
        }
    };
    let frame = image
        .render_frame(0)
        .map_err(|error| failed(error.as_ref()))?;
    let mut stream = frame.stream();
    let size = (stream.width(), stream.height());
    limits.check_size(size.0, size.1)?;
    let length = size.0 as usize * size.1 as usize * stream.channels() as usize;
    samples.clear();
    samples.resize(length, 0);
    stream.write_to_buffer(samples.as_mut_slice());
    Ok((size, color))
}

fn failed(error: &(dyn std::error::Error + 'static)) -> PrepareError {
    let text = error.to_string();
    let kind = if text.contains("unexpected end") || text.contains("end of") {
        ErrorKind::Truncated
    } else if text.contains("out of memory") || text.contains("limit") {
        ErrorKind::TooManyPixels
    } else {
        ErrorKind::Corrupt
    };
    PrepareError::new(kind, format!("JPEG XL: {text}"))
}
