//! New classes for embeddings, as columns.

use std::collections::BTreeMap;
use std::sync::Arc;

use trommel_types::ErrorKind;

/// Classifies embeddings.
pub trait Classes: Send {
    /// The names of the classes.
    fn labels(&self) -> &Arc<[Arc<str>]>;

    /// Length of an embedding.
    fn width(&self) -> usize;

    /// The version of the model that the embeddings must come from, if known.
    fn version(&self) -> Option<&str>;

    /// Appends an answer for each embedding in `f32[n, width]`.
    fn answer(&mut self, embeddings: &[f32], answers: &mut Answers);
}

/// Answers to embeddings, in order.
#[derive(Debug, Default)]
pub struct Answers {
    /// Classes with scores, embedding after embedding.
    ranked: Vec<(u32, f32)>,
    /// End of each embedding's classes.
    ends: Vec<usize>,
    /// Errors of embeddings without classes, by position.
    failures: BTreeMap<usize, (ErrorKind, String)>,
}

impl Answers {
    /// Adds the best classes of an embedding with their scores, the best first.
    pub fn push(&mut self, ranked: impl Iterator<Item = (u32, f32)>) {
        self.ranked.extend(ranked);
        self.ends.push(self.ranked.len());
    }

    /// Adds an embedding without classes.
    pub fn fail(&mut self, kind: ErrorKind, error: String) {
        self.failures.insert(self.ends.len(), (kind, error));
        self.ends.push(self.ranked.len());
    }

    /// Number of answers.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether some embeddings have no classes.
    pub(super) fn has_failures(&self) -> bool {
        !self.failures.is_empty()
    }

    /// The answer at a position: classes, or the error.
    pub(super) fn get(&self, place: usize) -> Result<&[(u32, f32)], (ErrorKind, &str)> {
        if self.has_failures()
            && let Some((kind, error)) = self.failures.get(&place)
        {
            return Err((*kind, error));
        }
        let start = place.checked_sub(1).map_or(0, |before| self.ends[before]);
        Ok(&self.ranked[start..self.ends[place]])
    }
}
