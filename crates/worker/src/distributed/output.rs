//! The outputs of jobs: parts in a folder or a bucket.

use std::sync::Arc;

use tokio::runtime::Handle;
use trommel_storage::{
    BucketSink, Claims, Destination, JobRecord, Opened, PartSink, StorageError, StorageErrorKind,
    Summary,
};

use crate::distributed::claims::KvClaims;
use crate::distributed::record::{Job, JobModel};
use crate::distributed::registry::Registry;
use crate::distributed::request::{Output, output_of, record_of};
use crate::distributed::sink_jobs::OpenJob;
use crate::rows::JobRows;
use crate::{WorkerConfig, WorkerError};

/// Opens outputs with what this process is configured with. To be made on a thread of the runtime
/// that the broker's connection lives on.
pub(crate) fn opener(config: &WorkerConfig, registry: &Registry) -> OpenJob {
    let (config, registry, handle) = (config.clone(), registry.clone(), Handle::current());
    Arc::new(move |job, model| open(&config, &registry, &handle, job, model))
}

fn open(
    config: &WorkerConfig,
    registry: &Registry,
    handle: &Handle,
    job: &Job,
    model: &JobModel,
) -> Result<Box<dyn JobRows>, WorkerError> {
    let record = record_of(job, model, config);
    let overwrite = job.request.options.overwrite;
    Ok(match output_of(&job.request, &model.name, config)? {
        Output::Folder(folder) => match open_folder(&folder, record, overwrite)? {
            Opened::Ready(sink) => sink,
            Opened::Complete(summary) => Box::new(Finished(*summary)),
        },
        Output::Bucket(bucket) => {
            let (id, name) = (&job.request.id, &model.name);
            let claims: Arc<dyn Claims> =
                Arc::new(KvClaims::new(registry, handle.clone(), id, name));
            match BucketSink::open(&bucket, record, overwrite, Some(claims))? {
                Opened::Ready(sink) => sink,
                Opened::Complete(summary) => Box::new(Finished(*summary)),
            }
        }
    })
}

/// Opens a folder for this job alone. Only the first sink of a job finds another job's rows there;
/// the next ones find its own.
fn open_folder(
    folder: &Destination,
    record: JobRecord,
    overwrite: bool,
) -> Result<Opened, WorkerError> {
    let id = record.job_id.clone();
    let opened = PartSink::open_leased(folder, record.clone(), false);
    let is_own = match &opened {
        Ok(Opened::Ready(sink)) => sink.job_id() == id,
        Ok(Opened::Complete(summary)) => summary.job_id == id,
        Err(error) => !is_taken(error),
    };
    if is_own {
        return Ok(opened?);
    }
    if overwrite {
        drop(opened);
        return Ok(PartSink::open_leased(folder, record, true)?);
    }
    opened?;
    Err(WorkerError::Settings(format!(
        "{} holds rows of another job; choose another output, or submit with overwrite",
        folder.path().display()
    )))
}

/// Whether something else stands at the destination.
fn is_taken(error: &StorageError) -> bool {
    matches!(
        error.kind(),
        StorageErrorKind::OutputOfAnotherJob | StorageErrorKind::OutputExists
    )
}

/// Rows of a job whose end was reached before its record said so.
struct Finished(Summary);

impl crate::rows::Rows for Finished {
    fn commit(&mut self, _: Vec<Arc<trommel_types::Classification>>) -> Result<u64, WorkerError> {
        Ok(0) // all of them are committed
    }

    fn committed(&self) -> u64 {
        self.0.images
    }
}

impl JobRows for Finished {
    fn summary(&self) -> Summary {
        self.0.clone()
    }

    fn finish(self: Box<Self>) -> Result<Summary, WorkerError> {
        Ok(self.0)
    }
}
