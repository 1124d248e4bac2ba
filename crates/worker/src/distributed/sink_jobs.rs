//! The sink role over the broker: takes the lease of each job and model, commits its rows, ends it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use trommel_infer::Decided;
use trommel_queue::{Broker, Queue, Stream};
use trommel_sink::{Preconditions, ResultSink};
use trommel_types::{Classification, JobModel};

use crate::clock::now;
use crate::distributed::cascade_jobs;
use crate::distributed::cost::Meter;
use crate::distributed::job_lease::{JobLease, JobLeases, Part};
use crate::distributed::job_store::JobStore;
use crate::distributed::leased_rows::{LeasedRows, Open};
use crate::distributed::live_jobs::LiveJobs;
use crate::distributed::names::{Subjects, results_consumer};
use crate::distributed::record::{Job, JobProgress, JobState, Reason, ReasonKind, Rows};
use crate::distributed::{ends, queues};
use crate::fatal::Fatal;
use crate::fault::Scope;
use crate::sink::{self, Counts, HeldRows};
use crate::{Progress, Trial, TrialOutcome, WorkerConfig, WorkerError};

/// Longest time between two checks for jobs, and between two checkpoints.
const TICK: Duration = Duration::from_millis(500);
/// Time between two checks for messages of ended jobs.
const SWEEP_EVERY: Duration = Duration::from_secs(30);
/// Time before a job whose output was unreachable is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(5);

/// The context of the sink role.
pub(crate) struct Context {
    pub(crate) broker: Broker,
    pub(crate) subjects: Subjects,
    pub(crate) store: JobStore,
    pub(crate) leases: JobLeases,
    pub(crate) live: Arc<LiveJobs>,
    pub(crate) config: WorkerConfig,
    pub(crate) held: Arc<HeldRows>,
    pub(crate) open: OpenJob,
}

/// Opens the output of a job and model.
pub(crate) type OpenJob = Arc<
    dyn Fn(&Job, &JobModel, Preconditions) -> BoxFuture<'static, Result<OpenedJob, WorkerError>>
        + Send
        + Sync,
>;

/// An open output.
pub(crate) struct OpenedJob {
    pub(crate) sink: Box<dyn ResultSink>,
    /// The result of a dry run, once its sink is finished.
    pub(crate) trial: TrialOutcome,
}

/// Commits rows of all running jobs whose lease is free, until `shutdown` fires; then commits the
/// rows that it holds and releases the leases.
pub(crate) async fn run(ctx: Arc<Context>, shutdown: CancellationToken) -> Result<(), WorkerError> {
    let (serving, fatal) = (TaskTracker::new(), Fatal::new(&shutdown));
    let shutdown = fatal.token().clone();
    let taken: Arc<Taken> = Arc::default();
    let mut changed = ctx.live.changed();
    let (mut swept, mut since) = (HashSet::new(), Instant::now());
    while !shutdown.is_cancelled() {
        if since.elapsed() > SWEEP_EVERY {
            since = Instant::now();
            swept.clear();
        }
        ctx.sweep(&mut swept).await;
        for (job, model) in ctx.unserved(&taken) {
            // Only jobs served here count, not those of other sinks.
            if lock(&taken).len() >= ctx.config.sink.max_jobs.get() {
                break;
            }
            let name = (job.id().to_owned(), model.name.clone());
            let Some((lease, progress)) = ctx.take(&name).await else {
                continue;
            };
            lock(&taken).insert(name.clone());
            let (ctx, taken, shutdown) = (Arc::clone(&ctx), Arc::clone(&taken), shutdown.clone());
            let fatal = fatal.clone();
            serving.spawn(async move {
                let serving = Serving {
                    ctx: &ctx,
                    job: &job,
                    model: &model,
                    lease: &lease,
                };
                if let Err(error) = serving.serve(&progress, &shutdown).await {
                    if error.scope() == Scope::Worker {
                        return fatal.check(Err(error));
                    }
                    tracing::error!(job = name.0, model = name.1, %error, "will be taken up again");
                    shutdown.run_until_cancelled(sleep(AGAIN_AFTER)).await;
                }
                lock(&taken).remove(&name);
            });
        }
        // A change, a tick, or the end: check again.
        shutdown
            .run_until_cancelled(timeout(TICK, changed.changed()))
            .await;
    }
    serving.close();
    serving.wait().await;
    fatal.into_result()
}

