//! Half to single precision, using the full width of the processor's registers.

use std::sync::LazyLock;

use fearless_simd::prelude::*;
use fearless_simd::{Level, dispatch};
use fearless_simd_macros::simd;

/// The processor's features.
static LEVEL: LazyLock<Level> = LazyLock::new(Level::new);

/// 2¹¹²: the difference between the exponents of the two formats.
const REBASE: f32 = f32::from_bits((127 + 112) << 23);

/// Converts little-endian halves to `out`, which has the same length.
pub(super) fn widen(halves: &[[u8; 2]], out: &mut [f32]) {
    debug_assert_eq!(halves.len(), out.len(), "a value for each half");
    dispatch!(*LEVEL, simd => widen_all(simd, halves, out));
}

/// A loop without branches, which the compiler vectorises for the features it is compiled with.
#[simd]
fn widen_all<S: Simd>(_simd: S, halves: &[[u8; 2]], out: &mut [f32]) {
    for (half, out) in halves.iter().zip(out) {
        let half = u32::from(u16::from_le_bytes(*half));
        let finite = f32::from_bits((half & 0x7fff) << 13) * REBASE;
        let exponent = match half & 0x7c00 {
            0x7c00 => 0x7f80_0000, // infinite, or not a number
            _ => 0,
        };
        *out = f32::from_bits(finite.to_bits() | exponent | (half & 0x8000) << 16);
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn every_half_keeps_its_value() {
        let halves: Vec<[u8; 2]> = (0..=u16::MAX).map(u16::to_le_bytes).collect();
        let mut out = vec![0.5; halves.len()];
        widen(&halves, &mut out);
        for (half, found) in halves.iter().zip(out) {
            let half = f16::from_le_bytes(*half);
            let same = found.to_bits() == half.to_f32().to_bits();
            assert!(same || half.is_nan() && found.is_nan(), "{half} as {found}");
        }
    }
}
