use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use trommel_types::{Normalization, Shape};

use crate::backend::Backend;
use crate::classifier::{Classifier, Heads};
use crate::config::ModelConfig;
use crate::graph::Graph;
use crate::host::LoneSession;
use crate::onnx_file::OnnxFile;
use crate::sessions::{Opened, describe, open_session};
use crate::signature::{Embedding, Signature};
use crate::tensor_info::TensorInfo;
use crate::towers::{IMAGE_OUTPUTS, has_class_token, image_file, text_files};
use crate::version::{check_folder, version_of};
use crate::{
    Devices, InferError, InferErrorKind, LiveOptions, ModelInfo, ModelOptions, Runtime, Wanted,
};

/// A checked image classifier with everything needed to run it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Model {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) classifier: Arc<Classifier>,
    /// The reason for the activation.
    activation_from: String,
    /// Where the labels come from.
    labels_from: String,
    file: OnnxFile,
    inputs: Vec<TensorInfo>,
    outputs: Vec<TensorInfo>,
    /// The session used for the checks, until an engine takes it.
    session: Mutex<Option<Opened>>,
}

impl Model {
    /// Opens the model in the folder `dir` and checks that it is an image classifier, or has
    /// embeddings, for images of `shape`, normalised by `normalization`.
    ///
    /// The folder contains `model.onnx` (or `onnx/model.onnx`), `config.json` as written by Hugging
    /// Face or timm, and optionally `trommel.toml`, whose section `[model]` may set `file`,
    /// `activation` (`softmax`, `sigmoid`, `none`), `labels` (a list, or a file with one per line),
    /// `threshold` (a score), `thresholds` (scores by label) and `embedding` (the name of an
    /// output).
    ///
    /// Blocks while it reads the file twice, once to hash it.
    ///
    /// If a file is missing or malformed; if the model is not an image classifier, with what was
    /// expected and what was found; if it contradicts its labels or `shape`; if the device does not
    /// exist.
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
        let found = image_file(dir, &config);
        let (path, holds_both) = match (found, &config.unlabelled) {
            // A folder without any part of a model.
            (Err(_), Some(unlabelled)) if !dir.join("config.json").exists() => {
                return Err(unlabelled.clone());
            }
            (found, _) => found?,
        };
        let file = OnnxFile::read(&path)?;
        let texts = text_files(dir, &path, holds_both, &config);
        let graph = match (holds_both, config.labels.is_empty()) {
            (true, true) => {
                let output = config.embedding.as_deref().unwrap_or(IMAGE_OUTPUTS[0]);
                Graph::part(&path, &[output])?
            }
            _ => Graph::file(&path),
        };
        options.check_memory(dir, file.bytes)?;
        // TensorRT needs the model's input before there is a session to query.
        let is_gpu = options.devices.first().is_gpu();
        let described = match is_gpu {
            true => describe(runtime, &graph)?,
            false => open_session(runtime, &graph, options, 0, None, None)?,
        };
        let inputs: Vec<_> = described.inputs().iter().map(TensorInfo::of).collect();
        let outputs: Vec<_> = described.outputs().iter().map(TensorInfo::of).collect();
        let at_path = |error: InferError| {
            InferError::new(error.kind(), format_args!("{}: {error}", path.display()))
        };
        let signature =
            Signature::find(&inputs, &outputs, shape, config.labels.len()).map_err(at_path)?;
        let named = config.embedding.as_deref();
        let embedding = match config.labels.is_empty() {
            false => Embedding::find(&outputs, &signature.output, named),
            true => Embedding::find_alone(&outputs, named, has_class_token(dir)?),
        };
        let embedding = embedding.map_err(at_path);
        match (&embedding, &config.unlabelled) {
            // A model with neither labels nor embeddings most likely lacks labels.
            (Err(_), Some(unlabelled)) if named.is_none() => return Err(unlabelled.clone()),
            (Err(error), unlabelled) if options.capacity.embedding || unlabelled.is_some() => {
                return Err(error.clone());
            }
            _ => {}
        }
        let (activation, activation_from) = config.activation(file.ending(&signature.output));
        let classifier = Classifier {
            runtime: runtime.clone(),
            name: name_of(dir),
            version: version_of(dir, &file, &config.labels)?,
            graph,
            signature,
            embedding,
            unlabelled: config.unlabelled,
            texts,
            heads: Heads::default(),
            labels: config.labels,
            activation,
            thresholds: config.thresholds,
            normalization,
            shape,
            options: options.clone(),
        };
        let session = match is_gpu {
            true => classifier.open(0, None, true)?,
            false => Opened::unrecorded(described),
        };
        let inner = Inner {
            classifier: Arc::new(classifier),
            activation_from,
            labels_from: config.labels_from,
            file,
            inputs,
            outputs,
            session: Mutex::new(Some(session)),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The name of its folder.
    pub fn name(&self) -> &Arc<str> {
        &self.classifier().name
    }

    /// The first 12 hex digits of a SHA-256 over everything that affects its rows: the model's file
    /// with its external data, `config.json`, `preprocessor_config.json`, `processor_config.json`,
    /// `trommel.toml`, and the labels.
    pub fn version(&self) -> &Arc<str> {
        &self.classifier().version
    }

    /// The names of the classes, in the order of the model's output; empty for a model with
    /// embeddings only.
    pub fn labels(&self) -> &Arc<[Arc<str>]> {
        &self.classifier().labels
    }

    /// The shape of its images.
    pub fn shape(&self) -> Shape {
        self.classifier().shape
    }

    /// Its device.
    pub fn devices(&self) -> &Devices {
        &self.classifier().options.devices
    }

    /// Whether images are normalised and classes chosen in its graph.
    pub fn is_fused(&self) -> bool {
        self.classifier().options.is_fused()
    }

    /// Total size of its file and those next to it, in bytes.
    pub fn bytes(&self) -> u64 {
        self.inner.file.bytes
    }

    /// The fixed number of images per batch, if it has one.
    pub fn fixed_batch(&self) -> Option<usize> {
        self.classifier().fixed_batch()
    }

    /// Whether it supports rows as `wanted`; [`Engine::covers`](crate::Engine::covers) reports
    /// whether it was opened for them.
    ///
    /// # Errors
    /// [`Settings`](crate::InferErrorKind::Settings) if a threshold is for a label that the model
    /// lacks, or is not a score, or if a label is invalid;
    /// [`ModelConfig`](crate::InferErrorKind::ModelConfig) if it has no embeddings, or no text
    /// tower. Blocks while labels are embedded, once per set.
    pub fn check(&self, wanted: &Wanted) -> Result<(), InferError> {
        self.classifier().resolve(wanted).map(drop)
    }

    /// Whether it has no classes of its own, and accepts labels.
    pub fn needs_labels(&self) -> bool {
        let classifier = self.classifier();
        !classifier.has_classes() && classifier.texts.is_ok() && classifier.embedding.is_ok()
    }

    pub(crate) fn classifier(&self) -> &Arc<Classifier> {
        &self.inner.classifier
    }

    /// What all backends share for single images, if these may have more threads than a session.
    ///
    /// # Errors
    /// [`Settings`](crate::InferErrorKind::Settings) if the model is not run by sessions on the CPU
    /// alone.
    pub(crate) fn lone_session(
        &self,
        options: LiveOptions,
    ) -> Result<Option<Arc<LoneSession>>, InferError> {
        let (model, threads) = (self.classifier(), options.lone_threads);
        if threads <= model.options.intra_threads {
            return Ok(None);
        }
        if model.options.is_fused() {
            return Err(InferError::new(
                InferErrorKind::Settings,
                format_args!(
                    "model {}: {threads} threads for a single request are for models on the CPU that \
                     are not fused; set serve.lone-threads to 1",
                    model.name
                ),
            ));
        }
        let lone = LoneSession::new(threads, options.lone_min_time, self.bytes());
        Ok(Some(Arc::new(lone)))
    }

    /// The backend for batches of up to `max_batch` images as instance `number`. The first one uses
    /// the session that the model was opened with; all share `lone`.
    ///
    /// # Errors
    /// If a session cannot be opened.
    pub(crate) fn backend(
        &self,
        number: usize,
        max_batch: usize,
        lone: Option<Arc<LoneSession>>,
    ) -> Result<Box<dyn Backend>, InferError> {
        let session = &self.inner.session;
        let first = (number == 0)
            .then(|| {
                session
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take()
            })
            .flatten();
        self.classifier().backend(first, number, max_batch, lone)
    }

    /// Everything there is to tell about it.
    pub fn inspect(&self) -> ModelInfo {
        let Inner {
            activation_from,
            labels_from,
            file,
            inputs,
            outputs,
            ..
        } = &*self.inner;
        let Classifier {
            runtime,
            signature,
            labels,
            ..
        } = &**self.classifier();
        ModelInfo {
            name: self.name().to_string(),
            version: self.version().to_string(),
            sha256: file.hash.clone(),
            file: self.classifier().graph.path().to_owned(),
            external_data: file.external.iter().cloned().collect(),
            bytes: file.bytes,
            parameters: file.parameters(),
            precision: file.precision().to_owned(),
            ir_version: file.ir_version,
            opsets: file.opsets.iter().cloned().collect(),
            producer: file.producer.clone(),
            inputs: inputs.clone(),
            outputs: outputs.clone(),
            layout: signature.layout,
            fixed_batch: self.fixed_batch(),
            classes_output: signature.output.clone(),
            embedding_output: {
                let embedding = self.classifier().embedding.as_ref().ok();
                embedding.map(|embedding| embedding.output.clone())
            },
            text_tower: {
                let texts = self.classifier().texts.as_ref().ok();
                texts.map(|texts| texts.file.clone())
            },
            activation: self.classifier().activation,
            activation_from: activation_from.clone(),
            thresholds: self.classifier().thresholds.as_deref().map(<[f32]>::to_vec),
            labels: labels.len(),
            labels_from: labels_from.clone(),
            first_labels: labels.iter().take(5).map(ToString::to_string).collect(),
            devices: self.devices().clone(),
            onnxruntime: runtime.path().to_owned(),
        }
    }
}

pub(crate) fn name_of(dir: &Path) -> Arc<str> {
    let full = dir.canonicalize();
    let name = full.as_deref().unwrap_or(dir).file_name();
    name.map_or_else(
        || Arc::from("model"),
        |name| Arc::from(&*name.to_string_lossy()),
    )
}
