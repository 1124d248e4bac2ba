//! The product of two row-major matrices.

use std::sync::LazyLock;

use fearless_simd::prelude::*;
use fearless_simd::{Level, dispatch};
use fearless_simd_macros::simd;

/// The processor's features.
static LEVEL: LazyLock<Level> = LazyLock::new(Level::new);

/// Bytes of `b` multiplied with all of `a` at a time, so that they stay in a core's cache.
const BLOCK: usize = 256 << 10;

/// `out[m, n] = a[m, k] · b[n, k]ᵀ`. A value depends only on its two rows, not on neighbouring
/// rows.
///
/// As both matrices are row-major, nothing is repacked first, which costs general libraries more
/// than the product itself if there are few classes.
///
/// # Panics
/// If the slices do not match these sizes.
pub fn multiply(a: &[f32], b: &[f32], m: usize, k: usize, n: usize, out: &mut [f32]) {
    assert!(
        a.len() == m * k && b.len() == n * k && out.len() == m * n,
        "the slices hold matrices of these sizes"
    );
    if k == 0 {
        out.fill(0.0);
        return;
    }
    let matrices = Matrices { a, b, k, n };
    let classes = (BLOCK / (k * size_of::<f32>())).clamp(8, 1 << 12);
    for from in (0..n).step_by(classes) {
        let columns = from..n.min(from + classes);
        dispatch!(*LEVEL, simd => block(simd, &matrices, columns.clone(), out));
    }
}

struct Matrices<'a> {
    a: &'a [f32],
    b: &'a [f32],
    k: usize,
    n: usize,
}

impl<'a> Matrices<'a> {
    fn a(&self, row: usize) -> &'a [f32] {
        &self.a[row * self.k..][..self.k]
    }

    fn b(&self, row: usize) -> &'a [f32] {
        &self.b[row * self.k..][..self.k]
    }
}

/// All rows of some columns, in tiles whose sums fit into the registers.
#[simd]
fn block<S: Simd>(
    simd: S,
    matrices: &Matrices<'_>,
    columns: std::ops::Range<usize>,
    out: &mut [f32],
) {
    let rows = out.len() / matrices.n;
    let mut row = 0;
    while row + 4 <= rows {
        let mut column = columns.start;
        // Only the widest registers are numerous enough for this tile.
        while S::f32s::LEN >= 16 && column + 4 <= columns.end {
            tile::<S, 4, 4>(simd, matrices, row, column, out);
            column += 4;
        }
        while column + 2 <= columns.end {
            tile::<S, 4, 2>(simd, matrices, row, column, out);
            column += 2;
        }
        if column < columns.end {
            tile::<S, 4, 1>(simd, matrices, row, column, out);
        }
        row += 4;
    }
    for row in row..rows {
        for column in columns.clone() {
            tile::<S, 1, 1>(simd, matrices, row, column, out);
        }
    }
}

/// `R` rows by `C` columns.
#[simd]
fn tile<S: Simd, const R: usize, const C: usize>(
    simd: S,
    matrices: &Matrices<'_>,
    row: usize,
    column: usize,
    out: &mut [f32],
) {
    let lanes = S::f32s::LEN;
    let whole = matrices.k - matrices.k % lanes;
    let a: [&[f32]; R] = std::array::from_fn(|place| matrices.a(row + place));
    let b: [&[f32]; C] = std::array::from_fn(|place| matrices.b(column + place));
    let mut sums = [[S::f32s::splat(simd, 0.0); C]; R];
    for place in (0..whole).step_by(lanes) {
        let mut right = [S::f32s::splat(simd, 0.0); C];
        for (right, b) in right.iter_mut().zip(b) {
            *right = S::f32s::from_slice(simd, &b[place..place + lanes]);
        }
        for (sums, a) in sums.iter_mut().zip(a) {
            let left = S::f32s::from_slice(simd, &a[place..place + lanes]);
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = left.mul_add(right, *sum);
            }
        }
    }
    for (down, sums) in sums.iter().enumerate() {
        let out = &mut out[(row + down) * matrices.n + column..][..C];
        for ((out, sum), b) in out.iter_mut().zip(sums).zip(b) {
            let rest = a[down][whole..].iter().zip(&b[whole..]);
            *out = sum.reduce_sum() + rest.map(|(a, b)| a * b).sum::<f32>();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn values(count: usize, seed: usize) -> Vec<f32> {
        let value = |place: usize| ((place * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0;
        (0..count).map(value).collect()
    }

    proptest! {
        #[test]
        fn every_size_gives_the_sums_of_products(m in 0usize..11, k in 0usize..70, n in 1usize..14) {
            let (a, b) = (values(m * k, 1), values(n * k, 2));
            let mut out = vec![f32::NAN; m * n];
            multiply(&a, &b, m, k, n, &mut out);
            for row in 0..m {
                for column in 0..n {
                    let pairs = a[row * k..][..k].iter().zip(&b[column * k..][..k]);
                    let expected: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    prop_assert!((f64::from(out[row * n + column]) - expected).abs() < 1e-4);
                }
            }
        }
    }

    #[test]
    fn a_value_does_not_depend_on_what_stands_beside_its_rows() {
        let (m, k, n) = (9, 517, 300);
        let (a, b) = (values(m * k, 3), values(n * k, 4));
        let mut all = vec![0.0; m * n];
        multiply(&a, &b, m, k, n, &mut all);
        for (row, column) in [(0, 0), (8, 299), (3, 298), (4, 127), (7, 128)] {
            let mut alone = [0.0];
            multiply(
                &a[row * k..][..k],
                &b[column * k..][..k],
                1,
                k,
                1,
                &mut alone,
            );
            assert_eq!(alone[0].to_bits(), all[row * n + column].to_bits());
        }
    }
}
