use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, io};

use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use sha2::{Digest, Sha256};
use trommel_types::{Normalization, Shape};

use crate::config::ModelConfig;
use crate::error::reason;
use crate::onnx_file::{OnnxFile, hex};
use crate::signature::{Embedding, Signature};
use crate::tensor_info::TensorInfo;
use crate::{Activation, Device, InferError, InferErrorKind, ModelInfo, Runtime};

/// Places of the model's file in its folder, in the order of preference.
const FILES: [&str; 2] = ["model.onnx", "onnx/model.onnx"];

/// Files beside it that decide how images are prepared and what classes are called.
const SETTINGS: [&str; 3] = ["config.json", "preprocessor_config.json", "trommel.toml"];

/// Hex digits of the content hash that name a version.
const VERSION_DIGITS: usize = 12;

/// How a model is to be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelOptions {
    /// Where. A device that is not there is an error, never another device.
    pub device: Device,
    /// Threads inside one session, at least 1. They sleep between runs.
    pub intra_threads: usize,
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
            device: Device::Cpu,
            intra_threads: 1,
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
    runtime: Runtime,
    name: Arc<str>,
    version: Arc<str>,
    path: PathBuf,
    file: OnnxFile,
    inputs: Vec<TensorInfo>,
    outputs: Vec<TensorInfo>,
    /// The session that the checks were made with, until an engine takes it.
    session: Mutex<Option<Session>>,
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
        if options.intra_threads == 0 {
            return Err(InferError::new(
                InferErrorKind::Settings,
                "a session without threads computes nothing; give at least 1 intra-op thread",
            ));
        }
        check_folder(dir)?;
        let config = ModelConfig::read(dir)?;
        let path = find_file(dir, config.file.as_deref())?;
        let file = OnnxFile::read(&path)?;
        let session = open_session(runtime, &path, options, None)?;
        let inputs: Vec<_> = session.inputs().iter().map(TensorInfo::of).collect();
        let outputs: Vec<_> = session.outputs().iter().map(TensorInfo::of).collect();
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
        Ok(Self {
            inner: Arc::new(Inner {
                runtime: runtime.clone(),
                name: name_of(dir),
                version: version_of(dir, &file, &config.labels)?,
                path,
                file,
                inputs,
                outputs,
                session: Mutex::new(Some(session)),
                signature,
                embedding,
                labels: config.labels,
                activation: config.activation,
                thresholds: config.thresholds,
                normalization,
                shape,
                options: options.clone(),
            }),
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
    pub fn device(&self) -> Device {
        self.inner.options.device
    }

    /// The number of images that it always runs at once, if it runs no other.
    pub fn fixed_batch(&self) -> Option<usize> {
        self.inner.signature.fixed_batch.map(Into::into)
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
            device: self.inner.options.device,
            onnxruntime: runtime.path().to_owned(),
        }
    }
}

impl Inner {
    /// A session of its own for one more instance; the first is the one that is open already.
    pub(crate) fn session(&self) -> Result<Session, InferError> {
        let open = self
            .session
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match open {
            Some(session) => Ok(session),
            None => open_session(&self.runtime, &self.path, &self.options, None),
        }
    }

    /// A session whose runs are profiled into files that begin with this path.
    pub(crate) fn profiled_session(&self, prefix: &Path) -> Result<Session, InferError> {
        open_session(&self.runtime, &self.path, &self.options, Some(prefix))
    }

    /// The images that a run over `images` of them computes.
    pub(crate) fn computed(&self, images: usize) -> usize {
        self.signature.fixed_batch.map_or(images, Into::into)
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

fn open_session(
    runtime: &Runtime,
    path: &Path,
    options: &ModelOptions,
    profile: Option<&Path>,
) -> Result<Session, InferError> {
    let refused = |error: &dyn std::fmt::Display| {
        InferError::new(
            InferErrorKind::NotClassifier,
            format_args!(
                "ONNX Runtime cannot open {}: {}",
                path.display(),
                reason(error)
            ),
        )
    };
    let configure = || -> Result<SessionBuilder, ort::Error> {
        let builder = Session::builder(runtime.environment())?
            .with_optimization_level(GraphOptimizationLevel::All)?
            .with_parallel_execution(false)?
            .with_intra_threads(options.intra_threads)?
            // Threads that spin between batches would take the cores from decoding.
            .with_intra_op_spinning(false)?;
        match profile {
            Some(prefix) => Ok(builder.with_profiling(prefix)?),
            None => Ok(builder),
        }
    };
    let builder = configure().map_err(|error| refused(&error))?;
    let mut builder = options.device.apply(builder)?;
    builder
        .commit_from_file(path)
        .map_err(|error| match error.code() {
            ort::ErrorCode::ExecutionProviderFailure => options.device.unavailable(&error),
            _ => refused(&error),
        })
}
