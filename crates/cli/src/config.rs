use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use serde::{Deserialize, Serialize};
use trommel_worker::WorkerConfig;

use crate::args::{BrokerArgs, S3Args, TuningArgs};

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
pub(crate) fn load(
    file: Option<&Path>,
    tuning: &TuningArgs,
    s3: &S3Args,
    broker: &BrokerArgs,
) -> Result<Config> {
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
        .merge(Serialized::defaults(Flags::new(tuning, s3, broker)))
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
struct Flags {
    broker: Section,
    s3: Section,
    preprocess: Section,
    infer: Section,
}

type Section = serde_json::Map<String, serde_json::Value>;

impl Flags {
    fn new(args: &TuningArgs, s3: &S3Args, broker: &BrokerArgs) -> Self {
        let mut flags = Self::default();
        set(&mut flags.broker, "url", broker.nats.as_deref());
        set(&mut flags.s3, "endpoint", s3.s3_endpoint.as_deref());
        set(&mut flags.s3, "anonymous", s3.s3_anonymous.then_some(true));
        set(&mut flags.preprocess, "mode", args.fast.then_some("fast"));
        set(&mut flags.preprocess, "threads", args.preprocess_threads);
        set(&mut flags.infer, "device", args.device.as_deref());
        set(&mut flags.infer, "instances", args.instances);
        set(&mut flags.infer, "intra-threads", args.intra_threads);
        set(&mut flags.infer, "max-batch", args.max_batch);
        set(&mut flags.infer, "top-k", args.top_k);
        set(&mut flags.infer, "logits", args.logits.then_some(true));
        let embedding = args.embedding.then_some(true);
        set(&mut flags.infer, "embedding", embedding);
        flags
    }
}

fn set(section: &mut Section, name: &str, value: Option<impl Serialize>) {
    if let Some(value) = value {
        section.insert(name.to_owned(), serde_json::json!(value));
    }
}
