//! Supported options of processors, and options without effect. All others are refused.

use serde_json::Value;

use super::family::Rule;
use crate::ConfigError;
use crate::config::reader::JsonFile;

/// Options of every class.
const FOLLOWED: [&str; 10] = [
    "crop_size",
    "do_center_crop",
    "do_normalize",
    "do_rescale",
    "do_resize",
    "image_mean",
    "image_std",
    "resample",
    "rescale_factor",
    "size",
];

/// Options that do not change the pixels of a single RGB image.
const WITHOUT_EFFECT: [&str; 20] = [
    "_processor_class",
    "_valid_processor_keys",
    "data_format", // the order of a tensor's axes is read from the model
    "device",
    "disable_grouping",
    "do_convert_rgb", // images are always RGB
    "do_reduce_labels",
    "feature_extractor_type",
    "image_processor_type",
    "image_seq_len",
    "image_seq_length",
    "input_data_format",
    "model_input_names",
    "pad_size", // without `do_pad`, which is refused
    "processor_class",
    "reduce_labels",
    "return_tensors",
    "transformers_version",
    "use_fast",          // says whose arithmetic is followed
    "default_to_square", // looked at with `size`
];

/// Refuses every option of the class that is not supported, and every unknown one.
///
/// A switch that is off and an option that is null have no effect.
pub(super) fn check(file: &JsonFile, rule: Rule) -> Result<(), ConfigError> {
    for (key, value) in file.entries() {
        let is_off = value.is_null() || (*value == Value::Bool(false) && key.starts_with("do_"));
        let own: &[&str] = match rule {
            Rule::ConvNext | Rule::PoolFormer => &["crop_pct"],
            Rule::EfficientNet => &["include_top", "rescale_offset"],
            Rule::MobileVit => &["do_flip_channel_order"],
            Rule::Plain | Rule::Levit | Rule::Segformer => &[],
        };
        let lists = [&FOLLOWED[..], &WITHOUT_EFFECT, own];
        if is_off || lists.iter().any(|list| list.contains(&key)) {
            continue;
        }
        if key == "auto_map" {
            check_auto_map(file, value)?;
            continue;
        }
        let why = match key {
            "do_pad" => "images are scaled and cropped, never padded",
            "do_flip_channel_order" => "this class does not flip channels",
            "size_divisor" | "resize_short" | "do_thumbnail" | "do_align_long_axis" => {
                "sizes come from `size` and `crop_size` alone"
            }
            "apply_ocr" => "no text is read from images",
            _ => "it is not among the options of this class that are known",
        };
        return Err(file.not_followed(key, why));
    }
    if rule == Rule::Segformer && file.bool("do_center_crop", false)? {
        return Err(file.not_followed("do_center_crop", "this class never crops"));
    }
    Ok(())
}

/// A processor with code in the folder is not run, so its behaviour is unknown.
fn check_auto_map(file: &JsonFile, value: &Value) -> Result<(), ConfigError> {
    match value {
        Value::Object(classes)
            if ![
                "AutoImageProcessor",
                "AutoFeatureExtractor",
                "AutoProcessor",
            ]
            .iter()
            .any(|class| classes.contains_key(*class)) =>
        {
            Ok(())
        }
        _ => Err(file.not_followed("auto_map", "the processor is custom code")),
    }
}
