use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{QueueError, QueueErrorKind};

/// The broker's address and the limits of its streams.
///
/// Limits apply when a stream is created. Existing streams are never changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct BrokerConfig {
    /// Addresses of the servers, with commas between; `nats://user:password@host` or
    /// `nats://token@host` where one is requested. Default: `nats://127.0.0.1:4222`.
    pub url: String,
    /// A `.creds` file. Default: none.
    pub credentials: Option<PathBuf>,
    /// A PEM file of the authorities that the servers' certificates are checked against, instead of
    /// the system's; the connection must then use TLS. Default: none; `tls://host` in the url checks
    /// against the system's.
    pub tls_ca: Option<PathBuf>,
    /// A PEM file with the client's certificate, for servers that verify it. Default: none.
    pub tls_certificate: Option<PathBuf>,
    /// A PEM file with that certificate's key. Default: none.
    pub tls_key: Option<PathBuf>,
    /// Prefix of the names of streams, subjects and the bucket: ASCII letters, digits, `-` and `_`.
    /// Installations with different prefixes can share a broker. Default: `trommel`.
    pub prefix: String,
    /// Copies of the jobs, tasks, results and dead-letter streams and of the bucket. More than one
    /// needs a cluster of 2.12 or newer. Tensors always have one. Default: 1.
    pub replicas: usize,
    /// Images waiting for preprocess, across all jobs. Default: 10,000.
    pub tasks_max_messages: u64,
    /// Bytes of tensors waiting for infer, across all models. Default: 2 GiB.
    pub tensors_max_bytes: u64,
    /// Whether tensors are kept in the broker's memory and not in files, which takes less of its
    /// processor. A broker that restarts has lost them; their images are then queued again. Default:
    /// no.
    pub tensors_in_memory: bool,
    /// Bytes of results waiting for sink, across all jobs. Default: 1 GiB.
    pub results_max_bytes: u64,
    /// Bytes of dead letters kept; the oldest are dropped first. Default: 256 MiB.
    pub dead_max_bytes: u64,
    /// Time a dead letter is kept. Default: `7days`.
    #[serde(with = "humantime_serde")]
    pub dead_max_age: Duration,
    /// Window in which a repeated publish of an id is recognised as a duplicate. Default: `2m`.
    #[serde(with = "humantime_serde")]
    pub duplicate_window: Duration,
    /// Time a delivery may stay unsettled before it is repeated, which is what its next worker
    /// waits for after the death of the first. Work that takes longer is extended. Default: `5s`.
    #[serde(with = "humantime_serde")]
    pub ack_wait: Duration,
    /// Timeout of one attempt to connect. Default: `5s`.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// Prefix of the subjects of answers to this process. A broker that lets each user read only
    /// its own answers needs one per user, such as `_INBOX.ingest`. Default: `_INBOX`.
    pub inbox_prefix: String,
}

impl Default for BrokerConfig {
    fn default() -> Self {
        Self {
            url: "nats://127.0.0.1:4222".to_owned(),
            credentials: None,
            tls_ca: None,
            tls_certificate: None,
            tls_key: None,
            prefix: "trommel".to_owned(),
            replicas: 1,
            tasks_max_messages: 10_000,
            tensors_max_bytes: 2 << 30,
            tensors_in_memory: false,
            results_max_bytes: 1 << 30,
            dead_max_bytes: 256 << 20,
            dead_max_age: Duration::from_secs(7 * 24 * 3600),
            duplicate_window: Duration::from_secs(120),
            ack_wait: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(5),
            inbox_prefix: "_INBOX".to_owned(),
        }
    }
}

