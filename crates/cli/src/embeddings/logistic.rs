//! Multinomial logistic regression.
//!
//! The loss is that of scikit-learn: the mean cross-entropy plus `‖w‖² / (2 · C · n)` for the
//! weights but not the biases. It is minimised by L-BFGS (Nocedal, Wright: "Numerical
//! Optimization", algorithms 7.4 and 3.1).

use std::collections::VecDeque;

use trommel_infer::multiply;

/// Remembered steps.
const MEMORY: usize = 10;
/// Most steps.
const STEPS: usize = 1000;
/// Largest gradient component at convergence.
const FLAT: f64 = 1e-5;

/// Training examples.
pub(super) struct Examples<'a> {
    /// `f32[n, width]`.
    pub(super) vectors: &'a [f32],
    pub(super) width: usize,
    /// The class of each.
    pub(super) classes: &'a [usize],
    /// Number of classes.
    pub(super) count: usize,
}

/// A linear classifier.
#[derive(Debug, Clone)]
pub(super) struct Weights {
    /// `f32[classes, width]` weights, followed by `f32[classes]` biases.
    values: Vec<f32>,
    width: usize,
    count: usize,
}

impl Weights {
    /// The weights, `f32[classes, width]`, for vectors `scale` times as long as the training
    /// examples, and the biases.
    pub(super) fn scaled(&self, scale: f32) -> (Vec<f32>, Vec<f32>) {
        let (weights, bias) = self.values.split_at(self.count * self.width);
        (
            weights.iter().map(|weight| weight * scale).collect(),
            bias.to_vec(),
        )
    }

    /// The most likely class of each vector.
    pub(super) fn predict(&self, vectors: &[f32]) -> Vec<usize> {
        let rows = vectors.len() / self.width;
        let logits = self.logits(vectors, rows);
        let best = |logits: &[f32]| {
            let places = logits.iter().enumerate();
            places
                .max_by(|(_, a), (_, b)| a.total_cmp(b))
                .map_or(0, |(place, _)| place)
        };
        logits.chunks_exact(self.count).map(best).collect()
    }

    fn logits(&self, vectors: &[f32], rows: usize) -> Vec<f32> {
        let (weights, bias) = self.values.split_at(self.count * self.width);
        let mut logits = vec![0.0; rows * self.count];
        multiply(vectors, weights, rows, self.width, self.count, &mut logits);
        for logits in logits.chunks_exact_mut(self.count) {
            logits
                .iter_mut()
                .zip(bias)
                .for_each(|(logit, bias)| *logit += bias);
        }
        logits
    }
}

/// Minimises the loss with inverse regularisation strength `c`.
pub(super) fn fit(examples: &Examples<'_>, c: f64) -> Weights {
    let (width, count) = (examples.width, examples.count);
    let zeros = vec![0.0; count * (width + 1)];
    let mut at = Weights {
        values: zeros,
        width,
        count,
    };
    let transposed = transposed(examples);
    let (mut loss, mut slope) = loss(examples, &transposed, &at, c);
    let mut memory: VecDeque<(Vec<f64>, Vec<f64>, f64)> = VecDeque::with_capacity(MEMORY);
    for _ in 0..STEPS {
        if slope
            .iter()
            .fold(0.0f64, |most, value| most.max(value.abs()))
            <= FLAT
        {
            break;
        }
        let mut direction = descent(&slope, &memory);
        let mut descends = dot(&direction, &slope);
        if descends >= 0.0 {
            memory.clear();
            direction = slope.iter().map(|value| -value).collect();
            descends = dot(&direction, &slope);
        }
        let first = match memory.is_empty() {
            true => (1.0 / dot(&direction, &direction).sqrt()).min(1.0),
            false => 1.0,
        };
        let Some((next, next_loss, next_slope)) = step(
            examples,
            &transposed,
            &at,
            loss,
            (&direction, descends),
            first,
            c,
        ) else {
            break; // as near as the precision lets it come
        };
        let moved = next.values.iter().zip(&at.values);
        let moved: Vec<f64> = moved
            .map(|(next, at)| f64::from(*next) - f64::from(*at))
            .collect();
        let turned = next_slope.iter().zip(&slope);
        let turned: Vec<f64> = turned.map(|(next, slope)| next - slope).collect();
        let curvature = dot(&moved, &turned);
        if curvature > 1e-12 {
            if memory.len() == MEMORY {
                memory.pop_front();
            }
            memory.push_back((moved, turned, 1.0 / curvature));
        }
        (at, loss, slope) = (next, next_loss, next_slope);
    }
    at
}

/// Line search: the first step along a direction with sufficient decrease.
fn step(
    examples: &Examples<'_>,
    transposed: &[f32],
    at: &Weights,
    before: f64,
    (direction, descends): (&[f64], f64),
    first: f64,
    c: f64,
) -> Option<(Weights, f64, Vec<f64>)> {
    let mut length = first;
    for _ in 0..40 {
        let values = at.values.iter().zip(direction);
        let values =
            values.map(|(value, direction)| (f64::from(*value) + length * direction) as f32);
        let next = Weights {
            values: values.collect(),
            ..*at
        };
        let (loss, slope) = loss(examples, transposed, &next, c);
        if loss <= before + 1e-4 * length * descends {
            return Some((next, loss, slope));
        }
        length /= 2.0;
    }
    None
}

