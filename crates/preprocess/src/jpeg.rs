use trommel_types::ErrorKind;
use turbojpeg::{Colorspace, DecompressHeader, Decompressor, Error, PixelFormat, ScalingFactor};

use crate::{PrepareError, ink, markers};

/// Scans of a progressive file beyond which it is refused. Encoders write about ten, and at most
/// 64; a few kilobytes with thousands of scans would occupy a core for minutes.
const MAX_SCANS: u64 = 500;
/// Pixels times scans beyond which it is refused: some twenty seconds of work.
const MAX_SCANNED: u64 = 8_000_000_000;
/// Scans that are read whatever the size.
const MIN_SCANS: u64 = 64;

/// A decompressor as [`decode`] expects it.
pub(crate) fn decompressor() -> Result<Decompressor, PrepareError> {
    Decompressor::new().map_err(|error| {
        PrepareError::new(
            ErrorKind::Unsupported,
            format!("libjpeg-turbo does not start: {error}"),
        )
    })
}

/// What came of a JPEG.
pub(crate) struct Decoded {
    /// `(width, height)` as stored.
    pub(crate) original: (u32, u32),
    /// `(width, height)` of the pixels.
    pub(crate) size: (u32, u32),
}

/// Decodes JPEG into `HWC u8` RGB by libjpeg-turbo, with the flags that Pillow uses.
///
/// `check` is asked about `(width, height)` before memory is taken, and gives the number of eighths
/// to which the image is decoded. A file without its end is an error; other damage that libjpeg only
/// warns of is decoded as far as it goes, as Pillow does.
pub(crate) fn decode(
    decompressor: &mut Decompressor,
    bytes: &[u8],
    pixels: &mut Vec<u8>,
    check: impl FnOnce(u32, u32) -> Result<usize, PrepareError>,
) -> Result<Decoded, PrepareError> {
    let plain;
    let (header, data) = match decompressor.read_header(bytes) {
        Ok(header) => (header, bytes),
        Err(error) => {
            plain = markers::with_plain_header(bytes).ok_or_else(|| failed(bytes, &error))?;
            (
                decompressor
                    .read_header(&plain)
                    .map_err(|_| failed(bytes, &error))?,
                plain.as_slice(),
            )
        }
    };
    let DecompressHeader {
        width,
        height,
        colorspace,
        ..
    } = header;
    // A file of tables alone is no error to TurboJPEG, which then reports the size of the image
    // before.
    let size = markers::frame(data).map(|frame| (frame.width.into(), frame.height.into()));
    if size != Some((width, height)) {
        return Err(damaged(bytes, "it holds no image"));
    }
    let original = (width as u32, height as u32);
    let scaling = ScalingFactor::new(check(original.0, original.1)?, 8);
    let scans = MAX_SCANNED / (width * height).max(1) as u64;
    decompressor
        .set_scaling_factor(scaling)
        .and_then(|()| decompressor.set_scan_limit(scans.clamp(MIN_SCANS, MAX_SCANS) as u32))
        .map_err(|error| failed(bytes, &error))?;
    let (width, height) = (scaling.scale(width), scaling.scale(height));

    let has_ink = matches!(colorspace, Colorspace::CMYK | Colorspace::YCCK);
    let format = if has_ink {
        PixelFormat::CMYK
    } else {
        PixelFormat::RGB
    };
    let pitch = width * format.size();
    pixels.resize(pitch * height, 0);
    let output = turbojpeg::Image {
        pixels: pixels.as_mut_slice(),
        width,
        pitch,
        height,
        format,
    };
    if let Err(error) = decompressor.decompress(data, output)
        && (!is_warning(&error) || markers::ends_early(bytes))
    {
        return Err(failed(bytes, &error));
    }
    if has_ink {
        // Pillow takes the inks of every JPEG for inverted, as Adobe writes them: light already.
        ink::multiply_out(pixels);
    }
    Ok(Decoded {
        original,
        size: (width as u32, height as u32),
    })
}

/// Whether libjpeg has gone on to the end of the image and only warns.
///
/// TurboJPEG reports both alike and keeps the last message, so the texts of libjpeg's warnings
/// (`JWRN_…` in its `jerror.h`) have to tell.
fn is_warning(error: &Error) -> bool {
    const WARNINGS: [&str; 6] = [
        "Corrupt JPEG data",
        "Inconsistent progression sequence",
        "Invalid SOS parameters for sequential JPEG",
        "Premature end of JPEG file",
        "Unknown Adobe color transform",
        "Warning: unknown JFIF revision",
    ];
    matches!(error, Error::TurboJpegError(text) if WARNINGS.iter().any(|warning| text.starts_with(warning)))
}

fn failed(bytes: &[u8], error: &Error) -> PrepareError {
    let text = match error {
        Error::TurboJpegError(text) => text.as_str(),
        // No size and no colour space were found.
        _ => return damaged(bytes, "it holds no image"),
    };
    if text.contains("Maximum supported image dimension") {
        return PrepareError::new(
            ErrorKind::TooManyPixels,
            format!("JPEG is not read: {text}"),
        );
    }
    let unsupported = [
        "Unsupported JPEG",
        "Unsupported color conversion",
        "not supported",
        "not implemented",
        "has more than",
    ];
    if unsupported.iter().any(|words| text.contains(words)) {
        return PrepareError::new(ErrorKind::Unsupported, format!("JPEG is not read: {text}"));
    }
    damaged(bytes, text)
}

fn damaged(bytes: &[u8], reason: &str) -> PrepareError {
    if markers::ends_early(bytes) {
        let length = bytes.len();
        let message = format!("JPEG of {length} bytes ends before its image does");
        return PrepareError::new(ErrorKind::Truncated, message);
    }
    PrepareError::new(ErrorKind::Corrupt, format!("JPEG is damaged: {reason}"))
}
