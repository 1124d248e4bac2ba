use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use trommel_infer::Wanted;
use trommel_preprocess::Plan;
use trommel_queue::Origin;
use trommel_types::{ImageRef, JobModel, Mode, PreparedImage};

use crate::WorkerError;
use crate::clock::now;
use crate::fault::TaskError;
use crate::tried::Tried;

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

impl From<&JobModel> for ModelId {
    fn from(model: &JobModel) -> Self {
        Self {
            name: model.name.as_str().into(),
            version: model.version.as_str().into(),
        }
    }
}

/// A model, and how images are prepared for it.
#[derive(Debug, Clone)]
pub(crate) struct PlannedModel {
    pub(crate) id: ModelId,
    pub(crate) plan: Arc<Plan>,
    /// Of a cascade: how they are prepared for its large model, whose pixels go behind.
    pub(crate) also: Option<Arc<Plan>>,
}

impl PlannedModel {
    /// All its plans.
    pub(crate) fn plans(&self) -> impl Iterator<Item = &Plan> {
        std::iter::once(&*self.plan).chain(self.also.as_deref())
    }
}

/// What preprocess has to know of a job: the models that each image is prepared for.
#[derive(Debug, Clone)]
pub(crate) struct JobPlan {
    pub(crate) models: Arc<[PlannedModel]>,
    /// How much its tensors may differ from the reference's.
    pub(crate) mode: Mode,
    /// Whether its rows hold perceptual hashes, in the last of its columns.
    pub(crate) phash: bool,
    /// What its rows hold.
    pub(crate) rows: Arc<Wanted>,
    /// Columns of its source, and that of the perceptual hash.
    pub(crate) columns: usize,
    /// Time from the queueing of an image after which it is not worked on any more.
    pub(crate) image_deadline: Option<Duration>,
}

impl JobPlan {
    /// When the deadline of an image passes that came from there, in microseconds since the Unix epoch.
    pub(crate) fn due_at(&self, origin: &Origin) -> Option<i64> {
        let due = origin.stored()?.checked_add(self.image_deadline?)?;
        let since = due.duration_since(UNIX_EPOCH).ok()?;
        i64::try_from(since.as_micros()).ok()
    }
}

/// Refuses work whose deadline has passed.
///
/// # Errors
/// [`TaskError::Expired`] then.
pub(crate) fn check_due(due_at: Option<i64>) -> Result<(), TaskError> {
    match due_at {
        Some(due_at) if due_at <= now() => Err(TaskError::Expired),
        _ => Ok(()),
    }
}

/// Where preprocess and infer look up jobs.
#[async_trait]
pub(crate) trait Jobs: Send + Sync {
    /// The plan of a job.
    ///
    /// # Errors
    /// What is wrong with the job, or why it cannot be looked up.
    async fn plan(&self, job: &str) -> Result<Planned, WorkerError>;

    /// What the rows of a job hold.
    ///
    /// # Errors
    /// As [`Jobs::plan`].
    async fn rows(&self, job: &str) -> Result<Arc<Wanted>, WorkerError>;

    /// How many columns its rows have from its source; what a model answers comes behind them.
    ///
    /// # Errors
    /// As [`Jobs::plan`].
    async fn columns(&self, job: &str) -> Result<usize, WorkerError>;

    /// Whether the rows of a job are no longer needed, as far as is known here.
    fn is_over(&self, _job: &str) -> bool {
        false
    }

    /// Ends the job that an error is the fault of.
    ///
    /// # Errors
    /// When that ends this process too, or the job's record cannot be written.
    async fn fail(&self, job: &str, error: WorkerError) -> Result<(), WorkerError>;

    /// Notes that work on an image begins, and gives how often a process has died at it before, where nobody
    /// else counts that.
    fn begin(&self, _image: &ImageRef) -> u32 {
        0
    }

    /// Notes that an image has an outcome.
    fn end(&self, _image: &ImageRef) {}

    /// Counts that work on a message that came repeatedly is begun, and gives how often it was.
    ///
    /// # Errors
    /// When that cannot be counted.
    async fn try_again(
        &self,
        stage: &'static str,
        job: &str,
        message: &str,
        attempt: u32,
    ) -> Result<u32, WorkerError>;
}

/// What is known of a job.
#[derive(Debug)]
pub(crate) enum Planned {
    /// Its images are to be worked on.
    Running(JobPlan),
    /// It has ended: its rows are no longer needed.
    Over,
    /// There is no record of it.
    Unknown,
}

/// The one job of an embedded run.
pub(crate) struct OneJob {
    pub(crate) plan: JobPlan,
    /// None of a run whose rows are kept nowhere.
    pub(crate) tried: Option<Arc<Tried>>,
}

#[async_trait]
impl Jobs for OneJob {
    async fn plan(&self, _: &str) -> Result<Planned, WorkerError> {
        Ok(Planned::Running(self.plan.clone()))
    }

    async fn rows(&self, _: &str) -> Result<Arc<Wanted>, WorkerError> {
        Ok(Arc::clone(&self.plan.rows))
    }

    async fn columns(&self, _: &str) -> Result<usize, WorkerError> {
        Ok(self.plan.columns)
    }

    async fn fail(&self, _: &str, error: WorkerError) -> Result<(), WorkerError> {
        Err(error)
    }

    fn begin(&self, image: &ImageRef) -> u32 {
        let tried = self.tried.as_ref();
        tried.map_or(0, |tried| tried.begin(image.index))
    }

    fn end(&self, image: &ImageRef) {
        if let Some(tried) = &self.tried {
            tried.end(image.index);
        }
    }

    async fn try_again(
        &self,
        _: &'static str,
        _: &str,
        _: &str,
        attempt: u32,
    ) -> Result<u32, WorkerError> {
        Ok(attempt)
    }
}
