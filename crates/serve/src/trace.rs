use std::collections::HashMap;

use opentelemetry::global;
use opentelemetry::trace::TraceContextExt;
use tracing::Span;
use tracing::field::{Empty, display};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Headers that carry the trace of a request.
const HEADERS: [&str; 2] = ["traceparent", "tracestate"];

/// The span of a request, in the trace named by its headers. `header` looks one up.
pub(crate) fn request_span(
    entrance: &'static str,
    header: impl Fn(&str) -> Option<String>,
) -> Span {
    let span = tracing::debug_span!("serve.request", entrance, trace_id = Empty);
    let carried: HashMap<String, String> = HEADERS
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), header(name)?)))
        .collect();
    if !carried.is_empty() {
        let parent = global::get_text_map_propagator(|propagator| propagator.extract(&carried));
        // Without a layer for traces there is nothing to continue.
        drop(span.set_parent(parent));
    }
    let context = span.context();
    let trace = context.span().span_context().trace_id();
    if trace != opentelemetry::TraceId::INVALID {
        span.record("trace_id", display(trace));
    }
    span
}
