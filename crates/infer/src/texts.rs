use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use trommel_types::{LabelSet, Shape};

use crate::config::ModelConfig;
use crate::text::TextTower;
use crate::towers::{TextFiles, image_file, text_files};
use crate::{Head, InferError, InferErrorKind, Runtime};

/// The tower for texts of a model with two, open on the processor: what makes classes of labels.
pub struct Texts {
    runtime: Runtime,
    files: TextFiles,
    shape: Shape,
    tower: Mutex<TextTower>,
}

impl Texts {
    /// Opens that of the model in the folder `dir`, whose images are of `shape`.
    ///
    /// # Errors
    /// What is missing or malformed, with its remedy.
    pub fn open(runtime: &Runtime, dir: &Path, shape: Shape) -> Result<Self, InferError> {
        let config = ModelConfig::read(dir)?;
        let (image, holds_both) = image_file(dir, &config)?;
        let files = text_files(dir, &image, holds_both, &config)?;
        Self::of(runtime, files, shape)
    }

    pub(crate) fn of(
        runtime: &Runtime,
        files: TextFiles,
        shape: Shape,
    ) -> Result<Self, InferError> {
        Ok(Self {
            tower: Mutex::new(TextTower::open(runtime, &files)?),
            runtime: runtime.clone(),
            files,
            shape,
        })
    }

    /// The embeddings of texts, `f32[texts, width]`, as the model gives them. Texts that are longer than
    /// it reads are cut. Blocks.
    ///
    /// # Errors
    /// When the model fails.
    pub fn embed(&self, texts: &[String]) -> Result<Vec<f32>, InferError> {
        match texts.is_empty() {
            true => Ok(Vec::new()),
            false => self.lock().embed(texts),
        }
    }

    /// What gives the classes of a set to embeddings of images. Blocks: for minutes with tens of thousands
    /// of labels.
    ///
    /// # Errors
    /// [`Settings`](InferErrorKind::Settings) when the set is wrong, with the label;
    /// [`ModelConfig`](InferErrorKind::ModelConfig) when nothing says how images and texts are compared.
    pub fn head(&self, set: &LabelSet) -> Result<Head, InferError> {
        if let Some(problem) = set.problem() {
            return Err(InferError::new(InferErrorKind::Settings, problem));
        }
        let mut tower = self.lock();
        let scaling = tower.scaling(&self.runtime, self.shape)?;
        let mut weights = tower.label_embeddings(set)?;
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

    fn lock(&self) -> std::sync::MutexGuard<'_, TextTower> {
        self.tower.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
