use std::path::Path;

use trommel_types::Reference;

use super::family::{CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD};
use super::*;
use crate::Resample;

const AUTO: Asked = Asked {
    reference: Reference::Auto,
    by: "",
};

fn read(text: &str) -> Result<Plan, ConfigError> {
    read_of_model(text, None)
}

/// The plan of a processor's file in the folder of a model with this `config.json`.
fn read_of_model(text: &str, model: Option<&str>) -> Result<Plan, ConfigError> {
    let parse = |name: &str, text: &str| JsonFile::parse(Path::new(name), text);
    let model = model.map(|text| parse("config.json", text)).transpose()?;
    let file = parse("preprocessor_config.json", text)?;
    plan(&file, model.as_ref(), AUTO)
}

fn geometry(text: &str) -> (Resize, Option<(u32, u32)>) {
    let plan = read(text).unwrap();
    (plan.resize, plan.crop.map(|crop| (crop.height, crop.width)))
}

/// The plan of a class, with further keys of its file.
fn class(name: &str, keys: &str) -> Plan {
    read(&format!(
        r#"{{"image_processor_type":"{name}ImageProcessor"{keys}}}"#
    ))
    .unwrap()
}

fn exact(edge: u32) -> Resize {
    Resize::Exact {
        height: edge,
        width: edge,
    }
}

fn error(text: &str) -> String {
    read(text).unwrap_err().to_string()
}

#[test]
fn old_and_new_key_styles_mean_the_same() {
    for text in [
        r#"{"feature_extractor_type":"ViTFeatureExtractor","size":224}"#,
        r#"{"image_processor_type":"ViTImageProcessor","size":{"height":224,"width":224}}"#,
        r#"{"image_processor_type":"ViTImageProcessorFast","size":[224,224]}"#,
        r#"{"image_processor_type":"ViTImageProcessorPil","size":null}"#,
        r#"{"image_processor_type":"ViTFeatureExtractor","size":224}"#,
    ] {
        assert_eq!(geometry(text), (exact(224), None), "{text}");
    }
    for text in [
        r#"{"image_processor_type":"CLIPImageProcessorFast","size":336,"crop_size":336}"#,
        r#"{"feature_extractor_type":"CLIPFeatureExtractor","size":{"shortest_edge":336},
            "crop_size":{"height":336,"width":336}}"#,
    ] {
        assert_eq!(
            geometry(text),
            (Resize::ShortestEdge(336), Some((336, 336))),
            "{text}"
        );
    }
}

#[test]
fn every_family_has_the_defaults_of_its_class() {
    use Resample::{Bicubic, Bilinear};
    let shortest = Resize::ShortestEdge;
    let square = |edge| Some((edge, edge));
    let imagenet = (IMAGENET_MEAN, IMAGENET_STD);
    let clip = (CLIP_MEAN, CLIP_STD);
    let half = (HALF, HALF);
    for (name, resize, crop, resample, colours) in [
        ("ViT", exact(224), None, Bilinear, half),
        ("DeiT", exact(256), square(224), Bicubic, half),
        ("Beit", exact(224), None, Bicubic, half),
        ("ConvNext", exact(384), None, Bicubic, half),
        ("CLIP", shortest(224), square(224), Bicubic, clip),
        ("Bit", shortest(224), square(224), Bicubic, clip),
        ("ChineseCLIP", shortest(224), square(224), Bicubic, clip),
        ("Blip", exact(384), None, Bicubic, clip),
        ("Pvt", exact(224), None, Bicubic, imagenet),
        ("Segformer", exact(512), None, Bilinear, imagenet),
        ("Siglip", exact(224), None, Bicubic, half),
        ("EfficientNet", exact(346), None, Bicubic, (HALF, [0.25; 3])),
        ("MobileNetV1", shortest(256), square(224), Bilinear, half),
        ("MobileNetV2", shortest(256), square(224), Bilinear, half),
        (
            "MobileViT",
            shortest(224),
            square(256),
            Bicubic,
            ([0.0; 3], [1.0; 3]),
        ),
        ("Levit", shortest(256), square(224), Bicubic, imagenet),
        ("PoolFormer", shortest(248), square(224), Bicubic, imagenet),
    ] {
        let plan = class(name, "");
        assert_eq!(plan.resize, resize, "{name}");
        assert_eq!(
            plan.crop.map(|crop| (crop.height, crop.width)),
            crop,
            "{name}"
        );
        assert_eq!(plan.resample, resample, "{name}");
        assert_eq!(
            (plan.normalization.mean, plan.normalization.std),
            colours,
            "{name}"
        );
        assert_eq!(plan.normalization.scale, 1.0 / 255.0, "{name}");
        let bgr = plan.channel_order == ChannelOrder::Bgr;
        assert_eq!(bgr, name == "MobileViT", "{name}");
    }
}

