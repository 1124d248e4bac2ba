use std::sync::{Arc, PoisonError, RwLock};

use ort::memory::Allocator;
use ort::session::{IoBinding, NoSelectedOutputs, RunOptions, Session};
use ort::value::{DynTensor, Tensor, TensorElementType};
use trommel_types::Scores;

use crate::answers::{embeddings, scores, without_classes};
use crate::backend::{Backend, Image};
use crate::buckets::Buckets;
use crate::classifier::Classifier;
use crate::device::Memory;
use crate::ends::{ALL_LOGITS, CLASSES, EMBEDDINGS, LOGITS, PIXELS, PREPARED, SCORES, VECTORS};
use crate::error::reason;
use crate::scores::Scorer;
use crate::signature::Layout;
use crate::{InferError, InferErrorKind};

/// Locked for writing while a GPU's work is recorded, and for reading by all others that use a GPU:
/// in CUDA a recording fails if another thread allocates memory or waits for the device meanwhile.
pub(crate) static RECORDING: RwLock<()> = RwLock::new(());

/// A model between two small graphs that take pixels and return few numbers, with tensors at fixed
/// addresses: one set per batch size, so that a device can record its work and replay it.
///
/// The first graph copies pixels from host memory to the device, the last one copies the answers
/// back. Two instances on one device overlap copies and computation.
pub(crate) struct BoundBackend {
    model: Arc<Classifier>,
    /// The number of the instance.
    number: usize,
    sessions: Sessions,
    reopen: Reopen,
    /// Number of classes that the device chooses, if it does.
    best: Option<usize>,
    buckets: Buckets,
    /// The sets used so far, each created on first use.
    sets: Vec<TensorSet>,
    scorer: Scorer,
    sides: Sides,
}

/// Opens all sessions again, without recording.
type Reopen = Box<dyn Fn() -> Result<Sessions, InferError> + Send>;

/// The graphs, in execution order.
pub(crate) struct Sessions {
    pub(crate) before: Session,
    pub(crate) model: Session,
    pub(crate) behind: Session,
    /// Whether a GPU records its work for the model.
    pub(crate) graphs: bool,
}

/// Where tensors are.
struct Sides {
    /// Host memory that the device accesses directly.
    host: Allocator,
    device: Allocator,
}

/// The tensors for one batch size, and the bindings of each graph.
struct TensorSet {
    batch: usize,
    /// `u8[batch, H, W, 3]`, in host memory.
    pixels: Tensor<u8>,
    before: IoBinding,
    model: IoBinding,
    behind: IoBinding,
    /// Output of the last graph, in host memory.
    outputs: Vec<DynTensor>,
    /// Whether it has been run, and recorded if applicable.
    is_used: bool,
    /// For the run before recording.
    unrecorded: RunOptions<NoSelectedOutputs>,
    recorded: RunOptions<NoSelectedOutputs>,
}

impl BoundBackend {
    pub(crate) fn new(
        model: Arc<Classifier>,
        sessions: Sessions,
        reopen: Reopen,
        number: usize,
        max_batch: usize,
    ) -> Result<Self, InferError> {
        Ok(Self {
            sides: Sides::of(&model, &sessions, number)?,
            best: model.best_on_device(),
            number,
            sessions,
            reopen,
            buckets: Buckets::new(max_batch, model.fixed_batch()),
            sets: Vec::new(),
            scorer: model.scorer(),
            model,
        })
    }

    /// The set for a batch of `images`, created if necessary.
    fn place(&mut self, images: usize) -> Result<usize, InferError> {
        let batch = self.buckets.of(images);
        if let Some(place) = self.sets.iter().position(|set| set.batch == batch) {
            return Ok(place);
        }
        let set = {
            let _beside = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
            self.tensor_set(batch)
        };
        let set = set.map_err(|error| self.model.run_error(&error, batch))?;
        self.sets.push(set);
        Ok(self.sets.len() - 1)
    }

