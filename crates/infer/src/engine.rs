use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use trommel_types::{Lane, Scores};

use crate::affinity;
use crate::instances::Instances;
use crate::{EngineStats, InferError, InferErrorKind, Model};

/// How a model is shared out over threads and batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// Sessions side by side, at least 1, on the model's devices in turn; each is one thread with a
    /// copy of the model.
    pub instances: usize,
    /// Images in a full batch, at least 1. A model of a fixed batch has its own number instead.
    pub max_batch: usize,
    /// Longest time a batch waits for more images, from its first one.
    pub max_wait: Duration,
}

/// A model at work on threads of its own.
///
/// Dropping it finishes the images it has accepted, then joins the threads; that blocks for a few
/// batches' time.
#[derive(Debug)]
pub struct Engine {
    model: Model,
    instances: Instances,
}

impl Engine {
    /// Starts the threads and runs one batch of black images on each, so that the first real one
    /// finds everything ready. Blocks until then.
    ///
    /// # Errors
    /// When an option is 0, a session cannot be opened, or the model cannot run a full batch.
    pub fn start(model: Model, options: EngineOptions) -> Result<Self, InferError> {
        for (name, value) in [
            ("instances", options.instances),
            ("max-batch", options.max_batch),
        ] {
            if value == 0 {
                return Err(InferError::new(
                    InferErrorKind::Settings,
                    format_args!("{name} is 0, with which no image is classified; give at least 1"),
                ));
            }
        }
        let max_batch = model.fixed_batch().unwrap_or(options.max_batch);
        let options = EngineOptions {
            max_batch,
            ..options
        };
        let inner = Arc::clone(&model.inner);
        let instances = Instances::start(model.name(), options, move |number| {
            if inner.options.pin_threads {
                affinity::pin_current(number, inner.options.intra_threads)?;
            }
            inner.backend(number, max_batch)
        })?;
        Ok(Self { model, instances })
    }

    /// Classifies one image, given as HWC pixels of the model's shape, in a batch with others of its
    /// lane.
    ///
    /// Waits while the engine holds as many images of the lane as it may: for each instance one batch
    /// that waits for it, and the one that is forming. Images of a lane are taken in the order in which
    /// their calls were first polled; batches of urgent lanes come first, except now and then.
    ///
    /// Cancel-safe: dropped before the image is accepted, nothing has happened; dropped later, the
    /// image is passed over, or its answer forgotten. The future does not borrow the engine; one
    /// that is accepted is answered even if the engine is dropped meanwhile.
    ///
    /// # Errors
    /// [`Pixels`](InferErrorKind::Pixels) when the length is not that of the shape,
    /// [`ModelFailed`](InferErrorKind::ModelFailed) when the model failed on this image, also when
    /// run alone, [`DeviceLost`](InferErrorKind::DeviceLost) or
    /// [`EngineStopped`](InferErrorKind::EngineStopped) when no image will be classified any more.
    pub fn classify<P: Into<Bytes>>(
        &self,
        pixels: P,
        lane: Lane,
    ) -> impl Future<Output = Result<Scores, InferError>> + Send + use<P> {
        let pixels = pixels.into();
        let (shared, expected) = (Arc::clone(self.instances.shared()), self.model.shape());
        async move {
            if pixels.len() != expected.len() {
                return Err(InferError::new(
                    InferErrorKind::Pixels,
                    format_args!(
                        "an image of {} bytes was given to a model that takes {} x {} x {}",
                        pixels.len(),
                        expected.height,
                        expected.width,
                        expected.channels
                    ),
                ));
            }
            shared.classify(pixels, lane).await
        }
    }

    /// Closes the batch in hand although it is not full: no more images will come for a while.
    pub fn flush(&self) {
        self.instances.shared().flush();
    }

    /// What the engine has done so far.
    pub fn stats(&self) -> EngineStats {
        self.instances.stats()
    }

    /// The model at work.
    pub fn model(&self) -> &Model {
        &self.model
    }
}
