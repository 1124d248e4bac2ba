//! The sink role over the broker: takes the lease of each job and model, commits its rows, ends it.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use trommel_queue::{Broker, Queue, StreamName};
use trommel_storage::{FailureSummary, Summary};
use trommel_types::Classification;

use crate::distributed::lease::{Lease, Leases};
use crate::distributed::leased_rows::{LeasedRows, Open};
use crate::distributed::names::{Subjects, key, results_consumer};
use crate::distributed::record::{Job, JobModel, JobState, Rows};
use crate::distributed::registry::{LiveJobs, Registry};
use crate::distributed::{events, queues};
use crate::rows::JobRows;
use crate::settle::now;
use crate::{Progress, WorkerConfig, WorkerError, sink};

/// Longest time between two looks at the jobs, and two notes of what is committed.
const TICK: Duration = Duration::from_millis(500);
/// Time between two looks for results of jobs that have ended.
const SWEEP_EVERY: Duration = Duration::from_secs(30);
/// Time after a job's end in which repeats of its images may still come.
const SWEEP_FOR: Duration = Duration::from_secs(3600);
/// Time before a job whose output could not be reached is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// What the sink role works with.
pub(crate) struct Context {
    pub(crate) broker: Broker,
    pub(crate) subjects: Subjects,
    pub(crate) registry: Registry,
    pub(crate) jobs: Arc<LiveJobs>,
    pub(crate) config: WorkerConfig,
    pub(crate) owner: String,
    pub(crate) open: OpenJob,
}

/// Opens the output of a job and model. Blocking.
pub(crate) type OpenJob =
    Arc<dyn Fn(&Job, &JobModel) -> Result<Box<dyn JobRows>, WorkerError> + Send + Sync>;

/// Commits rows of all running jobs whose lease is free, until `shutdown` fires; then commits what
/// is in hand and gives the leases back.
pub(crate) async fn run(ctx: Arc<Context>, shutdown: CancellationToken) -> Result<(), WorkerError> {
    let serving = TaskTracker::new();
    let mut leases = Leases::new(ctx.registry.kv().clone(), &ctx.owner, ctx.config.sink.lease);
    let taken: Arc<Mutex<HashSet<(String, String)>>> = Arc::default();
    let mut changed = ctx.jobs.changed();
    let mut swept = Instant::now();
    while !shutdown.is_cancelled() {
        if swept.elapsed() > SWEEP_EVERY {
            swept = Instant::now();
            ctx.sweep().await;
        }
        for (job, model) in ctx.free(&taken) {
            let name = (job.request.id.clone(), model.name.clone());
            let lease = match leases.take(&key::lease(&name.0, &name.1)).await {
                Ok(Some(lease)) => lease,
                Ok(None) => continue,
                Err(error) => {
                    tracing::warn!(job = name.0, %error, "its lease cannot be asked for");
                    continue;
                }
            };
            lock(&taken).insert(name.clone());
            let (ctx, taken, shutdown) = (Arc::clone(&ctx), Arc::clone(&taken), shutdown.clone());
            serving.spawn(async move {
                let served = serve(&ctx, &job, &model, lease, &shutdown).await;
                if let Err(error) = served {
                    tracing::error!(job = name.0, model = name.1, %error, "will be taken up again");
                    shutdown.run_until_cancelled(sleep(AGAIN_AFTER)).await;
                }
                lock(&taken).remove(&name);
            });
        }
        // A change, a tick, or the end: look again.
        shutdown
            .run_until_cancelled(timeout(TICK, changed.changed()))
            .await;
    }
    serving.close();
    serving.wait().await;
    Ok(())
}

type Taken = Mutex<HashSet<(String, String)>>;

fn lock(taken: &Taken) -> std::sync::MutexGuard<'_, HashSet<(String, String)>> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    /// Removes results that came after the end of their jobs: repeats that nobody waits for.
    async fn sweep(&self) {
        let since = now() - i64::try_from(SWEEP_FOR.as_micros()).unwrap_or(i64::MAX);
        for job in self.jobs.ended_since(since) {
            for model in &job.models {
                let subject = self.subjects.results(&job.request.id, &model.name);
                let purged = self.broker.purge_subject(StreamName::Results, &subject);
                if let Err(error) = purged.await {
                    tracing::warn!(subject, %error, "late results are left");
                }
            }
        }
    }

    /// Running jobs that this process does not commit yet, as many as it may.
    fn free(&self, taken: &Taken) -> Vec<(Arc<Job>, JobModel)> {
        let taken = lock(taken);
        let room = self.config.sink.max_jobs.get().saturating_sub(taken.len());
        let running = self.jobs.running();
        let each = running.iter().flat_map(|job| {
            let models = job.models.iter().cloned();
            models.map(|model| (Arc::clone(job), model))
        });
        each.filter(|(job, model)| !taken.contains(&(job.request.id.clone(), model.name.clone())))
            .take(room)
            .collect()
    }
}

