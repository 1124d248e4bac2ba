use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::{fs, io};

use ort::session::Session;
use sha2::{Digest, Sha256};
use trommel_types::{Normalization, Shape};

use crate::config::ModelConfig;
use crate::error::{is_device_lost, is_out_of_memory, reason};
use crate::onnx_file::{OnnxFile, hex};
use crate::scores::Scorer;
use crate::sessions::{Opened, describe, open_session};
use crate::signature::{Embedding, Signature};
use crate::tensor_info::TensorInfo;
use crate::{
    Activation, Device, Devices, InferError, InferErrorKind, ModelInfo, Precision, Runtime,
};

/// Places of the model's file in its folder, in the order of preference.
const FILES: [&str; 2] = ["model.onnx", "onnx/model.onnx"];

/// Files beside it that decide how images are prepared and what classes are called.
const SETTINGS: [&str; 3] = ["config.json", "preprocessor_config.json", "trommel.toml"];

/// Hex digits of the content hash that name a version.
pub(crate) const VERSION_DIGITS: usize = 12;

/// How a model is to be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelOptions {
    /// Where. A device that is not there is an error, never another device.
    pub devices: Devices,
    /// Threads inside one session, at least 1. They sleep between runs.
    pub intra_threads: usize,
    /// Whether the threads of each session stay on cores of their own.
    pub pin_threads: bool,
    /// Whether images are normalised and the best classes chosen by the device, in the model's graph,
    /// with batches padded to few sizes. If nothing is said, on GPUs.
    pub fused: Option<bool>,
    /// Images in the largest batch that there will be; TensorRT builds its engine for it.
    pub max_batch: usize,
    /// Whether a GPU records what it does with a batch and plays it again, by CUDA graphs. Of a model
    /// that cannot be recorded a warning says so.
    pub cuda_graphs: bool,
    /// In how many bits TensorRT computes.
    pub precision: Precision,
    /// Folder for TensorRT's engines, which take minutes to build.
    pub cache: Option<PathBuf>,
    /// Most bytes of a device's memory that a session may take: of the processor's for its weights, of
    /// a GPU's for its arena, which CUDA's libraries take memory beside.
    pub memory_limit: Option<usize>,
    /// Classes in an answer; all of them if the model has fewer.
    pub top_k: NonZeroU32,
    /// Whether answers hold the raw output too.
    pub logits: bool,
    /// Whether answers hold the image's embedding too; the model then has to have one.
    pub embedding: bool,
}

impl Default for ModelOptions {
    /// One thread on the CPU, the best class alone.
    fn default() -> Self {
        Self {
            devices: Device::Cpu.into(),
            intra_threads: 1,
            pin_threads: false,
            fused: None,
            max_batch: Device::Cpu.largest_batch(),
            cuda_graphs: true,
            precision: Precision::Model,
            cache: None,
            memory_limit: None,
            top_k: NonZeroU32::MIN,
            logits: false,
            embedding: false,
        }
    }
}

/// A checked image classifier with everything needed to run it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Model {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) runtime: Runtime,
    pub(crate) name: Arc<str>,
    pub(crate) version: Arc<str>,
    pub(crate) path: PathBuf,
    file: OnnxFile,
    inputs: Vec<TensorInfo>,
    outputs: Vec<TensorInfo>,
    /// The session that the checks were made with, until an engine takes it.
    pub(crate) session: Mutex<Option<Opened>>,
    pub(crate) signature: Signature,
    /// If it is asked for.
    pub(crate) embedding: Option<Embedding>,
    pub(crate) labels: Arc<[Arc<str>]>,
    pub(crate) activation: Activation,
    pub(crate) thresholds: Option<Arc<[f32]>>,
    pub(crate) normalization: Normalization,
    pub(crate) shape: Shape,
    pub(crate) options: ModelOptions,
}

