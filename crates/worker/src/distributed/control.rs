//! The control API: a NATS service with JSON requests and answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_nats::service::error::Error as ServiceError;
use async_nats::service::{Request, Service, ServiceExt};
use futures::stream::{self, BoxStream, SelectAll};
use futures::{StreamExt, TryStreamExt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use trommel_queue::{Broker, Queue};
use trommel_types::{JobRequest, Message};

use crate::WorkerError;
use crate::distributed::job_store::{JobStore, Submitted, json};
use crate::distributed::names::Subjects;
use crate::distributed::record::{Job, JobState};
use crate::distributed::repository::Repository;
use crate::distributed::status::JobStatus;
use crate::distributed::{dead, ends, presence, retry, status, why};
use crate::fault::Scope;

/// Names of the endpoints, below `<prefix>.api`.
const ENDPOINTS: [&str; 9] = [
    "submit", "status", "why", "list", "cancel", "retry", "dead", "models", "workers",
];
/// Most jobs on a page; a page that would not fit into a message ends earlier.
const PAGE: usize = 1000;
/// Jobs whose progress is read concurrently.
const READS: usize = 64;

/// The context of the API.
pub(crate) struct Context {
    pub(crate) broker: Broker,
    pub(crate) prefix: String,
    pub(crate) subjects: Subjects,
    pub(crate) store: JobStore,
    pub(crate) repository: Arc<Repository>,
    pub(crate) jobs: Arc<dyn Queue<JobRequest>>,
}

/// The answer to `submit`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubmitReply {
    /// The job's id.
    pub id: String,
    /// Whether the same job was submitted before; then nothing changed.
    pub submitted_before: bool,
}

/// A request about one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobId {
    /// The job's id.
    pub id: String,
}

/// A request for a page of jobs, the newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListRequest {
    /// Most jobs on the page. Default and maximum: 1,000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// The last job of the previous page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Whether to leave out jobs that have ended.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub running: bool,
}

/// A page of jobs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobPage {
    /// The jobs, without queue lengths.
    pub jobs: Vec<JobStatus>,
    /// The value for [`after`](ListRequest::after) of the next page; none on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// Total number of recorded jobs.
    pub all: u64,
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
pub(super) struct Refused {
    code: usize,
    reason: String,
}

impl Refused {
    pub(super) fn new(code: usize, reason: impl Into<String>) -> Self {
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
            ref error if matches!(error.scope(), Scope::Job(_)) => 400,
            _ => 500,
        };
        Self::new(code, error.to_string())
    }
}

/// The service, and the requests to its endpoints by name.
pub(crate) struct Api {
    service: Service,
    requests: SelectAll<BoxStream<'static, (&'static str, Request)>>,
}

/// Registers the API with the broker. Several processes may do so; each request goes to one of
/// them.
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
    let ours = format!("{}.api.", ctx.prefix);
    ctx.broker.check_subscriptions(&ours).await?;
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
                status: one_line(&refused.reason),
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

/// A text for a header: one line, at most a kilobyte.
fn one_line(text: &str) -> String {
    let end = text.floor_char_boundary(1024);
    let words: Vec<_> = text[..end].split_whitespace().collect();
    words.join(" ")
}

async fn answer(ctx: &Context, endpoint: &str, body: &[u8]) -> Result<bytes::Bytes, Refused> {
    let Context {
        broker,
        subjects,
        store,
        ..
    } = ctx;
    match endpoint {
        "submit" => Ok(json(&submit(ctx, body).await?)),
        "status" => {
            let JobId { id } = parse(body)?;
            let status = status::of(broker, subjects, store, &id).await?;
            Ok(json(&status.ok_or_else(|| unknown(&id))?))
        }
        "why" => {
            let JobId { id } = parse(body)?;
            let reasons = why::explain(broker, subjects, store, &id).await?;
            Ok(json(&reasons.ok_or_else(|| unknown(&id))?))
        }
        "list" => Ok(json(&list(ctx, body).await?)),
        "cancel" => {
            let JobId { id } = parse(body)?;
            let state = JobState::Cancelled;
            if ends::end(store, broker, subjects, &id, state, None)
                .await?
                .is_none()
            {
                let job = store.job(&id).await?.ok_or_else(|| unknown(&id))?;
                if job.state != state {
                    let state = job.state.as_str();
                    return Err(Refused::new(409, format!("job {id} is {state} already")));
                }
            }
            Ok(json(&JobId { id }))
        }
        "retry" => Ok(json(&retry::ask(ctx, parse(body)?).await?)),
        "dead" => {
            let JobId { id } = parse(body)?;
            Ok(json(&dead::letters(broker, subjects, &id).await?))
        }
        "workers" => Ok(json(&presence::alive(store).await?)),
        _ => Ok(json(&models(ctx).await?)),
    }
}

/// When a job was submitted; its id breaks ties, so that every job is on exactly one page.
fn place(job: &Job) -> (i64, String) {
    (job.submitted_at, job.id().to_owned())
}

/// The newest of the added jobs, and their number.
#[derive(Default)]
struct Newest {
    all: u64,
    left: usize,
    jobs: BTreeMap<(i64, String), Job>,
}

impl Newest {
    fn add(&mut self, job: Job, limit: usize) {
        self.left += 1;
        self.jobs.insert(place(&job), job);
        if self.jobs.len() > limit {
            self.jobs.pop_first();
        }
    }
}

/// A page of jobs, the newest first.
async fn list(ctx: &Context, body: &[u8]) -> Result<JobPage, Refused> {
    let asked: ListRequest = match body.trim_ascii().is_empty() {
        true => ListRequest::default(),
        false => parse(body)?,
    };
    let limit = asked.limit.unwrap_or(PAGE).clamp(1, PAGE);
    let after = match &asked.after {
        None => None,
        Some(id) => Some(ctx.store.job(id).await?.ok_or_else(|| unknown(id))?),
    };
    let after = after.as_ref().map(place);
    let newest = ctx.store.each_job(|newest: &mut Newest, job| {
        newest.all += 1;
        let is_asked_for = !(asked.running && job.state.is_final());
        if is_asked_for && after.as_ref().is_none_or(|after| place(&job) < *after) {
            newest.add(job, limit);
        }
    });
    let Newest { all, left, jobs } = newest.await?;
    let jobs = jobs.into_values().rev();
    let briefs = stream::iter(jobs).map(async |job| {
        let progress = ctx.store.progress(job.id()).await?;
        Ok::<_, Refused>(status::brief(job, progress))
    });
    let mut page: Vec<_> = briefs.buffered(READS).try_collect().await?;
    let mut room = ctx.broker.max_payload() / 2;
    let fitting = page.iter().take_while(|job| {
        let bytes = json(job).len();
        let fits = bytes <= room;
        room = room.saturating_sub(bytes);
        fits
    });
    page.truncate(fitting.count().max(1));
    let next = page.last().filter(|_| page.len() < left);
    Ok(JobPage {
        next: next.map(|job| job.id.clone()),
        jobs: page,
        all,
    })
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
    let submitted_before = match ctx.store.create(&request).await? {
        Submitted::New => false,
        Submitted::Before => true,
        Submitted::Taken => {
            let reason = format!("another job has the id {id}; choose another id");
            return Err(Refused::new(409, reason));
        }
    };
    // Also for an existing job: its submitter may have died between the two steps.
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
    Refused::new(404, format!("job {id} does not exist"))
}
