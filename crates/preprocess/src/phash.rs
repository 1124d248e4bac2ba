//! A perceptual hash: hashes of similar images differ in few bits.

use std::f64::consts::PI;
use std::sync::LazyLock;

use trommel_types::Shape;

/// Side of the grid of cells that pixels are averaged to.
const CELLS: usize = 32;
/// Lowest frequencies per side in the hash.
const KEPT: usize = 8;

/// Cosines by frequency and cell. Integers, so that every processor computes the same bits.
static COSINES: LazyLock<[[i64; CELLS]; KEPT]> = LazyLock::new(|| {
    std::array::from_fn(|frequency| {
        std::array::from_fn(|cell| {
            let angle = (2 * cell + 1) as f64 * frequency as f64 * PI / (2 * CELLS) as f64;
            (angle.cos() * f64::from(1 << 14)).round() as i64
        })
    })
});

/// The hash of `HWC u8` pixels, as defined by pHash and `imagehash.phash`: the 8 × 8 lowest
/// frequencies of the discrete cosine transform of 32 × 32 grey cells, with one bit each for
/// whether it is above their median. The lowest frequency is the highest bit. Grey is the mean of
/// the channels, in any order.
pub(crate) fn phash(pixels: &[u8], shape: Shape) -> u64 {
    let cells = cells(pixels, shape);
    let mut rows = [[0i64; KEPT]; CELLS];
    for (row, cells) in rows.iter_mut().zip(&cells) {
        for (sum, cosines) in row.iter_mut().zip(&*COSINES) {
            *sum = dot(cells.iter().copied(), cosines);
        }
    }
    let mut waves = [0i64; KEPT * KEPT];
    for (place, wave) in waves.iter_mut().enumerate() {
        let column = rows.iter().map(|row| row[place % KEPT]);
        *wave = dot(column, &COSINES[place / KEPT]);
    }
    let mut sorted = waves;
    sorted.sort_unstable();
    let middle = sorted.len() / 2;
    // Twice the median of an even number of values.
    let median = sorted[middle - 1] + sorted[middle];
    let bits = waves.iter().map(|wave| u64::from(2 * wave > median));
    bits.fold(0, |hash, bit| hash << 1 | bit)
}

fn dot(values: impl Iterator<Item = i64>, cosines: &[i64]) -> i64 {
    values.zip(cosines).map(|(a, b)| a * b).sum()
}

/// Means of the pixels in each cell, in 256ths; a pixel may belong to several.
fn cells(pixels: &[u8], shape: Shape) -> [[i64; CELLS]; CELLS] {
    let (height, width) = (shape.height as usize, shape.width as usize);
    let channels = shape.channels as usize;
    debug_assert!(!shape.is_empty(), "an image has pixels");
    let under = |cell: usize, side: usize| {
        let end = ((cell + 1) * side).div_ceil(CELLS);
        (cell * side / CELLS, end)
    };
    std::array::from_fn(|row| {
        let (top, bottom) = under(row, height);
        std::array::from_fn(|column| {
            let (left, right) = under(column, width);
            let lines = (top..bottom).map(|y| {
                let line = &pixels[(y * width + left) * channels..(y * width + right) * channels];
                line.iter().map(|value| i64::from(*value)).sum::<i64>()
            });
            let count = (bottom - top) * (right - left) * channels;
            256 * lines.sum::<i64>() / count as i64
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A few waves and a box, at any size.
    fn picture(height: u32, width: u32, bright: f64) -> (Vec<u8>, Shape) {
        let mut pixels = Vec::new();
        for y in 0..height {
            for x in 0..width {
                let (x, y) = (
                    f64::from(x) / f64::from(width),
                    f64::from(y) / f64::from(height),
                );
                let wave = (7.0 * x).sin() * (5.0 * y + x).cos();
                let inside = (0.2..0.5).contains(&x) && (0.6..0.9).contains(&y);
                let grey = 90.0 + 50.0 * wave + if inside { 40.0 } else { 0.0 };
                pixels.extend([(grey * bright) as u8; 3]);
            }
        }
        let shape = Shape {
            height,
            width,
            channels: 3,
        };
        (pixels, shape)
    }

    fn hash((pixels, shape): (Vec<u8>, Shape)) -> u64 {
        phash(&pixels, shape)
    }

    #[test]
    fn size_and_brightness_change_few_bits_and_another_picture_many() {
        let original = hash(picture(224, 224, 1.0));
        for same in [
            picture(224, 224, 1.2),
            picture(300, 180, 1.0),
            picture(64, 64, 0.8),
        ] {
            let distance = (original ^ hash(same)).count_ones();
            assert!(distance <= 4, "{distance} bits");
        }
        let (mut turned, shape) = picture(224, 224, 1.0);
        turned.reverse();
        let distance = (original ^ phash(&turned, shape)).count_ones();
        assert!(distance >= 16, "{distance} bits");
    }

    #[test]
    fn the_bits_are_those_of_the_waves_and_of_no_size_in_particular() {
        // One wave along x, of frequency 1: only its bit and that of the mean are above the median,
        // 0.
        let cells: Vec<u8> = (0..32)
            .flat_map(|_| {
                (0..32).map(|x| {
                    (128.0 + 100.0 * ((2.0 * f64::from(x) + 1.0) * PI / 64.0).cos()).round() as u8
                })
            })
            .collect();
        let shape = Shape {
            height: 32,
            width: 32,
            channels: 1,
        };
        assert_eq!(phash(&cells, shape) >> 62, 0b11);
        // A single colour has no waves except the mean.
        assert_eq!(
            phash(
                &[7; 5 * 3],
                Shape {
                    height: 5,
                    width: 1,
                    channels: 3
                }
            ),
            1 << 63
        );
    }
}
