use std::sync::Arc;

use bytes::Bytes;
use ort::session::{HasSelectedOutputs, OutputSelector, RunOptions, Session};
use ort::value::{DynTensorValueType, TensorRef};
use trommel_types::Scores;

use crate::InferError;
use crate::answers::{embeddings, scores};
use crate::backend::Backend;
use crate::error::reason;
use crate::model::Inner;
use crate::pack::{Packed, Packer};
use crate::scores::Scorer;
use crate::signature::Layout;

/// A session on the processor: images are normalised into its input, and scored from its output.
pub(crate) struct HostBackend {
    model: Arc<Inner>,
    session: Session,
    options: RunOptions<HasSelectedOutputs>,
    packer: Packer,
    scorer: Scorer,
}

impl HostBackend {
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
        Ok(Self {
            session,
            options,
            packer,
            scorer: model.scorer(),
            model,
        })
    }

    /// Runs the first `images` images of the packer.
    fn compute(&mut self, images: usize) -> Result<Vec<Result<Scores, InferError>>, InferError> {
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
        let failed = |error: ort::Error| model.run_error(&error, computed);
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
            let output = outputs.get(name);
            let output =
                output.ok_or_else(|| model.failed(&format!("its output {name} is missing")))?;
            output
                .view()
                .downcast::<DynTensorValueType>()
                .map_err(|error| model.failed(&reason(&error)))
        };
        let logits = output(&model.signature.output)?;
        let mut outcomes = scores(model, &logits, images, computed, &mut self.scorer)?;
        if let Some(embedding) = &model.embedding {
            embeddings(model, &*output(&embedding.output)?, computed, &mut outcomes)?;
        }
        Ok(outcomes)
    }
}

type DynInput<'v> = ort::session::SessionInputValue<'v>;

impl Backend for HostBackend {
    fn run(&mut self, images: &[Bytes]) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        for (place, pixels) in images.iter().enumerate() {
            self.packer.write(place, pixels);
        }
        self.compute(images.len())
    }

    fn computed(&self, images: usize) -> usize {
        self.model.computed(images)
    }

    fn blank(&mut self, images: usize) -> Result<(), InferError> {
        self.packer.clear(0, images);
        self.compute(images).map(drop)
    }

    fn warm_up(&mut self, images: usize) -> Result<(), InferError> {
        self.blank(images)
            .map_err(|error| self.model.warm_up_error(&error, images))
    }

    fn end_profiling(&mut self) -> Result<String, InferError> {
        self.model.end_profiling(&mut self.session)
    }
}
