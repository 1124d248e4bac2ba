//! The ingest role over the broker: takes jobs, lists each, keeps its place.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use trommel_queue::{Delivery, Disposition, Feed, Queue};
use trommel_storage::{Found, Source, StorageError, open_source};
use trommel_types::{Column, Content, ImageRef, InlineImage, JobRequest};

use crate::distributed::feed;
use crate::distributed::names::{Subjects, key};
use crate::distributed::queues;
use crate::distributed::record::{Counted, Job, JobModel, JobState, Listing};
use crate::distributed::registry::{LiveJobs, Registry, Submitted};
use crate::distributed::repository::Repository;
use crate::distributed::request::{output_of, source_options};
use crate::error::is_transient;
use crate::fatal::Fatal;
use crate::ingest;
use crate::intake::Intake;
use crate::settle::now;
use crate::{Progress, Role, WorkerConfig, WorkerError, metrics};

/// Longest time between two notes of the place in the broker.
const NOTE_EVERY: Duration = Duration::from_millis(500);
/// Time before a listing that failed for the moment is taken up again.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Images that a dry run classifies.
const DRY_RUN_IMAGES: u64 = 512;
/// Longest time that a dry run counts images for.
const COUNT_FOR: Duration = Duration::from_secs(30);

/// What the ingest role works with.
pub(crate) struct Context {
    pub(crate) intake: Intake<JobRequest>,
    pub(crate) tasks: Arc<dyn Queue<ImageRef>>,
    pub(crate) registry: Registry,
    pub(crate) jobs: Arc<LiveJobs>,
    pub(crate) repository: Arc<Repository>,
    pub(crate) config: WorkerConfig,
    pub(crate) subjects: Subjects,
    pub(crate) broker: trommel_queue::Broker,
}

/// Lists jobs until `shutdown` fires, then notes the place of each and gives it back.
///
/// A job stays in hand until its whole listing is stored, so that a killed ingest's job goes to
/// another one, which goes on from the last place noted.
pub(crate) async fn run(ctx: Arc<Context>, shutdown: CancellationToken) -> Result<(), WorkerError> {
    let (in_flight, fatal) = (TaskTracker::new(), Fatal::new(&shutdown));
    let stopped = loop {
        let next = ctx.intake.next_delivery(|| ());
        let (delivery, permit) = match fatal.token().run_until_cancelled(next).await {
            None => break Ok(()),
            Some(Err(error)) => break Err(error),
            Some(Ok(next)) => next,
        };
        let (ctx, fatal, shutdown) = (Arc::clone(&ctx), fatal.clone(), shutdown.clone());
        in_flight.spawn(async move {
            fatal.check(work_on(&ctx, delivery, shutdown).await);
            drop(permit);
        });
    };
    ctx.intake.give_back().await;
    in_flight.close();
    in_flight.wait().await;
    stopped.and(fatal.into_result())
}

async fn work_on(
    ctx: &Arc<Context>,
    delivery: Delivery<JobRequest>,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let kept_alive = delivery.keep_alive();
    let request = Arc::clone(delivery.message());
    let listed = match list_one(ctx, &request, shutdown).await {
        // The broker is out of reach: what is noted is noted.
        Err(WorkerError::Queue(error)) => Listed::Later(error.to_string()),
        listed => listed?,
    };
    let disposition = match listed {
        Listed::Ended => Disposition::Done,
        Listed::Stopped => Disposition::Retry {
            after: Duration::ZERO,
        },
        Listed::Later(reason) => {
            tracing::warn!(job = request.id, reason, "will be listed again");
            ctx.registry
                .update(&request.id, |job| {
                    job.reason = Some(format!("waits to be listed: {reason}"));
                    true
                })
                .await
                .map(drop)
                .unwrap_or_else(|error| tracing::warn!(%error, "the reason is not noted"));
            Disposition::Retry { after: AGAIN_AFTER }
        }
        Listed::Hopeless(reason) => {
            tracing::error!(job = request.id, reason, "the job fails");
            fail(ctx, &request, &reason).await?;
            Disposition::DeadLetter { reason }
        }
    };
    drop(kept_alive);
    metrics::settled(Role::Ingest.as_str(), &disposition);
    if let Err(error) = delivery.settle(disposition).await {
        tracing::warn!(job = request.id, %error, "another ingest has the job now");
    }
    Ok(())
}

/// What became of a listing.
enum Listed {
    /// Nothing is left to list.
    Ended,
    /// This process stops.
    Stopped,
    /// The source cannot be listed for the moment.
    Later(String),
    /// The job cannot be done.
    Hopeless(String),
}

