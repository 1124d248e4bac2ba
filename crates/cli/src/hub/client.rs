//! Requests to the hub.

use std::collections::BTreeMap;
use std::env;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use ureq::http::{Response, StatusCode};
use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, Body};

use super::HubName;
use super::cache::{Snapshot, is_within};

/// Attempts before giving up, as long as none of them transfers anything.
pub(super) const ATTEMPTS: u32 = 5;
/// Time before the second attempt; each later wait is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// Time limit for connecting, and for each read.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most redirects in a row.
const MAX_REDIRECTS: usize = 10;
/// Longest description of a repository.
const MAX_INFO: u64 = 64 << 20;

/// Settings of the hub in the environment.
#[derive(Debug)]
pub(super) struct Settings {
    endpoint: String,
    token: Option<String>,
    pub(super) cache: PathBuf,
    offline: bool,
}

impl Settings {
    /// # Errors
    /// If there is no folder for the cache.
    pub(super) fn from_env() -> Result<Self> {
        let text = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let path = |name: &str| {
            env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let home = path("HF_HOME").or_else(|| {
            let caches = path("XDG_CACHE_HOME");
            let caches = caches.or_else(|| Some(env::home_dir()?.join(".cache")));
            Some(caches?.join("huggingface"))
        });
        let home = home.context("there is no home directory for the hub's cache; set HF_HOME")?;
        let kept = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let kept = || std::fs::read_to_string(kept).ok();
        let token = text("HF_TOKEN").or_else(kept);
        let token = token.map(|token| token.trim().to_owned());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        let offline = text("HF_HUB_OFFLINE").map(|value| value.to_ascii_lowercase());
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.filter(|token| !token.is_empty()),
            cache: path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")),
            offline: offline
                .is_some_and(|value| ["1", "true", "yes", "on"].contains(&value.as_str())),
        })
    }
}

/// The contents of a repository at a commit.
#[derive(Debug)]
pub(super) struct Info {
    pub(super) commit: String,
    pub(super) files: BTreeMap<String, RemoteFile>,
}

/// The hub's information about a file.
#[derive(Debug, Default, Clone)]
pub(super) struct RemoteFile {
    /// Size in bytes, if known.
    pub(super) bytes: Option<u64>,
    /// Names the content in the cache; empty for a file known only from the cache.
    pub(super) hash: String,
    /// Whether that is the SHA-256 of the content.
    pub(super) is_sha256: bool,
}

/// The hub's answer about a repository.
#[derive(Debug, Deserialize)]
struct Repository {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Debug, Deserialize)]
struct Lfs {
    sha256: String,
    size: Option<u64>,
}

impl Info {
    fn of(repository: Repository) -> Result<Self> {
        let files = repository
            .siblings
            .into_iter()
            .filter(|file| is_within(&file.rfilename));
        let files = files.map(|file| {
            let (bytes, hash, is_sha256) = match file.lfs {
                Some(lfs) => (lfs.size.or(file.size), Some(lfs.sha256), true),
                None => (file.size, file.blob, false),
            };
            let hash = hash.filter(|hash| {
                !hash.is_empty() && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
            });
            let hash =
                hash.with_context(|| format!("the hub returned no hash of {}", file.rfilename))?;
            let remote = RemoteFile {
                bytes,
                hash,
                is_sha256,
            };
            Ok((file.rfilename, remote))
        });
        Ok(Self {
            commit: repository.sha,
            files: files.collect::<Result<_>>()?,
        })
    }

    /// The information about a repository in the cache.
    pub(super) fn of_snapshot(snapshot: &Snapshot) -> Result<Self> {
        let files = snapshot.paths()?.into_iter();
        Ok(Self {
            commit: snapshot.commit.clone(),
            files: files.map(|path| (path, RemoteFile::default())).collect(),
        })
    }
}

/// The source of information about a repository.
pub(super) enum Asked {
    Hub(Info),
    /// The hub cannot be reached, and why.
    Unreachable(String),
}

/// The client of the hub.
pub(super) struct Client {
    agent: Agent,
    settings: Settings,
}

