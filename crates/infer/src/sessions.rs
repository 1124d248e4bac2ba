//! Opens a model's sessions: unchanged on the CPU, between two small graphs on a device.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use sha2::{Digest, Sha256};

use crate::backend::Backend;
use crate::bound::{BoundBackend, RECORDING, Sessions};
use crate::classifier::Classifier;
use crate::device::GpuOptions;
use crate::error::{is_device_lost, is_out_of_memory, reason};
use crate::graph::Graph;
use crate::host::{HostBackend, LoneSession};
use crate::metrics::gpu_name;
use crate::onnx_file::hex;
use crate::signature::{Layout, OutputType};
use crate::version::VERSION_DIGITS;
use crate::{Device, InferError, InferErrorKind, ModelOptions, Runtime, affinity, ends};

impl ModelOptions {
    /// Opens a minimal session on each device, to detect a device that does not exist, or that this
    /// build of ONNX Runtime does not support, before there is a model for it.
    ///
    /// Blocks: for seconds on a GPU.
    ///
    /// # Errors
    /// [`Device`](InferErrorKind::Device) with ONNX Runtime's reason.
    pub fn check_devices(&self, runtime: &Runtime) -> Result<(), InferError> {
        for number in 0..self.devices.len() {
            let device = self.devices.of(number);
            let session = || -> Result<Session, InferError> {
                let failed = |error: ort::Error| device.unavailable(&error);
                let builder = || configure(runtime, self, number, None).map_err(failed);
                device.apply(builder()?, None)?;
                // TensorRT would build an engine first.
                let builder = device.without_engines().apply(builder()?, None)?;
                let graph = ends::behind(Some(OutputType::F32), None, None).map_err(failed)?;
                graph.into_session(&builder).map_err(failed)
            };
            drop(session()?);
        }
        Ok(())
    }
}

/// A session of an unchanged model.
#[derive(Debug)]
pub(crate) struct Opened {
    session: Session,
    /// Whether a GPU records its work.
    graphs: bool,
}

impl Opened {
    pub(crate) fn unrecorded(session: Session) -> Self {
        Self {
            session,
            graphs: false,
        }
    }
}

impl Classifier {
    /// The backend for batches of up to `max_batch` images as instance `number`, on the next device
    /// in turn, with the session `opened` if given, and `lone` for single images.
    ///
    /// # Errors
    /// If a session cannot be opened.
    pub(crate) fn backend(
        self: &Arc<Self>,
        opened: Option<Opened>,
        number: usize,
        max_batch: usize,
        lone: Option<Arc<LoneSession>>,
    ) -> Result<Box<dyn Backend>, InferError> {
        let opened = opened.map_or_else(|| self.open(number, None, true), Ok)?;
        let model = Arc::clone(self);
        Ok(match self.options.is_fused() {
            true => {
                let sessions = self.surrounded(opened, number)?;
                let reopen = {
                    let model = Arc::clone(self);
                    move || model.surrounded(model.open(number, None, false)?, number)
                };
                let reopen = Box::new(reopen);
                Box::new(BoundBackend::new(
                    model, sessions, reopen, number, max_batch,
                )?)
            }
            false => Box::new(HostBackend::new(model, opened.session, lone)?),
        })
    }

    /// A backend for profiling single runs, so that a GPU does not record them; profiles are
    /// written to files with the prefix `profile`, if given.
    ///
    /// # Errors
    /// If a session cannot be opened.
    pub(crate) fn measured_backend(
        self: &Arc<Self>,
        number: usize,
        max_batch: usize,
        profile: Option<&Path>,
    ) -> Result<Box<dyn Backend>, InferError> {
        let opened = self.open(number, profile, false)?;
        self.backend(Some(opened), number, max_batch, None)
    }

