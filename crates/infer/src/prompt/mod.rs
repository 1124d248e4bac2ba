//! Models on servers: asks about each image over OpenAI's chat completions API.
//!
//! A [`Prompt`] is a folder whose `trommel.toml` has a section `[prompt]`. Its images are encoded
//! (`preprocess` has scaled them to their token budget); an answer is one of the choices, with the
//! probability of its tokens as the score.
//!
//! A server gets as many requests as it answers quickly (`pace.rs`). A failed request is retried,
//! on another server if there is one; a rejected request is a failed row; for an unreachable server
//! it waits, and the job ends when none has answered for `outage`. Keys never appear in errors or
//! logs.

mod answer;
mod client;
mod key;
mod pace;
mod request;
mod servers;
mod settings;
mod tally;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, thread};

use trommel_types::{Column, ColumnKind};

use self::client::{AskClient, Fault};
pub use self::servers::Answer;
pub(crate) use self::servers::{Servers, SharedServers};
use self::settings::Settings;
pub use self::tally::PromptStats;
use crate::version::check_folder;
use crate::{InferError, InferErrorKind, Wanted};

/// A prompt for models on servers. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Prompt {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: Arc<str>,
    version: Arc<str>,
    settings: Settings,
}

impl Prompt {
    /// Whether the folder `dir` is a prompt: whether its `trommel.toml` has a section `[prompt]`.
    pub fn is_in(dir: &Path) -> bool {
        settings::is_prompt(dir)
    }

    /// Reads the folder `dir`, without reading the key or contacting a server.
    ///
    /// # Errors
    /// If the section is malformed or contradicts itself, with the key and the remedy.
    pub fn open(dir: &Path) -> Result<Self, InferError> {
        check_folder(dir)?;
        let settings = Settings::read(dir)?;
        Ok(Self {
            inner: Arc::new(Inner {
                name: crate::model::name_of(dir),
                version: settings.asked.version(),
                settings,
            }),
        })
    }

    /// The name of its folder.
    pub fn name(&self) -> &Arc<str> {
        &self.inner.name
    }

    /// The first 12 hex digits of a SHA-256 over everything that affects its rows: model, texts,
    /// choices, treatment of images and answers. Server addresses do not count.
    pub fn version(&self) -> &Arc<str> {
        &self.inner.version
    }

    /// The choices; empty if any answer is accepted.
    pub fn labels(&self) -> &Arc<[Arc<str>]> {
        &self.settings().asked.choices
    }

    /// Most tokens of an answer.
    pub fn max_tokens(&self) -> u32 {
        self.settings().asked.max_tokens
    }

    /// The additional columns of its rows.
    pub fn columns() -> Vec<Column> {
        ["prompt_tokens", "completion_tokens"]
            .map(|name| Column {
                name: name.to_owned(),
                kind: ColumnKind::Int,
            })
            .into()
    }

    /// Number of images worth preparing ahead: as many as may be in flight, and as many again.
    pub fn in_flight(&self) -> usize {
        let settings = self.settings();
        let all = settings.max_concurrency.saturating_mul(settings.urls.len());
        all.saturating_mul(2)
    }

    /// Whether it supports rows as `wanted`.
    ///
    /// # Errors
    /// [`Settings`](InferErrorKind::Settings) if they need something that a text answer lacks.
    pub fn check(&self, wanted: &Wanted) -> Result<(), InferError> {
        let refused = match wanted {
            Wanted { logits: true, .. } => "--logits",
            Wanted {
                embedding: true, ..
            } => "--embedding",
            wanted if wanted.has_thresholds() => "a threshold",
            _ => return Ok(()),
        };
        let why = format!("a prompt gives a label and its score; leave out {refused}");
        Err(self.error(InferErrorKind::Settings, &why))
    }