/// Jobs and models that this process commits.
type Taken = Mutex<HashSet<(String, String)>>;

fn lock(taken: &Taken) -> std::sync::MutexGuard<'_, HashSet<(String, String)>> {
    taken.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Context {
    /// Removes messages of ended jobs, including late repeats.
    async fn sweep(&self, swept: &mut HashSet<String>) {
        for job in self.live.ended() {
            if swept.insert(job.id().to_owned())
                && let Err(error) = ends::sweep(&self.broker, &self.subjects, &job).await
            {
                tracing::warn!(job = job.id(), %error, "messages of a job that has ended are left");
            }
        }
    }

    /// The lease of a job and model, if it is free.
    async fn take(&self, (job, model): &(String, String)) -> Option<(JobLease, JobProgress)> {
        let taken = self.leases.take(job, Part::Rows(model.clone())).await;
        taken.unwrap_or_else(|error| {
            tracing::warn!(job, %error, "its lease cannot be requested");
            None
        })
    }

    /// Running jobs that this process does not commit yet, oldest first.
    fn unserved(&self, taken: &Taken) -> Vec<(Arc<Job>, JobModel)> {
        let running = self.live.running();
        let each = running.iter().flat_map(|job| {
            let models = job.models().iter().cloned();
            models.map(|model| (Arc::clone(job), model))
        });
        let taken = lock(taken);
        each.filter(|(job, model)| !taken.contains(&(job.id().to_owned(), model.name.clone())))
            .collect()
    }
}

/// How the work on a job and model ended.
enum Served {
    /// All rows are committed.
    Complete,
    /// The job has ended, or ends now for this reason.
    Over(Option<Reason>),
    /// Another sink should continue.
    Left,
}

/// A job and model whose rows this process commits.
struct Serving<'a> {
    ctx: &'a Arc<Context>,
    job: &'a Arc<Job>,
    model: &'a JobModel,
    lease: &'a JobLease,
}

