//! A process with one or several roles over the broker.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use trommel_infer::{Capacity, Runtime, Wanted};
use trommel_queue::Broker;
use trommel_source::{SourceOptions, fetcher};
use trommel_types::{JobOptions, Role, RowOptions};

use crate::distributed::infer_models::{self, ModelEngines};
use crate::distributed::job_lease::JobLeases;
use crate::distributed::job_store::JobStore;
use crate::distributed::live_jobs::LiveJobs;
use crate::distributed::names::Subjects;
use crate::distributed::planned_jobs::PlannedJobs;
use crate::distributed::presence::{self, Presence, StageWork};
use crate::distributed::queues::{self, Ends};
use crate::distributed::remote_model::RemoteModel;
use crate::distributed::repository::Repository;
use crate::distributed::{control, ingest_jobs, output, sink_jobs, tensor_requests, upkeep};
use crate::hop::{LocalHop, QueueHop, TensorHop};
use crate::infer::Engines;
use crate::intake::Intake;
use crate::job::{Jobs, ModelId, PlannedModel};
use crate::preprocess::PreparePool;
use crate::reports::Reports;
use crate::settle::{RowQueues, Settler};
use crate::sink::HeldRows;
use crate::{
    Allowed, Answers, LiveEngine, LiveModel, Progress, Readiness, Remote, WorkerConfig,
    WorkerError, metrics, preprocess, request_times,
};

/// Bytes of a tensor of 224 × 224 pixels, assumed for a model that is unknown before its first job.
const USUAL_TENSOR: usize = 3 * 224 * 224;
/// Longest wait for the broker at the end.
const FLUSH: Duration = Duration::from_secs(2);

/// How tensors get from preprocess to infer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HopKind {
    /// Through the broker, to any infer worker.
    #[default]
    Jetstream,
    /// In memory, for a process with both roles.
    Local,
}

/// The options of a worker process.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// Its roles.
    pub roles: Vec<Role>,
    /// The models: a folder, or `s3://bucket/prefix`.
    pub model_repository: String,
    /// Where models from a bucket are copied to.
    pub model_cache: PathBuf,
    /// The hop of tensors.
    pub tensor_hop: HopKind,
    /// Models that an infer worker keeps warm for requests of serve workers.
    pub serve: Vec<String>,
    /// ONNX Runtime's shared library, if specified.
    pub onnxruntime: Option<PathBuf>,
}

/// A worker, connected and checked.
pub struct Worker {
    roles: Vec<Role>,
    hop: HopKind,
    config: WorkerConfig,
    subjects: Subjects,
    broker: Broker,
    store: JobStore,
    live: Arc<LiveJobs>,
    repository: Arc<Repository>,
    /// For the infer role.
    engines: Option<Arc<ModelEngines>>,
    /// For the preprocess and serve roles.
    pool: Option<Arc<PreparePool>>,
    serve: Vec<String>,
    /// Models of the serve role on infer workers.
    remote: Mutex<Vec<Arc<RemoteModel>>>,
    presence: Presence,
    readiness: Readiness,
}

