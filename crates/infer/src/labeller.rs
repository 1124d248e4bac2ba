use std::sync::Arc;

use trommel_types::Scores;

use crate::scores::Scorer;
use crate::wanted::Resolved;
use crate::{Head, InferError, InferErrorKind, Wanted};

/// Classifies stored embeddings, as an engine does with those of images. Owns its buffers, so each
/// serves one thread.
#[derive(Debug)]
pub struct Labeller {
    head: Arc<Head>,
    wanted: Resolved,
    scorer: Scorer,
    logits: Vec<f32>,
}

impl Labeller {
    /// For rows as `wanted`, with the labels of the head.
    ///
    /// # Errors
    /// [`Settings`](InferErrorKind::Settings) if a threshold is for a label that the head lacks, or
    /// is not a score.
    pub fn new(head: Arc<Head>, wanted: &Wanted) -> Result<Self, InferError> {
        let resolved = wanted.resolve(head.labels(), None);
        let resolved = resolved.map_err(|why| InferError::new(InferErrorKind::Settings, why))?;
        Ok(Self {
            scorer: Scorer::new(Arc::clone(head.labels()), head.activation()),
            wanted: resolved,
            head,
            logits: Vec::new(),
        })
    }

    /// The head.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The classes of embeddings, `f32[n, width]`, one answer for each.
    pub fn label(&mut self, embeddings: &[f32]) -> Vec<Result<Scores, InferError>> {
        self.head.logits(embeddings, &mut self.logits);
        let rows = self.logits.chunks_exact(self.head.labels().len());
        rows.map(|logits| self.scorer.score(logits, &self.wanted))
            .collect()
    }

    /// The same as classes and scores, best first, passed to `each` in order.
    pub fn rank(
        &mut self,
        embeddings: &[f32],
        mut each: impl FnMut(Result<&mut dyn Iterator<Item = (u32, f32)>, InferError>),
    ) {
        self.head.logits(embeddings, &mut self.logits);
        for logits in self.logits.chunks_exact(self.head.labels().len()) {
            match self.scorer.rank(logits, &self.wanted) {
                Ok(mut ranked) => each(Ok(&mut ranked)),
                Err(error) => each(Err(error)),
            }
        }
    }
}
