//! The ingest role over the broker: takes jobs, begins them, lists their images, records progress.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use trommel_queue::{Broker, Delivery, Disposition, Queue};
use trommel_sink::SourceCheck;
use trommel_source::{SourceOptions, open_source};
use trommel_types::{ImageRef, JobModel, JobRequest, JobSpec, Role};

use crate::distributed::cascade_jobs::Next;
use crate::distributed::job_images::{Images, Which, count, listed, start_of};
use crate::distributed::job_lease::{JobLease, JobLeases, Part};
use crate::distributed::job_store::{JobStore, OutputHolder, Submitted};
use crate::distributed::live_jobs::LiveJobs;
use crate::distributed::names::{Subjects, feed_consumer, kept_id};
use crate::distributed::record::{Job, JobState, Reason, ReasonKind};
use crate::distributed::repository::Repository;
use crate::distributed::request::output_of;
use crate::distributed::room::{Noted, Room};
use crate::distributed::sink_jobs::OpenJob;
use crate::distributed::{added, cascade_jobs, ends, feed, queues, retry};
use crate::fatal::Fatal;
use crate::fault::Scope;
use crate::ingest;
use crate::intake::Intake;
use crate::job::ModelId;
use crate::settle::Settler;
use crate::{Allowed, Refusal};
use crate::{Progress, WorkerConfig, WorkerError, metrics};

/// Longest time between two checkpoints.
const NOTE_EVERY: Duration = Duration::from_millis(500);
/// Time before a listing with a temporary failure is resumed.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Time between two checks whether the sample of a cascade has its rows.
const WAITS_FOR: Duration = Duration::from_secs(1);
/// How often a listing may begin without progress: beyond it, the job is considered the cause of
/// crashes.
const STARTS: u32 = 10;

/// The context of the ingest role.
pub(crate) struct Context {
    pub(crate) intake: Intake<JobRequest>,
    pub(crate) tasks: Arc<dyn Queue<ImageRef>>,
    pub(crate) settler: Settler,
    pub(crate) store: JobStore,
    pub(crate) leases: JobLeases,
    pub(crate) live: Arc<LiveJobs>,
    pub(crate) repository: Arc<Repository>,
    pub(crate) allowed: Arc<Allowed>,
    pub(crate) open: OpenJob,
    pub(crate) config: WorkerConfig,
    pub(crate) subjects: Subjects,
    pub(crate) broker: Broker,
}

/// Lists jobs until `shutdown` fires, then records the position of each and returns it.
///
/// A job stays in flight until its whole listing is stored, so that the job of a killed process
/// goes to another one, which continues from the last checkpoint.
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
    let asked = Arc::clone(delivery.message());
    let request = named(&asked);
    // A separate task, because a panic is the job's fault and not this loop's.
    let listing = {
        let (ctx, request) = (Arc::clone(ctx), Arc::clone(&request));
        tokio::spawn(async move { list_one(&ctx, &asked, &request, shutdown).await })
    };
    let listed = AbortOnDropHandle::new(listing).await;
    let listed = listed.unwrap_or(Err(WorkerError::Panicked {
        what: "listing the job",
    }));
    let disposition = match listed {
        Ok(Listed::Ended) => Disposition::Done,
        Ok(Listed::Stopped) => Disposition::Retry {
            after: Duration::ZERO,
        },
        Ok(Listed::Elsewhere) => {
            tracing::info!(job = request.id, "another ingest worker lists it");
            Disposition::Retry {
                after: ctx.config.sink.lease.min(AGAIN_AFTER),
            }
        }
        Ok(Listed::Waits) => Disposition::Retry { after: WAITS_FOR },
        Err(error) => match error.scope() {
            Scope::Nothing => put_off(ctx, &request, error.to_string()).await,
            Scope::Job(kind) => {
                let reason = Reason::new(kind, error.to_string());
                tracing::error!(job = request.id, %error, "the job fails");
                ends::fail(&ctx.store, &ctx.broker, &ctx.subjects, &request.id, reason).await?;
                Disposition::DeadLetter {
                    reason: error.to_string(),
                }
            }
            Scope::Image(_) | Scope::Worker => return Err(error),
        },
    };
    drop(kept_alive);
    metrics::settled(Role::Ingest.as_str(), &disposition);
    if let Err(error) = delivery.settle(disposition).await {
        tracing::warn!(job = request.id, %error, "another ingest has the job now");
    }
    Ok(())
}