/// The response to a request for part of a file.
pub(super) enum Part {
    /// The bytes from here on.
    From(u64, Body),
    /// The server has no such part.
    BeyondTheEnd,
    /// Another attempt may succeed; the reason.
    Later(String),
}

impl Client {
    /// # Errors
    /// If the machine's certificates cannot be read.
    pub(super) fn new(settings: Settings) -> Result<Self> {
        let loaded = rustls_native_certs::load_native_certs();
        let roots: Vec<_> = loaded
            .certs
            .iter()
            .map(|root| Certificate::from_der(root).to_owned())
            .collect();
        if roots.is_empty() && settings.endpoint.starts_with("https:") && !settings.offline {
            let why = loaded.errors.first().map_or_else(
                || "the store of certificates is empty".to_owned(),
                ToString::to_string,
            );
            bail!(
                "the machine's root certificates cannot be read: {why}; install ca-certificates, or set SSL_CERT_FILE"
            );
        }
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::Specific(Arc::new(roots)))
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .user_agent(concat!("trommel/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            // Redirects are followed here, so that the token is not sent elsewhere.
            .max_redirects(0)
            .timeout_connect(Some(PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .timeout_per_read(Some(PATIENCE))
            .build();
        Ok(Self {
            agent: agent.into(),
            settings,
        })
    }

    pub(super) fn is_offline(&self) -> bool {
        self.settings.offline
    }

    /// The contents of a repository.
    ///
    /// # Errors
    /// If the hub refuses, with the next step.
    pub(super) fn info(&self, name: &HubName) -> Result<Asked> {
        if self.settings.offline {
            return Ok(Asked::Unreachable("HF_HUB_OFFLINE is set".to_owned()));
        }
        let revision = name.revision.replace('/', "%2F");
        let url = format!(
            "{}/api/models/{}/revision/{revision}?blobs=true",
            self.settings.endpoint, name.repository
        );
        let mut attempt = 0;
        loop {
            attempt += 1;
            let why = match self.get(&url, None) {
                Ok(answer) if answer.status() == StatusCode::OK => {
                    let mut body = answer.into_body();
                    let text = body.with_config().limit(MAX_INFO).read_to_vec();
                    let text =
                        text.with_context(|| format!("{name}: the hub's response was truncated"))?;
                    let repository = serde_json::from_slice(&text);
                    let repository: Repository = repository.with_context(|| {
                        format!("{name}: {url} did not return a description of a model")
                    })?;
                    return Info::of(repository).map(Asked::Hub);
                }
                Ok(answer) if !is_passing(answer.status()) => {
                    return Err(self.refusal(name, None, &answer));
                }
                Ok(answer) => format!("the hub returned {}", answer.status()),
                Err(error) => format!("{} cannot be reached: {error}", self.settings.endpoint),
            };
            if attempt >= ATTEMPTS {
                return Ok(Asked::Unreachable(why));
            }
            pause(attempt);
        }
    }

    /// A file of a commit, from a byte on.
    ///
    /// # Errors
    /// If the hub refuses, with the next step.
    pub(super) fn part(&self, name: &HubName, commit: &str, path: &str, from: u64) -> Result<Part> {
        let url = format!(
            "{}/{}/resolve/{commit}/{path}",
            self.settings.endpoint, name.repository
        );
        let answer = match self.get(&url, (from > 0).then_some(from)) {
            Ok(answer) => answer,
            Err(why) => return Ok(Part::Later(why)),
        };
        match answer.status() {
            StatusCode::OK => Ok(Part::From(0, answer.into_body())),
            StatusCode::PARTIAL_CONTENT => {
                let start = range_start(&answer);
                let start = start.with_context(|| {
                    format!("{url} returned a partial response without Content-Range")
                })?;
                Ok(Part::From(start, answer.into_body()))
            }
            StatusCode::RANGE_NOT_SATISFIABLE => Ok(Part::BeyondTheEnd),
            status if is_passing(status) => {
                Ok(Part::Later(format!("the server returned {status}")))
            }
            _ => Err(self.refusal(name, Some(path), &answer)),
        }
    }

    /// A page, following redirects. The token is sent only to the hub, not to its storage of large
    /// files.
    fn get(&self, url: &str, from: Option<u64>) -> Result<Response<Body>, String> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&url);
            let of_hub = url.strip_prefix(&self.settings.endpoint);
            let of_hub = of_hub.is_some_and(|rest| rest.starts_with('/'));
            if let Some(token) = self.settings.token.as_ref().filter(|_| of_hub) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if let Some(from) = from {
                request = request.header("range", format!("bytes={from}-"));
            }
            let answer = request.call().map_err(|error| error.to_string())?;
            if !answer.status().is_redirection() {
                return Ok(answer);
            }
            let location = answer.headers().get("location");
            let location = location.and_then(|place| place.to_str().ok());
            let next = location.and_then(|place| redirected(&url, place));
            url = next.ok_or_else(|| format!("{url} redirects without a Location"))?;
        }
        Err(format!(
            "{url} is redirected more than {MAX_REDIRECTS} times"
        ))
    }

