//! Retries failed rows of a job that has ended, as a separate job.
//!
//! A retry is processed like any other job, with its own record, checkpoint, leases and subjects,
//! so it has the same guarantees. It differs in its images, those with failed rows, and in where
//! its rows count: in the output of the job that it retries.

use serde::{Deserialize, Serialize};
use trommel_sink::FailedImage;
use trommel_types::{ErrorKind, JobBase, JobOptions, JobRequest, JobSpec, RetryOf};

use crate::WorkerError;
use crate::again::Again;
use crate::distributed::added::{models_with_rows, next_number};
use crate::distributed::control::{self, Refused};
use crate::distributed::feed;
use crate::distributed::ingest_jobs::{Context, take_output};
use crate::distributed::job_lease::JobLease;
use crate::distributed::job_store::{JobStore, Submitted};
use crate::distributed::record::{Job, JobProgress, JobState};

/// A request to retry failed rows of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RetryRequest {
    /// The job.
    pub id: String,
    /// Kinds of failures, or `fetch`, `decode` or `infer` for all that these report; all if empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kinds: Vec<String>,
    /// 1 for the job's first retry, and so on: the same number again is the same retry. Default:
    /// the next one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<u32>,
}

/// The answer to `retry`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetryReply {
    /// The id of the retry's job.
    pub id: String,
    /// The number of the retry.
    pub number: u32,
    /// Number of failed rows, as far as counted.
    pub rows: u64,
    /// Whether the same retry was requested before; then nothing changed.
    pub submitted_before: bool,
}

/// Begins a retry, or returns why it is impossible.
pub(super) async fn ask(
    ctx: &control::Context,
    asked: RetryRequest,
) -> Result<RetryReply, Refused> {
    let store = &ctx.store;
    let kinds = ErrorKind::named(&asked.kinds).map_err(|reason| Refused::new(400, reason))?;
    let id = asked.id.as_str();
    let job = store.job(id).await?.ok_or_else(|| {
        let reason = format!("job {id} does not exist, or its record has expired");
        Refused::new(404, reason)
    })?;
    let rows = failed_rows(&store.progress(id).await?, &kinds);
    let retry = RetryOf {
        job: id.to_owned(),
        number: asked.number.unwrap_or(job.retries.saturating_add(1)),
        kinds,
    };
    let conflict = |reason: String| Refused::new(409, reason);
    let known = store.job(&retry.id()).await?;
    let is_same = |known: &Job| known.spec.request.options.retry.as_ref() == Some(&retry);
    match &known {
        Some(known) if is_same(known) => {}
        None if retry.number >= job.retries => {
            check(store, &job, &retry, rows).await?.map_err(conflict)?;
        }
        _ => {
            return Err(conflict(format!(
                "retry {} of job {id} was another one; ask for the next, without a number",
                retry.number
            )));
        }
    }
    let number = retry.number;
    let counted = store.update(id, |job| {
        let is_new = job.retries < number;
        job.retries = job.retries.max(number);
        is_new
    });
    counted.await?;
    let request = request(&job, &retry);
    let retry_id = request.id.clone();
    let submitted_before = match store.create(&request).await? {
        Submitted::New => false,
        Submitted::Before => true,
        Submitted::Taken => {
            return Err(conflict(format!(
                "another job has the id {retry_id}; look at it with trommel jobs show {retry_id}"
            )));
        }
    };
    if !known.is_some_and(|known| known.state.is_final()) {
        // Also for an existing retry: the worker that answered the first request may have died.
        let published = ctx.jobs.publish(&retry_id, request).await;
        published.map_err(|error| Refused::new(500, error.to_string()))?;
    }
    Ok(RetryReply {
        id: retry_id,
        number,
        rows,
        submitted_before,
    })
}

/// Number of rows of all models that failed with these kinds, as far as counted.
fn failed_rows(progress: &JobProgress, kinds: &[ErrorKind]) -> u64 {
    let wants = |name: &str| kinds.is_empty() || kinds.iter().any(|kind| kind.as_str() == name);
    let failures = progress.rows.values().flat_map(|rows| &rows.failures);
    let wanted = failures.filter(|(kind, _)| wants(kind));
    wanted.map(|(_, failure)| failure.count).sum()
}

/// Why a new retry of a job is refused, if it is.
async fn check(
    store: &JobStore,
    job: &Job,
    retry: &RetryOf,
    rows: u64,
) -> Result<Result<(), String>, WorkerError> {
    let id = job.id();
    if let Err(reason) = is_retryable(job) {
        return Ok(Err(reason));
    }
    if retry.number > job.retries.saturating_add(1) {
        let next = job.retries.saturating_add(1);
        return Ok(Err(format!("the next retry of job {id} is number {next}")));
    }
    if let Some(last) = job.last_retry()
        && let Some(last) = store.job(&last).await?
        && !last.state.is_final()
    {
        let (last, state) = (last.id(), last.state.as_str());
        return Ok(Err(format!(
            "{last} is {state}; wait for its end, or cancel it, before the next retry"
        )));
    }
    // The last commits of a failed job may not have been counted.
    if rows == 0 && job.state == JobState::Complete {
        return Ok(Err(nothing_failed(retry)));
    }
    let output = &job.spec.request.output;
    if let Some((holder, _)) = store.output_holder(output).await?
        && let Some(other) = store.job(&holder.job).await?
        && !is_of(&other, job)
    {
        return Ok(Err(format!(
            "{output} has gone to job {}; the rows of job {id} are there no more",
            other.id()
        )));
    }
    Ok(Ok(()))
}

