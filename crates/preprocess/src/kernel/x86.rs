//! The same by AVX2, and by AVX-512 with VNNI.
//!
//! A weight has more bits than the multipliers support, so it is split into digits: the products of
//! each digit are summed separately, and the sums are combined at the end. All of it is exact
//! modulo 2³², and so equal to the scalar loops.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use crate::kernel::{Axis, store_pixel};

/// Pixels per step, in a row or in a column.
const STEP: usize = 4;

pub(super) fn has_vnni() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

pub(super) fn has_vbmi() -> bool {
    has_vnni() && is_x86_feature_detected!("avx512vbmi")
}

pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
}

/// Four adjacent output pixels whose source pixels are within 64 bytes.
struct Quad {
    /// The first output pixel.
    pixel: usize,
    /// The start of its source in a row, in bytes.
    start: usize,
    /// One bit per byte of the source.
    bytes: u64,
}

/// All output pixels in groups of four; the last group may overlap the previous one.
pub(super) struct Quads {
    quads: Vec<Quad>,
    /// For each group, and each step of its windows: the source bytes for the weights.
    places: Vec<[u8; 64]>,
    /// The digits of the weights, for each of the three channels.
    digits: Vec<[[i32; 16]; 3]>,
}

impl Quads {
    /// `None` if the windows are too wide, or the output too narrow.
    pub(super) fn of(axis: &Axis, digits: &[[i32; 3]]) -> Option<Self> {
        let (len, steps) = (axis.len(), axis.taps / STEP);
        let mut all = Self {
            quads: Vec::new(),
            places: Vec::new(),
            digits: Vec::new(),
        };
        for pixel in (0..len).step_by(4) {
            let pixel = pixel.min(len.checked_sub(4)?);
            let starts = &axis.starts[pixel..pixel + 4];
            let (first, last) = (starts.iter().min()?, starts.iter().max()?);
            let bytes = 3 * (last + axis.taps - first);
            if bytes > 64 {
                return None;
            }
            all.quads.push(Quad {
                pixel,
                start: 3 * first,
                bytes: u64::MAX >> (64 - bytes),
            });
            for step in 0..steps {
                let mut places = [0; 64];
                for (at, place) in places.iter_mut().enumerate() {
                    // Four taps of a channel, then those of the next channel; the fourth is unused.
                    let (output, channel, tap) = (at / 16, at % 16 / 4, at % 4);
                    let source = 3 * (starts[output] - first + STEP * step + tap) + channel.min(2);
                    *place = source as u8; // below 64, see above
                }
                all.places.push(places);
                all.digits.push(std::array::from_fn(|digit| {
                    std::array::from_fn(|lane| digits[(pixel + lane / 4) * steps + step][digit])
                }));
            }
        }
        Some(all)
    }
}

/// `false`, and nothing done, for an image with too few rows.
pub(super) fn horizontal_vbmi(
    axis: &Axis,
    quads: &Quads,
    source: &[u8],
    target: &mut [u8],
) -> bool {
    if source.len() < 4 * 3 * axis.from {
        return false;
    }
    // SAFETY: there are quads only where `has_vbmi`.
    unsafe { horizontal_quads(axis, quads, source, target) };
    true
}

/// `false`, and nothing done, for an image with too few rows.
pub(super) fn horizontal_vnni(
    axis: &Axis,
    digits: &[[i32; 3]],
    source: &[u8],
    target: &mut [u8],
) -> bool {
    if source.len() < 4 * 3 * axis.from {
        return false;
    }
    // SAFETY: weights are cut up this way only where `has_vnni`.
    unsafe { horizontal_512(axis, digits, source, target) };
    true
}

/// `false`, and nothing done, for rows that are too short.
pub(super) fn vertical_vnni(
    axis: &Axis,
    digits: &[[i32; 3]],
    source: (&[u8], usize, usize),
    target: &mut [u8],
) -> bool {
    if source.2 < 64 {
        return false;
    }
    // SAFETY: weights are cut up this way only where `has_vnni`.
    unsafe { vertical_512(axis, digits, source, target) };
    true
}

