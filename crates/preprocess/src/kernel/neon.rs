//! The same by NEON, whose multipliers take whole weights.
#![allow(unsafe_code)]

use std::arch::aarch64::*;

use crate::kernel::{Axis, store_pixel};

/// Pixels that a step takes from a row.
const STEP: usize = 4;

/// `false`, and nothing done, for an image with too few rows.
pub(super) fn horizontal(axis: &Axis, source: &[u8], target: &mut [u8]) -> bool {
    if source.len() < 4 * 3 * axis.from {
        return false;
    }
    // SAFETY: every processor of this kind has NEON.
    unsafe { horizontal_128(axis, source, target) };
    true
}

/// `false`, and nothing done, for rows that are too short.
pub(super) fn vertical(axis: &Axis, source: (&[u8], usize, usize), target: &mut [u8]) -> bool {
    if source.2 < 16 {
        return false;
    }
    // SAFETY: every processor of this kind has NEON.
    unsafe { vertical_128(axis, source, target) };
    true
}

/// Four rows at a time, one output pixel after another; the last four rows may be done twice.
#[target_feature(enable = "neon")]
fn horizontal_128(axis: &Axis, source: &[u8], target: &mut [u8]) {
    let (pitch, pixels) = (3 * axis.from, axis.len());
    let rows = source.len() / pitch;
    let (half, shift) = rounding(axis);
    // The bytes of a pixel as four numbers, of which the last is of no use.
    let places = [0, 3, 6, 9].map(|pixel: u8| {
        let byte = |at: usize| (at % 4 == 0).then_some(pixel + at as u8 / 4);
        // A place beyond the table gives zero.
        let places: [u8; 16] = std::array::from_fn(|at| byte(at).unwrap_or(u8::MAX));
        load_16(&places, 0)
    });
    let mut first = 0;
    loop {
        first = first.min(rows - 4);
        let windows = axis.starts.iter().zip(axis.weights.chunks_exact(axis.taps));
        for (pixel, (start, weights)) in windows.enumerate() {
            let mut sums = [half; 4];
            let mut at = first * pitch + 3 * start;
            for weights in weights.as_chunks::<STEP>().0 {
                for (line, sum) in sums.iter_mut().enumerate() {
                    let four = load_12(source, at + line * pitch);
                    for (places, weight) in places.iter().zip(weights) {
                        let value = vreinterpretq_s32_u8(vqtbl1q_u8(four, *places));
                        *sum = vmlaq_n_s32(*sum, value, *weight);
                    }
                }
                at += 3 * STEP;
            }
            let bytes = vreinterpretq_s32_u8(rounded(sums, shift));
            let values = [
                vgetq_lane_s32::<0>(bytes),
                vgetq_lane_s32::<1>(bytes),
                vgetq_lane_s32::<2>(bytes),
                vgetq_lane_s32::<3>(bytes),
            ];
            for (line, value) in values.into_iter().enumerate() {
                store_pixel(target, (first + line) * pixels, pixel, pixels, value);
            }
        }
        if first + 4 == rows {
            return;
        }
        first += 4;
    }
}

/// 16 bytes of an output row at a time; the last ones may be done twice.
#[target_feature(enable = "neon")]
fn vertical_128(axis: &Axis, (source, first, pitch): (&[u8], usize, usize), target: &mut [u8]) {
    let (half, shift) = rounding(axis);
    let windows = axis.starts.iter().zip(axis.weights.chunks_exact(axis.taps));
    for (row, (start, weights)) in target.chunks_exact_mut(pitch).zip(windows) {
        for column in (0..pitch).step_by(16) {
            let column = column.min(pitch - 16);
            let mut sums = [half; 4];
            let mut at = (start - first) * pitch + column;
            for weight in weights {
                let line = load_16(source, at);
                let (low, high) = (vmovl_u8(vget_low_u8(line)), vmovl_high_u8(line));
                let values = [
                    vmovl_u16(vget_low_u16(low)),
                    vmovl_high_u16(low),
                    vmovl_u16(vget_low_u16(high)),
                    vmovl_high_u16(high),
                ];
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = vmlaq_n_s32(*sum, vreinterpretq_s32_u32(value), *weight);
                }
                at += pitch;
            }
            store_16(row, column, rounded(sums, shift));
        }
    }
}

/// What a sum begins with, and how far it is shifted in the end, to the left.
#[target_feature(enable = "neon")]
fn rounding(axis: &Axis) -> (int32x4_t, int32x4_t) {
    (
        vdupq_n_s32(1 << (axis.fraction - 1)),
        vdupq_n_s32(-(axis.fraction as i32)),
    )
}

/// Sums to bytes, clipped.
#[target_feature(enable = "neon")]
fn rounded(sums: [int32x4_t; 4], shift: int32x4_t) -> uint8x16_t {
    let [a, b, c, d] = sums.map(|sum| vqmovun_s32(vshlq_s32(sum, shift)));
    let [low, high] = [vcombine_u16(a, b), vcombine_u16(c, d)].map(|words| vqmovn_u16(words));
    vcombine_u8(low, high)
}

#[inline]
#[target_feature(enable = "neon")]
fn load_16(source: &[u8], at: usize) -> uint8x16_t {
    let bytes = &source[at..at + 16];
    // SAFETY: 16 bytes are there.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

/// 12 bytes, and four of no use.
#[inline]
#[target_feature(enable = "neon")]
fn load_12(source: &[u8], at: usize) -> uint8x16_t {
    if at + 16 <= source.len() {
        return load_16(source, at);
    }
    let mut bytes = [0; 16];
    bytes[..12].copy_from_slice(&source[at..at + 12]);
    load_16(&bytes, 0)
}

#[inline]
#[target_feature(enable = "neon")]
fn store_16(target: &mut [u8], at: usize, value: uint8x16_t) {
    let bytes = &mut target[at..at + 16];
    // SAFETY: there is room for 16 bytes.
    unsafe { vst1q_u8(bytes.as_mut_ptr(), value) }
}
