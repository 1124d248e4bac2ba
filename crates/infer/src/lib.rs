//! Runs batches of tensors through a model on its own threads.
//!
//! In flow order: [`Runtime`] is ONNX Runtime, loaded into the process; [`Model`] is an image
//! classifier whose files have been read and checked against each other; [`Engine`] runs it, taking
//! one image per call with the options in [`Wanted`], and forming the batches itself. [`ModelInfo`]
//! describes a model, [`EngineStats`] the work of an engine, [`Profile`] a model's time by node. A
//! [`Prompt`] is a model on servers, which an engine asks instead; an [`Engine::cascade`] combines
//! two models by a [`Rule`].
//!
//! Guarantees: every call of [`Engine::classify`] has its own outcome, whatever happens to its
//! batch. A batch is ready when it is full, when it has waited long enough, or when
//! [`Engine::flush`] announces a pause; it grows until a session takes it. Live work precedes all
//! jobs, and while it arrives batches are limited to what the device finishes in time. Memory is
//! bounded; callers wait. A missing device is an error; nothing ever runs elsewhere instead. A
//! score is never NaN. `design.md` next to the code describes the failure cases.
//!
//! Deliberately absent: decoding and resizing (pixels come as HWC bytes), queues, retries, and the
//! choice of defaults ([`Model::best_batch`] measures one). Besides `ORT_DYLIB_PATH`, no
//! environment is read.
//!
//! ```no_run
//! # async fn example(normalization: trommel_types::Normalization, pixels: Vec<u8>)
//! # -> Result<(), trommel_infer::InferError> {
//! use std::path::Path;
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use trommel_infer::{Engine, EngineOptions, LiveOptions, Model, ModelOptions, Runtime, Wanted};
//! use trommel_types::{Lane, Shape};
//!
//! let runtime = Runtime::load(None)?;
//! let shape = Shape { height: 224, width: 224, channels: 3 };
//! let options = ModelOptions::default();
//! let model = Model::open(&runtime, Path::new("models/vit"), normalization, shape, &options)?;
//! let options = EngineOptions {
//!     instances: 2,
//!     max_batch: 8,
//!     max_wait: Duration::from_millis(20),
//!     run_timeout: EngineOptions::RUN_TIMEOUT,
//!     live: LiveOptions::default(),
//! };
//! let engine = Engine::start(model, options)?;
//! let wanted = Arc::new(Wanted::default());
//! let scores = engine.classify(pixels, Lane::Normal, &wanted).await?;
//! let best = &scores.top[0];
//! tracing::info!("{} with {:.2}", best.label, best.score);
//! # Ok(())
//! # }
//! ```

mod affinity;
mod answers;
mod backend;
mod bound;
mod buckets;
mod calibrate;
mod cascade;
mod classifier;
mod config;
mod device;
mod ending;
mod ends;
mod engine;
mod error;
mod former;
mod graph;
mod head;
mod host;
mod info;
mod instances;
mod kept_labels;
mod labeller;
mod lanes;
mod learning;
mod linear;
mod memory;
mod metrics;
mod model;
mod onnx_file;
mod onnx_part;
mod options;
mod pace;
mod pack;
mod product;
mod profile;
mod prompt;
mod runtime;
mod scores;
mod sessions;
mod signature;
mod stats;
mod tensor_info;
#[cfg(feature = "testsuite")]
pub mod testsuite;
mod text;
mod texts;
mod towers;
mod version;
mod wanted;

pub use affinity::pin_thread;
pub use cascade::{
    Decided, Pair, Rule, cascade_columns, cascade_name, cascade_version, check_cascade, has_shifted,
};
pub use config::Activation;
pub use device::{Device, Devices, Precision};
pub use engine::{Engine, EngineOptions, LiveOptions};
pub use error::{InferError, InferErrorKind};
pub use head::{Head, length, normalize};
pub use info::ModelInfo;
pub use labeller::Labeller;
pub use learning::Learning;
pub use memory::memory_limit;
pub use metrics::{describe_metrics, gpu_name, measure_devices};
pub use model::Model;
pub use onnx_file::external_data;
pub use options::ModelOptions;
pub use product::multiply;
pub use profile::{BatchRate, NodeTime, Profile};
pub use prompt::{Answer, Prompt, PromptStats};
pub use runtime::Runtime;
pub use signature::Layout;
pub use stats::EngineStats;
pub use tensor_info::{Dim, Element, TensorInfo};
pub use texts::Texts;
pub use version::{Fingerprint, fingerprint, version};
pub use wanted::{Capacity, Wanted};
