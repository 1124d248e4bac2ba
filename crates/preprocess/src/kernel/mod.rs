//! Resampling along one axis, equal to the reference in its coefficients, precision, and rounding
//! to bytes after each axis.
//!
//! The scalar loops define the computation. If the processor supports them, `x86` or `neon` compute
//! the same bytes. `turbo` calls the JPEG decoder.

#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
pub(crate) mod turbo;
mod weights;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use crate::Resample;
pub use weights::Arithmetic;
pub(crate) use weights::{reach, taps};

/// The scaling along one axis, computed once for all images of a size.
pub(crate) struct Axis {
    /// Source pixels along this axis, as far as given.
    from: usize,
    /// First source pixel of each output pixel, relative to the first given one.
    starts: Vec<usize>,
    /// Number of source pixels per output pixel.
    taps: usize,
    /// `taps` weights per output pixel.
    weights: Vec<i32>,
    /// Fraction bits of a weight.
    fraction: u32,
    /// Data for the instructions in use; `None` if they cannot be used.
    packed: Option<Packed>,
}

/// Instructions and their weights, split up for those that multiply small numbers, for four pixels
/// each.
enum Packed {
    /// Three signed digits in base 256, lowest first; one byte per pixel. Also for four output
    /// pixels at once, if their source pixels are close together.
    #[cfg(target_arch = "x86_64")]
    Vnni(Vec<[i32; 3]>, Option<x86::Quads>),
    /// Two digits in base 2048, lowest first; one word per pixel, two pixels per number.
    #[cfg(target_arch = "x86_64")]
    Avx2(Vec<[[i32; 2]; 2]>),
    /// The unchanged weights.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// Instructions available to a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Vnni,
    #[cfg(target_arch = "x86_64")]
    Vbmi,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Level {
    /// The best that this processor has.
    pub(crate) fn detect() -> Self {
        Self::available().pop().unwrap_or(Self::Scalar)
    }

    /// Those of this processor besides the scalar ones, best last.
    fn available() -> Vec<Self> {
        let mut levels = vec![];
        #[cfg(target_arch = "x86_64")]
        {
            let all = [
                (Self::Avx2, x86::has_avx2()),
                (Self::Vnni, x86::has_vnni()),
                (Self::Vbmi, x86::has_vbmi()),
            ];
            levels.extend(all.iter().filter(|(_, has)| *has).map(|(level, _)| *level));
        }
        // Every such processor has it.
        #[cfg(target_arch = "aarch64")]
        levels.push(Self::Neon);
        levels
    }
}

impl Axis {
    /// Scaling from `from` to `to` pixels; only those in `kept` are computed, from those in
    /// `given`.
    pub(crate) fn new(
        (from, to): (u32, u32),
        (given, kept): (Range<u32>, Range<u32>),
        filter: Resample,
        arithmetic: Arithmetic,
        level: Level,
    ) -> Self {
        let (windows, fraction) = weights::windows((from, to), kept, filter, arithmetic);
        let (first, from) = (given.start as usize, given.len());
        let longest = windows.iter().map(|window| window.weights.len()).max();
        let longest = longest.unwrap_or(0);
        // The instructions process four pixels at a time.
        let padded = longest.next_multiple_of(4);
        let taps = if padded <= from { padded } else { longest };
        let mut starts = Vec::with_capacity(windows.len());
        let mut weights = vec![0; taps * windows.len()];
        for (window, weights) in windows.iter().zip(weights.chunks_exact_mut(taps)) {
            let place = window.start - first;
            // The padding may not extend beyond the row.
            let start = place.min(from - taps);
            let before = place - start;
            weights[before..before + window.weights.len()].copy_from_slice(&window.weights);
            starts.push(start);
        }
        let mut axis = Self {
            from,
            starts,
            taps,
            weights,
            fraction,
            packed: None,
        };
        axis.packed = Packed::of(&axis, level);
        axis
    }

