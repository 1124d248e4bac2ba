//! Where images come from and where rows go: folders, S3, manifests and archives; Parquet, JSON
//! Lines, CSV.
//!
//! A [`Source`] lists images as [`Found`]s, in the same order every time, and fetches the bytes of
//! each. A [`Destination`] says where rows go; a [`PartSink`] commits them there in parts. A
//! [`SourceCheck`] compares a listing with what is committed. [`read_rows`] reads results back.
//!
//! Guarantees. A part appears whole or not at all, is durable before [`PartSink::commit`] returns,
//! and is its own commit record: a sink that starts again knows from the parts alone which indices
//! are committed. No index is committed twice. Listing holds the names of one folder a level, never
//! of a whole tree, and a listing that is cut short ends in an error.
//!
//! Deliberately absent: retries and queues, which are the worker's, and any knowledge of what the
//! images show.
//!
//! ```no_run
//! use futures::StreamExt;
//! use trommel_storage::{SourceOptions, fetcher, open_source};
//!
//! # async fn example() -> Result<(), trommel_storage::StorageError> {
//! let source = open_source(&["photos".to_owned()], &SourceOptions::default())?;
//! let mut listing = source.list();
//! while let Some(found) = listing.next().await {
//!     println!("{}", found?.uri);
//! }
//! # Ok(())
//! # }
//! ```

mod background;
mod error;
mod mirror;
mod s3;
mod sink;
mod source;
#[cfg(feature = "testsuite")]
pub mod testsuite;
mod uri;

pub use error::{StorageError, StorageErrorKind};
pub use mirror::Mirror;
pub use s3::S3Config;
pub use sink::{
    BucketDestination, BucketSink, Claim, Claims, Committed, Destination, Existing, FailureSummary,
    Format, JobRecord, JsonLines, Opened, Output, PartSink, PartSummary, PostgresConfig, ResultRow,
    ResultSink, Reuse, Runs, SourceCheck, Summary, TableDestination, TableSink, read_rows,
};
pub use source::{Found, Source, SourceOptions, fetcher, open_source};
