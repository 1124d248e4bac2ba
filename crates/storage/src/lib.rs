//! Object stores: requests to S3, other clouds and the web, local copies of prefixes, uris, and the
//! errors that sources and sinks share.
//!
//! An [`ObjectStore`] lists, reads and writes objects, in a folder ([`LocalStore`](local::LocalStore))
//! or in a bucket ([`S3Store`](s3::S3Store), [`cloud`]). A [`Mirror`] keeps a prefix as a folder. A
//! [`StorageError`] names the object and the remedy.
//!
//! Guarantees. An object is written whole or not at all, and is durable once a write returns.
//!
//! Deliberately absent: the contents of objects, which are known to the crates `source` and `sink`.

pub mod background;
pub mod cloud;
mod error;
pub mod http;
pub mod local;
mod mirror;
mod rule;
pub mod s3;
mod store;
#[cfg(feature = "testsuite")]
pub mod testsuite;
pub mod uri;

pub use self::cloud::CloudConfig;
pub use self::http::HttpConfig;
pub use error::{StorageError, StorageErrorKind};
pub use mirror::Mirror;
pub use rule::PlaceRule;
pub use s3::S3Config;
pub use store::{Get, ObjectStore};
