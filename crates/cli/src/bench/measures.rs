//! The measurements of `trommel bench`, as written there and read by `trommel plan`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// The version of the file format. Files of other versions are refused.
pub(crate) const VERSION: u32 = 1;

/// All measurements of a model on a machine with a sample of images.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measures {
    pub(crate) version: u32,
    pub(crate) machine: Machine,
    pub(crate) model: MeasuredModel,
    pub(crate) sample: Sample,
    /// Each stage alone, in the order of the pipeline.
    pub(crate) stages: Vec<StageTime>,
    /// The model by batch size, with all sessions busy.
    pub(crate) compute: Vec<BatchTime>,
    /// The hops from preprocess to infer.
    pub(crate) hops: Vec<HopRate>,
    /// The whole pipeline.
    pub(crate) pipeline: Pipeline,
}

/// The machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The processor or GPU, as named by the system.
    pub(crate) name: String,
    pub(crate) cores: usize,
    /// Share of the CPUs used by other programs during the measurements, 0 to 1.
    pub(crate) others: f64,
}

/// The model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeasuredModel {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) device: String,
    /// Sessions in parallel.
    pub(crate) instances: usize,
    pub(crate) intra_threads: usize,
    pub(crate) max_batch: usize,
}

/// The sample images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) images: usize,
    /// Images that could not be read or decoded, and were left out.
    pub(crate) failed: usize,
    /// Mean size of an encoded image.
    pub(crate) image_bytes: f64,
    /// Bytes of a tensor.
    pub(crate) tensor_bytes: usize,
}

/// A distribution of times, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

/// A stage alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct StageTime {
    pub(crate) stage: String,
    /// Per image.
    pub(crate) milliseconds: Spread,
    /// Number in parallel in the pipeline.
    pub(crate) side_by_side: usize,
    /// With this many in parallel.
    pub(crate) images_per_second: f64,
}

/// Batches of one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct BatchTime {
    pub(crate) batch: usize,
    /// Per batch in one session, while all of them work.
    pub(crate) milliseconds: f64,
    /// In all sessions.
    pub(crate) images_per_second: f64,
}

/// A hop alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct HopRate {
    /// `local` or `jetstream`.
    pub(crate) hop: String,
    /// Tensors per second of one stream.
    pub(crate) images_per_second: f64,
    /// From sending to arrival.
    pub(crate) milliseconds: Spread,
}

/// The whole pipeline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pipeline {
    pub(crate) images: u64,
    pub(crate) seconds: f64,
    pub(crate) images_per_second: f64,
    /// The limit set by the slowest part, if the parts ran independently.
    pub(crate) limit: f64,
    /// The slowest part.
    pub(crate) bottleneck: String,
    /// The rate divided by the limit.
    pub(crate) efficiency: f64,
}

impl Measures {
    /// Reads a file of `trommel bench --output`.
    ///
    /// # Errors
    /// If it cannot be read, or has another version.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let failed = || format!("failed to read the measurements {}", path.display());
        let text = std::fs::read(path).with_context(failed)?;
        #[derive(Deserialize)]
        struct Head {
            version: u32,
        }
        let what = "it was not written by trommel bench --output bench.json";
        let Head { version } = serde_json::from_slice(&text)
            .with_context(failed)
            .context(what)?;
        if version != VERSION {
            bail!(
                "{}: the measurements have version {version}, but this trommel reads version {VERSION}; run trommel bench again",
                path.display()
            );
        }
        serde_json::from_slice(&text)
            .with_context(failed)
            .context(what)
    }

    /// A stage by its name.
    pub(crate) fn stage(&self, name: &str) -> Option<&StageTime> {
        self.stages.iter().find(|stage| stage.stage == name)
    }
}
