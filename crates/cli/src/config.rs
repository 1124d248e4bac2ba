mod mistakes;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use figment::Figment;
use figment::providers::{Env, Format, Serialized, Toml};
use serde::{Deserialize, Serialize};
use trommel_worker::WorkerConfig;

use crate::args::{AccessArgs, BrokerArgs, S3Args, ServeArgs, TelemetryArgs, TuningArgs};

/// All settings, by section.
pub(crate) type Config = WorkerConfig;

const DEFAULT_FILE: &str = "trommel.toml";
const ENV_PREFIX: &str = "TROMMEL_";
/// Variables with our prefix that belong to flags, not settings.
const ENV_FLAGS: [&str; 6] = [
    "config",
    "log",
    "model",
    "model_cache",
    "model_repository",
    "serve_token",
];

/// The effective configuration: defaults ← TOML file ← `TROMMEL_SECTION__OPTION` ← flags.
///
/// # Errors
/// All problems at once, each with its remedy.
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
            let problems: Vec<_> = errors
                .into_iter()
                .map(|error| mistakes::said(&error))
                .collect();
            anyhow::anyhow!("{}", list("configuration", &problems))
        })?;
    config.keep_to_budget(trommel_infer::memory_limit());
    config.infer.cache.get_or_insert_with(cache_folder);
    // As in all clients of PostgreSQL.
    config.postgres.user = config
        .postgres
        .user
        .or_else(|| std::env::var("PGUSER").ok());
    config.postgres.host = config
        .postgres
        .host
        .or_else(|| std::env::var("PGHOST").ok());
    config.postgres.password = std::env::var("PGPASSWORD").ok();
    let problems = config.problems();
    if !problems.is_empty() {
        bail!("{}", list("configuration", &problems));
    }
    Ok(config)
}

/// The configuration as TOML, for people and logs, without passwords.
///
/// # Errors
/// If a setting cannot be represented in TOML.
pub(crate) fn printed(config: &Config) -> Result<String> {
    let mut table = toml::Table::try_from(config).context("failed to write the configuration")?;
    table.iter_mut().for_each(|(_, value)| redact(value));
    toml::to_string(&table).context("failed to write the configuration")
}

/// Redacts the addresses in all settings, including ones added later.
fn redact(value: &mut toml::Value) {
    match value {
        toml::Value::String(text) => *text = redacted(text),
        toml::Value::Array(values) => values.iter_mut().for_each(redact),
        toml::Value::Table(table) => table.iter_mut().for_each(|(_, value)| redact(value)),
        _ => {}
    }
}

/// The text with `***` for the parts of addresses before their `@` and in their queries.
fn redacted(text: &str) -> String {
    let mut parts = text.split("://");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        // In a list of addresses, the scheme of the next one ends this part.
        let part = match part.rsplit_once('@') {
            Some((_, host)) => format!("***@{host}"),
            None => part.to_owned(),
        };
        let part = match part.split_once('?') {
            Some((address, _)) => format!("{address}?***"),
            None => part,
        };
        shown.push_str("://");
        shown.push_str(&part);
    }
    shown
}

/// Trommel's folder in the user's cache folder.
pub(crate) fn cache_folder() -> PathBuf {
    let home = || std::env::home_dir().map(|home| home.join(".cache"));
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let caches = named.or_else(home).unwrap_or_else(std::env::temp_dir);
    caches.join("trommel")
}