/// `false`, and nothing done, for an image with too few rows.
pub(super) fn horizontal_avx2(
    axis: &Axis,
    digits: &[[[i32; 2]; 2]],
    source: &[u8],
    target: &mut [u8],
) -> bool {
    if source.len() < 2 * 3 * axis.from {
        return false;
    }
    // SAFETY: weights are cut up this way only where `has_avx2`.
    unsafe { horizontal_256(axis, digits, source, target) };
    true
}

/// `false`, and nothing done, for rows that are too short.
pub(super) fn vertical_avx2(
    axis: &Axis,
    digits: &[[[i32; 2]; 2]],
    source: (&[u8], usize, usize),
    target: &mut [u8],
) -> bool {
    if source.2 < 32 {
        return false;
    }
    // SAFETY: weights are cut up this way only where `has_avx2`.
    unsafe { vertical_256(axis, digits, source, target) };
    true
}

/// Four rows at a time, one output pixel after another; the last four rows may be done twice.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn horizontal_512(axis: &Axis, digits: &[[i32; 3]], source: &[u8], target: &mut [u8]) {
    let (pitch, steps) = (3 * axis.from, axis.taps / STEP);
    let rows = source.len() / pitch;
    // Four pixels of a channel side by side, then the next channel's.
    let by_channel = _mm512_broadcast_i32x4(_mm_setr_epi8(
        0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, -1, -1, -1, -1,
    ));
    let half = _mm512_set1_epi32(1 << (axis.fraction - 1));
    let fraction = _mm_cvtsi32_si128(axis.fraction as i32);
    let reach = axis
        .starts
        .iter()
        .max()
        .map_or(0, |start| 3 * (start + axis.taps));
    assert!(reach <= pitch && source.len() >= rows * pitch && rows >= 4);
    let mut first = 0;
    loop {
        first = first.min(rows - 4);
        let is_last = first + 4 == rows;
        for (pixel, (&start, digits)) in axis
            .starts
            .iter()
            .zip(digits.chunks_exact(steps))
            .enumerate()
        {
            let mut sums = [_mm512_setzero_si512(); 3];
            let mut at = first * pitch + 3 * start;
            for digits in digits {
                let load = |line: usize| {
                    let place = at + line * pitch;
                    if is_last {
                        load_12_masked(source, place)
                    } else {
                        // SAFETY: the window lies in its row, as asserted above, and the 4 bytes
                        // beyond it in this row or the next, which is there.
                        unsafe { load_16(source, place) }
                    }
                };
                let four = _mm512_castsi128_si512(load(0));
                let four = _mm512_inserti32x4::<1>(four, load(1));
                let four = _mm512_inserti32x4::<2>(four, load(2));
                let four = _mm512_inserti32x4::<3>(four, load(3));
                let four = _mm512_shuffle_epi8(four, by_channel);
                for (sum, digit) in sums.iter_mut().zip(digits) {
                    *sum = _mm512_dpbusd_epi32(*sum, four, _mm512_set1_epi32(*digit));
                }
                at += 3 * STEP;
            }
            let total = _mm512_sra_epi32(joined_512(sums, half), fraction);
            let total = _mm512_max_epi32(total, _mm512_setzero_si512());
            let bytes = _mm512_cvtusepi32_epi8(total);
            let values = [
                _mm_extract_epi32::<0>(bytes),
                _mm_extract_epi32::<1>(bytes),
                _mm_extract_epi32::<2>(bytes),
                _mm_extract_epi32::<3>(bytes),
            ];
            for (line, value) in values.into_iter().enumerate() {
                store_pixel(
                    target,
                    (first + line) * axis.len(),
                    pixel,
                    axis.len(),
                    value,
                );
            }
        }
        if is_last {
            return;
        }
        first += 4;
    }
}

