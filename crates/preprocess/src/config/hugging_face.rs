//! Transformers' `preprocessor_config.json`, with the defaults of each image processor class.
//!
//! Supports the processors of Transformers 5.23 with Pillow (`…ImageProcessorPil`) and with
//! torchvision (`…ImageProcessor`), which also read files of older releases and their feature
//! extractors; `reference.rs` chooses between the two. Classes and options are allow-lists: any
//! other is refused by name.

mod family;
mod options;

use serde_json::Value;
use trommel_types::Normalization;

use self::family::{FOLLOWED, Family, Rule, Size};
use super::reader::{JsonFile, edge, number, resample};
use super::reference::{self, Asked};
use crate::geometry::{Crop, Resize, Rounding};
use crate::{Arithmetic, ChannelOrder, ConfigError, Encoding, Plan};

const SIZE: &str = "a length in pixels, {\"height\": …, \"width\": …} or {\"shortest_edge\": …}";
const CROP_SIZE: &str = "a length in pixels or {\"height\": …, \"width\": …}";
const RESAMPLE: &str =
    "a filter of Pillow: 0 nearest, 1 lanczos, 2 bilinear, 3 bicubic, 4 box, 5 hamming";

/// The plan for a processor's file, in the folder of a model whose `config.json` is `model`.
pub(super) fn plan(
    file: &JsonFile,
    model: Option<&JsonFile>,
    asked: Asked,
) -> Result<Plan, ConfigError> {
    let (class, place) = class(file, model)?;
    let Some(family) = family::family(class) else {
        let classes: Vec<_> = FOLLOWED.map(|name| format!("{name}ImageProcessor")).into();
        let why = format!("followed are {}, and timm's transforms", classes.join(", "));
        return Err(place.not_followed(class_key(place), why));
    };
    options::check(file, family.rule)?;
    let (resize, mut crop) = scaling(file, &family)?;
    let (arithmetic, reason) = reference::of_transformers(asked, file, class, model)?;
    if let (Arithmetic::Torchvision, Some(crop)) = (arithmetic, &mut crop) {
        crop.rounding = Rounding::TransformersFast;
    }
    let flip = file.bool("do_flip_channel_order", family.rule == Rule::MobileVit)?;
    let resample = file.read_or("resample", family.resample, RESAMPLE, resample)?;
    Ok(Plan {
        family: class.to_owned(),
        read_from: place.name(),
        resize,
        resample,
        arithmetic,
        arithmetic_reason: reason,
        crop,
        channel_order: if flip {
            ChannelOrder::Bgr
        } else {
            ChannelOrder::Rgb
        },
        normalization: normalization(file, &family)?,
        encoding: Encoding::Raw,
    })
}

/// The processor's class, and the file that names it: the processor's own, or else `config.json`,
/// by the class or by the type of the model, as in Transformers.
fn class<'a>(
    file: &'a JsonFile,
    model: Option<&'a JsonFile>,
) -> Result<(&'a str, &'a JsonFile), ConfigError> {
    for key in ["image_processor_type", "feature_extractor_type"] {
        if file.get(key).is_some() {
            let class = file.text(key);
            return Ok((class.ok_or_else(|| file.invalid(key, "a name"))?, file));
        }
    }
    if let Some(model) = model {
        if let Some(class) = model.text("image_processor_type") {
            return Ok((class, model));
        }
        if model.get("auto_map.AutoImageProcessor").is_some() {
            return Err(model.not_followed("auto_map", "the processor is custom code"));
        }
        let by_type = model.text("model_type").and_then(family::class_of_model);
        if let Some(class) = by_type {
            return Ok((class, model));
        }
    }
    Err(file.not_followed(
        "image_processor_type",
        "neither this file nor config.json says which class it is for",
    ))
}

/// The key with the class name.
fn class_key(file: &JsonFile) -> &'static str {
    let keys = ["image_processor_type", "feature_extractor_type"];
    let named = keys.into_iter().find(|key| file.get(key).is_some());
    named.unwrap_or("model_type")
}

