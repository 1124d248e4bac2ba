use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

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

/// A session on more threads that all instances share, for single images.
#[derive(Debug)]
pub(crate) struct LoneSession {
    threads: usize,
    /// Least time of an image in another session for which it is opened.
    min_time: Duration,
    /// Memory that it takes at least.
    bytes: u64,
    /// Whether an instance has tried to open it.
    is_decided: AtomicBool,
    session: OnceLock<Mutex<Session>>,
}

impl LoneSession {
    pub(crate) fn new(threads: usize, min_time: Duration, bytes: u64) -> Self {
        Self {
            threads,
            min_time,
            bytes,
            is_decided: AtomicBool::new(false),
            session: OnceLock::new(),
        }
    }
}

/// A session on the CPU: images are normalised into its input, and scored from its output.
pub(crate) struct HostBackend {
    model: Arc<Classifier>,
    session: Session,
    lone: Option<Arc<LoneSession>>,
    /// Run options that request only the classes, if there are any, or also the embeddings.
    classes: Option<RunOptions<HasSelectedOutputs>>,
    embeddings: Option<RunOptions<HasSelectedOutputs>>,
    packer: Packer,
    scorer: Scorer,
}

impl HostBackend {
    pub(crate) fn new(
        model: Arc<Classifier>,
        session: Session,
        lone: Option<Arc<LoneSession>>,
    ) -> Result<Self, InferError> {
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
            lone,
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

    /// Opens the session for single images and warms it up, if this one is slow, there is memory for
    /// it, and no other instance has decided that.
    fn open_lone(&mut self) -> Result<(), InferError> {
        let Some(lone) = self.lone.clone() else {
            return Ok(());
        };
        if lone.is_decided.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        // Other instances may be warming up, which makes one of the runs slower.
        for _ in 0..2 {
            let start = Instant::now();
            self.blank(1)?;
            if start.elapsed() < lone.min_time {
                return Ok(());
            }
        }
        if memory::budget().is_some_and(|budget| budget < lone.bytes) {
            tracing::warn!(
                "model {}: there is no memory for a session of {} threads, so a single request has \
                 those of the others; serve.lone-threads = 1 wants none",
                self.model.name,
                lone.threads
            );
            return Ok(());
        }
        let mut session = self.model.open_lone(lone.threads)?;
        self.compute(&[], self.model.computed(1), Some(&mut session))?;
        lone.session.set(Mutex::new(session)).ok(); // nobody else does
        Ok(())
    }

    /// Runs a batch of `computed` images, in the session `lone` if given; those after `images` are
    /// black.
    fn compute(
        &mut self,
        images: &[Image],
        computed: usize,
        lone: Option<&mut Session>,
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
        let session = lone.unwrap_or(&mut self.session);
        let outputs = session.run_with_options([input], options).map_err(failed)?;
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
        self.compute(images, self.model.computed(images.len()), None)
    }

    fn run_lone(&mut self, image: &Image) -> Option<Scores> {
        let lone = self.lone.clone()?;
        let mut session = lone.session.get()?.try_lock().ok()?;
        let one = slice::from_ref(image);
        let outcomes = self.compute(one, self.model.computed(1), Some(&mut session));
        outcomes.ok()?.pop()?.ok()
    }

    fn computed(&self, images: usize) -> usize {
        self.model.computed(images)
    }

    fn blank(&mut self, images: usize) -> Result<(), InferError> {
        self.compute(&[], self.model.computed(images), None)
            .map(drop)
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
            Some((grown, budget)) if images > WARM => self.check_fits(images, grown, budget)?,
            _ => {}
        }
        self.open_lone()
    }

    fn end_profiling(&mut self) -> Result<String, InferError> {
        self.model.end_profiling(&mut self.session)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use bytes::Bytes;
    use trommel_types::{Normalization, Shape};

    use super::*;
    use crate::wanted::Resolved;
    use crate::{LiveOptions, Model, ModelOptions, Runtime};

    const SHAPE: Shape = Shape {
        height: 4,
        width: 5,
        channels: 3,
    };

    /// A warm instance of a test model and the session for single images, if it has opened one.
    fn backend(lone_threads: usize, lone_min_time: Duration) -> Box<dyn Backend> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/nchw_f32");
        let normalization = Normalization {
            scale: 1.0,
            mean: [0.0; 3],
            std: [1.0; 3],
        };
        let (runtime, options) = (Runtime::load(None).unwrap(), ModelOptions::default());
        let model = Model::open(&runtime, &dir, normalization, SHAPE, &options).unwrap();
        let live = LiveOptions {
            lone_threads,
            lone_min_time,
            ..LiveOptions::default()
        };
        let lone = model.lone_session(live).unwrap();
        let mut backend = model.backend(0, 4, lone).unwrap();
        backend.warm_up(4).unwrap();
        backend
    }

    fn image() -> Image {
        let wanted = Resolved {
            top_k: 3,
            ..Resolved::default()
        };
        Image {
            pixels: Bytes::from_iter((0..SHAPE.len()).map(|i| i as u8)),
            wanted: Arc::new(wanted),
        }
    }

    #[test]
    fn a_single_image_has_the_session_with_more_threads() {
        let mut backend = backend(2, Duration::ZERO);
        let lone = backend.run_lone(&image()).unwrap();
        let batch = backend.run(&[image()]).unwrap();
        assert_eq!(lone.top, batch[0].as_ref().unwrap().top);
    }

    #[test]
    fn a_model_that_is_fast_enough_or_has_as_many_threads_has_no_other_session() {
        for (threads, min_time) in [(2, Duration::MAX), (1, Duration::ZERO)] {
            assert!(backend(threads, min_time).run_lone(&image()).is_none());
        }
    }
}
