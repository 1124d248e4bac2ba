//! How models are run.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trommel_infer::{Capacity, Device, Devices, InferError, ModelOptions, Precision};

use super::{MIB, cores};

/// Longest wait for a batch to fill.
const MAX_WAIT: Duration = Duration::from_millis(20);
/// Sessions on a GPU.
const ON_A_GPU: usize = 2;

/// Running the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct InferConfig {
    /// Where the model runs: `cpu`, `cuda:N` or `tensorrt:N`, or several GPUs as in
    /// `cuda:0,cuda:1`. A missing device is an error at start. Default: `cpu`.
    pub device: String,
    /// Sessions running in parallel on each device, each with a copy of the model. Default: on a
    /// CPU one per core, at most 4; on a GPU 2, one of which copies while the other computes.
    pub instances: Option<NonZeroUsize>,
    /// Threads inside one session. Default: the cores divided by the instances; for a GPU 1.
    pub intra_threads: Option<NonZeroUsize>,
    /// Whether to pin the threads of each session to separate cores. Default: no.
    pub pin_threads: bool,
    /// Whether to normalise images and select the best classes in the model's graph, on its device.
    /// Default: on GPUs.
    pub fused: Option<bool>,
    /// Whether to record and replay the work of a batch on a GPU with CUDA graphs. Default: yes,
    /// with a warning for a model that cannot be recorded.
    pub cuda_graphs: bool,
    /// Precision that TensorRT computes in: `model` (as the model says), `fp16` or `int8`. Default:
    /// `model`.
    pub precision: Precision,
    /// Memory limit in MiB for the sessions of one model on a device: the processor's for their
    /// weights, a GPU's for their arenas. Default: as much as there is.
    pub memory_budget: Option<NonZeroUsize>,
    /// Images in a full batch. Default: the fastest number, which is measured when a model is
    /// first loaded on a machine.
    pub max_batch: Option<NonZeroUsize>,
    /// Folder for measurements and other results that are computed once. Default: `trommel` in the
    /// user's cache folder.
    pub cache: Option<PathBuf>,
    /// Longest time an image waits for its batch to fill. A batch keeps filling while no session is
    /// free. Default: `20ms`.
    #[serde(with = "humantime_serde")]
    pub max_wait: Option<Duration>,
    /// Whether to use the settings that `trommel tune` found for a model on this kind of machine,
    /// where none are configured. Default: yes.
    pub profiles: bool,
    /// Models that one process over the broker keeps loaded. Default: 4.
    pub max_models: NonZeroUsize,
    /// Models that a process over the broker loads before it is ready; the others are loaded when a
    /// job names them. Default: none.
    pub preload: Vec<String>,
}

/// One batch in each instance, one formed ahead for each, one forming.
pub(super) fn images_in_flight(max_batch: usize, instances: usize) -> usize {
    max_batch * (2 * instances + 1)
}

impl Default for InferConfig {
    fn default() -> Self {
        Self {
            device: "cpu".to_owned(),
            instances: None,
            intra_threads: None,
            pin_threads: false,
            fused: None,
            cuda_graphs: true,
            precision: Precision::Model,
            memory_budget: None,
            max_batch: None,
            cache: None,
            max_wait: None,
            profiles: true,
            max_models: NonZeroUsize::new(4).expect("4 is not 0"),
            preload: Vec::new(),
        }
    }
}

impl InferConfig {
    /// How to open models for rows that need no more than `capacity`.
    ///
    /// # Errors
    /// If there is no such device.
    pub fn model_options(&self, capacity: Capacity) -> Result<ModelOptions, InferError> {
        Ok(ModelOptions {
            devices: Devices::parse(&self.device)?,
            intra_threads: self.intra_threads(),
            pin_threads: self.pin_threads,
            fused: self.fused,
            max_batch: self.largest_batch(),
            cuda_graphs: self.cuda_graphs,
            precision: self.precision,
            cache: self.cache.clone(),
            memory_limit: self.memory_of_one(),
            capacity,
        })
    }

    /// Sessions running in parallel on all devices, with the default applied.
    pub fn instances(&self) -> usize {
        self.of_each_device() * self.devices().len()
    }

    pub(crate) fn of_each_device(&self) -> usize {
        let default = || match self.is_gpu() {
            true => ON_A_GPU,
            false => cores().min(4),
        };
        self.instances.map_or_else(default, Into::into)
    }

    /// Longest time an image waits for its batch to fill, with the default applied.
    pub fn max_wait(&self) -> Duration {
        self.max_wait.unwrap_or(MAX_WAIT)
    }

    /// Memory limit of one session on its device, in bytes.
    fn memory_of_one(&self) -> Option<usize> {
        let budget = self.memory_budget?.get().saturating_mul(MIB);
        Some(budget / self.of_each_device())
    }

    /// An invalid device, which [`WorkerConfig::problems`] refuses, counts as the CPU.
    pub(crate) fn devices(&self) -> Devices {
        Devices::parse(&self.device).unwrap_or_else(|_| Device::Cpu.into())
    }

    /// Whether there may be one more session on the CPU than there are instances.
    pub(crate) fn may_have_lone_session(&self) -> bool {
        !self.fused.unwrap_or_else(|| self.is_gpu()) && self.memory_budget.is_none()
    }

    fn is_gpu(&self) -> bool {
        self.devices().first().is_gpu()
    }

    /// Images that infer holds.
    pub(super) fn images_in_flight(&self, max_batch: usize) -> usize {
        images_in_flight(max_batch, self.instances())
    }

    /// Most images in a batch: as configured, or the largest size tried on the device.
    pub(crate) fn largest_batch(&self) -> usize {
        let largest = || self.devices().first().largest_batch();
        self.max_batch.map_or_else(largest, Into::into)
    }

    /// Threads inside one session, with the default applied.
    pub fn intra_threads(&self) -> usize {
        let default = || match self.is_gpu() {
            true => 1,
            false => (cores() / self.instances()).max(1),
        };
        self.intra_threads.map_or_else(default, Into::into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_have_two_sessions_each_and_share_no_core() {
        let of = |device: &str| {
            let config = InferConfig {
                device: device.to_owned(),
                ..InferConfig::default()
            };
            (config.instances(), config.intra_threads())
        };
        assert_eq!(of("cuda:0"), (2, 1));
        assert_eq!(of("tensorrt:0,tensorrt:1"), (4, 1));
        let (instances, threads) = of("cpu");
        assert!(instances * threads <= cores() && instances <= 4);
    }

    #[test]
    fn the_memory_of_a_device_is_shared_by_its_sessions() {
        let config = InferConfig {
            device: "cuda:0,cuda:1".to_owned(),
            memory_budget: NonZeroUsize::new(64),
            ..InferConfig::default()
        };
        let options = config.model_options(Capacity::default()).unwrap();
        assert_eq!(options.memory_limit, Some(32 << 20));
        assert_eq!(options.devices.len(), 2);
    }
}