impl Serving<'_> {
    async fn serve(
        &self,
        progress: &JobProgress,
        shutdown: &CancellationToken,
    ) -> Result<(), WorkerError> {
        let known = progress.rows.get(&self.model.name);
        let served = match known.is_some_and(|rows| rows.finished) {
            true => Ok(Served::Complete),
            false => {
                let preconditions = known.map(|rows| rows.preconditions).unwrap_or_default();
                self.commit_rows(preconditions, shutdown).await
            }
        };
        let served = match served {
            Ok(served) => served,
            Err(WorkerError::LeaseLost) => {
                let (job, model) = (self.job.id(), &self.model.name);
                tracing::warn!(job, model, "another sink has the job now");
                return Ok(());
            }
            Err(error) => match error.scope() {
                Scope::Nothing => {
                    let served = self.wait(&error, known).await?;
                    if matches!(served, Served::Left) {
                        self.lease.release().await?;
                        return Err(error);
                    }
                    served
                }
                Scope::Job(ReasonKind::Source | ReasonKind::Request) => {
                    Served::Over(Some(Reason::new(ReasonKind::Output, error.to_string())))
                }
                Scope::Job(kind) => Served::Over(Some(Reason::new(kind, error.to_string()))),
                Scope::Image(_) | Scope::Worker => return Err(error),
            },
        };
        self.conclude(served).await?;
        self.lease.release().await
    }

    /// Ends the job if all its models are complete or it is over, and removes its consumers and
    /// messages.
    async fn conclude(&self, served: Served) -> Result<(), WorkerError> {
        let Context {
            broker,
            subjects,
            store,
            ..
        } = &**self.ctx;
        match served {
            Served::Left => {}
            Served::Complete => {
                self.clear().await?;
                let progress = self.lease.change(|_| ()).await?;
                let is_finished = |model: &JobModel| {
                    let rows = progress.rows.get(&model.name);
                    rows.is_some_and(|rows| rows.finished)
                };
                if self.job.models().iter().all(is_finished) {
                    let (id, state) = (self.job.id(), JobState::Complete);
                    ends::end(store, broker, subjects, id, state, None).await?;
                    ends::clear(store, self.job).await?;
                }
            }
            Served::Over(reason) => {
                if let Some(reason) = reason {
                    tracing::error!(job = self.job.id(), reason = reason.text, "the job fails");
                    ends::fail(store, broker, subjects, self.job.id(), reason).await?;
                }
                self.clear().await?;
                ends::clear(store, self.job).await?;
            }
        }
        Ok(())
    }

    /// Records a failing output, and since when; after `sink.patience` the job ends.
    async fn wait(&self, error: &WorkerError, known: Option<&Rows>) -> Result<Served, WorkerError> {
        let since = known.and_then(|rows| rows.waits_since).unwrap_or_else(now);
        let text = error.to_string();
        let name = &self.model.name;
        let noted = self.lease.change(|progress| {
            let rows = progress.rows.entry(name.clone()).or_default();
            rows.waits_for = Some(text.clone());
            rows.waits_since = Some(since);
        });
        noted.await?;
        let patience = self.ctx.config.sink.patience;
        let waited = Duration::from_micros(u64::try_from(now() - since).unwrap_or_default());
        if waited < patience {
            return Ok(Served::Left);
        }
        Ok(Served::Over(Some(Reason::new(
            ReasonKind::Output,
            format!(
                "{text}; that was so for {}, longer than sink.patience",
                humantime::format_duration(Duration::from_secs(waited.as_secs()))
            ),
        ))))
    }

    /// Commits rows until all are committed, the job ends, or `shutdown` fires.
    async fn commit_rows(
        &self,
        preconditions: Preconditions,
        shutdown: &CancellationToken,
    ) -> Result<Served, WorkerError> {
        let Self {
            ctx,
            job,
            model,
            lease,
        } = *self;
        let (id, name) = (job.id(), &model.name);
        let OpenedJob { sink: rows, trial } = (ctx.open)(job, model, preconditions).await?;
        // Decided once per job: sinks that disagree would not see each other's parts.
        let (preconditions, wanted) = (rows.preconditions(), rows.wanted());
        let decided = lease.change(|progress| {
            let rows = progress.rows.entry(name.clone()).or_default();
            rows.preconditions = preconditions;
            rows.wanted = wanted;
        });
        let known = decided.await?.rows;
        let spent = known.get(name).and_then(|rows| rows.cost);
        let progress = Arc::new(Progress::default());
        progress.count_resumed(rows.committed().len());
        let (committed, counts) = watch::channel(Counts::of(rows.ledger()));
        let mut notes = Notes::new(self, counts, Arc::clone(&progress), wanted, spent);
        let intake: Arc<dyn Queue<Classification>> =
            queues::results_of(&ctx.broker, &ctx.subjects, &ctx.config, id, name).await?;
        let sink = Arc::new(sink::Context {
            intake,
            config: ctx.config.sink.clone(),
            held: Arc::clone(&ctx.held),
            max_failure_rate: job.spec.request.options.max_failure_rate,
            progress,
            committed,
            shared: Some(Arc::new(LeasedRows {
                lease: lease.clone(),
                open: self.reopen(preconditions),
            })),
        });
        let stop = shutdown.child_token();
        let running = AbortOnDropHandle::new(tokio::spawn(sink::run(sink, rows, stop.clone())));
        let (mut rows, reason) = self.watch(running, &mut notes, &stop).await?;
        if !lease.is_held() {
            return Err(WorkerError::LeaseLost);
        }
        notes.take().await?;
        if !notes.is_complete(rows.committed().len()) {
            return Ok(reason.map_or(Served::Left, Served::Over));
        }
        if job.is_cascade() && known.get(name).is_none_or(|rows| rows.decided.is_none()) {
            // Before the end: a finished output does not give its rows back.
            let rows = rows.cascade_rows().await?;
            notes.decide(cascade_jobs::decided(&rows)).await?;
        }
        let summary = rows.finish().await?;
        if let Some(retry) = &job.spec.request.options.retry {
            ctx.store.recount(retry, name, &summary).await?;
        }
        let trial = *trial.lock().unwrap_or_else(PoisonError::into_inner);
        notes.finish(trial).await?;
        Ok(Served::Complete)
    }

    /// Opens the output again after another sink has changed its rows.
    fn reopen(&self, preconditions: Preconditions) -> Arc<Open> {
        let (open, job) = (Arc::clone(&self.ctx.open), Arc::clone(self.job));
        let model = self.model.clone();
        Arc::new(move || {
            let opened = open(&job, &model, preconditions);
            opened
                .map(|opened| opened.map(|opened| opened.sink))
                .boxed()
        })
    }

    /// Records progress until the sink ends, and stops it if the lease is lost or the job is over.
    /// Returns the output, and why the job is over, if it is.
    async fn watch(
        &self,
        mut running: AbortOnDropHandle<Result<Box<dyn ResultSink>, WorkerError>>,
        notes: &mut Notes<'_>,
        stop: &CancellationToken,
    ) -> Result<(Box<dyn ResultSink>, Option<Option<Reason>>), WorkerError> {
        let mut reason = None;
        loop {
            tokio::select! {
                joined = &mut running => {
                    let rows = joined.unwrap_or(Err(WorkerError::Panicked { what: "a sink" }))?;
                    return Ok((rows, reason));
                }
                () = self.lease.lost().cancelled(), if !stop.is_cancelled() => stop.cancel(),
                () = sleep(TICK) => match notes.take().await {
                    Ok(()) | Err(WorkerError::LeaseLost) => {}
                    Err(error) => {
                        tracing::warn!(job = self.job.id(), %error, "progress is not noted");
                    }
                },
            }
            if reason.is_none() {
                reason = self.over(&notes.meter);
                if reason.is_some() {
                    stop.cancel();
                }
            }
        }
    }

    /// Why the job should end early, if it should: `Some(None)` if its record already says so.
    fn over(&self, meter: &Meter) -> Option<Option<Reason>> {
        if self.ctx.live.is_over(self.job.id()) {
            return Some(None);
        }
        if let Some(limit) = meter.passed() {
            let text = format!("cost as much as it may: {limit} at the prices given (max_cost)");
            return Some(Some(Reason::new(ReasonKind::MaxCost, text)));
        }
        let limit = self.job.spec.request.options.max_runtime_seconds?;
        let ran = now().saturating_sub(self.job.started_at?) / 1_000_000;
        let is_over = u64::try_from(ran).is_ok_and(|ran| ran >= limit);
        is_over.then(|| {
            let text = format!("ran longer than {limit} seconds (max_runtime_seconds)");
            Some(Reason::new(ReasonKind::MaxRuntime, text))
        })
    }

    /// Leaves no consumer of this job and model in the broker.
    async fn clear(&self) -> Result<(), WorkerError> {
        let (id, name) = (self.job.id(), &self.model.name);
        let Context {
            broker, subjects, ..
        } = &**self.ctx;
        let consumer = results_consumer(id, name);
        broker.delete_consumer(Stream::Results, &consumer).await?;
        let subject = subjects.results(id, name);
        broker.purge_subject(Stream::Results, &subject).await?;
        Ok(())
    }
}

