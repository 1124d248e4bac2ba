use std::cmp::Ordering;
use std::sync::Arc;

use trommel_types::{Scores, TopLabel};

use crate::tensor_info::Float;
use crate::wanted::Resolved;
use crate::{Activation, InferError, InferErrorKind};

/// Turns one image's logits into its answer. Owns its buffers, so each serves one thread.
#[derive(Debug)]
pub(crate) struct Scorer {
    labels: Arc<[Arc<str>]>,
    activation: Activation,
    logits: Vec<f32>,
    order: Vec<u32>,
}

impl Scorer {
    pub(crate) fn new(labels: Arc<[Arc<str>]>, activation: Activation) -> Self {
        Self {
            labels,
            activation,
            logits: Vec::new(),
            order: Vec::new(),
        }
    }

    /// The result of [`Scorer::rank`], with the names of the classes.
    ///
    /// # Errors
    /// As [`Scorer::rank`].
    pub(crate) fn score<F: Float>(
        &mut self,
        logits: &[F],
        wanted: &Resolved,
    ) -> Result<Scores, InferError> {
        let labels = match &wanted.head {
            Some(head) => Arc::clone(head.labels()),
            None => Arc::clone(&self.labels),
        };
        let ranked = self.rank(logits, wanted)?;
        let top = ranked.map(|(class, score)| TopLabel {
            label: Arc::clone(&labels[class as usize]),
            class,
            score,
        });
        Ok(Scores {
            top: top.collect(),
            logits: wanted.logits.then(|| self.logits.clone()),
            embedding: None,
        })
    }

    /// The best classes by logit with their scores; of equal ones the lower class comes first. With
    /// thresholds, those that reach them, or only the best one if none does.
    ///
    /// # Errors
    /// If a logit is infinite or NaN: such an answer has no order.
    pub(crate) fn rank<F: Float>(
        &mut self,
        logits: &[F],
        wanted: &Resolved,
    ) -> Result<impl Iterator<Item = (u32, f32)> + use<'_, F>, InferError> {
        let (labels, activation) = match &wanted.head {
            Some(head) => (head.labels(), head.activation()),
            None => (&self.labels, self.activation),
        };
        debug_assert_eq!(logits.len(), labels.len(), "one logit a class");
        self.logits.clear();
        self.logits.extend(logits.iter().map(|logit| logit.widen()));
        if let Some(class) = self.logits.iter().position(|logit| !logit.is_finite()) {
            return Err(InferError::new(
                InferErrorKind::ModelFailed,
                format_args!(
                    "the model gave {} for class {class} ({}), which is not a score",
                    self.logits[class], labels[class]
                ),
            ));
        }
        let (logits, order) = (&self.logits, &mut self.order);
        let best = best(logits);
        let by_rank = |&a: &u32, &b: &u32| {
            let (x, y) = (logits[a as usize], logits[b as usize]);
            y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(&b))
        };
        let max = best.map_or(0.0, |(_, logit)| logit);
        let best = best.map(|(class, _)| class);
        let score = Activated::new(activation, logits, max);
        let classes = (0u32..).take(logits.len());
        order.clear();
        if let Some(thresholds) = &wanted.thresholds {
            let reached = |&class: &u32| {
                let class = class as usize;
                score.of(logits[class]) >= thresholds[class]
            };
            order.extend(classes.filter(reached));
            if order.is_empty() {
                order.extend(best);
            }
        } else if wanted.top_k == 1 {
            order.extend(best);
        } else {
            order.extend(classes);
        }
        if wanted.top_k < order.len() {
            order.select_nth_unstable_by(wanted.top_k, by_rank);
            order.truncate(wanted.top_k);
        }
        order.sort_unstable_by(by_rank);
        let ranked = order.iter();
        Ok(ranked.map(move |&class| (class, score.of(logits[class as usize]))))
    }

    /// The answer of an image whose best classes the device has chosen, as scores and numbers, best
    /// first.
    ///
    /// # Errors
    /// If a score is NaN, as all are if one logit is infinite or NaN, or a class is not one of the
    /// model's.
    pub(crate) fn chosen<'a>(
        &self,
        best: impl Iterator<Item = (&'a f32, &'a i64)>,
    ) -> Result<Scores, InferError> {
        let top = best.map(|(&score, &number)| {
            let class = u32::try_from(number).ok();
            let label = class.and_then(|class| self.labels.get(class as usize));
            match (class, label) {
                (Some(class), Some(label)) if score.is_finite() => Ok(TopLabel {
                    label: Arc::clone(label),
                    class,
                    score,
                }),
                _ => Err(InferError::new(
                    InferErrorKind::ModelFailed,
                    format_args!("the model gave {score} for class {number}, which is not a score"),
                )),
            }
        });
        Ok(Scores {
            top: top.collect::<Result<_, _>>()?,
            logits: None,
            embedding: None,
        })
    }
}

