//! timm's `config.json`: the evaluation transform of `pretrained_cfg`.

use serde_json::Value;
use trommel_types::{Normalization, Reference};

use super::reader::{JsonFile, edge, resample};
use super::reference::Asked;
use crate::geometry::{Crop, Resize, Rounding};
use crate::{Arithmetic, ChannelOrder, ConfigError, Encoding, Plan, Resample};

const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const IMAGENET_MEAN_F64: [f64; 3] = [0.485, 0.456, 0.406];
const IMAGENET_STD: [f32; 3] = [0.229, 0.224, 0.225];

/// Whether a Transformers file only refers to timm's.
pub(super) fn is_wrapper(file: &JsonFile) -> bool {
    file.text("image_processor_type")
        .is_some_and(|name| name.starts_with("TimmWrapper"))
}

/// The plan of a timm model; `None` if the file is not a timm model's.
///
/// As `resolve_data_config` and `transforms_imagenet_eval` of timm 1.0 with Pillow images.
pub(super) fn plan(file: &JsonFile, asked: Asked) -> Result<Option<Plan>, ConfigError> {
    let nested = file.get("pretrained_cfg").is_some();
    // Older timm files have the settings at the top level; another library's `input_size` may mean
    // anything.
    if !nested && file.get("architecture").is_none() {
        return Ok(None);
    }
    let named = |name: &str| {
        if nested {
            format!("pretrained_cfg.{name}")
        } else {
            name.to_owned()
        }
    };
    let size = file.read_opt(&named("input_size"), "[3, height, width]", input_size)?;
    let (height, width) = match size {
        Some(size) => size,
        None if nested => (224, 224),
        None => return Ok(None),
    };
    if asked.reference == Reference::Torchvision {
        return Err(file.without_choice(
            "preprocess.reference",
            "torchvision",
            "auto or pillow: timm's transforms scale with Pillow",
        ));
    }
    let mean = file.channels(&named("mean"), IMAGENET_MEAN)?;
    let std = file.channels(&named("std"), IMAGENET_STD)?;
    if std.contains(&0.0) {
        return Err(file.invalid(&named("std"), "no zero"));
    }

    let share = |value: &Value| {
        value
            .as_f64()
            .filter(|share| (0.01..=100.0).contains(share))
    };
    let expected = "a share of the image, such as 0.875";
    let crop_pct = file.read_or(&named("crop_pct"), 0.875, expected, share)?;
    let scaled = |edge: u32| (f64::from(edge) / crop_pct).floor() as u32;
    let (to_height, to_width) = (scaled(height), scaled(width));
    let mode = |value: &Value| {
        Some(match value.as_str()? {
            "squash" => (
                Resize::Exact {
                    height: to_height,
                    width: to_width,
                },
                [0; 3],
            ),
            "border" => {
                // Rounded as a double, as in Python: `mean` as `f32` may round the other way.
                let numbers = file.get(&named("mean")).and_then(Value::as_array);
                let exact = |index: usize| {
                    let number = numbers.and_then(|numbers| numbers.get(index)?.as_f64());
                    number.unwrap_or_else(|| IMAGENET_MEAN_F64[index])
                };
                let fill = [0, 1, 2].map(|index| (255.0 * exact(index)).round_ties_even() as u8);
                (
                    Resize::Fit {
                        height: to_height,
                        width: to_width,
                    },
                    fill,
                )
            }
            "center" => (center(to_height, to_width), [0; 3]),
            _ => return None,
        })
    };
    let default = (center(to_height, to_width), [0; 3]);
    let (resize, fill) = file.read_or(
        &named("crop_mode"),
        default,
        "center, squash or border",
        mode,
    )?;
    Ok(Some(Plan {
        family: "timm".to_owned(),
        read_from: file.name(),
        resize,
        resample: file.read_or(
            &named("interpolation"),
            Resample::Bicubic,
            "bilinear, bicubic, nearest, box, hamming or lanczos",
            resample,
        )?,
        arithmetic: Arithmetic::Pillow,
        arithmetic_reason: "timm's transforms scale with Pillow".to_owned(),
        crop: Some(Crop {
            height,
            width,
            rounding: Rounding::Torchvision,
            fill,
        }),
        channel_order: ChannelOrder::Rgb,
        normalization: Normalization {
            mean,
            std,
            ..Normalization::default()
        },
        encoding: Encoding::Raw,
    }))
}

