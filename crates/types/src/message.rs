use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Classification, ImageRef, PreparedImage};

/// The newest wire version this build writes and reads.
pub const WIRE_VERSION: u16 = 1;

/// A value that travels between stages.
///
/// On the wire it is a MessagePack map of its fields by name, and a field `version`.
pub trait Message: Clone + Serialize + DeserializeOwned + Send + Sync + 'static {
    /// Encodes as a MessagePack map with field names.
    fn encode(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(&Versioned {
            version: WIRE_VERSION,
            message: self,
        })
        .expect("messages hold only types that MessagePack has")
    }

    /// Encodes the part of it that a dead letter keeps: everything except bulk data.
    fn encode_remains(&self) -> Vec<u8> {
        self.encode()
    }

    /// Approximate bytes in memory, from its text and pixels.
    fn approx_bytes(&self) -> usize {
        size_of::<Self>()
    }

    /// Decodes the output of [`Message::encode`], or of a writer in any other language.
    ///
    /// # Errors
    /// If the bytes are not such a message, or one of a newer version.
    fn decode(wire: &[u8]) -> Result<Self, DecodeError> {
        decode(wire)
    }
}

/// Decodes a MessagePack map whose `version` is not too new.
pub(crate) fn decode<T: DeserializeOwned>(wire: &[u8]) -> Result<T, DecodeError> {
    let Version { version } = rmp_serde::from_slice(wire)?;
    if version > WIRE_VERSION {
        return Err(DecodeError::TooNew { version });
    }
    Ok(rmp_serde::from_slice(wire)?)
}

impl Message for ImageRef {}
impl Message for PreparedImage {
    fn approx_bytes(&self) -> usize {
        size_of::<Self>() + self.pixels.len()
    }

    /// Without the pixels.
    fn encode_remains(&self) -> Vec<u8> {
        let remains = Self {
            pixels: bytes::Bytes::new(),
            ..self.clone()
        };
        remains.encode()
    }
}
impl Message for Classification {
    fn approx_bytes(&self) -> usize {
        Self::approx_bytes(self)
    }
}

#[derive(Serialize)]
struct Versioned<'a, T> {
    version: u16,
    #[serde(flatten)]
    message: &'a T,
}

#[derive(Deserialize)]
struct Version {
    version: u16,
}

/// Why bytes cannot be decoded.
#[derive(Debug, Error)]
pub enum DecodeError {
    /// Not a MessagePack map with the fields of this message.
    #[error("not a message of the expected kind: {0}")]
    Malformed(#[from] rmp_serde::decode::Error),
    /// Not a JSON object with the fields of this message.
    #[error("not a message of the expected kind: {0}")]
    MalformedJson(#[from] serde_json::Error),
    /// Written by a newer release.
    #[error("message has version {version}, newer than {WIRE_VERSION}: upgrade this worker")]
    TooNew {
        /// The version found.
        version: u16,
    },
}
