//! `[prompt]` in a model directory's `trommel.toml`: the keys about sent images.

use std::path::Path;

use serde::Deserialize;
use trommel_types::Reference;

use super::reader::read_text;
use super::reference::Asked;
use crate::budget::{Budget, Family};
use crate::encode::Encoding;
use crate::{ConfigError, Plan, Resample, Resize};

#[derive(Debug, Default, Deserialize)]
struct File {
    prompt: Option<Keys>,
    preprocess: Option<toml::Table>,
}

/// The keys about images. Other keys are read, and unknown ones refused, by `trommel-infer`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Keys {
    family: Option<String>,
    image_tokens: Option<u32>,
    max_pixels: Option<u64>,
    encoding: Option<String>,
    quality: Option<u8>,
}

/// Default JPEG quality.
const QUALITY: u8 = 90;

/// Reads the section; `None` when there is no file or no such section.
pub(super) fn read(path: &Path, reference: Reference) -> Result<Option<Plan>, ConfigError> {
    let Some(text) = read_text(path)? else {
        return Ok(None);
    };
    let file: File = toml::from_str(&text).map_err(|error| ConfigError::Malformed {
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    let Some(keys) = file.prompt else {
        return Ok(None);
    };
    let invalid = |key: &str, found: String, expected| ConfigError::Invalid {
        path: path.to_owned(),
        key: key.to_owned(),
        found,
        expected,
    };
    if file.preprocess.is_some() {
        let expected = "no such section next to [prompt], whose max-pixels, image-tokens and encoding say how images are sent";
        return Err(invalid("preprocess", "set".to_owned(), expected));
    }
    let mut plan = Plan::plain(Resize::Budget(keys.budget(path)?));
    plan.family = "prompt".to_owned();
    plan.read_from = "trommel.toml".to_owned();
    plan.resample = Resample::Bicubic;
    plan.encoding = match (keys.encoding.as_deref(), keys.quality) {
        (None | Some("jpeg"), quality) => match quality.unwrap_or(QUALITY) {
            quality @ 1..=100 => Encoding::Jpeg(quality),
            other => {
                let expected = "a quality of JPEG from 1 to 100";
                return Err(invalid("prompt.quality", other.to_string(), expected));
            }
        },
        (Some("png"), None) => Encoding::Png,
        (Some("png"), Some(quality)) => {
            let expected = "no such key with encoding = \"png\", which keeps every pixel";
            return Err(invalid("prompt.quality", quality.to_string(), expected));
        }
        (Some(other), _) => {
            let expected = "jpeg or png";
            return Err(invalid("prompt.encoding", format!("{other:?}"), expected));
        }
    };
    let asked = Asked {
        reference,
        by: "it was requested",
    };
    if let Some((arithmetic, reason)) = asked.decided() {
        (plan.arithmetic, plan.arithmetic_reason) = (arithmetic, reason);
    }
    Ok(Some(plan))
}

impl Keys {
    fn budget(&self, path: &Path) -> Result<Budget, ConfigError> {
        let invalid = |key: &str, found: String, expected| ConfigError::Invalid {
            path: path.to_owned(),
            key: key.to_owned(),
            found,
            expected,
        };
        let family = match self.family.as_deref() {
            None => None,
            Some(name) => match Family::named(name) {
                Some(family) => Some(family),
                None => {
                    return Err(ConfigError::UnknownFamily {
                        path: path.to_owned(),
                        found: name.to_owned(),
                        known: Family::names(),
                    });
                }
            },
        };
        if self.max_pixels == Some(0) {
            let expected = "a number of pixels of at least 1";
            return Err(invalid("prompt.max-pixels", "0".to_owned(), expected));
        }
        if let Some(tokens) = self.image_tokens {
            let found = tokens.to_string();
            let Some(family) = family else {
                let expected =
                    "a family next to it, whose formula counts tokens; or set max-pixels instead";
                return Err(invalid("prompt.image-tokens", found, expected));
            };
            if self.max_pixels.is_some() {
                let expected = "no such key next to max-pixels";
                return Err(invalid("prompt.image-tokens", found, expected));
            }
            if tokens < family.fewest() {
                return Err(ConfigError::FewTokens {
                    path: path.to_owned(),
                    tokens,
                    family: family.to_string(),
                    fewest: family.fewest(),
                });
            }
        }
        Ok(Budget {
            family,
            image_tokens: self.image_tokens,
            max_pixels: self.max_pixels,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(keys: &str) -> Result<Plan, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trommel.toml");
        std::fs::write(&path, format!("[prompt]\nurl = \"http://x\"\n{keys}")).unwrap();
        read(&path, Reference::Auto).map(Option::unwrap)
    }

    #[test]
    fn images_are_sent_as_the_section_says() {
        let png = plan("encoding = \"png\"\nmax-pixels = 1000").unwrap();
        assert_eq!(png.encoding, Encoding::Png);
        assert_eq!(png.resize.target(400, 400), (31, 31));
        let qwen = plan("family = \"qwen2.5-vl\"\nimage-tokens = 512").unwrap();
        assert_eq!(qwen.encoding, Encoding::Jpeg(90));
        let (width, height) = qwen.resize.target(4032, 3024);
        assert!(width * height <= 512 * 28 * 28, "{width} {height}");
        assert_eq!(plan("").unwrap().resize.target(400, 300), (400, 300));
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (keys, named) in [
            ("family = \"qwen9\"", "\"qwen9\""),
            ("family = \"qwen9\"", "max-pixels"),
            ("image-tokens = 512", "family"),
            ("family = \"llava-1.5\"\nimage-tokens = 512", "576"),
            ("encoding = \"webp\"", "\"webp\""),
            ("quality = 0", "`prompt.quality` is 0"),
            ("max-pixels = 0", "`prompt.max-pixels` is 0"),
            ("[preprocess]\nresize = [3, 3]", "`preprocess` is set"),
        ] {
            let error = plan(keys).unwrap_err().to_string();
            assert!(error.contains(named), "{keys}: {error}");
        }
    }
}
