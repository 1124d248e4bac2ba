use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The precision in which embeddings are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EmbeddingType {
    /// As single-precision numbers.
    #[default]
    Float32,
    /// As half-precision numbers: half the bytes, 11 bits of each value.
    Float16,
}

impl EmbeddingType {
    /// Whether this is the default.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for EmbeddingType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
        })
    }
}

impl FromStr for EmbeddingType {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "float32" => Ok(Self::Float32),
            "float16" => Ok(Self::Float16),
            _ => Err("expected float32 or float16"),
        }
    }
}
