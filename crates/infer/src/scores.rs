use std::cmp::Ordering;
use std::num::NonZeroU32;
use std::sync::Arc;

use trommel_types::{Scores, TopLabel};

use crate::tensor_info::Float;
use crate::{Activation, InferError, InferErrorKind};

/// Turns one image's logits into its answer. Owns its buffers, so one serves one thread.
#[derive(Debug)]
pub(crate) struct Scorer {
    labels: Arc<[Arc<str>]>,
    activation: Activation,
    thresholds: Option<Arc<[f32]>>,
    top_k: usize,
    keep_logits: bool,
    logits: Vec<f32>,
    order: Vec<u32>,
}

impl Scorer {
    /// More than all classes for `top_k` means all. `thresholds` holds one score a class.
    pub(crate) fn new(
        labels: Arc<[Arc<str>]>,
        activation: Activation,
        thresholds: Option<Arc<[f32]>>,
        top_k: NonZeroU32,
        keep_logits: bool,
    ) -> Self {
        let top_k = usize::try_from(top_k.get())
            .unwrap_or(usize::MAX)
            .min(labels.len());
        Self {
            labels,
            activation,
            thresholds,
            top_k,
            keep_logits,
            logits: Vec::new(),
            order: Vec::new(),
        }
    }

    /// The best classes by logit, the lower class first where two are equal. Of a model with
    /// thresholds those whose scores reach theirs, or the best one alone if none does.
    ///
    /// # Errors
    /// When a logit is infinite or no number: such an answer has no order.
    pub(crate) fn score<F: Float>(&mut self, logits: &[F]) -> Result<Scores, InferError> {
        debug_assert_eq!(logits.len(), self.labels.len(), "one logit a class");
        self.logits.clear();
        self.logits.extend(logits.iter().map(|logit| logit.widen()));
        if let Some(class) = self.logits.iter().position(|logit| !logit.is_finite()) {
            return Err(InferError::new(
                InferErrorKind::ModelFailed,
                format_args!(
                    "the model gave {} for class {class} ({}), which is no score",
                    self.logits[class], self.labels[class]
                ),
            ));
        }
        let (logits, order) = (&self.logits, &mut self.order);
        let by_rank = |&a: &u32, &b: &u32| {
            let (x, y) = (logits[a as usize], logits[b as usize]);
            y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(&b))
        };
        let score = Activated::new(self.activation, logits);
        let classes = (0u32..).take(logits.len());
        order.clear();
        if let Some(thresholds) = &self.thresholds {
            let reached = |&class: &u32| {
                let class = class as usize;
                score.of(logits[class]) >= thresholds[class]
            };
            order.extend(classes.clone().filter(reached));
            if order.is_empty() {
                order.extend(classes.min_by(by_rank));
            }
        } else {
            order.extend(classes);
        }
        if self.top_k < order.len() {
            order.select_nth_unstable_by(self.top_k, by_rank);
            order.truncate(self.top_k);
        }
        order.sort_unstable_by(by_rank);

