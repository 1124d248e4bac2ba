//! Where true labels come from.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use trommel_sink::ResultRow;

use crate::args::EvaluateArgs;

/// Where true labels come from.
pub(crate) enum Truth {
    /// The folder that an image is in.
    Folders,
    /// A pass-through column.
    Column(String),
    /// A file, by uri.
    File(PathBuf, HashMap<String, String>),
}

impl Truth {
    pub(super) fn from(args: &EvaluateArgs) -> Result<Self> {
        Self::named(args.labels.as_deref(), args.labels_from.as_deref())
    }

    /// As the arguments `--labels` and `--labels-from` name it.
    ///
    /// # Errors
    /// When the file cannot be read, or nothing is named.
    pub(crate) fn named(labels: Option<&Path>, labels_from: Option<&str>) -> Result<Self> {
        if let Some(path) = labels {
            return Ok(Self::File(path.to_owned(), read_labels(path)?));
        }
        match labels_from {
            Some("folders") => Ok(Self::Folders),
            Some(text) => match text.strip_prefix("column:") {
                Some(name) => Ok(Self::Column(name.to_owned())),
                None => bail!("--labels-from {text}: expected folders or column:NAME"),
            },
            None => bail!("name the true labels with --labels or --labels-from"),
        }
    }

    /// The true label of a row's image, if it has one.
    pub(super) fn of(&self, row: &ResultRow) -> Option<String> {
        self.of_image(&row.uri, |name| row.columns.get(name).cloned())
    }

    /// The true label of an image with this uri, and these columns by name.
    pub(crate) fn of_image(
        &self,
        uri: &str,
        column: impl Fn(&str) -> Option<String>,
    ) -> Option<String> {
        match self {
            Self::File(_, labels) => labels.get(uri).cloned(),
            Self::Column(name) => column(name),
            Self::Folders => {
                let member = uri.rsplit('#').next()?;
                let folder = Path::new(member).parent()?.file_name()?;
                Some(folder.to_string_lossy().into_owned())
            }
        }
    }

    /// Why no row has a true label, by the example of one.
    pub(crate) fn why_none(&self, uri: &str) -> String {
        match self {
            Self::File(path, labels) => match labels.keys().min() {
                None => format!("{} holds no labels", path.display()),
                Some(labelled) => format!(
                    "{} has none by the uri of a row: a row's is {uri:?}, a label's {labelled:?}; write the same in both",
                    path.display()
                ),
            },
            Self::Column(name) => format!("rows have no column {name:?}"),
            Self::Folders => format!("{uri:?} is in no folder"),
        }
    }
}

impl fmt::Display for Truth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folders => f.write_str("the names of folders"),
            Self::Column(name) => write!(f, "column {name:?}"),
            Self::File(path, _) => path.display().fmt(f),
        }
    }
}

/// Reads columns `uri` and `label` of a CSV or JSON Lines file.
fn read_labels(path: &Path) -> Result<HashMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Labelled {
        uri: String,
        label: serde_json::Value,
    }
    let failed = || format!("failed to read labels {}", path.display());
    let pair = |labelled: Labelled| match labelled.label {
        serde_json::Value::String(label) => (labelled.uri, label),
        other => (labelled.uri, other.to_string()),
    };
    if path.extension().is_some_and(|suffix| suffix == "csv") {
        let mut reader = csv::Reader::from_path(path).with_context(failed)?;
        let headers = reader.headers().with_context(failed)?.clone();
        let place = |name: &str| {
            let place = headers.iter().position(|header| header.trim() == name);
            place.with_context(|| format!("{} has no column {name}", path.display()))
        };
        let (uri, label) = (place("uri")?, place("label")?);
        return reader
            .records()
            .map(|record| {
                let record = record.with_context(failed)?;
                let field = |place: usize| record.get(place).unwrap_or_default().to_owned();
                Ok((field(uri), field(label)))
            })
            .collect();
    }
    let text = std::fs::read_to_string(path).with_context(failed)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| Ok(pair(serde_json::from_str(line)?)))
        .collect::<Result<_>>()
        .with_context(failed)
}
