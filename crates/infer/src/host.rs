use std::sync::Arc;

use ort::session::{HasSelectedOutputs, OutputSelector, RunOptions, Session};
use ort::value::{DynTensorValueType, TensorRef};
use trommel_types::Scores;

use crate::answers::{embeddings, scores, without_classes};
use crate::backend::{Backend, Image};
use crate::classifier::Classifier;
use crate::error::reason;
use crate::pack::{Packed, Packer};
use crate::scores::Scorer;
use crate::signature::Layout;
use crate::{InferError, InferErrorKind, memory};

/// Largest batch at warm-up: kernels are chosen by then, and more would take time that an engine
/// with few images never recovers.
const WARM: usize = 16;

/// A session on the CPU: images are normalised into its input, and scored from its output.
pub(crate) struct HostBackend {
    model: Arc<Classifier>,
    session: Session,
    /// Run options that request only the classes, if there are any, or also the embeddings.
    classes: Option<RunOptions<HasSelectedOutputs>>,
    embeddings: Option<RunOptions<HasSelectedOutputs>>,
    packer: Packer,
    scorer: Scorer,
}

impl HostBackend {
    pub(crate) fn new(model: Arc<Classifier>, session: Session) -> Result<Self, InferError> {
        let signature = &model.signature;
        // The other outputs are then not even kept.
        let classes = || match model.has_classes() {
            true => OutputSelector::no_default().with(&signature.output),
            false => OutputSelector::no_default(),
        };
        let options = |outputs| {
            let options = RunOptions::new().map_err(|error| model.failed(&reason(&error)))?;
            Ok::<_, InferError>(options.with_outputs(outputs))
        };
        let embedding = model.embedding.as_ref().ok();
        let embeddings = embedding.map(|embedding| options(classes().with(&embedding.output)));
        let alone = model.has_classes().then(|| options(classes()));
        let (classes, embeddings) = (alone.transpose()?, embeddings.transpose()?);
        let packer = Packer::new(
            model.shape,
            signature.layout,
            signature.input_type,
            &model.normalization,
        );
        Ok(Self {
            session,
            classes,
            embeddings,
            packer,
            scorer: model.scorer(),
            model,
        })
    }

    /// Refuses batches that would exhaust the machine's memory, judging by a small one (N8).
    fn check_fits(&self, images: usize, grown: u64, budget: u64) -> Result<(), InferError> {
        // As bytes, and as the model's input.
        let least = 2 * self.model.shape.len() as u64;
        let fit = memory::fitting(self.model.computed(WARM), grown, least, budget);
        if self.model.computed(images) <= fit.max(WARM) {
            return Ok(());
        }
        Err(InferError::new(
            InferErrorKind::Settings,
            format_args!(
                "model {}: batches of {images} images would take more than the {} MiB of memory that \
                 may be used; about {fit} fit, so set max-batch to that or less",
                self.model.name,
                budget >> 20
            ),
        ))
    }

    /// Runs a batch of `computed` images; those after `images` are black.
    fn compute(
        &mut self,
        images: &[Image],
        computed: usize,
    ) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        let model = &*self.model;
        self.packer.reserve(computed);
        for (place, image) in images.iter().enumerate() {
            self.packer.write(place, &image.pixels);
        }
        self.packer.clear(images.len(), computed);
        let with_embeddings = self.embeddings.as_ref();
        let with_embeddings = with_embeddings.filter(|_| {
            !model.has_classes() || images.iter().any(|image| image.wanted.needs_embedding())
        });
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
        let options = with_embeddings.or(self.classes.as_ref());
        let options =
            options.ok_or_else(|| model.failed("it gives neither classes nor embeddings"))?;
        let outputs = self
            .session
            .run_with_options([input], options)
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
        let mut outcomes = match model.has_classes() {
            true => {
                let logits = output(&model.signature.output)?;
                scores(model, &logits, images, computed, &mut self.scorer)?
            }
            false => without_classes(images),
        };
        if let (Some(_), Ok(embedding)) = (with_embeddings, &model.embedding) {
            let vectors = output(&embedding.output)?;
            embeddings(
                model,
                &vectors,
                images,
                computed,
                &mut self.scorer,
                &mut outcomes,
            )?;
        }
        Ok(outcomes)
    }
}

type DynInput<'v> = ort::session::SessionInputValue<'v>;

impl Backend for HostBackend {
    fn run(&mut self, images: &[Image]) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        self.compute(images, self.model.computed(images.len()))
    }

    fn computed(&self, images: usize) -> usize {
        self.model.computed(images)
    }

    fn blank(&mut self, images: usize) -> Result<(), InferError> {
        self.compute(&[], self.model.computed(images)).map(drop)
    }

    fn warm_up(&mut self, images: usize) -> Result<(), InferError> {
        let tried = images.min(WARM);
        let before = memory::resident();
        self.blank(tried)
            .map_err(|error| self.model.warm_up_error(&error, tried))?;
        let grown = memory::resident()
            .zip(before)
            .map(|(after, before)| after.saturating_sub(before));
        match grown.zip(memory::budget()) {
            Some((grown, budget)) if images > WARM => self.check_fits(images, grown, budget),
            _ => Ok(()),
        }
    }

    fn end_profiling(&mut self) -> Result<String, InferError> {
        self.model.end_profiling(&mut self.session)
    }
}
