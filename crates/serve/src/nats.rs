use std::sync::Arc;
use std::time::Instant;

use async_nats::client::PublishError;
use async_nats::service::error::Error as ServiceError;
use async_nats::service::{
    NATS_SERVICE_ERROR, NATS_SERVICE_ERROR_CODE, Request, Service, ServiceExt,
};
use async_nats::{Client, HeaderMap, Message};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{BoxStream, SelectAll};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use trommel_queue::{Broker, subject_token};
use trommel_worker::{Admitted, ServedModel};

use crate::ServeError;
use crate::entrance::{Asked, Entrance, Image, deadline, outcome, request_id};
use crate::metrics::Observed;
use crate::named;
use crate::params::Params;
use crate::refused::Refused;
use crate::trace::request_span;

/// The queue group that shares the requests, named after the service.
const SERVICE: &str = "trommel-classify";
/// The value of `Accept` for MessagePack.
const MSGPACK: [&str; 2] = ["application/msgpack", "application/x-msgpack"];
/// Headers with row parameters, by parameter.
const PARAMS: [(&str, &str); 8] = [
    ("Trommel-Uri", "uri"),
    ("Trommel-Top-K", "top_k"),
    ("Trommel-Threshold", "threshold"),
    ("Trommel-Threshold-Of", "threshold_of"),
    ("Trommel-Logits", "logits"),
    ("Trommel-Embedding", "embedding"),
    ("Trommel-Labels", "labels"),
    ("Trommel-Template", "template"),
];

/// A request, and how to answer it.
enum Asking {
    /// Received from the service.
    Given(Request),
    /// Possibly lost while the service ended.
    Missed(Message, Client),
}

/// Where the image of a request is.
enum Way {
    /// In the admitted request.
    Here(Admitted),
    /// At a url; admitted once fetched.
    Fetched(Arc<ServedModel>),
}

/// Answers requests on `PREFIX.classify.MODEL`, as a NATS service that shares the requests with
/// other instances.
pub struct NatsService {
    service: Service,
    requests: SelectAll<BoxStream<'static, (Arc<ServedModel>, Request)>>,
    /// The requests, by the subjects of the models.
    subjects: Vec<(String, Arc<ServedModel>)>,
    broker: Broker,
    entrance: Arc<Entrance>,
}

impl NatsService {
    /// Registers the models with the broker.
    ///
    /// # Errors
    /// If the broker refuses the service, or denies its subjects to this user.
    pub async fn start(broker: &Broker, entrance: Arc<Entrance>) -> Result<Self, ServeError> {
        let failed = |error: async_nats::Error| ServeError::Nats(error.to_string());
        let service = broker
            .client()
            .service_builder()
            .description("labels of single images")
            .start(SERVICE, env!("CARGO_PKG_VERSION"))
            .await
            .map_err(failed)?;
        let (mut requests, mut subjects) = (SelectAll::new(), Vec::new());
        for model in entrance.answers.models() {
            let token = subject_token(model.name());
            let subject = broker.subject(&format!("classify.{token}"));
            let endpoint = service
                .endpoint_builder()
                .name(endpoint_name(model.name()))
                .add(subject.clone())
                .await
                .map_err(failed)?;
            let model = Arc::clone(model);
            subjects.push((subject, Arc::clone(&model)));
            let named = endpoint.map(move |request| (Arc::clone(&model), request));
            requests.push(named.boxed());
        }
        broker
            .check_subscriptions(&broker.subject("classify."))
            .await
            .map_err(|error| ServeError::Nats(error.to_string()))?;
        crate::metrics::begin("nats");
        Ok(Self {
            service,
            requests,
            subjects,
            broker: broker.clone(),
            entrance,
        })
    }

    /// Answers until `stop` fires, then the requests already delivered to this process.
    pub async fn run(self, stop: CancellationToken) {
        let (mut this, open) = (self, TaskTracker::new());
        while let Some(Some((model, request))) =
            stop.run_until_cancelled(this.requests.next()).await
        {
            take(&this.entrance, &open, &model, Asking::Given(request));
        }
        this.leave(&open).await;
        open.close();
        open.wait().await;
    }

    /// Ends the service, and starts all requests already delivered.
    async fn leave(self, open: &TaskTracker) {
        let Self {
            service,
            mut requests,
            subjects,
            broker,
            entrance,
        } = self;
        let names: Vec<_> = subjects.iter().map(|(name, _)| name.clone()).collect();
        let copies = broker.copies(&names).await;
        if let Err(error) = service.stop().await {
            tracing::debug!(%error, "the service was not deregistered");
        }
        // No more arrive; those received are still queued.
        let mut taken = Vec::new();
        while let Some((model, request)) = requests.next().await {
            taken.push(request.message.clone());
            take(&entrance, open, &model, Asking::Given(request));
        }
        let missed = match copies {
            Ok(copies) => copies.not_among(&taken).await,
            Err(error) => Err(error),
        };
        let missed = missed.unwrap_or_else(|error| {
            tracing::warn!(%error, "requests in flight may be lost");
            Vec::new()
        });
        for message in missed {
            let of = subjects
                .iter()
                .find(|(subject, _)| *subject == *message.subject);
            if let Some((_, model)) = of {
                let asking = Asking::Missed(message, broker.client().clone());
                take(&entrance, open, model, asking);
            }
        }
    }
}

