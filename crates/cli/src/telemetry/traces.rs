use std::time::Duration;

use anyhow::{Context, Result};
use opentelemetry::trace::TracerProvider;
use opentelemetry::{KeyValue, global};
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::runtime::Tokio;
use opentelemetry_sdk::trace::span_processor_with_async_runtime::BatchSpanProcessor;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use tracing::Metadata;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{FilterExt, FilterFn, LevelFilter, Targets, filter_fn};

use trommel_worker::{OtlpProtocol, TelemetryConfig};

use crate::exit::Usage;

/// Time limit of a request to the collector.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Sends traces to a collector, on the current runtime. If the collector is down, only traces are
/// lost.
pub(super) fn start(endpoint: &str, config: &TelemetryConfig) -> Result<SdkTracerProvider> {
    let exporter = match config.otlp_protocol {
        OtlpProtocol::Grpc => SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .with_timeout(TIMEOUT)
            .build(),
        OtlpProtocol::Http => SpanExporter::builder()
            .with_http()
            .with_http_client(HyperClient::with_default_connector(TIMEOUT, None))
            .with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')))
            .with_timeout(TIMEOUT)
            .build(),
    };
    let exporter = exporter
        .with_context(|| format!("failed to start sending traces to {endpoint}"))
        .context(Usage)?;
    global::set_text_map_propagator(TraceContextPropagator::new());
    let share = Sampler::TraceIdRatioBased(config.sample);
    Ok(SdkTracerProvider::builder()
        .with_span_processor(BatchSpanProcessor::builder(exporter, Tokio).build())
        // An image is traced in all processes or in none.
        .with_sampler(Sampler::ParentBased(Box::new(share)))
        .with_resource(
            Resource::builder()
                .with_service_name("trommel")
                .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
                .with_attribute(KeyValue::new("process.pid", i64::from(std::process::id())))
                .build(),
        )
        .build())
}

/// Enables the spans of Trommel's own crates. Spans of single images are created only for a layer
/// that wants them, because processing an image may cost less than its span.
pub(super) fn own_spans() -> FilterFn<impl Fn(&Metadata<'_>) -> bool> {
    let own =
        |metadata: &Metadata<'_>| metadata.is_span() && metadata.target().starts_with("trommel");
    filter_fn(own).with_max_level_hint(LevelFilter::DEBUG)
}

/// Exports the spans of Trommel's own crates.
pub(super) fn layer<S>(traces: &SdkTracerProvider) -> Box<dyn Layer<S> + Send + Sync>
where
    S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a> + Send + Sync,
{
    let spans = own_spans();
    let events = Targets::new().with_target("trommel", LevelFilter::INFO);
    tracing_opentelemetry::layer()
        .with_tracer(traces.tracer("trommel"))
        .with_location(false)
        .with_threads(false)
        .with_filter(spans.or(events))
        .boxed()
}
