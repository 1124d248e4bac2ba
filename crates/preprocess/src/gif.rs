//! The area around a GIF's first frame that is smaller than the logical screen.

use image::RgbImage;

/// A frame's position on the logical screen, and the colour that Pillow gives to the rest.
#[derive(Debug, PartialEq, Eq)]
struct FirstFrame {
    left: u32,
    top: u32,
    width: u32,
    height: u32,
    around: [u8; 3],
}

/// Fills the area outside the first frame: with the frame's transparent colour, else with the first
/// of its palette, like Pillow. (`image` leaves it black, browsers leave it transparent.)
pub(crate) fn fill_around_first_frame(bytes: &[u8], image: &mut RgbImage) {
    let Some(frame) = first_frame(bytes) else {
        return;
    };
    let columns = frame.left..frame.left + frame.width;
    let rows = frame.top..frame.top + frame.height;
    if frame.left == 0
        && frame.top == 0
        && frame.width >= image.width()
        && frame.height >= image.height()
    {
        return;
    }
    for (x, y, pixel) in image.enumerate_pixels_mut() {
        if !columns.contains(&x) || !rows.contains(&y) {
            pixel.0 = frame.around;
        }
    }
}

/// Reads the blocks up to the first image descriptor (GIF89a specification, sections 17 to 26).
fn first_frame(bytes: &[u8]) -> Option<FirstFrame> {
    let screen: &[u8; 13] = bytes.first_chunk()?;
    let (mut palette, mut at) = color_table(bytes, screen[10], 13)?;
    let mut transparent = None;
    loop {
        match *bytes.get(at)? {
            // An extension: a label, then sub-blocks up to an empty one.
            0x21 => {
                let label = *bytes.get(at + 1)?;
                at += 2;
                if let (0xF9, [4, flags, _, _, index, ..]) = (label, bytes.get(at..)?) {
                    transparent = (flags & 1 == 1).then_some(*index);
                }
                loop {
                    let length = usize::from(*bytes.get(at)?);
                    at += 1 + length;
                    if length == 0 {
                        break;
                    }
                }
            }
            0x2C => break,
            _ => return None,
        }
    }
    let descriptor: &[u8; 10] = bytes.get(at..)?.first_chunk()?;
    if let (local, _) = color_table(bytes, descriptor[9], at + 10)?
        && !local.is_empty()
    {
        palette = local;
    }
    let place = 3 * usize::from(transparent.unwrap_or(0));
    let around = palette
        .get(place..place + 3)
        .map_or([0; 3], |rgb| [rgb[0], rgb[1], rgb[2]]);
    let word = |at: usize| u32::from(u16::from_le_bytes([descriptor[at], descriptor[at + 1]]));
    Some(FirstFrame {
        left: word(1),
        top: word(3),
        width: word(5),
        height: word(7),
        around,
    })
}

/// The colour table that `flags` announce at `at`, or an empty slice, and its end.
fn color_table(bytes: &[u8], flags: u8, at: usize) -> Option<(&[u8], usize)> {
    let length = if flags & 0x80 == 0 {
        0
    } else {
        3 << ((flags & 7) + 1)
    };
    Some((bytes.get(at..at + length)?, at + length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transparent_colour_surrounds_a_small_frame() {
        let screen = b"GIF89a\x04\0\x03\0\x80\0\0";
        let palette = [1, 2, 3, 4, 5, 6];
        let control = [0x21, 0xF9, 4, 1, 0, 0, 1, 0];
        let comment = [0x21, 0xFE, 2, 7, 7, 0];
        let descriptor = [0x2C, 1, 0, 0, 0, 2, 0, 3, 0, 0];
        let plain = [&screen[..], &palette, &comment, &descriptor].concat();
        let frame = FirstFrame {
            left: 1,
            top: 0,
            width: 2,
            height: 3,
            around: [1, 2, 3],
        };
        assert_eq!(first_frame(&plain), Some(frame));
        let transparent = [&screen[..], &palette, &control, &descriptor].concat();
        assert_eq!(first_frame(&transparent).unwrap().around, [4, 5, 6]);

        let mut image = RgbImage::new(4, 3);
        fill_around_first_frame(&transparent, &mut image);
        let reds: Vec<_> = image
            .rows()
            .next()
            .unwrap()
            .map(|pixel| pixel.0[0])
            .collect();
        assert_eq!(reds, [4, 0, 0, 4]);
        assert_eq!(first_frame(&transparent[..20]), None);
    }
}
