//! The section `[prompt]` of a folder's `trommel.toml`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::key::Key;
use crate::onnx_file::hex;
use crate::version::VERSION_DIGITS;
use crate::{InferError, InferErrorKind};

/// How a server is constrained to the choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Constrain {
    /// Not at all: any other answer gives a failed row.
    None,
    /// `guided_choice`: vLLM up to 0.11, LMDeploy.
    GuidedChoice,
    /// `structured_outputs`: vLLM from 0.11.
    StructuredOutputs,
    /// `response_format` with a JSON schema: OpenAI, vLLM, SGLang, llama.cpp, LMDeploy.
    JsonSchema,
    /// `regex`: SGLang.
    Regex,
    /// `grammar` in GBNF: llama.cpp.
    Grammar,
}

/// The keys of the section.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Section {
    url: Option<String>,
    #[serde(default)]
    urls: Vec<String>,
    model: String,
    text: Option<String>,
    text_file: Option<PathBuf>,
    system: Option<String>,
    choices: Option<ChoicesSetting>,
    constrain: Option<Constrain>,
    max_tokens: Option<u32>,
    #[serde(default)]
    temperature: f64,
    seed: Option<i64>,
    #[serde(default)]
    image_first: bool,
    #[serde(default = "yes")]
    logprobs: bool,
    // Checked where images are prepared.
    family: Option<String>,
    image_tokens: Option<u64>,
    max_pixels: Option<u64>,
    encoding: Option<String>,
    quality: Option<u8>,
    key: Option<toml::Value>,
    key_env: Option<String>,
    key_file: Option<PathBuf>,
    max_concurrency: Option<usize>,
    #[serde(default, with = "humantime_serde")]
    timeout: Option<Duration>,
    #[serde(default, with = "humantime_serde")]
    deadline: Option<Duration>,
    #[serde(default, with = "humantime_serde")]
    outage: Option<Duration>,
    price_in: Option<f64>,
    price_out: Option<f64>,
    #[serde(default)]
    extra: Map<String, Value>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(
    untagged,
    expecting = "choices must be a list of text, or a file with one choice a line"
)]
enum ChoicesSetting {
    List(Vec<String>),
    File(PathBuf),
}

fn yes() -> bool {
    true
}

/// A folder's prompt, validated.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Addresses of the servers, each with the path of its API, without a trailing slash.
    pub(crate) urls: Vec<String>,
    pub(crate) key: Option<Key>,
    /// Everything that affects rows, and so the version.
    pub(crate) asked: Asked,
    /// Most requests in flight to one server.
    pub(crate) max_concurrency: usize,
    /// Time limit of one request.
    pub(crate) timeout: Duration,
    /// Time limit of all requests for an image.
    pub(crate) deadline: Duration,
    /// Longest time without any answer before the job ends.
    pub(crate) outage: Duration,
    /// Prices per million input and output tokens.
    pub(crate) prices: Option<(f64, f64)>,
    /// Files next to `trommel.toml` that were read.
    pub(crate) files: Vec<PathBuf>,
}

/// The request: everything that affects rows.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Asked {
    pub(crate) model: String,
    pub(crate) text: String,
    pub(crate) system: Option<String>,
    /// Empty if any answer is accepted.
    pub(crate) choices: Arc<[Arc<str>]>,
    pub(crate) constrain: Constrain,
    pub(crate) max_tokens: u32,
    pub(crate) temperature: f64,
    pub(crate) seed: Option<i64>,
    pub(crate) image_first: bool,
    pub(crate) logprobs: bool,
    pub(crate) extra: Map<String, Value>,
    /// How images are sent, for the version.
    images: SentAs,
}

/// The family, the limits of pixels and tokens, the encoding and its quality, as written.
type SentAs = (
    Option<String>,
    Option<u64>,
    Option<u64>,
    Option<String>,
    Option<u8>,
);

impl Asked {
    /// The first digits of a SHA-256 over all of it.
    pub(crate) fn version(&self) -> Arc<str> {
        let json = serde_json::to_vec(self).expect("a prompt holds text, numbers and lists");
        let mut digits = hex(&Sha256::digest(json));
        digits.truncate(VERSION_DIGITS);
        digits.into()
    }
}

/// Fields of a request that Trommel sets itself.
const OWN_FIELDS: [&str; 13] = [
    "model",
    "messages",
    "max_tokens",
    "temperature",
    "seed",
    "logprobs",
    "stream",
    "n",
    "guided_choice",
    "structured_outputs",
    "response_format",
    "regex",
    "grammar",
];

