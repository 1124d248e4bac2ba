//! Chooses the reference processor, and records why.

use serde_json::Value;
use trommel_types::Reference;

use super::reader::JsonFile;
use crate::{Arithmetic, ConfigError};

const USE_FAST: &str =
    "the same as the class, or set preprocess.reference to pillow or torchvision";
const VERSION: &str =
    "a version such as 4.57.1, or set preprocess.reference to pillow or torchvision";

/// The requested reference, and where it was requested.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) reference: Reference,
    /// The reason, such as `trommel.toml says so`.
    pub(super) by: &'static str,
}

impl Asked {
    /// The requested arithmetic with its reason; `None` if the folder decides.
    pub(super) fn decided(self) -> Option<(Arithmetic, String)> {
        let arithmetic = match self.reference {
            Reference::Auto => return None,
            Reference::Pillow => Arithmetic::Pillow,
            Reference::Torchvision => Arithmetic::Torchvision,
        };
        Some((arithmetic, self.by.to_owned()))
    }
}

/// The arithmetic of a Transformers processor, and why.
///
/// The requested one; else given by `use_fast` or the class name in the processor's file; else that
/// of the version of Transformers that wrote `config.json`: Pillow before 5, torchvision from 5 on
/// and if the version is unknown.
pub(super) fn of_transformers(
    asked: Asked,
    processor: &JsonFile,
    class: &str,
    model: Option<&JsonFile>,
) -> Result<(Arithmetic, String), ConfigError> {
    if let Some(decided) = asked.decided() {
        return Ok(decided);
    }
    let by_class = match class {
        _ if class.ends_with("Fast") => Some(Arithmetic::Torchvision),
        _ if class.ends_with("Pil") => Some(Arithmetic::Pillow),
        _ => None,
    };
    let by_switch = processor
        .read_opt("use_fast", "true or false", Value::as_bool)?
        .map(|is_fast| match is_fast {
            true => Arithmetic::Torchvision,
            false => Arithmetic::Pillow,
        });
    match (by_switch, by_class) {
        (Some(by_switch), Some(by_class)) if by_switch != by_class => {
            return Err(processor.invalid("use_fast", USE_FAST));
        }
        (Some(arithmetic), _) => {
            let is_fast = arithmetic == Arithmetic::Torchvision;
            let why = format!("{} says use_fast: {is_fast}", processor.name());
            return Ok((arithmetic, why));
        }
        (None, Some(arithmetic)) => return Ok((arithmetic, format!("the class is {class}"))),
        (None, None) => {}
    }
    let Some((file, version)) = model.and_then(|file| Some((file, file.get(KEY)?))) else {
        let why = "no transformers_version in config.json, so Transformers 5 is assumed";
        return Ok((Arithmetic::Torchvision, why.to_owned()));
    };
    let text = version.as_str().unwrap_or_default();
    let major = text
        .split('.')
        .next()
        .and_then(|part| part.parse::<u32>().ok());
    let arithmetic = match major.ok_or_else(|| file.invalid(KEY, VERSION))? {
        0..5 => Arithmetic::Pillow,
        _ => Arithmetic::Torchvision,
    };
    let why = format!("{} was written by Transformers {text}", file.name());
    Ok((arithmetic, why))
}

const KEY: &str = "transformers_version";

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const AUTO: Asked = Asked {
        reference: Reference::Auto,
        by: "",
    };

    fn json(name: &str, text: &str) -> JsonFile {
        JsonFile::parse(Path::new(name), text).unwrap()
    }

    fn decide(
        class: &str,
        keys: &str,
        config: Option<&str>,
    ) -> Result<(Arithmetic, String), String> {
        let processor = json("preprocessor_config.json", keys);
        let config = config.map(|text| json("config.json", text));
        of_transformers(AUTO, &processor, class, config.as_ref()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_library_that_wrote_the_folder_decides() {
        use Arithmetic::{Pillow, Torchvision};
        let version = |version: &str| format!(r#"{{"transformers_version":"{version}"}}"#);
        for (class, keys, config, arithmetic, why) in [
            (
                "ViTImageProcessor",
                "{}",
                Some("4.57.1"),
                Pillow,
                "Transformers 4.57.1",
            ),
            (
                "ViTImageProcessor",
                "{}",
                Some("4.9.0.dev0"),
                Pillow,
                "Transformers 4.9.0.dev0",
            ),
            (
                "ViTImageProcessor",
                "{}",
                Some("5.0.0"),
                Torchvision,
                "Transformers 5.0.0",
            ),
            (
                "ViTImageProcessor",
                "{}",
                Some("5.23.0.dev0"),
                Torchvision,
                "5.23.0.dev0",
            ),
            ("ViTImageProcessor", "{}", Some("10.1"), Torchvision, "10.1"),
            (
                "ViTImageProcessor",
                "{}",
                None,
                Torchvision,
                "no transformers_version",
            ),
            (
                "ViTImageProcessorFast",
                "{}",
                Some("4.57.1"),
                Torchvision,
                "ViTImageProcessorFast",
            ),
            (
                "ViTImageProcessorPil",
                "{}",
                Some("5.23.0"),
                Pillow,
                "ViTImageProcessorPil",
            ),
            (
                "ViTImageProcessor",
                r#"{"use_fast":true}"#,
                Some("4.57.1"),
                Torchvision,
                "use_fast: true",
            ),
            (
                "ViTImageProcessor",
                r#"{"use_fast":false}"#,
                None,
                Pillow,
                "use_fast: false",
            ),
            (
                "ViTImageProcessor",
                r#"{"use_fast":null}"#,
                Some("4.1"),
                Pillow,
                "4.1",
            ),
        ] {
            let config = config.map(version);
            let (found, reason) = decide(class, keys, config.as_deref()).unwrap();
            assert_eq!(found, arithmetic, "{class} {keys} {config:?}");
            assert!(reason.contains(why), "{reason}");
        }
    }

    #[test]
    fn what_was_asked_for_comes_first() {
        let processor = json("preprocessor_config.json", r#"{"use_fast":true}"#);
        let asked = Asked {
            reference: Reference::Pillow,
            by: "it was requested",
        };
        let decided = of_transformers(asked, &processor, "ViTImageProcessorFast", None).unwrap();
        assert_eq!(decided, (Arithmetic::Pillow, "it was requested".to_owned()));
    }

    #[test]
    fn contradictions_and_unknown_versions_are_refused_with_the_remedy() {
        for (class, keys, config) in [
            ("ViTImageProcessorFast", r#"{"use_fast":false}"#, None),
            ("ViTImageProcessorPil", r#"{"use_fast":true}"#, None),
            ("ViTImageProcessor", r#"{"use_fast":1}"#, None),
            (
                "ViTImageProcessor",
                "{}",
                Some(r#"{"transformers_version":"main"}"#),
            ),
            (
                "ViTImageProcessor",
                "{}",
                Some(r#"{"transformers_version":4}"#),
            ),
        ] {
            let error = decide(class, keys, config).unwrap_err();
            let named = ["use_fast", "transformers_version"];
            assert!(named.iter().any(|key| error.contains(key)), "{error}");
        }
    }
}
