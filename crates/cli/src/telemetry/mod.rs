//! Logs, traces, metrics and health of this process.
//!
//! A separate thread sends traces and serves metrics and health, so that a saturated device or a
//! busy runtime does not delay answers.

mod endpoint;
mod health;
mod traces;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use tokio::runtime::{Builder, Runtime};
use tracing_subscriber::filter::FilterExt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use trommel_serve::{FRAME_AGE_SECONDS, REQUEST_BUCKETS, REQUEST_SECONDS};
use trommel_worker::{LogFormat, TelemetryConfig};

pub(crate) use self::health::Health;
use crate::exit::{Usage, colours};
use crate::progress_bar::LogWriter;

/// Running telemetry. Dropping it sends what remains.
pub(crate) struct Telemetry {
    /// The state behind `/readyz` and `/healthz`.
    pub(crate) health: Arc<Health>,
    traces: Option<opentelemetry_sdk::trace::SdkTracerProvider>,
    runtime: Option<Runtime>,
}

/// Longest wait for the last traces to be sent.
const FLUSH: Duration = Duration::from_secs(2);

impl Telemetry {
    /// Starts logging by `filter`, and whatever `config` enables.
    ///
    /// # Errors
    /// If the filter is invalid, or the address is in use.
    pub(crate) fn start(config: &TelemetryConfig, filter: &str) -> Result<Self> {
        let filter = EnvFilter::try_new(filter)
            .with_context(|| format!("invalid log filter {filter:?}"))
            .context(Usage)?;
        let wants_thread = config.listen.is_some() || config.otlp_endpoint.is_some();
        let runtime = wants_thread.then(start_thread).transpose()?;
        let health = Arc::new(Health::default());
        let traces = match (&runtime, &config.otlp_endpoint) {
            (Some(runtime), Some(endpoint)) => {
                let _inside = runtime.enter();
                Some(traces::start(endpoint, config)?)
            }
            _ => None,
        };
        let lines = log_lines(config.log_format);
        let lines = match traces {
            // Log lines about an image include its trace.
            Some(_) => lines.with_filter(filter.or(traces::own_spans())).boxed(),
            None => lines.with_filter(filter).boxed(),
        };
        tracing_subscriber::registry()
            .with(traces.as_ref().map(traces::layer))
            .with(lines)
            .init();
        if let (Some(runtime), Some(address)) = (&runtime, config.listen) {
            let recorder = prometheus()?;
            let listener = runtime
                .block_on(tokio::net::TcpListener::bind(address))
                .with_context(|| format!("failed to listen on telemetry.listen = {address}"))
                .context(Usage)?;
            runtime.spawn(endpoint::serve(listener, recorder, Arc::clone(&health)));
        }
        Ok(Self {
            health,
            traces,
            runtime,
        })
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(traces) = self.traces.take()
            && let Err(error) = traces.shutdown_with_timeout(FLUSH)
        {
            tracing::warn!(%error, "failed to send the last traces");
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn start_thread() -> Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("telemetry")
        .enable_all()
        .build()
        .context("failed to start the telemetry thread")
}

fn log_lines<S>(format: LogFormat) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(LogWriter::default)
        .with_target(false);
    match format {
        LogFormat::Text => lines.with_ansi(colours()).compact().boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    }
}

/// Upper bounds of the time buckets, in seconds.
const SECONDS: [f64; 16] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    120.0,
];
/// Those of images in a batch.
const IMAGES: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];
/// Those of shares.
const SHARES: [f64; 7] = [0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0];

/// Records this process's metrics from now on.
fn prometheus() -> Result<metrics_exporter_prometheus::PrometheusHandle> {
    let suffix = |suffix: &str| Matcher::Suffix(suffix.to_owned());
    let requests = Matcher::Full(REQUEST_SECONDS.to_owned());
    let frames = Matcher::Full(FRAME_AGE_SECONDS.to_owned());
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(suffix("_seconds"), &SECONDS)
        .and_then(|builder| builder.set_buckets_for_metric(requests, &REQUEST_BUCKETS))
        .and_then(|builder| builder.set_buckets_for_metric(frames, &REQUEST_BUCKETS))
        .and_then(|builder| builder.set_buckets_for_metric(suffix("_batch_size"), &IMAGES))
        .and_then(|builder| builder.set_buckets_for_metric(suffix("_batch_fill"), &SHARES))
        .and_then(PrometheusBuilder::install_recorder)
        .context("failed to start the metrics recorder")?;
    trommel_worker::describe_metrics();
    trommel_serve::describe_metrics();
    Ok(recorder)
}
