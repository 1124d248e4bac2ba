//! The infer role over the broker: one loop per model that running jobs use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use trommel_infer::{Capacity, Engine, LiveOptions, Runtime, Wanted};
use trommel_queue::Broker;
use trommel_types::{JobModel, Role};

use crate::distributed::job_store::JobStore;
use crate::distributed::live_jobs::LiveJobs;
use crate::distributed::names::Subjects;
use crate::distributed::presence::{self, StageWork};
use crate::distributed::queues;
use crate::distributed::repository::Repository;
use crate::fault::Scope;
use crate::infer::{self, Engines};
use crate::intake::Intake;
use crate::job::ModelId;
use crate::settle::Settler;
use crate::{InferConfig, Readiness, WorkerConfig, WorkerError, metrics};

/// Longest time between two looks at the jobs.
const TICK: Duration = Duration::from_secs(1);
/// Time before a model that failed to load is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// Longer than any process lives.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A model, for rows that need no more than these options.
type Key = (ModelId, Capacity);

/// Engines by name and version, started when first requested.
pub(crate) struct ModelEngines {
    repository: Arc<Repository>,
    runtime: Runtime,
    config: InferConfig,
    live: LiveOptions,
    readiness: Readiness,
    engines: Mutex<HashMap<Key, Arc<OnceCell<Arc<Engine>>>>>,
    /// Models that stay loaded regardless of jobs.
    kept: Mutex<Vec<ModelId>>,
}

impl ModelEngines {
    pub(crate) fn new(
        repository: Arc<Repository>,
        runtime: Runtime,
        config: InferConfig,
        live: LiveOptions,
        readiness: Readiness,
    ) -> Self {
        Self {
            repository,
            runtime,
            config,
            live,
            readiness,
            engines: Mutex::default(),
            kept: Mutex::default(),
        }
    }

    /// The engine of a model that stays loaded from now on, for rows as `wanted`.
    ///
    /// # Errors
    /// As [`Engines::engine`].
    pub(crate) async fn keep(
        &self,
        model: &ModelId,
        wanted: &Wanted,
    ) -> Result<Arc<Engine>, WorkerError> {
        self.kept().push(model.clone());
        self.engine(model, wanted).await
    }

    /// The statistics of all engines.
    pub(crate) fn work(&self) -> StageWork {
        let engines = self.lock();
        let stats = engines
            .values()
            .filter_map(|engine| Some(engine.get()?.stats()));
        let mut work = StageWork {
            role: Role::Infer,
            threads: self.config.instances(),
            images: 0,
            busy_seconds: 0.0,
        };
        for stats in stats {
            work.images += stats.images;
            work.busy_seconds += stats.compute.as_secs_f64();
        }
        work
    }

    /// Loads the models named in the configuration.
    ///
    /// # Errors
    /// If one does not exist or cannot run.
    pub(crate) async fn preload(&self) -> Result<(), WorkerError> {
        for name in &self.config.preload {
            let (repository, name) = (Arc::clone(&self.repository), name.clone());
            let known = tokio::task::spawn_blocking(move || repository.model(&name));
            let known = known.await.map_err(|_| WorkerError::Panicked {
                what: "looking for a model",
            })??;
            self.engine(&known.id, &Wanted::default()).await?;
        }
        Ok(())
    }