impl Model {
    /// Opens the model in the folder `dir` and checks that it is an image classifier for images of
    /// `shape`, normalised by `normalization`.
    ///
    /// The folder holds `model.onnx` (or `onnx/model.onnx`), `config.json` as Hugging Face or timm
    /// write it, and optionally `trommel.toml`, whose section `[model]` may set `file`,
    /// `activation` (`softmax`, `sigmoid`, `none`), `labels` (a list, or a file with one a line),
    /// `threshold` (a score), `thresholds` (scores by label) and `embedding` (the name of an output).
    ///
    /// Blocks while it reads the file twice, once for its hash.
    ///
    /// # Errors
    /// When a file is missing or malformed; when the model is no image classifier, with what was
    /// expected and what was found; when it contradicts its labels or `shape`; when the device is
    /// not there.
    pub fn open(
        runtime: &Runtime,
        dir: &Path,
        normalization: Normalization,
        shape: Shape,
        options: &ModelOptions,
    ) -> Result<Self, InferError> {
        options.check()?;
        check_folder(dir)?;
        let config = ModelConfig::read(dir)?;
        let path = find_file(dir, config.file.as_deref())?;
        let file = OnnxFile::read(&path)?;
        options.check_memory(dir, file.bytes)?;
        // TensorRT wants to know the model's input before it has a session that could be asked.
        let is_gpu = options.devices.first().is_gpu();
        let described = match is_gpu {
            true => describe(runtime, &path)?,
            false => open_session(runtime, &path, options, 0, None, None)?,
        };
        let inputs: Vec<_> = described.inputs().iter().map(TensorInfo::of).collect();
        let outputs: Vec<_> = described.outputs().iter().map(TensorInfo::of).collect();
        let at_path = |error: InferError| {
            InferError::new(error.kind(), format_args!("{}: {error}", path.display()))
        };
        let signature =
            Signature::find(&inputs, &outputs, shape, config.labels.len()).map_err(at_path)?;
        let named = config.embedding.as_deref();
        let embedding = match options.embedding {
            true => Some(Embedding::find(&outputs, &signature.output, named).map_err(at_path)?),
            false => None,
        };
        let mut inner = Inner {
            runtime: runtime.clone(),
            name: name_of(dir),
            version: version_of(dir, &file, &config.labels)?,
            path,
            file,
            inputs,
            outputs,
            session: Mutex::new(None),
            signature,
            embedding,
            labels: config.labels,
            activation: config.activation,
            thresholds: config.thresholds,
            normalization,
            shape,
            options: options.clone(),
        };
        let session = match is_gpu {
            true => inner.open(0, None, true)?,
            false => Opened::unrecorded(described),
        };
        inner.session = Mutex::new(Some(session));
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The name of its folder.
    pub fn name(&self) -> &Arc<str> {
        &self.inner.name
    }

    /// The first 12 hex digits of a SHA-256 over all that decides its rows: the model's file with its
    /// external data, `config.json`, `preprocessor_config.json`, `trommel.toml`, and the labels.
    pub fn version(&self) -> &Arc<str> {
        &self.inner.version
    }

    /// The names of the classes, in the order of the model's output.
    pub fn labels(&self) -> &Arc<[Arc<str>]> {
        &self.inner.labels
    }

    /// The shape of the images that it takes.
    pub fn shape(&self) -> Shape {
        self.inner.shape
    }

    /// Where it runs.
    pub fn devices(&self) -> &Devices {
        &self.inner.options.devices
    }

    /// Whether images are normalised and classes chosen in its graph.
    pub fn is_fused(&self) -> bool {
        self.inner.options.is_fused()
    }

    /// Bytes of its file and of those beside it.
    pub fn bytes(&self) -> u64 {
        self.inner.file.bytes
    }

    /// The number of images that it always runs at once, if it runs no other.
    pub fn fixed_batch(&self) -> Option<usize> {
        self.inner.fixed_batch()
    }

    /// Everything there is to tell about it.
    pub fn inspect(&self) -> ModelInfo {
        let Inner {
            runtime,
            file,
            signature,
            labels,
            ..
        } = &*self.inner;
        ModelInfo {
            name: self.inner.name.to_string(),
            version: self.inner.version.to_string(),
            sha256: file.hash.clone(),
            file: self.inner.path.clone(),
            external_data: file.external.iter().cloned().collect(),
            bytes: file.bytes,
            parameters: file.parameters(),
            precision: file.precision().to_owned(),
            ir_version: file.ir_version,
            opsets: file.opsets.iter().cloned().collect(),
            producer: file.producer.clone(),
            inputs: self.inner.inputs.clone(),
            outputs: self.inner.outputs.clone(),
            layout: signature.layout,
            fixed_batch: self.fixed_batch(),
            classes_output: signature.output.clone(),
            activation: self.inner.activation,
            thresholds: self.inner.thresholds.as_deref().map(<[f32]>::to_vec),
            labels: labels.len(),
            first_labels: labels.iter().take(5).map(ToString::to_string).collect(),
            devices: self.inner.options.devices.clone(),
            onnxruntime: runtime.path().to_owned(),
        }
    }
}

impl ModelOptions {
    pub(crate) fn is_fused(&self) -> bool {
        self.fused.unwrap_or_else(|| self.devices.first().is_gpu())
    }

    /// # Errors
    /// Names the setting that cannot work, with its remedy.
    pub fn check(&self) -> Result<(), InferError> {
        let problem = if self.intra_threads == 0 {
            "a session without threads computes nothing; give at least 1 intra-op thread"
        } else if self.precision != Precision::Model
            && !matches!(self.devices.first(), Device::TensorRt(_))
        {
            "a precision can be chosen for tensorrt alone; for other devices export the model in it"
        } else if self.fused == Some(false) && self.devices.first().is_gpu() {
            "a GPU runs fused models alone; unset infer.fused"
        } else {
            return Ok(());
        };
        Err(InferError::new(InferErrorKind::Settings, problem))
    }

