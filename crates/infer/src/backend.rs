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
    /// Row options.
    pub(crate) wanted: Arc<Resolved>,
}

/// Runs batches. Each belongs to one thread.
pub(crate) trait Backend: Send {
    /// Classifies `images`, at least one and at most the largest batch. Returns one outcome per
    /// image, in order.
    ///
    /// # Errors
    /// If the batch failed as a whole, so that nothing is known about any image.
    fn run(&mut self, images: &[Image]) -> Result<Vec<Result<Scores, InferError>>, InferError>;

    /// Classifies an image while nothing else is computed; `None` if there is no faster way than
    /// [`Backend::run`], or it fails.
    fn run_lone(&mut self, _image: &Image) -> Option<Scores> {
        None
    }

    /// Number of images computed for `images`, including padding.
    fn computed(&self, images: usize) -> usize {
        images
    }

    /// Whether it allocates memory for each batch size, at warm-up.
    fn keeps_sizes(&self) -> bool {
        false
    }

    /// Runs a batch of black images.
    ///
    /// # Errors
    /// If the model cannot run a batch of `images`.
    fn blank(&mut self, images: usize) -> Result<(), InferError>;

    /// Runs batches of black images, so that memory and kernels are ready for the first real one.
    ///
    /// # Errors
    /// If the model cannot run a batch of up to `images`.
    fn warm_up(&mut self, images: usize) -> Result<(), InferError>;

    /// Ends the profile of a session opened for profiling; returns its file.
    ///
    /// # Errors
    /// If the session is not profiled.
    fn end_profiling(&mut self) -> Result<String, InferError>;
}

impl Backend for Box<dyn Backend> {
    fn run(&mut self, images: &[Image]) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        (**self).run(images)
    }

    fn run_lone(&mut self, image: &Image) -> Option<Scores> {
        (**self).run_lone(image)
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