        let top = order
            .iter()
            .map(|&class| TopLabel {
                label: Arc::clone(&self.labels[class as usize]),
                class,
                score: score.of(logits[class as usize]),
            })
            .collect();
        Ok(Scores {
            top,
            logits: self.keep_logits.then(|| logits.clone()),
            embedding: None,
        })
    }

    /// How many classes the device may choose itself, by softmax; nothing if all logits are needed.
    pub(crate) fn best_on_device(&self) -> Option<usize> {
        let all_needed =
            self.keep_logits || self.thresholds.is_some() || self.activation != Activation::Softmax;
        (!all_needed).then_some(self.top_k)
    }

    /// The answer of an image whose best classes the device has chosen, the best first.
    ///
    /// # Errors
    /// When a score is no number, as all are where one logit is infinite or none, or a class is none
    /// of the model's.
    pub(crate) fn chosen(&self, scores: &[f32], classes: &[i64]) -> Result<Scores, InferError> {
        let top = scores.iter().zip(classes).map(|(&score, &number)| {
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
                    format_args!("the model gave {score} for class {number}, which is no score"),
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

/// An activation with what it needs to know of all logits.
enum Activated {
    Softmax { max: f32, sum: f32 },
    Sigmoid,
    None,
}

impl Activated {
    fn new(activation: Activation, logits: &[f32]) -> Self {
        match activation {
            Activation::Softmax => {
                // Shifted by the largest logit, no power overflows and the sum is at least 1.
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum = logits.iter().map(|logit| (logit - max).exp()).sum();
                Self::Softmax { max, sum }
            }
            Activation::Sigmoid => Self::Sigmoid,
            Activation::None => Self::None,
        }
    }

    fn of(&self, logit: f32) -> f32 {
        match self {
            Self::Softmax { max, sum } => (logit - max).exp() / sum,
            Self::Sigmoid if logit >= 0.0 => 1.0 / (1.0 + (-logit).exp()),
            // The other form, because exp of a large number is infinite.
            Self::Sigmoid => logit.exp() / (1.0 + logit.exp()),
            Self::None => logit,
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use proptest::prelude::*;

    use super::*;

    fn scorer(classes: usize, activation: Activation, top_k: u32) -> Scorer {
        let labels = (0..classes)
            .map(|class| Arc::from(format!("label {class}")))
            .collect();
        let top_k = NonZeroU32::new(top_k).unwrap();
        Scorer::new(labels, activation, None, top_k, false)
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
            let scores = scorer(3, Activation::Softmax, 3)
                .score(&[shift, shift, shift])
                .unwrap();
            for (place, (class, score)) in top(&scores).into_iter().enumerate() {
                assert_eq!(class as usize, place);
                assert!((score - 1.0 / 3.0).abs() < 1e-6);
            }
        }
        let scores = scorer(2, Activation::Softmax, 2)
            .score(&[0.0f32, 3f32.ln()])
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
        let scores = scorer(5, Activation::Sigmoid, 5).score(&logits).unwrap();
        let expected = [(4, 1.0), (3, 0.880_797), (2, 0.5), (1, 0.119_203), (0, 0.0)];
        for ((class, score), (other, wanted)) in top(&scores).into_iter().zip(expected) {
            assert_eq!(class, other);
            assert!((score - wanted).abs() < 1e-6, "{class}: {score}");
        }
    }

    #[test]
    fn classes_below_their_thresholds_are_left_out_but_never_all() {
        let mut scorer = scorer(3, Activation::Sigmoid, 3);
        scorer.thresholds = Some([0.9, 0.3, 0.6].into());
        let classes = |scorer: &mut Scorer, logits: [f32; 3]| -> Vec<u32> {
            let scores = scorer.score(&logits).unwrap();
            scores.top.iter().map(|top| top.class).collect()
        };
        // Scores of 0.73, 0.5 and 0.88.
        assert_eq!(classes(&mut scorer, [1.0, 0.0, 2.0]), [2, 1]);
        assert_eq!(classes(&mut scorer, [1.0, -2.0, 0.0]), [0]);
        scorer.top_k = 1;
        assert_eq!(classes(&mut scorer, [1.0, 0.0, 2.0]), [2]);
    }

    #[test]
    fn no_activation_gives_the_output_itself() {
        let scores = scorer(2, Activation::None, 1)
            .score(&[0.25f32, 0.75])
            .unwrap();
        assert_eq!(top(&scores), [(1, 0.75)]);
    }

    #[test]
    fn equal_logits_go_by_class_also_at_the_edge_of_the_top() {
        let mut scorer = scorer(6, Activation::None, 3);
        assert_eq!(
            top(&scorer.score(&[1.0f32, 2.0, 1.0, 2.0, 1.0, 1.0]).unwrap()),
            [(1, 2.0), (3, 2.0), (0, 1.0)]
        );
        assert_eq!(
            top(&scorer.score(&[-0.0f32, 0.0, -0.0, 0.0, -0.0, 0.0]).unwrap())[0].0,
            0
        );
    }

    #[test]
    fn what_is_no_number_is_an_error_that_names_the_class() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = scorer(2, Activation::Softmax, 1)
                .score(&[0.0, bad])
                .unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::ModelFailed);
            assert!(error.to_string().contains("class 1 (label 1)"), "{error}");
        }
    }

    #[test]
    fn what_a_device_chose_is_checked() {
        let scorer = scorer(3, Activation::Softmax, 2);
        assert_eq!(scorer.best_on_device(), Some(2));
        let chosen = scorer.chosen(&[0.75, 0.25], &[2, 0]).unwrap();
        assert_eq!(top(&chosen), [(2, 0.75), (0, 0.25)]);
        assert_eq!(&*chosen.top[0].label, "label 2");
        for (scores, classes) in [
            ([f32::NAN, 0.0], [0, 1]),
            ([0.5, 0.5], [0, 3]),
            ([0.5, 0.5], [-1, 0]),
        ] {
            let error = scorer.chosen(&scores, &classes).unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::ModelFailed);
        }
    }

    #[test]
    fn a_device_chooses_only_what_needs_no_other_logits() {
        let mut logits = scorer(3, Activation::Softmax, 2);
        logits.keep_logits = true;
        let mut thresholds = scorer(3, Activation::Softmax, 2);
        thresholds.thresholds = Some([0.5; 3].into());
        for scorer in [logits, thresholds, scorer(3, Activation::Sigmoid, 2)] {
            assert_eq!(scorer.best_on_device(), None);
        }
    }

    #[test]
    fn logits_are_kept_on_request_and_half_floats_widened() {
        let mut scorer = scorer(2, Activation::Softmax, 1);
        assert_eq!(scorer.score(&[1.0f32, 2.0]).unwrap().logits, None);
        scorer.keep_logits = true;
        let half = [f16::from_f32(0.1), f16::from_f32(-65504.0)];
        assert_eq!(
            scorer.score(&half).unwrap().logits,
            Some(half.map(f16::to_f32).to_vec())
        );
    }

    proptest! {
        #[test]
        fn the_top_is_the_beginning_of_the_full_order(
            // Few distinct values, so that ties are common.
            logits in prop::collection::vec((-4i8..4).prop_map(f32::from), 1..40),
            k in 1u32..50,
        ) {
            let scores = scorer(logits.len(), Activation::None, k).score(&logits).unwrap();
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            // A stable sort leaves equal logits in the order of their classes.
            order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap());
            order.truncate(k as usize);
            let classes: Vec<u32> = scores.top.iter().map(|top| top.class).collect();
            prop_assert_eq!(classes, order);
        }
    }
}
