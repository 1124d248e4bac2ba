use std::sync::Arc;

use bytes::Bytes;
use ort::session::{HasSelectedOutputs, OutputSelector, RunOptions, Session};
use ort::value::{DynValue, TensorRef};
use trommel_types::Scores;

use crate::error::{is_out_of_memory, reason};
use crate::model::Inner;
use crate::pack::{Packed, Packer};
use crate::scores::Scorer;
use crate::signature::{Layout, OutputType};
use crate::tensor_info::Float;
use crate::{InferError, InferErrorKind};

/// What runs a batch. One belongs to one thread.
pub(crate) trait Backend {
    /// Classifies `images`, at least one and at most the largest batch. Gives one outcome an image,
    /// in their order.
    ///
    /// # Errors
    /// When the batch as a whole failed, so that nothing is known about any of its images.
    fn run(&mut self, images: &[Bytes]) -> Result<Vec<Result<Scores, InferError>>, InferError>;

    /// The images that a run over `images` of them computes, padding counted.
    fn computed(&self, images: usize) -> usize {
        images
    }

    /// Runs a batch of nothing, so that the first real one finds memory and kernels ready.
    ///
    /// # Errors
    /// When the model cannot run a batch of `images`.
    fn warm_up(&mut self, images: usize) -> Result<(), InferError>;
}

/// A session of ONNX Runtime with the buffers it needs.
pub(crate) struct OrtBackend {
    model: Arc<Inner>,
    session: Session,
    options: RunOptions<HasSelectedOutputs>,
    packer: Packer,
    scorer: Scorer,
}

impl OrtBackend {
    pub(crate) fn new(
        model: Arc<Inner>,
        session: Session,
        max_batch: usize,
    ) -> Result<Self, InferError> {
        let signature = &model.signature;
        // The other outputs are then not even kept.
        let mut output = OutputSelector::no_default().with(&signature.output);
        if let Some(embedding) = &model.embedding {
            output = output.with(&embedding.output);
        }
        let options = RunOptions::new()
            .map_err(|error| model.failed(&reason(&error)))?
            .with_outputs(output);
        let packer = Packer::new(
            model.shape,
            signature.layout,
            signature.input_type,
            &model.normalization,
            max_batch,
        );
        let scorer = Scorer::new(
            Arc::clone(&model.labels),
            model.activation,
            model.thresholds.clone(),
            model.options.top_k,
            model.options.logits,
        );
        Ok(Self {
            session,
            options,
            packer,
            scorer,
            model,
        })
    }

    /// Ends the profile of a session that was opened with one; gives its file.
    pub(crate) fn end_profiling(&mut self) -> Result<String, InferError> {
        let ended = self.session.end_profiling();
        ended.map_err(|error| self.model.failed(&reason(&error)))
    }

