use std::sync::Arc;

use async_trait::async_trait;
use trommel_preprocess::Plan;
use trommel_types::PreparedImage;

use crate::WorkerError;

/// The model that an outcome is of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ModelId {
    pub(crate) name: Arc<str>,
    pub(crate) version: Arc<str>,
}

impl ModelId {
    /// The model that a tensor was made for.
    pub(crate) fn of(tensor: &PreparedImage) -> Self {
        Self {
            name: Arc::clone(&tensor.model),
            version: Arc::clone(&tensor.model_version),
        }
    }
}

/// A model, and how images are prepared for it.
#[derive(Debug, Clone)]
pub(crate) struct PlannedModel {
    pub(crate) id: ModelId,
    pub(crate) plan: Arc<Plan>,
}

/// What preprocess has to know of a job: the models that each image is prepared for.
#[derive(Debug, Clone)]
pub(crate) struct JobPlan {
    pub(crate) models: Arc<[PlannedModel]>,
}

/// Where preprocess and infer look up jobs.
#[async_trait]
pub(crate) trait Jobs: Send + Sync {
    /// The plan of a job; `None` when nobody waits for its rows any more.
    ///
    /// # Errors
    /// What stops this worker: it cannot prepare for a model of the job.
    async fn plan(&self, job: &str) -> Result<Option<JobPlan>, WorkerError>;

    /// Whether nobody waits for the rows of a job any more, as far as is known here.
    fn is_over(&self, _job: &str) -> bool {
        false
    }
}

/// The one job of an embedded run.
pub(crate) struct OneJob(pub(crate) JobPlan);

#[async_trait]
impl Jobs for OneJob {
    async fn plan(&self, _: &str) -> Result<Option<JobPlan>, WorkerError> {
        Ok(Some(self.0.clone()))
    }
}
