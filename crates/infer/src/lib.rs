//! Runs batches of tensors through a model on threads of its own.
//!
//! In flow order: [`Runtime`] is ONNX Runtime, loaded into the process; [`Model`] is an image
//! classifier whose files have been read and checked against each other; [`Engine`] runs it, taking
//! one image a call and forming the batches itself. [`ModelInfo`] tells what is known of a model,
//! [`EngineStats`] what an engine has done, [`Profile`] where a model's time goes.
//!
//! Guarantees: every call of [`Engine::classify`] has one outcome of its own, whatever becomes of
//! the batch it is in. A batch closes when it is full, when it has waited as long as it may, or
//! when [`Engine::flush`] says that nothing more will come. Memory is bounded, callers wait. A
//! device that was asked for and is not there is an error; nothing ever runs elsewhere instead. A
//! score is never NaN. `design.md` beside the code goes through the failures.
//!
//! Deliberately absent: decoding and resizing (pixels come as HWC bytes), queues, retries over
//! time, and the choice of defaults ([`Model::best_batch`] measures one). Besides `ORT_DYLIB_PATH`, no environment is read.
//!
//! ```no_run
//! # async fn example(normalization: trommel_types::Normalization, pixels: Vec<u8>)
//! # -> Result<(), trommel_infer::InferError> {
//! use std::path::Path;
//! use std::time::Duration;
//!
//! use trommel_infer::{Engine, EngineOptions, Model, ModelOptions, Runtime};
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
//! };
//! let engine = Engine::start(model, options)?;
//! let scores = engine.classify(pixels, Lane::Normal).await?;
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
mod config;
mod device;
mod ends;
mod engine;
mod error;
mod former;
mod host;
mod info;
mod instances;
mod lanes;
mod metrics;
mod model;
mod onnx_file;
mod pack;
mod profile;
mod runtime;
mod scores;
mod sessions;
mod signature;
mod stats;
mod tensor_info;

pub use config::Activation;
pub use device::{Device, Devices, Precision};
pub use engine::{Engine, EngineOptions};
pub use error::{InferError, InferErrorKind};
pub use info::ModelInfo;
pub use metrics::{describe_metrics, gpu_name, measure_devices};
pub use model::{Model, ModelOptions, version};
pub use profile::{BatchRate, NodeTime, Profile};
pub use runtime::Runtime;
pub use signature::Layout;
pub use stats::EngineStats;
pub use tensor_info::{Dim, Element, TensorInfo};
