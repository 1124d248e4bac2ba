use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use trommel_types::{EmbeddingType, LabelSet, RowOptions};

use crate::{Head, InferError, Rule};

/// Row options for one image. Each call of [`Engine::classify`](crate::Engine::classify) may have
/// different ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Wanted {
    /// Number of best classes; all of them if the model has fewer. Default: 5.
    pub top_k: NonZeroU32,
    /// Whether to include the raw output.
    pub logits: bool,
    /// Whether to include the image's embedding; the model has to have one.
    pub embedding: bool,
    /// Precision of the embedding.
    pub embedding_type: EmbeddingType,
    /// Whether it is scaled to length 1.
    pub normalize: bool,
    /// Classes in place of the model's own; requires a text tower.
    pub labels: Option<LabelSet>,
    /// Threshold of every class, from 0 to 1. Overrides those of the model's folder.
    pub threshold: Option<f32>,
    /// Thresholds of some classes, by label. They override `threshold` and those of the model's
    /// folder.
    pub thresholds: BTreeMap<String, f32>,
    /// For a cascade: when its small model decides. Without it, both models answer, as for the
    /// sample.
    #[serde(skip)]
    pub rule: Option<Arc<Rule>>,
}

impl Default for Wanted {
    fn default() -> Self {
        Self {
            top_k: Capacity::default().max_k,
            logits: false,
            embedding: false,
            embedding_type: EmbeddingType::Float32,
            normalize: false,
            labels: None,
            threshold: None,
            thresholds: BTreeMap::new(),
            rule: None,
        }
    }
}

impl From<&RowOptions> for Wanted {
    fn from(rows: &RowOptions) -> Self {
        Self {
            top_k: rows.top_k,
            logits: rows.logits,
            embedding: rows.embedding,
            embedding_type: rows.embedding_type,
            normalize: rows.normalize,
            labels: rows.labels.clone(),
            threshold: rows.threshold,
            thresholds: rows.thresholds.clone(),
            rule: None,
        }
    }
}

/// The maximum row options of a model whose device chooses the classes: its graph is fixed. On the
/// CPU, where a model is not fused, every row is possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capacity {
    /// The best classes that a row may hold. Default: 5.
    pub max_k: NonZeroU32,
    /// Whether rows may include the raw output, or leave out classes by their own thresholds.
    pub logits: bool,
    /// Whether rows may include embeddings; the model has to have them.
    pub embedding: bool,
}

impl Default for Capacity {
    fn default() -> Self {
        Self {
            max_k: NonZeroU32::new(5).expect("5 is not 0"),
            logits: false,
            embedding: false,
        }
    }
}

impl From<&Wanted> for Capacity {
    /// The capacity for such a row.
    fn from(wanted: &Wanted) -> Self {
        Self {
            max_k: wanted.top_k,
            logits: wanted.logits || wanted.has_thresholds(),
            embedding: wanted.needs_embedding(),
        }
    }
}

impl Capacity {
    /// Of so many classes.
    pub(crate) fn classes(&self, labels: usize) -> usize {
        at_most(self.max_k, labels)
    }
}

impl Wanted {
    /// Of so many classes.
    pub(crate) fn classes(&self, labels: usize) -> usize {
        at_most(self.top_k, labels)
    }

    /// Whether such a row needs the image's embedding.
    pub(crate) fn needs_embedding(&self) -> bool {
        self.embedding || self.labels.is_some()
    }

    pub(crate) fn has_thresholds(&self) -> bool {
        self.threshold.is_some() || !self.thresholds.is_empty()
    }

    /// The threshold of each of these labels, for a model whose folder has thresholds `of_folder`;
    /// `None` without thresholds.
    ///
    /// # Errors
    /// Names a label that the model lacks, or a threshold that is not a score.
    pub fn class_thresholds(
        &self,
        labels: &[Arc<str>],
        of_folder: Option<&[f32]>,
    ) -> Result<Option<Arc<[f32]>>, String> {
        let of_folder = of_folder.map(Arc::from);
        let resolved = self.resolve(labels, of_folder.as_ref())?;
        Ok(resolved.thresholds)
    }

    /// For a model with these labels, whose folder has these thresholds.
    ///
    /// # Errors
    /// Names a label that the model lacks, or a threshold that is not a score.
    pub(crate) fn resolve(
        &self,
        labels: &[Arc<str>],
        of_folder: Option<&Arc<[f32]>>,
    ) -> Result<Resolved, String> {
        let thresholds = match self.has_thresholds() {
            false => of_folder.cloned(),
            true => {
                let of_folder = of_folder.filter(|_| self.threshold.is_none());
                let general = self.threshold.unwrap_or(0.0);
                let all =
                    (0..labels.len()).map(|class| of_folder.map_or(general, |all| all[class]));
                Some(with_thresholds(all, &self.thresholds, labels)?)
            }
        };
        Ok(Resolved {
            top_k: self.classes(labels.len()),
            logits: self.logits,
            embedding: self.embedding,
            embedding_type: self.embedding_type,
            normalize: self.normalize,
            head: None,
            thresholds,
        })
    }
}

