use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trommel_types::{Column, EmbeddingType, ErrorKind};
use xxhash_rust::xxh3::xxh3_64;

use crate::Format;

/// One job as its rows and its output name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The job's id, the same over all its runs.
    pub job_id: String,
    /// Names the run: 8 hex digits that are made when the job begins and kept while it is resumed.
    /// See [`JobRecord::new_run`].
    pub run: String,
    /// A hash of all that shapes rows. See [`JobRecord::hash`].
    pub spec_hash: String,
    /// What is classified, as people read it.
    pub source: String,
    /// The model's name.
    pub model: String,
    /// The first digits of the model's content hash.
    pub model_version: String,
    /// Whatever else shapes rows, by name, such as `top-k`.
    pub options: BTreeMap<String, String>,
    /// Encoding of the parts. The output sets its own.
    pub format: Format,
    /// The source's pass-through columns.
    pub columns: Vec<Column>,
    /// Whether rows hold the model's raw output.
    pub logits: bool,
    /// Whether rows hold the images' embeddings.
    pub embedding: bool,
    /// In how many bits their values are kept.
    #[serde(default, skip_serializing_if = "EmbeddingType::is_default")]
    pub embedding_type: EmbeddingType,
    /// Whether text in CSV that a spreadsheet would run as a formula gets a `'` before it.
    #[serde(default)]
    pub escape_formulas: bool,
    /// Whose failed rows these rows replace; none for the job itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// When the job was created, in microseconds since the Unix epoch, UTC.
    pub created_at: i64,
}

/// A later run among the rows of a job: which of them it replaces, or that it adds to them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retry {
    /// 1 for the first retry of a job, and so on. Of several rows of an index the one of the highest
    /// number counts.
    pub number: u32,
    /// The job's run.
    pub of_run: String,
    /// The kinds of failures that are retried; empty for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kinds: Vec<ErrorKind>,
    /// Whether it replaces no failed rows, but adds those of images that have none yet, and replaces
    /// those of images that have changed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adds: bool,
    /// Of one that adds, alone: how many rows there were. One that was interrupted goes on only while
    /// there are as many.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub of_rows: u64,
    /// Of one that adds, in a table: the first index that was free. Rows of lower ones, which are written
    /// over in their place, are those of images that have changed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Retry {
    /// Whether a failed row of this kind is to be replaced.
    pub(crate) fn wants(&self, kind: &str) -> bool {
        self.kinds.is_empty() || self.kinds.iter().any(|wanted| wanted.as_str() == kind)
    }

    /// The flag that asks for it.
    pub(crate) fn flag(&self) -> String {
        let kinds: Vec<_> = self.kinds.iter().map(|kind| kind.as_str()).collect();
        match (self.adds, kinds.is_empty()) {
            (true, _) => "--skip-existing".to_owned(),
            (false, true) => "--retry-failed".to_owned(),
            (false, false) => format!("--retry-failed={}", kinds.join(",")),
        }
    }

    /// The kinds in words.
    pub(crate) fn kinds_in_words(&self) -> String {
        let kinds: Vec<_> = self.kinds.iter().map(|kind| kind.as_str()).collect();
        match kinds.is_empty() {
            true => String::new(),
            false => format!(" as {}", kinds.join(", ")),
        }
    }
}

impl JobRecord {
    /// 0 for the job itself, else the number of the retry.
    pub fn generation(&self) -> u32 {
        self.retry.as_ref().map_or(0, |retry| retry.number)
    }

    /// Whether its rows are added to those of a job, and replace no failed ones.
    pub fn adds(&self) -> bool {
        self.retry.as_ref().is_some_and(|retry| retry.adds)
    }

    /// A name for a run that begins now.
    pub fn new_run() -> String {
        format!("{:08x}", rand::random::<u32>())
    }

    /// A hash of what the record holds of the shape of rows, for a caller without one of its own.
    pub fn hash(&self) -> String {
        let shape = (
            &self.source,
            &self.model,
            &self.model_version,
            &self.options,
            &self.columns,
            (
                self.logits,
                self.embedding,
                self.embedding_type,
                self.escape_formulas,
            ),
        );
        let text = serde_json::to_vec(&shape).expect("a record holds text, numbers and lists");
        format!("{:016x}", xxh3_64(&text))
    }

    /// Why rows of `new` cannot share an output with those of this job, whatever their sources.
    pub(crate) fn row_differences(&self, new: &Self) -> Vec<String> {
        let of_any_source = Self {
            source: new.source.clone(),
            spec_hash: new.spec_hash.clone(),
            ..self.clone()
        };
        of_any_source.differences(new)
    }

    /// What differs in another record, with both values.
    pub(crate) fn differences(&self, new: &Self) -> Vec<String> {
        let fixed = |job: &Self| {
            [
                ("source".to_owned(), job.source.clone()),
                ("model".to_owned(), job.model.clone()),
                ("model version".to_owned(), job.model_version.clone()),
                ("format".to_owned(), job.format.to_string()),
                ("pass-through columns".to_owned(), describe(&job.columns)),
                ("logits".to_owned(), job.logits.to_string()),
                ("embedding".to_owned(), job.embedding.to_string()),
                ("embedding type".to_owned(), job.embedding_type.to_string()),
                (
                    "escaped formulas".to_owned(),
                    job.escape_formulas.to_string(),
                ),
            ]
        };
        let option = |job: &Self, name: &String| {
            let value = job.options.get(name).cloned();
            (name.clone(), value.unwrap_or_else(|| "not set".to_owned()))
        };
        let mut names: Vec<&String> = self.options.keys().chain(new.options.keys()).collect();
        names.sort();
        names.dedup();
        let old = fixed(self).into_iter();
        let pairs = old.zip(fixed(new));
        let options = names
            .into_iter()
            .map(|name| (option(self, name), option(new, name)));
        let mut differences: Vec<String> = pairs
            .chain(options)
            .filter(|(old, new)| old != new)
            .map(|((what, old), (_, new))| format!("{what} was {old}, is {new}"))
            .collect();
        if differences.is_empty() && self.spec_hash != new.spec_hash {
            differences.push(format!(
                "the hash of its specification was {}, is {}",
                self.spec_hash, new.spec_hash
            ));
        }
        differences
    }
}

fn describe(columns: &[Column]) -> String {
    let columns: Vec<_> = columns
        .iter()
        .map(|column| format!("{:?} {:?}", column.name, column.kind))
        .collect();
    if columns.is_empty() {
        "none".to_owned()
    } else {
        columns.join(", ")
    }
}
