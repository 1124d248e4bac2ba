use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serde::de::{Error, IgnoredAny};
use serde::{Deserialize, Serialize};

use crate::message::decode;
use crate::price::{problem_of_prices, problem_of_token_prices};
use crate::{
    Cascade, Column, DecodeError, EmbeddingType, ErrorKind, FrameRate, LabelSet, Lane, Message,
    Mode, PHASH, Price, Reference, WIRE_VERSION,
};

/// Longest job id.
const MAX_ID: usize = 64;

/// A request to classify images: the message from a user to ingest.
///
/// It may be written as MessagePack or as JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct JobRequest {
    /// Names the job forever; the same id again refers to the same job. Letters, digits, `-` and
    /// `_`, at most 64. The control API generates one if it is missing.
    #[serde(default)]
    pub id: String,
    /// The sources of `trommel classify`: folders, `s3://bucket/prefix`, manifests and so on, as
    /// the workers see them. Or only `nats://SUBJECT`, on which a store publishes notifications of
    /// new objects: such a job runs until it is cancelled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// Names of models in the workers' repository; each model gets its own rows, except in a
    /// cascade.
    pub models: Vec<String>,
    /// Where rows go: a folder that the workers share, or `s3://bucket/prefix/`. With several
    /// models, each gets a folder with its name in it.
    pub output: String,
    /// How urgent it is.
    #[serde(default, skip_serializing_if = "Lane::is_normal")]
    pub lane: Lane,
    /// Runs the two models as a cascade, with one row for each image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cascade: Option<Cascade>,
    /// What each row holds.
    #[serde(default)]
    pub rows: RowOptions,
    /// Everything else.
    #[serde(default)]
    pub options: JobOptions,
}

/// What the rows of a job hold. Besides this, only the models and the source affect rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RowOptions {
    /// Classes in `top`. Default: 5.
    pub top_k: NonZeroU32,
    /// Whether rows include the model's raw output.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub logits: bool,
    /// Whether rows include the images' embeddings, for models that have them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub embedding: bool,
    /// Precision of the embeddings.
    #[serde(skip_serializing_if = "EmbeddingType::is_default")]
    pub embedding_type: EmbeddingType,
    /// Whether embeddings are scaled to length 1.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub normalize: bool,
    /// Whether rows include the images' perceptual hashes.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub phash: bool,
    /// Classes instead of the model's own, for models with a text tower.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<LabelSet>,
    /// The score that a class has to reach, in place of the model's own threshold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<f32>,
    /// The same for single classes, by label.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub thresholds: BTreeMap<String, f32>,
    /// How much tensors may differ from the reference's.
    pub mode: Mode,
    /// The processor that the tensors follow. Default: given by the model's folder.
    #[serde(skip_serializing_if = "Reference::is_auto")]
    pub reference: Reference,
    /// Whether CSV text that a spreadsheet would run as a formula is prefixed with `'`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub escape_formulas: bool,
}

impl Default for RowOptions {
    fn default() -> Self {
        Self {
            top_k: NonZeroU32::new(5).expect("5 is not 0"),
            logits: false,
            embedding: false,
            embedding_type: EmbeddingType::Float32,
            normalize: false,
            phash: false,
            labels: None,
            threshold: None,
            thresholds: BTreeMap::new(),
            mode: Mode::Exact,
            reference: Reference::Auto,
            escape_formulas: false,
        }
    }
}

impl RowOptions {
    /// The columns of rows after those that all rows have: those of the source, then the perceptual
    /// hash if requested.
    ///
    /// # Errors
    /// If the source has a column of the same name.
    pub fn columns(&self, of_source: &[Column]) -> Result<Vec<Column>, String> {
        let mut columns = of_source.to_vec();
        if self.phash {
            if of_source.iter().any(|column| column.name == PHASH) {
                return Err(format!(
                    "the source has a column {PHASH} already; rename it, or leave out the perceptual hash"
                ));
            }
            columns.push(Column::phash());
        }
        Ok(columns)
    }
}

