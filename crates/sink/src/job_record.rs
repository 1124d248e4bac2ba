use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use trommel_types::{Column, EmbeddingType, ErrorKind};
use xxhash_rust::xxh3::xxh3_64;

use crate::Format;

/// A job as named by its rows and its output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    /// The job's id, the same in all its runs.
    pub job_id: String,
    /// Identifies the run: 8 hex digits, made when the job begins and kept when it resumes. See
    /// [`JobRecord::new_run`].
    pub run: String,
    /// A hash of everything that affects rows. See [`JobRecord::hash`].
    pub spec_hash: String,
    /// What is classified, for people.
    pub source: String,
    /// The model's name.
    pub model: String,
    /// The first digits of the model's content hash.
    pub model_version: String,
    /// Everything else that affects rows, by name, such as `top-k`.
    pub options: BTreeMap<String, String>,
    /// Encoding of the parts. The output sets its own.
    pub format: Format,
    /// The source's pass-through columns.
    pub columns: Vec<Column>,
    /// Whether rows include the model's raw output.
    pub logits: bool,
    /// Whether rows include the images' embeddings.
    pub embedding: bool,
    /// Precision of the embeddings.
    #[serde(default, skip_serializing_if = "EmbeddingType::is_default")]
    pub embedding_type: EmbeddingType,
    /// Whether CSV text that a spreadsheet would run as a formula is prefixed with `'`.
    #[serde(default)]
    pub escape_formulas: bool,
    /// For a retry, the failed rows that it replaces; `None` for the job itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// When the job was created, in microseconds since the Unix epoch, UTC.
    pub created_at: i64,
}

/// A later run that adds to or replaces rows of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retry {
    /// 1 for the first retry of a job, and so on. Of several rows with the same index, the one with
    /// the highest number counts.
    pub number: u32,
    /// The job's run.
    pub of_run: String,
    /// The kinds of failures that are retried; empty for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kinds: Vec<ErrorKind>,
    /// Whether it adds rows for images that have none, and replaces those of changed images,
    /// instead of replacing failed rows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adds: bool,
    /// For a process that adds rows alone: the number of existing rows. An interrupted run resumes
    /// only if it is unchanged.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub of_rows: u64,
    /// For rows added to a table: the first free index. Lower indices are those of changed images,
    /// whose rows are overwritten in place.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub first: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Retry {
    /// Whether a failed row of this kind is replaced.
    pub(crate) fn wants(&self, kind: &str) -> bool {
        self.kinds.is_empty() || self.kinds.iter().any(|wanted| wanted.as_str() == kind)
    }

    /// The flag that requests it.
    pub(crate) fn flag(&self) -> String {
        let kinds: Vec<_> = self.kinds.iter().map(|kind| kind.as_str()).collect();
        match (self.adds, kinds.is_empty()) {
            (true, _) => "--skip-existing".to_owned(),
            (false, true) => "--retry-failed".to_owned(),
            (false, false) => format!("--retry-failed={}", kinds.join(",")),
        }
    }

    /// The kinds, for messages.
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

    /// Whether it adds rows to a job instead of replacing failed ones.
    pub fn adds(&self) -> bool {
        self.retry.as_ref().is_some_and(|retry| retry.adds)
    }

    /// A name for a new run.
    pub fn new_run() -> String {
        format!("{:08x}", rand::random::<u32>())
    }

    /// A hash of the parts of the record that affect rows, for callers without their own.
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

    /// Why rows of `new` cannot share an output with those of this job, ignoring sources.
    pub(crate) fn row_differences(&self, new: &Self) -> Vec<String> {
        let of_any_source = Self {
            source: new.source.clone(),
            spec_hash: new.spec_hash.clone(),
            ..self.clone()
        };
        of_any_source.differences(new)
    }

    /// Differences from another record, with both values.
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
