use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

use crate::{FrameRate, Lane, Scalar};

/// One image of a job: the message from ingest to preprocess.
///
/// `(job, index)` names the image forever. Indices are dense, `0..N` in listing order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ImageRef {
    /// The job this image belongs to.
    pub job: Arc<str>,
    /// Place in the source's listing, from 0; below 2⁶³, as rows hold signed integers.
    #[serde(deserialize_with = "signed")]
    pub index: u64,
    /// How urgent the job is.
    #[serde(default, skip_serializing_if = "Lane::is_normal")]
    pub lane: Lane,
    /// Where the image is, as it appears in its row. A path that is not UTF-8 is written as a
    /// percent-encoded `file://` URL; an image inside a file is `file#member`, a frame of a video
    /// `file#t=12.000`.
    pub uri: String,
    /// Where in the object at `uri` the image is.
    #[serde(default, skip_serializing_if = "Content::is_whole")]
    pub content: Content,
    /// The store's version of the object, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// Encoded size in bytes, if the listing has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Values of the source's pass-through columns, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<Scalar>,
}

impl ImageRef {
    /// This image for a later stage, without its encoded bytes.
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

/// Length of a truncated text of a row, in bytes.
const CUT: usize = 1024;

impl ImageRef {
    /// This image, small enough for a message: long texts are cut after a kilobyte and end with a
    /// hash of the whole, so that different ones stay different.
    pub fn cut(&self) -> Self {
        let mut cut = self.without_inline_bytes();
        cut.uri = cut_text(&cut.uri);
        cut.etag = cut.etag.as_deref().map(cut_text);
        cut.content = Content::Whole;
        for value in &mut cut.columns {
            if let Scalar::String(text) = value {
                *text = cut_text(text);
            }
        }
        // Many columns are large even if each is small.
        let size = |value: &Scalar| match value {
            Scalar::String(text) => text.len(),
            _ => 8,
        };
        if cut.columns.iter().map(size).sum::<usize>() > 64 * CUT {
            cut.columns
                .iter_mut()
                .for_each(|value| *value = Scalar::Null);
        }
        cut
    }
}

/// The text, cut to little more than a kilobyte.
pub(crate) fn cut_text(text: &str) -> String {
    if text.len() <= CUT {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(CUT);
    let hash = xxhash_rust::xxh3::xxh3_64(text.as_bytes());
    format!("{}…#{hash:016x}", &text[..end])
}

/// Reads an index that fits into a signed integer.
fn signed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let index = u64::deserialize(deserializer)?;
    match i64::try_from(index) {
        Ok(_) => Ok(index),
        Err(_) => Err(serde::de::Error::custom(format!(
            "index {index} is above 2^63 - 1"
        ))),
    }
}

/// Where in an object the image is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// The whole object.
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
    /// A member of a zip archive.
    ZipMember {
        /// The archive that holds it.
        archive: String,
        /// First byte of its local header.
        offset: u64,
        /// Length of its name in that header.
        name_length: u16,
        /// Compressed size.
        length: u64,
        /// Uncompressed size.
        size: u64,
        /// Compression method by zip's own numbers, such as 0 (stored) and 8 (deflate).
        method: u16,
        /// CRC-32 of the uncompressed bytes.
        checksum: u32,
        /// Whether it is encrypted, which is not supported.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        encrypted: bool,
    },
    /// A member of an archive that is compressed as a whole.
    Unpacked {
        /// The archive that holds it.
        archive: String,
        /// How the archive is compressed.
        packing: Packing,
        /// First byte in the unpacked archive.
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
    /// A frame of a video: the one on display `number / rate` seconds after its beginning.
    Frame {
        /// The video.
        video: String,
        /// Frames per second of the sampling.
        rate: FrameRate,
        /// Number of the frame, from 0.
        number: u64,
    },
    /// The bytes travel in the message itself.
    Inline(#[serde(with = "serde_bytes")] Vec<u8>),
}

/// How a file is compressed as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// By gzip (RFC 1952).
    Gzip,
    /// By Zstandard (RFC 8878).
    Zstd,
}

impl Content {
    /// The file that contains the image, if the image is not a file itself.
    pub fn container(&self) -> Option<&str> {
        match self {
            Self::Whole | Self::Inline(_) => None,
            Self::Range { archive, .. }
            | Self::ZipMember { archive, .. }
            | Self::Unpacked { archive, .. } => Some(archive),
            Self::ParquetCell { file, .. } => Some(file),
            Self::Frame { video, .. } => Some(video),
        }
    }

    fn is_whole(&self) -> bool {
        matches!(self, Self::Whole)
    }
}
