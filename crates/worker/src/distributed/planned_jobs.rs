//! The models of each job, for preprocess.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;

use crate::WorkerError;
use crate::distributed::record::{Job, JobState};
use crate::distributed::registry::{LiveJobs, Registry};
use crate::distributed::repository::Repository;
use crate::job::{JobPlan, Jobs};

/// Looks jobs up in the broker and their models in the repository; remembers both.
pub(crate) struct PlannedJobs {
    pub(crate) jobs: Arc<LiveJobs>,
    pub(crate) registry: Registry,
    pub(crate) repository: Arc<Repository>,
    pub(crate) planned: Mutex<HashMap<String, JobPlan>>,
}

impl PlannedJobs {
    async fn job(&self, id: &str) -> Result<Option<Arc<Job>>, WorkerError> {
        match self.jobs.find(id).await? {
            // Tasks are there, so that is old news.
            Some(job) if job.state == JobState::Queued => {
                Ok(self.registry.job(id).await?.map(Arc::new))
            }
            job => Ok(job),
        }
    }

    fn remembered(&self) -> std::sync::MutexGuard<'_, HashMap<String, JobPlan>> {
        self.planned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Jobs for PlannedJobs {
    async fn plan(&self, id: &str) -> Result<Option<JobPlan>, WorkerError> {
        let Some(job) = self.job(id).await?.filter(|job| !job.state.is_final()) else {
            self.remembered().remove(id);
            return Ok(None);
        };
        if let Some(plan) = self.remembered().get(id) {
            return Ok(Some(plan.clone()));
        }
        let repository = Arc::clone(&self.repository);
        let plan = tokio::task::spawn_blocking(move || {
            let models = job.models.iter().map(|model| repository.planned(model));
            Ok::<_, WorkerError>(JobPlan {
                models: models.collect::<Result<_, _>>()?,
            })
        });
        let plan = plan.await.map_err(|_| WorkerError::Panicked {
            what: "loading a model's plan",
        })??;
        self.remembered().insert(id.to_owned(), plan.clone());
        Ok(Some(plan))
    }

    fn is_over(&self, id: &str) -> bool {
        self.jobs.known(id).is_some_and(|job| job.state.is_final())
    }
}