/// The threshold of each class: that of its label, else the default at its position.
///
/// # Errors
/// As [`Wanted::resolve`].
pub(crate) fn with_thresholds(
    all: impl Iterator<Item = f32>,
    by_label: &BTreeMap<String, f32>,
    labels: &[Arc<str>],
) -> Result<Arc<[f32]>, String> {
    let is_known = |label: &str| labels.iter().any(|known| **known == *label);
    if let Some(label) = by_label.keys().find(|label| !is_known(label)) {
        let some: Vec<_> = labels
            .iter()
            .take(3)
            .map(|label| format!("{label:?}"))
            .collect();
        return Err(format!(
            "{label:?} has a threshold, but is not one of the labels, such as {}",
            some.join(", ")
        ));
    }
    let own = |label: &Arc<str>| by_label.get(&**label).copied();
    let thresholds = labels.iter().zip(all);
    let thresholds: Arc<[f32]> = thresholds
        .map(|(label, value)| own(label).unwrap_or(value))
        .collect();
    let is_score = |value: &f32| (0.0..=1.0).contains(value);
    match thresholds.iter().find(|value| !is_score(value)) {
        Some(value) => Err(format!("threshold {value} is not a score from 0 to 1")),
        None => Ok(thresholds),
    }
}

fn at_most(wanted: NonZeroU32, labels: usize) -> usize {
    usize::try_from(wanted.get())
        .unwrap_or(usize::MAX)
        .min(labels)
}

/// The resolved row options for one model.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Resolved {
    pub(crate) top_k: usize,
    pub(crate) logits: bool,
    pub(crate) embedding: bool,
    pub(crate) embedding_type: EmbeddingType,
    pub(crate) normalize: bool,
    /// The head that replaces the model's classes.
    pub(crate) head: Option<Arc<Head>>,
    /// One per class.
    pub(crate) thresholds: Option<Arc<[f32]>>,
}

impl Resolved {
    /// Whether the image's embedding is needed.
    pub(crate) fn needs_embedding(&self) -> bool {
        self.embedding || self.head.is_some()
    }
}

/// A cache of resolved options, as few jobs send many images.
#[derive(Debug, Default)]
pub(crate) struct Known(Mutex<Vec<(Arc<Wanted>, Arc<Resolved>)>>);

impl Known {
    /// Number of cached jobs.
    const MOST: usize = 64;

    /// The result of `resolve`, cached by the address of `wanted`, which is kept alive.
    pub(crate) fn get(
        &self,
        wanted: &Arc<Wanted>,
        resolve: impl FnOnce() -> Result<Resolved, InferError>,
    ) -> Result<Arc<Resolved>, InferError> {
        if let Some(resolved) = self.find(wanted) {
            return Ok(resolved);
        }
        // Without holding the lock: labels take time.
        let resolved = Arc::new(resolve()?);
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() == Self::MOST {
            known.remove(0);
        }
        known.push((Arc::clone(wanted), Arc::clone(&resolved)));
        Ok(resolved)
    }

    /// A cached entry.
    pub(crate) fn find(&self, wanted: &Arc<Wanted>) -> Option<Arc<Resolved>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known = known.iter();
        known.find_map(|(other, resolved)| Arc::ptr_eq(other, wanted).then(|| Arc::clone(resolved)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels() -> Vec<Arc<str>> {
        ["cat", "dog", "empty"].map(Arc::from).into()
    }

    fn thresholds(wanted: &Wanted, of_folder: Option<[f32; 3]>) -> Option<Vec<f32>> {
        let of_folder = of_folder.map(Arc::from);
        let resolved = wanted.resolve(&labels(), of_folder.as_ref()).unwrap();
        resolved.thresholds.map(|thresholds| thresholds.to_vec())
    }

    #[test]
    fn thresholds_of_a_row_win_over_those_of_the_folder() {
        let by_label = Wanted {
            thresholds: [("dog".to_owned(), 0.25)].into(),
            ..Wanted::default()
        };
        let both = Wanted {
            threshold: Some(0.75),
            ..by_label.clone()
        };
        let folder = Some([0.5, 0.5, 0.0]);
        assert_eq!(thresholds(&Wanted::default(), None), None);
        assert_eq!(
            thresholds(&Wanted::default(), folder).unwrap(),
            [0.5, 0.5, 0.0]
        );
        assert_eq!(thresholds(&by_label, None).unwrap(), [0.0, 0.25, 0.0]);
        assert_eq!(thresholds(&by_label, folder).unwrap(), [0.5, 0.25, 0.0]);
        assert_eq!(thresholds(&both, folder).unwrap(), [0.75, 0.25, 0.75]);
    }

    #[test]
    fn what_the_model_cannot_mean_is_named() {
        let general = |threshold| Wanted {
            threshold: Some(threshold),
            ..Wanted::default()
        };
        let unknown = Wanted {
            thresholds: [("animal".to_owned(), 0.2)].into(),
            ..Wanted::default()
        };
        for (wanted, words) in [
            (unknown, "\"animal\""),
            (general(50.0), "50"),
            (general(f32::NAN), "NaN"),
        ] {
            let why = wanted.resolve(&labels(), None).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn a_wanted_is_resolved_once() {
        let (known, wanted) = (Known::default(), Arc::new(Wanted::default()));
        let resolve = || Ok(wanted.resolve(&labels(), None).unwrap());
        let first = known.get(&wanted, resolve).unwrap();
        let again = known.get(&wanted, || panic!("it is known")).unwrap();
        assert!(Arc::ptr_eq(&first, &again));
        assert_eq!(first.top_k, 3);
        for _ in 0..2 * Known::MOST {
            known
                .get(&Arc::new(Wanted::clone(&wanted)), resolve)
                .unwrap();
        }
        assert!(known.0.lock().unwrap().len() <= Known::MOST);
    }
}
