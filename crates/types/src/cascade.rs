use serde::{Deserialize, Serialize};

use crate::JobRequest;

/// Two models for one label: a small one decides images that it is certain of, a large one the
/// rest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cascade {
    /// Share of images, from 0.5 to below 1, whose label has to be the large model's.
    pub agree: f64,
    /// Approximate number of images in the random sample that both models classify first. Default:
    /// 1500.
    #[serde(default = "default_sample")]
    pub sample: u64,
}

fn default_sample() -> u64 {
    Cascade::SAMPLE
}

impl Cascade {
    /// The default size of the sample.
    pub const SAMPLE: u64 = 1500;

    /// Why a job cannot be run as a cascade.
    pub(crate) fn problem(&self, request: &JobRequest) -> Option<&'static str> {
        let (rows, options) = (&request.rows, &request.options);
        let is_feed = |source: &String| source.starts_with("nats://");
        let problems = [
            (
                request.models.len() != 2,
                "cascade: name two models, the small one first",
            ),
            (
                !(0.5..1.0).contains(&self.agree),
                "cascade.agree: give a share from 0.5 to below 1, such as 0.99",
            ),
            (
                self.sample == 0,
                "cascade.sample: give at least a few hundred images",
            ),
            (
                rows.logits
                    || rows.embedding
                    || rows.threshold.is_some()
                    || !rows.thresholds.is_empty(),
                "cascade: its models give a label and its score each; leave out logits, embeddings and thresholds",
            ),
            (
                options.skip_existing,
                "cascade: workers add no rows of a cascade to existing ones; use trommel classify --skip-existing, or another output",
            ),
            (
                options.dry_run,
                "cascade: it has no dry run; try one with each of its models",
            ),
            (
                request.sources.iter().any(is_feed),
                "cascade: a sample of events cannot be drawn; give a source that can be listed",
            ),
            (
                request.output.starts_with("postgres"),
                "cascade: the rows of its sample are read back, which workers do not do from a table; give a folder or s3://bucket/prefix/",
            ),
        ];
        let (_, problem) = problems.into_iter().find(|(is_wrong, _)| *is_wrong)?;
        Some(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{JobOptions, Message, RowOptions};

    fn request() -> JobRequest {
        JobRequest {
            id: "cats".to_owned(),
            sources: vec!["s3://photos/".to_owned()],
            models: vec!["small".to_owned(), "large".to_owned()],
            output: "s3://rows/".to_owned(),
            cascade: Some(Cascade {
                agree: 0.99,
                sample: Cascade::SAMPLE,
            }),
            ..JobRequest::default()
        }
    }

    #[test]
    fn a_cascade_in_a_message_is_read_or_refused_by_name() {
        let json = |cascade: &str| {
            format!(
                r#"{{"id": "cats", "sources": ["s3://photos/"], "models": ["small", "large"], "output": "s3://rows/", "cascade": {cascade}}}"#
            )
        };
        let read = JobRequest::decode(json(r#"{"agree": 0.99}"#).as_bytes());
        assert_eq!(read.unwrap(), request());
        assert_eq!(JobRequest::decode(&request().encode()).unwrap(), request());
        for (cascade, words) in [
            ("0.99", "expected struct Cascade"),
            ("{}", "missing field `agree`"),
            (r#"{"agree": 0.99, "smaple": 9}"#, "unknown field `smaple`"),
            (r#"{"agree": 0.99, "sample": -1}"#, "expected u64"),
        ] {
            let error = JobRequest::decode(json(cascade).as_bytes()).unwrap_err();
            assert!(error.to_string().contains(words), "{cascade}: {error}");
        }
    }

    #[test]
    fn what_a_cascade_of_workers_does_not_support_is_refused_by_name() {
        assert_eq!(request().problems(), Vec::<String>::new());
        type Change = fn(&mut JobRequest);
        let changes: [(Change, &str); 10] = [
            (|job| drop(job.models.pop()), "two models"),
            (|job| job.models.push("third".to_owned()), "two models"),
            (
                |job| job.cascade.as_mut().unwrap().agree = 1.0,
                "cascade.agree",
            ),
            (
                |job| job.cascade.as_mut().unwrap().agree = f64::NAN,
                "cascade.agree",
            ),
            (
                |job| job.cascade.as_mut().unwrap().sample = 0,
                "cascade.sample",
            ),
            (
                |job| {
                    job.rows = RowOptions {
                        logits: true,
                        ..RowOptions::default()
                    };
                },
                "leave out logits",
            ),
            (
                |job| {
                    job.options = JobOptions {
                        skip_existing: true,
                        ..JobOptions::default()
                    };
                },
                "existing ones",
            ),
            (
                |job| {
                    job.options = JobOptions {
                        dry_run: true,
                        ..JobOptions::default()
                    };
                },
                "no dry run",
            ),
            (
                |job| job.sources = vec!["nats://photos".to_owned()],
                "events",
            ),
            (
                |job| job.output = "postgres://db/rows?table=t".to_owned(),
                "a table",
            ),
        ];
        for (change, words) in changes {
            let mut changed = request();
            change(&mut changed);
            let problems = changed.problems();
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].contains(words), "{problems:?}");
        }
    }
}
