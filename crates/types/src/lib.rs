//! The messages that travel between stages, and their MessagePack encoding.
//!
//! In flow order: [`JobRequest`] asks for a job, [`ImageRef`] names one image of it,
//! [`PreparedImage`] is that image as the tensor a model expects, [`Classification`] is what became
//! of it. [`ErrorKind`] says why an image failed, in the words that appear in result rows.
//! [`Normalization`] is the arithmetic between a prepared image and a model's floating-point input.
//!
//! Every message is a MessagePack *map with field names* (see [`Message`]), so that any language can
//! write it. Unknown fields are ignored; a message whose `version` is newer than
//! [`WIRE_VERSION`] is refused. Encoded messages of every released version still decode (golden
//! files in `tests/golden`).
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

mod classification;
mod column;
mod error_kind;
mod image_ref;
mod job;
mod message;
mod normalization;
mod prepared_image;

pub use classification::{Classification, Failure, ImageSize, Outcome, Scores, TopLabel};
pub use column::{Column, ColumnKind, Scalar};
pub use error_kind::ErrorKind;
pub use image_ref::{Content, ImageRef};
pub use job::{InlineImage, JobOptions, JobRequest, Lane};
pub use message::{DecodeError, Message, WIRE_VERSION};
pub use normalization::Normalization;
pub use prepared_image::{PreparedImage, Shape};