/// How the work on a job and model has ended.
enum Served {
    /// All rows are committed.
    Complete,
    /// The job ends early, for a reason unless somebody has ended it already.
    Over(Option<String>),
    /// Another sink is to go on.
    Left,
}

async fn serve(
    ctx: &Arc<Context>,
    job: &Arc<Job>,
    model: &JobModel,
    lease: Lease,
    shutdown: &CancellationToken,
) -> Result<(), WorkerError> {
    let served = match commit_rows(ctx, job, model, &lease, shutdown).await {
        Ok(served) => served,
        Err(WorkerError::LeaseLost) => Served::Left,
        Err(error) if error.is_transient() => {
            lease.release().await?;
            return Err(error);
        }
        Err(error) => Served::Over(Some(error.to_string())),
    };
    match served {
        Served::Left => {}
        Served::Complete => {
            clear(ctx, job, model).await?;
            complete_if_last(ctx, job).await?;
        }
        Served::Over(reason) => {
            if let Some(reason) = reason {
                end(ctx, job, JobState::Failed, Some(&reason)).await?;
            }
            clear(ctx, job, model).await?;
        }
    }
    Ok(lease.release().await?)
}

/// Commits rows until all are committed, the job ends, or `shutdown` fires.
async fn commit_rows(
    ctx: &Arc<Context>,
    job: &Arc<Job>,
    model: &JobModel,
    lease: &Lease,
    shutdown: &CancellationToken,
) -> Result<Served, WorkerError> {
    let id = job.request.id.as_str();
    if ctx.registry.rows(id, &model.name).await?.finished {
        return Ok(Served::Complete);
    }
    let open: Arc<Open> = {
        let (open, job, model) = (Arc::clone(&ctx.open), Arc::clone(job), model.clone());
        Arc::new(move || open(&job, &model))
    };
    let opened = {
        let open = Arc::clone(&open);
        blocking(move || open()).await?
    };
    let before = opened.summary();
    let progress = Arc::new(Progress::default());
    progress.count_resumed(opened.committed());
    let rows = LeasedRows::new(opened, lease.clone(), open);
    let intake: Arc<dyn Queue<Classification>> =
        queues::results_of(&ctx.broker, &ctx.subjects, &ctx.config, id, &model.name).await?;
    let sink = Arc::new(sink::Context {
        intake,
        config: ctx.config.sink.clone(),
        max_failure_rate: job.request.options.max_failure_rate,
        progress: Arc::clone(&progress),
    });
    let stop = shutdown.child_token();
    let mut running = AbortOnDropHandle::new(tokio::spawn(sink::run(sink, rows, stop.clone())));
    let mut notes = Notes::new(ctx, job, model, before, progress);
    let (mut is_lost, mut reason) = (false, None);
    let ended = loop {
        let tick = TICK.min(ctx.config.sink.lease / 4);
        if let Ok(joined) = timeout(tick, &mut running).await {
            break joined.unwrap_or(Err(WorkerError::Panicked { what: "a sink" }));
        }
        if !is_lost && !lease.renew().await? {
            tracing::warn!(job = id, model = model.name, "another sink has the job now");
            is_lost = true;
            stop.cancel();
        }
        notes.take().await?;
        if reason.is_none() {
            reason = over(ctx, job);
            if reason.is_some() {
                stop.cancel();
            }
        }
    };
    let rows = match ended {
        Err(error @ WorkerError::TooManyFailures { .. }) => {
            return Ok(Served::Over(Some(error.to_string())));
        }
        ended => ended?,
    };
    if is_lost {
        return Ok(Served::Left);
    }
    if notes.is_complete(crate::rows::Rows::committed(&rows)) {
        let rate = rows.rate();
        let summary = blocking(move || rows.finish()).await?;
        notes.finish(&summary, rate).await?;
        return Ok(Served::Complete);
    }
    notes.take().await?;
    Ok(match reason {
        Some(reason) => Served::Over(reason),
        None => Served::Left,
    })
}

/// Why the job is to end early, if it is: `Some(None)` when its record says so already.
fn over(ctx: &Context, job: &Job) -> Option<Option<String>> {
    let id = job.request.id.as_str();
    if ctx.jobs.known(id).is_some_and(|job| job.state.is_final()) {
        return Some(None);
    }
    let limit = job.request.options.max_runtime_seconds?;
    let ran = now().saturating_sub(job.started_at?) / 1_000_000;
    let is_over = u64::try_from(ran).is_ok_and(|ran| ran >= limit);
    is_over.then(|| {
        Some(format!(
            "ran longer than {limit} seconds (max_runtime_seconds)"
        ))
    })
}