    /// Drops engines that no running job needs, until at most `max_models` are left.
    pub(crate) fn trim(&self, needed: &[ModelId]) {
        let mut engines = self.lock();
        let max = self.config.max_models.get();
        let kept = self.kept();
        let idle: Vec<_> = engines
            .keys()
            .filter(|(model, _)| !needed.contains(model) && !kept.contains(model))
            .cloned()
            .collect();
        for model in idle {
            if engines.len() <= max {
                return;
            }
            let engine = engines.remove(&model);
            tell_work(&model.0, engine.as_ref());
            // Its threads are joined where nothing waits for them.
            tokio::task::spawn_blocking(move || drop(engine));
        }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Vec<ModelId>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Arc<OnceCell<Arc<Engine>>>>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ModelEngines {
    fn drop(&mut self) {
        let engines = self.lock();
        engines
            .iter()
            .for_each(|((model, _), engine)| tell_work(model, Some(engine)));
    }
}

/// Logs an engine's statistics.
fn tell_work(model: &ModelId, engine: Option<&Arc<OnceCell<Arc<Engine>>>>) {
    let Some(stats) = engine.and_then(|engine| Some(engine.get()?.stats())) else {
        return; // it was never started
    };
    tracing::info!(
        model = %model.name,
        version = %model.version,
        images = stats.images,
        batches = stats.batches,
        fill = format_args!("{:.3}", stats.fill),
        compute = ?stats.compute,
        idle = ?stats.idle,
        "unloaded"
    );
}

impl ModelEngines {
    async fn started(
        &self,
        model: &ModelId,
        capacity: Capacity,
    ) -> Result<Arc<Engine>, WorkerError> {
        let cell = {
            let mut engines = self.lock();
            Arc::clone(engines.entry((model.clone(), capacity)).or_default())
        };
        let start = || async {
            let _loading = self.readiness.loading();
            let (repository, runtime) = (Arc::clone(&self.repository), self.runtime.clone());
            let (model, config, live) = (model.clone(), self.config.clone(), self.live);
            let started = tokio::task::spawn_blocking(move || {
                let wanted = JobModel {
                    name: model.name.to_string(),
                    version: model.version.to_string(),
                };
                let start = Instant::now();
                let engine = repository.start(&wanted, &runtime, &config, live, capacity)?;
                metrics::loaded(&model.name, start.elapsed());
                tracing::info!(model = %model.name, version = %model.version, "loaded");
                Ok::<_, WorkerError>(Arc::new(engine))
            });
            started.await.map_err(|_| WorkerError::Panicked {
                what: "loading a model",
            })?
        };
        Ok(Arc::clone(cell.get_or_try_init(start).await?))
    }
}

#[async_trait]
impl Engines for ModelEngines {
    async fn engine(&self, model: &ModelId, wanted: &Wanted) -> Result<Arc<Engine>, WorkerError> {
        let engine = self.started(model, Capacity::default()).await?;
        if engine.covers(wanted) {
            return Ok(engine);
        }
        self.started(model, Capacity::from(wanted)).await
    }

    fn flush(&self) {
        let engines = self.lock();
        let started = engines.values().filter_map(|engine| engine.get());
        started.for_each(|engine| engine.flush());
    }
}

/// The context of the infer role.
pub(crate) struct Context {
    pub(crate) broker: Broker,
    pub(crate) subjects: Subjects,
    pub(crate) config: WorkerConfig,
    pub(crate) live: Arc<LiveJobs>,
    pub(crate) store: JobStore,
    pub(crate) engines: Arc<ModelEngines>,
    pub(crate) settler: Settler,
}

/// Classifies tensors of all models that running jobs use, until `shutdown` fires.
///
/// A model that cannot run ends the jobs that use it, and nothing else.
///
/// # Errors
/// When a device is lost, or a queue fails for good.
pub(crate) async fn run(ctx: Arc<Context>, shutdown: CancellationToken) -> Result<(), WorkerError> {
    let stop = shutdown.child_token();
    let mut loops = JoinSet::new();
    let mut served: HashMap<JobModel, Instant> = HashMap::new();
    let mut changed = ctx.live.changed();
    let ended = loop {
        let needed = ctx.needed();
        let now = Instant::now();
        for model in &needed {
            if served.get(model).is_none_or(|again| *again <= now) {
                served.insert(model.clone(), now + FOREVER);
                let (ctx, model, stop) = (Arc::clone(&ctx), model.clone(), stop.clone());
                loops.spawn(async move {
                    let ended = serve_or_fail(&ctx, &model, stop).await;
                    (model, ended)
                });
            }
        }
        let needed: Vec<_> = needed.iter().map(ModelId::from).collect();
        ctx.engines.trim(&needed);
        tokio::select! {
            () = shutdown.cancelled() => break Ok(()),
            Some(joined) = loops.join_next(), if !loops.is_empty() => match joined {
                // It is tried again if another job uses it.
                Ok((model, Ok(()))) => drop(served.insert(model, Instant::now() + AGAIN_AFTER)),
                Ok((_, Err(error))) => break Err(error),
                Err(_) => break Err(WorkerError::Panicked { what: "the infer role" }),
            },
            _ = timeout(TICK, changed.changed()) => {}
        }
    };
    stop.cancel();
    while let Some(joined) = loops.join_next().await {
        let panicked = WorkerError::Panicked {
            what: "the infer role",
        };
        joined.map_err(|_| panicked)?.1?;
    }
    ended
}

/// Serves a model, or ends the jobs that use it if it cannot run.
async fn serve_or_fail(
    ctx: &Context,
    model: &JobModel,
    stop: CancellationToken,
) -> Result<(), WorkerError> {
    let Err(error) = serve(ctx, model, stop).await else {
        return Ok(());
    };
    match error.scope() {
        Scope::Nothing => {
            tracing::warn!(model = model.name, %error, "the model is loaded again later");
            return Ok(());
        }
        Scope::Worker => return Err(error),
        Scope::Job(_) | Scope::Image(_) => {}
    }
    // During a rollout, another worker may have what this one lacks.
    let is_absent = matches!(
        error,
        WorkerError::OtherVersion { .. } | WorkerError::UnknownModel { .. }
    );
    if is_absent && ctx.is_elsewhere(model).await? {
        tracing::warn!(model = model.name, %error, "left to workers that have it");
        return Ok(());
    }
    let reason = error.to_string();
    for job in ctx.live.running() {
        if job.models().contains(model) {
            let error = WorkerError::Model(reason.clone());
            ctx.settler.jobs.fail(job.id(), error).await?;
        }
    }
    Ok(())
}

/// Classifies the tensors of a model. The model is loaded first, so that no more is pulled than its
/// batches need.
async fn serve(
    ctx: &Context,
    model: &JobModel,
    stop: CancellationToken,
) -> Result<(), WorkerError> {
    let (broker, subjects, config) = (&ctx.broker, &ctx.subjects, &ctx.config);
    let engine = ctx
        .engines
        .engine(&model.into(), &Wanted::default())
        .await?;
    let tensors = queues::tensors_of(broker, subjects, config, model).await?;
    let in_flight = config.images_in_infer(&engine);
    metrics::threads(Role::Infer.as_str(), config.infer.instances());
    drop(engine);
    let context = infer::Context {
        intake: Intake::new(Role::Infer, tensors, in_flight),
        engines: Arc::clone(&ctx.engines) as Arc<dyn Engines>,
        settler: ctx.settler.clone(),
    };
    infer::run(Arc::new(context), stop).await
}

impl Context {
    /// The models of running jobs.
    fn needed(&self) -> Vec<JobModel> {
        let mut models = Vec::new();
        for job in self.live.running() {
            self.engines.repository.know(&job.spec);
            for model in job.models() {
                if !models.contains(model) {
                    models.push(model.clone());
                }
            }
        }
        models
    }

    /// Whether another live infer worker has this version of a model.
    async fn is_elsewhere(&self, model: &JobModel) -> Result<bool, WorkerError> {
        let needed = self.engines.repository.stages_of(model);
        let workers = presence::alive(&self.store).await?;
        let mut others = workers.iter().filter(|worker| worker.has(Role::Infer));
        Ok(others.any(|worker| needed.iter().all(|model| worker.has_model(model))))
    }
}
