use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ort::session::Session;
use trommel_types::{LabelSet, Normalization, Shape};

use crate::error::{is_device_lost, is_out_of_memory, reason};
use crate::graph::Graph;
use crate::scores::Scorer;
use crate::signature::{Embedding, Signature};
use crate::towers::TextFiles;
use crate::wanted::{Resolved, Wanted};
use crate::{Activation, Head, InferError, InferErrorKind, ModelOptions, Runtime, Texts};

/// A checked model and the texts of its errors. Holds no session.
#[derive(Debug)]
pub(crate) struct Classifier {
    pub(crate) runtime: Runtime,
    pub(crate) name: Arc<str>,
    pub(crate) version: Arc<str>,
    pub(crate) graph: Graph,
    pub(crate) signature: Signature,
    /// Its output of embeddings, or why it has none.
    pub(crate) embedding: Result<Embedding, InferError>,
    /// Why it has no classes, if so.
    pub(crate) unlabelled: Option<InferError>,
    /// Its text tower, or why it has none.
    pub(crate) texts: Result<TextFiles, InferError>,
    pub(crate) heads: Heads,
    pub(crate) labels: Arc<[Arc<str>]>,
    pub(crate) activation: Activation,
    /// Thresholds from its folder, one per class.
    pub(crate) thresholds: Option<Arc<[f32]>>,
    pub(crate) normalization: Normalization,
    pub(crate) shape: Shape,
    pub(crate) options: ModelOptions,
}

/// Heads of recent label sets, as few jobs send many images.
#[derive(Debug, Default)]
pub(crate) struct Heads(Mutex<Vec<(LabelSet, Arc<Made>)>>);

type Made = OnceLock<Result<Arc<Head>, InferError>>;

impl Heads {
    /// Number of cached sets.
    const MOST: usize = 8;

    /// The slot of a set's head.
    fn place(&self, set: &LabelSet) -> Arc<Made> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, made)) = known.iter().find(|(other, _)| other == set) {
            return Arc::clone(made);
        }
        if known.len() == Self::MOST {
            known.remove(0);
        }
        let made = Arc::new(Made::new());
        known.push((set.clone(), Arc::clone(&made)));
        made
    }
}

impl Classifier {
    /// Whether it has its own classes.
    pub(crate) fn has_classes(&self) -> bool {
        !self.labels.is_empty()
    }

    /// The head of a set, computed on first use.
    fn head(&self, set: &LabelSet) -> Result<Arc<Head>, InferError> {
        let place = self.heads.place(set);
        let made = place.get_or_init(|| {
            let files = self.texts.as_ref().map_err(InferError::clone)?;
            let cache = self.options.cache.as_deref();
            let head = Texts::of(&self.runtime, files.clone(), self.shape, cache).head(set)?;
            if let Ok(width) = self.embedding.as_ref().map_or(Ok(head.width()), Embedding::width)
                && width != head.width()
            {
                return Err(InferError::new(
                    InferErrorKind::ModelConfig,
                    format_args!(
                        "model {}: images become embeddings of {width} values and texts of {}, so its towers are not of one model; export both with their projections",
                        self.name,
                        head.width()
                    ),
                ));
            }
            Ok(Arc::new(head))
        });
        made.clone()
    }

    pub(crate) fn scorer(&self) -> Scorer {
        Scorer::new(Arc::clone(&self.labels), self.activation)
    }

    /// Number of classes that the device chooses itself, by softmax; `None` if all logits may be
    /// needed.
    pub(crate) fn best_on_device(&self) -> Option<usize> {
        let capacity = &self.options.capacity;
        let all_needed =
            capacity.logits || self.thresholds.is_some() || self.activation != Activation::Softmax;
        (!all_needed).then(|| capacity.classes(self.labels.len()))
    }

    /// The embeddings output of a fused model, if requested.
    pub(crate) fn bound_embedding(&self) -> Option<&Embedding> {
        let embedding = self.embedding.as_ref().ok();
        embedding.filter(|_| self.options.capacity.embedding || !self.has_classes())
    }

