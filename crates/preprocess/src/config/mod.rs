//! Reads plans from model directories.

mod hugging_face;
mod overrides;
mod prompt;
mod reader;
mod reference;
mod timm;

use std::path::Path;

use trommel_types::Reference;

use self::reader::JsonFile;
use self::reference::Asked;
use crate::{Arithmetic, ConfigError, Plan, Resample, Resize};

pub(crate) fn load(dir: &Path, reference: Reference) -> Result<Plan, ConfigError> {
    if let Some(plan) = prompt::read(&dir.join("trommel.toml"), reference)? {
        return Ok(plan);
    }
    let overrides = overrides::read(&dir.join("trommel.toml"))?;
    let asked = match &overrides {
        Some(overrides) if reference.is_auto() => Asked {
            reference: overrides.reference(),
            by: "trommel.toml of the model says so",
        },
        _ => Asked {
            reference,
            by: "it was requested",
        },
    };
    let plan = match (base(dir, asked), overrides) {
        (Ok(Some(plan)), Some(overrides)) => overrides.apply(plan)?,
        (Ok(Some(plan)), None) => plan,
        (Ok(None), Some(overrides)) => overrides.into_plan(asked)?,
        (Ok(None), None) => {
            return Err(ConfigError::Missing {
                dir: dir.to_owned(),
            });
        }
        // The workaround for an unsupported processor.
        (Err(_), Some(overrides)) if overrides.are_complete() => overrides.into_plan(asked)?,
        (Err(error), _) => return Err(error),
    };
    check_filter(dir, plan)
}

/// Refuses a filter that the reference lacks.
fn check_filter(dir: &Path, plan: Plan) -> Result<Plan, ConfigError> {
    let is_scaled = plan.resize != Resize::None && plan.arithmetic == Arithmetic::Torchvision;
    if is_scaled && matches!(plan.resample, Resample::Box | Resample::Hamming) {
        return Err(ConfigError::Invalid {
            path: dir.join(&plan.read_from),
            key: "resample".to_owned(),
            found: format!("{:?}", plan.resample).to_lowercase(),
            expected: "a filter that torchvision has, which is the reference here; or set preprocess.reference to pillow",
        });
    }
    Ok(plan)
}

fn base(dir: &Path, asked: Asked) -> Result<Option<Plan>, ConfigError> {
    let model = JsonFile::read(&dir.join("config.json"))?;
    if let Some(file) = processor(dir)?
        && !timm::is_wrapper(&file)
    {
        return hugging_face::plan(&file, model.as_ref(), asked).map(Some);
    }
    match model {
        Some(file) => timm::plan(&file, asked),
        None => Ok(None),
    }
}

