use std::sync::Arc;

use trommel_types::ErrorKind;
use turbojpeg::{Image, PixelFormat, Subsamp};

use crate::{Limits, Mode, Plan, PrepareError, Preparer, Resize};

/// JPEG quality of thumbnails.
const QUALITY: i32 = 82;

/// Makes a small upright JPEG of an image, with `side` pixels on its longer side. Returns it with
/// its `(width, height)`.
///
/// # Errors
/// As [`Preparer::decode`].
pub fn thumbnail(
    bytes: &[u8],
    side: u32,
    limits: Limits,
) -> Result<(Vec<u8>, (u32, u32)), PrepareError> {
    let plan = Plan::plain(Resize::Fit {
        height: side,
        width: side,
    });
    let mut preparer = Preparer::new(Arc::new(plan), limits).with_mode(Mode::Fast);
    let small = preparer.prepare(bytes)?;
    let (width, height) = (small.shape.width, small.shape.height);
    let image = Image {
        pixels: small.pixels.as_slice(),
        width: width as usize,
        pitch: 3 * width as usize,
        height: height as usize,
        format: PixelFormat::RGB,
    };
    let jpeg = turbojpeg::compress(image, QUALITY, Subsamp::Sub2x2).map_err(|error| {
        let message = format!("no thumbnail can be made: {error}");
        PrepareError::new(ErrorKind::Unsupported, message)
    })?;
    Ok((jpeg.to_vec(), (width, height)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thumbnail_is_a_small_jpeg_of_the_same_shape() {
        let photo = include_bytes!("../tests/fixtures/images/photo.jpg"); // 320 × 240
        let (jpeg, size) = thumbnail(photo, 64, Limits::default()).expect("a good file");
        assert_eq!(size, (64, 48));
        let (again, size) = thumbnail(&jpeg, 64, Limits::default()).expect("a JPEG");
        assert_eq!(size, (64, 48));
        assert!(again.len() < photo.len());
        assert!(thumbnail(b"text", 64, Limits::default()).is_err());
    }
}
