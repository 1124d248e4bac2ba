use std::sync::Arc;

use bytes::Bytes;
use trommel_types::Scores;

use crate::InferError;
use crate::wanted::Resolved;

/// An image of a batch.
#[derive(Debug, Clone)]
pub(crate) struct Image {
    /// HWC bytes of the model's shape.
    pub(crate) pixels: Bytes,
    /// What its row holds.
    pub(crate) wanted: Arc<Resolved>,
}

/// What runs a batch. One belongs to one thread.
pub(crate) trait Backend: Send {
    /// Classifies `images`, at least one and at most the largest batch. Gives one outcome an image,
    /// in their order.
    ///
    /// # Errors
    /// When the batch as a whole failed, so that nothing is known about any of its images.
    fn run(&mut self, images: &[Image]) -> Result<Vec<Result<Scores, InferError>>, InferError>;

    /// The images that a run over `images` of them computes, padding counted.
    fn computed(&self, images: usize) -> usize {
        images
    }

    /// Whether it has memory for each size of batch, which it takes at warm-up.
    fn keeps_sizes(&self) -> bool {
        false
    }

    /// Runs a batch of black images.
    ///
    /// # Errors
    /// When the model cannot run a batch of `images`.
    fn blank(&mut self, images: usize) -> Result<(), InferError>;

    /// Runs batches of black images, so that the first real one finds memory and kernels ready.
    ///
    /// # Errors
    /// When the model cannot run a batch of up to `images`.
    fn warm_up(&mut self, images: usize) -> Result<(), InferError>;

    /// Ends the profile of a session that was opened with one; gives its file.
    ///
    /// # Errors
    /// When there is none.
    fn end_profiling(&mut self) -> Result<String, InferError>;
}

impl Backend for Box<dyn Backend> {
    fn run(&mut self, images: &[Image]) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        (**self).run(images)
    }

    fn computed(&self, images: usize) -> usize {
        (**self).computed(images)
    }

    fn keeps_sizes(&self) -> bool {
        (**self).keeps_sizes()
    }

    fn blank(&mut self, images: usize) -> Result<(), InferError> {
        (**self).blank(images)
    }

    fn warm_up(&mut self, images: usize) -> Result<(), InferError> {
        (**self).warm_up(images)
    }

    fn end_profiling(&mut self) -> Result<String, InferError> {
        (**self).end_profiling()
    }
}