/// The request under an id that records support: a request with an invalid id is recorded too, as a
/// failed job, so that its sender can find it.
fn named(request: &Arc<JobRequest>) -> Arc<JobRequest> {
    match kept_id(request) {
        Cow::Borrowed(_) => Arc::clone(request),
        Cow::Owned(id) => {
            let mut renamed = JobRequest::clone(request);
            renamed.id = id;
            Arc::new(renamed)
        }
    }
}

async fn put_off(ctx: &Context, request: &JobRequest, reason: String) -> Disposition {
    tracing::warn!(job = request.id, reason, "will be listed again");
    let waits = Reason::new(ReasonKind::Waiting, format!("waits to be listed: {reason}"));
    let noted = ctx.store.update(&request.id, |job| {
        let changes = !job.state.is_final() && job.reason.as_ref() != Some(&waits);
        if changes {
            job.reason = Some(waits.clone());
        }
        changes
    });
    if let Err(error) = noted.await {
        tracing::warn!(%error, "the reason is not noted");
    }
    Disposition::Retry { after: AGAIN_AFTER }
}

/// How a listing ended.
enum Listed {
    /// Everything is listed.
    Ended,
    /// This process is stopping.
    Stopped,
    /// Another ingest worker lists it, or did until recently.
    Elsewhere,
    /// The sample of a cascade is listed; the rest is listed when the sample has its rows.
    Waits,
}

/// Lists the job that was `asked` for, under the id of `request`.
async fn list_one(
    ctx: &Arc<Context>,
    asked: &JobRequest,
    request: &Arc<JobRequest>,
    shutdown: CancellationToken,
) -> Result<Listed, WorkerError> {
    match ctx.store.create(request).await? {
        Submitted::Taken => {
            tracing::error!(
                job = request.id,
                "another job has this id; the request is dropped"
            );
            return Ok(Listed::Ended);
        }
        Submitted::New | Submitted::Before => {}
    }
    let problems = asked.problems();
    if !problems.is_empty() {
        return Err(WorkerError::Request(format!(
            "the request cannot be carried out: {}",
            problems.join("; ")
        )));
    }
    if ctx
        .live
        .find(&request.id)
        .await?
        .is_some_and(|job| job.state.is_final())
    {
        return Ok(Listed::Ended);
    }
    let Some((lease, progress)) = ctx.leases.take(&request.id, Part::Listing).await? else {
        return Ok(Listed::Elsewhere);
    };
    if progress.listing.starts > STARTS {
        return Err(WorkerError::Attempts { starts: STARTS });
    }
    // Without opening the source and the models each time.
    let job = ctx.live.known(&request.id);
    let waits = job.is_some_and(|job| cascade_jobs::waits(&job, &progress));
    let ended = match waits {
        true => Ok(Listed::Waits),
        false => list_held(ctx, request, &lease, shutdown).await,
    };
    // A crash of this process says nothing about the job: the next start counts.
    if !matches!(&ended, Err(WorkerError::LeaseLost)) {
        lease.change(|progress| progress.listing.starts = 0).await?;
        lease.release().await?;
    }
    ended
}

/// Opens the job's source, begins the job if it has not begun, and lists it.
async fn list_held(
    ctx: &Arc<Context>,
    request: &Arc<JobRequest>,
    lease: &JobLease,
    shutdown: CancellationToken,
) -> Result<Listed, WorkerError> {
    let request = JobRequest::clone(request);
    let opened = {
        let (ctx, request) = (Arc::clone(ctx), request.clone());
        tokio::task::spawn_blocking(move || open(&ctx, &request))
    };
    let (mut images, models) = opened.await.map_err(|_| WorkerError::Panicked {
        what: "opening the source or the models",
    })??;
    if let Some(subject) = feed::subject_of(&request.sources) {
        let feed = ctx.broker.feed(subject, &feed_consumer(&request.id)).await;
        let feed = feed.map_err(|error| WorkerError::Request(error.to_string()))?;
        images = Some(Images::Feed(Box::new(feed)));
    }
    let images = images.ok_or_else(no_sources)?;
    let Some(job) = begin(ctx, &request, &images, models, lease).await? else {
        return Ok(Listed::Ended);
    };
    ctx.repository.know(&job.spec);
    match cascade_jobs::next(ctx, &job, &images, lease, &shutdown).await? {
        Next::Wait => Ok(Listed::Waits),
        Next::Stop => Ok(Listed::Stopped),
        Next::List(which) => list(ctx, &job, images, which, lease, shutdown).await,
    }
}

