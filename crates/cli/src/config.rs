use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use serde::{Deserialize, Serialize};
use trommel_worker::WorkerConfig;

use crate::args::{BrokerArgs, S3Args, TelemetryArgs, TuningArgs};

/// Everything that can be configured, by section.
pub(crate) type Config = WorkerConfig;

const DEFAULT_FILE: &str = "trommel.toml";
const ENV_PREFIX: &str = "TROMMEL_";
/// Variables with our prefix that are flags' and no setting's.
const ENV_FLAGS: [&str; 5] = ["config", "log", "model", "model_cache", "model_repository"];

/// The effective configuration: defaults ← TOML file ← `TROMMEL_SECTION__OPTION` ← flags.
///
/// # Errors
/// All problems of the result at once, each with its remedy.
pub(crate) fn load(file: Option<&Path>, flags: Flags) -> Result<Config> {
    let mut figment = Figment::from(Serialized::defaults(Config::default()));
    if let Some(path) = config_file(file)? {
        figment = figment.merge(Toml::file_exact(&path));
    }
    let env = Env::prefixed(ENV_PREFIX).ignore(&ENV_FLAGS).map(|key| {
        key.as_str()
            .to_lowercase()
            .replace("__", ".")
            .replace('_', "-")
            .into()
    });
    let mut config: Config = figment
        .merge(env)
        .merge(Serialized::defaults(flags))
        .extract()
        .map_err(|errors| {
            let problems: Vec<_> = errors.into_iter().map(|error| error.to_string()).collect();
            anyhow::anyhow!("{}", list("configuration", &problems))
        })?;
    config.infer.cache.get_or_insert_with(cache_folder);
    // As all clients of PostgreSQL take them.
    config.postgres.user = config
        .postgres
        .user
        .or_else(|| std::env::var("PGUSER").ok());
    config.postgres.password = std::env::var("PGPASSWORD").ok();
    let problems = config.problems();
    if !problems.is_empty() {
        bail!("{}", list("configuration", &problems));
    }
    Ok(config)
}

/// Trommel's folder where caches of programs go.
pub(crate) fn cache_folder() -> PathBuf {
    let home = || std::env::home_dir().map(|home| home.join(".cache"));
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let caches = named.or_else(home).unwrap_or_else(std::env::temp_dir);
    caches.join("trommel")
}

fn config_file(named: Option<&Path>) -> Result<Option<PathBuf>> {
    match named {
        Some(path) => {
            path.metadata()
                .with_context(|| format!("failed to read configuration file {}", path.display()))?;
            Ok(Some(path.to_owned()))
        }
        None => Ok(Some(PathBuf::from(DEFAULT_FILE)).filter(|path| path.exists())),
    }
}

fn list(what: &str, problems: &[String]) -> String {
    let lines: Vec<_> = problems
        .iter()
        .map(|problem| format!("\n  - {problem}"))
        .collect();
    format!("invalid {what}:{}", lines.concat())
}

/// Flags in the shape of the configuration, without those that were not given.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Flags {
    broker: Section,
    s3: Section,
    preprocess: Section,
    infer: Section,
    telemetry: Section,
}

type Section = serde_json::Map<String, serde_json::Value>;

impl Flags {
    pub(crate) fn broker(mut self, args: &BrokerArgs) -> Self {
        set(&mut self.broker, "url", args.nats.as_deref());
        self
    }

    pub(crate) fn s3(mut self, args: &S3Args) -> Self {
        set(&mut self.s3, "endpoint", args.s3_endpoint.as_deref());
        set(&mut self.s3, "anonymous", args.s3_anonymous.then_some(true));
        self
    }

    pub(crate) fn telemetry(mut self, args: &TelemetryArgs) -> Self {
        set(&mut self.telemetry, "listen", args.listen);
        let endpoint = args.otlp_endpoint.as_deref();
        set(&mut self.telemetry, "otlp-endpoint", endpoint);
        self
    }

    pub(crate) fn tuning(mut self, args: &TuningArgs) -> Self {
        set(&mut self.preprocess, "mode", args.fast.then_some("fast"));
        set(&mut self.preprocess, "threads", args.preprocess_threads);
        set(&mut self.infer, "device", args.device.as_deref());
        set(&mut self.infer, "instances", args.instances);
        set(&mut self.infer, "intra-threads", args.intra_threads);
        set(&mut self.infer, "max-batch", args.max_batch);
        set(&mut self.infer, "top-k", args.top_k);
        set(&mut self.infer, "logits", args.logits.then_some(true));
        let embedding = args.embedding.then_some(true);
        set(&mut self.infer, "embedding", embedding);
        self
    }
}

fn set(section: &mut Section, name: &str, value: Option<impl Serialize>) {
    if let Some(value) = value {
        section.insert(name.to_owned(), serde_json::json!(value));
    }
}
