use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ending::Ending;
use crate::wanted::with_thresholds;
use crate::{InferError, InferErrorKind};

/// How a model's raw output becomes scores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// The classes exclude each other; their scores add up to 1.
    #[default]
    Softmax,
    /// Each class is independent, with a score from 0 to 1.
    Sigmoid,
    /// The model's output is used as the scores, unchanged.
    None,
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Softmax => "softmax",
            Self::Sigmoid => "sigmoid",
            Self::None => "none",
        })
    }
}

/// What the files next to a model say about its output.
#[derive(Debug)]
pub(crate) struct ModelConfig {
    /// The model's file, if specified.
    pub(crate) file: Option<PathBuf>,
    /// The names of the classes, in order; empty for a model without classes.
    pub(crate) labels: Arc<[Arc<str>]>,
    /// Where these names come from, for people.
    pub(crate) labels_from: String,
    /// The file that they come from, if not the configuration itself.
    pub(crate) label_file: Option<PathBuf>,
    /// From `trommel.toml`.
    pub(crate) set_activation: Option<Activation>,
    /// From `problem_type` in `config.json`.
    problem: Option<Activation>,
    /// Name of the embeddings output, if specified.
    pub(crate) embedding: Option<String>,
    /// The threshold of each class, if any has one.
    pub(crate) thresholds: Option<Arc<[f32]>>,
    /// Why the folder has no labels, if so.
    pub(crate) unlabelled: Option<InferError>,
}

/// The section `[model]` of `trommel.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Overrides {
    file: Option<PathBuf>,
    activation: Option<Activation>,
    labels: Option<LabelsSetting>,
    embedding: Option<String>,
    /// For all classes.
    threshold: Option<f32>,
    /// For some, by label.
    #[serde(default)]
    thresholds: BTreeMap<String, f32>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "labels must be a list of text, or a file with one label a line"
)]
enum LabelsSetting {
    List(Vec<String>),
    File(PathBuf),
}

/// The relevant fields of a Hugging Face or timm `config.json`.
#[derive(Debug, Default, Deserialize)]
struct HubConfig {
    id2label: Option<BTreeMap<String, serde_json::Value>>,
    problem_type: Option<String>,
    label_names: Option<serde_json::Value>,
    num_classes: Option<usize>,
    pretrained_cfg: Option<PretrainedConfig>,
}

#[derive(Debug, Deserialize)]
struct PretrainedConfig {
    num_classes: Option<usize>,
}

/// Where labels of a model without classes come from.
const UNNAMED: &str = "no file, as it has no classes";

impl ModelConfig {
    /// Reads `config.json` and `trommel.toml` in `dir`; the latter wins.
    ///
    /// # Errors
    /// If one of them is malformed, or a class has no name.
    pub(crate) fn read(dir: &Path) -> Result<Self, InferError> {
        let overrides = Overrides::read(&dir.join("trommel.toml"))?;
        let path = dir.join("config.json");
        let hub: Option<HubConfig> = match read_optional(&path)? {
            Some(text) => {
                Some(serde_json::from_str(&text).map_err(|error| invalid(&path, &error))?)
            }
            None => None,
        };
        let problem = match (overrides.activation, &hub) {
            (None, Some(hub)) => hub.activation(&path)?,
            _ => None,
        };
        let (labels, labels_from) = match &overrides.labels {
            Some(setting) => setting.read(dir)?,
            None => match hub
                .as_ref()
                .map(|hub| hub.labels(&path))
                .transpose()?
                .flatten()
            {
                Some(labels) => labels,
                None => (Vec::new(), UNNAMED.to_owned()),
            },
        };
        if labels.is_empty() && labels_from != UNNAMED {
            return Err(invalid(dir, &"the list of labels is empty"));
        }
        let labels: Arc<[Arc<str>]> = labels.into_iter().map(Arc::from).collect();
        let none = labels.is_empty();
        let unlabelled = none.then(|| unlabelled(&path, hub.is_some()));
        let thresholds = overrides
            .thresholds(&labels)
            .map_err(|why| invalid(&dir.join("trommel.toml"), &why))?;
        let label_file = match &overrides.labels {
            Some(LabelsSetting::File(file)) => Some(dir.join(file)),
            _ => None,
        };
        Ok(Self {
            file: overrides.file,
            labels,
            labels_from,
            label_file,
            set_activation: overrides.activation,
            problem,
            embedding: overrides.embedding,
            thresholds,
            unlabelled,
        })
    }
}

impl ModelConfig {
    /// How the output of a graph with this ending becomes scores, and why, for people.
    ///
    /// As `trommel.toml` says; else unchanged if the graph has an activation already; else as
    /// Transformers' pipeline does: sigmoid for multi-label models and for a single class, softmax
    /// otherwise.
    pub(crate) fn activation(&self, ending: Option<&Ending>) -> (Activation, String) {
        let because = |activation, why: &str| (activation, why.to_owned());
        match (self.set_activation, ending, self.problem) {
            (Some(set), Some(ending), _) if set != Activation::None => (
                set,
                format!("trommel.toml says so, though the graph ends in {ending}"),
            ),
            (Some(set), _, _) => because(set, "trommel.toml says so"),
            (None, Some(ending), _) => (
                Activation::None,
                format!("the graph ends in {ending}, so its output is scores"),
            ),
            (None, None, Some(Activation::Sigmoid)) => {
                because(Activation::Sigmoid, "problem_type in config.json")
            }
            (None, None, _) if self.labels.len() == 1 => {
                because(Activation::Sigmoid, "there is a single class")
            }
            (None, None, Some(problem)) => because(problem, "problem_type in config.json"),
            (None, None, None) => because(
                Activation::Softmax,
                "there are several classes, and neither config.json nor the graph says otherwise",
            ),
        }
    }
}

