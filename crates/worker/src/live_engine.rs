//! Runs the model of a request, in this process or on infer workers.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use trommel_infer::{Engine, InferError, Wanted};
use trommel_types::{Failure, Lane, Scores};

use crate::NotAnswered;
use crate::distributed::RemoteModel;
use crate::fault::TaskError;

/// A running model for requests.
#[derive(Clone)]
pub enum LiveEngine {
    /// On the threads of this process.
    Here(Arc<Engine>),
    /// On infer workers, over the broker.
    There(Remote),
}

/// A model on infer workers, made by [`Worker::answers`](crate::Worker::answers).
#[derive(Clone)]
pub struct Remote(pub(crate) Arc<RemoteModel>);

/// An image on its way to the model.
pub(crate) struct LiveImage {
    /// The id of its request.
    pub(crate) request: Arc<str>,
    /// The tensor.
    pub(crate) pixels: Bytes,
    /// When the client stops waiting.
    pub(crate) deadline: Option<Instant>,
}

/// The model's result for an image.
pub(crate) enum EngineAnswer {
    Scores(Scores),
    /// It failed on this image; that is a row too.
    Failed(Failure),
}

/// Why the model gave no answer.
pub(crate) enum EngineFault {
    /// From an engine in this process.
    Here(TaskError),
    /// From all infer workers.
    There(NotAnswered),
}

impl From<Arc<Engine>> for LiveEngine {
    fn from(engine: Arc<Engine>) -> Self {
        Self::Here(engine)
    }
}

impl LiveEngine {
    /// The first digits of the model's content hash.
    pub(crate) fn version(&self) -> &Arc<str> {
        match self {
            Self::Here(engine) => engine.version(),
            Self::There(Remote(model)) => &model.id.version,
        }
    }

    /// Its classes; empty until an infer worker has reported them.
    pub(crate) fn labels(&self) -> Option<&[Arc<str>]> {
        match self {
            Self::Here(engine) => Some(engine.labels()),
            Self::There(Remote(model)) => model.labels(),
        }
    }

    /// Images computed in parallel, as far as this process knows.
    pub(crate) fn instances(&self) -> usize {
        match self {
            Self::Here(engine) => engine.stats().instances,
            Self::There(_) => 1,
        }
    }

    /// Checks whether rows can be as `wanted`. Infer workers check this themselves.
    ///
    /// # Errors
    /// The problem, as a sentence.
    pub(crate) fn check(&self, wanted: &Wanted) -> Result<(), NotAnswered> {
        match self {
            Self::Here(engine) => refused(covered(engine, wanted)?.check(wanted)),
            Self::There(_) => Ok(()),
        }
    }

    /// The same for rows with their own labels, which are embedded here. Blocks.
    ///
    /// # Errors
    /// The problem, as a sentence.
    pub(crate) fn prepare(&self, wanted: &Arc<Wanted>) -> Result<(), NotAnswered> {
        match self {
            Self::Here(engine) => refused(covered(engine, wanted)?.prepare(wanted)),
            Self::There(_) => Ok(()),
        }
    }

    /// Classifies an image; `coming` more are on their way. Calls `taken` once a batch need not
    /// wait for it.
    ///
    /// # Errors
    /// Why there are no scores.
    pub(crate) async fn classify(
        &self,
        image: LiveImage,
        wanted: &Arc<Wanted>,
        coming: u32,
        taken: impl FnOnce(),
    ) -> Result<EngineAnswer, EngineFault> {
        match self {
            Self::Here(engine) => {
                let call = engine.classify(image.pixels, Lane::Live, wanted);
                tokio::pin!(call);
                let scores = match futures::poll!(&mut call) {
                    std::task::Poll::Ready(scores) => scores,
                    std::task::Poll::Pending => {
                        taken(); // the batch need not wait for an image that is in it
                        call.await
                    }
                };
                let scores = scores.map_err(|error| EngineFault::Here(error.into()))?;
                Ok(EngineAnswer::Scores(scores))
            }
            Self::There(Remote(model)) => {
                taken();
                let answer = model.classify(image, wanted, coming).await;
                answer.map_err(EngineFault::There)
            }
        }
    }

    /// No more images are on their way.
    pub(crate) fn flush(&self) {
        if let Self::Here(engine) = self {
            engine.flush_lane(Lane::Live);
        }
    }
}

/// An engine, if it was started for such rows.
fn covered<'a>(engine: &'a Engine, wanted: &Wanted) -> Result<&'a Engine, NotAnswered> {
    match engine.covers(wanted) {
        true => Ok(engine),
        false => Err(NotAnswered::Settings(
            "the model was started for smaller rows; start `trommel serve` with the --top-k, --logits or --embedding that requests may ask for".to_owned(),
        )),
    }
}

fn refused(checked: Result<(), InferError>) -> Result<(), NotAnswered> {
    checked.map_err(|error| NotAnswered::Settings(error.to_string()))
}

impl From<TaskError> for EngineFault {
    fn from(error: TaskError) -> Self {
        Self::Here(error)
    }
}