    /// Why the hub refuses a repository or a file in it, with the next step.
    fn refusal(
        &self,
        name: &HubName,
        path: Option<&str>,
        answer: &Response<Body>,
    ) -> anyhow::Error {
        let code = answer.headers().get("x-error-code");
        let code = code.and_then(|code| code.to_str().ok()).unwrap_or_default();
        let page = format!("{}/{}", self.settings.endpoint, name.repository);
        let token = match self.settings.token {
            None => "set HF_TOKEN to a token with read access",
            Some(_) => {
                "the current token (HF_TOKEN, or that of `hf auth login`) has no read access"
            }
        };
        match (code, answer.status()) {
            ("GatedRepo", _) => {
                anyhow!("{name} is gated: accept its terms at {page}; then {token}")
            }
            ("RevisionNotFound", _) => anyhow!("{name}: revision {} does not exist", name.revision),
            ("EntryNotFound", _) => {
                anyhow!("{name}: file {} no longer exists", path.unwrap_or_default())
            }
            (_, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => anyhow!(
                "{name}: the repository does not exist at {}, or is private; check the name, and if it is private, {token}",
                self.settings.endpoint
            ),
            (_, StatusCode::NOT_FOUND) => {
                anyhow!(
                    "{name}: the repository does not exist at {}",
                    self.settings.endpoint
                )
            }
            (_, status) => anyhow!("{name}: {} returned {status}", self.settings.endpoint),
        }
    }
}

/// Whether another attempt may succeed.
fn is_passing(status: StatusCode) -> bool {
    status.is_server_error()
        || [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(&status)
}

/// The first byte of a `Content-Range: bytes 5-9/10`.
fn range_start(answer: &Response<Body>) -> Option<u64> {
    let range = answer.headers().get("content-range")?.to_str().ok()?;
    let (start, _) = range.strip_prefix("bytes ")?.split_once('-')?;
    start.trim().parse().ok()
}

/// The target of a redirect from `url`: an address, or a path on the same server.
fn redirected(url: &str, location: &str) -> Option<String> {
    if location.starts_with("https://") || location.starts_with("http://") {
        return Some(location.to_owned());
    }
    let (scheme, rest) = url.split_once("://")?;
    let host = rest.split(['/', '?']).next()?;
    let is_path = location.starts_with('/') && !location.starts_with("//");
    is_path.then(|| format!("{scheme}://{host}{location}"))
}

/// Waits before the next attempt.
pub(super) fn pause(attempt: u32) {
    thread::sleep(FIRST_WAIT * 2_u32.saturating_pow(attempt.saturating_sub(1)));
}

/// An error while reading a response, as one about the file.
pub(super) fn cut_off(error: &io::Error) -> String {
    format!("the connection was cut off: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_to_addresses_and_to_paths() {
        let from = "https://hub.example:8080/org/vit/resolve/main/model.onnx?x=1";
        for (location, expected) in [
            (
                "https://cdn.example/a?b=c",
                Some("https://cdn.example/a?b=c"),
            ),
            (
                "/api/models/new/vit",
                Some("https://hub.example:8080/api/models/new/vit"),
            ),
            ("//elsewhere/a", None),
            ("file:///etc/passwd", None),
            ("model.onnx", None),
        ] {
            assert_eq!(
                redirected(from, location).as_deref(),
                expected,
                "{location}"
            );
        }
    }
}