    /// A session on the CPU of this many threads, for single images.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn open_lone(&self, threads: usize) -> Result<Session, InferError> {
        let refused = |error: ort::Error| refused(self.graph.path(), Device::Cpu, &error);
        // Waking a thread takes longer than most of the model's nodes, so they spin during a run.
        let builder = with_threads(&self.runtime, threads, true)
            .and_then(|it| Ok(it.with_config_entry("session.force_spinning_stop", "1")?))
            .map_err(refused)?;
        self.graph.commit(builder).map_err(refused)
    }

    /// A session of the model, as instance `number`; a GPU records its work if `graphs` are
    /// requested, configured and possible.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn open(
        &self,
        number: usize,
        profile: Option<&Path>,
        graphs: bool,
    ) -> Result<Opened, InferError> {
        let device = self.options.devices.of(number);
        let graphs = graphs && self.options.cuda_graphs && matches!(device, Device::Cuda(_));
        let open = |graphs| {
            let gpu = match device.is_gpu() {
                true => Some(self.gpu_options(device, graphs)?),
                false => None,
            };
            let _beside = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
            let (runtime, graph, options) = (&self.runtime, &self.graph, &self.options);
            let work = || open_session(runtime, graph, options, number, gpu.as_ref(), profile);
            let session = patiently(&self.name, device, work)?;
            Ok::<_, InferError>(Opened { session, graphs })
        };
        match open(graphs) {
            // ONNX Runtime has no code for that, but always this message.
            Err(error) if graphs && error.to_string().contains("graph capture") => {
                tracing::warn!("going on without CUDA graphs: {error}");
                open(false)
            }
            opened => opened,
        }
    }

    /// The model's session between those of the surrounding graphs.
    fn surrounded(&self, model: Opened, number: usize) -> Result<Sessions, InferError> {
        let device = self.options.devices.of(number).without_engines();
        let gpu = match device.is_gpu() {
            true => Some(self.gpu_options(device, false)?),
            false => None,
        };
        let open = |graph: ort::Result<ort::editor::Model>| {
            let _beside = RECORDING.read().unwrap_or_else(PoisonError::into_inner);
            let builder = configure(&self.runtime, &self.options, number, None);
            let builder = builder.map_err(|error| self.failed(&reason(&error)))?;
            let builder = device.apply(builder, gpu.as_ref())?;
            let session = graph.and_then(|graph| graph.into_session(&builder));
            session.map_err(|error| refused(self.graph.path(), device, &error))
        };
        let embedding = self.bound_embedding();
        Ok(Sessions {
            before: open(ends::before(&self.signature, &self.normalization))?,
            model: model.session,
            behind: open(ends::behind(
                self.has_classes().then_some(self.signature.output_type),
                self.best_on_device(),
                embedding.map(|embedding| embedding.output_type),
            ))?,
            graphs: model.graphs,
        })
    }

    fn gpu_options(&self, device: Device, graphs: bool) -> Result<GpuOptions, InferError> {
        let options = &self.options;
        let (height, width) = (self.shape.height as usize, self.shape.width as usize);
        Ok(GpuOptions {
            graphs,
            memory_limit: options.memory_limit,
            precision: options.precision,
            cache: self.engine_cache(device)?,
            input: self.signature.input.clone(),
            image: match self.signature.layout {
                Layout::Nchw => [3, height, width],
                Layout::Nhwc => [height, width, 3],
            },
            batches: self
                .fixed_batch()
                .map_or((1, options.max_batch), |fixed| (fixed, fixed)),
        })
    }

    /// The folder for TensorRT's engines of this model on such a device, created if necessary.
    fn engine_cache(&self, device: Device) -> Result<Option<PathBuf>, InferError> {
        let (Device::TensorRt(number), Some(cache)) = (device, &self.options.cache) else {
            return Ok(None);
        };
        let ModelOptions {
            precision,
            max_batch,
            ..
        } = &self.options;
        let gpu = gpu_name(number).unwrap_or_else(|| "gpu".to_owned());
        let mut built_by = hex(&Sha256::digest(self.runtime.build()));
        built_by.truncate(VERSION_DIGITS);
        let key = format!(
            "{} {gpu} {precision:?} {max_batch} {built_by}",
            self.version
        );
        let allowed = |c: char| {
            if c.is_ascii_alphanumeric() || c == '.' {
                c
            } else {
                '-'
            }
        };
        let folder = cache
            .join("tensorrt")
            .join(key.chars().map(allowed).collect::<String>());
        match fs::create_dir_all(&folder) {
            Ok(()) => Ok(Some(folder)),
            Err(error) => Err(InferError::new(
                InferErrorKind::Settings,
                format_args!(
                    "cannot make {}, where TensorRT's engines would be kept: {error}; set \
                     infer.cache to a folder that can be written",
                    folder.display()
                ),
            )),
        }
    }
}