fn center(height: u32, width: u32) -> Resize {
    if height == width {
        Resize::ShortestEdge(height)
    } else {
        Resize::Cover { height, width }
    }
}

fn input_size(value: &Value) -> Option<(u32, u32)> {
    match value.as_array()?.as_slice() {
        [channels, height, width] if channels.as_u64() == Some(3) => {
            Some((edge(height)?, edge(width)?))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(text: &str) -> Result<Option<Plan>, ConfigError> {
        let asked = Asked {
            reference: Reference::Auto,
            by: "",
        };
        plan(&JsonFile::parse(Path::new("config.json"), text)?, asked)
    }

    fn crop(height: u32, width: u32, fill: [u8; 3]) -> Option<Crop> {
        Some(Crop {
            height,
            width,
            rounding: Rounding::Torchvision,
            fill,
        })
    }

    #[test]
    fn a_square_center_crop_scales_the_shorter_side() {
        let plan = read(
            r#"{"architecture":"x","pretrained_cfg":{"input_size":[3,224,224],"crop_pct":0.95,
                "interpolation":"bilinear","crop_mode":"center","mean":[0.5,0.4,0.3],"std":[1,2,3]}}"#,
        )
        .unwrap()
        .unwrap();
        // floor(224 / 0.95) = floor(235.79)
        assert_eq!(
            (plan.resize, plan.crop),
            (Resize::ShortestEdge(235), crop(224, 224, [0; 3]))
        );
        assert_eq!(plan.resample, Resample::Bilinear);
        assert_eq!(plan.normalization.mean, [0.5, 0.4, 0.3]);
        assert_eq!(plan.normalization.std, [1.0, 2.0, 3.0]);
    }

    #[test]
    fn what_the_file_omits_is_as_timm_has_it() {
        let plan = read(r#"{"pretrained_cfg":{}}"#).unwrap().unwrap();
        assert_eq!(
            (plan.resize, plan.crop),
            (Resize::ShortestEdge(256), crop(224, 224, [0; 3]))
        );
        assert_eq!(plan.resample, Resample::Bicubic);
        assert_eq!(plan.normalization.mean, IMAGENET_MEAN);
        assert_eq!(plan.normalization.std, IMAGENET_STD);
    }

    #[test]
    fn crop_modes() {
        let of = |mode: &str| {
            let text = format!(
                r#"{{"architecture":"x","input_size":[3,256,320],"crop_pct":0.8,"mean":[0.5,0.3,0.25],"crop_mode":"{mode}"}}"#
            );
            let plan = read(&text).unwrap().unwrap();
            (plan.resize, plan.crop)
        };
        let (height, width) = (320, 400);
        assert_eq!(
            of("center"),
            (Resize::Cover { height, width }, crop(256, 320, [0; 3]))
        );
        assert_eq!(
            of("squash"),
            (Resize::Exact { height, width }, crop(256, 320, [0; 3]))
        );
        // round(127.5) = 128, round(76.5) = 76 and round(63.75) = 64 in Python.
        assert_eq!(
            of("border"),
            (Resize::Fit { height, width }, crop(256, 320, [128, 76, 64]))
        );
    }

    #[test]
    fn a_model_of_another_library_is_left_alone() {
        for text in [
            r#"{"model_type":"vit","image_size":224}"#,
            r#"{"model_type":"own","input_size":[3,224,224]}"#,
        ] {
            assert_eq!(read(text).unwrap(), None, "{text}");
        }
    }

    #[test]
    fn errors_name_file_key_and_value() {
        let error = |text: &str| read(text).unwrap_err().to_string();
        assert_eq!(
            error(r#"{"pretrained_cfg":{"input_size":[1,28,28]}}"#),
            "config.json: `pretrained_cfg.input_size` is [1,28,28], expected [3, height, width]"
        );
        assert_eq!(
            error(r#"{"pretrained_cfg":{"crop_mode":"corner"}}"#),
            "config.json: `pretrained_cfg.crop_mode` is \"corner\", expected center, squash or border"
        );
        assert!(
            error(r#"{"pretrained_cfg":{"crop_pct":0}}"#)
                .contains("`pretrained_cfg.crop_pct` is 0")
        );
        assert!(error(r#"{"pretrained_cfg":{"interpolation":"random"}}"#).contains("random"));
    }
}
