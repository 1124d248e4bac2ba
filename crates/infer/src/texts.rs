use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use sha2::{Digest, Sha256};
use trommel_types::{LabelSet, Shape};

use crate::config::ModelConfig;
use crate::kept_labels::{KeptLabels, LabelEmbeddings};
use crate::onnx_file::{OnnxFile, hex};
use crate::text::TextTower;
use crate::towers::{TextFiles, image_file, text_files};
use crate::version::digest;
use crate::{Head, InferError, InferErrorKind, Runtime};

/// The text tower of a model, on the CPU, which turns labels into classes. It is opened when it is
/// first needed.
pub struct Texts {
    runtime: Runtime,
    files: TextFiles,
    shape: Shape,
    /// Where embeddings of labels are cached, if they are.
    cache: Option<PathBuf>,
    tower: Mutex<Option<TextTower>>,
}

impl Texts {
    /// The text tower of the model in the folder `dir`, whose images have `shape`. Embeddings of
    /// labels are cached in the folder `cache`, for the same tower, tokenizer, labels and
    /// templates.
    ///
    /// # Errors
    /// What is missing or malformed, with its remedy.
    pub fn open(
        runtime: &Runtime,
        dir: &Path,
        shape: Shape,
        cache: Option<&Path>,
    ) -> Result<Self, InferError> {
        let config = ModelConfig::read(dir)?;
        let (image, holds_both) = image_file(dir, &config)?;
        let files = text_files(dir, &image, holds_both, &config)?;
        Ok(Self::of(runtime, files, shape, cache))
    }

    pub(crate) fn of(
        runtime: &Runtime,
        files: TextFiles,
        shape: Shape,
        cache: Option<&Path>,
    ) -> Self {
        Self {
            runtime: runtime.clone(),
            files,
            shape,
            cache: cache.map(Into::into),
            tower: Mutex::default(),
        }
    }

    /// The embeddings of texts, `f32[texts, width]`, as output by the model. Too long texts are
    /// truncated. Blocks.
    ///
    /// # Errors
    /// If the model fails.
    pub fn embed(&self, texts: &[String]) -> Result<Vec<f32>, InferError> {
        match texts.is_empty() {
            true => Ok(Vec::new()),
            false => self.with_tower(|tower| tower.embed(texts)),
        }
    }

    /// The head of a label set, for embeddings of images. Blocks: for minutes with tens of
    /// thousands of labels.
    ///
    /// # Errors
    /// [`Settings`](InferErrorKind::Settings) if the set is invalid, with the label;
    /// [`ModelConfig`](InferErrorKind::ModelConfig) if it is unknown how images and texts are
    /// compared.
    pub fn head(&self, set: &LabelSet) -> Result<Head, InferError> {
        if let Some(problem) = set.problem() {
            return Err(InferError::new(InferErrorKind::Settings, problem));
        }
        let LabelEmbeddings {
            scaling,
            vectors: mut weights,
        } = self.label_embeddings(set)?;
        weights
            .iter_mut()
            .for_each(|weight| *weight *= scaling.scale);
        let labels = set.names.iter().map(|label| Arc::from(label.as_str()));
        let width = weights.len() / set.names.len();
        let bias = vec![scaling.bias; set.names.len()];
        Head::new(
            labels.collect(),
            width,
            weights,
            bias,
            true,
            self.files.activation,
        )
    }

    /// The embeddings of a set's labels, from the cache if possible.
    fn label_embeddings(&self, set: &LabelSet) -> Result<LabelEmbeddings, InferError> {
        let Some(cache) = &self.cache else {
            return self.compute(set);
        };
        let kept = KeptLabels::new(cache, &self.key(set)?);
        if let Some(found) = kept.recall(set.names.len()) {
            return Ok(found);
        }
        let computed = self.compute(set)?;
        kept.keep(&computed);
        Ok(computed)
    }

    fn compute(&self, set: &LabelSet) -> Result<LabelEmbeddings, InferError> {
        tracing::info!(
            labels = set.names.len(),
            templates = set.templates().len(),
            tower = %self.files.file.display(),
            "computing the embeddings of labels"
        );
        self.with_tower(|tower| {
            Ok(LabelEmbeddings {
                scaling: tower.scaling(&self.runtime, self.shape)?,
                vectors: tower.label_embeddings(set)?,
            })
        })
    }

    /// A hash of everything that the embeddings of a set depend on.
    fn key(&self, set: &LabelSet) -> Result<String, InferError> {
        let files = &self.files;
        let mut hash = Sha256::new();
        // Preceded by its length, no text can be confused with the beginning of the next one.
        let mut add = |text: &[u8]| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        add(env!("CARGO_PKG_VERSION").as_bytes());
        add(self.runtime.build().as_bytes());
        add(OnnxFile::read(&files.file)?.hash.as_bytes());
        add(&digest(&files.tokenizer)?);
        let use_of_tower = (files.is_shared, files.max_length, files.fills_up);
        let filler_and_scaling = (&files.filler, files.scaling);
        add(format!("{use_of_tower:?} {filler_and_scaling:?}").as_bytes());
        // If the files have no scale, it is measured, with images of this shape.
        if let (None, Some(both)) = (files.scaling, &files.both) {
            add(OnnxFile::read(both)?.hash.as_bytes());
            add(format!("{:?}", self.shape).as_bytes());
        }
        let templates = set.templates();
        add(&(templates.len() as u64).to_le_bytes());
        templates
            .iter()
            .for_each(|template| add(template.as_bytes()));
        set.names.iter().for_each(|name| add(name.as_bytes()));
        Ok(hex(&hash.finalize()))
    }

    fn with_tower<T>(
        &self,
        work: impl FnOnce(&mut TextTower) -> Result<T, InferError>,
    ) -> Result<T, InferError> {
        let mut tower = self.tower.lock().unwrap_or_else(PoisonError::into_inner);
        let tower = match &mut *tower {
            Some(tower) => tower,
            closed => closed.insert(TextTower::open(&self.runtime, &self.files)?),
        };
        work(tower)
    }
}
