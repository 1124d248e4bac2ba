//! Parses marker segments of a JPEG file (ITU-T T.81, annex B) that libjpeg-turbo does not report.

use std::iter;

use image::metadata::Orientation;

const START_OF_SCAN: u8 = 0xDA;
const END_OF_IMAGE: u8 = 0xD9;
const JFIF: u8 = 0xE0;
const EXIF_OR_XMP: u8 = 0xE1;
const ADOBE: u8 = 0xEE;

/// A marker and its content.
struct Segment<'a> {
    code: u8,
    /// Empty for markers without content.
    body: &'a [u8],
    /// Position of the marker.
    start: usize,
}

/// The segments of the whole file, without entropy-coded data and stray bytes.
///
/// Ends after the end-of-image marker, or where the file ends before one.
fn segments(bytes: &[u8]) -> impl Iterator<Item = Segment<'_>> {
    let mut position = 2;
    iter::from_fn(move || {
        let rest = bytes.get(position..)?;
        // A stuffed 0 belongs to the coded data, and an FF may be padding before a marker.
        let offset = rest
            .windows(2)
            .position(|pair| pair[0] == 0xFF && !matches!(pair[1], 0 | 0xFF))?;
        let start = position + offset;
        let code = bytes[start + 1];
        if matches!(code, 0x01 | 0xD0..=0xD8) {
            position = start + 2;
            return Some(Segment {
                code,
                body: &[],
                start,
            });
        }
        if code == END_OF_IMAGE {
            position = bytes.len();
            return Some(Segment {
                code,
                body: &[],
                start,
            });
        }
        let length = usize::from(u16::from_be_bytes(*bytes.get(start + 2..)?.first_chunk()?));
        let body = bytes.get(start + 4..start + 2 + length)?;
        position = start + 2 + length;
        Some(Segment { code, body, start })
    })
}

/// The segments before the image data.
fn header(bytes: &[u8]) -> impl Iterator<Item = Segment<'_>> {
    segments(bytes).take_while(|segment| !matches!(segment.code, START_OF_SCAN | END_OF_IMAGE))
}

/// Whether the file lacks an end-of-image marker, like a truncated one.
///
/// Examines every byte: for files that have failed.
pub(crate) fn ends_early(bytes: &[u8]) -> bool {
    // Damage may hide where segments begin, but not the end of the file. Some writers add padding.
    let end = bytes
        .iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |last| last + 1);
    let is_whole = bytes[..end].ends_with(&[0xFF, END_OF_IMAGE]);
    !is_whole && !segments(bytes).any(|segment| segment.code == END_OF_IMAGE)
}

/// The contents of a start-of-frame segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) width: u16,
    pub(crate) height: u16,
    pub(crate) components: u8,
}

/// The frame header of the file's first image.
pub(crate) fn frame(bytes: &[u8]) -> Option<Frame> {
    let is_frame = |code| matches!(code, 0xC0..=0xCF) && !matches!(code, 0xC4 | 0xC8 | 0xCC);
    let body = header(bytes).find(|segment| is_frame(segment.code))?.body;
    let &[_precision, h1, h0, w1, w0, components, ..] = body else {
        return None;
    };
    Some(Frame {
        width: u16::from_be_bytes([w1, w0]),
        height: u16::from_be_bytes([h1, h0]),
        components,
    })
}

/// The orientation of the image, from its EXIF segment or else its XMP segment.
pub(crate) fn orientation(bytes: &[u8]) -> Orientation {
    let application = |prefix: &'static [u8]| {
        header(bytes)
            .filter(|segment| segment.code == EXIF_OR_XMP)
            .find_map(move |segment| segment.body.strip_prefix(prefix))
    };
    application(b"Exif\0\0")
        .and_then(Orientation::from_exif_chunk)
        .or_else(|| application(b"http://ns.adobe.com/xap/1.0/\0").and_then(xmp_orientation))
        .unwrap_or(Orientation::NoTransforms)
}

/// `tiff:Orientation` of an XMP packet, as an attribute or an element.
pub(crate) fn xmp_orientation(packet: &[u8]) -> Option<Orientation> {
    const NAME: &[u8] = b"tiff:Orientation";
    let found = packet
        .windows(NAME.len())
        .position(|window| window == NAME)?;
    let value = &packet[found + NAME.len()..];
    let value = value
        .strip_prefix(b"=\"")
        .or_else(|| value.strip_prefix(b">"))?;
    let digit = value.first().filter(|digit| digit.is_ascii_digit())?;
    Orientation::from_exif(digit - b'0')
}