/// The image processor's settings: those in `processor_config.json` take precedence, as in
/// Transformers.
fn processor(dir: &Path) -> Result<Option<JsonFile>, ConfigError> {
    let whole = JsonFile::read(&dir.join("processor_config.json"))?;
    let within = whole.and_then(|file| file.within("image_processor", "image_processor."));
    match within {
        Some(file) => Ok(Some(file)),
        None => JsonFile::read(&dir.join("preprocessor_config.json")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TIMM: &str = r#"{"pretrained_cfg":{"input_size":[3,32,32],"crop_pct":1.0}}"#;

    fn load_from(files: &[(&str, &str)]) -> Result<Plan, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        load(dir.path(), Reference::Auto)
    }

    #[test]
    fn the_image_processor_comes_before_timm() {
        let vit = (
            "preprocessor_config.json",
            r#"{"image_processor_type":"ViTImageProcessor"}"#,
        );
        assert_eq!(
            load_from(&[vit, ("config.json", TIMM)]).unwrap().family(),
            "ViTImageProcessor"
        );
        assert_eq!(
            load_from(&[("config.json", TIMM)]).unwrap().family(),
            "timm"
        );
        let wrapper = (
            "preprocessor_config.json",
            r#"{"image_processor_type":"TimmWrapperImageProcessor"}"#,
        );
        assert_eq!(
            load_from(&[wrapper, ("config.json", TIMM)])
                .unwrap()
                .family(),
            "timm"
        );
    }

    #[test]
    fn trommel_toml_wins_and_may_stand_alone() {
        let toml = (
            "trommel.toml",
            "[preprocess]\nresize = [8, 9]\n[model]\nfile = \"x\"",
        );
        let plan = load_from(&[("config.json", TIMM), toml]).unwrap();
        assert_eq!(
            plan.resize,
            Resize::Exact {
                height: 8,
                width: 9
            }
        );
        assert_eq!(plan.crop.map(|crop| crop.height), Some(32));
        assert_eq!(
            load_from(&[toml]).unwrap().shape().map(|shape| shape.width),
            Some(9)
        );
    }

    #[test]
    fn a_complete_trommel_toml_replaces_what_cannot_be_followed() {
        let odd = (
            "preprocessor_config.json",
            r#"{"image_processor_type":"PerceiverImageProcessor"}"#,
        );
        let error = load_from(&[odd]).unwrap_err().to_string();
        assert!(
            error.contains("`image_processor_type` is \"PerceiverImageProcessor\""),
            "{error}"
        );
        let part = ("trommel.toml", "[preprocess]\nresize = [8, 9]");
        assert!(load_from(&[odd, part]).is_err());
        let whole = (
            "trommel.toml",
            "[preprocess]\nresize = [8, 9]\nresample = \"box\"\nmean = [0, 0, 0]\nstd = [1, 1, 1]",
        );
        assert!(load_from(&[odd, whole]).is_ok());
    }

    /// Transformers 5 saves a processor of images and text as one file.
    #[test]
    fn an_image_processor_within_a_processor_is_read_first() {
        let within = |size: u32| {
            format!(
                r#"{{"processor_class":"CLIPProcessor","image_processor":
                {{"image_processor_type":"CLIPImageProcessor","crop_size":{size}}}}}"#
            )
        };
        let (whole, vit) = (
            within(32),
            r#"{"image_processor_type":"ViTImageProcessor"}"#,
        );
        let whole = ("processor_config.json", &*whole);
        for files in [&[whole][..], &[whole, ("preprocessor_config.json", vit)]] {
            let plan = load_from(files).unwrap();
            assert_eq!(plan.family(), "CLIPImageProcessor");
            assert_eq!(plan.read_from, "processor_config.json");
            assert_eq!(plan.crop.map(|crop| crop.width), Some(32));
        }
        let old = (
            "processor_config.json",
            r#"{"processor_class":"ViTProcessor"}"#,
        );
        let plan = load_from(&[old, ("preprocessor_config.json", vit)]).unwrap();
        assert_eq!(plan.read_from, "preprocessor_config.json");

        let error = load_from(&[("processor_config.json", &within(0))]).unwrap_err();
        let text = error.to_string();
        let named = "processor_config.json: `image_processor.crop_size` is 0";
        assert!(text.contains(named), "{text}");
    }

    #[test]
    fn the_reference_is_asked_for_by_the_caller_or_by_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let vit = r#"{"image_processor_type":"ViTImageProcessor"}"#;
        fs::write(dir.path().join("preprocessor_config.json"), vit).unwrap();
        fs::write(
            dir.path().join("config.json"),
            r#"{"transformers_version":"4.57.1"}"#,
        )
        .unwrap();
        let of = |reference| load(dir.path(), reference).unwrap();
        assert_eq!(of(Reference::Auto).arithmetic, Arithmetic::Pillow);
        assert_eq!(
            of(Reference::Torchvision).arithmetic,
            Arithmetic::Torchvision
        );

        let toml = "[preprocess]\nreference = \"torchvision\"";
        fs::write(dir.path().join("trommel.toml"), toml).unwrap();
        let plan = of(Reference::Auto);
        assert_eq!(plan.arithmetic, Arithmetic::Torchvision);
        assert!(plan.arithmetic_reason.contains("trommel.toml"));
        assert_eq!(plan.family(), "ViTImageProcessor");
        assert_eq!(of(Reference::Pillow).arithmetic, Arithmetic::Pillow);
    }

    #[test]
    fn what_the_reference_does_not_have_is_refused() {
        let hamming = (
            "preprocessor_config.json",
            r#"{"image_processor_type":"ViTImageProcessor","resample":5}"#,
        );
        let error = load_from(&[hamming]).unwrap_err().to_string();
        assert!(error.contains("`resample` is hamming"), "{error}");
        let pillow = ("trommel.toml", "[preprocess]\nreference = \"pillow\"");
        assert!(load_from(&[hamming, pillow]).is_ok());
        let torchvision = ("trommel.toml", "[preprocess]\nreference = \"torchvision\"");
        let error = load_from(&[("config.json", TIMM), torchvision]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("`preprocess.reference` is torchvision")
        );
    }

    #[test]
    fn an_empty_directory_and_broken_json_are_named() {
        let error = load_from(&[]).unwrap_err().to_string();
        assert!(error.contains("no preprocessor_config.json"), "{error}");
        let error = load_from(&[("preprocessor_config.json", "{")])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("preprocessor_config.json is malformed"),
            "{error}"
        );
    }
}
