//! A process that holds one or several roles over the broker.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use trommel_infer::Runtime;
use trommel_queue::Broker;
use trommel_storage::{SourceOptions, fetcher};

use crate::distributed::infer_models::{self, ModelEngines};
use crate::distributed::names::Subjects;
use crate::distributed::planned_jobs::PlannedJobs;
use crate::distributed::presence::{self, Presence, StageWork};
use crate::distributed::queues::{self, Ends};
use crate::distributed::registry::{LiveJobs, Registry};
use crate::distributed::repository::Repository;
use crate::distributed::{control, ingest_jobs, output, sink_jobs, why};
use crate::hop::{LocalHop, QueueHop, TensorHop};
use crate::infer::Engines;
use crate::intake::Intake;
use crate::job::Jobs;
use crate::settle::Settler;
use crate::{Progress, Readiness, WorkerConfig, WorkerError, metrics, preprocess};

/// Longest wait for the broker at the end.
const FLUSH: Duration = Duration::from_secs(2);

/// A part of the work that scales on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Lists sources and answers the control API.
    Ingest,
    /// Fetches, decodes and resizes.
    Preprocess,
    /// Runs models.
    Infer,
    /// Commits rows.
    Sink,
}

impl Role {
    /// All roles, in flow order.
    pub const ALL: [Self; 4] = [Self::Ingest, Self::Preprocess, Self::Infer, Self::Sink];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ingest => "ingest",
            Self::Preprocess => "preprocess",
            Self::Infer => "infer",
            Self::Sink => "sink",
        }
    }
}

/// The way of a tensor from preprocess to infer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HopKind {
    /// Through the broker, to any infer worker.
    #[default]
    Jetstream,
    /// In memory, for a process that holds both roles.
    Local,
}

/// What a worker process is to be.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// Its roles.
    pub roles: Vec<Role>,
    /// The models: a folder, or `s3://bucket/prefix`.
    pub model_repository: String,
    /// Where models from a bucket are copied to.
    pub model_cache: PathBuf,
    /// The way of tensors.
    pub tensor_hop: HopKind,
    /// ONNX Runtime's shared library, if it is named.
    pub onnxruntime: Option<PathBuf>,
}

/// A worker, connected and checked.
pub struct Worker {
    roles: Vec<Role>,
    hop: HopKind,
    config: WorkerConfig,
    subjects: Subjects,
    broker: Broker,
    registry: Registry,
    live: Arc<LiveJobs>,
    repository: Arc<Repository>,
    runtime: Option<Runtime>,
    presence: Presence,
    readiness: Readiness,
}