/// Four rows at a time, four output pixels after another; the last four rows may be done twice.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
fn horizontal_quads(axis: &Axis, quads: &Quads, source: &[u8], target: &mut [u8]) {
    let (pitch, steps) = (3 * axis.from, axis.taps / STEP);
    let rows = source.len() / pitch;
    let half = _mm512_set1_epi32(1 << (axis.fraction - 1));
    let fraction = _mm_cvtsi32_si128(axis.fraction as i32);
    let three_of_four = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    let mut first = 0;
    loop {
        first = first.min(rows - 4);
        let windows = quads
            .places
            .chunks_exact(steps)
            .zip(quads.digits.chunks_exact(steps));
        for (quad, (places, digits)) in quads.quads.iter().zip(windows) {
            let lines: [__m512i; 4] = std::array::from_fn(|line| {
                load_masked(source, (first + line) * pitch + quad.start, quad.bytes)
            });
            let mut sums = [[_mm512_setzero_si512(); 3]; 4];
            for (places, digits) in places.iter().zip(digits) {
                let places = load_64(places, 0);
                let digits = [0, 1, 2].map(|digit| load_lanes(&digits[digit]));
                for (line, sums) in lines.iter().zip(&mut sums) {
                    let four = _mm512_permutexvar_epi8(places, *line);
                    for (sum, digit) in sums.iter_mut().zip(digits) {
                        *sum = _mm512_dpbusd_epi32(*sum, four, digit);
                    }
                }
            }
            for (line, sums) in sums.into_iter().enumerate() {
                let total = _mm512_sra_epi32(joined_512(sums, half), fraction);
                let total = _mm512_max_epi32(total, _mm512_setzero_si512());
                let bytes = _mm_shuffle_epi8(_mm512_cvtusepi32_epi8(total), three_of_four);
                store_12(
                    target,
                    3 * ((first + line) * axis.len() + quad.pixel),
                    bytes,
                );
            }
        }
        if first + 4 == rows {
            return;
        }
        first += 4;
    }
}

/// 64 bytes of an output row at a time; the last ones may be done twice.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn vertical_512(
    axis: &Axis,
    digits: &[[i32; 3]],
    (source, first, pitch): (&[u8], usize, usize),
    target: &mut [u8],
) {
    let steps = axis.taps / STEP;
    let half = _mm512_set1_epi32(1 << (axis.fraction - 1));
    let fraction = _mm_cvtsi32_si128(axis.fraction as i32);
    let windows = axis.starts.iter().zip(digits.chunks_exact(steps));
    for (row, (start, digits)) in target.chunks_exact_mut(pitch).zip(windows) {
        for column in (0..pitch).step_by(64) {
            let column = column.min(pitch - 64);
            let mut sums = [[_mm512_setzero_si512(); 3]; 4];
            let mut at = (start - first) * pitch + column;
            for digits in digits {
                let a = load_64(source, at);
                let b = load_64(source, at + pitch);
                let c = load_64(source, at + 2 * pitch);
                let d = load_64(source, at + 3 * pitch);
                let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
                let (ab_high, cd_high) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
                let columns = [
                    _mm512_unpacklo_epi16(ab, cd),
                    _mm512_unpackhi_epi16(ab, cd),
                    _mm512_unpacklo_epi16(ab_high, cd_high),
                    _mm512_unpackhi_epi16(ab_high, cd_high),
                ];
                let digits = digits.map(|digit| _mm512_set1_epi32(digit));
                for (sums, four) in sums.iter_mut().zip(columns) {
                    for (sum, digit) in sums.iter_mut().zip(digits) {
                        *sum = _mm512_dpbusd_epi32(*sum, four, digit);
                    }
                }
                at += STEP * pitch;
            }
            let [a, b, c, d] = sums.map(|sums| _mm512_sra_epi32(joined_512(sums, half), fraction));
            // Both packings clip, and undo the order of the unpackings.
            let bytes = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
            store_64(row, column, bytes);
        }
    }
}

