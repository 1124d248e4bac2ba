//! New classes of embeddings, as columns.

use std::collections::BTreeMap;
use std::sync::Arc;

use trommel_types::ErrorKind;

/// Gives classes to embeddings.
pub trait Classes: Send {
    /// The names of the classes.
    fn labels(&self) -> &Arc<[Arc<str>]>;

    /// Values of an embedding.
    fn width(&self) -> usize;

    /// The version of the model whose embeddings these have to be, if it is known.
    fn version(&self) -> Option<&str>;

    /// Adds an answer for each of the embeddings, `f32[n, width]`.
    fn answer(&mut self, embeddings: &[f32], answers: &mut Answers);
}

/// The answers to embeddings, in their order.
#[derive(Debug, Default)]
pub struct Answers {
    /// Classes with their scores, those of one embedding after those of another.
    ranked: Vec<(u32, f32)>,
    /// Where those of each embedding end.
    ends: Vec<usize>,
    /// Why embeddings have none, by their places.
    failures: BTreeMap<usize, (ErrorKind, String)>,
}

impl Answers {
    /// Adds the best classes of an embedding with their scores, the best first.
    pub fn push(&mut self, ranked: impl Iterator<Item = (u32, f32)>) {
        self.ranked.extend(ranked);
        self.ends.push(self.ranked.len());
    }

    /// Adds an embedding that has no classes.
    pub fn fail(&mut self, kind: ErrorKind, error: String) {
        self.failures.insert(self.ends.len(), (kind, error));
        self.ends.push(self.ranked.len());
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether embeddings are without classes.
    pub(super) fn has_failures(&self) -> bool {
        !self.failures.is_empty()
    }

    /// The answer at a place: its classes, or the error.
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
