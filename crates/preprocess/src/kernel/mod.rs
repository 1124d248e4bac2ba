//! Resampling along one axis, equal to the reference's: its coefficients, its precision, its
//! rounding to bytes after each axis.
//!
//! The scalar loops say what is computed. Where the processor can, it is computed by `x86`, which
//! gives the same bytes.

mod scalar;
mod weights;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use crate::Resample;
pub use weights::Arithmetic;
pub(crate) use weights::taps;

/// Scaling along one axis, worked out once for all images of a size.
pub(crate) struct Axis {
    /// Pixels of the source along this axis.
    from: usize,
    /// First source pixel of each output pixel.
    starts: Vec<usize>,
    /// Source pixels of each output pixel.
    taps: usize,
    /// `taps` weights for each output pixel.
    weights: Vec<i32>,
    /// Fraction bits of a weight.
    fraction: u32,
    /// The same weights for the instructions in use; `None` where they cannot take them.
    packed: Option<Packed>,
}

/// Weights cut up for instructions that multiply small numbers, for four pixels each.
enum Packed {
    /// Three signed digits to the base of 256, the lowest first; a byte for each pixel. And the same
    /// for four output pixels at once, where their source pixels lie close together.
    #[cfg(target_arch = "x86_64")]
    Vnni(Vec<[i32; 3]>, Option<x86::Quads>),
    /// Two digits to the base of 2048, the lowest first; a word for each pixel, two pixels in a
    /// number.
    #[cfg(target_arch = "x86_64")]
    Avx2(Vec<[[i32; 2]; 2]>),
}

/// Instructions that a pass may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Vnni,
    #[cfg(target_arch = "x86_64")]
    Vbmi,
}

impl Level {
    /// The best that this processor has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if x86::has_vbmi() {
                return Self::Vbmi;
            }
            if x86::has_vnni() {
                return Self::Vnni;
            }
            if x86::has_avx2() {
                return Self::Avx2;
            }
        }
        Self::Scalar
    }
}

impl Axis {
    /// Scaling of `from` pixels to `to`, of which those in `kept` are made.
    pub(crate) fn new(
        (from, to): (u32, u32),
        kept: Range<u32>,
        filter: Resample,
        arithmetic: Arithmetic,
        level: Level,
    ) -> Self {
        let (windows, fraction) = weights::windows((from, to), kept, filter, arithmetic);
        let from = from as usize;
        let longest = windows.iter().map(|window| window.weights.len()).max();
        let longest = longest.unwrap_or(0);
        // The instructions take four pixels at a time.
        let padded = longest.next_multiple_of(4);
        let taps = if padded <= from { padded } else { longest };
        let mut starts = Vec::with_capacity(windows.len());
        let mut weights = vec![0; taps * windows.len()];
        for (window, weights) in windows.iter().zip(weights.chunks_exact_mut(taps)) {
            // The padding may not reach beyond the row.
            let start = window.start.min(from - taps);
            let before = window.start - start;
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
        if padded == taps {
            axis.packed = Packed::of(&axis, level);
        }
        axis
    }

    /// Output pixels.
    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }

    /// The source pixels that the output is made of.
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
            _ => scalar::vertical(self, (source, first, pitch), target),
        }
    }
}

impl Packed {
    fn of(axis: &Axis, level: Level) -> Option<Self> {
        let (fours, _) = axis.weights.as_chunks::<4>();
        match level {
            Level::Scalar => None,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Some(Self::Avx2(fours.iter().map(|four| words(*four)).collect())),
            #[cfg(target_arch = "x86_64")]
            Level::Vnni | Level::Vbmi => {
                // Three digits of a byte reach up to 1.99.
                let largest = (i32::from(i8::MAX) << 16) + 0x7f7f;
                if axis.weights.iter().any(|weight| weight.abs() > largest) {
                    return None;
                }
                let digits: Vec<_> = fours.iter().map(|four| bytes(*four)).collect();
                let quads = match level {
                    Level::Vbmi => x86::Quads::of(axis, &digits),
                    _ => None,
                };
                Some(Self::Vnni(digits, quads))
            }
        }
    }
}

/// Three signed digits to the base of 256 of each weight.
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

/// Two digits to the base of 2048, for the first two weights and for the last two.
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

    /// Bytes that look like noise with hard edges, so that sums go beyond both ends.
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

    fn levels() -> Vec<Level> {
        #[cfg(target_arch = "x86_64")]
        {
            let mut levels = vec![];
            if x86::has_avx2() {
                levels.push(Level::Avx2);
            }
            if x86::has_vnni() {
                levels.push(Level::Vnni);
            }
            if x86::has_vbmi() {
                levels.push(Level::Vbmi);
            }
            levels
        }
        #[cfg(not(target_arch = "x86_64"))]
        vec![]
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
        let axis = |level| Axis::new(size, kept.clone(), filter, arithmetic, level);
        let (plain, from) = (axis(Level::Scalar), size.0 as usize);
        for level in levels() {
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
                Axis::new(size, 0..size.1, filter, Arithmetic::Pillow, Level::detect())
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