    fn tensor_set(&self, batch: usize) -> ort::Result<TensorSet> {
        let (model, sessions) = (&*self.model, &self.sessions);
        let (signature, Sides { host, device }) = (&model.signature, &self.sides);
        let (height, width) = (model.shape.height as usize, model.shape.width as usize);
        let flat = |side, element, width: usize| DynTensor::new(side, element, [batch, width]);

        let shape = match signature.layout {
            Layout::Nchw => [batch, 3, height, width],
            Layout::Nhwc => [batch, height, width, 3],
        };
        let mut prepared = DynTensor::new(device, signature.input_type.element(), shape)?;
        let mut before = sessions.before.create_binding()?;
        before.bind_output(PREPARED, &mut prepared)?;

        let element = signature.output_type.element();
        let mut between = sessions.model.create_binding()?;
        between.bind_input(&signature.input, &prepared)?;
        let mut behind = sessions.behind.create_binding()?;
        if model.has_classes() {
            let mut logits = flat(device, element, model.labels.len())?;
            between.bind_output(&signature.output, &mut logits)?;
            behind.bind_input(LOGITS, &logits)?;
        }

        let mut wanted = match self.best {
            _ if !model.has_classes() => Vec::new(),
            Some(k) => vec![
                (SCORES, TensorElementType::Float32, k),
                (CLASSES, TensorElementType::Int64, k),
            ],
            None => vec![(ALL_LOGITS, element, model.labels.len())],
        };
        if let Some(embedding) = model.bound_embedding() {
            let (element, width) = (embedding.output_type.element(), embedding.width()?);
            let mut vectors = flat(device, element, width)?;
            between.bind_output(&embedding.output, &mut vectors)?;
            behind.bind_input(VECTORS, &vectors)?;
            wanted.push((EMBEDDINGS, element, width));
        }
        let mut outputs = Vec::with_capacity(wanted.len());
        for (name, element, width) in wanted {
            let mut output = flat(host, element, width)?;
            behind.bind_output(name, &mut output)?;
            outputs.push(output);
        }
        // CUDA keeps one recording per number, and none for -1; other devices ignore it.
        let options = |number: &str| {
            let mut options = RunOptions::new()?;
            options.set("gpu_graph_id", number)?;
            Ok::<_, ort::Error>(options)
        };
        Ok(TensorSet {
            batch,
            pixels: Tensor::new(host, [batch, height, width, 3])?,
            before,
            model: between,
            behind,
            outputs,
            is_used: false,
            unrecorded: options("-1")?,
            recorded: options(&batch.to_string())?,
        })
    }

    /// Runs `images` in a set for at least `least` of them. A set that does not fit into the
    /// device's memory is dropped.
    fn compute(
        &mut self,
        images: &[Image],
        least: usize,
    ) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        let place = self.place(least)?;
        let set = &mut self.sets[place];
        set.write(images, &self.model)?;
        if let Err(error) = set.run(&mut self.sessions) {
            let error = self.model.run_error(&error, set.batch);
            if error.kind() == InferErrorKind::OutOfMemory {
                self.sets.swap_remove(place);
            }
            return Err(error);
        }
        let (model, batch) = (&*self.model, set.batch);
        let failed = |error: ort::Error| model.failed(&reason(&error));
        let (mut outcomes, vectors) = match (&*set.outputs, self.best) {
            (vectors, _) if !model.has_classes() => (without_classes(images), vectors),
            ([best, classes, rest @ ..], Some(k)) => {
                let (_, best) = best.try_extract_tensor().map_err(failed)?;
                let (_, classes) = classes.try_extract_tensor().map_err(failed)?;
                let rows = best.chunks_exact(k).zip(classes.chunks_exact(k));
                let chosen = rows.zip(images).map(|((best, classes), image)| {
                    let best = best.iter().zip(classes).take(image.wanted.top_k);
                    self.scorer.chosen(best)
                });
                (chosen.collect(), rest)
            }
            ([logits, rest @ ..], _) => (
                scores(model, logits, images, batch, &mut self.scorer)?,
                rest,
            ),
            ([], _) => unreachable!("a set has the outputs that it was made with"),
        };
        if let [vectors, ..] = vectors {
            embeddings(
                model,
                vectors,
                images,
                batch,
                &mut self.scorer,
                &mut outcomes,
            )?;
        }
        Ok(outcomes)
    }

    /// Runs batches of all sizes.
    fn run_all_sizes(&mut self, images: usize) -> Result<(), InferError> {
        for batch in self.buckets.up_to(images) {
            self.blank(batch)
                .map_err(|error| self.model.warm_up_error(&error, batch))?;
        }
        Ok(())
    }
}