impl Worker {
    /// Connects and checks everything that the roles need, so that what is missing is told before
    /// any work.
    ///
    /// # Errors
    /// When the broker, ONNX Runtime, the device or the model repository is not there or not fit,
    /// or another worker has another content under a name and version of a model.
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
            let (models, loaded) = (config.infer.model_options()?, runtime.clone());
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
        let registry = Registry::new(broker.kv().await?);
        if has(Role::Preprocess) && options.tensor_hop == HopKind::Jetstream {
            // One that cannot be read is told when a job names it.
            let models = repository.names_here().into_iter();
            for model in models.filter_map(|name| repository.model_here(&name).ok()) {
                Repository::check_payload(&model, broker.max_payload())?;
            }
        }
        let presence = Presence::announce(&registry, &options.roles, &repository).await?;
        let readiness = Readiness::default();
        readiness.needs(broker.clone(), Arc::clone(&repository));
        Ok(Self {
            hop: options.tensor_hop,
            subjects: Subjects::new(&config.broker.prefix),
            live: Arc::new(LiveJobs::watch(registry.clone()).await?),
            roles: options.roles,
            config,
            broker,
            registry,
            repository,
            runtime,
            presence,
            readiness,
        })
    }

    /// Whether it is at work, for those who ask from outside.
    pub fn readiness(&self) -> Readiness {
        self.readiness.clone()
    }

    /// Works until `stop` fires, then finishes what is in hand within `shutdown.drain-timeout` and
    /// gives the rest back. Calls `ready` once all roles are at work.
    ///
    /// # Errors
    /// What stops a role for good.
    pub async fn run(
        self,
        stop: CancellationToken,
        ready: impl FnOnce(),
    ) -> Result<(), WorkerError> {
        let mut roles = JoinSet::new();
        let halt = stop.child_token();
        let engines = self.spawn(&mut roles, &halt).await?;
        let (held, config) = (self.roles.clone(), self.config.clone());
        roles.spawn(presence::keep(
            self.registry.clone(),
            self.presence.clone(),
            move || work(&held, &config, engines.as_deref()),
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
        // What was settled last is to reach the server before the process is gone.
        if let Ok(Err(error)) = timeout(FLUSH, self.broker.flush()).await {
            tracing::warn!(%error, "the last words to the broker may be lost");
        }
        first.and(drained)
    }

    async fn spawn(
        &self,
        roles: &mut JoinSet<Result<(), WorkerError>>,
        halt: &CancellationToken,
    ) -> Result<Option<Arc<ModelEngines>>, WorkerError> {
        let results = queues::results(&self.broker, &self.subjects).await?;
        let (said, heard) = mpsc::channel(64);
        let settler = Settler {
            results,
            retry: self.config.retry.clone(),
            progress: Arc::new(Progress::default()),
            said: Some(said),
        };
        roles.spawn(why::note(self.registry.clone(), heard, halt.clone()));
        let jobs: Arc<dyn Jobs> = Arc::new(PlannedJobs {
            jobs: Arc::clone(&self.live),
            registry: self.registry.clone(),
            repository: Arc::clone(&self.repository),
            planned: Mutex::default(),
        });
        let engines = self.runtime.clone().map(|runtime| {
            let (repository, config) = (Arc::clone(&self.repository), self.config.infer.clone());
            let readiness = self.readiness.clone();
            Arc::new(ModelEngines::new(repository, runtime, config, readiness))
        });
        if let Some(engines) = &engines {
            // A stop does not wait for a model.
            let loaded = halt.run_until_cancelled(engines.preload());
            loaded.await.unwrap_or(Ok(()))?;
        }
        for role in &self.roles {
            metrics::begin(*role);
            match (role, &engines) {
                (Role::Ingest, _) => self.spawn_ingest(roles, halt).await?,
                (Role::Preprocess, _) => {
                    let hop = self.hop(engines.as_ref(), &settler).await?;
                    let context = self.preprocess(Arc::clone(&jobs), hop, settler.clone());
                    roles.spawn(preprocess::run(Arc::new(context.await?), halt.clone()));
                }
                (Role::Infer, Some(engines)) => {
                    let context = infer_models::Context {
                        broker: self.broker.clone(),
                        subjects: self.subjects.clone(),
                        config: self.config.clone(),
                        live: Arc::clone(&self.live),
                        jobs: Arc::clone(&jobs),
                        engines: Arc::clone(engines),
                        settler: settler.clone(),
                    };
                    roles.spawn(infer_models::run(Arc::new(context), halt.clone()));
                }
                (Role::Infer, None) => {}
                (Role::Sink, _) => {
                    let context = sink_jobs::Context {
                        broker: self.broker.clone(),
                        subjects: self.subjects.clone(),
                        registry: self.registry.clone(),
                        jobs: Arc::clone(&self.live),
                        config: self.config.clone(),
                        owner: self.presence.id().to_owned(),
                        open: output::opener(&self.config, &self.registry),
                    };
                    roles.spawn(sink_jobs::run(Arc::new(context), halt.clone()));
                }
            }
        }
        Ok(engines)
    }

    async fn spawn_ingest(
        &self,
        roles: &mut JoinSet<Result<(), WorkerError>>,
        halt: &CancellationToken,
    ) -> Result<(), WorkerError> {
        let (broker, subjects, config) = (&self.broker, &self.subjects, &self.config);
        let models = self.repository.names_here();
        queues::ensure_consumers(broker, subjects, config, &models).await?;
        let jobs = queues::jobs(broker, subjects, config, Ends::Both).await?;
        let context = ingest_jobs::Context {
            intake: Intake::new(
                Role::Ingest,
                Arc::clone(&jobs),
                config.ingest.max_jobs.get(),
            ),
            tasks: queues::tasks(broker, subjects, config, Ends::Publish).await?,
            registry: self.registry.clone(),
            jobs: Arc::clone(&self.live),
            repository: Arc::clone(&self.repository),
            config: config.clone(),
            subjects: subjects.clone(),
            broker: broker.clone(),
        };
        roles.spawn(ingest_jobs::run(Arc::new(context), halt.clone()));
        let control = control::Context {
            broker: broker.clone(),
            prefix: config.broker.prefix.clone(),
            subjects: subjects.clone(),
            registry: self.registry.clone(),
            repository: Arc::clone(&self.repository),
            jobs,
        };
        let service = control::start(&control).await?;
        roles.spawn(control::run(Arc::new(control), service, halt.clone()));
        Ok(())
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
        jobs: Arc<dyn Jobs>,
        output: Arc<dyn TensorHop>,
        settler: Settler,
    ) -> Result<preprocess::Context, WorkerError> {
        let config = &self.config.preprocess;
        let mut in_flight = config.in_flight();
        if self.hop == HopKind::Local {
            // A task stays in hand until its image is classified.
            let infer = &self.config.infer;
            in_flight += infer.tensors_in_hand(infer.largest_batch());
        }
        let tasks = queues::tasks(&self.broker, &self.subjects, &self.config, Ends::Both).await?;
        let source = SourceOptions {
            s3: self.config.s3.clone(),
            ..SourceOptions::default()
        };
        Ok(preprocess::Context {
            intake: Intake::new(Role::Preprocess, tasks, in_flight),
            jobs,
            source: fetcher(&source),
            pool: preprocess::PreparePool::start(config)?,
            output,
            progress: Arc::clone(&settler.progress),
            settler,
        })
    }
}

/// What this process has done in each of its roles.
fn work(roles: &[Role], config: &WorkerConfig, engines: Option<&ModelEngines>) -> Vec<StageWork> {
    let of = |role: &Role| {
        if let (Role::Infer, Some(engines)) = (role, engines) {
            return engines.work();
        }
        let (images, busy) = metrics::done(*role);
        StageWork {
            role: *role,
            threads: match role {
                Role::Preprocess => config.preprocess.threads(),
                _ => 1,
            },
            images,
            busy_seconds: busy.as_secs_f64(),
        }
    };
    roles.iter().map(of).collect()
}

/// The end of the next role; pending while there is none.
async fn next(roles: &mut JoinSet<Result<(), WorkerError>>) -> Result<(), WorkerError> {
    match roles.join_next().await {
        Some(joined) => joined.unwrap_or(Err(WorkerError::Panicked { what: "a role" })),
        None => std::future::pending().await,
    }
}
