use std::path::PathBuf;

use thiserror::Error;
use trommel_types::ErrorKind;

/// Why a model directory has no valid [`Plan`](crate::Plan).
#[derive(Debug, Error)]
pub enum ConfigError {
    /// No file describes how to prepare images.
    #[error(
        "{dir} has no preprocessor_config.json, no image_processor in processor_config.json, no pretrained_cfg in config.json and no [preprocess] in trommel.toml; export the model with its image processor, or write trommel.toml"
    )]
    Missing {
        /// The model directory.
        dir: PathBuf,
    },
    /// A file exists but cannot be read.
    #[error("failed to read {path}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// A file is not valid JSON or TOML.
    #[error("{path} is malformed: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The parser's error.
        reason: String,
    },
    /// A file requires something unsupported.
    #[error(
        "{path}: `{key}` is {found}, which is not followed: {why}; write what the processor does into [preprocess] of trommel.toml next to it (resize or shortest-edge, crop, resample, mean, std), and compare with `trommel model verify`"
    )]
    NotFollowed {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value, or `missing`.
        found: String,
        /// What is supported, or what is not.
        why: String,
    },
    /// The family of a prompt's model is unknown.
    #[error(
        "{path}: `prompt.family` is {found:?}, whose formula for the tokens of an image is not known here; known are {known}; set max-pixels instead of family and image-tokens"
    )]
    UnknownFamily {
        /// The file.
        path: PathBuf,
        /// Its name.
        found: String,
        /// The known names.
        known: String,
    },
    /// Fewer tokens per image than the family can make.
    #[error(
        "{path}: `prompt.image-tokens` is {tokens}, but models of family {family} make at least {fewest} of any image; raise it"
    )]
    FewTokens {
        /// The file.
        path: PathBuf,
        /// The number.
        tokens: u32,
        /// The family.
        family: String,
        /// The minimum.
        fewest: u32,
    },
    /// A key has an invalid value.
    #[error("{path}: `{key}` is {found}, expected {expected}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value, or `missing`.
        found: String,
        /// The valid values.
        expected: &'static str,
    },
}

/// Why an image has no tensor.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct PrepareError {
    kind: ErrorKind,
    message: String,
}

impl PrepareError {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }

    /// The value of the row's `error_kind`.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}