    /// Runs the first `images` images of the packer.
    pub(crate) fn compute(
        &mut self,
        images: usize,
    ) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        let model = &*self.model;
        let computed = model.computed(images);
        if computed > images {
            self.packer.clear(images, computed);
        }
        let (height, width) = (model.shape.height as usize, model.shape.width as usize);
        let shape = match model.signature.layout {
            Layout::Nchw => [computed, 3, height, width],
            Layout::Nhwc => [computed, height, width, 3],
        };
        let failed = |error: ort::Error| match error.code() {
            ort::ErrorCode::DeviceReset => InferError::new(
                InferErrorKind::DeviceLost,
                format_args!(
                    "device {} is lost: {}",
                    model.options.device,
                    reason(&error)
                ),
            ),
            _ if is_out_of_memory(&error.to_string()) => InferError::new(
                InferErrorKind::OutOfMemory,
                format_args!(
                    "device {} has no memory for {computed} images at once: {}",
                    model.options.device,
                    reason(&error)
                ),
            ),
            _ => model.failed(&reason(&error)),
        };
        let input = match self.packer.images(computed) {
            Packed::F32(values) => TensorRef::from_array_view((shape, values)).map(Into::into),
            Packed::F16(values) => TensorRef::from_array_view((shape, values)).map(Into::into),
            Packed::U8(values) => TensorRef::from_array_view((shape, values)).map(Into::into),
        };
        let input: DynInput<'_> = input.map_err(failed)?;
        let outputs = self
            .session
            .run_with_options([input], &self.options)
            .map_err(failed)?;
        let output = |name: &str| {
            outputs
                .get(name)
                .ok_or_else(|| model.failed(&format!("its output {name} is missing")))
        };
        let logits = output(&model.signature.output)?;
        let mut outcomes = match model.signature.output_type {
            OutputType::F32 => scores::<f32>(model, logits, images, computed, &mut self.scorer),
            OutputType::F16 => {
                scores::<half::f16>(model, logits, images, computed, &mut self.scorer)
            }
        }?;
        if let Some(embedding) = &model.embedding {
            let values = output(&embedding.output)?;
            let vectors = match embedding.output_type {
                OutputType::F32 => embeddings::<f32>(model, values, computed),
                OutputType::F16 => embeddings::<half::f16>(model, values, computed),
            }?;
            // Padding comes last, and falls away here.
            for (outcome, vector) in outcomes.iter_mut().zip(vectors) {
                if let Ok(scores) = outcome {
                    scores.embedding = Some(vector);
                }
            }
        }
        Ok(outcomes)
    }
}

type DynInput<'v> = ort::session::SessionInputValue<'v>;

impl Backend for OrtBackend {
    fn run(&mut self, images: &[Bytes]) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        for (place, pixels) in images.iter().enumerate() {
            self.packer.write(place, pixels);
        }
        self.compute(images.len())
    }

    fn computed(&self, images: usize) -> usize {
        self.model.computed(images)
    }

    fn warm_up(&mut self, images: usize) -> Result<(), InferError> {
        self.packer.clear(0, images);
        self.compute(images).map(drop).map_err(|error| {
            let remedy = if self.model.signature.fixed_batch.is_none() && images > 1 {
                "; if the model was exported for one image at a time, run it with a largest batch \
                 of 1"
            } else {
                ""
            };
            InferError::new(
                error.kind(),
                format_args!("{error}, on a batch of {images} at start{remedy}"),
            )
        })
    }
}

/// Scores the first `images` rows; the rest is padding.
fn scores<F: Float + ort::value::PrimitiveTensorElementType>(
    model: &Inner,
    output: &DynValue,
    images: usize,
    computed: usize,
    scorer: &mut Scorer,
) -> Result<Vec<Result<Scores, InferError>>, InferError> {
    let (shape, values) = output
        .try_extract_tensor::<F>()
        .map_err(|error| model.failed(&reason(&error)))?;
    let classes = model.labels.len();
    if **shape != [computed as i64, classes as i64] {
        return Err(model.failed(&format!(
            "its output {} is {shape} for {computed} images of {classes} classes",
            model.signature.output
        )));
    }
    Ok(values
        .chunks_exact(classes)
        .take(images)
        .map(|logits| scorer.score(logits))
        .collect())
}

/// The vector of each image that was computed, padding included.
fn embeddings<F: Float + ort::value::PrimitiveTensorElementType>(
    model: &Inner,
    output: &DynValue,
    computed: usize,
) -> Result<Vec<Vec<f32>>, InferError> {
    let (shape, values) = output
        .try_extract_tensor::<F>()
        .map_err(|error| model.failed(&reason(&error)))?;
    let [rows, width] = **shape else {
        return Err(model.failed(&format!("its embeddings are {shape}")));
    };
    if rows != computed as i64 || width < 1 {
        return Err(model.failed(&format!("its embeddings are {shape} for {computed} images")));
    }
    let vectors = values.chunks_exact(width as usize);
    Ok(vectors
        .map(|vector| vector.iter().map(|value| value.widen()).collect())
        .collect())
}
