//! Transformers' `preprocessor_config.json`, with the defaults of each image processor's class.
//!
//! Followed are the Pillow processors of Transformers 5.23 (`…ImageProcessorPil`), which also read
//! what older releases and their feature extractors have written; and those that scale with
//! torchvision where the file names one: by a class that ends in `Fast`, or by `use_fast`.

use serde_json::Value;
use trommel_types::Normalization;

use super::reader::{JsonFile, edge, number, resample};
use crate::geometry::{Crop, Resize, Rounding};
use crate::{Arithmetic, ChannelOrder, ConfigError, Plan, Resample};

const HALF: [f32; 3] = [0.5; 3];
const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const IMAGENET_STD: [f32; 3] = [0.229, 0.224, 0.225];
const CLIP_MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const CLIP_STD: [f32; 3] = [0.268_629_54, 0.261_302_6, 0.275_777_1];

const CLASS: &str = "a class that resizes, crops and normalises one image at a time; state resize, \
                     resample, mean and std in [preprocess] of trommel.toml instead";
const SIZE: &str = "a length in pixels, {\"height\": …, \"width\": …} or {\"shortest_edge\": …}";
const CROP_SIZE: &str = "a length in pixels or {\"height\": …, \"width\": …}";
const RESAMPLE: &str =
    "a filter of Pillow: 0 nearest, 1 lanczos, 2 bilinear, 3 bicubic, 4 box, 5 hamming";

/// What a processor's class does where its file is silent.
#[derive(Debug, Clone, Copy)]
struct Family {
    /// How `size` becomes the scaling.
    rule: Rule,
    /// Whether a bare number in `size` means both sides, and not the shorter one.
    square: bool,
    size: Option<Size>,
    resample: Option<Resample>,
    center_crop: bool,
    crop: Option<u32>,
    mean: Option<[f32; 3]>,
    std: Option<[f32; 3]>,
}

/// How `size` becomes the scaling, where a class has a rule of its own.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    Plain,
    /// Below 384: shorter side to `size ÷ crop_pct`, then crop to `size`; from there on: squash.
    ConvNext,
    /// Shorter side to `size × 256 ÷ 224`.
    Levit,
    /// Shorter side to `size ÷ crop_pct`.
    PoolFormer,
    /// Plain, with its own arithmetic after scaling.
    EfficientNet,
    /// Plain, with flipped channels unless the file says otherwise, and never normalised.
    MobileVit,
    /// Of a class that is not known, the file must say everything.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Size {
    Exact { height: u32, width: u32 },
    ShortestEdge(u32),
}

pub(super) fn plan(file: &JsonFile) -> Result<Plan, ConfigError> {
    let class_key = if file.get("image_processor_type").is_some() {
        "image_processor_type"
    } else {
        "feature_extractor_type"
    };
    let class = file.text(class_key).unwrap_or("ImageProcessor");
    let Some(family) = family(class) else {
        return Err(file.invalid(class_key, CLASS));
    };
    if file.bool("do_pad", false)? && file.get("pad_size").is_some() {
        return Err(file.invalid("do_pad", "false: images are cropped and never padded"));
    }
    let (resize, mut crop) = scaling(file, &family)?;
    let arithmetic = arithmetic(file, class)?;
    if let (Arithmetic::Torchvision, Some(crop)) = (arithmetic, &mut crop) {
        crop.rounding = Rounding::TransformersFast;
    }
    let flip = file.bool("do_flip_channel_order", family.rule == Rule::MobileVit)?;
    let resample = match file
        .read_opt("resample", RESAMPLE, resample)?
        .or(family.resample)
    {
        Some(resample) => resample,
        None if resize == Resize::None => Resample::Bilinear,
        None => return Err(file.invalid("resample", RESAMPLE)),
    };
    let is_scaled = resize != Resize::None && arithmetic == Arithmetic::Torchvision;
    if is_scaled && matches!(resample, Resample::Box | Resample::Hamming) {
        return Err(file.invalid("resample", "a filter that torchvision has"));
    }
    Ok(Plan {
        family: class.to_owned(),
        resize,
        resample,
        arithmetic,
        crop,
        channel_order: if flip {
            ChannelOrder::Bgr
        } else {
            ChannelOrder::Rgb
        },
        normalization: normalization(file, &family)?,
    })
}

