//! The source pixels of an output pixel, and their weights.

use std::f64::consts::PI;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Resample;

/// Whose arithmetic is followed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arithmetic {
    /// Pillow's: 22 fraction bits.
    #[default]
    Pillow,
    /// That of torchvision's antialiased resize of bytes: as many fraction bits as fit the largest
    /// weight of an axis into 16 bits.
    Torchvision,
}

/// Fraction bits of a weight; 8 are for the pixel and 2 for overshoot (Pillow's
/// `PRECISION_BITS`).
const FRACTION: u32 = 32 - 8 - 2;

/// The sources of an output pixel.
pub(super) struct Window<W = i32> {
    /// The first source pixel.
    pub(super) start: usize,
    /// One weight per source pixel.
    pub(super) weights: Vec<W>,
}

/// Approximate number of source pixels per output pixel.
pub(crate) fn taps(from: u32, to: u32, filter: Resample) -> f64 {
    2.0 * support(filter) * (f64::from(from) / f64::from(to)).max(1.0)
}

/// The source pixels that the output pixels in `kept` may need, and a few more.
pub(crate) fn reach((from, to): (u32, u32), kept: &Range<u32>, filter: Resample) -> Range<u32> {
    if from == to {
        return kept.clone();
    }
    let scale = f64::from(from) / f64::from(to);
    let around = 0.5 * taps(from, to, filter) + 2.0;
    let start = (f64::from(kept.start) * scale - around).max(0.0) as u32;
    let end = (f64::from(kept.end) * scale + around) as u32;
    start..end.min(from)
}

/// The windows of the output pixels in `kept`, and the fraction bits of their weights.
pub(super) fn windows(
    (from, to): (u32, u32),
    kept: Range<u32>,
    filter: Resample,
    arithmetic: Arithmetic,
) -> (Vec<Window>, u32) {
    let exact = match (filter, arithmetic) {
        (Resample::Nearest, _) => nearest(from, to, arithmetic),
        _ => exact_windows(from, to, filter),
    };
    let fraction = match arithmetic {
        Arithmetic::Pillow => FRACTION,
        Arithmetic::Torchvision => sixteen_bits(&exact),
    };
    let fixed = |weight: &f64| {
        // Half away from zero, then truncated.
        (weight * f64::from(1 << fraction) + 0.5_f64.copysign(*weight)) as i32
    };
    let kept = kept.start as usize..kept.end as usize;
    let windows = exact[kept].iter().map(|window| Window {
        start: window.start,
        weights: window.weights.iter().map(fixed).collect(),
    });
    (windows.collect(), fraction)
}

/// Like ATen's `compute_index_ranges_int16_weights`.
fn sixteen_bits(windows: &[Window<f64>]) -> u32 {
    let weights = windows.iter().flat_map(|window| &window.weights);
    let largest = weights.copied().fold(0.0, f64::max);
    (0..FRACTION)
        .find(|bits| (0.5 + largest * f64::from(1 << (bits + 1))) as i32 >= 1 << 15)
        .unwrap_or(FRACTION)
}

/// Pillow's `ImagingScaleAffine` accumulates the position step by step; ATen's `nearest-exact` uses
/// the centre of each pixel, in single precision.
fn nearest(from: u32, to: u32, arithmetic: Arithmetic) -> Vec<Window<f64>> {
    let scale = f64::from(from) / f64::from(to);
    let mut position = scale * 0.5;
    let place = |index: u32| match arithmetic {
        Arithmetic::Pillow => {
            let place = position as usize;
            position += scale;
            place
        }
        Arithmetic::Torchvision => ((index as f32 + 0.5) * (from as f32 / to as f32)) as usize,
    };
    let window = |place: usize| Window {
        start: place.min(from as usize - 1),
        weights: vec![1.0],
    };
    (0..to).map(place).map(window).collect()
}

/// Like Pillow's `precompute_coeffs`, which ATen follows.
fn exact_windows(from: u32, to: u32, filter: Resample) -> Vec<Window<f64>> {
    let scale = f64::from(from) / f64::from(to);
    let stretch = scale.max(1.0);
    let reach = support(filter) * stretch;
    let window = |index: u32| {
        let center = (f64::from(index) + 0.5) * scale;
        let start = (center - reach + 0.5).max(0.0) as u32;
        let end = ((center + reach + 0.5) as u32).min(from);
        let weight = |pixel| shape(filter, (f64::from(pixel) - center + 0.5) * (1.0 / stretch));
        let mut weights: Vec<f64> = (start..end).map(weight).collect();
        let total: f64 = weights.iter().sum();
        if total != 0.0 {
            weights.iter_mut().for_each(|weight| *weight /= total);
        }
        Window {
            start: start as usize,
            weights,
        }
    };
    (0..to).map(window).collect()
}

/// Support of a filter in pixels on either side, without scaling.
fn support(filter: Resample) -> f64 {
    match filter {
        Resample::Nearest | Resample::Box => 0.5,
        Resample::Bilinear | Resample::Hamming => 1.0,
        Resample::Bicubic => 2.0,
        Resample::Lanczos => 3.0,
    }
}

/// Weight of a pixel at distance `x`.
fn shape(filter: Resample, x: f64) -> f64 {
    let sinc = |x: f64| {
        if x == 0.0 {
            1.0
        } else {
            (x * PI).sin() / (x * PI)
        }
    };
    let distance = x.abs();
    match filter {
        Resample::Nearest | Resample::Box => f64::from(x > -0.5 && x <= 0.5),
        Resample::Bilinear => (1.0 - distance).max(0.0),
        Resample::Hamming if distance >= 1.0 => 0.0,
        Resample::Hamming => sinc(distance) * (0.54 + 0.46 * (distance * PI).cos()),
        Resample::Bicubic if distance < 1.0 => (1.5 * distance - 2.5) * distance * distance + 1.0,
        Resample::Bicubic if distance < 2.0 => {
            (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5
        }
        Resample::Bicubic => 0.0,
        Resample::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
        Resample::Lanczos => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weights_of_a_window_add_up_to_one() {
        for filter in [
            Resample::Box,
            Resample::Bilinear,
            Resample::Bicubic,
            Resample::Lanczos,
        ] {
            for (from, to) in [(7, 7), (100, 33), (5, 64), (1, 9), (9, 1)] {
                for arithmetic in [Arithmetic::Pillow, Arithmetic::Torchvision] {
                    let (windows, fraction) = windows((from, to), 0..to, filter, arithmetic);
                    for window in windows {
                        let sum: i64 = window.weights.iter().copied().map(i64::from).sum();
                        let error = (sum - (1 << fraction)).unsigned_abs() as usize;
                        assert!(error <= window.weights.len(), "{filter:?} {from} to {to}");
                        assert!(window.start + window.weights.len() <= from as usize);
                    }
                }
            }
        }
    }
}