impl Overrides {
    fn read(path: &Path) -> Result<Self, InferError> {
        let Some(text) = read_optional(path)? else {
            return Ok(Self::default());
        };
        // Other sections belong to other crates, which check them.
        #[derive(Deserialize)]
        struct Sections {
            #[serde(default)]
            model: Overrides,
        }
        let sections: Sections = toml::from_str(&text).map_err(|error| invalid(path, &error))?;
        Ok(sections.model)
    }

    /// The threshold of each class; without one 0, which every score reaches.
    fn thresholds(&self, labels: &[Arc<str>]) -> Result<Option<Arc<[f32]>>, String> {
        if self.threshold.is_none() && self.thresholds.is_empty() {
            return Ok(None);
        }
        let general = std::iter::repeat(self.threshold.unwrap_or(0.0));
        with_thresholds(general, &self.thresholds, labels).map(Some)
    }
}

impl LabelsSetting {
    fn read(&self, dir: &Path) -> Result<(Vec<String>, String), InferError> {
        match self {
            Self::List(labels) => Ok((labels.clone(), "labels in trommel.toml".to_owned())),
            Self::File(file) => {
                let path = dir.join(file);
                let text = read_optional(&path)?
                    .ok_or_else(|| invalid(&path, &"the file of labels does not exist"))?;
                let labels = text.lines().map(str::to_owned).collect();
                Ok((labels, format!("{}, named in trommel.toml", file.display())))
            }
        }
    }
}

impl HubConfig {
    /// The meaning of `problem_type`, if present.
    fn activation(&self, path: &Path) -> Result<Option<Activation>, InferError> {
        match self.problem_type.as_deref() {
            None => Ok(None),
            Some("single_label_classification") => Ok(Some(Activation::Softmax)),
            Some("multi_label_classification") => Ok(Some(Activation::Sigmoid)),
            Some(other) => Err(invalid(
                path,
                &format_args!(
                    "problem_type is {other:?}, but only single_label_classification and \
                     multi_label_classification give labels; if this model does give labels, set \
                     activation in the section [model] of trommel.toml"
                ),
            )),
        }
    }

    /// The names, and where they come from.
    fn labels(&self, path: &Path) -> Result<Option<(Vec<String>, String)>, InferError> {
        let from = |labels: Vec<String>, from: &str| Some((labels, from.to_owned()));
        if let Some(id2label) = &self.id2label {
            let labels = dense(id2label).map_err(|why| invalid(path, &why))?;
            return Ok(from(labels, "id2label in config.json"));
        }
        match &self.label_names {
            Some(serde_json::Value::Array(names)) => names
                .iter()
                .map(text)
                .collect::<Option<_>>()
                .map(|labels| from(labels, "label_names in config.json"))
                .ok_or_else(|| invalid(path, &"label_names holds something other than text")),
            Some(serde_json::Value::Null) | None => Ok(self
                .num_classes
                .or_else(|| self.pretrained_cfg.as_ref()?.num_classes)
                .filter(|count| *count > 0) // timm's number for a model of features
                .and_then(|count| {
                    let numbers = (0..count).map(|class| class.to_string()).collect();
                    from(numbers, "num_classes in config.json, which names no class")
                })),
            Some(_) => Err(invalid(path, &"label_names is no list")),
        }
    }
}

/// The names in order of their numbers, which must be `0..N`.
fn dense(id2label: &BTreeMap<String, serde_json::Value>) -> Result<Vec<String>, String> {
    let mut labels = vec![None; id2label.len()];
    for (id, label) in id2label {
        let place = id
            .parse::<usize>()
            .ok()
            .and_then(|class| labels.get_mut(class))
            .filter(|place| place.is_none())
            .ok_or_else(|| {
                format!(
                    "id2label has the class {id:?}, but its {} classes must be numbered from 0",
                    id2label.len()
                )
            })?;
        *place = Some(text(label).ok_or_else(|| format!("id2label[{id:?}] is no text"))?);
    }
    // As many distinct positions were filled as there are.
    Ok(labels.into_iter().flatten().collect())
}

fn text(value: &serde_json::Value) -> Option<String> {
    match value {
        serde_json::Value::String(text) => Some(text.clone()),
        serde_json::Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

pub(crate) fn read_optional(path: &Path) -> Result<Option<String>, InferError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(invalid(path, &error)),
    }
}

pub(crate) fn invalid(path: &Path, why: &dyn fmt::Display) -> InferError {
    let why = why.to_string();
    InferError::new(
        InferErrorKind::ModelConfig,
        format_args!(
            "{}: {}",
            path.display(),
            why.trim_end().trim_end_matches('.')
        ),
    )
}

fn unlabelled(path: &Path, exists: bool) -> InferError {
    let found = if exists {
        "it has no id2label, label_names or num_classes"
    } else {
        "the file does not exist, so the names of classes are unknown"
    };
    invalid(
        path,
        &format_args!(
            "{found}; add them, or set labels in the section [model] of trommel.toml next to it"
        ),
    )
}

#[cfg(test)]
mod tests;