/// Whose scaling a processor uses.
fn arithmetic(file: &JsonFile, class: &str) -> Result<Arithmetic, ConfigError> {
    let is_fast = class.ends_with("Fast") || file.bool("use_fast", false)?;
    Ok(if is_fast {
        Arithmetic::Torchvision
    } else {
        Arithmetic::Pillow
    })
}

/// The defaults of a class; `None` for classes whose processors do something else.
fn family(class: &str) -> Option<Family> {
    let name = ["Fast", "Pil", "ImageProcessor", "FeatureExtractor"]
        .iter()
        .fold(class, |name, suffix| {
            name.strip_suffix(suffix).unwrap_or(name)
        });
    let exact = |edge| {
        Some(Size::Exact {
            height: edge,
            width: edge,
        })
    };
    let shortest = |edge| Some(Size::ShortestEdge(edge));
    let unknown = Family {
        rule: Rule::Unknown,
        square: true,
        size: None,
        resample: None,
        center_crop: false,
        crop: None,
        mean: None,
        std: None,
    };
    let vit = Family {
        rule: Rule::Plain,
        size: exact(224),
        resample: Some(Resample::Bilinear),
        mean: Some(HALF),
        std: Some(HALF),
        ..unknown
    };
    let siglip = Family {
        square: false,
        resample: Some(Resample::Bicubic),
        ..vit
    };
    // What crops to 224 after scaling the shorter side.
    let clip = Family {
        size: shortest(224),
        center_crop: true,
        crop: Some(224),
        mean: Some(CLIP_MEAN),
        std: Some(CLIP_STD),
        ..siglip
    };
    let imagenet = Family {
        mean: Some(IMAGENET_MEAN),
        std: Some(IMAGENET_STD),
        ..clip
    };
    let half = Family {
        mean: Some(HALF),
        std: Some(HALF),
        ..clip
    };
    let bicubic = Family {
        square: true,
        ..siglip
    };
    Some(match name {
        "ViT" => vit,
        "Siglip" => siglip,
        "Beit" => Family {
            crop: Some(224),
            ..bicubic
        },
        "DeiT" => Family {
            size: exact(256),
            center_crop: true,
            crop: Some(224),
            ..bicubic
        },
        "CLIP" | "Bit" => clip,
        "ConvNext" => Family {
            rule: Rule::ConvNext,
            size: shortest(384),
            ..siglip
        },
        "Levit" => Family {
            rule: Rule::Levit,
            ..imagenet
        },
        "PoolFormer" => Family {
            rule: Rule::PoolFormer,
            ..imagenet
        },
        "EfficientNet" => Family {
            rule: Rule::EfficientNet,
            size: exact(346),
            crop: Some(289),
            ..bicubic
        },
        "MobileNetV1" | "MobileNetV2" => Family {
            size: shortest(256),
            resample: Some(Resample::Bilinear),
            ..half
        },
        "MobileViT" => Family {
            rule: Rule::MobileVit,
            crop: Some(256),
            ..half
        },
        // Crops before it scales; colours by cluster; sides by divisor; patches of any number.
        "Perceiver" | "ImageGPT" | "TextNet" | "Siglip2" => return None,
        _ => unknown,
    })
}

fn scaling(file: &JsonFile, family: &Family) -> Result<(Resize, Option<Crop>), ConfigError> {
    let crops = file.bool("do_center_crop", family.center_crop)?;
    if family.rule == Rule::Unknown
        && file.get("do_center_crop").is_none()
        && file.get("crop_size").is_some()
    {
        return Err(file.invalid("do_center_crop", "true or false, beside crop_size"));
    }
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
    file.read_opt("size", SIZE, read)?
        .or(family.size)
        .ok_or_else(|| file.invalid("size", SIZE))
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
    let channels = |key, default: Option<[f32; 3]>| match default {
        None if file.get(key).is_none() => Err(file.invalid(key, "a number for each channel")),
        default => file.channels(key, default.unwrap_or_default()),
    };
    let image_std = || {
        let std = channels("image_std", family.std)?;
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
    // MobileViT's processor knows `do_normalize` and does not heed it.
    if family.rule != Rule::MobileVit && file.bool("do_normalize", true)? {
        normalization.mean = channels("image_mean", family.mean)?;
        normalization.std = image_std()?;
    }
    if family.rule == Rule::EfficientNet {
        // `rescale_offset` subtracts 1 after scaling; `include_top` divides by std once more.
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