/// Keeps the checkpoint of committed rows, and learns the number of images.
struct Notes<'a> {
    serving: &'a Serving<'a>,
    counts: watch::Receiver<Counts>,
    progress: Arc<Progress>,
    meter: Meter,
    /// Of a retry: how many rows it replaces.
    wanted: Option<u64>,
    last: (Instant, u64),
    rate: f64,
    reported: Instant,
}

impl<'a> Notes<'a> {
    fn new(
        serving: &'a Serving<'a>,
        counts: watch::Receiver<Counts>,
        progress: Arc<Progress>,
        wanted: Option<u64>,
        spent: Option<f64>,
    ) -> Self {
        Self {
            meter: Meter::new(&serving.job.spec.request, spent, progress.resumed()),
            serving,
            wanted,
            last: (Instant::now(), progress.resumed()),
            counts,
            progress,
            rate: 0.0,
            reported: Instant::now(),
        }
    }

    async fn take(&mut self) -> Result<(), WorkerError> {
        let (at, now) = (self.last, Instant::now());
        let counts = self.counts.borrow().clone();
        let committed = counts.committed;
        let elapsed = now.duration_since(at.0).as_secs_f64();
        if elapsed >= 1.0 {
            let rate = committed.saturating_sub(at.1) as f64 / elapsed;
            // Parts are committed in steps; the figure is for people.
            self.rate = if self.rate == 0.0 {
                rate
            } else {
                0.7 * self.rate + 0.3 * rate
            };
            self.last = (now, committed);
        }
        let (rate, pending) = (self.rate, self.progress.pending());
        let (store, bytes) = (&self.serving.ctx.store, self.progress.committed_bytes());
        let cost = self.meter.read(store, committed, bytes).await?;
        let name = &self.serving.model.name;
        let noted = self.serving.lease.change(|progress| {
            let rows = progress.rows.entry(name.clone()).or_default();
            rows.count(&counts);
            rows.pending = pending;
            rows.rate = rate;
            rows.cost = cost;
            rows.waits_for = None;
            rows.waits_since = None;
        });
        let listing = noted.await?.listing;
        match self.wanted {
            // For one model; the listing covers the images of all.
            Some(wanted) => self.progress.set_listed(wanted, true),
            None => self.progress.set_listed(listing.listed, listing.ended),
        }
        self.report(committed, listing.listed).await;
        Ok(())
    }

