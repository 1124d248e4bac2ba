use std::str::FromStr;
use std::sync::Arc;

use trommel_infer::Wanted;
use trommel_types::LabelSet;
use trommel_worker::ServedModel;

use crate::refused::Refused;

/// The row options of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Params {
    /// The uri in the row.
    pub(crate) uri: Option<String>,
    changes: Vec<Change>,
}

#[derive(Debug, Clone)]
enum Change {
    TopK(std::num::NonZeroU32),
    Threshold(f32),
    ThresholdOf(String, f32),
    Logits(bool),
    Embedding(bool),
    Labels(Vec<String>),
    Template(String),
}

impl Params {
    /// Parses the query of a url.
    ///
    /// # Errors
    /// Names a parameter that is unknown or has an invalid value.
    pub(crate) fn of_query(query: Option<&str>) -> Result<Self, Refused> {
        let mut params = Self::default();
        for (name, value) in form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
            params.set(&name, &value)?;
        }
        Ok(params)
    }

    /// Sets a parameter by its name.
    ///
    /// # Errors
    /// As [`Params::of_query`].
    pub(crate) fn set(&mut self, name: &str, value: &str) -> Result<(), Refused> {
        let change = match name {
            "uri" => {
                self.uri = Some(value.to_owned());
                return Ok(());
            }
            "top_k" => Change::TopK(read(name, value, "a number from 1")?),
            "threshold" => Change::Threshold(read(name, value, "a score from 0 to 1")?),
            "threshold_of" => {
                let wrong = || wrong(name, value, "LABEL=SCORE");
                let (label, score) = value.rsplit_once('=').ok_or_else(wrong)?;
                let score = score.parse().map_err(|_| wrong())?;
                Change::ThresholdOf(label.to_owned(), score)
            }
            "logits" => Change::Logits(read(name, value, "true or false")?),
            "embedding" => Change::Embedding(read(name, value, "true or false")?),
            "labels" => {
                let labels = value.split(',').map(|label| label.trim().to_owned());
                Change::Labels(labels.collect())
            }
            "template" => Change::Template(value.to_owned()),
            _ => {
                return Err(Refused::malformed(format!(
                    "unknown parameter {name:?}; known are uri, top_k, threshold, threshold_of, logits, embedding, labels, template"
                )));
            }
        };
        self.changes.push(change);
        Ok(())
    }

    /// The row options for this model.
    ///
    /// # Errors
    /// If the model does not support such rows.
    pub(crate) async fn wanted(&self, model: &ServedModel) -> Result<Arc<Wanted>, Refused> {
        let wanted = self.changed(Wanted::clone(model.wanted()))?;
        Ok(model.rows(wanted).await?)
    }

    fn changed(&self, mut wanted: Wanted) -> Result<Wanted, Refused> {
        let mut templates = Vec::new();
        for change in self.changes.iter().cloned() {
            match change {
                Change::TopK(top_k) => wanted.top_k = top_k,
                Change::Threshold(threshold) => wanted.threshold = Some(threshold),
                Change::ThresholdOf(label, threshold) => {
                    wanted.thresholds.insert(label, threshold);
                }
                Change::Logits(logits) => wanted.logits = logits,
                Change::Embedding(embedding) => wanted.embedding = embedding,
                Change::Labels(names) => {
                    wanted.labels = Some(LabelSet {
                        names,
                        templates: Vec::new(),
                    });
                }
                Change::Template(template) => templates.push(template),
            }
        }
        match (&mut wanted.labels, templates.is_empty()) {
            (_, true) => {}
            (Some(labels), false) => labels.templates = templates,
            (None, false) => {
                let message = "there is a template and there are no labels; give labels=cat,dog";
                return Err(Refused::malformed(message));
            }
        }
        Ok(wanted)
    }
}

fn read<T: FromStr>(name: &str, value: &str, expected: &str) -> Result<T, Refused> {
    value.parse().map_err(|_| wrong(name, value, expected))
}

fn wrong(name: &str, value: &str, expected: &str) -> Refused {
    Refused::malformed(format!("{name} is {value:?}; give {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_named() {
        for (query, words) in [
            ("topk=3", "\"topk\""),
            ("top_k=0", "top_k is \"0\""),
            ("top_k=-1", "a number from 1"),
            ("threshold=high", "a score"),
            ("threshold_of=cat", "LABEL=SCORE"),
            ("logits=1", "true or false"),
        ] {
            let refused = Params::of_query(Some(query)).unwrap_err();
            assert!(refused.message.contains(words), "{}", refused.message);
        }
        let params = Params::of_query(Some("uri=a%20b&threshold_of=a%3Db%3D0.5")).unwrap();
        assert_eq!(params.uri.as_deref(), Some("a b"));
        assert_eq!(params.changes.len(), 1);
        assert!(Params::of_query(None).unwrap().changes.is_empty());
    }

    #[test]
    fn labels_and_templates_stand_together() {
        let wanted = |query| {
            let params = Params::of_query(Some(query)).unwrap();
            params.changed(Wanted::default())
        };
        let changed = wanted("template=the%20{}&labels=red%20car,%20dog&template=a%20{}").unwrap();
        let labels = changed.labels.unwrap();
        assert_eq!(labels.names, ["red car", "dog"]);
        assert_eq!(labels.templates, ["the {}", "a {}"]);
        let refused = wanted("template=a%20{}").unwrap_err();
        assert!(refused.message.contains("no labels"), "{}", refused.message);
    }
}