/// Ends a job's record and says so.
async fn end(
    ctx: &Context,
    job: &Job,
    state: JobState,
    reason: Option<&str>,
) -> Result<(), WorkerError> {
    let ended = ctx.registry.end(&job.request.id, state, reason).await?;
    if let Some(job) = ended {
        events::ended(&ctx.broker, &ctx.subjects, &job).await;
    }
    Ok(())
}

/// Ends the job if the rows of all its models are committed.
async fn complete_if_last(ctx: &Context, job: &Job) -> Result<(), WorkerError> {
    for model in &job.models {
        if !ctx
            .registry
            .rows(&job.request.id, &model.name)
            .await?
            .finished
        {
            return Ok(());
        }
    }
    end(ctx, job, JobState::Complete, None).await
}

/// Leaves nothing of a job and model in the broker but its record.
async fn clear(ctx: &Context, job: &Job, model: &JobModel) -> Result<(), WorkerError> {
    let id = job.request.id.as_str();
    let consumer = results_consumer(id, &model.name);
    ctx.broker
        .delete_consumer(StreamName::Results, &consumer)
        .await?;
    ctx.broker
        .purge_subject(StreamName::Results, &ctx.subjects.results(id, &model.name))
        .await?;
    for prefix in [key::claims(id, &model.name), key::said(id)] {
        for key in ctx.registry.kv().keys(&prefix).await? {
            ctx.registry.kv().purge(&key).await?;
        }
    }
    Ok(())
}

/// Runs `work` on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, WorkerError> + Send + 'static,
) -> Result<T, WorkerError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| WorkerError::Panicked { what: "the sink" })?
}

/// Keeps the record of what is committed, and learns how many images there are.
struct Notes<'a> {
    ctx: &'a Context,
    job: &'a Job,
    key: String,
    before: Summary,
    progress: Arc<Progress>,
    last: (Instant, u64),
    rate: f64,
    noted: Rows,
}

impl<'a> Notes<'a> {
    fn new(
        ctx: &'a Context,
        job: &'a Job,
        model: &JobModel,
        before: Summary,
        progress: Arc<Progress>,
    ) -> Self {
        Self {
            ctx,
            job,
            key: key::rows(&job.request.id, &model.name),
            last: (Instant::now(), before.images),
            before,
            progress,
            rate: 0.0,
            noted: Rows::default(),
        }
    }

    async fn take(&mut self) -> Result<(), WorkerError> {
        let listing = self.ctx.registry.listing(&self.job.request.id).await?;
        self.progress.set_listed(listing.listed, listing.ended);
        let (at, now) = (self.last, Instant::now());
        let committed = self.progress.resumed() + self.progress.committed();
        let elapsed = now.duration_since(at.0).as_secs_f64();
        if elapsed >= 1.0 {
            let rate = (committed - at.1) as f64 / elapsed;
            // Parts come in steps; the figure is to be read by people.
            self.rate = if self.rate == 0.0 {
                rate
            } else {
                0.7 * self.rate + 0.3 * rate
            };
            self.last = (now, committed);
        }
        let mut rows = Rows {
            committed,
            ok: self.before.ok + self.progress.ok(),
            failed: self.before.failed + self.progress.failed(),
            failures: self.before.failures.clone(),
            in_hand: 0,
            rate: self.rate,
            finished: false,
        };
        rows.in_hand = (rows.ok + rows.failed).saturating_sub(committed);
        add(&mut rows.failures, &self.progress);
        if rows != self.noted {
            self.ctx.registry.put(&self.key, &rows).await?;
            self.noted = rows;
        }
        Ok(())
    }

    /// Whether that many rows are all there can be.
    fn is_complete(&self, committed: u64) -> bool {
        self.progress.total() == Some(committed)
    }

    async fn finish(&self, summary: &Summary, rate: Option<f64>) -> Result<(), WorkerError> {
        let rows = Rows {
            committed: summary.images,
            ok: summary.ok,
            failed: summary.failed,
            failures: summary.failures.clone(),
            in_hand: 0,
            rate: rate.unwrap_or(0.0),
            finished: true,
        };
        self.ctx.registry.put(&self.key, &rows).await
    }
}

fn add(failures: &mut BTreeMap<String, FailureSummary>, progress: &Progress) {
    for (kind, failure) in progress.failures() {
        let sum = failures
            .entry(kind.to_string())
            .or_insert_with(|| FailureSummary {
                count: 0,
                example: failure.example,
                error: failure.error,
            });
        sum.count += failure.count;
    }
}
