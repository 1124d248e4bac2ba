//! Files of classifiers learned by `trommel fit`, with the model that they are for.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use trommel_infer::{Activation, Head};

const VERSION: u32 = 1;

/// The contents of a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeadFile {
    version: u32,
    /// The model of the embeddings.
    pub(super) model: String,
    pub(super) model_version: String,
    labels: Vec<String>,
    /// Length of an embedding.
    width: usize,
    /// Whether embeddings are scaled to length 1 first.
    normalize: bool,
    activation: Activation,
    /// `f32[labels, width]`, little-endian, in base64.
    weights: String,
    /// `f32[labels]`.
    bias: Vec<f32>,
}

impl HeadFile {
    pub(super) fn new(head: &Head, model: &str, model_version: &str) -> Self {
        let bytes = head.weights().iter().flat_map(|value| value.to_le_bytes());
        Self {
            version: VERSION,
            model: model.to_owned(),
            model_version: model_version.to_owned(),
            labels: head.labels().iter().map(ToString::to_string).collect(),
            width: head.width(),
            normalize: head.normalizes(),
            activation: head.activation(),
            weights: STANDARD.encode(bytes.collect::<Vec<u8>>()),
            bias: head.bias().to_vec(),
        }
    }

    /// # Errors
    /// If the file cannot be read, or is malformed.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read(path).with_context(|| format!("failed to read {}", path.display()))?;
        let file: Self = serde_json::from_slice(&text)
            .with_context(|| format!("{} was not written by trommel fit", path.display()))?;
        if file.version != VERSION {
            bail!(
                "{} has version {}, but this trommel reads version {VERSION}; upgrade trommel",
                path.display(),
                file.version
            );
        }
        Ok(file)
    }

    /// Writes the file atomically.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        let failed = || format!("failed to write {}", path.display());
        let folder = path
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))
            .with_context(failed)?;
        serde_json::to_writer_pretty(&mut file, self).with_context(failed)?;
        file.persist(path).with_context(failed)?;
        Ok(())
    }

    /// # Errors
    /// If its values do not fit together.
    pub(super) fn head(&self) -> Result<Head> {
        let bytes = STANDARD
            .decode(&self.weights)
            .context("its weights are not base64")?;
        let (values, rest) = bytes.as_chunks::<4>();
        if !rest.is_empty() {
            bail!("its weights are cut off");
        }
        let weights = values
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        let labels: Arc<[Arc<str>]> = self
            .labels
            .iter()
            .map(|label| Arc::from(label.as_str()))
            .collect();
        let (width, bias) = (self.width, self.bias.clone());
        Ok(Head::new(
            labels,
            width,
            weights,
            bias,
            self.normalize,
            self.activation,
        )?)
    }
}
