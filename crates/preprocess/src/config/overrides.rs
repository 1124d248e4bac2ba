//! `[preprocess]` in a model directory's `trommel.toml`: each key overrides the other files.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use trommel_types::{Normalization, Reference};

use super::reader::read_text;
use super::reference::Asked;
use crate::geometry::{Crop, Resize, Rounding};
use crate::{ChannelOrder, ConfigError, Plan, Resample};

#[derive(Debug, Default, Deserialize)]
struct File {
    preprocess: Option<Keys>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Keys {
    /// `[height, width]`.
    resize: Option<[u32; 2]>,
    shortest_edge: Option<u32>,
    /// `[height, width]`.
    crop: Option<[u32; 2]>,
    /// Which rounding the offsets of the crop follow.
    rounding: Option<Rounding>,
    resample: Option<Resample>,
    /// Which resize arithmetic is followed.
    #[serde(default)]
    reference: Reference,
    channel_order: Option<ChannelOrder>,
    scale: Option<f32>,
    mean: Option<[f32; 3]>,
    std: Option<[f32; 3]>,
}

pub(super) struct Overrides {
    path: PathBuf,
    keys: Keys,
}

/// Reads the section; `None` when there is no file or no such section.
pub(super) fn read(path: &Path) -> Result<Option<Overrides>, ConfigError> {
    let Some(text) = read_text(path)? else {
        return Ok(None);
    };
    let file: File = toml::from_str(&text).map_err(|error| ConfigError::Malformed {
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    Ok(file.preprocess.map(|keys| Overrides {
        path: path.to_owned(),
        keys,
    }))
}

/// Valid lengths of a tensor's side.
const MAY_BE: RangeInclusive<u32> = 1..=65_535;

impl Overrides {
    /// The requested reference.
    pub(super) fn reference(&self) -> Reference {
        self.keys.reference
    }

    /// Whether other files are not needed.
    pub(super) fn are_complete(&self) -> bool {
        let Keys {
            resize,
            shortest_edge,
            crop,
            resample,
            mean,
            std,
            ..
        } = &self.keys;
        let scales = resize.is_some() || shortest_edge.is_some();
        (scales && resample.is_some() || crop.is_some()) && mean.is_some() && std.is_some()
    }

    /// Applies these keys to a plan.
    pub(super) fn apply(self, mut plan: Plan) -> Result<Plan, ConfigError> {
        let shapes = self.keys != Keys::of(self.keys.reference);
        let Keys {
            resize,
            shortest_edge,
            crop,
            rounding,
            resample,
            reference: _, // decided before the other files were read
            channel_order,
            scale,
            mean,
            std,
        } = self.keys;
        let invalid = |key: &str, found: String, expected| ConfigError::Invalid {
            path: self.path.clone(),
            key: format!("preprocess.{key}"),
            found,
            expected,
        };
        let edge = shortest_edge.map(|edge| [edge, edge]);
        for (key, sides) in [("resize", resize), ("shortest-edge", edge), ("crop", crop)] {
            if let Some(side) = sides.iter().flatten().find(|side| !MAY_BE.contains(*side)) {
                return Err(invalid(key, side.to_string(), "a length from 1 to 65535"));
            }
        }
        let scales = scale.map(|scale| [scale; 3]);
        for (key, numbers) in [("mean", mean), ("std", std), ("scale", scales)] {
            let is_wrong = |number: &&f32| !number.is_finite() || (key == "std" && **number == 0.0);
            if let Some(number) = numbers.iter().flatten().find(is_wrong) {
                return Err(invalid(
                    key,
                    number.to_string(),
                    "finite numbers, and no zero in std",
                ));
            }
        }
        match (resize, shortest_edge) {
            (Some(_), Some(edge)) => {
                return Err(invalid(
                    "shortest-edge",
                    edge.to_string(),
                    "no such key next to resize",
                ));
            }
            (Some([height, width]), None) => plan.resize = Resize::Exact { height, width },
            (None, Some(edge)) => plan.resize = Resize::ShortestEdge(edge),
            (None, None) => {}
        }
        if let Some([height, width]) = crop {
            let (of_plan, fill) = plan.crop.map_or((Rounding::Transformers, [0; 3]), |crop| {
                (crop.rounding, crop.fill)
            });
            let rounding = rounding.unwrap_or(of_plan);
            plan.crop = Some(Crop {
                height,
                width,
                rounding,
                fill,
            });
        }
        plan.resample = resample.unwrap_or(plan.resample);
        plan.channel_order = channel_order.unwrap_or(plan.channel_order);
        plan.normalization = Normalization {
            scale: scale.unwrap_or(plan.normalization.scale),
            mean: mean.unwrap_or(plan.normalization.mean),
            std: std.unwrap_or(plan.normalization.std),
        };
        if shapes {
            plan.family.push_str(" with trommel.toml");
        }
        Ok(plan)
    }

    /// A plan from these keys alone, with Pillow as the default reference.
    pub(super) fn into_plan(self, asked: Asked) -> Result<Plan, ConfigError> {
        if self.keys.resize.is_none()
            && self.keys.crop.is_none()
            && self.keys.shortest_edge.is_none()
        {
            return Err(ConfigError::Invalid {
                path: self.path,
                key: "preprocess.resize".to_owned(),
                found: "missing".to_owned(),
                expected: "[height, width]",
            });
        }
        let mut plan = Plan::plain(Resize::None);
        plan.read_from = "trommel.toml".to_owned();
        if let Some((arithmetic, reason)) = asked.decided() {
            (plan.arithmetic, plan.arithmetic_reason) = (arithmetic, reason);
        }
        self.apply(plan)
    }
}

impl Keys {
    /// Those of a file that sets nothing else.
    fn of(reference: Reference) -> Self {
        Self {
            reference,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arithmetic;

    const AUTO: Asked = Asked {
        reference: Reference::Auto,
        by: "",
    };

    #[test]
    fn keys_replace_and_unknown_ones_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trommel.toml");
        std::fs::write(
            &path,
            "[preprocess]\nresize = [48, 64]\nchannel-order = \"bgr\"\n",
        )
        .unwrap();
        let plan = read(&path).unwrap().unwrap().into_plan(AUTO).unwrap();
        assert_eq!(
            plan.resize,
            Resize::Exact {
                height: 48,
                width: 64
            }
        );
        assert_eq!(plan.channel_order, ChannelOrder::Bgr);

        std::fs::write(&path, "[preprocess]\nsize = 3\n").unwrap();
        let error = read(&path).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("size"), "{error}");
    }

    fn applied(text: &str) -> Result<Plan, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trommel.toml");
        std::fs::write(&path, format!("[preprocess]\n{text}")).unwrap();
        let overrides = read(&path)?.unwrap();
        let asked = Asked {
            reference: overrides.reference(),
            by: "test",
        };
        overrides.into_plan(asked)
    }

    #[test]
    fn every_key_is_heeded() {
        let plan = applied(
            "shortest-edge = 40\ncrop = [32, 36]\nrounding = \"torchvision\"\nresample = \"lanczos\"\n\
             reference = \"torchvision\"\nscale = 1\nmean = [1, 2, 3]\nstd = [4, 5, 6]",
        )
        .unwrap();
        assert_eq!(plan.resize, Resize::ShortestEdge(40));
        assert_eq!(
            plan.shape().map(|shape| (shape.height, shape.width)),
            Some((32, 36))
        );
        assert_eq!(plan.resample, Resample::Lanczos);
        assert_eq!(plan.arithmetic, Arithmetic::Torchvision);
        assert_eq!(
            plan.crop.map(|crop| crop.rounding),
            Some(Rounding::Torchvision)
        );
        let Normalization { scale, mean, std } = plan.normalization;
        assert_eq!((scale, mean, std), (1.0, [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]));
    }

    #[test]
    fn values_that_make_no_tensor_are_refused() {
        for (text, named) in [
            ("resize = [0, 5]", "`preprocess.resize` is 0"),
            ("crop = [5, 70000]", "`preprocess.crop` is 70000"),
            ("resize = [5, 5]\nstd = [1, 0, 1]", "`preprocess.std` is 0"),
            ("resize = [5, 5]\nscale = nan", "`preprocess.scale` is NaN"),
            (
                "resize = [5, 5]\nshortest-edge = 5",
                "`preprocess.shortest-edge` is 5",
            ),
            ("mean = [0, 0, 0]", "`preprocess.resize` is missing"),
        ] {
            let error = applied(text).unwrap_err().to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }
}
