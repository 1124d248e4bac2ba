use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The processor that a model's tensors follow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reference {
    /// That of the library that wrote the model's folder.
    #[default]
    Auto,
    /// Pillow, as Transformers before version 5 and timm.
    Pillow,
    /// torchvision, as Transformers from version 5 on.
    Torchvision,
}

impl Reference {
    /// Whether this is the default.
    pub fn is_auto(&self) -> bool {
        *self == Self::Auto
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Pillow => "pillow",
            Self::Torchvision => "torchvision",
        })
    }
}

impl FromStr for Reference {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "pillow" => Ok(Self::Pillow),
            "torchvision" => Ok(Self::Torchvision),
            _ => Err("expected auto, pillow or torchvision"),
        }
    }
}
