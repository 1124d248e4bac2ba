//! The first directory of a TIFF file.

use std::borrow::Cow;

/// Photometric interpretations.
pub(crate) const WHITE_IS_ZERO: u64 = 0;
pub(crate) const BLACK_IS_ZERO: u64 = 1;
pub(crate) const RGB: u64 = 2;
pub(crate) const PALETTE: u64 = 3;

const BITS: u64 = 258;
const COMPRESSION: u64 = 259;
const PHOTOMETRIC: u64 = 262;
const SAMPLES: u64 = 277;
const PLANAR: u64 = 284;
const COLOR_MAP: u64 = 320;
const EXTRA: u64 = 338;
const FORMAT: u64 = 339;

/// Most values read from one tag: a colour map of 8 bits has 768.
const MOST_VALUES: u64 = 1024;

/// The tags of an image, with defaults for missing ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tags {
    pub(crate) photometric: u64,
    pub(crate) compression: u64,
    pub(crate) samples: u64,
    /// Bits of each sample.
    pub(crate) bits: Vec<u64>,
    /// 1: unsigned, 2: signed, 3: floating point; of the first sample.
    pub(crate) format: u64,
    /// Additional samples besides the colours: 1 is premultiplied alpha.
    pub(crate) extra: Vec<u64>,
    /// Whether the samples of a pixel are interleaved.
    pub(crate) interleaved: bool,
    /// Red, then green, then blue, 16 bits each.
    pub(crate) color_map: Vec<u64>,
    /// Position of the photometric interpretation in the file.
    photometric_at: usize,
    big_endian: bool,
}

/// Reads numbers in the file's byte order.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    bytes: &'a [u8],
    big_endian: bool,
}

impl Numbers<'_> {
    fn at(self, place: u64, length: usize) -> Option<u64> {
        let start = usize::try_from(place).ok()?;
        let bytes = self.bytes.get(start..start.checked_add(length)?)?;
        let fold = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
        Some(match self.big_endian {
            true => bytes.iter().fold(0, fold),
            false => bytes.iter().rev().fold(0, fold),
        })
    }
}

impl Tags {
    /// Reads the tags; `None` if the directory is malformed or truncated.
    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        let big_endian = match bytes.get(..2)? {
            b"II" => false,
            b"MM" => true,
            _ => return None,
        };
        let numbers = Numbers { bytes, big_endian };
        let is_big = match numbers.at(2, 2)? {
            42 => false,
            43 => true,
            _ => return None,
        };
        // BigTIFF has wider counts and offsets.
        let word = if is_big { 8 } else { 4 };
        let directory = numbers.at(if is_big { 8 } else { 4 }, word)?;
        let count_size = if is_big { 8 } else { 2 };
        let count = numbers.at(directory, count_size)?.min(MOST_VALUES);
        let entry_size = 4 + 2 * word as u64;
        let mut tags = Self {
            photometric: u64::MAX,
            compression: 1,
            samples: 1,
            bits: vec![1],
            format: 1,
            extra: Vec::new(),
            interleaved: true,
            color_map: Vec::new(),
            photometric_at: 0,
            big_endian,
        };
        for number in 0..count {
            let entry = directory
                .checked_add(count_size as u64)?
                .checked_add(number * entry_size)?;
            let tag = numbers.at(entry, 2)?;
            let kind = numbers.at(entry + 2, 2)?;
            let count = numbers.at(entry + 4, word)?;
            let inline = entry + 4 + word as u64;
            let values = || values(numbers, kind, count, inline, word);
            let first = || values().and_then(|values| values.first().copied());
            match tag {
                BITS => tags.bits = values()?,
                COMPRESSION => tags.compression = first()?,
                PHOTOMETRIC => {
                    tags.photometric = first()?;
                    tags.photometric_at = usize::try_from(inline).ok()?;
                }
                SAMPLES => tags.samples = first()?,
                PLANAR => tags.interleaved = first()? == 1,
                COLOR_MAP => tags.color_map = values()?,
                EXTRA => tags.extra = values()?,
                FORMAT => tags.format = first()?,
                _ => {}
            }
        }
        Some(tags)
    }

    /// The file with another photometric interpretation.
    pub(crate) fn with_photometric<'a>(&self, bytes: &'a [u8], value: u64) -> Cow<'a, [u8]> {
        if self.photometric == value {
            return bytes.into();
        }
        let mut bytes = bytes.to_vec();
        let value = value as u16;
        let value = match self.big_endian {
            true => value.to_be_bytes(),
            false => value.to_le_bytes(),
        };
        if let Some(place) = bytes.get_mut(self.photometric_at..self.photometric_at + 2) {
            place.copy_from_slice(&value);
        }
        bytes.into()
    }

    /// What the image is, in words.
    pub(crate) fn describe(&self) -> String {
        let compression = match self.compression {
            1 => "no",
            2 => "CCITT Huffman",
            3 => "CCITT G3",
            4 => "CCITT G4",
            5 => "LZW",
            6 => "old JPEG",
            7 => "JPEG",
            8 | 32946 => "deflate",
            32773 => "PackBits",
            32809 => "ThunderScan",
            33003 | 33005 | 34712 => "JPEG 2000",
            34676 | 34677 => "SGI Log",
            34887 => "LERC",
            34925 => "LZMA",
            50000 => "Zstandard",
            50001 => "WebP",
            50002 | 52546 => "JPEG XL",
            _ => "unknown",
        };
        let colors = match self.photometric {
            WHITE_IS_ZERO | BLACK_IS_ZERO => "gray",
            RGB => "RGB",
            PALETTE => "palette",
            4 => "mask",
            5 => "CMYK",
            6 => "YCbCr",
            8..=10 => "Lab",
            32803 => "raw sensor",
            32844 | 32845 => "LogLuv",
            _ => "unknown",
        };
        let format = match self.format {
            2 => "signed ",
            3 => "floating-point ",
            _ => "",
        };
        let bits: Vec<String> = self.bits.iter().take(8).map(u64::to_string).collect();
        let planes = if self.interleaved {
            ""
        } else {
            " in separate planes"
        };
        format!(
            "{colors} of {} {format}bits{planes} with {compression} compression",
            bits.join("+")
        )
    }
}

/// The values of an entry, all of which are whole numbers without sign.
fn values(
    numbers: Numbers<'_>,
    kind: u64,
    count: u64,
    inline: u64,
    word: usize,
) -> Option<Vec<u64>> {
    let size = match kind {
        1 => 1,
        3 => 2,
        4 => 4,
        16 => 8,
        _ => return None,
    };
    let count = count.min(MOST_VALUES);
    let start = match count * size <= word as u64 {
        true => inline,
        false => numbers.at(inline, word)?,
    };
    (0..count)
        .map(|number| numbers.at(start.checked_add(number * size)?, size as usize))
        .collect()
}