impl BrokerConfig {
    /// All problems, one sentence each; empty if it is valid.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.url.split(',').all(|url| url.trim().is_empty()) {
            problems.push("broker url is empty".to_owned());
        }
        let name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if self.prefix.is_empty() || !self.prefix.bytes().all(name) {
            problems.push(format!(
                "broker prefix {:?} is not made of ASCII letters, digits, - and _",
                self.prefix
            ));
        }
        if !(1..=5).contains(&self.replicas) {
            problems.push(format!("broker replicas {} is not 1 to 5", self.replicas));
        }
        let positive = [
            ("tasks-max-messages", self.tasks_max_messages),
            ("tensors-max-bytes", self.tensors_max_bytes),
            ("results-max-bytes", self.results_max_bytes),
            ("dead-max-bytes", self.dead_max_bytes),
        ];
        for (option, value) in positive {
            if value == 0 || i64::try_from(value).is_err() {
                problems.push(format!("broker {option} {value} is out of range"));
            }
        }
        if self.tls_certificate.is_some() != self.tls_key.is_some() {
            problems.push("broker tls-certificate and tls-key go together: set both".to_owned());
        }
        if self.duplicate_window < Duration::from_millis(100) {
            problems.push("broker duplicate-window is below 100ms".to_owned());
        }
        if self.ack_wait < Duration::from_millis(100) {
            problems.push("broker ack-wait is below 100ms".to_owned());
        }
        // Denied answers are recognised by the prefix of their subjects.
        let mut inbox = self.inbox_prefix.split('.');
        let begins = inbox.next() == Some("_INBOX");
        if !begins || !inbox.all(|part| !part.is_empty() && part.bytes().all(name)) {
            problems.push(format!(
                "broker inbox-prefix {:?} is invalid: give _INBOX, or _INBOX.USER of ASCII letters, digits, - and _",
                self.inbox_prefix
            ));
        }
        problems
    }

    pub(super) fn validate(&self) -> Result<(), QueueError> {
        match self.problems() {
            problems if problems.is_empty() => Ok(()),
            problems => Err(QueueError::new(
                QueueErrorKind::Misconfigured,
                problems.join("; "),
            )),
        }
    }

    /// The addresses without user names and passwords.
    pub fn redacted_url(&self) -> String {
        let shown = self.url.split(',').map(|url| match url.rsplit_once('@') {
            Some((before, host)) => {
                let scheme = before.split_once("://").map_or("", |(scheme, _)| scheme);
                let separator = if scheme.is_empty() { "" } else { "://" };
                format!("{scheme}{separator}{host}")
            }
            None => url.to_owned(),
        });
        shown.collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_problems_are_reported_at_once() {
        assert_eq!(BrokerConfig::default().problems(), Vec::<String>::new());
        let config = BrokerConfig {
            url: " ,".to_owned(),
            prefix: "a.b".to_owned(),
            replicas: 0,
            tasks_max_messages: 0,
            dead_max_bytes: 0,
            tls_key: Some("key.pem".into()),
            ..BrokerConfig::default()
        };
        assert_eq!(config.problems().len(), 6);
    }

    #[test]
    fn options_are_read_by_their_names_and_others_refused() {
        let read = |text| serde_json::from_str::<BrokerConfig>(text);
        let config = read(r#"{ "tasks-max-messages": 5, "ack-wait": "1m 30s" }"#).unwrap();
        assert_eq!(config.tasks_max_messages, 5);
        assert_eq!(config.ack_wait, Duration::from_secs(90));
        assert_eq!(config.url, BrokerConfig::default().url);
        assert!(read(r#"{ "tasks-max-mesages": 5 }"#).is_err());
        let written = serde_json::to_string(&config).unwrap();
        assert_eq!(read(&written).unwrap(), config);
    }

    #[test]
    fn an_inbox_is_one_that_denials_are_recognised_by() {
        let problems = |inbox: &str| {
            let config = BrokerConfig {
                inbox_prefix: inbox.to_owned(),
                ..BrokerConfig::default()
            };
            config.problems().len()
        };
        for inbox in ["_INBOX", "_INBOX.ingest", "_INBOX.team-1.sink"] {
            assert_eq!(problems(inbox), 0, "{inbox}");
        }
        for inbox in ["", "_INBOX.", "_INBOX.>", "_INBOX.a b", "inbox", "_INBOX_a"] {
            assert_eq!(problems(inbox), 1, "{inbox}");
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        let config = BrokerConfig {
            url: "nats://me:p@ss@a:4222,b:4222,token@c:4222".to_owned(),
            ..BrokerConfig::default()
        };
        assert_eq!(config.redacted_url(), "nats://a:4222,b:4222,c:4222");
    }
}