/// The descent direction, from the curvature of earlier steps.
fn descent(slope: &[f64], memory: &VecDeque<(Vec<f64>, Vec<f64>, f64)>) -> Vec<f64> {
    let mut direction: Vec<f64> = slope.iter().map(|value| -value).collect();
    let mut shares = Vec::with_capacity(memory.len());
    for (moved, turned, inverse) in memory.iter().rev() {
        let share = inverse * dot(moved, &direction);
        add(&mut direction, turned, -share);
        shares.push(share);
    }
    if let Some((moved, turned, _)) = memory.back() {
        let scale = dot(moved, turned) / dot(turned, turned);
        direction.iter_mut().for_each(|value| *value *= scale);
    }
    for ((moved, turned, inverse), share) in memory.iter().zip(shares.into_iter().rev()) {
        let other = inverse * dot(turned, &direction);
        add(&mut direction, moved, share - other);
    }
    direction
}

/// The loss and its gradient.
fn loss(examples: &Examples<'_>, transposed: &[f32], at: &Weights, c: f64) -> (f64, Vec<f64>) {
    let Examples {
        vectors,
        width,
        classes,
        count,
    } = *examples;
    let rows = classes.len();
    let mut errors = at.logits(vectors, rows);
    let mut sum = 0.0;
    for (logits, class) in errors.chunks_exact_mut(count).zip(classes) {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: f64 = logits
            .iter()
            .map(|logit| f64::from(logit - most).exp())
            .sum();
        sum += powers.ln() - f64::from(logits[*class] - most);
        for logit in logits.iter_mut() {
            *logit = (f64::from(*logit - most).exp() / powers) as f32;
        }
        logits[*class] -= 1.0;
    }
    let by_class = transpose(&errors, rows, count);
    let mut slopes = vec![0.0; count * width];
    multiply(&by_class, transposed, count, rows, width, &mut slopes);
    let biases = by_class
        .chunks_exact(rows)
        .map(|errors| errors.iter().map(|error| f64::from(*error)).sum::<f64>());
    let (n, weights) = (rows as f64, &at.values[..count * width]);
    let squares: f64 = weights
        .iter()
        .map(|weight| f64::from(*weight).powi(2))
        .sum();
    let slopes = slopes.iter().zip(weights);
    let slopes = slopes.map(|(slope, weight)| f64::from(*slope) / n + f64::from(*weight) / (c * n));
    let slopes = slopes.chain(biases.map(|bias| bias / n));
    (sum / n + squares / (2.0 * c * n), slopes.collect())
}

/// `f32[width, n]`.
fn transposed(examples: &Examples<'_>) -> Vec<f32> {
    transpose(examples.vectors, examples.classes.len(), examples.width)
}

fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut turned = vec![0.0; values.len()];
    for (row, values) in values.chunks_exact(columns).enumerate() {
        for (column, value) in values.iter().enumerate() {
            turned[column * rows + row] = *value;
        }
    }
    turned
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], other: &[f64], factor: f64) {
    to.iter_mut()
        .zip(other)
        .for_each(|(to, other)| *to += factor * other);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gradient, which is 0 at the minimum, computed naively.
    fn slope_by_differences(examples: &Examples<'_>, at: &Weights, c: f64, place: usize) -> f64 {
        let of = |shift: f64| {
            let values: Vec<f64> = at.values.iter().map(|value| f64::from(*value)).collect();
            let value = |number: usize| values[number] + if number == place { shift } else { 0.0 };
            let (width, count) = (examples.width, examples.count);
            let rows = examples.vectors.chunks_exact(width).zip(examples.classes);
            let entropy = rows.map(|(vector, class)| {
                let logit = |own: usize| {
                    let products = (0..width)
                        .map(|place| value(own * width + place) * f64::from(vector[place]));
                    products.sum::<f64>() + value(count * width + own)
                };
                (0..count).map(|own| logit(own).exp()).sum::<f64>().ln() - logit(*class)
            });
            let squares: f64 = (0..count * width).map(|place| value(place).powi(2)).sum();
            let n = examples.classes.len() as f64;
            entropy.sum::<f64>() / n + squares / (2.0 * c * n)
        };
        (of(1e-4) - of(-1e-4)) / 2e-4
    }

    #[test]
    fn the_loss_is_least_where_it_stops() {
        let vectors: Vec<f32> = (0..60)
            .map(|place| ((place * 37 % 19) as f32 - 9.0) / 9.0)
            .collect();
        let classes: Vec<usize> = (0..20).map(|row| (row * 7 + row / 3) % 3).collect();
        let examples = Examples {
            vectors: &vectors,
            width: 3,
            classes: &classes,
            count: 3,
        };
        for c in [0.1, 1.0, 100.0] {
            let weights = fit(&examples, c);
            for place in 0..12 {
                let slope = slope_by_differences(&examples, &weights, c, place);
                assert!(slope.abs() < 1e-4, "C {c}, {place}: {slope}");
            }
        }
    }

    #[test]
    fn what_can_be_told_apart_is() {
        let vectors = [
            [1.0, 0.0],
            [0.9, 0.1],
            [0.0, 1.0],
            [0.1, 0.8],
            [-1.0, -1.0],
            [-0.8, -1.1],
        ]
        .concat();
        let classes = [0, 0, 1, 1, 2, 2];
        let examples = Examples {
            vectors: &vectors,
            width: 2,
            classes: &classes,
            count: 3,
        };
        assert_eq!(fit(&examples, 100.0).predict(&vectors), classes);
    }
}
