use std::time::{Duration, SystemTime};

use async_nats::HeaderMap;
use opentelemetry::propagation::{Extractor, Injector};
use opentelemetry::{Context, global};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The origin of a delivery: the trace of its message, and when it was stored.
#[derive(Debug, Clone, Default)]
pub struct Origin {
    trace: Context,
    stored: Option<SystemTime>,
}

impl Origin {
    /// For a message that the current span stores now, in a queue in the same process.
    pub(crate) fn here() -> Self {
        Self {
            trace: Span::current().context(),
            stored: Some(SystemTime::now()),
        }
    }

    /// For a message with its trace in headers.
    pub(crate) fn of(headers: Option<&HeaderMap>, stored: Option<SystemTime>) -> Self {
        let trace = headers.map_or_else(Context::new, |headers| {
            global::get_text_map_propagator(|propagator| propagator.extract(&Headers(headers)))
        });
        Self { trace, stored }
    }

    /// The trace, to be used as the parent of the work's span.
    pub fn trace(&self) -> &Context {
        &self.trace
    }

    /// When the message was stored, by this machine's clock or the broker's.
    pub fn stored(&self) -> Option<SystemTime> {
        self.stored
    }

    /// How long the message has been stored, by this machine's clock and, from a broker, the
    /// broker's: differences between the clocks affect this.
    pub fn waited(&self) -> Option<Duration> {
        self.stored
            .map(|stored| stored.elapsed().unwrap_or_default())
    }
}

/// Headers with the current span's trace, as W3C `traceparent` and `tracestate`.
pub(crate) fn trace_headers() -> HeaderMap {
    let mut headers = HeaderMap::new();
    let trace = Span::current().context();
    global::get_text_map_propagator(|propagator| {
        propagator.inject_context(&trace, &mut HeadersMut(&mut headers));
    });
    headers
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(|value| value.as_str())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.iter().map(|(name, _)| name.as_ref()).collect()
    }
}

struct HeadersMut<'a>(&'a mut HeaderMap);

impl Injector for HeadersMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        self.0.insert(key, value);
    }
}
