use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use trommel_types::{Normalization, Shape};

use crate::geometry::{Crop, Resize};
use crate::{Arithmetic, ConfigError, config};

/// How images become the tensor of one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// Where this was read from: a processor's class, `timm`, or `trommel.toml`.
    pub family: String,
    /// Scaling, first.
    pub resize: Resize,
    /// Filter of the scaling.
    pub resample: Resample,
    /// Whose arithmetic the scaling follows.
    pub arithmetic: Arithmetic,
    /// Cutting, after scaling.
    pub crop: Option<Crop>,
    /// Order of the channels in the tensor.
    pub channel_order: ChannelOrder,
    /// What is done next to the model, in the order of the tensor's channels.
    pub normalization: Normalization,
}

/// The filters of Pillow's `resize`, by its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resample {
    /// The nearest pixel.
    Nearest,
    /// Mean of the pixels that are covered.
    Box,
    /// Triangle.
    Bilinear,
    /// Hamming window.
    Hamming,
    /// Keys' cubic with a = −0.5.
    Bicubic,
    /// Three lobes of a windowed sinc.
    Lanczos,
}

/// Order of the channels in a tensor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChannelOrder {
    /// Red first.
    #[default]
    Rgb,
    /// Blue first.
    Bgr,
}

impl Plan {
    /// Scales by Pillow's bilinear filter, and does nothing else.
    pub fn plain(resize: Resize) -> Self {
        Self {
            family: "plain".to_owned(),
            resize,
            resample: Resample::Bilinear,
            arithmetic: Arithmetic::Pillow,
            crop: None,
            channel_order: ChannelOrder::Rgb,
            normalization: Normalization::default(),
        }
    }

    /// Reads `preprocessor_config.json` (Transformers) or `config.json` (timm) of a model
    /// directory, and lets `[preprocess]` of its `trommel.toml` override.
    ///
    /// # Errors
    /// When there is no such file, or one holds something that cannot be followed exactly; the
    /// message names the file, the key, what was found and what was expected.
    pub fn load(model_dir: &Path) -> Result<Self, ConfigError> {
        config::load(model_dir)
    }

    /// Shape of every tensor. `None` when the model takes images of any size as they are.
    pub fn shape(&self) -> Option<Shape> {
        let (height, width) = match (self.crop, self.resize) {
            (Some(crop), _) => (crop.height, crop.width),
            (None, Resize::Exact { height, width }) => (height, width),
            (None, _) => return None,
        };
        Some(Shape {
            height,
            width,
            channels: 3,
        })
    }

    /// Where the plan was read from: a processor's class, `timm`, or `trommel.toml`.
    pub fn family(&self) -> &str {
        &self.family
    }

    /// The plan in one line for people, as `Display` gives it.
    pub fn describe(&self) -> String {
        self.to_string()
    }

    /// What the model's side does with the tensor.
    pub fn normalization(&self) -> Normalization {
        self.normalization
    }
}

/// One line a person reads in `model inspect`.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.family)?;
        match self.resize {
            Resize::None => write!(f, "no resize")?,
            Resize::Exact { height, width } => write!(f, "resize to {width}×{height}")?,
            Resize::ShortestEdge(edge) => write!(f, "resize shorter side to {edge}")?,
            Resize::Cover { height, width } => write!(f, "resize to cover {width}×{height}")?,
            Resize::Fit { height, width } => write!(f, "resize to fit into {width}×{height}")?,
        }
        if self.resize != Resize::None {
            write!(f, " ({:?}, as {:?})", self.resample, self.arithmetic)?;
        }
        if let Some(crop) = self.crop {
            write!(f, ", centre crop {}×{}", crop.width, crop.height)?;
        }
        let Normalization { scale, mean, std } = self.normalization;
        write!(
            f,
            ", {:?}, (x × {scale} − {mean:?}) ÷ {std:?}",
            self.channel_order
        )
    }
}