fn scaling(file: &JsonFile, family: &Family) -> Result<(Resize, Option<Crop>), ConfigError> {
    let crops = file.bool("do_center_crop", family.center_crop)?;
    let crop = if crops {
        Some(crop_size(file, family)?)
    } else {
        None
    };
    if !file.bool("do_resize", true)? {
        return Ok((Resize::None, crop));
    }
    let resize = match (family.rule, size(file, family)?) {
        (Rule::ConvNext, Size::ShortestEdge(edge)) if edge < 384 => {
            if crops {
                return Err(file.invalid("do_center_crop", "false: this class crops by size"));
            }
            let scaled = f64::from(edge) / crop_pct(file, 224.0 / 256.0)?;
            return Ok((
                Resize::ShortestEdge(scaled as u32),
                Some(cropped(edge, edge)),
            ));
        }
        (Rule::ConvNext, Size::ShortestEdge(edge)) => Resize::Exact {
            height: edge,
            width: edge,
        },
        (Rule::ConvNext, Size::Exact { .. }) => {
            return Err(file.invalid("size", "{\"shortest_edge\": …}"));
        }
        (Rule::Levit, Size::ShortestEdge(edge)) => {
            Resize::ShortestEdge((256.0 / 224.0 * f64::from(edge)) as u32)
        }
        (Rule::PoolFormer, size) => {
            let crop_pct = crop_pct(file, 0.9)?;
            let scaled = |edge: u32| (f64::from(edge) / crop_pct) as u32;
            match size {
                Size::Exact { height, width } if height != width => Resize::Exact {
                    height: scaled(height),
                    width: scaled(width),
                },
                Size::Exact { height: edge, .. } | Size::ShortestEdge(edge) => {
                    Resize::ShortestEdge(scaled(edge))
                }
            }
        }
        (_, Size::ShortestEdge(edge)) => Resize::ShortestEdge(edge),
        (_, Size::Exact { height, width }) => Resize::Exact { height, width },
    };
    Ok((resize, crop))
}

fn size(file: &JsonFile, family: &Family) -> Result<Size, ConfigError> {
    let is_bare = file.get("size").is_some_and(Value::is_number);
    if is_bare && file.bool("default_to_square", family.square)? != family.square {
        // Releases differ in whether they use it.
        return Err(file.not_followed(
            "default_to_square",
            "it contradicts the class, and `size` is a bare number",
        ));
    }
    let read = |value: &Value| {
        if let Some(one) = edge(value) {
            return Some(if family.square {
                Size::Exact {
                    height: one,
                    width: one,
                }
            } else {
                Size::ShortestEdge(one)
            });
        }
        if let Some((height, width)) = pair(value) {
            return Some(Size::Exact { height, width });
        }
        let shortest = value.get("shortest_edge").and_then(edge)?;
        let longest = value
            .get("longest_edge")
            .is_some_and(|edge| !edge.is_null());
        (!longest).then_some(Size::ShortestEdge(shortest))
    };
    file.read_or("size", family.size, SIZE, read)
}

fn crop_size(file: &JsonFile, family: &Family) -> Result<Crop, ConfigError> {
    let read = |value: &Value| edge(value).map(|one| (one, one)).or_else(|| pair(value));
    let (height, width) = file
        .read_opt("crop_size", CROP_SIZE, read)?
        .or(family.crop.map(|edge| (edge, edge)))
        .ok_or_else(|| file.invalid("crop_size", CROP_SIZE))?;
    Ok(cropped(height, width))
}

/// Height and width, named or in this order.
fn pair(value: &Value) -> Option<(u32, u32)> {
    match value {
        Value::Array(sides) => match sides.as_slice() {
            [height, width] => Some((edge(height)?, edge(width)?)),
            _ => None,
        },
        named => Some((
            named.get("height").and_then(edge)?,
            named.get("width").and_then(edge)?,
        )),
    }
}

fn cropped(height: u32, width: u32) -> Crop {
    Crop {
        height,
        width,
        rounding: Rounding::Transformers,
        fill: [0; 3],
    }
}

fn crop_pct(file: &JsonFile, default: f64) -> Result<f64, ConfigError> {
    let share = |value: &Value| {
        value
            .as_f64()
            .filter(|share| (0.01..=100.0).contains(share))
    };
    file.read_or(
        "crop_pct",
        default,
        "a share of the image, such as 0.875",
        share,
    )
}

fn normalization(file: &JsonFile, family: &Family) -> Result<Normalization, ConfigError> {
    let image_std = || {
        let std = file.channels("image_std", family.std)?;
        if std.contains(&0.0) {
            Err(file.invalid("image_std", "no zero"))
        } else {
            Ok(std)
        }
    };
    let rescales = file.bool("do_rescale", true)?;
    let mut normalization = Normalization {
        scale: 1.0,
        ..Normalization::default()
    };
    if rescales {
        let factor = file.read_opt("rescale_factor", "a number", number)?;
        normalization.scale = factor.unwrap_or(Normalization::default().scale);
    }
    // MobileViT's processor has `do_normalize` and ignores it.
    if family.rule != Rule::MobileVit && file.bool("do_normalize", true)? {
        normalization.mean = file.channels("image_mean", family.mean)?;
        normalization.std = image_std()?;
    }
    if family.rule == Rule::EfficientNet {
        // `rescale_offset` subtracts 1 after scaling; `include_top` divides by std again.
        if rescales && file.bool("rescale_offset", false)? {
            normalization.mean = normalization.mean.map(|mean| mean + 1.0);
        }
        if file.bool("include_top", true)? {
            let again = image_std()?;
            for (std, again) in normalization.std.iter_mut().zip(again) {
                *std *= again;
            }
        }
    }
    Ok(normalization)
}

#[cfg(test)]
mod tests;
