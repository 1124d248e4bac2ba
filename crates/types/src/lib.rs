//! The messages that travel between stages, and their MessagePack encoding.
//!
//! In flow order: [`JobRequest`] asks for a job, [`JobSpec`] is that job as one value with everything that
//! shapes its rows, [`ImageRef`] names one image of it,
//! [`PreparedImage`] is that image as the tensor a model expects, [`Classification`] is what became
//! of it. [`LiveTensor`] and [`LiveAnswer`] are a request's image between serve and infer. [`ErrorKind`] says why an image failed, in the words that appear in result rows.
//! [`Normalization`] is the arithmetic between a prepared image and a model's floating-point input.
//!
//! Every message is a MessagePack *map with field names* (see [`Message`]), so that any language can
//! write it. Unknown fields are ignored; a message whose `version` is newer than
//! [`WIRE_VERSION`] is refused. Encoded messages of every released version still decode (golden
//! files in `tests/golden`). [`stage`] is the table of stages and of the streams between them.
//!
//! Deliberately absent: transport, storage, clocks. The types hold values and nothing else.
//!
//! ```
//! use trommel_types::{Content, ImageRef, Lane, Message};
//!
//! let image = ImageRef {
//!     job: "photos".into(),
//!     index: 7,
//!     lane: Lane::Normal,
//!     uri: "photos/cat.jpg".to_owned(),
//!     content: Content::Whole,
//!     etag: None,
//!     size: Some(60_000),
//!     columns: Vec::new(),
//! };
//! let wire = image.encode();
//! assert_eq!(ImageRef::decode(&wire).unwrap(), image);
//! ```

mod cascade;
mod classification;
mod column;
mod embedding_type;
mod error_kind;
mod frame_rate;
mod image_ref;
mod job;
mod job_spec;
mod label_set;
mod lane;
mod live_tensor;
mod message;
mod mode;
mod normalization;
mod prepared_image;
mod price;
mod reference;
pub mod stage;

pub use cascade::Cascade;
pub use classification::{Classification, Failure, ImageSize, Outcome, Scores, TopLabel};
pub use column::{Column, ColumnKind, PHASH, Scalar};
pub use embedding_type::EmbeddingType;
pub use error_kind::ErrorKind;
pub use frame_rate::FrameRate;
pub use image_ref::{Content, ImageRef, Packing};
pub use job::{Forecast, JobOptions, JobRequest, RetryOf, RowOptions, is_model_name};
pub use job_spec::{JobBase, JobModel, JobSpec};
pub use label_set::LabelSet;
pub use lane::Lane;
pub use live_tensor::{LiveAnswer, LiveOutcome, LiveRefusal, LiveTensor, RefusalReason, WarmModel};
pub use message::{DecodeError, Message, WIRE_VERSION};
pub use mode::Mode;
pub use normalization::Normalization;
pub use prepared_image::{PreparedImage, Shape};
pub use price::{Held, Price, Usage, cost, problem_of_prices, problem_of_token_prices};
pub use reference::Reference;
pub use stage::{Role, Stream};