impl Backend for BoundBackend {
    fn run(&mut self, images: &[Image]) -> Result<Vec<Result<Scores, InferError>>, InferError> {
        self.compute(images, images.len())
    }

    fn keeps_sizes(&self) -> bool {
        true
    }

    fn computed(&self, images: usize) -> usize {
        self.buckets.of(images)
    }

    fn blank(&mut self, images: usize) -> Result<(), InferError> {
        self.compute(&[], images).map(drop)
    }

    /// Records all batch sizes, if applicable. Only this shows whether recording works.
    fn warm_up(&mut self, images: usize) -> Result<(), InferError> {
        match self.run_all_sizes(images) {
            Err(error) if self.sessions.graphs && !error.is_fatal() => {
                tracing::warn!("going on without CUDA graphs: {error}");
                self.sets.clear();
                self.sessions = (self.reopen)()?;
                self.sides = Sides::of(&self.model, &self.sessions, self.number)?;
                self.run_all_sizes(images)
            }
            done => done,
        }
    }

    fn end_profiling(&mut self) -> Result<String, InferError> {
        self.model.end_profiling(&mut self.sessions.model)
    }
}

impl Sides {
    fn of(model: &Classifier, sessions: &Sessions, number: usize) -> Result<Self, InferError> {
        let device = model.options.devices.of(number);
        let allocator = |memory: Memory| {
            memory
                .info()
                .and_then(|info| Allocator::new(&sessions.model, info))
                .map_err(|error| device.unavailable(&error))
        };
        Ok(Self {
            host: allocator(device.host_memory())?,
            device: allocator(device.memory())?,
        })
    }
}

impl TensorSet {
    /// Writes the HWC pixels of `images`, followed by zeros.
    fn write(&mut self, images: &[Image], model: &Classifier) -> Result<(), InferError> {
        debug_assert!(images.len() <= self.batch, "a set that they fit into");
        let (_, pixels) = self
            .pixels
            .try_extract_tensor_mut::<u8>()
            .map_err(|error| model.failed(&reason(&error)))?;
        let mut places = pixels.chunks_exact_mut(model.shape.len());
        for (image, place) in images.iter().zip(places.by_ref()) {
            place.copy_from_slice(&image.pixels);
        }
        places.for_each(|place| place.fill(0));
        Ok(())
    }

    /// The first run allocates memory, and the second one records, if applicable.
    fn run(&mut self, sessions: &mut Sessions) -> ort::Result<()> {
        let graphs = sessions.graphs;
        if graphs && !self.is_used {
            self.run_once(sessions, false)?;
            let _alone = RECORDING.write().unwrap_or_else(PoisonError::into_inner);
            self.run_once(sessions, true)?;
        } else {
            let _beside = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
            self.run_once(sessions, graphs)?;
        }
        self.is_used = true;
        Ok(())
    }

    fn run_once(&mut self, sessions: &mut Sessions, recorded: bool) -> ort::Result<()> {
        let options = match recorded {
            true => &self.recorded,
            false => &self.unrecorded,
        };
        // This copies them to a device.
        self.before.bind_input(PIXELS, &self.pixels)?;
        sessions.before.run_binding(&self.before)?;
        sessions
            .model
            .run_binding_with_options(&self.model, options)?;
        sessions.behind.run_binding(&self.behind)?;
        Ok(())
    }
}