    /// The weights, four at a time.
    #[cfg(target_arch = "x86_64")]
    fn fours(&self) -> impl Iterator<Item = [i32; 4]> {
        self.weights.as_chunks().0.iter().copied()
    }

    /// Output pixels.
    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }

    /// The source pixels of the output, relative to the first given one.
    pub(crate) fn needs(&self) -> Range<u32> {
        let first = self.starts.iter().min().copied().unwrap_or(0);
        let last = self.starts.iter().max().copied().unwrap_or(0);
        first as u32..(last + self.taps) as u32
    }

    /// Scales the columns of RGB rows.
    pub(crate) fn horizontal(&self, source: &[u8], target: &mut [u8]) {
        match &self.packed {
            #[cfg(target_arch = "x86_64")]
            Some(Packed::Vnni(_, Some(quads)))
                if x86::horizontal_vbmi(self, quads, source, target) => {}
            #[cfg(target_arch = "x86_64")]
            Some(Packed::Vnni(digits, _)) if x86::horizontal_vnni(self, digits, source, target) => {
            }
            #[cfg(target_arch = "x86_64")]
            Some(Packed::Avx2(digits)) if x86::horizontal_avx2(self, digits, source, target) => {}
            #[cfg(target_arch = "aarch64")]
            Some(Packed::Neon) if neon::horizontal(self, source, target) => {}
            _ => scalar::horizontal(self, source, target),
        }
    }

    /// Scales the rows of an RGB image whose rows have `pitch` bytes. `source` begins with row
    /// `first`.
    pub(crate) fn vertical(&self, source: &[u8], first: u32, pitch: usize, target: &mut [u8]) {
        let first = first as usize;
        match &self.packed {
            #[cfg(target_arch = "x86_64")]
            Some(Packed::Vnni(digits, _))
                if x86::vertical_vnni(self, digits, (source, first, pitch), target) => {}
            #[cfg(target_arch = "x86_64")]
            Some(Packed::Avx2(digits))
                if x86::vertical_avx2(self, digits, (source, first, pitch), target) => {}
            #[cfg(target_arch = "aarch64")]
            Some(Packed::Neon) if neon::vertical(self, (source, first, pitch), target) => {}
            _ => scalar::vertical(self, (source, first, pitch), target),
        }
    }
}

impl Packed {
    fn of(axis: &Axis, level: Level) -> Option<Self> {
        if !axis.taps.is_multiple_of(4) {
            return None;
        }
        match level {
            Level::Scalar => None,
            #[cfg(target_arch = "aarch64")]
            Level::Neon => Some(Self::Neon),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Some(Self::Avx2(axis.fours().map(words).collect())),
            #[cfg(target_arch = "x86_64")]
            Level::Vnni | Level::Vbmi => {
                // Three digits of a byte represent up to 1.99.
                let largest = (i32::from(i8::MAX) << 16) + 0x7f7f;
                if axis.weights.iter().any(|weight| weight.abs() > largest) {
                    return None;
                }
                let digits: Vec<_> = axis.fours().map(bytes).collect();
                let quads = match level {
                    Level::Vbmi => x86::Quads::of(axis, &digits),
                    _ => None,
                };
                Some(Self::Vnni(digits, quads))
            }
        }
    }
}

/// Each weight as three signed digits in base 256.
#[cfg(target_arch = "x86_64")]
fn bytes(mut weights: [i32; 4]) -> [i32; 3] {
    std::array::from_fn(|_| {
        let digits = weights.map(|weight| weight as i8);
        for (weight, digit) in weights.iter_mut().zip(digits) {
            *weight = (*weight - i32::from(digit)) >> 8;
        }
        i32::from_le_bytes(digits.map(|digit| digit as u8))
    })
}

/// Two digits in base 2048, for the first two weights and for the last two.
#[cfg(target_arch = "x86_64")]
fn words([a, b, c, d]: [i32; 4]) -> [[i32; 2]; 2] {
    let pair = |low: i32, high: i32| (low & 0xffff) | (high << 16);
    [(a, b), (c, d)].map(|(first, second)| {
        [
            pair(first & 2047, second & 2047),
            pair(first >> 11, second >> 11),
        ]
    })
}

