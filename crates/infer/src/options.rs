use std::path::{Path, PathBuf};

use crate::{Capacity, Device, Devices, InferError, InferErrorKind, Precision};

/// How to run a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelOptions {
    /// The device. A missing device is an error, never replaced by another.
    pub devices: Devices,
    /// Threads inside one session, at least 1. They sleep between runs.
    pub intra_threads: usize,
    /// Whether to pin the threads of each session to their own cores.
    pub pin_threads: bool,
    /// Whether images are normalised and the best classes chosen on the device, in the model's
    /// graph, with batches padded to few sizes. Default: on GPUs.
    pub fused: Option<bool>,
    /// Largest possible batch; TensorRT builds its engine for it.
    pub max_batch: usize,
    /// Whether a GPU records and replays the work of a batch, with CUDA graphs. For a model that
    /// cannot be recorded there is a warning.
    pub cuda_graphs: bool,
    /// The precision of TensorRT.
    pub precision: Precision,
    /// Folder for cached results: TensorRT's engines, and embeddings of labels.
    pub cache: Option<PathBuf>,
    /// Memory limit of a session on its device in bytes: on the CPU for its weights, on a GPU for
    /// its arena; CUDA's libraries need additional memory.
    pub memory_limit: Option<usize>,
    /// The maximum row options of a fused model.
    pub capacity: Capacity,
}

impl Default for ModelOptions {
    /// One thread on the CPU.
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
            capacity: Capacity::default(),
        }
    }
}

impl ModelOptions {
    pub(crate) fn is_fused(&self) -> bool {
        self.fused.unwrap_or_else(|| self.devices.first().is_gpu())
    }

    /// # Errors
    /// Names the invalid setting, with its remedy.
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

    /// Refuses a model whose weights alone exceed the memory limit of a session.
    pub(crate) fn check_memory(&self, dir: &Path, bytes: u64) -> Result<(), InferError> {
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
