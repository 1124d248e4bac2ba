use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::{Column, JobRequest};

/// A job with everything that affects its rows, as one value: the request, and what it meant when
/// the job began. It never changes afterwards.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// The request.
    pub request: JobRequest,
    /// Names this run of the job in every part: 8 hex digits. Empty until the job begins, like all
    /// fields below.
    #[serde(default)]
    pub run: String,
    /// For a retry, and for a job that adds rows: the job whose rows it joins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<JobBase>,
    /// The source in words.
    #[serde(default)]
    pub source: String,
    /// The source's pass-through columns.
    #[serde(default)]
    pub columns: Vec<Column>,
    /// The models, with their versions.
    #[serde(default)]
    pub models: Vec<JobModel>,
    /// For a cascade: its small model and its large one, which `models` names as one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<JobModel>,
    /// By model name: the columns that its rows have besides those of all rows and of the source.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub answers: BTreeMap<String, Vec<Column>>,
}

/// A job whose rows another job joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobBase {
    /// Its id, which all of the rows carry.
    pub job: String,
    /// Its run.
    pub run: String,
    /// The number of the run that joins; of several rows of an index, the one with the highest
    /// number counts.
    pub number: u32,
}

/// A model of a job.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct JobModel {
    /// Its name in the repository.
    pub name: String,
    /// The first 12 hex digits of its content hash.
    pub version: String,
}

impl JobSpec {
    /// The job's id.
    pub fn id(&self) -> &str {
        &self.request.id
    }

    /// Identifies what affects the rows, apart from the run and the job's id: 16 hex digits of the
    /// XXH3 hash of the spec's JSON. Two specs with the same hash produce the same rows from the
    /// same images.
    pub fn hash(&self) -> String {
        let mut shape = self.clone();
        shape.run.clear();
        shape.base = None;
        let request = &mut shape.request;
        request.id.clear();
        request.sources.clear(); // the source in words says more
        request.lane = crate::Lane::default();
        request.output.clear();
        request.options.format = None;
        request.options.overwrite = false;
        request.options.skip_existing = false;
        request.options.max_failure_rate = None;
        request.options.max_runtime_seconds = None;
        request.options.prices.clear();
        request.options.max_cost = None;
        request.options.forecast = None;
        request.options.retry = None;
        let json = serde_json::to_vec(&shape).expect("a spec holds text, numbers and lists");
        format!("{:016x}", xxh3_128(&json) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_names_what_shapes_rows_and_nothing_else() {
        let spec = JobSpec::default();
        let mut other = spec.clone();
        other.run = "0badcafe".to_owned();
        other.base = Some(JobBase {
            job: "job".to_owned(),
            run: "0a1b2c3d".to_owned(),
            number: 1,
        });
        other.request.id = "other".to_owned();
        other.request.output = "elsewhere/".to_owned();
        other.request.options.overwrite = true;
        other.request.options.skip_existing = true;
        other.request.options.retry = Some(crate::RetryOf {
            job: "job".to_owned(),
            number: 1,
            kinds: Vec::new(),
        });
        assert_eq!(spec.hash(), other.hash());
        let changes: [fn(&mut JobSpec); 4] = [
            |spec| spec.request.rows.logits = true,
            |spec| spec.source = "photos".to_owned(),
            |spec| spec.request.options.sample = Some(7),
            |spec| {
                spec.models.push(JobModel {
                    name: "digits".to_owned(),
                    version: "0123456789ab".to_owned(),
                });
            },
        ];
        for change in changes {
            let mut changed = spec.clone();
            change(&mut changed);
            assert_ne!(spec.hash(), changed.hash(), "{changed:?}");
        }
    }
}
