use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::message::decode;
use crate::{DecodeError, Message, WIRE_VERSION};

/// How urgent a job is. Workers take what is in a higher lane first.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    /// Before all others.
    High,
    /// Unless said otherwise.
    #[default]
    Normal,
    /// When nothing else waits.
    Low,
}

impl Lane {
    /// All lanes, the most urgent first.
    pub const ALL: [Self; 3] = [Self::High, Self::Normal, Self::Low];

    /// The name used in subjects, such as `trommel.tasks.high`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }

    /// The lanes in the order in which take number `take` looks at them: the most urgent first, but of
    /// sixteen takes one begins at another lane, each in its turn, so that none starves.
    pub fn order(take: usize) -> [Self; 3] {
        const FAIR: usize = 16;
        let mut lanes = Self::ALL;
        if take % FAIR == FAIR - 1 {
            lanes.rotate_left(1 + take / FAIR % 2);
        }
        lanes
    }

    pub(crate) fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Lane {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|lane| lane.as_str() == text)
            .ok_or_else(|| format!("lane {text:?} is none of high, normal and low"))
    }
}

/// A wish to have images classified: the message from a user to ingest.
///
/// It may be written as MessagePack or as JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct JobRequest {
    /// Names the job for ever; the same id again is the same job. Letters, digits, `-` and `_`,
    /// at most 64. The control API gives one to a request without.
    #[serde(default)]
    pub id: String,
    /// What `trommel classify` takes: folders, `s3://bucket/prefix`, manifests and so on, as the
    /// workers see them. Or `nats://SUBJECT` alone, on which a store publishes notifications of new
    /// objects: such a job goes on until it is cancelled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<String>,
    /// Images that travel in the request, after those of `sources`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<InlineImage>,
    /// Names of models in the workers' repository; each gets rows of its own.
    pub models: Vec<String>,
    /// Where rows go: a folder of the workers, or `s3://bucket/prefix/`. Of several
    /// models each gets a folder of its name in it.
    pub output: String,
    /// How urgent it is.
    #[serde(default, skip_serializing_if = "Lane::is_normal")]
    pub lane: Lane,
    /// Everything else.
    #[serde(default)]
    pub options: JobOptions,
}

/// An image that travels in a job's request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InlineImage {
    /// Its name in the rows.
    pub uri: String,
    /// The encoded image. In JSON: a list of numbers, so MessagePack is the better choice here.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

/// Choices of a job. Each has the meaning of the flag of that name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobOptions {
    /// `parquet`, `jsonl` or `csv`, for a folder of parts. Default: Parquet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// File name suffixes that are taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suffixes: Option<Vec<String>>,
    /// Smallest encoded size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_size: Option<u64>,
    /// Largest encoded size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_size: Option<u64>,
    /// How many images are taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample: Option<u64>,
    /// Chooses another sample of the same size.
    pub sample_seed: u64,
    /// The column of a manifest that holds uris.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uri_column: Option<String>,
    /// The column of a Parquet file that holds images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_column: Option<String>,
    /// Share of failed images above which the job ends early, 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_failure_rate: Option<f64>,
    /// Seconds after which the job ends early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_runtime_seconds: Option<u64>,
    /// Whether results of another job at the output are replaced.
    pub overwrite: bool,
    /// Whether the images are only counted and the first few hundred classified, and no row is
    /// stored.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

impl Message for JobRequest {
    /// Decodes MessagePack, or JSON.
    fn decode(wire: &[u8]) -> Result<Self, DecodeError> {
        // No MessagePack map of few fields begins with a brace or white space.
        if !wire.trim_ascii_start().starts_with(b"{") {
            return decode(wire);
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
    /// Says what is wrong with the request itself, without looking at any store or model.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut check = |is_wrong: bool, problem: &str| {
            if is_wrong {
                problems.push(problem.to_owned());
            }
        };
        let is_name = |id: &str| {
            id.bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        check(
            self.id.is_empty() || self.id.len() > 64 || !is_name(&self.id),
            "id: give 1 to 64 letters, digits, - and _",
        );
        check(
            self.sources.is_empty() && self.images.is_empty(),
            "sources: name at least one, or give images",
        );
        check(
            self.sources.iter().any(|source| source == "-"),
            "sources: - is standard input, which workers have none of; name a manifest",
        );
        let is_feed = |source: &String| source.starts_with("nats://");
        check(
            self.sources.iter().any(is_feed)
                && (self.sources.len() > 1 || !self.images.is_empty() || self.options.dry_run),
            "sources: a subject of events stands alone, and cannot be tried without being followed",
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
        check(self.output.is_empty(), "output: say where rows go");
        check(
            self.options
                .max_failure_rate
                .is_some_and(|rate| !(0.0..=1.0).contains(&rate)),
            "options.max_failure_rate: give a share from 0 to 1",
        );
        check(
            names_password(&self.output),
            "output: its address holds a password, which all who look at jobs would see; leave it out and give it to the workers by PGPASSWORD",
        );
        problems
    }
}

/// Whether an address of a database holds a password: `user:password@host`, or an option of this
/// name.
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

/// Whether a name is one that a folder of a model repository may have.
fn is_model_name(name: &str) -> bool {
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

    #[test]
    fn lanes_read_what_they_write() {
        for lane in Lane::ALL {
            assert_eq!(lane.to_string().parse(), Ok(lane));
        }
        assert!("urgent".parse::<Lane>().unwrap_err().contains("high"));
    }
}
