use trommel_types::ErrorKind;
use turbojpeg::{PixelFormat, ScalingFactor};

use crate::geometry::Window;
use crate::kernel::turbo::{Header, Region, Turbo};
use crate::{PrepareError, ink, markers};

/// Most scans of a progressive file. Encoders write about ten, at most 64; a few kilobytes with
/// thousands of scans would occupy a core for minutes.
const MAX_SCANS: u64 = 500;
/// Most pixels times scans: about twenty seconds of work.
const MAX_SCANNED: u64 = 8_000_000_000;
/// Number of scans that is always accepted.
const MIN_SCANS: u64 = 64;

/// Additional blocks decoded around the wanted region: libjpeg smooths chroma over one block edge,
/// and over two in an unfinished progressive image, and does not know the neighbours at the edge of
/// a region.
const MARGIN: usize = 3;

/// TurboJPEG's message for a region that begins within a block. It derives the width of blocks from
/// the name of the subsampling, and some files write a common one with larger factors.
const OTHER_BLOCKS: &str = "cropping region";

/// A decompressor for [`decode`].
pub(crate) fn decompressor() -> Result<Turbo, PrepareError> {
    Turbo::new().map_err(|error| {
        PrepareError::new(
            ErrorKind::Unsupported,
            format!("libjpeg-turbo does not start: {error}"),
        )
    })
}

/// The required part of an image.
pub(crate) struct Wanted {
    /// The scale in eighths.
    pub(crate) eighths: u32,
    /// The required pixels of the scaled image.
    pub(crate) window: Window,
}

/// The result of decoding a JPEG.
pub(crate) struct Decoded {
    /// `(width, height)` as stored.
    pub(crate) original: (u32, u32),
    /// `(width, height)` of the scaled image.
    pub(crate) size: (u32, u32),
    /// The part of it in the pixels.
    pub(crate) window: Window,
}

/// Decodes JPEG to `HWC u8` RGB with libjpeg-turbo and the flags of Pillow.
///
/// `check` is called with `(width, height)` before memory is allocated, and returns the required
/// part; that and a margin are decoded, with the same values as in the whole image. A file without
/// its end is an error, even if the end is not needed; other damage that libjpeg only warns about
/// is decoded as far as possible, like Pillow.
pub(crate) fn decode(
    turbo: &mut Turbo,
    bytes: &[u8],
    pixels: &mut Vec<u8>,
    check: impl FnOnce(u32, u32) -> Result<Wanted, PrepareError>,
) -> Result<Decoded, PrepareError> {
    let plain;
    let (header, data) = match turbo.read_header(bytes) {
        Ok(header) => (header, bytes),
        Err(error) => {
            plain = markers::with_plain_header(bytes).ok_or_else(|| failed(bytes, &error))?;
            (
                turbo
                    .read_header(&plain)
                    .map_err(|_| failed(bytes, &error))?,
                plain.as_slice(),
            )
        }
    };
    // A file with only tables is no error to TurboJPEG, which then reports the size of the previous
    // image.
    let size = markers::frame(data).map(|frame| (frame.width.into(), frame.height.into()));
    if size != Some((header.width, header.height)) {
        return Err(damaged(bytes, "it holds no image"));
    }
    let original = (header.width as u32, header.height as u32);
    let wanted = check(original.0, original.1)?;
    let scaling = ScalingFactor::new(wanted.eighths as usize, 8);
    let mut region = region(&header, scaling, &wanted.window);

    let scans = MAX_SCANNED / (header.width * header.height).max(1) as u64;
    let scans = scans.clamp(MIN_SCANS, MAX_SCANS) as u32;
    let format = match header.has_ink {
        true => PixelFormat::CMYK,
        false => PixelFormat::RGB,
    };
    let mut decode = |region: Region| {
        pixels.resize(region.width * region.height * format.size(), 0);
        turbo.decode(data, (scaling, region), scans, format, pixels)
    };
    let mut decoded = decode(region);
    if matches!(&decoded, Err(error) if error.contains(OTHER_BLOCKS)) {
        region = whole(&header, scaling);
        decoded = decode(region);
    }
    if let Err(error) = decoded
        && (!is_warning(&error) || markers::ends_early(bytes))
    {
        return Err(failed(bytes, &error));
    }
    if header.has_ink {
        // Pillow treats the inks of every JPEG as inverted, as Adobe writes them: light already.
        ink::multiply_out(pixels);
    }
    let range = |start, length| start as u32..(start + length) as u32;
    Ok(Decoded {
        original,
        size: (
            scaling.scale(header.width) as u32,
            scaling.scale(header.height) as u32,
        ),
        window: Window {
            columns: range(region.x, region.width),
            rows: range(region.y, region.height),
        },
    })
}

/// The whole image.
fn whole(header: &Header, scaling: ScalingFactor) -> Region {
    Region {
        x: 0,
        y: 0,
        width: scaling.scale(header.width),
        height: scaling.scale(header.height),
    }
}