    /// The event `progress`, occasionally.
    async fn report(&mut self, committed: u64, listed: u64) {
        const EVERY: Duration = Duration::from_secs(5);
        if self.reported.elapsed() < EVERY {
            return;
        }
        self.reported = Instant::now();
        let Serving {
            ctx, job, model, ..
        } = self.serving;
        let told = serde_json::json!({
            "job": job.id(),
            "model": model.name,
            "committed": committed,
            "listed": listed,
            "rate": self.rate,
        });
        ends::event(&ctx.broker, &ctx.subjects, job.id(), "progress", &told).await;
    }

    /// Whether these are all possible rows.
    fn is_complete(&self, committed: u64) -> bool {
        self.progress.total() == Some(committed)
    }

    async fn decide(&self, decided: Decided) -> Result<(), WorkerError> {
        let name = &self.serving.model.name;
        let noted = self.serving.lease.change(|progress| {
            progress.rows.entry(name.clone()).or_default().decided = Some(decided);
        });
        noted.await.map(drop)
    }

    async fn finish(&self, trial: Option<Trial>) -> Result<(), WorkerError> {
        let name = &self.serving.model.name;
        let counts = self.counts.borrow().clone();
        let noted = self.serving.lease.change(|progress| {
            let rows = progress.rows.entry(name.clone()).or_default();
            rows.count(&counts);
            rows.pending = 0;
            rows.rate = trial.map_or(0.0, |trial| 1.0 / trial.seconds_each);
            rows.trial = trial;
            rows.finished = true;
        });
        noted.await.map(drop)
    }
}
