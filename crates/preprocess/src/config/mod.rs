//! Reads plans from model directories.

mod hugging_face;
mod overrides;
mod reader;
mod timm;

use std::path::Path;

use self::reader::JsonFile;
use crate::{ConfigError, Plan};

pub(crate) fn load(dir: &Path) -> Result<Plan, ConfigError> {
    let overrides = overrides::read(&dir.join("trommel.toml"))?;
    match (base(dir), overrides) {
        (Ok(Some(plan)), Some(overrides)) => overrides.apply(plan),
        (Ok(Some(plan)), None) => Ok(plan),
        (Ok(None), Some(overrides)) => overrides.into_plan(),
        (Ok(None), None) => Err(ConfigError::Missing {
            dir: dir.to_owned(),
        }),
        // The way out for a processor that cannot be followed.
        (Err(_), Some(overrides)) if overrides.are_complete() => overrides.into_plan(),
        (Err(error), _) => Err(error),
    }
}

fn base(dir: &Path) -> Result<Option<Plan>, ConfigError> {
    if let Some(file) = JsonFile::read(&dir.join("preprocessor_config.json"))?
        && !timm::is_wrapper(&file)
    {
        return hugging_face::plan(&file).map(Some);
    }
    match JsonFile::read(&dir.join("config.json"))? {
        Some(file) => timm::plan(&file),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::Resize;

    const TIMM: &str = r#"{"pretrained_cfg":{"input_size":[3,32,32],"crop_pct":1.0}}"#;

    fn load_from(files: &[(&str, &str)]) -> Result<Plan, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        load(dir.path())
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