impl Worker {
    /// Connects and checks everything that the roles need, so that problems are reported before any
    /// work.
    ///
    /// # Errors
    /// If the broker, ONNX Runtime, the device or the model repository is missing or unsuitable, or
    /// another worker has different content under the same name and version of a model.
    pub async fn start(config: WorkerConfig, options: WorkerOptions) -> Result<Self, WorkerError> {
        let has = |role| options.roles.contains(&role);
        if options.tensor_hop == HopKind::Local && !(has(Role::Preprocess) && has(Role::Infer)) {
            return Err(WorkerError::Settings(
                "a local tensor hop needs preprocess and infer in one process; name both with --role".to_owned(),
            ));
        }
        let repository = {
            let (root, cache) = (
                options.model_repository.clone(),
                options.model_cache.clone(),
            );
            let s3 = config.s3.clone();
            let opened = tokio::task::spawn_blocking(move || Repository::open(&root, &cache, &s3));
            Arc::new(opened.await.map_err(|_| WorkerError::Panicked {
                what: "opening the model repository",
            })??)
        };
        let runtime = if has(Role::Infer) {
            let runtime = Runtime::load(options.onnxruntime.as_deref())?;
            let (models, loaded) = (
                config.infer.model_options(Capacity::default())?,
                runtime.clone(),
            );
            let checked = tokio::task::spawn_blocking(move || models.check_devices(&loaded));
            checked.await.map_err(|_| WorkerError::Panicked {
                what: "looking for the devices",
            })??;
            Some(runtime)
        } else {
            None
        };
        let names: Vec<_> = options.roles.iter().map(|role| role.as_str()).collect();
        let broker =
            Broker::connect(&config.broker, &format!("trommel {}", names.join(","))).await?;
        broker.ensure_streams().await?;
        let store = JobStore::new(broker.kv().await?);
        let presence = Presence::announce(&store, &options.roles, &repository).await?;
        let readiness = Readiness::default();
        readiness.needs(broker.clone(), Arc::clone(&repository));
        let engines = runtime.map(|runtime| {
            let (infer, live) = (config.infer.clone(), config.serve.live_options());
            let repository = Arc::clone(&repository);
            Arc::new(ModelEngines::new(
                repository,
                runtime,
                infer,
                live,
                readiness.clone(),
            ))
        });
        let pool = match has(Role::Preprocess) || has(Role::Serve) {
            true => Some(Arc::new(PreparePool::start(&config.preprocess)?)),
            false => None,
        };
        Ok(Self {
            hop: options.tensor_hop,
            subjects: Subjects::new(&config.broker.prefix),
            live: Arc::new(LiveJobs::watch(store.clone()).await?),
            roles: options.roles,
            config,
            broker,
            store,
            repository,
            engines,
            pool,
            serve: options.serve,
            remote: Mutex::default(),
            presence,
            readiness,
        })
    }

    /// What answers requests for these models of the repository. Rows are as in `rows`, unless
    /// requests differ.
    ///
    /// A process with infer loads the models and answers on the threads and engines of its roles:
    /// requests take precedence over jobs. A process without infer decodes, and sends tensors to
    /// infer workers.
    ///
    /// # Errors
    /// If the process has neither serve nor both preprocess and infer, if a model cannot run, or if
    /// its tensors do not fit into a message.
    pub async fn answers(
        &self,
        names: &[String],
        rows: &RowOptions,
    ) -> Result<Answers, WorkerError> {
        let holds_both = self.roles.contains(&Role::Serve) || self.engines.is_some();
        let Some(pool) = self.pool.as_ref().filter(|_| holds_both) else {
            return Err(WorkerError::Settings(
                "requests are answered by a process that holds serve, or preprocess and infer; name them with --role".to_owned(),
            ));
        };
        let wanted = Wanted::from(rows);
        let mut models = Vec::with_capacity(names.len());
        for name in names {
            let (repository, named) = (Arc::clone(&self.repository), name.clone());
            let known = tokio::task::spawn_blocking(move || repository.model(&named));
            let known = known.await.map_err(|_| WorkerError::Panicked {
                what: "looking for a model",
            })??;
            let plan = known.plan(rows.reference)?;
            let engine = match &self.engines {
                Some(engines) => {
                    let engine = engines.keep(&known.id, &wanted).await?;
                    if engine.prompt().is_some() {
                        return Err(WorkerError::Settings(format!(
                            "model {name} is a prompt, which jobs ask; requests go to its servers directly"
                        )));
                    }
                    engine.check(&wanted)?;
                    LiveEngine::Here(engine)
                }
                None => LiveEngine::There(Remote(self.remote(&PlannedModel {
                    id: known.id.clone(),
                    plan: Arc::clone(&plan),
                    also: None,
                })?)),
            };
            models.push(LiveModel {
                name: Arc::clone(&known.id.name),
                plan,
                engine,
            });
        }
        Answers::on(Arc::clone(pool), models, rows, &self.config)
    }

