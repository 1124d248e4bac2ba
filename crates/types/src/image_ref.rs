use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Lane, Scalar};

/// One image of a job: the message from ingest to preprocess.
///
/// `(job, index)` names the image for ever. Indices are dense, `0..N` in listing order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ImageRef {
    /// The job this image belongs to.
    pub job: Arc<str>,
    /// Place in the source's listing, from 0.
    pub index: u64,
    /// How urgent the job is.
    #[serde(default, skip_serializing_if = "Lane::is_normal")]
    pub lane: Lane,
    /// Where the image is, as it appears in its row. A path that is not UTF-8 is written as a
    /// percent-encoded `file://` URL; an image inside a file is `file#member`.
    pub uri: String,
    /// Which bytes of the object at `uri` are the image.
    #[serde(default, skip_serializing_if = "Content::is_whole")]
    pub content: Content,
    /// The store's version of the object, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Encoded size in bytes, where the listing tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Values of the source's pass-through columns, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<Scalar>,
}

impl ImageRef {
    /// This image for a later stage, which has no use for its encoded bytes.
    pub fn without_inline_bytes(&self) -> Self {
        let content = match &self.content {
            Content::Inline(_) => Content::Whole,
            other => other.clone(),
        };
        Self {
            job: Arc::clone(&self.job),
            index: self.index,
            lane: self.lane,
            uri: self.uri.clone(),
            content,
            etag: self.etag.clone(),
            size: self.size,
            columns: self.columns.clone(),
        }
    }
}

/// Which bytes of an object are the image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// All of them.
    #[default]
    Whole,
    /// A member of an archive.
    Range {
        /// The archive that holds it.
        archive: String,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u64,
    },
    /// A value of a binary column of a Parquet file.
    ParquetCell {
        /// The Parquet file.
        file: String,
        /// The column's name; `image.bytes` names a field of a struct column.
        column: String,
        /// The row, from 0, over all row groups.
        row: u64,
    },
    /// The bytes travel in the message itself.
    Inline(#[serde(with = "serde_bytes")] Vec<u8>),
}

impl Content {
    fn is_whole(&self) -> bool {
        matches!(self, Self::Whole)
    }
}