impl Listed {
    /// By whether another attempt may cure the error.
    fn failed(error: WorkerError) -> Result<Self, WorkerError> {
        match error {
            WorkerError::Storage(error) if is_transient(&error) => {
                Ok(Self::Later(error.to_string()))
            }
            WorkerError::Queue(error) => Err(error.into()),
            error => Ok(Self::Hopeless(error.to_string())),
        }
    }
}

async fn fail(ctx: &Context, request: &JobRequest, reason: &str) -> Result<(), WorkerError> {
    let ended = ctx
        .registry
        .end(&request.id, JobState::Failed, Some(reason));
    if let Some(job) = ended.await? {
        crate::distributed::events::ended(&ctx.broker, &ctx.subjects, &job).await;
    }
    Ok(())
}

async fn list_one(
    ctx: &Arc<Context>,
    request: &Arc<JobRequest>,
    shutdown: CancellationToken,
) -> Result<Listed, WorkerError> {
    let problems = request.problems();
    if !problems.is_empty() {
        let reason = format!("the request cannot be carried out: {}", problems.join("; "));
        return Ok(Listed::Hopeless(reason));
    }
    if ctx.registry.create(request).await? == Submitted::Taken {
        tracing::error!(
            job = request.id,
            "another job has this id; the request is dropped"
        );
        return Ok(Listed::Ended);
    }
    let opened = {
        let (ctx, request) = (Arc::clone(ctx), Arc::clone(request));
        tokio::task::spawn_blocking(move || open(&ctx, &request))
    };
    let opened = opened.await.map_err(|_| WorkerError::Panicked {
        what: "opening a source",
    })?;
    let (mut images, models) = match opened {
        Ok(opened) => opened,
        Err(error) => return Listed::failed(error),
    };
    if let Some(subject) = feed::subject_of(&request.sources) {
        match ctx.broker.feed(subject).await {
            Ok(feed) => images = Images::Feed(Box::new(feed)),
            Err(error) => return Ok(Listed::Hopeless(error.to_string())),
        }
    }
    let Some(job) = begin(ctx, request, &images, &models).await? else {
        return Ok(Listed::Ended);
    };
    list(ctx, &job, images, shutdown).await
}

/// Where the images of a job come from, besides its request.
enum Images {
    None,
    Source(Arc<dyn Source>),
    Feed(Box<Feed>),
}

impl Images {
    /// In words, for rows and people.
    fn describe(&self, request: &JobRequest) -> String {
        match self {
            Self::None => "images in the request".to_owned(),
            Self::Source(source) => source.describe(),
            Self::Feed(_) => request.sources.concat(),
        }
    }

    fn columns(&self) -> Vec<Column> {
        match self {
            Self::None => Vec::new(),
            Self::Source(source) => source.columns().to_vec(),
            Self::Feed(_) => feed::columns(),
        }
    }
}

/// Opens everything that the job names, so that what is wrong with it is told at once.
fn open(ctx: &Context, request: &JobRequest) -> Result<(Images, Vec<JobModel>), WorkerError> {
    let mut models = Vec::new();
    for name in &request.models {
        let known = ctx.repository.model(name)?;
        models.push(JobModel {
            name: name.clone(),
            version: known.id.version.to_string(),
        });
        output_of(request, name, &ctx.config)?;
    }
    let images = match request.sources.as_slice() {
        // Opened by its caller, who may ask the broker.
        _ if feed::subject_of(&request.sources).is_some() => Images::None,
        [] => Images::None,
        sources => Images::Source(open_source(sources, &source_options(request, &ctx.config))?),
    };
    Ok((images, models))
}

/// Marks the job as running; `None` if it has ended already.
async fn begin(
    ctx: &Context,
    request: &JobRequest,
    images: &Images,
    models: &[JobModel],
) -> Result<Option<Job>, WorkerError> {
    let (described, columns) = (images.describe(request), images.columns());
    let job = ctx.registry.update(&request.id, |job| {
        let begins = job.state == JobState::Queued;
        if begins {
            job.state = JobState::Running;
            job.reason = None;
            job.started_at = Some(now());
            job.source.clone_from(&described);
            job.columns.clone_from(&columns);
            job.models = models.to_vec();
        }
        begins
    });
    Ok(job.await?.filter(|job| job.state == JobState::Running))
}

