//! The infer role over the broker: one loop for each model that running jobs ask for.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use trommel_infer::{Engine, Runtime};
use trommel_queue::Broker;

use crate::distributed::names::Subjects;
use crate::distributed::presence::StageWork;
use crate::distributed::queues;
use crate::distributed::record::JobModel;
use crate::distributed::registry::LiveJobs;
use crate::distributed::repository::Repository;
use crate::infer::{self, Engines};
use crate::intake::Intake;
use crate::job::{Jobs, ModelId};
use crate::settle::Settler;
use crate::{InferConfig, Readiness, Role, WorkerConfig, WorkerError, metrics};

/// Longest time between two looks at the jobs.
const TICK: Duration = Duration::from_secs(1);

/// Engines by name and version, started when first asked for.
pub(crate) struct ModelEngines {
    repository: Arc<Repository>,
    runtime: Runtime,
    config: InferConfig,
    readiness: Readiness,
    engines: Mutex<HashMap<ModelId, Arc<OnceCell<Arc<Engine>>>>>,
}

impl ModelEngines {
    pub(crate) fn new(
        repository: Arc<Repository>,
        runtime: Runtime,
        config: InferConfig,
        readiness: Readiness,
    ) -> Self {
        Self {
            repository,
            runtime,
            config,
            readiness,
            engines: Mutex::default(),
        }
    }

    /// What all engines have done.
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

    /// Loads the models that the configuration names.
    ///
    /// # Errors
    /// When one is not there or cannot be run.
    pub(crate) async fn preload(&self) -> Result<(), WorkerError> {
        for name in &self.config.preload {
            let (repository, name) = (Arc::clone(&self.repository), name.clone());
            let known = tokio::task::spawn_blocking(move || repository.model(&name));
            let known = known.await.map_err(|_| WorkerError::Panicked {
                what: "looking for a model",
            })??;
            self.engine(&known.id).await?;
        }
        Ok(())
    }

    /// Drops engines that no running job needs, until no more than `max_models` are left.
    pub(crate) fn trim(&self, needed: &[ModelId]) {
        let mut engines = self.lock();
        let max = self.config.max_models.get();
        let idle: Vec<_> = engines
            .keys()
            .filter(|model| !needed.contains(model))
            .cloned()
            .collect();
        for model in idle {
            if engines.len() <= max {
                return;
            }
            let engine = engines.remove(&model);
            tell_work(&model, engine.as_ref());
            // Its threads are joined where that keeps nobody waiting.
            tokio::task::spawn_blocking(move || drop(engine));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<ModelId, Arc<OnceCell<Arc<Engine>>>>> {
        self.engines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ModelEngines {
    fn drop(&mut self) {
        let engines = self.lock();
        engines
            .iter()
            .for_each(|(model, engine)| tell_work(model, Some(engine)));
    }
}

/// Logs what an engine has done in its time.
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

#[async_trait]
impl Engines for ModelEngines {
    async fn engine(&self, model: &ModelId) -> Result<Arc<Engine>, WorkerError> {
        let cell = Arc::clone(self.lock().entry(model.clone()).or_default());
        let start = || async {
            let _loading = self.readiness.loading();
            let (repository, runtime) = (Arc::clone(&self.repository), self.runtime.clone());
            let (model, config) = (model.clone(), self.config.clone());
            let started = tokio::task::spawn_blocking(move || {
                let wanted = JobModel {
                    name: model.name.to_string(),
                    version: model.version.to_string(),
                };
                let start = Instant::now();
                let engine = repository.start(&wanted, &runtime, &config)?;
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

    fn flush(&self) {
        let engines = self.lock();
        let started = engines.values().filter_map(|engine| engine.get());
        started.for_each(|engine| engine.flush());
    }
}

/// What the infer role works with.
pub(crate) struct Context {
    pub(crate) broker: Broker,
    pub(crate) subjects: Subjects,
    pub(crate) config: WorkerConfig,
    pub(crate) live: Arc<LiveJobs>,
    pub(crate) jobs: Arc<dyn Jobs>,
    pub(crate) engines: Arc<ModelEngines>,
    pub(crate) settler: Settler,
}

/// Classifies tensors of all models that running jobs name, until `shutdown` fires.
///
/// # Errors
/// When a model cannot be run, or a queue fails for good.
pub(crate) async fn run(ctx: Arc<Context>, shutdown: CancellationToken) -> Result<(), WorkerError> {
    let stop = shutdown.child_token();
    let mut loops = JoinSet::new();
    let mut served = HashSet::new();
    let mut changed = ctx.live.changed();
    let ended = loop {
        let needed = ctx.needed();
        for model in &needed {
            if served.insert(Arc::clone(&model.name)) {
                let (ctx, model, stop) = (Arc::clone(&ctx), model.clone(), stop.clone());
                loops.spawn(async move { serve(&ctx, &model, stop).await });
            }
        }
        ctx.engines.trim(&needed);
        tokio::select! {
            () = shutdown.cancelled() => break Ok(()),
            Some(joined) = loops.join_next(), if !loops.is_empty() => match joined {
                Ok(Ok(())) => {}
                Ok(Err(error)) => break Err(error),
                Err(_) => break Err(WorkerError::Panicked { what: "the infer role" }),
            },
            _ = timeout(TICK, changed.changed()) => {}
        }
    };
    stop.cancel();
    while let Some(joined) = loops.join_next().await {
        joined.unwrap_or(Err(WorkerError::Panicked {
            what: "the infer role",
        }))?;
    }
    ended
}

/// Classifies the tensors of all versions of a model. The one that is named is loaded first, so that
/// no more is pulled than its batches take.
async fn serve(ctx: &Context, model: &ModelId, stop: CancellationToken) -> Result<(), WorkerError> {
    let (broker, subjects, config) = (&ctx.broker, &ctx.subjects, &ctx.config);
    let tensors = queues::tensors_of(broker, subjects, config, &model.name).await?;
    let engine = ctx.engines.engine(model).await?;
    let in_hand = config.infer.tensors_in_hand(engine.stats().max_batch);
    metrics::threads(Role::Infer.as_str(), config.infer.instances());
    drop(engine);
    let context = infer::Context {
        intake: Intake::new(Role::Infer, tensors, in_hand),
        engines: Arc::clone(&ctx.engines) as Arc<dyn Engines>,
        jobs: Arc::clone(&ctx.jobs),
        settler: ctx.settler.clone(),
    };
    infer::run(Arc::new(context), stop).await
}

impl Context {
    /// The models of running jobs.
    fn needed(&self) -> Vec<ModelId> {
        let mut models = Vec::new();
        for job in self.live.running() {
            for model in &job.models {
                let id = ModelId {
                    name: model.name.as_str().into(),
                    version: model.version.as_str().into(),
                };
                if !models.contains(&id) {
                    models.push(id);
                }
            }
        }
        models
    }
}