/// Combines and rounds the sums of three digits in base 256.
#[target_feature(enable = "avx512f")]
fn joined_512([low, middle, high]: [__m512i; 3], half: __m512i) -> __m512i {
    let high = _mm512_add_epi32(_mm512_slli_epi32::<8>(high), middle);
    _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low), half)
}

/// Two rows at a time, one output pixel after another; the last two rows may be done twice.
#[target_feature(enable = "avx2")]
fn horizontal_256(axis: &Axis, digits: &[[[i32; 2]; 2]], source: &[u8], target: &mut [u8]) {
    let (pitch, steps) = (3 * axis.from, axis.taps / STEP);
    let rows = source.len() / pitch;
    // Two pixels of a channel side by side, as words, then the next channel's.
    let pairs = [
        _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
        )),
        _mm256_broadcastsi128_si256(_mm_setr_epi8(
            6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1,
        )),
    ];
    let half = _mm256_set1_epi32(1 << (axis.fraction - 1));
    let fraction = _mm_cvtsi32_si128(axis.fraction as i32);
    let reach = axis
        .starts
        .iter()
        .max()
        .map_or(0, |start| 3 * (start + axis.taps));
    assert!(reach <= pitch && source.len() >= rows * pitch && rows >= 2);
    let mut first = 0;
    loop {
        first = first.min(rows - 2);
        let is_last = first + 2 == rows;
        for (pixel, (&start, digits)) in axis
            .starts
            .iter()
            .zip(digits.chunks_exact(steps))
            .enumerate()
        {
            let mut sums = [_mm256_setzero_si256(); 2];
            let mut at = first * pitch + 3 * start;
            for digits in digits {
                let load = |place: usize| {
                    if is_last {
                        load_12(source, place)
                    } else {
                        // SAFETY: as for four rows.
                        unsafe { load_16(source, place) }
                    }
                };
                let both = _mm256_set_m128i(load(at + pitch), load(at));
                for (pair, digits) in pairs.iter().zip(digits) {
                    let two = _mm256_shuffle_epi8(both, *pair);
                    for (sum, digit) in sums.iter_mut().zip(digits) {
                        let product = _mm256_madd_epi16(two, _mm256_set1_epi32(*digit));
                        *sum = _mm256_add_epi32(*sum, product);
                    }
                }
                at += 3 * STEP;
            }
            let total = _mm256_sra_epi32(joined_256(sums, half), fraction);
            let words = _mm256_packs_epi32(total, total);
            let bytes = _mm256_packus_epi16(words, words);
            let values = [
                _mm256_extract_epi32::<0>(bytes),
                _mm256_extract_epi32::<4>(bytes),
            ];
            for (line, value) in values.into_iter().enumerate() {
                store_pixel(
                    target,
                    (first + line) * axis.len(),
                    pixel,
                    axis.len(),
                    value,
                );
            }
        }
        if is_last {
            return;
        }
        first += 2;
    }
}

