use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{InferError, InferErrorKind};

/// How a model's raw output becomes scores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// The classes exclude each other; their scores add up to 1.
    #[default]
    Softmax,
    /// Each class is a yes or no of its own, with a score from 0 to 1.
    Sigmoid,
    /// The model's output is taken for the scores as it is.
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

/// What the files beside a model say about its output.
#[derive(Debug)]
pub(crate) struct ModelConfig {
    /// The model's file, if it is not looked for.
    pub(crate) file: Option<PathBuf>,
    /// The name of class `i` is at place `i`.
    pub(crate) labels: Arc<[Arc<str>]>,
    pub(crate) activation: Activation,
    /// Name of the output that holds embeddings, if it is not looked for.
    pub(crate) embedding: Option<String>,
    /// The score that class `i` has to reach is at place `i`, if any has to.
    pub(crate) thresholds: Option<Arc<[f32]>>,
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

/// The fields of a Hugging Face or timm `config.json` that matter here.
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

impl ModelConfig {
    /// Reads `config.json` and `trommel.toml` in `dir`; the latter wins.
    ///
    /// # Errors
    /// When one of them is malformed, or no class has a name by them.
    pub(crate) fn read(dir: &Path) -> Result<Self, InferError> {
        let overrides = Overrides::read(&dir.join("trommel.toml"))?;
        let path = dir.join("config.json");
        let hub: Option<HubConfig> = match read_optional(&path)? {
            Some(text) => {
                Some(serde_json::from_str(&text).map_err(|error| invalid(&path, &error))?)
            }
            None => None,
        };
        let activation = match overrides.activation {
            Some(activation) => activation,
            None => hub
                .as_ref()
                .map_or(Ok(Activation::default()), |hub| hub.activation(&path))?,
        };
        let labels = match &overrides.labels {
            Some(setting) => setting.read(dir)?,
            None => match hub
                .as_ref()
                .map(|hub| hub.labels(&path))
                .transpose()?
                .flatten()
            {
                Some(labels) => labels,
                None => return Err(unlabelled(&path, hub.is_some())),
            },
        };
        if labels.is_empty() {
            return Err(invalid(dir, &"the list of labels is empty"));
        }
        let thresholds = overrides
            .thresholds(&labels)
            .map_err(|why| invalid(&dir.join("trommel.toml"), &why))?;
        Ok(Self {
            file: overrides.file,
            labels: labels.into_iter().map(Arc::from).collect(),
            activation,
            embedding: overrides.embedding,
            thresholds,
        })
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

    /// The threshold of each class; 0, which every score reaches, for one without.
    fn thresholds(&self, labels: &[String]) -> Result<Option<Arc<[f32]>>, String> {
        if self.threshold.is_none() && self.thresholds.is_empty() {
            return Ok(None);
        }
        if let Some(label) = self.thresholds.keys().find(|label| !labels.contains(label)) {
            return Err(format!(
                "thresholds has {label:?}, which is none of the labels"
            ));
        }
        let general = self.threshold.unwrap_or(0.0);
        let of_class = |label| self.thresholds.get(label).copied().unwrap_or(general);
        let thresholds: Arc<[f32]> = labels.iter().map(of_class).collect();
        match thresholds
            .iter()
            .find(|value| !(0.0..=1.0).contains(*value))
        {
            Some(value) => Err(format!("threshold {value} is no score from 0 to 1")),
            None => Ok(Some(thresholds)),
        }
    }
}

impl LabelsSetting {
    fn read(&self, dir: &Path) -> Result<Vec<String>, InferError> {
        match self {
            Self::List(labels) => Ok(labels.clone()),
            Self::File(file) => {
                let path = dir.join(file);
                let text = read_optional(&path)?
                    .ok_or_else(|| invalid(&path, &"there is no such file of labels"))?;
                Ok(text.lines().map(str::to_owned).collect())
            }
        }
    }
}

impl HubConfig {
    fn activation(&self, path: &Path) -> Result<Activation, InferError> {
        match self.problem_type.as_deref() {
            None | Some("single_label_classification") => Ok(Activation::Softmax),
            Some("multi_label_classification") => Ok(Activation::Sigmoid),
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

    fn labels(&self, path: &Path) -> Result<Option<Vec<String>>, InferError> {
        if let Some(id2label) = &self.id2label {
            return dense(id2label).map(Some).map_err(|why| invalid(path, &why));
        }
        match &self.label_names {
            Some(serde_json::Value::Array(names)) => names
                .iter()
                .map(text)
                .collect::<Option<_>>()
                .map(Some)
                .ok_or_else(|| invalid(path, &"label_names holds something other than text")),
            Some(serde_json::Value::Null) | None => Ok(self
                .num_classes
                .or_else(|| self.pretrained_cfg.as_ref()?.num_classes)
                .map(|count| (0..count).map(|class| class.to_string()).collect())),
            Some(_) => Err(invalid(path, &"label_names is no list")),
        }
    }
}

/// The names in the order of their numbers, which must be `0..N`.
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
    // As many distinct places were filled as there are.
    Ok(labels.into_iter().flatten().collect())
}

fn text(value: &serde_json::Value) -> Option<String> {
    match value {
        serde_json::Value::String(text) => Some(text.clone()),
        serde_json::Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn read_optional(path: &Path) -> Result<Option<String>, InferError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(invalid(path, &error)),
    }
}

fn invalid(path: &Path, why: &dyn fmt::Display) -> InferError {
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
        "there is no such file, and so no names of classes"
    };
    invalid(
        path,
        &format_args!(
            "{found}; add them, or set labels in the section [model] of trommel.toml beside it"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(files: &[(&str, &str)]) -> Result<ModelConfig, InferError> {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(dir.path().join(name), content).unwrap();
        }
        ModelConfig::read(dir.path())
    }

    fn labels(config: &ModelConfig) -> Vec<&str> {
        config.labels.iter().map(|label| &**label).collect()
    }

    fn error(files: &[(&str, &str)]) -> String {
        let error = read(files).unwrap_err();
        assert_eq!(error.kind(), InferErrorKind::ModelConfig);
        error.to_string()
    }

    #[test]
    fn id2label_is_in_the_order_of_the_numbers() {
        let names: Vec<String> = (0..12).map(|i| format!("\"{i}\": \"class {i}\"")).collect();
        let json = format!(
            r#"{{"id2label": {{{}}}, "model_type": "vit"}}"#,
            names.join(",")
        );
        let config = read(&[("config.json", &json)]).unwrap();
        assert_eq!(config.labels.len(), 12);
        assert_eq!(&*config.labels[10], "class 10");
        assert_eq!(config.activation, Activation::Softmax);
    }

    #[test]
    fn problem_type_chooses_the_activation() {
        for (problem, activation) in [
            ("null", Activation::Softmax),
            (r#""single_label_classification""#, Activation::Softmax),
            (r#""multi_label_classification""#, Activation::Sigmoid),
        ] {
            let json = format!(r#"{{"id2label": {{"0": "a"}}, "problem_type": {problem}}}"#);
            assert_eq!(
                read(&[("config.json", &json)]).unwrap().activation,
                activation
            );
        }
        let json = r#"{"id2label": {"0": "a"}, "problem_type": "regression"}"#;
        assert!(error(&[("config.json", json)]).contains("regression"));
    }

    #[test]
    fn thresholds_are_for_all_classes_or_by_label() {
        let json = r#"{"id2label": {"0": "a", "1": "b"}}"#;
        let thresholds = |toml: &str| {
            let config = read(&[("config.json", json), ("trommel.toml", toml)]).unwrap();
            config.thresholds.map(|thresholds| thresholds.to_vec())
        };
        assert_eq!(thresholds("[model]"), None);
        assert_eq!(thresholds("[model]\nthreshold = 0.5"), Some(vec![0.5, 0.5]));
        let one = "[model]\nthresholds = { b = 0.25 }";
        assert_eq!(thresholds(one), Some(vec![0.0, 0.25]));
        for (toml, named) in [
            ("[model]\nthresholds = { c = 0.5 }", "\"c\""),
            ("[model]\nthreshold = 50", "50"),
        ] {
            let text = error(&[("config.json", json), ("trommel.toml", toml)]);
            assert!(
                text.contains(named) && text.contains("trommel.toml"),
                "{text}"
            );
        }
    }

    #[test]
    fn timm_gives_names_or_a_number() {
        let json = r#"{"architecture": "x", "num_classes": 2, "label_names": ["n01", "n02"]}"#;
        assert_eq!(
            labels(&read(&[("config.json", json)]).unwrap()),
            ["n01", "n02"]
        );
        let json = r#"{"architecture": "x", "num_classes": 3, "pretrained_cfg": {}}"#;
        assert_eq!(
            labels(&read(&[("config.json", json)]).unwrap()),
            ["0", "1", "2"]
        );
    }

    #[test]
    fn trommel_toml_wins() {
        let json = r#"{"id2label": {"0": "a"}, "problem_type": "multi_label_classification"}"#;
        let toml = "[preprocess]\nwhatever = 1\n[model]\nactivation = \"none\"\nlabels = [\"b\"]";
        let config = read(&[("config.json", json), ("trommel.toml", toml)]).unwrap();
        assert_eq!(labels(&config), ["b"]);
        assert_eq!(config.activation, Activation::None);
    }

    #[test]
    fn labels_may_stand_in_a_file() {
        let toml = "[model]\nlabels = \"names.txt\"";
        let config = read(&[("trommel.toml", toml), ("names.txt", "cat\ndog\n")]).unwrap();
        assert_eq!(labels(&config), ["cat", "dog"]);
        assert!(error(&[("trommel.toml", toml)]).contains("names.txt"));
    }

    #[test]
    fn what_is_wrong_is_said_with_the_file() {
        for (json, words) in [
            ("{", "EOF"),
            ("{}", "no id2label, label_names or num_classes"),
            (r#"{"id2label": {}}"#, "empty"),
            (r#"{"id2label": {"1": "a"}}"#, "numbered from 0"),
            (r#"{"id2label": {"0": "a", "00": "b"}}"#, "numbered from 0"),
            (r#"{"id2label": {"0": []}}"#, "no text"),
            (r#"{"label_names": [null]}"#, "something other than text"),
        ] {
            let message = error(&[("config.json", json)]);
            assert!(message.contains(words), "{json}: {message}");
        }
        assert!(error(&[]).contains("config.json: there is no such file"));
    }

    #[test]
    fn an_unknown_key_for_the_model_is_refused() {
        let message = error(&[("trommel.toml", "[model]\nactivaton = \"softmax\"")]);
        assert!(
            message.contains("trommel.toml") && message.contains("activaton"),
            "{message}"
        );
    }
}
