//! The definition that the other kernels must equal.

use crate::kernel::Axis;

pub(super) fn horizontal(axis: &Axis, source: &[u8], target: &mut [u8]) {
    let rows = source.chunks_exact(3 * axis.from);
    for (source, target) in rows.zip(target.chunks_exact_mut(3 * axis.len())) {
        let (source, _) = source.as_chunks::<3>();
        let (target, _) = target.as_chunks_mut::<3>();
        let windows = axis.starts.iter().zip(axis.weights.chunks_exact(axis.taps));
        for (pixel, (start, weights)) in target.iter_mut().zip(windows) {
            let mut sums = [1 << (axis.fraction - 1); 3];
            for (value, weight) in source[*start..].iter().zip(weights) {
                for (sum, value) in sums.iter_mut().zip(value) {
                    *sum += i32::from(*value) * weight;
                }
            }
            *pixel = sums.map(|sum| rounded(sum, axis.fraction));
        }
    }
}

pub(super) fn vertical(
    axis: &Axis,
    (source, first, pitch): (&[u8], usize, usize),
    target: &mut [u8],
) {
    let mut sums = vec![0; pitch];
    let windows = axis.starts.iter().zip(axis.weights.chunks_exact(axis.taps));
    for (row, (start, weights)) in target.chunks_exact_mut(pitch).zip(windows) {
        sums.fill(1 << (axis.fraction - 1));
        let lines = source.chunks_exact(pitch).skip(start - first);
        for (line, weight) in lines.zip(weights) {
            for (sum, value) in sums.iter_mut().zip(line) {
                *sum += i32::from(*value) * weight;
            }
        }
        for (value, sum) in row.iter_mut().zip(&sums) {
            *value = rounded(*sum, axis.fraction);
        }
    }
}

fn rounded(sum: i32, fraction: u32) -> u8 {
    (sum >> fraction).clamp(0, 255) as u8
}