    /// Refuses a model whose weights alone take more memory than a session may.
    fn check_memory(&self, dir: &Path, bytes: u64) -> Result<(), InferError> {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        match self.memory_limit {
            Some(limit) if bytes > limit as u64 => Err(InferError::new(
                InferErrorKind::Settings,
                format_args!(
                    "model {} has weights of {} MiB, and a session may take {}: set \
                     infer.memory-budget higher or infer.instances lower",
                    dir.display(),
                    mib(bytes),
                    mib(limit as u64)
                ),
            )),
            _ => Ok(()),
        }
    }
}

impl Inner {
    pub(crate) fn scorer(&self) -> Scorer {
        Scorer::new(
            Arc::clone(&self.labels),
            self.activation,
            self.thresholds.clone(),
            self.options.top_k,
            self.options.logits,
        )
    }

    pub(crate) fn fixed_batch(&self) -> Option<usize> {
        self.signature.fixed_batch.map(Into::into)
    }

    /// The images that a run over `images` of them computes.
    pub(crate) fn computed(&self, images: usize) -> usize {
        self.signature.fixed_batch.map_or(images, Into::into)
    }

    /// The error for a run over `images` images that ONNX Runtime refused.
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

    /// Ends the profile of a session that was opened with one; gives its file.
    pub(crate) fn end_profiling(&self, session: &mut Session) -> Result<String, InferError> {
        let ended = session.end_profiling();
        ended.map_err(|error| self.failed(&reason(&error)))
    }

    /// The error for a run that came to nothing.
    pub(crate) fn failed(&self, why: &str) -> InferError {
        InferError::new(
            InferErrorKind::ModelFailed,
            format_args!("model {} failed: {why}", self.name),
        )
    }
}

/// The version of the model in the folder `dir`, as [`Model::version`] gives it, without opening
/// a session. Blocks while it reads the file twice.
///
/// # Errors
/// When a file is missing or malformed.
pub fn version(dir: &Path) -> Result<Arc<str>, InferError> {
    check_folder(dir)?;
    let config = ModelConfig::read(dir)?;
    let path = find_file(dir, config.file.as_deref())?;
    version_of(dir, &OnnxFile::read(&path)?, &config.labels)
}

fn version_of(dir: &Path, file: &OnnxFile, labels: &[Arc<str>]) -> Result<Arc<str>, InferError> {
    let mut hash = Sha256::new();
    // With its length before it, no text can pass for the next one's beginning.
    let mut add = |text: &[u8]| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    add(file.hash.as_bytes());
    for name in SETTINGS {
        let path = dir.join(name);
        match fs::read(&path) {
            Ok(text) => {
                add(name.as_bytes());
                add(&text);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(InferError::new(
                    InferErrorKind::ModelMissing,
                    format_args!("{} cannot be read: {error}", path.display()),
                ));
            }
        }
    }
    labels.iter().for_each(|label| add(label.as_bytes()));
    let mut digits = hex(&hash.finalize());
    digits.truncate(VERSION_DIGITS);
    Ok(digits.into())
}

fn check_folder(dir: &Path) -> Result<(), InferError> {
    let problem = match fs::metadata(dir) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => "is no folder; give the folder that holds model.onnx and config.json".to_owned(),
        Err(error) => format!("cannot be read: {error}"),
    };
    Err(InferError::new(
        InferErrorKind::ModelMissing,
        format_args!("model folder {} {problem}", dir.display()),
    ))
}

fn find_file(dir: &Path, configured: Option<&Path>) -> Result<PathBuf, InferError> {
    let candidates: Vec<PathBuf> = match configured {
        Some(file) => vec![dir.join(file)],
        None => FILES.iter().map(|file| dir.join(file)).collect(),
    };
    if let Some(path) = candidates.iter().find(|path| path.is_file()) {
        return Ok(path.clone());
    }
    let looked: Vec<_> = candidates
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let others = other_models(dir);
    let remedy = if others.is_empty() {
        "export the model to ONNX there".to_owned()
    } else {
        format!(
            "the folder holds {}: choose one with file = \"…\" in the section [model] of its \
             trommel.toml",
            others.join(", ")
        )
    };
    Err(InferError::new(
        InferErrorKind::ModelMissing,
        format_args!("there is no model file {}; {remedy}", looked.join(" or ")),
    ))
}

/// ONNX files under other names, as they come with several precisions of one model.
fn other_models(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = ["", "onnx"]
        .iter()
        .filter_map(|folder| fs::read_dir(dir.join(folder)).ok())
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "onnx")
        })
        .filter_map(|path| Some(path.strip_prefix(dir).ok()?.display().to_string()))
        .collect();
    names.sort();
    names
}

fn name_of(dir: &Path) -> Arc<str> {
    let full = dir.canonicalize();
    let name = full.as_deref().unwrap_or(dir).file_name();
    name.map_or_else(
        || Arc::from("model"),
        |name| Arc::from(&*name.to_string_lossy()),
    )
}