#[test]
fn convnext_crops_below_384() {
    let sized = |edge: u32, more: &str| {
        let keys = format!(r#","size":{{"shortest_edge":{edge}}}{more}"#);
        let plan = class("ConvNext", &keys);
        (plan.resize, plan.crop.map(|crop| crop.width))
    };
    assert_eq!(sized(224, ""), (Resize::ShortestEdge(256), Some(224)));
    // int(224 / 0.9) = int(248.9)
    assert_eq!(
        sized(224, r#","crop_pct":0.9"#),
        (Resize::ShortestEdge(248), Some(224))
    );
    assert_eq!(sized(383, ""), (Resize::ShortestEdge(437), Some(383)));
    assert_eq!(sized(384, ""), (exact(384), None));
    assert_eq!(sized(512, ""), (exact(512), None));
    let plan = class(
        "ConvNext",
        r#","size":{"shortest_edge":224},"do_resize":false"#,
    );
    assert_eq!((plan.resize, plan.crop), (Resize::None, None));
}

#[test]
fn levit_and_poolformer_scale_by_their_rules() {
    let resize = |name, keys| class(name, keys).resize;
    assert_eq!(
        resize("Levit", r#","size":{"shortest_edge":225}"#),
        Resize::ShortestEdge(257)
    );
    assert_eq!(
        resize("Levit", r#","size":{"height":9,"width":9}"#),
        exact(9)
    );
    let of = |keys| resize("PoolFormer", keys);
    assert_eq!(of(r#","crop_pct":0.95"#), Resize::ShortestEdge(235));
    assert_eq!(
        of(r#","size":{"height":224,"width":224}"#),
        Resize::ShortestEdge(248)
    );
    assert_eq!(
        of(r#","size":{"height":90,"width":180}"#),
        Resize::Exact {
            height: 100,
            width: 200
        }
    );
}

#[test]
fn efficientnet_normalises_as_its_flags_say() {
    let of = |keys: &str| {
        let keys = format!(r#","image_mean":[0.25,0.5,0.75],"image_std":0.5{keys}"#);
        class("EfficientNet", &keys).normalization
    };
    let (mean, later) = ([0.25, 0.5, 0.75], [1.25, 1.5, 1.75]);
    for (keys, mean, std) in [
        ("", mean, 0.25),
        (r#","include_top":false"#, mean, 0.5),
        (
            r#","rescale_offset":true,"rescale_factor":0.0078125"#,
            later,
            0.25,
        ),
        (r#","do_normalize":false"#, [0.0; 3], 0.5),
        (
            r#","do_normalize":false,"include_top":false"#,
            [0.0; 3],
            1.0,
        ),
        (r#","rescale_offset":true,"do_rescale":false"#, mean, 0.25),
    ] {
        assert_eq!((of(keys).mean, of(keys).std), (mean, [std; 3]), "{keys}");
    }
    assert_eq!(of(r#","rescale_factor":0.0078125"#).scale, 1.0 / 128.0);
    assert_eq!(of(r#","do_rescale":false"#).scale, 1.0);
}

#[test]
fn resampling_has_pillows_codes() {
    use Resample::{Bicubic, Bilinear, Box, Hamming, Lanczos, Nearest};
    for (code, filter) in [Nearest, Lanczos, Bilinear, Bicubic, Box, Hamming]
        .into_iter()
        .enumerate()
    {
        let keys = format!(r#","use_fast":false,"resample":{code}"#);
        assert_eq!(class("ViT", &keys).resample, filter);
    }
}

#[test]
fn flags_switch_steps_off() {
    let plan = class(
        "CLIP",
        r#","do_resize":false,"do_center_crop":false,"do_normalize":false,"do_rescale":false"#,
    );
    assert_eq!(
        (plan.resize, plan.crop, plan.shape()),
        (Resize::None, None, None)
    );
    let Normalization { scale, mean, std } = plan.normalization;
    assert_eq!((scale, mean, std), (1.0, [0.0; 3], [1.0; 3]));
    let plain = class("MobileViT", r#","do_flip_channel_order":false"#);
    assert_eq!(plain.channel_order, ChannelOrder::Rgb);
}

/// Every key is one that plain processors have, so that only the class tells what is done.
#[test]
fn a_class_that_is_not_followed_is_refused_by_name() {
    let keys = r#""size":{"height":32,"width":48},"resample":1,"image_mean":0.5,"image_std":0.5"#;
    for class in [
        "NewImageProcessor",
        "PPLCNetImageProcessor",
        "DonutImageProcessor",
        "VideoMAEImageProcessor",
        "LayoutLMv3ImageProcessor",
        "LayoutLMv3FeatureExtractor",
        "PerceiverImageProcessor",
        "ImageGPTImageProcessor",
        "TextNetImageProcessor",
        "Siglip2ImageProcessor",
        "Siglip2ImageProcessorFast",
        "DINOv3ViTImageProcessor",
        "OwlViTImageProcessor",
        "ViTImageProcessorNew",
        "MyViTImageProcessor",
        "ImageProcessor",
        "ViT",
    ] {
        let error = error(&format!(r#"{{"image_processor_type":"{class}",{keys}}}"#));
        let start = format!("`image_processor_type` is \"{class}\", which is not followed: ");
        assert!(error.contains(&start), "{error}");
        for words in [
            "ViTImageProcessor, and timm's",
            "[preprocess] of trommel.toml",
        ] {
            assert!(error.contains(words), "{error}");
        }
    }
}

#[test]
fn an_option_that_is_not_followed_is_refused_by_name() {
    for (name, option) in [
        ("ViT", r#""do_pad":true"#),
        ("ViT", r#""do_pad":true,"pad_size":300"#),
        ("CLIP", r#""size_divisor":32"#),
        ("ViT", r#""resize_short":256"#),
        ("ViT", r#""do_thumbnail":true"#),
        ("ViT", r#""do_align_long_axis":true"#),
        ("ViT", r#""apply_ocr":true"#),
        ("ViT", r#""max_size":1333"#),
        ("ViT", r#""crop_pct":0.9"#),
        ("ViT", r#""do_flip_channel_order":true"#),
        ("ViT", r#""include_top":true"#),
        ("CLIP", r#""use_square_size":true"#),
        ("ViT", r#""do_something_new":true"#),
        ("ViT", r#""resampling_mode":"area""#),
        (
            "ViT",
            r#""auto_map":{"AutoImageProcessor":"image_processing.MyProcessor"}"#,
        ),
        (
            "ViT",
            r#""auto_map":{"AutoFeatureExtractor":"image_processing.MyProcessor"}"#,
        ),
        ("ViT", r#""auto_map":"image_processing.MyProcessor""#),
        ("Segformer", r#""do_center_crop":true,"crop_size":224"#),
        ("ViT", r#""default_to_square":false,"size":224"#),
        ("CLIP", r#""default_to_square":true,"size":224"#),
    ] {
        let error = error(&format!(
            r#"{{"image_processor_type":"{name}ImageProcessor",{option}}}"#
        ));
        let key = option.split('"').nth(1).unwrap();
        let start = format!("preprocessor_config.json: `{key}` is ");
        assert!(error.starts_with(&start), "{error}");
        for words in ["which is not followed: ", "[preprocess] of trommel.toml"] {
            assert!(error.contains(words), "{error}");
        }
    }
}

/// As Transformers 4.57 and 5.23 write them: every key of theirs that changes nothing.
#[test]
fn what_asks_for_nothing_is_passed_over() {
    let plain = class("ViT", "");
    for option in [
        r#""do_pad":false,"pad_size":null"#,
        r#""do_pad":null,"size_divisor":null"#,
        r#""do_flip_channel_order":false,"do_something_new":false"#,
        r#""do_convert_rgb":true,"do_reduce_labels":true,"processor_class":"ViTProcessor""#,
        r#""data_format":"channels_first","device":null,"disable_grouping":null"#,
        r#""default_to_square":true,"input_data_format":null,"return_tensors":null"#,
        r#""_valid_processor_keys":["images"],"feature_extractor_type":"ViTFeatureExtractor""#,
        r#""auto_map":{"AutoConfig":"configuration.Mine"}"#,
    ] {
        assert_eq!(class("ViT", &format!(",{option}")), plain, "{option}");
    }
}

#[test]
fn without_a_class_the_model_decides_as_in_transformers() {
    let file = r#"{"size":{"height":32,"width":48}}"#;
    let of = |model: &str| read_of_model(file, Some(model));
    for (model, class) in [
        (r#"{"model_type":"vit"}"#, "ViTImageProcessor"),
        (r#"{"model_type":"swinv2"}"#, "ViTImageProcessor"),
        (r#"{"model_type":"dinov2"}"#, "BitImageProcessor"),
        (
            r#"{"model_type":"vit","image_processor_type":"PvtImageProcessor"}"#,
            "PvtImageProcessor",
        ),
    ] {
        let plan = of(model).unwrap();
        assert_eq!((plan.family(), &*plan.read_from), (class, "config.json"));
    }
    for model in [
        r#"{"model_type":"donut-swin"}"#,
        r#"{"model_type":"own","auto_map":{"AutoImageProcessor":"a.B"}}"#,
        "{}",
    ] {
        let error = of(model).unwrap_err().to_string();
        assert!(error.contains("which is not followed"), "{error}");
    }
    let donut = r#"{"model_type":"vit","image_processor_type":"DonutImageProcessor"}"#;
    let error = of(donut).unwrap_err().to_string();
    assert!(
        error.starts_with("config.json: `image_processor_type` is \"Donut"),
        "{error}"
    );
    assert!(read(file).is_err());
}

#[test]
fn the_plan_says_whom_it_follows_and_why() {
    let plan = |config: &str| {
        read_of_model(
            r#"{"image_processor_type":"CLIPImageProcessor"}"#,
            Some(config),
        )
    };
    let old = plan(r#"{"transformers_version":"4.57.1"}"#).unwrap();
    let new = plan(r#"{"transformers_version":"5.23.0"}"#).unwrap();
    assert_eq!(old.arithmetic, Arithmetic::Pillow);
    assert_eq!(old.crop.unwrap().rounding, Rounding::Transformers);
    assert_eq!(new.arithmetic, Arithmetic::Torchvision);
    assert_eq!(new.crop.unwrap().rounding, Rounding::TransformersFast);
    assert_eq!(
        new.arithmetic_reason,
        "config.json was written by Transformers 5.23.0"
    );
    assert_eq!(new.read_from, "preprocessor_config.json");
}

#[test]
fn a_wrong_value_is_named_with_what_is_expected() {
    let vit = |keys: &str| {
        error(&format!(
            r#"{{"image_processor_type":"ViTImageProcessor",{keys}}}"#
        ))
    };
    let starts = |text: String, start: &str| {
        let start = format!("preprocessor_config.json: {start}");
        assert!(text.starts_with(&start), "{text}");
    };
    starts(
        vit(r#""resample":9"#),
        "`resample` is 9, expected a filter of Pillow: 0 nearest",
    );
    starts(vit(r#""size":0"#), "`size` is 0, expected a length");
    starts(
        vit(r#""size":{"shortest_edge":9,"longest_edge":12}"#),
        "`size` is {",
    );
    starts(vit(r#""size":{"longest_edge":12}"#), "`size` is {");
    starts(vit(r#""do_center_crop":true"#), "`crop_size` is missing");
    starts(
        vit(r#""do_resize":1"#),
        "`do_resize` is 1, expected true or false",
    );
    starts(
        vit(r#""image_mean":[0.5,0.5]"#),
        "`image_mean` is [0.5,0.5], expected one finite",
    );
    starts(
        vit(r#""image_std":[0.5,0,0.5]"#),
        "`image_std` is [0.5,0,0.5], expected no zero",
    );
    let convnext = |keys: &str| {
        error(&format!(
            r#"{{"image_processor_type":"ConvNextImageProcessor",{keys}}}"#
        ))
    };
    starts(convnext(r#""size":{"height":9,"width":9}"#), "`size` is {");
    starts(convnext(r#""size":224,"crop_pct":0"#), "`crop_pct` is 0");
    starts(
        convnext(r#""size":224,"crop_pct":"most""#),
        "`crop_pct` is \"most\"",
    );
}