/// Options of a job. Each has the meaning of the flag of the same name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobOptions {
    /// `parquet`, `jsonl` or `csv`, for a folder of parts. Default: Parquet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// File name suffixes to include.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suffixes: Option<Vec<String>>,
    /// Smallest encoded size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_size: Option<u64>,
    /// Largest encoded size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_size: Option<u64>,
    /// Size of the sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample: Option<u64>,
    /// Chooses another sample of the same size.
    pub sample_seed: u64,
    /// The column of a manifest that holds uris.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uri_column: Option<String>,
    /// Base of relative paths in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The column of a Parquet file that holds images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_column: Option<String>,
    /// Frames per second to take from videos. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fps: Option<FrameRate>,
    /// Share of failed images above which the job ends early, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_failure_rate: Option<f64>,
    /// Seconds after which the job ends early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_runtime_seconds: Option<u64>,
    /// The user's prices, as in `infer=2.10/h`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prices: Vec<Price>,
    /// Cost at these prices at which the job ends early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_cost: Option<f64>,
    /// The forecast of a dry run, to compare with the actual figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// Milliseconds after an image is queued from which it is discarded: its row fails as
    /// `expired`. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_deadline_ms: Option<u64>,
    /// Whether to replace results of another job at the output.
    pub overwrite: bool,
    /// Whether to add rows to those at the output, for images whose uri and etag have no row there.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skip_existing: bool,
    /// Whether only to count the images and classify the first few hundred, without storing rows.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// The failed rows to retry. The control API fills it in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<RetryOf>,
}

/// The forecast of a job by a dry run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Images of the whole job.
    pub images: u64,
    /// Seconds from its start to its end.
    pub seconds: f64,
    /// The 95 % interval of the time, as far as a sample allows; absent if the sample was too
    /// small.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_seconds: Option<f64>,
    /// Its upper end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_seconds: Option<f64>,
    /// Cost at the user's prices, if there were any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

/// Which failed rows of which job a retry classifies again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetryOf {
    /// The job.
    pub job: String,
    /// 1 for its first retry, and so on.
    pub number: u32,
    /// The kinds of failures; empty for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kinds: Vec<ErrorKind>,
}

impl RetryOf {
    /// The id of the retry's own job.
    pub fn id(&self) -> String {
        let id = format!("{}-retry-{}", self.job, self.number);
        if id.len() <= MAX_ID {
            return id;
        }
        let hash = xxhash_rust::xxh3::xxh3_64(self.job.as_bytes());
        let start = self.job.get(..24).unwrap_or_default();
        format!("{start}-{hash:016x}-retry-{}", self.number)
    }
}

/// The field of requests from before single images were answered at once.
#[derive(Deserialize)]
struct Gone {
    #[serde(default)]
    images: Option<IgnoredAny>,
}

const IMAGES: &str = "a job's request holds no images any more; name `sources`, or ask `trommel serve` for the labels of single images";

impl Message for JobRequest {
    /// Decodes MessagePack, or JSON.
    fn decode(wire: &[u8]) -> Result<Self, DecodeError> {
        // No MessagePack map of few fields begins with a brace or white space.
        if !wire.trim_ascii_start().starts_with(b"{") {
            let Gone { images } = rmp_serde::from_slice(wire)?;
            if images.is_some() {
                return Err(rmp_serde::decode::Error::custom(IMAGES).into());
            }
            return decode(wire);
        }
        let Gone { images } = serde_json::from_slice(wire)?;
        if images.is_some() {
            return Err(serde_json::Error::custom(IMAGES).into());
        }
        #[derive(Deserialize)]
        struct Version {
            #[serde(default)]
            version: u16,
        }
        let Version { version } = serde_json::from_slice(wire)?;
        if version > WIRE_VERSION {
            return Err(DecodeError::TooNew { version });
        }
        Ok(serde_json::from_slice(wire)?)
    }
}