/// Requests without sources are refused on arrival; one from an older release may be stored.
fn no_sources() -> WorkerError {
    WorkerError::Request("the job names no sources; submit it again with some".to_owned())
}

/// Opens everything that the job names, to report problems at once; the caller opens feeds.
fn open(
    ctx: &Context,
    request: &JobRequest,
) -> Result<(Option<Images>, Vec<JobModel>), WorkerError> {
    let refused = |refusal: Refusal| WorkerError::Request(refusal.to_string());
    for source in &request.sources {
        ctx.allowed.check_source(source).map_err(refused)?;
    }
    if !request.options.dry_run {
        ctx.allowed.check_output(&request.output).map_err(refused)?;
    }
    let mut models = Vec::new();
    for name in &request.models {
        let known = ctx.repository.model(name)?;
        let plan = known.plan(request.rows.reference)?;
        if !known.is_prompt() {
            plan.shape().ok_or_else(|| known.without_shape())?;
        }
        models.push(JobModel {
            name: name.clone(),
            version: known.id.version.to_string(),
        });
        output_of(request, name, &ctx.config)?;
    }
    let images = match request.sources.as_slice() {
        // Opened by the caller, who has the broker.
        _ if feed::subject_of(&request.sources).is_some() => None,
        [] => None,
        sources => {
            let options = SourceOptions {
                rule: Arc::clone(&ctx.allowed).rule(),
                ..ctx.config.source_options(&request.options)
            };
            Some(Images::Source(open_source(sources, &options)?))
        }
    };
    Ok((images, models))
}

/// Marks the job as running, with its final spec; `None` if it has ended already.
async fn begin(
    ctx: &Context,
    request: &JobRequest,
    images: &Images,
    models: Vec<JobModel>,
    lease: &JobLease,
) -> Result<Option<Job>, WorkerError> {
    let found = ctx.store.job(&request.id).await?;
    if let Some(job) = found.filter(|job| job.state != JobState::Queued) {
        return Ok(Some(job).filter(|job| job.state == JobState::Running));
    }
    if let Some(retry) = &request.options.retry {
        return retry::begin(ctx, request, retry, lease).await;
    }
    if !request.options.dry_run {
        take_output(ctx, request, |_| None).await?;
    }
    let columns = request.rows.columns(&images.columns());
    let (models, stages) = cascade_jobs::models(request.cascade, models);
    let mut spec = JobSpec {
        run: format!("{:08x}", rand::random::<u32>()),
        base: None,
        source: images.describe(request),
        columns: columns.map_err(WorkerError::Request)?,
        models,
        stages,
        request: request.clone(),
        ..JobSpec::default()
    };
    ctx.repository.know(&spec);
    spec.answers = ctx.repository.answers(&spec.models);
    if spec.request.options.skip_existing {
        spec.base = added::base(ctx, &spec).await?;
    }
    ctx.store.begin(&spec).await
}

