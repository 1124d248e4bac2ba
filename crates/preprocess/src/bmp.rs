//! The only difference between Pillow and `image` in reading BMP files.

/// Widens the channels of 16-bit pixels as Pillow does: `level × 255 ÷ 31`, rounded down.
///
/// `image` rounds to nearest. `pixels` is its result for `bytes`; files of other depths are not
/// changed.
pub(crate) fn round_16_bit_down(bytes: &[u8], pixels: &mut [u8]) {
    let Some(largest) = largest_levels(bytes) else {
        return;
    };
    for pixel in pixels.as_chunks_mut::<3>().0 {
        for (value, largest) in pixel.iter_mut().zip(largest) {
            let level = (u32::from(*value) * largest + 127) / 255;
            *value = (level * 255 / largest) as u8;
        }
    }
}

/// The maximum of red, green and blue in a 16-bit file, in the two layouts that Pillow supports.
fn largest_levels(bytes: &[u8]) -> Option<[u32; 3]> {
    const BITS_PER_PIXEL: usize = 28;
    const COMPRESSION: usize = 30;
    const MASKS: usize = 54;
    let word = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    if word(14)? < 40 || word(BITS_PER_PIXEL)? & 0xFFFF != 16 {
        return None;
    }
    let masks = [word(MASKS)?, word(MASKS + 4)?, word(MASKS + 8)?];
    match (word(COMPRESSION)?, masks) {
        (0, _) | (3, [0x7C00, 0x03E0, 0x001F]) => Some([31, 31, 31]),
        (3, [0xF800, 0x07E0, 0x001F]) => Some([31, 63, 31]),
        _ => None,
    }
}