/// Admits or refuses a request, and answers it on its own task: the number of open requests is
/// limited by admission, and by the number of concurrent fetches.
fn take(entrance: &Arc<Entrance>, open: &TaskTracker, model: &Arc<ServedModel>, request: Asking) {
    let since = Instant::now();
    let observed = Observed::begin("nats", since);
    let headers = request.message().headers.clone().unwrap_or_default();
    let is_url = header(&headers, "Content-Type") == Some(named::CONTENT_TYPE);
    let admitted = match is_url {
        true => model.check_room().map(|()| Way::Fetched(Arc::clone(model))),
        false => model.admit(1).map(Way::Here),
    };
    let entrance = Arc::clone(entrance);
    let span = request_span("nats", |name| header(&headers, name).map(str::to_owned));
    let work = async move {
        let answered = match admitted {
            Ok(way) => answer(&entrance, way, since, &headers, request.message()).await,
            Err(error) => Err(error.into()),
        };
        let (reply, counted) = match answered {
            Ok((reply, counted)) => (Ok(reply), counted),
            Err(refused) => (Err(service_error(&refused)), refused.outcome()),
        };
        if let Err(error) = request.respond(reply).await {
            tracing::warn!(%error, "an answer was not sent");
        }
        observed.end(counted);
    };
    open.spawn(work.instrument(span));
}

impl Asking {
    fn message(&self) -> &Message {
        match self {
            Self::Given(request) => &request.message,
            Self::Missed(message, _) => message,
        }
    }

    async fn respond(self, reply: Result<Bytes, ServiceError>) -> Result<(), PublishError> {
        let (message, client) = match self {
            Self::Given(request) => return request.respond(reply).await,
            Self::Missed(message, client) => (message, client),
        };
        let Some(to) = message.reply else {
            return Ok(());
        };
        match reply {
            Ok(row) => client.publish(to, row).await,
            Err(error) => {
                let mut headers = HeaderMap::new();
                headers.insert(NATS_SERVICE_ERROR, error.status.as_str());
                headers.insert(NATS_SERVICE_ERROR_CODE, error.code.to_string().as_str());
                client.publish_with_headers(to, headers, Bytes::new()).await
            }
        }
    }
}

async fn answer(
    entrance: &Entrance,
    way: Way,
    since: Instant,
    headers: &HeaderMap,
    message: &Message,
) -> Result<(Bytes, &'static str), Refused> {
    let model = match &way {
        Way::Here(admitted) => Arc::clone(admitted.model()),
        Way::Fetched(model) => Arc::clone(model),
    };
    let mut params = Params::default();
    for (name, param) in PARAMS {
        if let Some(value) = header(headers, name) {
            params.set(param, value)?;
        }
    }
    let bytes = message.payload.clone();
    let most = entrance.config.max_body.get();
    if bytes.len() > most {
        let message = format!("the image holds more than serve.max-body = {most} bytes");
        return Err(Refused::too_large(message));
    }
    let asked = Asked {
        id: request_id(header(headers, "X-Request-Id")),
        wanted: params.wanted(&model).await?,
        deadline: deadline(since, header(headers, "Trommel-Deadline-Ms"))?,
    };
    let shape = asked.shape(&model);
    let row = match way {
        Way::Here(admitted) => {
            let uri = params.uri.unwrap_or_default();
            entrance.one(admitted, asked, Image { uri, bytes }).await?
        }
        Way::Fetched(model) => {
            let (image, _room) = named::fetch(entrance, bytes, params.uri, asked.deadline).await?;
            entrance.one(model.admit(1)?, asked, image).await?
        }
    };
    let reply = match header(headers, "Accept") {
        Some(kind) if MSGPACK.contains(&kind) => {
            rmp_serde::to_vec_named(&shape.row(&row)).map_err(|error| error.to_string())
        }
        _ => serde_json::to_vec(&shape.row(&row)).map_err(|error| error.to_string()),
    };
    let unwritten = |error: String| {
        Refused::new(
            hyper::StatusCode::INTERNAL_SERVER_ERROR,
            "unavailable",
            error,
        )
    };
    Ok((reply.map_err(unwritten)?.into(), outcome(&row)))
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.as_str())
}

/// A refusal as a NATS service error: a code as in HTTP, and a line that begins with the kind.
fn service_error(refused: &Refused) -> ServiceError {
    let line = format!("{}: {}", refused.kind, refused.message);
    ServiceError {
        code: refused.status.as_u16().into(),
        status: line.replace(['\r', '\n'], " "),
    }
}

/// A valid name of a service.
fn endpoint_name(model: &str) -> String {
    let allowed = |c: char| {
        if c.is_ascii_alphanumeric() || c == '-' {
            c
        } else {
            '_'
        }
    };
    model.chars().map(allowed).collect()
}