/// The region to decode for a window.
fn region(header: &Header, scaling: ScalingFactor, window: &Window) -> Region {
    let all = whole(header, scaling);
    let Some(block) = header.block else {
        return all;
    };
    let around = |start: u32, end: u32, block: usize, length: usize| {
        let block = scaling.scale(block);
        let start = (start as usize / block).saturating_sub(MARGIN) * block;
        let end = (end as usize + MARGIN * block).min(length);
        (start, end - start)
    };
    let Window { columns, rows } = window;
    let (x, width) = around(columns.start, columns.end, block.0, all.width);
    let (y, height) = around(rows.start, rows.end, block.1, all.height);
    Region {
        x,
        y,
        width,
        height,
    }
}

/// Whether libjpeg reached the end of the image and only warned.
///
/// TurboJPEG reports both alike and keeps the last message, so this has to rely on the texts of
/// libjpeg's warnings (`JWRN_…` in its `jerror.h`).
fn is_warning(error: &str) -> bool {
    const WARNINGS: [&str; 6] = [
        "Corrupt JPEG data",
        "Inconsistent progression sequence",
        "Invalid SOS parameters for sequential JPEG",
        "Premature end of JPEG file",
        "Unknown Adobe color transform",
        "Warning: unknown JFIF revision",
    ];
    WARNINGS.iter().any(|warning| error.starts_with(warning))
}

fn failed(bytes: &[u8], text: &str) -> PrepareError {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The pixels of a window of the image, cut from the decoded region.
    fn pixels_of(turbo: &mut Turbo, bytes: &[u8], eighths: u32, window: &Window) -> Vec<u8> {
        let mut pixels = Vec::new();
        let wanted = Wanted {
            eighths,
            window: window.clone(),
        };
        let decoded = decode(turbo, bytes, &mut pixels, |_, _| Ok(wanted)).expect("a good file");
        let pitch = 3 * decoded.window.columns.len();
        let rows = pixels.chunks_exact(pitch);
        let rows = rows.skip((window.rows.start - decoded.window.rows.start) as usize);
        let left = 3 * (window.columns.start - decoded.window.columns.start) as usize;
        rows.take(window.rows.len())
            .flat_map(|row| &row[left..left + 3 * window.columns.len()])
            .copied()
            .collect()
    }

    /// 4:4:4 may be written with the factors 2 × 1 for all channels: then blocks are twice as wide
    /// as TurboJPEG reports.
    #[test]
    fn blocks_that_are_wider_than_their_name_says_stop_nothing() {
        let mut bytes = include_bytes!("../tests/fixtures/images/jpeg_444.jpg").to_vec();
        let frame = bytes.windows(2).position(|pair| pair == [0xff, 0xc0]);
        let frame = frame.expect("a baseline file");
        for channel in 0..3 {
            bytes[frame + 11 + 3 * channel] = 0x21;
        }
        let mut turbo = decompressor().expect("libjpeg-turbo starts");
        let size = (53, 37);
        let all = pixels_of(&mut turbo, &bytes, 8, &Window::whole(size));
        let window = Window {
            columns: 33..45,
            rows: 0..37,
        };
        let found = pixels_of(&mut turbo, &bytes, 8, &window);
        let rows = all.chunks_exact(3 * 53);
        let expected: Vec<u8> = rows.flat_map(|row| &row[3 * 33..3 * 45]).copied().collect();
        assert!(found == expected);
    }

    #[test]
    fn a_region_has_the_pixels_of_the_whole_image() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/images");
        let mut turbo = decompressor().expect("libjpeg-turbo starts");
        let mut smaller = 0;
        for entry in folder.read_dir().expect("the fixtures' folder").flatten() {
            let bytes = std::fs::read(entry.path()).expect("a readable fixture");
            if !bytes.starts_with(b"\xff\xd8") {
                continue;
            }
            for eighths in [8, 4, 2, 1] {
                let mut size = (0, 0);
                let wanted = |width: u32, height: u32| {
                    size = (
                        (width * eighths).div_ceil(8),
                        (height * eighths).div_ceil(8),
                    );
                    Ok(Wanted {
                        eighths,
                        window: Window::whole(size),
                    })
                };
                let mut whole = Vec::new();
                decode(&mut turbo, &bytes, &mut whole, wanted).expect("a good file");
                for (start, end) in [(0.0, 0.4), (0.3, 0.7), (0.45, 0.5), (0.6, 1.0)] {
                    let part = |length: u32| {
                        let at = |share: f64| (f64::from(length) * share) as u32;
                        at(start)..at(end).max(at(start) + 1)
                    };
                    for window in [
                        Window {
                            columns: part(size.0),
                            rows: part(size.1),
                        },
                        Window {
                            columns: part(size.0),
                            rows: 0..size.1,
                        },
                        Window {
                            columns: 0..size.0,
                            rows: part(size.1),
                        },
                    ] {
                        let found = pixels_of(&mut turbo, &bytes, eighths, &window);
                        let rows = whole.chunks_exact(3 * size.0 as usize);
                        let rows = rows
                            .skip(window.rows.start as usize)
                            .take(window.rows.len());
                        let bytes =
                            3 * window.columns.start as usize..3 * window.columns.end as usize;
                        let expected: Vec<u8> =
                            rows.flat_map(|row| &row[bytes.clone()]).copied().collect();
                        assert!(found == expected, "{:?} {eighths} {window:?}", entry.path());
                        smaller += usize::from(found.len() < whole.len());
                    }
                }
            }
        }
        assert!(
            smaller > 100,
            "only {smaller} regions were smaller than their images"
        );
    }
}
