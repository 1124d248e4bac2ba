//! The models of each job, for preprocess and infer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use trommel_infer::Wanted;
use trommel_queue::Broker;
use trommel_types::ImageRef;

use crate::WorkerError;
use crate::distributed::cascade_jobs::JobRows;
use crate::distributed::ends;
use crate::distributed::job_store::JobStore;
use crate::distributed::live_jobs::LiveJobs;
use crate::distributed::names::Subjects;
use crate::distributed::record::{Job, JobState, Reason, ReasonKind};
use crate::distributed::repository::Repository;
use crate::fault::Scope;
use crate::job::{JobPlan, Jobs, Planned};

/// Looks up jobs in the broker and their models in the repository, and caches both.
pub(crate) struct PlannedJobs {
    live: Arc<LiveJobs>,
    store: JobStore,
    broker: Broker,
    subjects: Subjects,
    repository: Arc<Repository>,
    /// Largest tensor that fits into a message; `None` if tensors do not travel.
    max_tensor: Option<usize>,
    planned: Mutex<HashMap<String, JobPlan>>,
    rows: Mutex<HashMap<String, JobRows>>,
}

impl PlannedJobs {
    pub(crate) fn new(
        live: Arc<LiveJobs>,
        store: JobStore,
        broker: Broker,
        subjects: Subjects,
        repository: Arc<Repository>,
        max_tensor: Option<usize>,
    ) -> Self {
        Self {
            live,
            store,
            broker,
            subjects,
            repository,
            max_tensor,
            planned: Mutex::default(),
            rows: Mutex::default(),
        }
    }

    fn remembered(&self) -> MutexGuard<'_, HashMap<String, JobPlan>> {
        self.planned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known_rows(&self) -> MutexGuard<'_, HashMap<String, JobRows>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn make(&self, job: Arc<Job>) -> Result<JobPlan, WorkerError> {
        let (repository, max_tensor) = (Arc::clone(&self.repository), self.max_tensor);
        let plan = tokio::task::spawn_blocking(move || {
            let reference = job.spec.request.rows.reference;
            let options = &job.spec.request.options;
            repository.know(&job.spec);
            let models = job.models().iter().map(|model| {
                let planned = repository.planned(model, reference)?;
                if let Some(max) = max_tensor {
                    Repository::check_payload(&planned, max)?;
                }
                Ok(planned)
            });
            Ok::<_, WorkerError>(JobPlan {
                models: models.collect::<Result<_, WorkerError>>()?,
                mode: job.spec.request.rows.mode,
                phash: job.spec.request.rows.phash,
                rows: Arc::new(Wanted::from(&job.spec.request.rows)),
                columns: job.spec.columns.len(),
                image_deadline: options.image_deadline_ms.map(Duration::from_millis),
            })
        });
        plan.await.map_err(|_| WorkerError::Panicked {
            what: "loading a model's plan",
        })?
    }
}

#[async_trait]
impl Jobs for PlannedJobs {
    async fn plan(&self, image: &ImageRef) -> Result<Planned, WorkerError> {
        let id = &*image.job;
        let Some(job) = self.live.find(id).await? else {
            return Ok(Planned::Unknown);
        };
        if job.state.is_final() {
            self.remembered().remove(id);
            return Ok(Planned::Over);
        }
        if let Some(plan) = self.remembered().get(id) {
            return Ok(Planned::Running(plan.clone()));
        }
        if job.state == JobState::Queued {
            // The job has tasks, so its record is newer than what was read.
            return Err(WorkerError::NotBegun { job: id.to_owned() });
        }
        let plan = self.make(job).await?;
        self.remembered().insert(id.to_owned(), plan.clone());
        Ok(Planned::Running(plan))
    }

    async fn rows(&self, image: &ImageRef) -> Result<Arc<Wanted>, WorkerError> {
        let (id, index) = (&*image.job, image.index);
        if let Some(rows) = self.known_rows().get(id).and_then(|known| known.of(index)) {
            return Ok(rows);
        }
        let not_begun = || WorkerError::NotBegun { job: id.to_owned() };
        let job = self.live.find(id).await?.ok_or_else(not_begun)?;
        let found = JobRows::find(&self.store, &job).await?;
        let mut known = self.known_rows();
        known.retain(|id, _| !self.live.is_over(id));
        let known = known.entry(id.to_owned());
        // Engines compare options by address, so what was found first stays.
        let known = known.and_modify(|known| known.complete(&found));
        known.or_insert(found).of(index).ok_or_else(not_begun)
    }

    async fn columns(&self, id: &str) -> Result<usize, WorkerError> {
        match self.live.find(id).await? {
            Some(job) => Ok(job.spec.columns.len()),
            None => Err(WorkerError::NotBegun { job: id.to_owned() }),
        }
    }

    fn is_over(&self, id: &str) -> bool {
        self.live.is_over(id)
    }

    async fn fail(&self, id: &str, error: WorkerError) -> Result<(), WorkerError> {
        let kind = match error.scope() {
            Scope::Job(kind) => kind,
            _ => ReasonKind::Request,
        };
        tracing::error!(job = id, %error, "the job fails");
        self.remembered().remove(id);
        let reason = Reason::new(kind, error.to_string());
        ends::fail(&self.store, &self.broker, &self.subjects, id, reason).await
    }

    async fn try_again(
        &self,
        stage: &'static str,
        job: &str,
        message: &str,
        _: u32,
    ) -> Result<u32, WorkerError> {
        self.store.try_again(stage, job, message).await
    }
}
