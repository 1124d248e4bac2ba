use std::fmt;

use thiserror::Error;

/// Why a model could not be opened, or an image could not be classified.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct InferError {
    kind: InferErrorKind,
    message: String,
}

/// The kind of error, for code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InferErrorKind {
    /// ONNX Runtime's library is missing or does not load.
    Runtime,
    /// A setting is invalid, such as a batch of 0 images or a device called `gpu`.
    Settings,
    /// The device does not exist, or this build of ONNX Runtime does not support it.
    Device,
    /// The model's folder or one of its files is missing or cannot be read.
    ModelMissing,
    /// The model's configuration contradicts itself, the model, or the plan for its images.
    ModelConfig,
    /// The file is not a model that ONNX Runtime reads, or not an image classifier.
    NotClassifier,
    /// The pixels do not have the model's shape.
    Pixels,
    /// The model failed on this image, also when run alone.
    ModelFailed,
    /// The batch of the image exceeded its time limit.
    Timeout,
    /// No server of a prompt has answered for too long.
    Unreachable,
    /// The batch does not fit into the device's memory. A smaller one may.
    OutOfMemory,
    /// The device failed permanently.
    DeviceLost,
    /// The engine has stopped.
    EngineStopped,
}

impl InferError {
    pub(crate) fn new(kind: InferErrorKind, message: impl fmt::Display) -> Self {
        Self {
            kind,
            message: message.to_string(),
        }
    }

    /// The kind of error, for code.
    pub fn kind(&self) -> InferErrorKind {
        self.kind
    }

    /// Whether every later image would fail too, so that the process should end.
    pub fn is_fatal(&self) -> bool {
        matches!(
            self.kind,
            InferErrorKind::DeviceLost | InferErrorKind::EngineStopped
        )
    }
}

/// Whether ONNX Runtime reports that memory ran out. It has no code for that: these are the
/// messages of its allocators, of the C++ library and of CUDA.
pub(crate) fn is_out_of_memory(text: &str) -> bool {
    const WORDS: [&str; 6] = [
        "failed to allocate memory",
        "bad_alloc",
        "out of memory",
        "bad allocation",
        "alloc_failed",
        "allocation_failed",
    ];
    contains_any(text, &WORDS)
}

/// Whether ONNX Runtime reports that a GPU call failed for a reason other than memory. After most
/// CUDA errors every later call of the process fails too; there is no code for them either. Errors
/// of recording a graph, 900 to 908, only affect that graph.
pub(crate) fn is_device_lost(text: &str) -> bool {
    const WORDS: [&str; 4] = [
        "cuda failure",
        "cudnn failure",
        "cublas failure",
        "cuda error",
    ];
    let spoils_a_graph = (900..=908).any(|code| text.contains(&format!("failure {code}:")));
    !is_out_of_memory(text) && !spoils_a_graph && contains_any(text, &WORDS)
}

fn contains_any(text: &str, words: &[&str]) -> bool {
    let text = text.to_lowercase();
    words.iter().any(|words| text.contains(words))
}

/// The first line of ONNX Runtime's message, without its full stop, for use inside a sentence.
pub(crate) fn reason(error: &(impl fmt::Display + ?Sized)) -> String {
    let text = error.to_string();
    let line = text
        .lines()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("no reason given");
    line.trim().trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn want_of_memory_is_told_by_its_words() {
        for text in [
            "Non-zero status code returned while running Conv node: Failed to allocate memory for \
             requested buffer of size 12845056",
            "std::bad_alloc",
            "CUDA failure 2: out of memory ; GPU=0",
            "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0",
            "CUDNN failure 4003: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        ] {
            assert!(is_out_of_memory(text) && !is_device_lost(text), "{text}");
        }
        assert!(!is_out_of_memory(
            "CUDA failure 700: an illegal memory access"
        ));
    }

    #[test]
    fn a_lost_device_is_told_by_its_words() {
        for text in [
            "CUDA failure 700: an illegal memory access was encountered ; GPU=0",
            "Non-zero status code returned while running Conv node: CUDNN failure 4000: \
             CUDNN_STATUS_INTERNAL_ERROR",
            "CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED",
        ] {
            assert!(is_device_lost(text), "{text}");
        }
        for text in [
            "Non-zero status code returned while running Gather node",
            "CUDA failure 901: operation failed due to a previous error during capture ; GPU=0",
        ] {
            assert!(!is_device_lost(text), "{text}");
        }
    }
}
