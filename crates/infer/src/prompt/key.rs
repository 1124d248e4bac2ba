//! The API key of a server, which is never displayed.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use http::HeaderValue;

/// The location of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Key {
    /// An environment variable.
    Env(String),
    /// A file that contains only the key.
    File(PathBuf),
}

/// A key, without `Debug` or `Display`.
#[derive(Clone)]
pub(crate) struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Env(name) => write!(f, "the variable {name} (prompt.key-env)"),
            Self::File(path) => write!(f, "the file {} (prompt.key-file)", path.display()),
        }
    }
}

impl Key {
    /// The location in the settings, if any. A file may be relative to the folder.
    pub(crate) fn named(
        env: Option<&str>,
        file: Option<&Path>,
        dir: &Path,
    ) -> Result<Option<Self>, String> {
        match (env, file) {
            (Some(_), Some(_)) => Err("prompt.key-env and key-file: give one of them".to_owned()),
            (Some(name), None) => Ok(Some(Self::Env(name.to_owned()))),
            (None, Some(file)) => Ok(Some(Self::File(dir.join(file)))),
            (None, None) => Ok(None),
        }
    }

    /// Reads the key.
    pub(crate) fn read(&self) -> Result<Secret, String> {
        let text = match self {
            Self::Env(name) => std::env::var(name)
                .map_err(|_| format!("there is no key in {self}; set it in the environment"))?,
            Self::File(path) => fs::read_to_string(path)
                .map_err(|error| format!("there is no key in {self}: {error}"))?,
        };
        let key = text.trim();
        if key.is_empty() || HeaderValue::from_str(key).is_err() {
            return Err(format!("{self} is empty or holds what no header can"));
        }
        Ok(Secret(key.to_owned()))
    }
}

impl Secret {
    /// The header with the key.
    pub(crate) fn header(&self) -> HeaderValue {
        let value = HeaderValue::from_str(&format!("Bearer {}", self.0));
        let mut value = value.expect("it was checked when it was read");
        value.set_sensitive(true);
        value
    }

    /// A server's text without the key, which some repeat.
    pub(crate) fn scrub(&self, text: &str) -> String {
        text.replace(&self.0, "[key]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_and_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        fs::write(&file, "sk-secret\n").unwrap();
        let key = Key::named(None, Some(Path::new("key")), dir.path()).unwrap();
        let secret = key.unwrap().read().unwrap();
        assert_eq!(secret.header(), "Bearer sk-secret");
        assert!(!format!("{secret:?}{:?}", secret.header()).contains("secret\""));
        assert!(!format!("{:?}", secret.header()).contains("sk-"));
        assert_eq!(secret.scrub("no sk-secret here"), "no [key] here");
        let missing = Key::Env("TROMMEL_TEST_NO_SUCH_KEY".to_owned());
        assert!(
            missing
                .read()
                .unwrap_err()
                .contains("TROMMEL_TEST_NO_SUCH_KEY")
        );
        fs::write(&file, "two\nlines").unwrap();
        assert!(Key::File(file).read().is_err());
        assert!(Key::named(Some("A"), Some(Path::new("b")), dir.path()).is_err());
    }
}