/// Whether the rows of `job` are still in an output that another job has taken: that job added rows
/// to them, or ended without any.
fn is_of(other: &Job, job: &Job) -> bool {
    other.spec.run.is_empty() || other.root() == job.root()
}

fn nothing_failed(retry: &RetryOf) -> String {
    let kinds: Vec<_> = retry.kinds.iter().map(|kind| kind.as_str()).collect();
    let kinds = match kinds.is_empty() {
        true => String::new(),
        false => format!(" as {}", kinds.join(", ")),
    };
    format!(
        "no row of job {} failed{kinds}, so there is nothing to try again",
        retry.job
    )
}

fn is_retryable(job: &Job) -> Result<(), String> {
    let (id, request) = (job.id(), &job.spec.request);
    if let Some(retry) = &request.options.retry {
        return Err(format!(
            "job {id} is a retry itself; try again what is left of job {}",
            retry.job
        ));
    }
    if job.is_cascade() {
        return Err(format!(
            "job {id} is a cascade, whose failed rows are not tried again; submit a job for these images"
        ));
    }
    match job.state {
        JobState::Queued | JobState::Running => {
            let state = job.state.as_str();
            return Err(format!(
                "job {id} is {state}; its failed rows can be tried again when it has ended"
            ));
        }
        JobState::Cancelled => {
            return Err(format!("job {id} was cancelled; submit it again"));
        }
        JobState::Complete | JobState::Failed => {}
    }
    if request.options.dry_run {
        return Err(format!("job {id} is a dry run, which stores no rows"));
    }
    if feed::subject_of(&request.sources).is_some() {
        return Err(format!(
            "the images of job {id} came as events, which cannot be listed again; submit a list of the failed ones"
        ));
    }
    if job.spec.run.is_empty() {
        return Err(format!("job {id} ended before it had any row"));
    }
    Ok(())
}

/// The retry as a separate request.
fn request(job: &Job, retry: &RetryOf) -> JobRequest {
    let request = job.spec.request.clone();
    JobRequest {
        id: retry.id(),
        options: JobOptions {
            overwrite: false,
            // All of its images have failed before.
            max_failure_rate: None,
            // It was about all images.
            forecast: None,
            retry: Some(retry.clone()),
            ..request.options
        },
        ..request
    }
}

/// Marks a retry as running, with the spec of its job; `None` if it has ended already.
pub(crate) async fn begin(
    ctx: &Context,
    request: &JobRequest,
    retry: &RetryOf,
    lease: &JobLease,
) -> Result<Option<Job>, WorkerError> {
    let refused = |reason: String| Err(WorkerError::Request(reason));
    let Some(job) = ctx.store.job(&retry.job).await? else {
        let id = &retry.job;
        return refused(format!(
            "job {id} does not exist, or its record has expired"
        ));
    };
    if let Err(reason) = is_retryable(&job) {
        return refused(reason);
    }
    let before = RetryOf {
        number: retry.number.saturating_sub(1),
        ..retry.clone()
    };
    for id in [retry.job.clone(), before.id()] {
        let Some(other) = ctx.store.job(&id).await? else {
            continue;
        };
        if !other.state.is_final() {
            return refused(format!(
                "job {id} has not ended, so its rows may yet change"
            ));
        }
        // Former holders find a higher fence, and can change nothing any more.
        if !ctx.leases.close(&id).await? {
            let output = request.output.clone();
            return Err(WorkerError::OutputBusy { output, job: id });
        }
    }
    let is_foreign = |other: &Job| match is_of(other, &job) {
        true => None,
        false => Some(format!(
            "{} has gone to job {}; the rows of job {} are there no more",
            request.output,
            other.id(),
            retry.job
        )),
    };
    take_output(ctx, request, is_foreign).await?;
    let known = ctx.store.progress(&retry.job).await?.rows;
    let seeded = lease.change(|progress| {
        for (model, rows) in &known {
            // A store behaves the same for each job.
            let own = progress.rows.entry(model.clone()).or_default();
            own.preconditions = rows.preconditions;
        }
    });
    seeded.await?;
    let (root, run) = job.root();
    let base = JobBase {
        job: root.to_owned(),
        run: run.to_owned(),
        number: 0,
    };
    let (models, last) = models_with_rows(ctx, &job).await?;
    if models.is_empty() {
        return refused(nothing_failed(retry));
    }
    let mut spec = JobSpec {
        run: format!("{:08x}", rand::random::<u32>()),
        models,
        base: Some(base),
        request: request.clone(),
        ..job.spec
    };
    let number = next_number(ctx, &spec, last).await?;
    if let Some(base) = &mut spec.base {
        base.number = number;
    }
    ctx.store.begin(&spec).await
}

/// The images whose rows a retry still has to replace.
pub(crate) async fn images(
    ctx: &Context,
    job: &Job,
    retry: &RetryOf,
) -> Result<Again, WorkerError> {
    let (mut images, mut wanted): (Vec<FailedImage>, u64) = (Vec::new(), 0);
    let known = ctx.store.progress(job.id()).await?.rows;
    for model in job.models() {
        let rows = known.get(&model.name);
        let preconditions = rows.map(|rows| rows.preconditions).unwrap_or_default();
        let mut opened = (ctx.open)(job, model, preconditions).await?;
        wanted += opened.sink.wanted().unwrap_or_default();
        images.extend(opened.sink.failed_images().await?);
    }
    if wanted == 0 {
        return Err(WorkerError::Request(nothing_failed(retry)));
    }
    images.sort_unstable_by_key(|image| image.index);
    images.dedup_by_key(|image| image.index);
    Ok(Again::new(images))
}