/// A session used only for its inputs and outputs.
pub(crate) fn describe(runtime: &Runtime, graph: &Graph) -> Result<Session, InferError> {
    let open = || {
        let builder = Session::builder(runtime.environment())?
            .with_optimization_level(GraphOptimizationLevel::Disable)?
            .with_intra_threads(1)?;
        graph.commit(builder)
    };
    open().map_err(|error| refused(graph.path(), Device::Cpu, &error))
}

/// A session of the model, as instance `number`.
pub(crate) fn open_session(
    runtime: &Runtime,
    graph: &Graph,
    options: &ModelOptions,
    number: usize,
    gpu: Option<&GpuOptions>,
    profile: Option<&Path>,
) -> Result<Session, InferError> {
    let device = options.devices.of(number);
    let refused = |error: ort::Error| refused(graph.path(), device, &error);
    let builder = configure(runtime, options, number, profile).map_err(refused)?;
    let builder = device.apply(builder, gpu)?;
    graph.commit(builder).map_err(refused)
}

fn configure(
    runtime: &Runtime,
    options: &ModelOptions,
    number: usize,
    profile: Option<&Path>,
) -> ort::Result<SessionBuilder> {
    // Threads that spin between batches would take the cores from decoding.
    let mut builder = with_threads(runtime, options.intra_threads, false)?;
    if options.pin_threads
        && let Some(cores) = affinity::of_inner_threads(number, options.intra_threads)
    {
        builder = builder.with_config_entry("session.intra_op_thread_affinities", cores)?;
    }
    match profile {
        Some(prefix) => Ok(builder.with_profiling(prefix)?),
        None => Ok(builder),
    }
}

/// A session on this many threads, which `spin` while they wait for work.
fn with_threads(runtime: &Runtime, threads: usize, spin: bool) -> ort::Result<SessionBuilder> {
    Ok(Session::builder(runtime.environment())?
        .with_optimization_level(GraphOptimizationLevel::All)?
        .with_parallel_execution(false)?
        .with_intra_threads(threads)?
        .with_intra_op_spinning(spin)?)
}

fn refused(path: &Path, device: Device, error: &ort::Error) -> InferError {
    let text = error.to_string();
    let kind = if is_out_of_memory(&text) {
        InferErrorKind::OutOfMemory
    } else if error.code() == ort::ErrorCode::ExecutionProviderFailure || is_device_lost(&text) {
        InferErrorKind::Device
    } else {
        InferErrorKind::NotClassifier
    };
    InferError::new(
        kind,
        format_args!(
            "ONNX Runtime cannot open {} on {device}: {}",
            path.display(),
            reason(error)
        ),
    )
}

/// Logs regularly that it is still working, as building an engine can take minutes.
fn patiently<T>(model: &str, device: Device, work: impl FnOnce() -> T) -> T {
    const WHILE: Duration = Duration::from_secs(10);
    let (done, is_done) = sync_channel::<()>(0);
    thread::scope(|scope| {
        scope.spawn(move || {
            let start = Instant::now();
            while is_done.recv_timeout(WHILE) == Err(RecvTimeoutError::Timeout) {
                let seconds = start.elapsed().as_secs();
                tracing::info!(model, %device, seconds, "still loading the model");
            }
        });
        let result = work();
        drop(done);
        result
    })
}
