use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort::session::Session;
use ort::session::builder::SessionBuilder;

use crate::onnx_part::part;
use crate::{InferError, InferErrorKind};

/// The source of sessions: a file, or the part of one that computes some of its outputs.
#[derive(Debug, Clone)]
pub(crate) struct Graph {
    path: PathBuf,
    part: Option<Arc<[u8]>>,
}

impl Graph {
    /// A whole file.
    pub(crate) fn file(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            part: None,
        }
    }

    /// Only what some outputs of a file need, including only their inputs.
    ///
    /// # Errors
    /// If the file cannot be read, or lacks one of the outputs.
    pub(crate) fn part(path: &Path, outputs: &[&str]) -> Result<Self, InferError> {
        let failed = |why: &dyn std::fmt::Display| {
            let message = format_args!("{}: {why}", path.display());
            InferError::new(InferErrorKind::ModelConfig, message)
        };
        let whole = std::fs::read(path).map_err(|error| failed(&error))?;
        let part = part(&whole, outputs).map_err(|why| failed(&why))?;
        Ok(Self {
            path: path.to_owned(),
            part: Some(part.into()),
        })
    }

    /// The file, even for a part.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a session.
    pub(crate) fn commit(&self, mut builder: SessionBuilder) -> ort::Result<Session> {
        let Some(part) = &self.part else {
            return builder.commit_from_file(&self.path);
        };
        // External weights are next to the file, not in the current folder.
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let folder = folder.display().to_string();
        let mut builder = builder.with_config_entry(
            "session.model_external_initializers_file_folder_path",
            folder,
        )?;
        builder.commit_from_memory(part)
    }
}