    /// A model on infer workers.
    fn remote(&self, model: &PlannedModel) -> Result<Arc<RemoteModel>, WorkerError> {
        Repository::check_payload(model, self.broker.max_payload())?;
        let shape = model.plan.shape().ok_or_else(|| {
            WorkerError::Model(format!(
                "model {}: its images end up in different sizes; set [preprocess] crop or resize in trommel.toml",
                model.id.name
            ))
        })?;
        let ModelId { name, version } = &model.id;
        let need = self.readiness.need(format!(
            "no infer worker with a warm model {name} in version {version} answers"
        ));
        let remote = Arc::new(RemoteModel::new(
            model.id.clone(),
            self.broker.clone(),
            self.subjects.infer(name, version),
            shape,
            self.config.serve.infer_timeout,
            need,
        ));
        let mut all = self.remote.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Arc::clone(&remote));
        Ok(remote)
    }

    /// The broker.
    pub fn broker(&self) -> &Broker {
        &self.broker
    }

    /// The readiness of this process.
    pub fn readiness(&self) -> Readiness {
        self.readiness.clone()
    }

    /// Works until `stop` fires, then finishes work in flight within `shutdown.drain-timeout` and
    /// returns the rest. Calls `ready` once all roles are working.
    ///
    /// # Errors
    /// Errors that stop a role permanently.
    pub async fn run(
        self,
        stop: CancellationToken,
        ready: impl FnOnce(),
    ) -> Result<(), WorkerError> {
        let mut roles = JoinSet::new();
        let halt = stop.child_token();
        let (reports, progress) = (Reports::default(), Arc::new(Progress::default()));
        let engines = self.spawn(&mut roles, &halt, &reports, &progress).await?;
        let (held, config) = (self.roles.clone(), self.config.clone());
        let latest = move |presence: &mut Presence| {
            presence.work = work(&held, &config, engines.as_deref());
            presence.times = progress.times();
            presence.put_off = reports.latest();
            presence.requests = request_times::so_far();
        };
        roles.spawn(presence::keep(
            self.store.clone(),
            self.presence.clone(),
            Arc::clone(&self.repository),
            latest,
            halt.clone(),
        ));
        self.broker.flush().await?; // the server knows of all consumers and endpoints
        self.readiness.begin();
        ready();
        let first = tokio::select! {
            () = halt.cancelled() => Ok(()),
            ended = next(&mut roles) => ended,
        };
        halt.cancel();
        self.readiness.stop();
        let drain_timeout = self.config.shutdown.drain_timeout;
        let drained = timeout(drain_timeout, async {
            let mut drained = Ok(());
            while !roles.is_empty() {
                drained = drained.and(next(&mut roles).await);
            }
            drained
        });
        let drained = drained.await.unwrap_or(Err(WorkerError::DrainTimeout {
            after: drain_timeout,
        }));
        // The last acks have to reach the server before the process ends.
        if let Ok(Err(error)) = timeout(FLUSH, self.broker.flush()).await {
            tracing::warn!(%error, "the last messages to the broker may be lost");
        }
        first.and(drained)
    }

    async fn spawn(
        &self,
        roles: &mut JoinSet<Result<(), WorkerError>>,
        halt: &CancellationToken,
        reports: &Reports,
        progress: &Arc<Progress>,
    ) -> Result<Option<Arc<ModelEngines>>, WorkerError> {
        let (broker, subjects) = (&self.broker, &self.subjects);
        let max_tensor = (self.hop == HopKind::Jetstream).then(|| broker.max_payload());
        let jobs: Arc<dyn Jobs> = Arc::new(PlannedJobs::new(
            Arc::clone(&self.live),
            self.store.clone(),
            broker.clone(),
            subjects.clone(),
            Arc::clone(&self.repository),
            max_tensor,
        ));
        let settler = Settler {
            results: RowQueues::Shared(queues::results(broker, subjects).await?),
            jobs,
            retry: self.config.retry.clone(),
            progress: Arc::clone(progress),
            reports: reports.clone(),
        };
        let engines = self.engines.clone();
        if let Some(engines) = &engines {
            // A stop does not wait for a model to load.
            let loaded = halt.run_until_cancelled(engines.preload());
            loaded.await.unwrap_or(Ok(()))?;
        }
        for role in &self.roles {
            metrics::begin(*role);
            match (role, &engines) {
                (Role::Ingest, _) => self.spawn_ingest(roles, halt, &settler).await?,
                (Role::Preprocess, _) => {
                    let hop = self.hop(engines.as_ref(), &settler).await?;
                    let context = self.preprocess(hop, settler.clone());
                    roles.spawn(preprocess::run(Arc::new(context.await?), halt.clone()));
                }
                (Role::Infer, Some(engines)) => {
                    let context = infer_models::Context {
                        broker: self.broker.clone(),
                        subjects: self.subjects.clone(),
                        config: self.config.clone(),
                        live: Arc::clone(&self.live),
                        store: self.store.clone(),
                        engines: Arc::clone(engines),
                        settler: settler.clone(),
                    };
                    roles.spawn(infer_models::run(Arc::new(context), halt.clone()));
                    self.spawn_tensor_requests(roles, halt, engines).await?;
                }
                (Role::Serve, _) => {
                    let models = self.remote.lock().unwrap_or_else(PoisonError::into_inner);
                    for model in models.iter() {
                        roles.spawn(Arc::clone(model).watch(halt.clone()));
                    }
                }
                (Role::Infer, None) => {}
                (Role::Sink, _) => {
                    let context = sink_jobs::Context {
                        broker: self.broker.clone(),
                        subjects: self.subjects.clone(),
                        store: self.store.clone(),
                        leases: self.leases(),
                        live: Arc::clone(&self.live),
                        config: self.config.clone(),
                        held: HeldRows::new(self.config.share_of_budget()),
                        open: output::opener(&self.config, &self.store),
                    };
                    roles.spawn(sink_jobs::run(Arc::new(context), halt.clone()));
                }
            }
        }
        Ok(engines)
    }

    /// Accepts tensors from serve workers.
    async fn spawn_tensor_requests(
        &self,
        roles: &mut JoinSet<Result<(), WorkerError>>,
        halt: &CancellationToken,
        engines: &Arc<ModelEngines>,
    ) -> Result<(), WorkerError> {
        for name in &self.serve {
            let warm = tensor_requests::open(
                &self.broker,
                &self.subjects,
                &self.repository,
                engines,
                &self.config.serve,
                name,
            );
            roles.spawn(tensor_requests::run(warm.await?, halt.clone()));
        }
        Ok(())
    }

    async fn spawn_ingest(
        &self,
        roles: &mut JoinSet<Result<(), WorkerError>>,
        halt: &CancellationToken,
        settler: &Settler,
    ) -> Result<(), WorkerError> {
        let (broker, subjects, config) = (&self.broker, &self.subjects, &self.config);
        // So that workers can be scaled from zero by their backlog.
        let repository = Arc::clone(&self.repository);
        let models = tokio::task::spawn_blocking(move || repository.all_here());
        let models = models.await.map_err(|_| WorkerError::Panicked {
            what: "looking at the models",
        })?;
        queues::ensure_consumers(broker, subjects, config, &models).await?;
        let jobs = queues::jobs(broker, subjects, config, Ends::Both).await?;
        let context = ingest_jobs::Context {
            intake: Intake::new(
                Role::Ingest,
                Arc::clone(&jobs),
                config.ingest.max_jobs.get(),
            ),
            tasks: queues::tasks(broker, subjects, config, Ends::Publish).await?,
            settler: settler.clone(),
            store: self.store.clone(),
            leases: self.leases(),
            live: Arc::clone(&self.live),
            repository: Arc::clone(&self.repository),
            allowed: self.allowed()?,
            open: output::opener(config, &self.store),
            config: config.clone(),
            subjects: subjects.clone(),
            broker: broker.clone(),
        };
        let context = Arc::new(context);
        let upkeep = upkeep::run(Arc::clone(&context), Arc::clone(&jobs), halt.clone());
        roles.spawn(upkeep);
        roles.spawn(ingest_jobs::run(context, halt.clone()));
        let control = control::Context {
            broker: broker.clone(),
            prefix: config.broker.prefix.clone(),
            subjects: subjects.clone(),
            store: self.store.clone(),
            repository: Arc::clone(&self.repository),
            jobs,
        };
        let service = control::start(&control).await?;
        roles.spawn(control::run(Arc::new(control), service, halt.clone()));
        Ok(())
    }

    fn allowed(&self) -> Result<Arc<Allowed>, WorkerError> {
        let allowed = Allowed::new(&self.config.access);
        allowed
            .map(Arc::new)
            .map_err(|problems| WorkerError::Settings(problems.join("; ")))
    }

    fn leases(&self) -> JobLeases {
        let (owner, ttl) = (self.presence.id(), self.config.sink.lease);
        JobLeases::new(self.store.clone(), owner, ttl)
    }

    async fn hop(
        &self,
        engines: Option<&Arc<ModelEngines>>,
        settler: &Settler,
    ) -> Result<Arc<dyn TensorHop>, WorkerError> {
        Ok(match (self.hop, engines) {
            (HopKind::Local, Some(engines)) => Arc::new(LocalHop {
                engines: Arc::clone(engines) as Arc<dyn Engines>,
                settler: settler.clone(),
            }),
            _ => Arc::new(QueueHop(
                queues::tensors(&self.broker, &self.subjects).await?,
            )),
        })
    }

    async fn preprocess(
        &self,
        output: Arc<dyn TensorHop>,
        settler: Settler,
    ) -> Result<preprocess::Context, WorkerError> {
        let config = &self.config.preprocess;
        let mut in_flight = config.in_flight();
        if self.hop == HopKind::Local {
            // A task stays in flight until its image is classified.
            let largest = self.config.infer.largest_batch();
            in_flight += self.config.in_flight_of(USUAL_TENSOR, largest);
        }
        let tasks = queues::tasks(&self.broker, &self.subjects, &self.config, Ends::Both).await?;
        let source = SourceOptions {
            rule: self.allowed()?.rule(),
            ..self.config.source_options(&JobOptions::default())
        };
        Ok(preprocess::Context {
            intake: Intake::new(Role::Preprocess, tasks, in_flight),
            source: fetcher(&source),
            allowed: Some(self.allowed()?),
            pool: match &self.pool {
                Some(pool) => Arc::clone(pool),
                None => Arc::new(PreparePool::start(config)?),
            },
            output,
            progress: Arc::clone(&settler.progress),
            settler,
        })
    }
}

/// The work of this process in each of its roles.
fn work(roles: &[Role], config: &WorkerConfig, engines: Option<&ModelEngines>) -> Vec<StageWork> {
    let of = |role: &Role| {
        if let (Role::Infer, Some(engines)) = (role, engines) {
            return engines.work();
        }
        let (images, busy) = metrics::done(*role);
        StageWork {
            role: *role,
            threads: match role {
                Role::Preprocess | Role::Serve => config.preprocess.threads(),
                _ => 1,
            },
            images,
            busy_seconds: busy.as_secs_f64(),
        }
    };
    roles.iter().map(of).collect()
}

/// The end of the next role; pending while no role runs.
async fn next(roles: &mut JoinSet<Result<(), WorkerError>>) -> Result<(), WorkerError> {
    match roles.join_next().await {
        Some(joined) => joined.unwrap_or(Err(WorkerError::Panicked { what: "a role" })),
        None => std::future::pending().await,
    }
}