/// Writes a pixel of a row that begins at pixel `row`. Its fourth byte overlaps the next pixel,
/// which is written later; the last pixel of a row has no fourth byte.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline]
fn store_pixel(target: &mut [u8], row: usize, pixel: usize, pixels: usize, value: i32) {
    let (place, value) = (3 * (row + pixel), value.to_le_bytes());
    if pixel + 1 < pixels {
        target[place..place + 4].copy_from_slice(&value);
    } else {
        target[place..place + 3].copy_from_slice(&value[..3]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILTERS: [Resample; 6] = [
        Resample::Nearest,
        Resample::Box,
        Resample::Bilinear,
        Resample::Hamming,
        Resample::Bicubic,
        Resample::Lanczos,
    ];

    /// Noise with hard edges, so that sums exceed both ends.
    fn noise(length: usize) -> Vec<u8> {
        let mut state = 1_u32;
        let next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            match state % 4 {
                0 => 0,
                1 => 255,
                _ => (state >> 8) as u8,
            }
        };
        std::iter::repeat_with(next).take(length).collect()
    }

    #[test]
    fn every_level_gives_the_bytes_of_the_scalar_loops() {
        let sizes = [
            (500, 224),
            (375, 224),
            (37, 24),
            (24, 37),
            (1000, 23),
            (64, 64),
            (5, 90),
            (13, 2),
            (3, 1),
            (1, 40),
        ];
        for (from, to) in sizes {
            for filter in FILTERS {
                for arithmetic in [Arithmetic::Pillow, Arithmetic::Torchvision] {
                    for kept in [0..to, to / 3..to - to / 4] {
                        check((from, to), kept, filter, arithmetic);
                    }
                }
            }
        }
    }

    fn check(size: (u32, u32), kept: Range<u32>, filter: Resample, arithmetic: Arithmetic) {
        let axis = |level| Axis::new(size, (0..size.0, kept.clone()), filter, arithmetic, level);
        let (plain, from) = (axis(Level::Scalar), size.0 as usize);
        for level in Level::available() {
            let axis = axis(level);
            for other in [1, 2, 3, 4, 5, 9, 21, 30] {
                let source = noise(3 * from * other);
                let what = format!("{size:?} {kept:?} {filter:?} {arithmetic:?} {level:?} {other}");
                let [mut expected, mut found] = [(); 2].map(|()| vec![77; 3 * plain.len() * other]);
                plain.horizontal(&source, &mut expected);
                axis.horizontal(&source, &mut found);
                assert!(expected == found, "columns {what}");

                let [mut expected, mut found] = [(); 2].map(|()| vec![77; 3 * plain.len() * other]);
                let first = axis.needs().start.min(plain.needs().start);
                let source = &source[first as usize * 3 * other..];
                plain.vertical(source, first, 3 * other, &mut expected);
                axis.vertical(source, first, 3 * other, &mut found);
                assert!(expected == found, "rows {what}");
            }
        }
    }

    #[test]
    fn a_flat_image_stays_flat() {
        for filter in FILTERS {
            let axis = |size: (u32, u32)| {
                Axis::new(
                    size,
                    (0..size.0, 0..size.1),
                    filter,
                    Arithmetic::Pillow,
                    Level::detect(),
                )
            };
            let mut wide = vec![0; 3 * 9 * 4];
            axis((5, 9)).horizontal(&[200; 3 * 5 * 4], &mut wide);
            assert_eq!(wide, [200; 3 * 9 * 4]);
            let mut low = vec![0; 3 * 30 * 3];
            axis((4, 3)).vertical(&[200; 3 * 30 * 4], 0, 3 * 30, &mut low);
            assert_eq!(low, [200; 3 * 30 * 3]);
        }
    }
}
