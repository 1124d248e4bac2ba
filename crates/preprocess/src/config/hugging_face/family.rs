//! The supported image processors, with their defaults.

use crate::Resample;

pub(super) const HALF: [f32; 3] = [0.5; 3];
pub(super) const IMAGENET_MEAN: [f32; 3] = [0.485, 0.456, 0.406];
pub(super) const IMAGENET_STD: [f32; 3] = [0.229, 0.224, 0.225];
pub(super) const CLIP_MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
pub(super) const CLIP_STD: [f32; 3] = [0.268_629_54, 0.261_302_6, 0.275_777_1];

/// The defaults of a processor class.
#[derive(Debug, Clone, Copy)]
pub(super) struct Family {
    /// How `size` determines the resize.
    pub(super) rule: Rule,
    /// Whether a single number in `size` means both sides instead of the shorter one.
    pub(super) square: bool,
    pub(super) size: Size,
    pub(super) resample: Resample,
    pub(super) center_crop: bool,
    pub(super) crop: Option<u32>,
    pub(super) mean: [f32; 3],
    pub(super) std: [f32; 3],
}

/// How `size` determines the resize in classes with their own rules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Rule {
    Plain,
    /// Below 384: shorter side to `size ÷ crop_pct`, then crop to `size`; from 384 on: squash.
    ConvNext,
    /// Shorter side to `size × 256 ÷ 224`.
    Levit,
    /// Shorter side to `size ÷ crop_pct`.
    PoolFormer,
    /// Plain, with additional arithmetic after rescaling.
    EfficientNet,
    /// Plain, with flipped channels by default, and never normalised.
    MobileVit,
    /// Plain, and never cropped.
    Segformer,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Size {
    Exact { height: u32, width: u32 },
    ShortestEdge(u32),
}

/// Names of the supported classes, without their suffixes.
pub(super) const FOLLOWED: [&str; 17] = [
    "Beit",
    "Bit",
    "Blip",
    "CLIP",
    "ChineseCLIP",
    "ConvNext",
    "DeiT",
    "EfficientNet",
    "Levit",
    "MobileNetV1",
    "MobileNetV2",
    "MobileViT",
    "PoolFormer",
    "Pvt",
    "Segformer",
    "Siglip",
    "ViT",
];

/// The suffixes of class names.
const SUFFIXES: [&str; 4] = [
    "ImageProcessor",
    "ImageProcessorFast",
    "ImageProcessorPil",
    "FeatureExtractor",
];

/// The defaults of a class; `None` if it is not supported.
pub(super) fn family(class: &str) -> Option<Family> {
    let mut names = SUFFIXES
        .iter()
        .filter_map(|suffix| class.strip_suffix(suffix));
    let name = names.find(|name| FOLLOWED.contains(name))?;
    let exact = |edge| Size::Exact {
        height: edge,
        width: edge,
    };
    let vit = Family {
        rule: Rule::Plain,
        square: true,
        size: exact(224),
        resample: Resample::Bilinear,
        center_crop: false,
        crop: None,
        mean: HALF,
        std: HALF,
    };
    let bicubic = Family {
        resample: Resample::Bicubic,
        ..vit
    };
    let siglip = Family {
        square: false,
        ..bicubic
    };
    // Classes that crop to 224 after scaling the shorter side.
    let clip = Family {
        size: Size::ShortestEdge(224),
        center_crop: true,
        crop: Some(224),
        mean: CLIP_MEAN,
        std: CLIP_STD,
        ..siglip
    };
    let imagenet = Family {
        mean: IMAGENET_MEAN,
        std: IMAGENET_STD,
        ..clip
    };
    let half = Family {
        mean: HALF,
        std: HALF,
        ..clip
    };
    Some(match name {
        "ViT" => vit,
        "Siglip" => siglip,
        "Beit" => Family {
            crop: Some(224),
            ..bicubic
        },
        "Pvt" => Family {
            mean: IMAGENET_MEAN,
            std: IMAGENET_STD,
            ..bicubic
        },
        "Blip" => Family {
            size: exact(384),
            mean: CLIP_MEAN,
            std: CLIP_STD,
            ..bicubic
        },
        "Segformer" => Family {
            rule: Rule::Segformer,
            size: exact(512),
            mean: IMAGENET_MEAN,
            std: IMAGENET_STD,
            ..vit
        },
        "DeiT" => Family {
            size: exact(256),
            center_crop: true,
            crop: Some(224),
            ..bicubic
        },
        "CLIP" | "ChineseCLIP" | "Bit" => clip,
        "ConvNext" => Family {
            rule: Rule::ConvNext,
            size: Size::ShortestEdge(384),
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
            size: Size::ShortestEdge(256),
            resample: Resample::Bilinear,
            ..half
        },
        "MobileViT" => Family {
            rule: Rule::MobileVit,
            crop: Some(256),
            ..half
        },
        _ => return None,
    })
}

/// The class that Transformers uses for a model whose processor file names none, by `model_type`.
pub(super) fn class_of_model(model_type: &str) -> Option<&'static str> {
    Some(match model_type {
        "vit" | "dinat" | "ijepa" | "swiftformer" | "swin" | "swinv2" | "vit_mae" | "vit_msn" => {
            "ViTImageProcessor"
        }
        "siglip" => "SiglipImageProcessor",
        "beit" | "data2vec-vision" => "BeitImageProcessor",
        "deit" => "DeiTImageProcessor",
        "clip" | "metaclip_2" => "CLIPImageProcessor",
        "bit" | "dinov2" | "focalnet" | "hiera" => "BitImageProcessor",
        "convnext" | "convnextv2" | "cvt" | "regnet" | "resnet" => "ConvNextImageProcessor",
        "levit" => "LevitImageProcessor",
        "poolformer" => "PoolFormerImageProcessor",
        "efficientnet" => "EfficientNetImageProcessor",
        "mobilenet_v1" => "MobileNetV1ImageProcessor",
        "mobilenet_v2" => "MobileNetV2ImageProcessor",
        "mobilevit" | "mobilevitv2" => "MobileViTImageProcessor",
        "pvt" | "pvt_v2" => "PvtImageProcessor",
        "segformer" => "SegformerImageProcessor",
        _ => return None,
    })
}