/// The file without faults in its header that libjpeg only warns about: stray bytes, a damaged
/// colour profile, an unknown version of JFIF or Adobe colour transform.
///
/// TurboJPEG reports no size for such a header, while libjpeg (and so Pillow) reads on. `None` if
/// the file has no image data.
pub(crate) fn with_plain_header(bytes: &[u8]) -> Option<Vec<u8>> {
    let data = segments(bytes)
        .find(|segment| segment.code == START_OF_SCAN)?
        .start;
    let components = frame(bytes)?.components;
    let mut plain = bytes[..2].to_vec();
    for Segment { code, body, .. } in header(bytes) {
        let mut body = body.to_vec();
        match code {
            JFIF if body.starts_with(b"JFIF\0") && body.len() >= 14 => body[5] = 1,
            ADOBE if body.starts_with(b"Adobe") && body.len() >= 12 => {
                let transform = &mut body[11];
                // libjpeg's assumption for an unknown transform.
                let assumed = if components == 4 { 2 } else { 1 };
                if !(*transform == 0 || *transform == assumed) {
                    *transform = assumed;
                }
            }
            0xE0..=0xEF | 0xFE | 0x01 | 0xD0..=0xD8 => continue,
            _ => {}
        }
        let length = u16::try_from(body.len() + 2).ok()?;
        plain.extend([0xFF, code]);
        plain.extend(length.to_be_bytes());
        plain.extend(body);
    }
    plain.extend_from_slice(&bytes[data..]);
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(parts: &[&[u8]]) -> Vec<u8> {
        [&[&[0xFF, 0xD8][..]], parts].concat().concat()
    }

    const FRAME: &[u8] = &[0xFF, 0xC0, 0, 8, 8, 0, 5, 0, 7, 3];
    const SCAN: &[u8] = &[0xFF, 0xDA, 0, 3, 0, 1, 0xFF, 0, 2, 0xFF, 0xD0, 3];

    #[test]
    fn a_file_ends_with_its_marker() {
        assert!(!ends_early(&file(&[
            FRAME,
            SCAN,
            &[0xFF, 0xD9],
            b"trailing bytes"
        ])));
        assert!(ends_early(&file(&[FRAME, SCAN])));
        // A segment that claims to be longer than the file hides the end when segments are
        // followed.
        let damage = &[0xFF, 0xC4, 0xFF, 0xFF, 1];
        assert!(!ends_early(&file(&[FRAME, SCAN, damage, &[0xFF, 0xD9]])));
        assert!(!ends_early(&file(&[
            FRAME,
            SCAN,
            damage,
            &[0xFF, 0xD9, 0, 0]
        ])));
        assert!(ends_early(&file(&[FRAME, SCAN, &[0xFF, 0xC4, 0, 9, 1]])));
        assert!(ends_early(&file(&[])));
        // The end of an embedded thumbnail is not the file's.
        assert!(ends_early(&file(&[&[0xFF, 0xE1, 0, 4, 0xFF, 0xD9], FRAME])));
    }

    #[test]
    fn the_frame_gives_the_size() {
        let expected = Frame {
            width: 7,
            height: 5,
            components: 3,
        };
        assert_eq!(frame(&file(&[FRAME, SCAN])), Some(expected));
        assert_eq!(frame(&file(&[b"stray", FRAME, SCAN])), Some(expected));
        assert_eq!(frame(&file(&[SCAN, FRAME])), None);
    }

    #[test]
    fn xmp_says_how_to_turn() {
        let turned = Some(Orientation::Rotate90);
        assert_eq!(xmp_orientation(b"<x tiff:Orientation=\"6\"/>"), turned);
        assert_eq!(
            xmp_orientation(b"<tiff:Orientation>6</tiff:Orientation>"),
            turned
        );
        assert_eq!(xmp_orientation(b"<tiff:Orientation>"), None);
        assert_eq!(xmp_orientation(b"<tiff:Orientation>9<"), None);
    }

    #[test]
    fn a_plain_header_keeps_what_decoding_needs() {
        let jfif = b"\xFF\xE0\0\x10JFIF\0\x07\x01\0\0\x01\0\x01\0\0";
        let plain_jfif = b"\xFF\xE0\0\x10JFIF\0\x01\x01\0\0\x01\0\x01\0\0";
        let profile = b"\xFF\xE2\0\x06bad!";
        let adobe = b"\xFF\xEE\0\x0EAdobe\0\0\0\0\0\0\x09";
        let plain_adobe = b"\xFF\xEE\0\x0EAdobe\0\0\0\0\0\0\x01";
        let faulty = file(&[jfif, b"stray", profile, adobe, FRAME, SCAN, &[0xFF, 0xD9]]);
        let plain = file(&[plain_jfif, plain_adobe, FRAME, SCAN, &[0xFF, 0xD9]]);
        assert_eq!(with_plain_header(&faulty), Some(plain));
    }
}