/// Gives the output to this job: one job at a time writes to it. A job that has ended keeps it
/// until its last sink releases it, so that no late part meets this job's rows. `refusal` is the
/// reason why the output may not be taken from a job, if any.
pub(crate) async fn take_output(
    ctx: &Context,
    request: &JobRequest,
    refusal: impl Fn(&Job) -> Option<String>,
) -> Result<(), WorkerError> {
    let output = request.output.as_str();
    if output.starts_with("postgres") {
        return Ok(()); // the job is part of each row's key
    }
    loop {
        let holder = ctx.store.output_holder(output).await?;
        let revision = holder.as_ref().map_or(0, |(_, revision)| *revision);
        let mut next = OutputHolder {
            job: request.id.clone(),
            last: holder.as_ref().map_or(0, |(holder, _)| holder.last),
            number: None,
        };
        if let Some((holder, _)) = &holder
            && holder.job == request.id
        {
            next = holder.clone();
        }
        if let Some((holder, _)) = holder
            && holder.job != request.id
            && let Some(other) = ctx.store.job(&holder.job).await?
        {
            let id = other.id();
            if let Some(reason) = refusal(&other) {
                return Err(WorkerError::Request(reason));
            }
            if !other.state.is_final() {
                return Err(WorkerError::Request(format!(
                    "job {id} writes to {output}; wait for its end, cancel it, or choose another output"
                )));
            }
            // Former holders find a higher fence, and can change nothing any more.
            if !ctx.leases.close(id).await? {
                return Err(WorkerError::OutputBusy {
                    output: output.to_owned(),
                    job: id.to_owned(),
                });
            }
        }
        if ctx.store.set_holder(output, &next, revision).await? {
            return Ok(());
        }
    }
}

/// Lists a job from its last position on, and records progress.
async fn list(
    ctx: &Arc<Context>,
    job: &Job,
    images: Images,
    which: Which,
    lease: &JobLease,
    shutdown: CancellationToken,
) -> Result<Listed, WorkerError> {
    let (id, request) = (job.id(), &job.spec.request);
    let mut known = lease.change(|_| ()).await?.listing;
    if known.ended {
        return Ok(Listed::Ended);
    }
    if let (true, None, Images::Source(source)) = (request.options.dry_run, known.counted, &images)
    {
        let counted = count(source.as_ref()).await?;
        let noted = lease.change(|progress| progress.listing.counted = Some(counted));
        known = noted.await?.listing;
    }
    queues::ensure_consumers(&ctx.broker, &ctx.subjects, &ctx.config, job.models()).await?;
    let progress = Arc::new(Progress::default());
    let mut start = start_of(job, &known, &images);
    if start.is_far_behind() {
        // Its tasks would not fit in memory until the listing is known to be the same.
        let again = listed(request, &images, &ctx.config, known.mark.clone());
        let checked = ingest::check(again, &start, job.adds());
        let Some(checked) = shutdown.run_until_cancelled(checked).await else {
            return Ok(Listed::Stopped);
        };
        checked?;
        start.is_checked = true;
    }
    let feed = match &images {
        Images::Feed(feed) => Some(feed.as_ref().clone()),
        Images::Source(_) => None,
    };
    let listing = Arc::new(ingest::Context {
        job: id.into(),
        lane: job.lane(),
        output: Arc::clone(&ctx.tasks),
        window: ctx.config.ingest.publish_window.get(),
        place: ingest::Place::at(start.stored),
        start,
        checkpoint: Arc::new(Noted::new(lease, ctx.room(job))),
        mark: match feed {
            Some(_) => feed::mark,
            None => ingest::no_mark,
        },
        fails: Some((ctx.settler.clone(), models_of(job))),
        progress: Arc::clone(&progress),
    });
    let mut images = listed(request, &images, &ctx.config, known.mark);
    let choice = match &request.options.retry {
        None if job.adds() => ingest::Choice::Extend(added::existing(ctx, job).await?),
        None => choose(which, committed(ctx, job, which, known.generation).await?),
        Some(retry) => {
            let again = retry::images(ctx, job, retry).await?;
            if again.is_empty() {
                images = stream::empty().boxed(); // all of them have their new rows
            }
            ingest::Choice::Retry(Box::new(again))
        }
    };
    let stop = shutdown.child_token();
    let running = ingest::run(Arc::clone(&listing), images, choice, stop.clone());
    let running = AbortOnDropHandle::new(tokio::spawn(running));
    let ended = note_places(ctx, job, which, lease, &listing, running, &stop).await?;
    if let (Some(feed), false) = (feed, shutdown.is_cancelled()) {
        feed.remove().await?;
    }
    ended?;
    Ok(match (progress.total(), which) {
        (None, _) if shutdown.is_cancelled() => Listed::Stopped,
        (Some(_), Which::Sample(_)) => Listed::Waits,
        _ => Listed::Ended,
    })
}