/// The class with the largest logit, the lowest of equal ones, and its logit.
fn best(logits: &[f32]) -> Option<(u32, f32)> {
    let classes = (0..).zip(logits.iter().copied());
    classes.reduce(|best, next| if next.1 > best.1 { next } else { best })
}

/// An activation with the statistics of all logits that it needs.
enum Activated {
    Softmax { max: f32, sum: f32 },
    Sigmoid,
    None,
}

impl Activated {
    /// With the largest logit, by which powers are shifted: none overflows, and the sum is at least 1.
    fn new(activation: Activation, logits: &[f32], max: f32) -> Self {
        match activation {
            Activation::Softmax => Self::Softmax {
                max,
                sum: logits.iter().map(|logit| power(logit - max)).sum(),
            },
            Activation::Sigmoid => Self::Sigmoid,
            Activation::None => Self::None,
        }
    }

    fn of(&self, logit: f32) -> f32 {
        match self {
            Self::Softmax { max, sum } => power(logit - max) / sum,
            Self::Sigmoid if logit >= 0.0 => 1.0 / (1.0 + (-logit).exp()),
            // The other form, because exp of a large number is infinite.
            Self::Sigmoid => logit.exp() / (1.0 + logit.exp()),
            Self::None => logit,
        }
    }
}

