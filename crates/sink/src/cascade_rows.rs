//! What the rows of a cascade say about its models.

use std::sync::Arc;

use serde_json::{Map, Value};
use tokio::task::spawn_blocking;
use trommel_storage::StorageError;

use crate::format::{Input, Wanted};
use crate::generations::{Generation, broken_off};
use crate::{Format, JobRecord};

/// The columns of a cascade's answer, in addition to the label.
pub(crate) const ANSWER: [&str; 3] = ["decided_by", "small_label", "small_score"];

/// A sampled image, which both models have labelled.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledRow {
    /// Its index in the job.
    pub index: u64,
    /// The large model's label.
    pub label: String,
    /// The small model's label.
    pub small_label: String,
    /// Its score.
    pub small_score: f32,
}

/// The rows of a cascade by the model that decided.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CascadeRows {
    /// Sampled images.
    pub sampled: u64,
    /// Those with a label of each model, in no order.
    pub sample: Vec<SampledRow>,
    /// Images that the small model decided alone.
    pub small: u64,
    /// Images that the large model decided because the small one was uncertain.
    pub large: u64,
}

impl CascadeRows {
    /// Reads the rows of a job's parts. Failed rows have no decision.
    pub(crate) async fn of(parts: &Generation, job: &Arc<JobRecord>) -> Result<Self, StorageError> {
        let mut all = Self::default();
        for file in parts.files() {
            let (name, input) = file.open().await?;
            let (format, job) = (file.format(), Arc::clone(job));
            let read = spawn_blocking(move || all.add(input, format, &job).map(|()| all));
            let read = read.await.map_err(|_| broken_off("reading a part"))?;
            all = read.map_err(|reason| StorageError::corrupt(name.as_ref(), reason))?;
        }
        Ok(all)
    }

    fn add(&mut self, input: Input, format: Format, job: &JobRecord) -> Result<(), String> {
        let encoding = format.encoding();
        let text = |value: Option<Value>| match value {
            Some(Value::String(text)) if job.escape_formulas => {
                Some(encoding.unescaped(&text).to_owned())
            }
            Some(Value::String(text)) => Some(text),
            _ => None,
        };
        for fields in encoding.rows(input, Wanted::Cascade)? {
            let mut fields: Map<String, Value> = fields?;
            match text(fields.remove("decided_by")).as_deref() {
                Some("small") => self.small += 1,
                Some("large") => self.large += 1,
                Some("sample") => {
                    let index = fields.get("index").and_then(Value::as_u64);
                    let mut column = |name: &str| fields.remove(name);
                    self.sampled += 1;
                    // Without a label of the small model there is nothing to compare.
                    if let (Some(label), Some(small_label), Some(small_score)) = (
                        text(column("label")),
                        text(column("small_label")),
                        score(column("small_score")),
                    ) {
                        self.sample.push(SampledRow {
                            index: index.ok_or("a row has no index")?,
                            label,
                            small_label,
                            small_score,
                        });
                    }
                }
                Some(other) => return Err(format!("a row is decided_by {other:?}")),
                None => {}
            }
        }
        Ok(())
    }
}

/// Text formats store columns as text.
fn score(value: Option<Value>) -> Option<f32> {
    match value? {
        Value::Number(score) => score.as_f64().map(|score| score as f32),
        Value::String(score) => score.parse().ok(),
        _ => None,
    }
}
