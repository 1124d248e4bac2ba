use std::collections::HashSet;

use serde::{Deserialize, Serialize};

/// The placeholder of the label in a template.
const PLACE: &str = "{}";

/// Classes named by a job instead of its model, which a text tower turns into embeddings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LabelSet {
    /// The names of the classes, in the order of their numbers.
    pub names: Vec<String>,
    /// Sentences in which `{}` is replaced by a label; their embeddings are averaged. Default:
    /// [`LabelSet::TEMPLATE`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub templates: Vec<String>,
}

impl LabelSet {
    /// The default sentence.
    pub const TEMPLATE: &'static str = "a photo of a {}";

    /// The sentences, or the default one.
    pub fn templates(&self) -> Vec<&str> {
        match self.templates.is_empty() {
            true => vec![Self::TEMPLATE],
            false => self.templates.iter().map(String::as_str).collect(),
        }
    }

    /// A label in a sentence.
    pub fn sentence(template: &str, label: &str) -> String {
        template.replacen(PLACE, label, 1)
    }

    /// The first problem of the set itself, if there is one.
    pub fn problem(&self) -> Option<String> {
        if self.names.is_empty() {
            return Some("there are no labels; give at least one".to_owned());
        }
        let mut seen = HashSet::with_capacity(self.names.len());
        for (place, label) in (1..).zip(&self.names) {
            if label.trim().is_empty() {
                return Some(format!("label {place} is empty; leave it out"));
            }
            if !seen.insert(label) {
                return Some(format!(
                    "label {label:?} is there twice (the second time as label {place}); leave one out"
                ));
            }
        }
        let is_odd = |template: &&String| template.matches(PLACE).count() != 1;
        self.templates.iter().find(is_odd).map(|template| {
            format!(
                "template {template:?} does not have {PLACE} once, where the label stands; write it like {:?}",
                Self::TEMPLATE
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(labels: &[&str], templates: &[&str]) -> LabelSet {
        let owned = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
        LabelSet {
            names: owned(labels),
            templates: owned(templates),
        }
    }

    #[test]
    fn what_cannot_be_a_set_of_labels_is_named() {
        for (set, words) in [
            (set(&[], &[]), "no labels"),
            (set(&["cat", " "], &[]), "label 2 is empty"),
            (
                set(&["cat", "dog", "cat"], &[]),
                "\"cat\" is there twice (the second time as label 3)",
            ),
            (set(&["cat"], &["a photo"]), "\"a photo\""),
            (set(&["cat"], &["{} and {}"]), "{} once"),
        ] {
            let problem = set.problem().unwrap();
            assert!(problem.contains(words), "{problem}");
        }
        assert_eq!(set(&["cat", "dog"], &["a {}", "the {}."]).problem(), None);
    }

    #[test]
    fn a_label_with_the_sign_of_a_place_is_text() {
        assert_eq!(LabelSet::sentence("a {}", "{}"), "a {}");
        assert_eq!(LabelSet::default().templates(), [LabelSet::TEMPLATE]);
    }
}