/// The exponential, which the largest logit needs no function for.
fn power(x: f32) -> f32 {
    if x == 0.0 { 1.0 } else { x.exp() }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use proptest::prelude::*;

    use super::*;

    fn scorer(classes: usize, activation: Activation) -> Scorer {
        let labels = (0..classes)
            .map(|class| Arc::from(format!("label {class}")))
            .collect();
        Scorer::new(labels, activation)
    }

    fn best(top_k: usize) -> Resolved {
        Resolved {
            top_k,
            logits: false,
            ..Resolved::default()
        }
    }

    fn top(scores: &Scores) -> Vec<(u32, f32)> {
        scores
            .top
            .iter()
            .map(|top| (top.class, top.score))
            .collect()
    }

    #[test]
    fn softmax_adds_up_to_one_also_for_huge_logits() {
        for shift in [-1e30, -1000.0, 0.0, 1000.0, 1e30] {
            let scores = scorer(3, Activation::Softmax)
                .score(&[shift, shift, shift], &best(3))
                .unwrap();
            for (place, (class, score)) in top(&scores).into_iter().enumerate() {
                assert_eq!(class as usize, place);
                assert!((score - 1.0 / 3.0).abs() < 1e-6);
            }
        }
        let scores = scorer(2, Activation::Softmax)
            .score(&[0.0f32, 3f32.ln()], &best(2))
            .unwrap();
        let [(1, high), (0, low)] = top(&scores)[..] else {
            panic!("{scores:?}")
        };
        assert!((high - 0.75).abs() < 1e-6 && (low - 0.25).abs() < 1e-6);
        assert_eq!(&*scores.top[0].label, "label 1");
    }

    #[test]
    fn sigmoid_takes_each_class_alone() {
        let logits = [-1e4f32, -2.0, 0.0, 2.0, 1e4];
        let scores = scorer(5, Activation::Sigmoid)
            .score(&logits, &best(5))
            .unwrap();
        let expected = [(4, 1.0), (3, 0.880_797), (2, 0.5), (1, 0.119_203), (0, 0.0)];
        for ((class, score), (other, wanted)) in top(&scores).into_iter().zip(expected) {
            assert_eq!(class, other);
            assert!((score - wanted).abs() < 1e-6, "{class}: {score}");
        }
    }

    #[test]
    fn classes_below_their_thresholds_are_left_out_but_never_all() {
        let mut scorer = scorer(3, Activation::Sigmoid);
        let mut classes = |logits: [f32; 3], top_k| -> Vec<u32> {
            let wanted = Resolved {
                thresholds: Some([0.9, 0.3, 0.6].into()),
                ..best(top_k)
            };
            let scores = scorer.score(&logits, &wanted).unwrap();
            scores.top.iter().map(|top| top.class).collect()
        };
        // Scores of 0.73, 0.5 and 0.88.
        assert_eq!(classes([1.0, 0.0, 2.0], 3), [2, 1]);
        assert_eq!(classes([1.0, -2.0, 0.0], 3), [0]);
        assert_eq!(classes([1.0, 0.0, 2.0], 1), [2]);
    }

    #[test]
    fn no_activation_gives_the_output_itself() {
        let scores = scorer(2, Activation::None)
            .score(&[0.25f32, 0.75], &best(1))
            .unwrap();
        assert_eq!(top(&scores), [(1, 0.75)]);
    }

    #[test]
    fn equal_logits_go_by_class_also_at_the_edge_of_the_top() {
        let mut scorer = scorer(6, Activation::None);
        let mut top = |logits: [f32; 6]| top(&scorer.score(&logits, &best(3)).unwrap());
        assert_eq!(
            top([1.0, 2.0, 1.0, 2.0, 1.0, 1.0]),
            [(1, 2.0), (3, 2.0), (0, 1.0)]
        );
        assert_eq!(top([-0.0, 0.0, -0.0, 0.0, -0.0, 0.0])[0].0, 0);
    }

    #[test]
    fn what_is_no_number_is_an_error_that_names_the_class() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = scorer(2, Activation::Softmax)
                .score(&[0.0, bad], &best(1))
                .unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::ModelFailed);
            assert!(error.to_string().contains("class 1 (label 1)"), "{error}");
        }
    }

    #[test]
    fn what_a_device_chose_is_checked() {
        let scorer = scorer(3, Activation::Softmax);
        let chosen = scorer.chosen([0.75, 0.25].iter().zip(&[2, 0])).unwrap();
        assert_eq!(top(&chosen), [(2, 0.75), (0, 0.25)]);
        assert_eq!(&*chosen.top[0].label, "label 2");
        for (scores, classes) in [
            ([f32::NAN, 0.0], [0, 1]),
            ([0.5, 0.5], [0, 3]),
            ([0.5, 0.5], [-1, 0]),
        ] {
            let error = scorer.chosen(scores.iter().zip(&classes)).unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::ModelFailed);
        }
    }

    #[test]
    fn logits_are_kept_on_request_and_half_floats_widened() {
        let mut scorer = scorer(2, Activation::Softmax);
        let plain = scorer.score(&[1.0f32, 2.0], &best(1)).unwrap();
        assert_eq!(plain.logits, None);
        let wanted = Resolved {
            logits: true,
            ..best(1)
        };
        let half = [f16::from_f32(0.1), f16::from_f32(-65504.0)];
        assert_eq!(
            scorer.score(&half, &wanted).unwrap().logits,
            Some(half.map(f16::to_f32).to_vec())
        );
    }

    proptest! {
        #[test]
        fn softmax_is_that_of_its_formula_bit_for_bit(
            logits in prop::collection::vec(-30f32..30.0, 1..40),
            k in 1usize..50,
        ) {
            let scores = scorer(logits.len(), Activation::Softmax).score(&logits, &best(k)).unwrap();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = logits.iter().map(|logit| (logit - max).exp()).sum();
            for (class, score) in top(&scores) {
                let expected = (logits[class as usize] - max).exp() / sum;
                prop_assert_eq!(score.to_bits(), expected.to_bits());
            }
        }

        #[test]
        fn the_top_is_the_beginning_of_the_full_order(
            // Few distinct values, so that ties are common.
            logits in prop::collection::vec((-4i8..4).prop_map(f32::from), 1..40),
            k in 1usize..50,
        ) {
            let scores = scorer(logits.len(), Activation::None).score(&logits, &best(k)).unwrap();
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            // A stable sort leaves equal logits in the order of their classes.
            order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap());
            order.truncate(k);
            let classes: Vec<u32> = scores.top.iter().map(|top| top.class).collect();
            prop_assert_eq!(classes, order);
        }
    }
}