impl JobRequest {
    /// Whether its id can be used in records, subjects and part names.
    pub fn has_valid_id(&self) -> bool {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        (1..=MAX_ID).contains(&self.id.len()) && self.id.bytes().all(is_valid)
    }

    /// Checks the request itself, without looking at any store or model.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut check = |is_wrong: bool, problem: &str| {
            if is_wrong {
                problems.push(problem.to_owned());
            }
        };
        check(
            !self.has_valid_id(),
            "id: give 1 to 64 letters, digits, - and _",
        );
        check(self.sources.is_empty(), "sources: name at least one");
        check(
            self.sources.iter().any(|source| source == "-"),
            "sources: workers have no standard input (-); name a manifest",
        );
        let is_feed = |source: &String| source.starts_with("nats://");
        check(
            self.sources.iter().any(is_feed) && (self.sources.len() > 1 || self.options.dry_run),
            "sources: nats://SUBJECT must be the only source, and has no dry run",
        );
        check(self.models.is_empty(), "models: name at least one");
        let mut names: Vec<_> = self.models.iter().collect();
        names.sort();
        names.dedup();
        check(
            names.len() < self.models.len(),
            "models: one is named twice",
        );
        check(
            self.models.iter().any(|name| !is_model_name(name)),
            "models: a name is letters, digits, -, _ and . and does not begin with a dot",
        );
        check(self.output.is_empty(), "output: must not be empty");
        check(
            self.options
                .max_failure_rate
                .is_some_and(|rate| !(0.0..=1.0).contains(&rate)),
            "options.max_failure_rate: give a share from 0 to 1",
        );
        let prices = &self.options.prices;
        let uncounted = || problem_of_token_prices(prices).filter(|_| !self.options.dry_run);
        let problem = problem_of_prices(prices).or_else(uncounted);
        check(
            problem.is_some(),
            &format!("options.prices: {}", problem.as_deref().unwrap_or_default()),
        );
        let max_cost = self.options.max_cost;
        check(
            max_cost.is_some_and(|cost| !(cost > 0.0 && cost.is_finite())),
            "options.max_cost: give an amount above 0",
        );
        check(
            max_cost.is_some() && self.options.prices.is_empty(),
            "options.max_cost: without options.prices nothing costs anything; give the prices too",
        );
        check(
            self.options.image_deadline_ms == Some(0),
            "options.image_deadline_ms: 0 lets every image expire; give milliseconds, or leave it out",
        );
        let JobOptions {
            skip_existing,
            overwrite,
            dry_run,
            ..
        } = self.options;
        check(
            skip_existing && (overwrite || dry_run || self.sources.iter().any(is_feed)),
            "options.skip_existing: rows are not added to what is overwritten, by a dry run, or of events",
        );
        let is_other = |retry: &RetryOf| retry.number == 0 || retry.id() != self.id;
        check(
            self.options.retry.as_ref().is_some_and(is_other),
            "options.retry: a retry is requested by trommel jobs retry, which gives it its id",
        );
        let cascade = self.cascade.and_then(|cascade| cascade.problem(self));
        check(cascade.is_some(), cascade.unwrap_or_default());
        let is_share = |share: &f32| (0.0..=1.0).contains(share);
        let mut thresholds = self
            .rows
            .threshold
            .iter()
            .chain(self.rows.thresholds.values());
        check(
            !thresholds.all(is_share),
            "rows.threshold, rows.thresholds: give scores from 0 to 1",
        );
        let labels = self.rows.labels.as_ref().and_then(LabelSet::problem);
        let labels = labels.map(|problem| format!("rows.labels: {problem}"));
        check(labels.is_some(), labels.as_deref().unwrap_or_default());
        check(
            names_password(&self.output),
            "output: its address holds a password, which all who look at jobs would see; leave it out and give it to the workers by PGPASSWORD",
        );
        problems
    }
}