/// Longest choice, in bytes.
const LONGEST_CHOICE: usize = 1024;
/// Most choices.
const MOST_CHOICES: usize = 10_000;

/// Whether the folder's `trommel.toml` has a section `[prompt]`.
pub(crate) fn is_prompt(dir: &Path) -> bool {
    let Ok(text) = fs::read_to_string(dir.join("trommel.toml")) else {
        return false;
    };
    // Malformed files are reported when they are read; they may well be meant as prompts.
    match text.parse::<toml::Table>() {
        Ok(table) => table.contains_key("prompt"),
        Err(_) => text.lines().any(|line| line.trim() == "[prompt]"),
    }
}

impl Settings {
    /// Reads the section in the folder `dir`, without its key.
    ///
    /// # Errors
    /// If it is malformed or contradicts itself, with the key and the remedy.
    pub(crate) fn read(dir: &Path) -> Result<Self, InferError> {
        let path = dir.join("trommel.toml");
        let invalid = |why: &str| invalid(&path, why);
        let text = fs::read_to_string(&path).map_err(|error| invalid(&error.to_string()))?;
        #[derive(Deserialize)]
        struct File {
            prompt: Section,
            model: Option<toml::Table>,
        }
        let File { prompt, model } =
            toml::from_str(&text).map_err(|error| invalid(error.to_string().trim_end()))?;
        let graph = ["model.onnx", "onnx/model.onnx"];
        if model.is_some() || graph.iter().any(|file| dir.join(file).exists()) {
            return Err(invalid(
                "[prompt] asks servers, but the folder holds a model too; give each its own folder",
            ));
        }
        prompt.settings(dir).map_err(|why| invalid(&why))
    }
}

impl Section {
    fn settings(self, dir: &Path) -> Result<Settings, String> {
        if self.key.is_some() {
            return Err(
                "prompt.key: a key does not belong in a file that is copied and logged; \
                        name a variable with key-env or a file with key-file"
                    .to_owned(),
            );
        }
        let mut files = Vec::new();
        let text = self.text(dir, &mut files)?;
        if text.contains('\0') || self.system.as_ref().is_some_and(|text| text.contains('\0')) {
            return Err("prompt.text, system: a text holds a zero byte; take it out".to_owned());
        }
        let choices = self.choices(dir, &mut files)?;
        let constrain = self.constrain(!choices.is_empty())?;
        if let Some(field) = self
            .extra
            .keys()
            .find(|field| OWN_FIELDS.contains(&&***field))
        {
            return Err(format!(
                "prompt.extra.{field}: this field is set by other keys of [prompt]; leave it out"
            ));
        }
        let is_price =
            |price: &Option<f64>| price.is_none_or(|price| price.is_finite() && price >= 0.0);
        if !is_price(&self.price_in) || !is_price(&self.price_out) {
            return Err("prompt.price-in, price-out: give prices of a million tokens".to_owned());
        }
        let prices = match (self.price_in, self.price_out) {
            (None, None) => None,
            (price_in, price_out) => Some((price_in.unwrap_or(0.0), price_out.unwrap_or(0.0))),
        };
        let seconds = Duration::from_secs;
        let settings = Settings {
            urls: self.urls()?,
            key: Key::named(self.key_env.as_deref(), self.key_file.as_deref(), dir)?,
            max_concurrency: self.max_concurrency.unwrap_or(64),
            timeout: self.timeout.unwrap_or(seconds(60)),
            deadline: self.deadline.unwrap_or(seconds(180)),
            outage: self.outage.unwrap_or(seconds(300)),
            prices,
            files,
            asked: Asked {
                max_tokens: self.max_tokens.unwrap_or(32),
                model: self.model,
                text,
                system: self.system,
                choices,
                constrain,
                temperature: self.temperature,
                seed: self.seed,
                image_first: self.image_first,
                logprobs: self.logprobs,
                extra: self.extra,
                images: (
                    self.family,
                    self.image_tokens,
                    self.max_pixels,
                    self.encoding,
                    self.quality,
                ),
            },
        };
        settings.check()
    }

