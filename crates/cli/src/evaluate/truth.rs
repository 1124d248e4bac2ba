//! Sources of true labels.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use trommel_sink::ResultRow;

use crate::args::EvaluateArgs;
use crate::paths::check_input;

/// The source of true labels.
pub(crate) enum Truth {
    /// The name of the image's folder.
    Folders,
    /// A pass-through column.
    Column(String),
    /// A file, by uri without a leading `./`.
    File(PathBuf, HashMap<String, String>),
}

impl Truth {
    pub(super) fn from(args: &EvaluateArgs) -> Result<Self> {
        Self::named(args.labels.as_deref(), args.labels_from.as_deref())
    }

    /// From the arguments `--labels` and `--labels-from`.
    ///
    /// # Errors
    /// If the file cannot be read, or no source is given.
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
            None => bail!("give the true labels with --labels or --labels-from"),
        }
    }

    /// The true label of a row's image, if it has one.
    pub(super) fn of(&self, row: &ResultRow) -> Option<String> {
        self.of_image(&row.uri, |name| row.columns.get(name).cloned())
    }

    /// The true label of an image with this uri and these columns.
    pub(crate) fn of_image(
        &self,
        uri: &str,
        column: impl Fn(&str) -> Option<String>,
    ) -> Option<String> {
        match self {
            Self::File(_, labels) => labels.get(uri_key(uri)).cloned(),
            Self::Column(name) => column(name),
            Self::Folders => {
                let member = uri.rsplit('#').next()?;
                let folder = Path::new(member).parent()?.file_name()?;
                Some(folder.to_string_lossy().into_owned())
            }
        }
    }

    /// Why no row has a true label, using one row as an example.
    pub(crate) fn why_none(&self, uri: &str) -> String {
        match self {
            Self::File(path, labels) => match labels.keys().min() {
                None => format!("{} holds no labels", path.display()),
                Some(labelled) => format!(
                    "the uris in {} do not match those of the rows: a row has {uri:?}, a label has {labelled:?}; write them the same way",
                    path.display()
                ),
            },
            Self::Column(name) => format!("rows have no column {name:?}"),
            Self::Folders => format!("{uri:?} is not in a folder"),
        }
    }
}

impl fmt::Display for Truth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folders => f.write_str("folder names"),
            Self::Column(name) => write!(f, "column {name:?}"),
            Self::File(path, _) => path.display().fmt(f),
        }
    }
}

/// The uri without a leading `./`, which rows have if the source had it.
pub(super) fn uri_key(uri: &str) -> &str {
    uri.strip_prefix("./").unwrap_or(uri)
}

/// Reads columns `uri` and `label` of a CSV or JSON Lines file.
fn read_labels(path: &Path) -> Result<HashMap<String, String>> {
    check_input(path, "labels", LABELS)?;
    let failed = || format!("failed to read labels {}; {LABELS}", path.display());
    match path.extension().and_then(|suffix| suffix.to_str()) {
        Some("csv") => csv_labels(path).with_context(failed),
        Some("jsonl" | "ndjson" | "json") | None => json_labels(path).with_context(failed),
        _ => bail!("{}: unknown format of labels; {LABELS}", path.display()),
    }
}

const LABELS: &str = "give a CSV file (.csv) with columns uri and label, or JSON Lines (.jsonl)";

fn csv_labels(path: &Path) -> Result<HashMap<String, String>> {
    let mut reader = csv::Reader::from_path(path)?;
    let headers = reader.headers()?.clone();
    let place = |name: &str| {
        let place = headers.iter().position(|header| header.trim() == name);
        let found = || headers.iter().collect::<Vec<_>>().join(", ");
        place.with_context(|| format!("there is no column {name}; the columns are {}", found()))
    };
    let (uri, label) = (place("uri")?, place("label")?);
    let labels = reader.records().map(|record| {
        let record = record?;
        let field = |place: usize| record.get(place).unwrap_or_default().to_owned();
        Ok((uri_key(&field(uri)).to_owned(), field(label)))
    });
    labels.collect()
}

fn json_labels(path: &Path) -> Result<HashMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Labelled {
        uri: String,
        label: serde_json::Value,
    }
    let text = std::fs::read_to_string(path)?;
    let lines = text.lines().zip(1..);
    let lines = lines.filter(|(line, _)| !line.trim().is_empty());
    let labels = lines.map(|(line, number)| {
        let labelled: Labelled =
            serde_json::from_str(line).with_context(|| format!("line {number}"))?;
        let label = match labelled.label {
            serde_json::Value::String(label) => label,
            other => other.to_string(),
        };
        Ok((uri_key(&labelled.uri).to_owned(), label))
    });
    labels.collect()
}