/// 32 bytes of an output row at a time; the last ones may be done twice.
#[target_feature(enable = "avx2")]
fn vertical_256(
    axis: &Axis,
    digits: &[[[i32; 2]; 2]],
    (source, first, pitch): (&[u8], usize, usize),
    target: &mut [u8],
) {
    let steps = axis.taps / STEP;
    let zero = _mm256_setzero_si256();
    let half = _mm256_set1_epi32(1 << (axis.fraction - 1));
    let fraction = _mm_cvtsi32_si128(axis.fraction as i32);
    let windows = axis.starts.iter().zip(digits.chunks_exact(steps));
    for (row, (start, digits)) in target.chunks_exact_mut(pitch).zip(windows) {
        for column in (0..pitch).step_by(32) {
            let column = column.min(pitch - 32);
            let mut sums = [[zero; 2]; 4];
            let mut at = (start - first) * pitch + column;
            for digits in digits.iter().flatten() {
                let (a, b) = (load_32(source, at), load_32(source, at + pitch));
                let (low, high) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
                let columns = [
                    _mm256_unpacklo_epi8(low, zero),
                    _mm256_unpackhi_epi8(low, zero),
                    _mm256_unpacklo_epi8(high, zero),
                    _mm256_unpackhi_epi8(high, zero),
                ];
                let digits = digits.map(|digit| _mm256_set1_epi32(digit));
                for (sums, two) in sums.iter_mut().zip(columns) {
                    for (sum, digit) in sums.iter_mut().zip(digits) {
                        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(two, digit));
                    }
                }
                at += 2 * pitch;
            }
            let [a, b, c, d] = sums.map(|sums| _mm256_sra_epi32(joined_256(sums, half), fraction));
            // Both packings clip, and undo the order of the unpackings.
            let bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
            store_32(row, column, bytes);
        }
    }
}

/// Combines and rounds the sums of two digits in base 2048.
#[target_feature(enable = "avx2")]
fn joined_256([low, high]: [__m256i; 2], half: __m256i) -> __m256i {
    _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32::<11>(high), low), half)
}

/// # Safety
/// `source` holds 16 bytes from `at` on.
#[inline]
#[target_feature(enable = "sse2")]
unsafe fn load_16(source: &[u8], at: usize) -> __m128i {
    debug_assert!(at + 16 <= source.len(), "a window beyond the image");
    // SAFETY: the caller says so.
    unsafe { _mm_loadu_si128(source.as_ptr().add(at).cast()) }
}

/// 12 bytes, and zeros.
#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn load_12_masked(source: &[u8], at: usize) -> __m128i {
    let bytes = &source[at..at + 12];
    // SAFETY: 12 bytes are there, and no more are read.
    unsafe { _mm_maskz_loadu_epi8(0xfff, bytes.as_ptr().cast()) }
}

/// 12 bytes, and zeros.
#[inline]
#[target_feature(enable = "avx2")]
fn load_12(source: &[u8], at: usize) -> __m128i {
    let bytes = &source[at..at + 12];
    let mask = _mm_setr_epi32(-1, -1, -1, 0);
    // SAFETY: 12 bytes are there, and no more are read.
    unsafe { _mm_maskload_epi32(bytes.as_ptr().cast(), mask) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_32(source: &[u8], at: usize) -> __m256i {
    let bytes = &source[at..at + 32];
    // SAFETY: 32 bytes are there.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_32(target: &mut [u8], at: usize, value: __m256i) {
    let bytes = &mut target[at..at + 32];
    // SAFETY: there is room for 32 bytes.
    unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), value) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_64(source: &[u8], at: usize) -> __m512i {
    let bytes = &source[at..at + 64];
    // SAFETY: 64 bytes are there.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store_64(target: &mut [u8], at: usize, value: __m512i) {
    let bytes = &mut target[at..at + 64];
    // SAFETY: there is room for 64 bytes.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), value) }
}

/// The bytes selected by a mask, whose highest bit gives their number, followed by zeros.
#[inline]
#[target_feature(enable = "avx512bw")]
fn load_masked(source: &[u8], at: usize, mask: u64) -> __m512i {
    let bytes = &source[at..at + (64 - mask.leading_zeros() as usize)];
    // SAFETY: the bytes of the mask are there, and no more are read.
    unsafe { _mm512_maskz_loadu_epi8(mask, bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_lanes(lanes: &[i32; 16]) -> __m512i {
    // SAFETY: an array of 64 bytes.
    unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512bw,avx512vl")]
fn store_12(target: &mut [u8], at: usize, value: __m128i) {
    let bytes = &mut target[at..at + 12];
    // SAFETY: there is room for 12 bytes, and no more are written.
    unsafe { _mm_mask_storeu_epi8(bytes.as_mut_ptr().cast(), 0xfff, value) }
}