    fn urls(&self) -> Result<Vec<String>, String> {
        let given: Vec<_> = self.url.iter().chain(&self.urls).collect();
        if given.is_empty() {
            return Err(
                "prompt.url is missing: give the address of an OpenAI-compatible server, \
                        such as http://localhost:8000/v1"
                    .to_owned(),
            );
        }
        let mut urls: Vec<String> = Vec::new();
        for url in given {
            let url = url.trim_end_matches('/');
            let parsed: Uri = url
                .parse()
                .map_err(|error| format!("prompt.url {url:?} is no address: {error}"))?;
            let authority = parsed
                .authority()
                .map_or("", |authority| authority.as_str());
            if authority.contains('@') {
                return Err(
                    "prompt.url holds a user or a password; give a key by key-env or key-file"
                        .to_owned(),
                );
            }
            if !matches!(parsed.scheme_str(), Some("http" | "https")) || authority.is_empty() {
                return Err(format!(
                    "prompt.url {url:?}: give an address such as http://localhost:8000/v1"
                ));
            }
            if parsed.query().is_some() {
                return Err(format!("prompt.url {url:?}: an address has no ? here"));
            }
            if url.ends_with("/chat/completions") {
                return Err(format!(
                    "prompt.url {url:?}: leave out /chat/completions, which is added"
                ));
            }
            if urls.iter().any(|known| known == url) {
                return Err(format!("prompt.urls: {url} is there twice"));
            }
            urls.push(url.to_owned());
        }
        Ok(urls)
    }

    fn text(&self, dir: &Path, files: &mut Vec<PathBuf>) -> Result<String, String> {
        let text = match (&self.text, &self.text_file) {
            (Some(text), None) => text.clone(),
            (None, Some(file)) => {
                let path = dir.join(file);
                let text = fs::read_to_string(&path);
                files.push(path.clone());
                text.map_err(|error| format!("prompt.text-file {}: {error}", path.display()))?
            }
            (Some(_), Some(_)) => {
                return Err("prompt.text and text-file: give one of them".to_owned());
            }
            (None, None) => {
                return Err("prompt.text is missing: write what each image is asked".to_owned());
            }
        };
        match text.trim().is_empty() {
            true => Err("prompt.text is empty: write what each image is asked".to_owned()),
            false => Ok(text),
        }
    }

    fn choices(&self, dir: &Path, files: &mut Vec<PathBuf>) -> Result<Arc<[Arc<str>]>, String> {
        let choices = match &self.choices {
            None => return Ok([].into()),
            Some(ChoicesSetting::List(choices)) => choices.clone(),
            Some(ChoicesSetting::File(file)) => {
                let path = dir.join(file);
                files.push(path.clone());
                let text = fs::read_to_string(&path)
                    .map_err(|error| format!("prompt.choices {}: {error}", path.display()))?;
                text.lines().map(str::to_owned).collect()
            }
        };
        if choices.is_empty() || choices.len() > MOST_CHOICES {
            return Err(format!(
                "prompt.choices has {} choices; give 1 to {MOST_CHOICES}, or leave the key out for answers in any words",
                choices.len()
            ));
        }
        let mut sorted: Vec<&str> = choices.iter().map(String::as_str).collect();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("prompt.choices: {:?} is there twice", pair[0]));
        }
        for choice in &choices {
            if choice.trim().is_empty() || choice.trim() != choice {
                return Err(format!(
                    "prompt.choices: {choice:?} is empty or has spaces around it; answers are compared without them"
                ));
            }
            if choice.len() > LONGEST_CHOICE || choice.contains(char::is_control) {
                return Err(format!(
                    "prompt.choices: {:?}… is longer than {LONGEST_CHOICE} bytes or holds a control character",
                    choice.chars().take(40).collect::<String>()
                ));
            }
        }
        Ok(choices.into_iter().map(Arc::from).collect())
    }

    fn constrain(&self, has_choices: bool) -> Result<Constrain, String> {
        match (self.constrain, has_choices) {
            (Some(Constrain::None) | None, false) => Ok(Constrain::None),
            (Some(_), false) => Err("prompt.constrain needs choices next to it".to_owned()),
            (Some(constrain), true) => Ok(constrain),
            (None, true) => Err(
                "prompt.constrain is missing: say how your server is made to answer with one of the \
                 choices: \"structured_outputs\" (vLLM from 0.11), \"guided_choice\" (vLLM before, \
                 LMDeploy), \"regex\" (SGLang), \"grammar\" (llama.cpp), \"json_schema\" (OpenAI and \
                 most others), or \"none\" (transformers serve), with which other answers are failed rows"
                    .to_owned(),
            ),
        }
    }
}