fn choose(which: Which, committed: SourceCheck) -> ingest::Choice {
    let all = ingest::Choice::Resume(vec![committed]);
    match which {
        Which::All | Which::Rest => all,
        Which::Sample(share) => ingest::Choice::Sample(Box::new(all), share),
    }
}

/// Records the position of a listing until it ends, and stops it when the job is over. Returns how
/// it ended.
///
/// # Errors
/// If the position cannot be recorded.
async fn note_places(
    ctx: &Context,
    job: &Job,
    which: Which,
    lease: &JobLease,
    listing: &ingest::Context,
    mut running: AbortOnDropHandle<Result<(), WorkerError>>,
    stop: &CancellationToken,
) -> Result<Result<(), WorkerError>, WorkerError> {
    let is_retry = job.spec.request.options.retry.is_some();
    loop {
        let joined = tokio::time::timeout(NOTE_EVERY, &mut running).await;
        let (passed, mark) = listing.place.get();
        // Some of the listed images are not part of the job.
        let listed = match is_retry || job.lists_some() {
            false => passed,
            true => listing.progress.listed(),
        };
        let passed = job.lists_some().then_some(passed);
        let ended = listing.progress.total().is_some();
        let is_sample = matches!(which, Which::Sample(_));
        let noted = lease.change(|progress| {
            if listed > progress.listing.listed || passed > progress.listing.passed {
                progress.listing.starts = 0;
            }
            progress.listing.listed = listed;
            progress.listing.passed = passed;
            progress.listing.mark = Some(mark.clone()).filter(|mark| !mark.is_empty());
            progress.listing.ended = ended && !is_sample;
            progress.listing.waits = ended && is_sample;
        });
        match noted.await {
            Ok(_) => {}
            // Duplicates are dropped by their id, and by the sink.
            Err(WorkerError::Queue(error)) => {
                tracing::warn!(job = job.id(), %error, "the listing's place is not noted");
                if joined.is_ok() {
                    return Err(error.into());
                }
            }
            Err(error) => return Err(error),
        }
        if let Ok(joined) = joined {
            return Ok(joined.unwrap_or(Err(WorkerError::Panicked { what: "a listing" })));
        }
        if ctx.live.is_over(job.id()) {
            stop.cancel(); // nobody waits for the rest
        }
    }
}

/// The images of a job that need not be listed again: initially none, later those with rows of its
/// model. For a job with several models all images are listed, and sinks drop those with rows.
async fn committed(
    ctx: &Context,
    job: &Job,
    which: Which,
    generation: u32,
) -> Result<SourceCheck, WorkerError> {
    let [model] = job.models() else {
        return Ok(SourceCheck::default());
    };
    let is_first = generation == 0 && !matches!(which, Which::Rest);
    if is_first || job.spec.request.options.dry_run {
        return Ok(SourceCheck::default());
    }
    let progress = ctx.store.progress(job.id()).await?;
    let rows = progress.rows.get(&model.name);
    let preconditions = rows.map(|rows| rows.preconditions).unwrap_or_default();
    let opened = (ctx.open)(job, model, preconditions).await?;
    Ok(opened.sink.source_check())
}

fn models_of(job: &Job) -> Vec<ModelId> {
    let models = job.models().iter();
    models.map(ModelId::from).collect()
}

impl Context {
    fn room(&self, job: &Job) -> Room {
        let bytes = job.models().iter().map(|model| {
            let reference = job.spec.request.rows.reference;
            let planned = self.repository.planned(model, reference);
            planned.map_or(0, |model| model.tensor_bytes() as u64)
        });
        Room {
            broker: self.broker.clone(),
            config: self.config.broker.clone(),
            tasks: self.subjects.tasks(job.lane(), job.id()),
            tensors: self.subjects.tensors_of_job(job.lane(), job.id()),
            results: self.subjects.results(job.id(), "*"),
            tensor_bytes: bytes.sum::<u64>().max(1),
        }
    }
}
