use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{ConfigError, Resample};

/// A JSON object in a file, read key by key, with errors that name both.
pub(super) struct JsonFile {
    path: PathBuf,
    object: Value,
    /// Prefix of keys in messages, for a nested object.
    prefix: &'static str,
}

impl JsonFile {
    /// Reads the file; `None` if it does not exist.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, ConfigError> {
        let Some(text) = read_text(path)? else {
            return Ok(None);
        };
        Self::parse(path, &text).map(Some)
    }

    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let object = serde_json::from_str(text).map_err(|error| ConfigError::Malformed {
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
        Ok(Self {
            path: path.to_owned(),
            object,
            prefix: "",
        })
    }

    /// A nested object, if present.
    pub(super) fn within(&self, key: &str, prefix: &'static str) -> Option<Self> {
        let object = self.get(key).filter(|value| value.is_object())?;
        Some(Self {
            path: self.path.clone(),
            object: object.clone(),
            prefix,
        })
    }

    /// The file's name.
    pub(super) fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// Keys and values of the object; empty if it is not an object.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&str, &Value)> {
        let entries = self.object.as_object().into_iter().flatten();
        entries.map(|(key, value)| (key.as_str(), value))
    }

    /// The value of a key, if present and not null. `a.b` refers to a nested object.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let value = key
            .split('.')
            .try_fold(&self.object, |value, part| value.get(part))?;
        Some(value).filter(|value| !value.is_null())
    }

    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.get(key).and_then(Value::as_str)
    }

    pub(super) fn bool(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        self.read_or(key, default, "true or false", Value::as_bool)
    }

    /// One number per channel; a single number applies to all three.
    pub(super) fn channels(&self, key: &str, default: [f32; 3]) -> Result<[f32; 3], ConfigError> {
        self.read_or(
            key,
            default,
            "one finite number, or one for each of 3 channels",
            |value| {
                let numbers: Vec<f32> = match value {
                    Value::Array(values) => values.iter().map(number).collect::<Option<_>>()?,
                    one => vec![number(one)?],
                };
                match numbers[..] {
                    [one] => Some([one; 3]),
                    [first, second, third] => Some([first, second, third]),
                    _ => None,
                }
            },
        )
    }

    pub(super) fn read_or<T>(
        &self,
        key: &str,
        default: T,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<T, ConfigError> {
        Ok(self.read_opt(key, expected, read)?.unwrap_or(default))
    }

    pub(super) fn read_opt<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => read(value)
                .map(Some)
                .ok_or_else(|| self.invalid(key, expected)),
        }
    }

    pub(super) fn invalid(&self, key: &str, expected: &'static str) -> ConfigError {
        ConfigError::Invalid {
            path: self.path.clone(),
            key: format!("{}{key}", self.prefix),
            found: self.found(key),
            expected,
        }
    }

    /// The error for a valid but unsupported setting.
    pub(super) fn not_followed(&self, key: &str, why: impl Into<String>) -> ConfigError {
        ConfigError::NotFollowed {
            path: self.path.clone(),
            key: format!("{}{key}", self.prefix),
            found: self.found(key),
            why: why.into(),
        }
    }

    /// The error for a setting from elsewhere that this file does not allow.
    pub(super) fn without_choice(
        &self,
        key: &str,
        found: &str,
        expected: &'static str,
    ) -> ConfigError {
        ConfigError::Invalid {
            path: self.path.clone(),
            key: key.to_owned(),
            found: found.to_owned(),
            expected,
        }
    }

    fn found(&self, key: &str) -> String {
        let value = self.get(key);
        value.map_or_else(|| "missing".to_owned(), Value::to_string)
    }
}

/// A valid side of a tensor in pixels.
pub(super) fn edge(value: &Value) -> Option<u32> {
    let edge = value.as_u64().or_else(|| {
        value
            .as_f64()
            .filter(|edge| edge.fract() == 0.0)
            .map(|edge| edge as u64)
    })?;
    u32::try_from(edge)
        .ok()
        .filter(|edge| (1..=65_535).contains(edge))
}

/// A number that fits into an `f32`.
pub(super) fn number(value: &Value) -> Option<f32> {
    value
        .as_f64()
        .map(|number| number as f32)
        .filter(|number| number.is_finite())
}

/// A filter by Pillow's code or by name.
pub(super) fn resample(value: &Value) -> Option<Resample> {
    Some(match (value.as_u64(), value.as_str()) {
        (Some(0), _) | (_, Some("nearest")) => Resample::Nearest,
        (Some(1), _) | (_, Some("lanczos")) => Resample::Lanczos,
        (Some(2), _) | (_, Some("bilinear")) => Resample::Bilinear,
        (Some(3), _) | (_, Some("bicubic")) => Resample::Bicubic,
        (Some(4), _) | (_, Some("box")) => Resample::Box,
        (Some(5), _) | (_, Some("hamming")) => Resample::Hamming,
        _ => return None,
    })
}

/// The text of a file; `None` if it does not exist.
pub(super) fn read_text(path: &Path) -> Result<Option<String>, ConfigError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ConfigError::Unreadable {
            path: path.to_owned(),
            source,
        }),
    }
}
