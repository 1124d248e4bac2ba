use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use trommel_types::{ErrorKind, Normalization, Reference, Shape};

use crate::budget::Budget;
use crate::geometry::{Crop, Resize};
use crate::{Arithmetic, ConfigError, Encoding, PrepareError, config};

/// How images become the tensor of one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The origin: a processor's class, `timm`, or `trommel.toml`.
    pub family: String,
    /// The name of the source file in the model's directory; empty for a plan without a file.
    pub read_from: String,
    /// Resizing, done first.
    pub resize: Resize,
    /// Filter of the resize.
    pub resample: Resample,
    /// Whose arithmetic the resize follows.
    pub arithmetic: Arithmetic,
    /// The reason, for people.
    pub arithmetic_reason: String,
    /// Cropping, after resizing.
    pub crop: Option<Crop>,
    /// Order of the channels in the tensor.
    pub channel_order: ChannelOrder,
    /// Normalisation next to the model, in the tensor's channel order.
    pub normalization: Normalization,
    /// The format of the pixels: a file for a server, else the tensor itself.
    #[serde(skip_serializing_if = "Encoding::is_raw")]
    pub encoding: Encoding,
}

/// The filters of Pillow's `resize`, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resample {
    /// The nearest pixel.
    Nearest,
    /// Mean of the covered pixels.
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
    /// Resizes with Pillow's bilinear filter, without other steps.
    pub fn plain(resize: Resize) -> Self {
        Self {
            family: "plain".to_owned(),
            read_from: String::new(),
            resize,
            resample: Resample::Bilinear,
            arithmetic: Arithmetic::Pillow,
            arithmetic_reason: "the default, as no processor sets it".to_owned(),
            crop: None,
            channel_order: ChannelOrder::Rgb,
            normalization: Normalization::default(),
            encoding: Encoding::Raw,
        }
    }

    /// Reads `preprocessor_config.json` or `processor_config.json` (Transformers) or `config.json`
    /// (timm) of a model directory, overridden by `[preprocess]` in its `trommel.toml`. The
    /// processor to follow is `reference`, or for `Auto` that of the directory.
    ///
    /// # Errors
    /// If there is no such file, or it cannot be followed exactly; the message names the file, the
    /// key, and the found and expected values.
    pub fn load(model_dir: &Path, reference: Reference) -> Result<Self, ConfigError> {
        config::load(model_dir, reference)
    }

    /// Shape of every tensor. `None` if the model takes images of any size.
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

    /// Shape of every tensor, for models with a fixed image size.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) with the remedy, if images have varying sizes.
    pub fn fixed_shape(&self) -> Result<Shape, PrepareError> {
        self.shape().ok_or_else(|| {
            PrepareError::new(
                ErrorKind::Unsupported,
                format!(
                    "images end up in different sizes ({self}), which do not fit into one batch; \
                     set crop or resize in the section [preprocess] of the model's trommel.toml"
                ),
            )
        })
    }

    /// The origin of the plan: a processor's class, `timm`, or `trommel.toml`.
    pub fn family(&self) -> &str {
        &self.family
    }

    /// The plan in one line for people, as in `Display`.
    pub fn describe(&self) -> String {
        self.to_string()
    }

    /// The normalisation next to the model.
    pub fn normalization(&self) -> Normalization {
        self.normalization
    }
}

/// A line of `model inspect`.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.family)?;
        match self.resize {
            Resize::None => write!(f, "no resize")?,
            Resize::Exact { height, width } => write!(f, "resize to {width}×{height}")?,
            Resize::ShortestEdge(edge) => write!(f, "resize shorter side to {edge}")?,
            Resize::Cover { height, width } => write!(f, "resize to cover {width}×{height}")?,
            Resize::Fit { height, width } => write!(f, "resize to fit into {width}×{height}")?,
            Resize::Budget(Budget {
                family,
                image_tokens,
                max_pixels,
            }) => match (family, image_tokens, max_pixels) {
                (Some(family), Some(tokens), _) => {
                    write!(f, "resize to at most {tokens} tokens of {family}")?;
                }
                (_, _, Some(pixels)) => write!(f, "resize to at most {pixels} pixels")?,
                _ => write!(f, "no resize")?,
            },
        }
        if self.resize != Resize::None {
            write!(f, " ({})", format!("{:?}", self.resample).to_lowercase())?;
        }
        match self.encoding {
            Encoding::Raw => {}
            Encoding::Jpeg(quality) => return write!(f, ", sent as JPEG of quality {quality}"),
            Encoding::Png => return write!(f, ", sent as PNG"),
        }
        if let Some(crop) = self.crop {
            write!(f, ", centre crop {}×{}", crop.width, crop.height)?;
        }
        let Normalization { scale, mean, std } = self.normalization;
        let order = format!("{:?}", self.channel_order).to_uppercase();
        let scaled = match scale == 1.0 / 255.0 {
            true => "x ÷ 255".to_owned(),
            false => format!("x × {scale}"),
        };
        write!(f, ", {order}, ({scaled} − {mean:?}) ÷ {std:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R14: only an engine noticed that a plan gives tensors of different sizes.
    #[test]
    fn a_plan_without_a_crop_is_refused_with_the_remedy() {
        let exact = Resize::Exact {
            height: 4,
            width: 5,
        };
        let shape = Plan::plain(exact).fixed_shape().unwrap();
        assert_eq!((shape.height, shape.width, shape.channels), (4, 5, 3));
        for resize in [Resize::None, Resize::ShortestEdge(224)] {
            let error = Plan::plain(resize).fixed_shape().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("trommel.toml"), "{error}");
        }
    }
}
