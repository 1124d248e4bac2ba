//! The spans of images, in the traces that travel with their messages.

use std::fmt;

use opentelemetry::trace::TraceContextExt;
use tracing::Span;
use tracing::field::display;
use tracing_opentelemetry::OpenTelemetrySpanExt;
use trommel_queue::Origin;
use trommel_types::ImageRef;

/// The span of a stage's work on an image, in the image's trace.
macro_rules! image_span {
    ($name:literal, $delivery:expr, $image:expr) => {
        $crate::trace::continued(
            tracing::debug_span!(
                $name,
                image_id = %$crate::trace::ImageId($image),
                attempt = $delivery.attempt(),
                trace_id = tracing::field::Empty
            ),
            $delivery.origin(),
        )
    };
}
pub(crate) use image_span;

/// Names an image in logs and traces: `job/index`.
pub(crate) struct ImageId<'a>(pub(crate) &'a ImageRef);

impl fmt::Display for ImageId<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0.job, self.0.index)
    }
}

/// Puts a span into the trace of a message. Its field `trace_id` then appears in log lines within
/// it.
pub(crate) fn continued(span: Span, origin: &Origin) -> Span {
    // Without a layer for traces, or for this span, there is nothing to continue.
    drop(span.set_parent(origin.trace().clone()));
    named(span)
}

/// Writes the trace id of a span into its field `trace_id`, if it has one.
pub(crate) fn named(span: Span) -> Span {
    let context = span.context();
    let trace = context.span().span_context().trace_id();
    if trace != opentelemetry::TraceId::INVALID {
        span.record("trace_id", display(trace));
    }
    span
}
