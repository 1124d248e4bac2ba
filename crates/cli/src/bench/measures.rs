//! What `trommel bench` has measured, as it is written and as `trommel plan` reads it.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// The version of this form. A file of another one is refused.
pub(crate) const VERSION: u32 = 1;

/// All that was measured of a model on a machine with a sample of images.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measures {
    pub(crate) version: u32,
    pub(crate) machine: Machine,
    pub(crate) model: MeasuredModel,
    pub(crate) sample: Sample,
    /// Each stage alone, in the order of the pipeline.
    pub(crate) stages: Vec<StageTime>,
    /// The model by size of batch, with all sessions at work.
    pub(crate) compute: Vec<BatchTime>,
    /// Ways of tensors from preprocess to infer.
    pub(crate) hops: Vec<HopRate>,
    /// All stages at once.
    pub(crate) pipeline: Pipeline,
}

/// Where it was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The processor, or the GPU, by the name that the system has for it.
    pub(crate) name: String,
    pub(crate) cores: usize,
    /// Share of the processors that other programs took meanwhile, 0 to 1.
    pub(crate) others: f64,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeasuredModel {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) device: String,
    /// Sessions side by side.
    pub(crate) instances: usize,
    pub(crate) intra_threads: usize,
    pub(crate) max_batch: usize,
}

/// The images that it was measured with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) images: usize,
    /// Of them, those that could not be read or decoded; they are left out.
    pub(crate) failed: usize,
    /// Encoded bytes of an image on average.
    pub(crate) image_bytes: f64,
    /// Bytes of a tensor.
    pub(crate) tensor_bytes: usize,
}

/// How a time is distributed, in milliseconds.
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
    /// Of one image.
    pub(crate) milliseconds: Spread,
    /// How many of it are done side by side in the pipeline.
    pub(crate) side_by_side: usize,
    /// With so many of it side by side.
    pub(crate) images_per_second: f64,
}

/// Batches of one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct BatchTime {
    pub(crate) batch: usize,
    /// Of a batch in one session, while all of them work.
    pub(crate) milliseconds: f64,
    /// Of all sessions.
    pub(crate) images_per_second: f64,
}

/// A way of tensors alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct HopRate {
    /// `local` or `jetstream`.
    pub(crate) hop: String,
    /// Tensors that one stream carries.
    pub(crate) images_per_second: f64,
    /// From its sending to its arrival.
    pub(crate) milliseconds: Spread,
}

/// All stages at once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pipeline {
    pub(crate) images: u64,
    pub(crate) seconds: f64,
    pub(crate) images_per_second: f64,
    /// What the slowest part allows, if nothing stood between the parts.
    pub(crate) limit: f64,
    /// That part.
    pub(crate) bottleneck: String,
    /// The former divided by the latter.
    pub(crate) efficiency: f64,
}

impl Measures {
    /// Reads a file of `trommel bench --output`.
    ///
    /// # Errors
    /// If it cannot be read, or is of another version.
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