    /// Whether rows may be as `wanted` with the sessions opened by the options.
    pub(crate) fn covers(&self, wanted: &Wanted) -> bool {
        if !self.options.is_fused() {
            return true;
        }
        let has_embedding = !wanted.needs_embedding() || self.bound_embedding().is_some();
        if !self.has_classes() || wanted.labels.is_some() {
            return has_embedding;
        }
        let classes = self.labels.len();
        has_embedding
            && self.best_on_device().is_none_or(|best| {
                !wanted.logits && !wanted.has_thresholds() && wanted.classes(classes) <= best
            })
    }

    /// The meaning of `wanted` for this model.
    ///
    /// # Errors
    /// If the model does not support it, or the engine was not opened for it.
    pub(crate) fn resolve(&self, wanted: &Wanted) -> Result<Resolved, InferError> {
        if wanted.needs_embedding() {
            self.embedding.as_ref().map_err(InferError::clone)?;
        }
        if let (Some(unlabelled), false) = (&self.unlabelled, wanted.needs_embedding()) {
            return Err(InferError::new(
                InferErrorKind::ModelConfig,
                format_args!(
                    "model {} has no classes ({unlabelled}): ask for embeddings with --embedding, or for labels with --labels if the model has a text tower",
                    self.name
                ),
            ));
        }
        let head = wanted
            .labels
            .as_ref()
            .map(|set| self.head(set))
            .transpose()?;
        let resolved = match &head {
            None => wanted.resolve(&self.labels, self.thresholds.as_ref()),
            Some(head) => wanted.resolve(head.labels(), None),
        };
        let resolved = resolved.map(|resolved| Resolved { head, ..resolved });
        resolved.map_err(|why| {
            let message = format_args!("model {}: {why}", self.name);
            InferError::new(InferErrorKind::Settings, message)
        })
    }

    pub(crate) fn fixed_batch(&self) -> Option<usize> {
        self.signature.fixed_batch.map(Into::into)
    }

    /// Number of images computed for `images`.
    pub(crate) fn computed(&self, images: usize) -> usize {
        self.signature.fixed_batch.map_or(images, Into::into)
    }

    /// The error for a run over `images` images that ONNX Runtime rejected.
    pub(crate) fn run_error(&self, error: &ort::Error, images: usize) -> InferError {
        let devices = &self.options.devices;
        let text = error.to_string();
        if is_out_of_memory(&text) {
            InferError::new(
                InferErrorKind::OutOfMemory,
                format_args!(
                    "device {devices} has no memory for {images} images at once: {}",
                    reason(error)
                ),
            )
        } else if error.code() == ort::ErrorCode::DeviceReset || is_device_lost(&text) {
            InferError::new(
                InferErrorKind::DeviceLost,
                format_args!("device {devices} is lost: {}", reason(error)),
            )
        } else {
            self.failed(&reason(error))
        }
    }

    /// The error for a first batch of `images` that failed.
    pub(crate) fn warm_up_error(&self, error: &InferError, images: usize) -> InferError {
        let remedy = if self.signature.fixed_batch.is_none() && images > 1 {
            "; if the model was exported for one image at a time, run it with a largest batch of 1"
        } else {
            ""
        };
        InferError::new(
            error.kind(),
            format_args!("{error}, on a batch of {images} at start{remedy}"),
        )
    }

    /// Ends the profile of a session opened for profiling; returns its file.
    pub(crate) fn end_profiling(&self, session: &mut Session) -> Result<String, InferError> {
        let ended = session.end_profiling();
        ended.map_err(|error| self.failed(&reason(&error)))
    }

    /// The error for a run without a usable result.
    pub(crate) fn failed(&self, why: &str) -> InferError {
        InferError::new(
            InferErrorKind::ModelFailed,
            format_args!("model {} failed: {why}", self.name),
        )
    }
}
