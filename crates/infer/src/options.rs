use std::path::{Path, PathBuf};

use crate::{Capacity, Device, Devices, InferError, InferErrorKind, Precision};

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
    /// with batches padded to few sizes. Default: on GPUs.
    pub fused: Option<bool>,
    /// Images in the largest batch that there will be; TensorRT builds its engine for it.
    pub max_batch: usize,
    /// Whether a GPU records what it does with a batch and plays it again, by CUDA graphs. Of a model
    /// that cannot be recorded a warning says so.
    pub cuda_graphs: bool,
    /// In how many bits TensorRT computes.
    pub precision: Precision,
    /// Folder for what takes long to make: TensorRT's engines, and embeddings of labels.
    pub cache: Option<PathBuf>,
    /// Most bytes of a device's memory that a session may take: of the processor's for its weights, of
    /// a GPU's for its arena, which CUDA's libraries take memory beside.
    pub memory_limit: Option<usize>,
    /// The most that a row may ask of a fused model.
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
