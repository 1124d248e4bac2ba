use std::sync::Arc;

use crate::product::multiply;
use crate::{Activation, InferError, InferErrorKind};

/// Classes over embeddings: a linear layer of label embeddings, or of a probe's weights.
///
/// The logit of class `c` for an embedding `e` is `w[c] · e + b[c]`, where `e` is first scaled to
/// length 1 if the head requires it.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    labels: Arc<[Arc<str>]>,
    width: usize,
    /// `f32[classes, width]`.
    weights: Vec<f32>,
    /// `f32[classes]`.
    bias: Vec<f32>,
    pub(crate) normalizes: bool,
    activation: Activation,
}

impl Head {
    /// A head with `weights`, one row of `width` values and one bias per label.
    ///
    /// # Errors
    /// If there are no labels, the numbers of values do not fit together, or one is not finite.
    pub fn new(
        labels: Arc<[Arc<str>]>,
        width: usize,
        weights: Vec<f32>,
        bias: Vec<f32>,
        normalizes: bool,
        activation: Activation,
    ) -> Result<Self, InferError> {
        let wrong = |why: String| Err(InferError::new(InferErrorKind::ModelConfig, why));
        if labels.is_empty() || width == 0 {
            return wrong("a head needs at least one label and one value".to_owned());
        }
        if weights.len() != labels.len() * width || bias.len() != labels.len() {
            return wrong(format!(
                "a head of {} labels over {width} values has {} weights and {} biases",
                labels.len(),
                weights.len(),
                bias.len()
            ));
        }
        if !weights.iter().chain(&bias).all(|value| value.is_finite()) {
            return wrong("a weight or bias of the head is not a finite number".to_owned());
        }
        Ok(Self {
            labels,
            width,
            weights,
            bias,
            normalizes,
            activation,
        })
    }

    /// The names of the classes.
    pub fn labels(&self) -> &Arc<[Arc<str>]> {
        &self.labels
    }

    /// Length of its embeddings.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How logits become scores.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// The weights, `f32[classes, width]`, row by row.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// The biases, one per class.
    pub fn bias(&self) -> &[f32] {
        &self.bias
    }

    /// Whether embeddings are first scaled to length 1.
    pub fn normalizes(&self) -> bool {
        self.normalizes
    }

    /// The logits of several embeddings, `f32[n, width]` to `f32[n, classes]`, in `logits`, which
    /// is resized. For an embedding of length 0 they are not finite if the head scales to length 1.
    pub fn logits(&self, embeddings: &[f32], logits: &mut Vec<f32>) {
        debug_assert_eq!(embeddings.len() % self.width, 0, "whole embeddings");
        let (rows, classes) = (embeddings.len() / self.width, self.labels.len());
        logits.clear();
        logits.resize(rows * classes, 0.0);
        multiply(embeddings, &self.weights, rows, self.width, classes, logits);
        let vectors = embeddings.chunks_exact(self.width);
        for (logits, vector) in logits.chunks_exact_mut(classes).zip(vectors) {
            let factor = match self.normalizes {
                true => 1.0 / length(vector),
                false => 1.0,
            };
            for (logit, bias) in logits.iter_mut().zip(&self.bias) {
                *logit = *logit * factor + bias;
            }
        }
    }
}

/// The length of a vector.
pub fn length(vector: &[f32]) -> f32 {
    // Double precision keeps the last digits of a sum of many squares.
    let squares = vector.iter().map(|value| f64::from(*value).powi(2));
    squares.sum::<f64>().sqrt() as f32
}

/// Scales a vector to length 1; one of length 0 is unchanged.
pub fn normalize(vector: &mut [f32]) {
    let length = length(vector);
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value /= length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(count: usize) -> Arc<[Arc<str>]> {
        let names = (0..count).map(|class| Arc::from(format!("label {class}")));
        names.collect()
    }

    #[test]
    fn logits_are_cosines_where_the_head_scales() {
        let weights = vec![1.0, 0.0, 0.0, 2.0, -2.0, 0.0];
        let bias = vec![0.0, 0.5, 0.0];
        let of = |normalizes| {
            let head = Head::new(
                labels(3),
                2,
                weights.clone(),
                bias.clone(),
                normalizes,
                Activation::None,
            );
            let mut logits = Vec::new();
            head.unwrap().logits(&[3.0, 4.0, -5.0, 12.0], &mut logits);
            logits
        };
        assert_eq!(of(false), [3.0, 8.5, -6.0, -5.0, 24.5, 10.0]);
        let expected = [0.6, 2.1, -1.2, -5.0 / 13.0, 24.0 / 13.0 + 0.5, 10.0 / 13.0];
        for (found, expected) in of(true).into_iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-6,
                "{found} instead of {expected}"
            );
        }
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let of = |weights: Vec<f32>, bias: Vec<f32>| {
            Head::new(labels(2), 2, weights, bias, true, Activation::Softmax)
                .unwrap_err()
                .to_string()
        };
        assert!(of(vec![0.0; 3], vec![0.0; 2]).contains("3 weights"));
        assert!(of(vec![0.0; 4], vec![0.0; 1]).contains("1 biases"));
        assert!(of(vec![f32::NAN; 4], vec![0.0; 2]).contains("finite"));
    }
}