impl Settings {
    fn check(self) -> Result<Self, String> {
        if self.max_concurrency == 0 || self.asked.max_tokens == 0 {
            return Err("prompt.max-concurrency, max-tokens: must not be 0".to_owned());
        }
        let times = [self.timeout, self.deadline, self.outage];
        if times.iter().any(Duration::is_zero) {
            return Err("prompt.timeout, deadline, outage: must not be 0".to_owned());
        }
        if self.outage < self.timeout {
            return Err(format!(
                "prompt.outage is {:?}, less than the {:?} that one request may take (prompt.timeout); raise it",
                self.outage, self.timeout
            ));
        }
        if !self.asked.temperature.is_finite() || self.asked.temperature < 0.0 {
            return Err("prompt.temperature: give a number from 0".to_owned());
        }
        if self.asked.model.trim().is_empty() {
            return Err("prompt.model is empty: name the model as its server calls it".to_owned());
        }
        Ok(self)
    }
}

fn invalid(path: &Path, why: &str) -> InferError {
    InferError::new(
        InferErrorKind::ModelConfig,
        format_args!("{}: {}", path.display(), why.trim_end_matches('.')),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "url = \"http://localhost:8000/v1/\"\nmodel = \"m\"\ntext = \"What?\"\n";

    fn read(keys: &str) -> Result<Settings, InferError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("names.txt"), "cat\ndog\n").unwrap();
        fs::write(dir.path().join("trommel.toml"), format!("[prompt]\n{keys}")).unwrap();
        Settings::read(dir.path())
    }

    #[test]
    fn a_section_is_read_with_its_defaults() {
        let settings = read(WHOLE).unwrap();
        assert_eq!(settings.urls, ["http://localhost:8000/v1"]);
        assert_eq!(settings.asked.max_tokens, 32);
        assert!(settings.asked.choices.is_empty() && settings.prices.is_none());
        let keys = format!("{WHOLE}choices = \"names.txt\"\nconstrain = \"regex\"\nprice-in = 0.5");
        let settings = read(&keys).unwrap();
        assert_eq!(settings.asked.choices.len(), 2);
        assert_eq!(settings.prices, Some((0.5, 0.0)));
        assert_eq!(settings.files.len(), 1);
    }

    #[test]
    fn the_version_is_of_what_decides_rows() {
        let version = |keys: &str| read(&format!("{WHOLE}{keys}")).unwrap().asked.version();
        let plain = version("");
        for same in ["deadline = \"9s\"", "price-in = 2", "max-concurrency = 3"] {
            assert_eq!(version(same), plain, "{same}");
        }
        for other in [
            "max-pixels = 9",
            "seed = 1",
            "image-first = true",
            "max-tokens = 3",
        ] {
            assert_ne!(version(other), plain, "{other}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_remedy() {
        let with = |keys: &str| format!("{WHOLE}{keys}");
        for (keys, named) in [
            (
                "model = \"m\"\ntext = \"x\"".to_owned(),
                "prompt.url is missing",
            ),
            (
                "url = \"ftp://x\"\nmodel = \"m\"\ntext = \"x\"".to_owned(),
                "ftp://x",
            ),
            (
                "url = \"http://me:word@x\"\nmodel = \"m\"\ntext = \"x\"".to_owned(),
                "key-env",
            ),
            (
                "url = \"http://x\"\nmodel = \"m\"\ntext = \" \"".to_owned(),
                "prompt.text is empty",
            ),
            (with("key = \"sk-1\""), "key-env"),
            (with("choices = []"), "0 choices"),
            (
                with("choices = [\"a\", \"a\"]\nconstrain = \"regex\""),
                "twice",
            ),
            (with("choices = [\"a\"]"), "structured_outputs"),
            (with("choices = [\" a\"]\nconstrain = \"none\""), "spaces"),
            (with("constrain = \"regex\""), "needs choices"),
            (with("choices = \"gone.txt\""), "gone.txt"),
            (with("colour = 1"), "colour"),
            (with("max-tokens = 0"), "max-tokens"),
            (with("outage = \"1s\""), "prompt.timeout"),
            (with("[prompt.extra]\nmodel = 1"), "prompt.extra.model"),
            (with("[model]\nfile = \"x\""), "its own folder"),
        ] {
            let error = read(&keys).unwrap_err();
            assert_eq!(error.kind(), InferErrorKind::ModelConfig);
            let text = error.to_string();
            assert!(
                text.contains(named) && !text.contains("sk-1"),
                "{keys}: {text}"
            );
        }
    }
}
