//! Pillow's resampling along one axis, with its coefficients and its rounding: equal to it.

use std::f64::consts::PI;

use crate::Resample;

/// Fraction bits of a coefficient; 8 are for the pixel and 2 for overshoot (Pillow's
/// `PRECISION_BITS`).
const FRACTION: u32 = 32 - 8 - 2;

/// Which pixels make an output pixel, and how much of each.
struct Window {
    start: usize,
    weights: Vec<i32>,
}

/// Number of source pixels that go into one of `to`, about.
pub(crate) fn taps(from: u32, to: u32, filter: Resample) -> f64 {
    2.0 * support(filter) * (f64::from(from) / f64::from(to)).max(1.0)
}

/// Scales the columns of an RGB image: rows keep their number.
pub(crate) fn horizontal(source: &[u8], from: u32, target: &mut [u8], to: u32, filter: Resample) {
    let windows = windows(from, to, filter);
    let (from, to) = (3 * from as usize, 3 * to as usize);
    for (source, target) in source.chunks_exact(from).zip(target.chunks_exact_mut(to)) {
        let (source, _) = source.as_chunks::<3>();
        let (target, _) = target.as_chunks_mut::<3>();
        for (pixel, Window { start, weights }) in target.iter_mut().zip(&windows) {
            let mut sums = [1 << (FRACTION - 1); 3];
            for (value, weight) in source[*start..].iter().zip(weights) {
                for (sum, value) in sums.iter_mut().zip(value) {
                    *sum += i32::from(*value) * weight;
                }
            }
            *pixel = sums.map(rounded);
        }
    }
}

/// Scales the rows of an RGB image of `width` columns.
pub(crate) fn vertical(
    source: &[u8],
    width: u32,
    (from, to): (u32, u32),
    target: &mut [u8],
    filter: Resample,
) {
    let length = 3 * width as usize;
    let mut sums = vec![0; length];
    for (row, Window { start, weights }) in target
        .chunks_exact_mut(length)
        .zip(windows(from, to, filter))
    {
        sums.fill(1 << (FRACTION - 1));
        for (line, weight) in source.chunks_exact(length).skip(start).zip(&weights) {
            for (sum, value) in sums.iter_mut().zip(line) {
                *sum += i32::from(*value) * weight;
            }
        }
        for (value, sum) in row.iter_mut().zip(&sums) {
            *value = rounded(*sum);
        }
    }
}

fn rounded(sum: i32) -> u8 {
    (sum >> FRACTION).clamp(0, 255) as u8
}

/// As Pillow's `precompute_coeffs` and `normalize_coeffs_8bpc`, and for the nearest pixel as its
/// `ImagingScaleAffine`, which adds up the position step by step.
fn windows(from: u32, to: u32, filter: Resample) -> Vec<Window> {
    let scale = f64::from(from) / f64::from(to);
    if filter == Resample::Nearest {
        let mut position = scale * 0.5;
        let window = |_| {
            let start = (position as usize).min(from as usize - 1);
            position += scale;
            Window {
                start,
                weights: vec![1 << FRACTION],
            }
        };
        return (0..to).map(window).collect();
    }
    let stretch = scale.max(1.0);
    let reach = support(filter) * stretch;
    let window = |index: u32| {
        let center = (f64::from(index) + 0.5) * scale;
        let start = (center - reach + 0.5).max(0.0) as u32;
        let end = ((center + reach + 0.5) as u32).min(from);
        let weight = |pixel| shape(filter, (f64::from(pixel) - center + 0.5) * (1.0 / stretch));
        let weights: Vec<f64> = (start..end).map(weight).collect();
        let total: f64 = weights.iter().sum();
        let fixed = |weight: &f64| {
            let weight = if total == 0.0 {
                *weight
            } else {
                weight / total
            };
            // Half away from zero, then cut.
            (weight * f64::from(1 << FRACTION) + 0.5_f64.copysign(weight)) as i32
        };
        Window {
            start: start as usize,
            weights: weights.iter().map(fixed).collect(),
        }
    };
    (0..to).map(window).collect()
}

/// Pixels on either side that a filter sees when nothing is scaled.
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
                for window in windows(from, to, filter) {
                    let sum: i64 = window.weights.iter().copied().map(i64::from).sum();
                    let error = (sum - (1 << FRACTION)).unsigned_abs() as usize;
                    assert!(error <= window.weights.len(), "{filter:?} {from} to {to}");
                    assert!(window.start + window.weights.len() <= from as usize);
                }
            }
        }
    }

    #[test]
    fn a_flat_image_stays_flat() {
        let source = [200; 3 * 5 * 4];
        for filter in [Resample::Nearest, Resample::Hamming, Resample::Lanczos] {
            let mut wide = [0; 3 * 9 * 4];
            horizontal(&source, 5, &mut wide, 9, filter);
            assert_eq!(wide, [200; 3 * 9 * 4]);
            let mut low = [0; 3 * 5 * 3];
            vertical(&source, 5, (4, 3), &mut low, filter);
            assert_eq!(low, [200; 3 * 5 * 3]);
        }
    }
}
