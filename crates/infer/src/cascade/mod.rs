//! Two models for one label: a small one decides images that it is certain of, a large one the
//! rest.
//!
//! Both answer for a random sample, from which a [`Rule`] is learned: the lowest accepted score for
//! each label of the small model (`learn.rs`, with its statistics). Without a rule a cascade answers
//! as for the sample: with the large model's label, and the small model's answer next to it.

mod bounds;
mod learn;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use trommel_types::{Column, ColumnKind, Lane, Scalar, TopLabel};

pub use self::learn::{Pair, Rule, has_shifted};
use crate::onnx_file::hex;
use crate::version::VERSION_DIGITS;
use crate::{Answer, Engine, InferError, InferErrorKind, Wanted};

/// How often each model has decided.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Decided {
    /// Sampled images, answered by both models.
    pub sample: u64,
    /// Images decided by the small model alone.
    pub small: u64,
    /// Images passed to the large model because the small one was uncertain.
    pub large: u64,
}

/// Checks a cascade with this agreement, and rows as `wanted`.
///
/// # Errors
/// [`Settings`](InferErrorKind::Settings) with the problem.
pub fn check_cascade(agree: f64, wanted: &Wanted) -> Result<(), InferError> {
    let refused = |why: &str| Err(InferError::new(InferErrorKind::Settings, why));
    if !(0.5..1.0).contains(&agree) {
        return refused("--agree: give a share from 0.5 to below 1, such as 0.99");
    }
    match wanted {
        Wanted { logits: true, .. } => {}
        Wanted {
            embedding: true, ..
        } => {}
        wanted if wanted.has_thresholds() => {}
        _ => return Ok(()),
    }
    refused(
        "the models of a cascade give a label and its score each; leave out --logits, --embedding and thresholds",
    )
}

/// The name of a cascade of two models.
pub fn cascade_name(small: &str, large: &str) -> String {
    format!("{small}+{large}")
}

/// The version of a cascade of models with these versions and this agreement: 12 hex digits.
pub fn cascade_version(small: &str, large: &str, agree: f64) -> String {
    let mut version = hex(&Sha256::digest(format!("{small}\n{large}\n{agree}")));
    version.truncate(VERSION_DIGITS);
    version
}

/// The columns of a cascade's rows, before those of its large model.
pub fn cascade_columns() -> Vec<Column> {
    COLUMNS
        .map(|(name, kind)| Column {
            name: name.to_owned(),
            kind,
        })
        .into()
}

/// A running cascade. The rule comes with each image, as jobs may share a cascade.
#[derive(Debug)]
pub(crate) struct Cascade {
    small: Engine,
    large: Engine,
    name: Arc<str>,
    version: Arc<str>,
    agree: f64,
    /// Bytes of the small model's tensor; the large one's follow.
    split: usize,
    decided: [AtomicU64; 3],
}

/// A future answer. Boxed, because engines call engines here.
type Call = Pin<Box<dyn Future<Output = Result<Answer, InferError>> + Send>>;

/// The columns of a cascade's rows, before those of its large model.
const COLUMNS: [(&str, ColumnKind); 3] = [
    ("decided_by", ColumnKind::String),
    ("small_label", ColumnKind::String),
    ("small_score", ColumnKind::Float),
];

/// The values of `decided_by`, in the order of [`Decided`].
const WORDS: [&str; 3] = ["sample", "small", "large"];

impl Cascade {
    pub(crate) fn new(small: Engine, large: Engine, agree: f64) -> Result<Self, InferError> {
        let refused = |why: &str| Err(InferError::new(InferErrorKind::Settings, why));
        let Some(split) = small.model().map(|model| model.shape().len()) else {
            return refused(
                "the first model of a cascade cannot be a prompt; give the prompt as the second one",
            );
        };
        check_cascade(agree, &Wanted::default())?;
        let (own, other) = (small.labels(), large.labels());
        let is_known = |label: &Arc<str>| own.contains(label);
        if !other.is_empty() && !other.iter().any(is_known) {
            return refused(
                "the models of the cascade have no label in common, so they would never agree; give them the same labels",
            );
        }
        Ok(Self {
            name: cascade_name(small.name(), large.name()).into(),
            version: cascade_version(small.version(), large.version(), agree).into(),
            agree,
            split,
            small,
            large,
            decided: Default::default(),
        })
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(crate) fn version(&self) -> &Arc<str> {
        &self.version
    }

    pub(crate) fn small(&self) -> &Engine {
        &self.small
    }

    pub(crate) fn large(&self) -> &Engine {
        &self.large
    }

    pub(crate) fn columns(&self) -> Vec<Column> {
        let own = cascade_columns().into_iter();
        own.chain(self.large.columns()).collect()
    }

    pub(crate) fn check(&self, wanted: &Wanted) -> Result<(), InferError> {
        check_cascade(self.agree, wanted)
    }

    pub(crate) fn decided(&self) -> Decided {
        let [sample, small, large] = [0, 1, 2].map(|by| self.decided[by].load(Ordering::Relaxed));
        Decided {
            sample,
            small,
            large,
        }
    }

    /// Asks the small model and, unless it is certain, the large one. `pixels` are the small
    /// model's tensor followed by the large one's.
    pub(crate) async fn answer(
        &self,
        mut pixels: Bytes,
        lane: Lane,
        wanted: &Arc<Wanted>,
    ) -> Result<Answer, InferError> {
        let behind = pixels.split_off(self.split.min(pixels.len()));
        let rule = wanted.rule.as_deref();
        let first: Call = Box::pin(self.small.answer(pixels, lane, wanted));
        let first = first.await?;
        let best = first.scores.top.first().cloned();
        let is_sure =
            |best: &TopLabel| rule.is_some_and(|rule| rule.decides(&best.label, best.score));
        let by_small = best.as_ref().is_some_and(is_sure);
        let (by, mut answer) = match by_small {
            true => (1, first),
            false => {
                let by = if rule.is_some() { 2 } else { 0 };
                let second: Call = Box::pin(self.large.answer(behind, lane, wanted));
                (by, second.await?)
            }
        };
        self.decided[by].fetch_add(1, Ordering::Relaxed);
        let (label, score) = match best {
            Some(best) => (
                Scalar::String(best.label.to_string()),
                Scalar::Float(best.score.into()),
            ),
            None => (Scalar::Null, Scalar::Null),
        };
        let own = [Scalar::String(WORDS[by].to_owned()), label, score];
        let of_large = match by {
            1 => vec![Scalar::Null; self.large.columns().len()],
            _ => std::mem::take(&mut answer.columns),
        };
        answer.columns = own.into_iter().chain(of_large).collect();
        Ok(answer)
    }
}
