use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Requests to web servers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct HttpConfig {
    /// Whether to connect to addresses of this machine and of private networks. Default: no.
    pub allow_private: bool,
    /// Requests to one host at once. Default: 8.
    pub max_per_host: usize,
    /// Requests to all hosts at once. Default: 64.
    pub max_concurrency: usize,
    /// Redirects that are followed from one url. Default: 10.
    pub max_redirects: u32,
    /// Longest single wait for a busy host, whatever its `Retry-After` asks for. Default: `60s`.
    #[serde(with = "humantime_serde")]
    pub max_wait: Duration,
    /// Time without a byte after which an answer counts as stalled. Default: `30s`.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// The `User-Agent` of requests. Some sites require your contact address in it. Default:
    /// `trommel/` and its version.
    pub user_agent: String,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            allow_private: false,
            max_per_host: 8,
            max_concurrency: 64,
            max_redirects: 10,
            max_wait: Duration::from_secs(60),
            timeout: Duration::from_secs(30),
            user_agent: concat!("trommel/", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }
}

impl HttpConfig {
    /// All that is wrong with it, one sentence each; empty when it can be used.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.max_per_host == 0 || self.max_concurrency == 0 || self.timeout.is_zero() {
            problems.push("http.max-per-host, max-concurrency, timeout: must not be 0".to_owned());
        }
        if self.user_agent.parse::<http::HeaderValue>().is_err() {
            problems.push("http.user-agent: a header cannot hold it; use plain text".to_owned());
        }
        problems
    }
}