    /// A description, without its key.
    pub fn describe(&self) -> serde_json::Value {
        let settings = self.settings();
        serde_json::json!({
            "name": self.name(),
            "version": self.version(),
            "urls": settings.urls,
            "asked": settings.asked,
        })
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// The files next to `trommel.toml` that affect it.
    pub(crate) fn files(&self) -> &[PathBuf] {
        &self.settings().files
    }

    pub(crate) fn error(&self, kind: InferErrorKind, why: &str) -> InferError {
        InferError::new(kind, format_args!("prompt {}: {why}", self.name()))
    }

    /// Checks whether each server is reachable.
    fn look(&self, client: AskClient) -> Result<(), InferError> {
        let urls = self.settings().urls.clone();
        // On a separate runtime: the caller may be on a blocking thread.
        let looked = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|error| error.to_string())?;
            Ok::<_, String>(runtime.block_on(async {
                let mut all = Vec::new();
                for url in urls {
                    let looked = client.look(&url).await;
                    all.push((url, looked));
                }
                all
            }))
        });
        let looked = looked.join();
        let looked = looked.unwrap_or_else(|_| Err("a thread panicked".to_owned()));
        let looked = looked.map_err(|why| self.error(InferErrorKind::Unreachable, &why))?;
        let mut absent = Vec::new();
        let count = looked.len();
        for (url, looked) in looked {
            match looked {
                Ok(()) => {}
                Err(Fault::Hopeless(why)) => {
                    return Err(self.error(InferErrorKind::ModelConfig, &format!("{url}: {why}")));
                }
                Err(Fault::Unreachable(why)) => absent.push(format!("{url} is not there ({why})")),
                Err(_) => absent.push(format!("{url} does not answer")),
            }
        }
        let absent_words = absent.join("; ");
        if absent.len() == count {
            let why = format!("{absent_words}; start the server, or correct url in [prompt]");
            return Err(self.error(InferErrorKind::Unreachable, &why));
        }
        if !absent.is_empty() {
            tracing::warn!(
                "prompt {}: {absent_words}; going on with the others",
                self.name()
            );
        }
        Ok(())
    }
}

/// The lines of `model inspect`.
impl fmt::Display for Prompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = self.settings();
        let asked = &settings.asked;
        writeln!(f, "prompt      {}, version {}", self.name(), self.version())?;
        writeln!(f, "model       {}", asked.model)?;
        writeln!(f, "servers     {}", settings.urls.join(", "))?;
        if let Some(key) = &settings.key {
            writeln!(f, "key         in {key}")?;
        }
        if let Some(system) = &asked.system {
            writeln!(f, "system      {system:?}")?;
        }
        writeln!(f, "text        {:?}", asked.text)?;
        let choices: Vec<_> = asked
            .choices
            .iter()
            .take(5)
            .map(|choice| &**choice)
            .collect();
        let more = asked.choices.len() - choices.len();
        match choices.is_empty() {
            true => writeln!(f, "choices     any answer")?,
            false if more == 0 => writeln!(f, "choices     {}", choices.join(", "))?,
            false => writeln!(f, "choices     {} and {more} more", choices.join(", "))?,
        }
        let order = match asked.image_first {
            true => "image, text",
            false => "text, image",
        };
        write!(
            f,
            "request     {order}; {:?}; at most {} tokens; at most {} at once to a server",
            asked.constrain, asked.max_tokens, settings.max_concurrency
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings of a prompt with these keys.
    pub(super) fn settings(keys: &str) -> Settings {
        let dir = tempfile::tempdir().unwrap();
        let whole = "[prompt]\nurl = \"http://localhost:1\"\nmodel = \"m\"\ntext = \"What?\"\n";
        std::fs::write(dir.path().join("trommel.toml"), format!("{whole}{keys}")).unwrap();
        Settings::read(dir.path()).unwrap()
    }

    #[test]
    fn a_folder_is_a_prompt_by_its_section() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!Prompt::is_in(dir.path()));
        let file = dir.path().join("trommel.toml");
        std::fs::write(&file, "[model]\nfile = \"x\"").unwrap();
        assert!(!Prompt::is_in(dir.path()));
        std::fs::write(&file, "[prompt]\nurl = broken").unwrap();
        assert!(Prompt::is_in(dir.path()));
        assert_eq!(
            Prompt::open(dir.path()).unwrap_err().kind(),
            InferErrorKind::ModelConfig
        );
    }

    #[test]
    fn rows_hold_what_an_answer_gives_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let text = "[prompt]\nurl = \"http://localhost:1\"\nmodel = \"m\"\ntext = \"What?\"\n";
        std::fs::write(dir.path().join("trommel.toml"), text).unwrap();
        let prompt = Prompt::open(dir.path()).unwrap();
        prompt.check(&Wanted::default()).unwrap();
        let wanted = Wanted {
            logits: true,
            ..Wanted::default()
        };
        let error = prompt.check(&wanted).unwrap_err();
        assert!(error.to_string().contains("--logits"), "{error}");
        let error = Servers::start(prompt).unwrap_err();
        assert_eq!(error.kind(), InferErrorKind::Unreachable);
        assert!(
            error
                .to_string()
                .contains("http://localhost:1 is not there"),
            "{error}"
        );
    }
}