/// Whether the address of a database contains a password: `user:password@host`, or an option of
/// this name.
fn names_password(address: &str) -> bool {
    let Some(("postgres" | "postgresql", rest)) = address.split_once("://") else {
        return false;
    };
    let (authority, query) = rest.split_once('?').unwrap_or((rest, ""));
    let user = authority.rsplit_once('@').map_or("", |(user, _)| user);
    user.contains(':')
        || query
            .split('&')
            .any(|option| option.starts_with("password="))
}

/// Whether a name is valid for a folder of a model repository.
pub fn is_model_name(name: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    name.split('/').count() <= 2 && name.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> JobRequest {
        JobRequest {
            id: "cats-1".to_owned(),
            sources: vec!["s3://bucket/cats/".to_owned()],
            models: vec!["digits".to_owned()],
            output: "s3://bucket/rows/".to_owned(),
            ..JobRequest::default()
        }
    }

    #[test]
    fn json_and_messagepack_say_the_same() {
        let json = r#" {"version": 1, "id": "cats-1", "sources": ["s3://bucket/cats/"],
            "models": ["digits"], "output": "s3://bucket/rows/", "colour": "ignored"}"#;
        assert_eq!(JobRequest::decode(json.as_bytes()).unwrap(), request());
        assert_eq!(JobRequest::decode(&request().encode()).unwrap(), request());
    }

    #[test]
    fn a_newer_version_and_nonsense_are_refused() {
        for (wire, words) in [
            (
                &br#"{"version": 9, "models": [], "output": ""}"#[..],
                "version 9",
            ),
            (br#"{"models": 7, "output": ""}"#, "invalid type"),
            (b"{", "EOF"),
            (
                br#"{"models": ["m"], "output": "o/", "sources": ["a"], "images": []}"#,
                "holds no images",
            ),
            (b"\x82\xa6images\x90\xa6models\x90", "holds no images"),
            (b"\xc1", "not a message"),
        ] {
            let error = JobRequest::decode(wire).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_password_is_not_to_be_stored_with_a_job() {
        for (output, is_refused) in [
            ("postgres://me:word@host/db?table=t", true),
            ("postgres://me:w/rd@host/db?table=t", true),
            ("postgres://me@host/db?table=t&password=word", true),
            ("postgres://me@host:5432/db?table=t", false),
            ("s3://bucket/a:b@c/", false),
            ("rows/a:b@c", false),
        ] {
            let request = JobRequest {
                output: output.to_owned(),
                ..request()
            };
            assert_eq!(!request.problems().is_empty(), is_refused, "{output}");
        }
    }

    #[test]
    fn a_retry_has_an_id_of_its_own_however_long_that_of_its_job() {
        let retry = |job: &str, number| RetryOf {
            job: job.to_owned(),
            number,
            kinds: Vec::new(),
        };
        assert_eq!(retry("cats-1", 2).id(), "cats-1-retry-2");
        let (one, other) = ("x".repeat(64), format!("{}y", "x".repeat(63)));
        assert_ne!(retry(&one, 1).id(), retry(&other, 1).id());
        let request = |id: String| JobRequest {
            id,
            options: JobOptions {
                retry: Some(retry(&one, u32::MAX)),
                ..JobOptions::default()
            },
            ..request()
        };
        let right = request(retry(&one, u32::MAX).id());
        assert_eq!(right.problems(), Vec::<String>::new());
        assert_eq!(request("other".to_owned()).problems().len(), 1);
    }

    #[test]
    fn all_problems_are_told_at_once() {
        assert_eq!(request().problems(), Vec::<String>::new());
        let wrong = JobRequest {
            id: "a b".to_owned(),
            sources: vec!["-".to_owned()],
            models: vec!["../secret".to_owned(), "../secret".to_owned()],
            output: String::new(),
            options: JobOptions {
                max_failure_rate: Some(2.0),
                ..JobOptions::default()
            },
            ..request()
        };
        let problems = wrong.problems();
        assert_eq!(problems.len(), 6, "{problems:?}");
        let nothing = JobRequest::default().problems();
        assert_eq!(nothing.len(), 4, "{nothing:?}");
    }
}
