use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trommel_infer::LiveOptions;

use crate::config::cores;
use crate::{Allowed, InferConfig};

/// Share of the budget for which a batch may occupy the device while requests arrive.
const SHARE_OF_BATCH: u32 = 4;

/// Least time of an image in one session for which `trommel serve` uses all cores: with a faster
/// model, waiting for a core that decodes takes longer than the others save.
const LONE_MIN_TIME: Duration = Duration::from_millis(10);

/// Answering requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct ServeConfig {
    /// Address that answers over HTTP. Default: `127.0.0.1:8080`, which other machines cannot reach.
    pub listen: SocketAddr,
    /// Whether requests are also answered over the broker, on `trommel.classify.NAME`. Default: no.
    pub nats: bool,
    /// Time within which 95 % of requests are to be answered. While requests arrive, no batch
    /// occupies the device for longer than a quarter of it; if answers take longer, more requests
    /// are refused. Default: `120ms`.
    #[serde(with = "humantime_serde")]
    pub slo: Duration,
    /// Longest time that the image of a request waits for others on their way to the same batch.
    /// Default: `5ms`.
    #[serde(with = "humantime_serde")]
    pub max_wait: Duration,
    /// Threads of `trommel serve` for a request that finds its model idle, on the CPU. If more than
    /// `infer.intra-threads`, they are those of an additional session, for which `infer.memory-budget`
    /// does not count. Default: all cores if one session takes at least 10 ms for an image and there is
    /// memory for another, unless `infer.memory-budget` is set or `infer.fused` is true; otherwise 1.
    pub lone_threads: Option<NonZeroUsize>,
    /// Requests for one model that are processed or waiting; further ones are refused. Fewer are
    /// admitted if they would take longer than `slo`. Default: 256.
    pub queue: NonZeroUsize,
    /// Time after which an infer worker that does not answer a serve worker counts as dead; its
    /// images are then sent to another one, once. Set it above the time of a full batch. Default:
    /// `2s`.
    #[serde(with = "humantime_serde")]
    pub infer_timeout: Duration,
    /// Largest body of a request in bytes. Default: 64 MiB.
    pub max_body: NonZeroUsize,
    /// Bytes of bodies held at once; further requests are refused. Default: 512 MiB.
    pub max_bytes_in_flight: NonZeroUsize,
    /// Largest image in pixels, if `preprocess.max-pixels` is not smaller. Default: 50,000,000.
    pub max_pixels: u64,
    /// Images in one request. Default: 64.
    pub max_files: NonZeroUsize,
    /// Open connections; further ones are refused. Default: 1024.
    pub max_connections: NonZeroUsize,
    /// Time limit for receiving the head of a request, on a new connection or after an answer.
    /// Default: `10s`.
    #[serde(with = "humantime_serde")]
    pub header_timeout: Duration,
    /// Time limit for receiving the body of a request. Default: `30s`.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// Time after which the connection to a client that does not read its answer is closed.
    /// Default: `30s`.
    #[serde(with = "humantime_serde")]
    pub write_timeout: Duration,
    /// File with the token that requests must send as `Authorization: Bearer`. Default: the
    /// variable `TROMMEL_SERVE_TOKEN`; without either, no token is required.
    pub token_file: Option<PathBuf>,
    /// Web addresses, such as `https://host/path/`, below which a request may name its image by
    /// `{"url": "https://host/path/cat.jpg"}`. Default: none.
    pub allow_url: Vec<String>,
    /// Certificate chain of the server, PEM. Default: none, and no TLS.
    pub tls_certificate: Option<PathBuf>,
    /// Private key of the certificate, PEM. Default: none.
    pub tls_key: Option<PathBuf>,
}

impl Default for ServeConfig {
    fn default() -> Self {
        let number = |number| NonZeroUsize::new(number).expect("the default is not 0");
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            nats: false,
            slo: Duration::from_millis(120),
            max_wait: Duration::from_millis(5),
            lone_threads: None,
            queue: number(256),
            infer_timeout: Duration::from_secs(2),
            max_body: number(64 << 20),
            max_bytes_in_flight: number(512 << 20),
            max_pixels: 50_000_000,
            max_files: number(64),
            max_connections: number(1024),
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            token_file: None,
            allow_url: Vec::new(),
            tls_certificate: None,
            tls_key: None,
        }
    }
}

impl ServeConfig {
    /// How the engines of `trommel serve` treat live work.
    pub fn live_options_alone(&self, infer: &InferConfig) -> LiveOptions {
        let (threads, min_time) = match self.lone_threads {
            Some(threads) => (threads.get(), Duration::ZERO),
            None if infer.may_have_lone_session() => (cores(), LONE_MIN_TIME),
            None => (1, Duration::ZERO),
        };
        LiveOptions {
            lone_threads: threads,
            lone_min_time: min_time,
            ..self.live_options()
        }
    }

    /// How the engines of infer workers treat live work, which only some of them have.
    pub(crate) fn live_options(&self) -> LiveOptions {
        LiveOptions {
            max_wait: self.max_wait,
            hold: self.slo / SHARE_OF_BATCH,
            ..LiveOptions::default()
        }
    }

    /// Names every invalid setting, with its remedy.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, time) in [
            ("slo", self.slo),
            ("infer-timeout", self.infer_timeout),
            ("header-timeout", self.header_timeout),
            ("body-timeout", self.body_timeout),
            ("write-timeout", self.write_timeout),
        ] {
            if time < Duration::from_millis(1) {
                problems.push(format!("serve.{name}: must be at least 1ms"));
            }
        }
        if self.max_wait >= self.slo {
            problems.push("serve.max-wait: must be below serve.slo".to_owned());
        }
        if let Err(found) = Allowed::of_urls("serve.allow-url", &self.allow_url) {
            problems.extend(found);
        }
        if self.max_pixels == 0 {
            problems.push("serve.max-pixels: 0 refuses every image; set at least 1".to_owned());
        }
        if self.max_bytes_in_flight < self.max_body {
            problems.push("serve.max-bytes-in-flight: must not be below serve.max-body".to_owned());
        }
        if self.tls_certificate.is_some() != self.tls_key.is_some() {
            problems.push(
                "serve.tls-certificate, tls-key: give both, or neither for plain HTTP".to_owned(),
            );
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_work_and_what_cannot_is_named() {
        assert!(ServeConfig::default().problems().is_empty());
        let broken = ServeConfig {
            slo: Duration::ZERO,
            max_pixels: 0,
            max_bytes_in_flight: NonZeroUsize::MIN,
            tls_key: Some("key.pem".into()),
            allow_url: vec!["/photos".to_owned()],
            ..ServeConfig::default()
        };
        let problems = broken.problems().join("\n");
        for name in [
            "slo",
            "max-wait",
            "max-pixels",
            "max-bytes",
            "tls-key",
            "allow-url",
        ] {
            assert!(problems.contains(name), "{name}: {problems}");
        }
    }
}
