//! Names of the row formats.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use trommel_storage::{StorageError, StorageErrorKind};

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident => $suffixes:expr;)*) => {
        /// The row formats.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Format {
            $($(#[$doc])* $name,)*
        }

        impl Format {
            /// All formats.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The suffixes of its files; the first one is also its name.
            fn suffixes(self) -> &'static [&'static str] {
                match self {
                    $(Self::$name => &$suffixes,)*
                }
            }
        }
    };
}

formats! {
    /// Apache Parquet, zstd.
    Parquet => ["parquet"];
    /// One JSON object per line.
    Jsonl => ["jsonl", "ndjson"];
    /// RFC 4180, with a header.
    Csv => ["csv"];
}

impl Format {
    /// The suffix of its files, which is also its name.
    pub(crate) fn extension(self) -> &'static str {
        self.suffixes()[0]
    }

    pub(crate) fn of_path(path: &Path) -> Option<Self> {
        path.extension()?.to_str()?.parse().ok()
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.extension())
    }
}

impl FromStr for Format {
    type Err = StorageError;

    /// Parses the name of a format, or a suffix of its files.
    fn from_str(name: &str) -> Result<Self, StorageError> {
        let name = name.to_ascii_lowercase();
        let has_name = |format: &&Self| format.suffixes().contains(&name.as_str());
        Self::ALL.iter().find(has_name).copied().ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|format| format.extension()).collect();
            StorageError::new(
                StorageErrorKind::InvalidDestination,
                format!("has an unknown format {name:?}; use {}", one_of(&names)),
            )
        })
    }
}

/// `a, b or c`.
fn one_of(names: &[&str]) -> String {
    match names {
        [rest @ .., last] if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        names => names.concat(),
    }
}