fn config_file(named: Option<&Path>) -> Result<Option<PathBuf>> {
    match named {
        Some(path) => {
            path.metadata().with_context(|| {
                let path = path.display();
                format!(
                    "failed to read configuration file {path}; check --config and TROMMEL_CONFIG"
                )
            })?;
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

/// Flags in the structure of the configuration, without those that were not given.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Flags {
    #[serde(flatten)]
    process: Section,
    broker: Section,
    s3: Section,
    access: Section,
    preprocess: Section,
    infer: Section,
    serve: Section,
    live: Section,
    telemetry: Section,
}

type Section = serde_json::Map<String, serde_json::Value>;

impl Flags {
    pub(crate) fn broker(mut self, args: &BrokerArgs) -> Self {
        set(&mut self.broker, "url", args.nats.as_deref());
        self
    }

    pub(crate) fn prefix(mut self, prefix: Option<&str>) -> Self {
        set(&mut self.broker, "prefix", prefix);
        self
    }

    pub(crate) fn s3(mut self, args: &S3Args) -> Self {
        set(&mut self.s3, "endpoint", args.s3_endpoint.as_deref());
        set(&mut self.s3, "anonymous", args.s3_anonymous.then_some(true));
        self
    }

    pub(crate) fn access(mut self, args: &AccessArgs) -> Self {
        let given = |places: &[String]| (!places.is_empty()).then(|| places.to_owned());
        set(&mut self.access, "sources", given(&args.allow_source));
        set(&mut self.access, "outputs", given(&args.allow_output));
        self
    }

    pub(crate) fn telemetry(mut self, args: &TelemetryArgs) -> Self {
        set(&mut self.telemetry, "listen", args.listen);
        let endpoint = args.otlp_endpoint.as_deref();
        set(&mut self.telemetry, "otlp-endpoint", endpoint);
        self
    }

    pub(crate) fn serve_listen(mut self, address: Option<SocketAddr>) -> Self {
        set(&mut self.serve, "listen", address);
        self
    }

    pub(crate) fn serve(mut self, args: &ServeArgs) -> Self {
        set(&mut self.serve, "listen", args.listen);
        set(&mut self.serve, "nats", args.nats.as_ref().map(|_| true));
        let live = (!args.live.is_empty()).then_some(&args.live);
        set(&mut self.live, "sources", live);
        set(&mut self.serve, "token-file", args.token_file.as_deref());
        let urls = (!args.allow_url.is_empty()).then(|| args.allow_url.clone());
        set(&mut self.serve, "allow-url", urls);
        let certificate = args.tls_certificate.as_deref();
        set(&mut self.serve, "tls-certificate", certificate);
        set(&mut self.serve, "tls-key", args.tls_key.as_deref());
        set(&mut self.broker, "url", args.nats.as_deref());
        set(&mut self.telemetry, "listen", args.telemetry_listen);
        let endpoint = args.otlp_endpoint.as_deref();
        set(&mut self.telemetry, "otlp-endpoint", endpoint);
        self
    }

    pub(crate) fn tuning(mut self, args: &TuningArgs) -> Self {
        set(&mut self.process, "memory-budget", args.memory_budget);
        set(&mut self.preprocess, "threads", args.preprocess_threads);
        set(&mut self.infer, "device", args.device.as_deref());
        set(&mut self.infer, "instances", args.instances);
        set(&mut self.infer, "intra-threads", args.intra_threads);
        set(&mut self.infer, "max-batch", args.max_batch);
        set(
            &mut self.infer,
            "profiles",
            args.no_profile.then_some(false),
        );
        self
    }
}

fn set(section: &mut Section, name: &str, value: Option<impl Serialize>) {
    if let Some(value) = value {
        section.insert(name.to_owned(), serde_json::json!(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "hunter2";

    /// Puts an address with secrets into every text of a value, and texts into empty lists.
    fn plant(value: &mut serde_json::Value, address: &str) {
        match value {
            serde_json::Value::String(text) => *text = address.to_owned(),
            serde_json::Value::Null => *value = address.into(),
            serde_json::Value::Array(values) => *values = vec![address.into()],
            serde_json::Value::Object(fields) => {
                fields.values_mut().for_each(|value| plant(value, address));
            }
            _ => {}
        }
    }

    /// R34: the password in the broker's address was printed.
    #[test]
    fn no_secret_is_printed() {
        let address = |scheme| {
            let secrets = "me:hunter2@token:hunter2@host:1/x?password=hunter2&a=hunter2@b";
            format!("{scheme}://{secrets}")
        };
        let hidden = ["nats", "http", "postgres", "s3", "x-y"]
            .map(address)
            .join(",");
        // All settings, including ones added later: any text may be an address.
        let mut whole = serde_json::to_value(Config::default()).unwrap();
        plant(&mut whole, &hidden);
        let mut whole = toml::Value::try_from(&whole).unwrap();
        redact(&mut whole);
        let whole = toml::to_string(&whole).unwrap();
        assert!(!whole.contains(SECRET), "{whole}");
        assert!(whole.matches("***@").count() > 20, "{whole}");

        let mut config = Config::default();
        config.broker.url = "nats://me:hunter2@a:4222,tls://hunter2@b:4222,c:4222".to_owned();
        config.s3.endpoint = Some("http://me:hunter2@store:9000".to_owned());
        config.s3.credentials = Some((SECRET.to_owned(), SECRET.to_owned()));
        config.postgres.password = Some(SECRET.to_owned());
        config.telemetry.otlp_endpoint = Some("http://collector:4317?key=hunter2".to_owned());
        config.access.outputs = vec!["postgres://me:hunter2@db/labels".to_owned()];
        let text = printed(&config).unwrap();
        assert!(!text.contains(SECRET), "{text}");
        for line in [
            r#"url = "nats://***@a:4222,tls://***@b:4222,c:4222""#,
            r#"endpoint = "http://***@store:9000""#,
            r#"otlp-endpoint = "http://collector:4317?***""#,
            r#"outputs = ["postgres://***@db/labels"]"#,
        ] {
            assert!(text.contains(line), "{line} is missing: {text}");
        }
    }

    #[test]
    fn what_holds_no_secret_is_printed_as_it_is() {
        for text in [
            "nats://127.0.0.1:4222",
            "nats://a:4222,nats://b:4222",
            "s3://bucket/prefix/",
            "/data/photos@2",
            "5ms",
            "",
        ] {
            assert_eq!(redacted(text), text);
        }
    }
}