/// Lists a job from its last place on, and notes the place as it goes.
async fn list(
    ctx: &Arc<Context>,
    job: &Job,
    images: Images,
    shutdown: CancellationToken,
) -> Result<Listed, WorkerError> {
    let id = job.request.id.as_str();
    let mut known = ctx.registry.listing(id).await?;
    if known.ended {
        return Ok(Listed::Ended);
    }
    if let (true, None, Images::Source(source)) =
        (job.request.options.dry_run, known.counted, &images)
    {
        known.counted = Some(count(source.as_ref()).await?);
        ctx.registry.put(&key::listing(id), &known).await?;
    }
    let models: Vec<_> = job.models.iter().map(|model| model.name.clone()).collect();
    queues::ensure_consumers(&ctx.broker, &ctx.subjects, &ctx.config, &models).await?;
    let stop = shutdown.child_token();
    let progress = Arc::new(Progress::default());
    let listing = Arc::new(ingest::Context {
        job: id.into(),
        lane: job.request.lane,
        output: Arc::clone(&ctx.tasks),
        window: ctx.config.ingest.publish_window.get(),
        place: ingest::Place::at(known.listed, known.last_uri),
        mark: match images {
            Images::Feed(_) => feed::mark,
            _ => ingest::uri_of,
        },
        progress: Arc::clone(&progress),
    });
    let images = listed(&job.request, &images, &ctx.config, listing.place.get());
    let running = ingest::run(
        Arc::clone(&listing),
        images,
        ingest::Choice::Resume(Box::default()),
        stop.clone(),
    );
    let mut running = AbortOnDropHandle::new(tokio::spawn(running));
    let key = key::listing(id);
    let ended = loop {
        let joined = tokio::time::timeout(NOTE_EVERY, &mut running).await;
        let (listed, last_uri) = listing.place.get();
        let ended = progress.total().is_some();
        let note = Listing {
            listed,
            last_uri,
            ended,
            counted: known.counted,
        };
        ctx.registry.put(&key, &note).await?;
        if let Ok(joined) = joined {
            break joined.unwrap_or(Err(WorkerError::Panicked { what: "a listing" }));
        }
        if ctx.jobs.known(id).is_some_and(|job| job.state.is_final()) {
            stop.cancel(); // nobody waits for the rest
        }
    };
    match ended {
        Ok(()) if progress.total().is_none() && shutdown.is_cancelled() => Ok(Listed::Stopped),
        Ok(()) => Ok(Listed::Ended),
        Err(error) => Listed::failed(error),
    }
}

/// Counts the images of a source, as far as it can be done in reasonable time.
async fn count(source: &dyn Source) -> Result<Counted, WorkerError> {
    let (deadline, mut listing) = (Instant::now() + COUNT_FOR, source.list());
    let mut images = 0;
    loop {
        match tokio::time::timeout_at(deadline, listing.next()).await {
            Ok(Some(found)) => {
                found?;
                images += 1;
            }
            ended => {
                let is_all = ended.is_ok();
                return Ok(Counted { images, is_all });
            }
        }
    }
}

/// The images of a job from a place on: those in the request first, then those of its source.
fn listed(
    request: &JobRequest,
    images: &Images,
    config: &WorkerConfig,
    (index, last_uri): (u64, Option<String>),
) -> BoxStream<'static, Result<Found, StorageError>> {
    let source = match images {
        Images::None => None,
        Images::Source(source) => Some(source),
        Images::Feed(feed) => {
            let options = source_options(request, config);
            return feed::images(feed.as_ref().clone(), last_uri.as_deref(), options);
        }
    };
    let inline = request.images.len() as u64;
    let brought: Vec<_> = request
        .images
        .iter()
        .skip(usize::try_from(index).unwrap_or(usize::MAX))
        .map(|image| Ok(found(image)))
        .collect();
    let rest = match (source, index.saturating_sub(inline)) {
        (None, _) => stream::empty().boxed(),
        (Some(source), 0) => source.list(),
        (Some(source), passed) => source.list_from(passed, last_uri),
    };
    let all = stream::iter(brought).chain(rest);
    if request.options.dry_run {
        let left = DRY_RUN_IMAGES.saturating_sub(index);
        return all
            .take(usize::try_from(left).unwrap_or(usize::MAX))
            .boxed();
    }
    all.boxed()
}

fn found(image: &InlineImage) -> Found {
    Found {
        uri: image.uri.clone(),
        content: Content::Inline(image.bytes.clone()),
        etag: None,
        size: Some(image.bytes.len() as u64),
        columns: Vec::new(),
    }
}
