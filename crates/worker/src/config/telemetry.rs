//! Logs, traces, metrics and health.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Logs, traces, metrics and health.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct TelemetryConfig {
    /// Address that answers `/metrics`, `/healthz` and `/readyz`, such as `0.0.0.0:9464`. Default:
    /// none.
    pub listen: Option<SocketAddr>,
    /// Where traces are sent, such as `http://collector:4317`. Default: nowhere.
    pub otlp_endpoint: Option<String>,
    /// How they are sent: `grpc`, or `http` (binary Protobuf). Default: `grpc`.
    pub otlp_protocol: OtlpProtocol,
    /// Share of images that are traced, 0 to 1. Default: 0.01.
    pub sample: f64,
    /// How log lines are written: `text` or `json`. Default: `text`.
    pub log_format: LogFormat,
}

/// How traces are sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OtlpProtocol {
    /// gRPC; also for `https` addresses.
    #[default]
    Grpc,
    /// Protobuf over HTTP, unencrypted.
    Http,
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self {
            listen: None,
            otlp_endpoint: None,
            otlp_protocol: OtlpProtocol::Grpc,
            sample: 0.01,
            log_format: LogFormat::Text,
        }
    }
}

impl TelemetryConfig {
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if !(0.0..=1.0).contains(&self.sample) {
            problems.push(format!(
                "telemetry.sample: {} is not a share; give a number from 0 to 1",
                self.sample
            ));
        }
        let scheme = |endpoint: &str| {
            endpoint
                .split_once("://")
                .map(|(scheme, _)| scheme.to_owned())
        };
        if let Some(endpoint) = &self.otlp_endpoint {
            match (scheme(endpoint).as_deref(), self.otlp_protocol) {
                (Some("http"), _) | (Some("https"), OtlpProtocol::Grpc) => {}
                (Some("https"), OtlpProtocol::Http) => problems.push(
                    "telemetry.otlp-endpoint: https needs otlp-protocol = \"grpc\"; or send to a collector on this host over http".to_owned(),
                ),
                _ => problems.push(format!(
                    "telemetry.otlp-endpoint: {endpoint:?} is not an address; give one like http://localhost:4317"
                )),
            }
        }
        problems
    }
}
