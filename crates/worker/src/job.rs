use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use trommel_infer::Wanted;
use trommel_preprocess::Plan;
use trommel_queue::Origin;
use trommel_types::{Classification, ImageRef, JobModel, Mode, PreparedImage};

use crate::WorkerError;
use crate::clock::now;
use crate::fault::TaskError;

/// The model of an outcome.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ModelId {
    pub(crate) name: Arc<str>,
    pub(crate) version: Arc<str>,
}

impl ModelId {
    /// The model of a tensor.
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

/// A model, and its preprocessing.
#[derive(Debug, Clone)]
pub(crate) struct PlannedModel {
    pub(crate) id: ModelId,
    pub(crate) plan: Arc<Plan>,
    /// For a cascade: the preprocessing of its large model, whose pixels follow.
    pub(crate) also: Option<Arc<Plan>>,
}

impl PlannedModel {
    /// All its plans.
    pub(crate) fn plans(&self) -> impl Iterator<Item = &Plan> {
        std::iter::once(&*self.plan).chain(self.also.as_deref())
    }

    /// Bytes of a tensor, without images that are sent as files to a prompt's servers.
    pub(crate) fn tensor_bytes(&self) -> usize {
        let shapes = self.plans().filter_map(Plan::shape);
        shapes.map(|shape| shape.len()).sum()
    }
}

/// What preprocess needs to know about a job: the models to prepare each image for.
#[derive(Debug, Clone)]
pub(crate) struct JobPlan {
    pub(crate) models: Arc<[PlannedModel]>,
    /// How much its tensors may differ from the reference.
    pub(crate) mode: Mode,
    /// Whether its rows include perceptual hashes, in the last of its columns.
    pub(crate) phash: bool,
    /// Row options.
    pub(crate) rows: Arc<Wanted>,
    /// Columns of its source, and of the perceptual hash.
    pub(crate) columns: usize,
    /// Time after an image is queued from which it is discarded.
    pub(crate) image_deadline: Option<Duration>,
}

impl JobPlan {
    /// The deadline of an image from this delivery, in microseconds since the Unix epoch.
    pub(crate) fn due_at(&self, origin: &Origin) -> Option<i64> {
        let due = origin.stored()?.checked_add(self.image_deadline?)?;
        let since = due.duration_since(UNIX_EPOCH).ok()?;
        i64::try_from(since.as_micros()).ok()
    }
}

/// Refuses work after its deadline.
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
    /// The plan of an image's job.
    ///
    /// # Errors
    /// A problem with the job, or why it cannot be looked up.
    async fn plan(&self, image: &ImageRef) -> Result<Planned, WorkerError>;

    /// The options of an image's row.
    ///
    /// # Errors
    /// As [`Jobs::plan`].
    async fn rows(&self, image: &ImageRef) -> Result<Arc<Wanted>, WorkerError>;

    /// Number of columns from the source; those of the model follow.
    ///
    /// # Errors
    /// As [`Jobs::plan`].
    async fn columns(&self, job: &str) -> Result<usize, WorkerError>;

    /// Whether the rows of a job are no longer needed, as far as known here.
    fn is_over(&self, _job: &str) -> bool {
        false
    }

    /// Ends the job that caused an error.
    ///
    /// # Errors
    /// If that ends this process too, or the job's record cannot be written.
    async fn fail(&self, job: &str, error: WorkerError) -> Result<(), WorkerError>;

    /// Records that work on an image begins, and returns how often a process died during it before,
    /// if nobody else counts that.
    fn begin(&self, _image: &ImageRef) -> u32 {
        0
    }

    /// Records that a row of an image is stored.
    fn end(&self, _row: &Classification) {}

    /// Counts that work on a redelivered message begins, and returns how often it has.
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

/// The state of a job.
#[derive(Debug)]
pub(crate) enum Planned {
    /// Its images are to be processed.
    Running(JobPlan),
    /// It has ended: its rows are no longer needed.
    Over,
    /// There is no record of it.
    Unknown,
}
