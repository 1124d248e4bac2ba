//! The control API: a NATS service that takes and answers JSON.

use std::sync::Arc;

use async_nats::service::error::Error as ServiceError;
use async_nats::service::{Request, Service, ServiceExt};
use futures::StreamExt;
use futures::stream::{BoxStream, SelectAll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use trommel_queue::{Broker, Queue};
use trommel_types::{JobRequest, Message};

use crate::WorkerError;
use crate::distributed::names::Subjects;
use crate::distributed::presence::Presence;
use crate::distributed::record::JobState;
use crate::distributed::registry::{Registry, Submitted, json};
use crate::distributed::repository::Repository;
use crate::distributed::{events, status, why};

/// Names of the endpoints, below `<prefix>.api`.
const ENDPOINTS: [&str; 7] = [
    "submit", "status", "why", "list", "cancel", "models", "workers",
];

/// What the API works with.
pub(crate) struct Context {
    pub(crate) broker: Broker,
    pub(crate) prefix: String,
    pub(crate) subjects: Subjects,
    pub(crate) registry: Registry,
    pub(crate) repository: Arc<Repository>,
    pub(crate) jobs: Arc<dyn Queue<JobRequest>>,
}

/// The answer to `submit`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubmitReply {
    /// The job's id.
    pub id: String,
    /// Whether the same job was submitted before; nothing has changed then.
    pub submitted_before: bool,
}

/// A request about one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobId {
    /// The job's id.
    pub id: String,
}

/// A model in the answer to `models`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelReply {
    /// Its name.
    pub name: String,
    /// The first digits of its content hash.
    pub version: String,
}

/// Why a request was refused; `code` as in HTTP.
struct Refused {
    code: usize,
    reason: String,
}

impl Refused {
    fn new(code: usize, reason: impl Into<String>) -> Self {
        Self {
            code,
            reason: reason.into(),
        }
    }
}

impl From<WorkerError> for Refused {
    fn from(error: WorkerError) -> Self {
        let code = match error {
            WorkerError::UnknownModel { .. } => 404,
            _ => 500,
        };
        Self::new(code, error.to_string())
    }
}

/// The service, and the requests to its endpoints by their names.
pub(crate) struct Api {
    service: Service,
    requests: SelectAll<BoxStream<'static, (&'static str, Request)>>,
}

/// Makes the API known to the broker. Several processes may; each request goes to one of them.
pub(crate) async fn start(ctx: &Context) -> Result<Api, WorkerError> {
    let failed = |error: async_nats::Error| {
        WorkerError::Settings(format!("failed to start the control API: {error}"))
    };
    let service = ctx
        .broker
        .client()
        .service_builder()
        .description("bulk image classification")
        .start("trommel", env!("CARGO_PKG_VERSION"))
        .await
        .map_err(failed)?;
    let group = service.group(format!("{}.api", ctx.prefix));
    let mut requests = SelectAll::new();
    for name in ENDPOINTS {
        let endpoint = group.endpoint(name).await.map_err(failed)?;
        requests.push(endpoint.map(move |request| (name, request)).boxed());
    }
    Ok(Api { service, requests })
}

/// Answers until `shutdown` fires.
pub(crate) async fn run(
    ctx: Arc<Context>,
    mut api: Api,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    while let Some(Some((name, request))) = shutdown.run_until_cancelled(api.requests.next()).await
    {
        let ctx = Arc::clone(&ctx);
        tokio::spawn(async move {
            let answer = answer(&ctx, name, &request.message.payload).await;
            let answer = answer.map_err(|refused| ServiceError {
                code: refused.code,
                status: refused.reason,
            });
            if let Err(error) = request.respond(answer).await {
                tracing::warn!(endpoint = name, %error, "an answer was not sent");
            }
        });
    }
    if let Err(error) = api.service.stop().await {
        tracing::debug!(%error, "the control API was not deregistered");
    }
    Ok(())
}

async fn answer(ctx: &Context, endpoint: &str, body: &[u8]) -> Result<bytes::Bytes, Refused> {
    match endpoint {
        "submit" => Ok(json(&submit(ctx, body).await?)),
        "status" => {
            let JobId { id } = parse(body)?;
            let status = status::of(&ctx.broker, &ctx.registry, &id).await?;
            Ok(json(&status.ok_or_else(|| unknown(&id))?))
        }
        "why" => {
            let JobId { id } = parse(body)?;
            let reasons = why::explain(&ctx.broker, &ctx.subjects, &ctx.registry, &id).await?;
            Ok(json(&reasons.ok_or_else(|| unknown(&id))?))
        }
        "list" => {
            let mut statuses = Vec::new();
            for job in ctx.registry.jobs().await? {
                let status = status::of(&ctx.broker, &ctx.registry, &job.request.id).await?;
                statuses.extend(status);
            }
            Ok(json(&statuses))
        }
        "cancel" => {
            let JobId { id } = parse(body)?;
            let ended = ctx.registry.end(&id, JobState::Cancelled, None).await?;
            let job = ended.ok_or_else(|| unknown(&id))?;
            if job.state != JobState::Cancelled {
                let state = job.state.as_str();
                return Err(Refused::new(409, format!("job {id} is {state} already")));
            }
            events::ended(&ctx.broker, &ctx.subjects, &job).await;
            Ok(json(&JobId { id }))
        }
        "workers" => Ok(json(&Presence::alive(&ctx.registry).await?)),
        _ => Ok(json(&models(ctx).await?)),
    }
}

async fn submit(ctx: &Context, body: &[u8]) -> Result<SubmitReply, Refused> {
    let mut request =
        JobRequest::decode(body).map_err(|error| Refused::new(400, error.to_string()))?;
    if request.id.is_empty() {
        request.id = uuid::Uuid::now_v7().to_string();
    }
    let problems = request.problems();
    if !problems.is_empty() {
        return Err(Refused::new(400, problems.join("; ")));
    }
    let (repository, names) = (Arc::clone(&ctx.repository), request.models.clone());
    let known = tokio::task::spawn_blocking(move || {
        names
            .iter()
            .try_for_each(|name| repository.model(name).map(drop))
    });
    known
        .await
        .map_err(|_| Refused::new(500, "a model could not be looked at"))??;
    let id = request.id.clone();
    let submitted_before = match ctx.registry.create(&request).await? {
        Submitted::New => false,
        Submitted::Before => true,
        Submitted::Taken => {
            let reason = format!("another job has the id {id}; choose another id");
            return Err(Refused::new(409, reason));
        }
    };
    // Also for a job that was there: its submitter may have died between the two.
    let published = ctx.jobs.publish(&id, request).await;
    published.map_err(|error| Refused::new(500, error.to_string()))?;
    Ok(SubmitReply {
        id,
        submitted_before,
    })
}

async fn models(ctx: &Context) -> Result<Vec<ModelReply>, Refused> {
    let repository = Arc::clone(&ctx.repository);
    let models = tokio::task::spawn_blocking(move || {
        let models = repository.names().into_iter().map(|name| {
            let version = repository.model(&name)?.id.version.to_string();
            Ok(ModelReply { name, version })
        });
        models.collect::<Result<Vec<_>, WorkerError>>()
    });
    let models = models
        .await
        .map_err(|_| Refused::new(500, "the models could not be looked at"))?;
    Ok(models?)
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refused> {
    serde_json::from_slice(body)
        .map_err(|error| Refused::new(400, format!("the request cannot be read: {error}")))
}

fn unknown(id: &str) -> Refused {
    Refused::new(404, format!("there is no job {id}"))
}
