//! The outputs of jobs.

use std::sync::Arc;

use trommel_sink::{Leased, Preconditions};
use trommel_types::JobModel;

use crate::distributed::claims::KvClaims;
use crate::distributed::job_store::JobStore;
use crate::distributed::record::Job;
use crate::distributed::request::{output_of, record_of};
use crate::distributed::sink_jobs::{OpenJob, OpenedJob};
use crate::{Allowed, TrialOutcome, TrialSink, WorkerConfig, WorkerError};

/// Opens outputs with this process's configuration.
pub(crate) fn opener(config: &WorkerConfig, store: &JobStore) -> OpenJob {
    let (config, store) = (config.clone(), store.clone());
    Arc::new(move |job, model, preconditions| {
        let (config, store) = (config.clone(), store.clone());
        let (job, model) = (job.clone(), model.clone());
        Box::pin(async move { open(&config, &store, &job, &model, preconditions).await })
    })
}

async fn open(
    config: &WorkerConfig,
    store: &JobStore,
    job: &Job,
    model: &JobModel,
    preconditions: Preconditions,
) -> Result<OpenedJob, WorkerError> {
    let output = output_of(&job.spec.request, &model.name, config)?;
    let allowed = Allowed::new(&config.access)
        .map_err(|problems| WorkerError::Settings(problems.join("; ")))?;
    if !job.spec.request.options.dry_run {
        // A sink's access may be more limited than that of the worker that began the job.
        let output = &job.spec.request.output;
        let allowed = allowed.check_output(output);
        allowed.map_err(|refusal| WorkerError::Request(refusal.to_string()))?;
    }
    let (record, trial) = (record_of(job, model), TrialOutcome::default());
    if job.spec.request.options.dry_run {
        let answers = job.spec.answers.get(&model.name);
        let answers = answers.map_or(&[][..], Vec::as_slice);
        let sink = TrialSink::new(record, output.format(), answers, Arc::clone(&trial));
        let sink = Box::new(sink);
        return Ok(OpenedJob { sink, trial });
    }
    let lease = Leased {
        overwrite: job.spec.request.options.overwrite,
        claims: Arc::new(KvClaims::new(store, job, &model.name)),
        preconditions,
    };
    let opened = output.open_leased(record.clone(), lease).await?;
    let sink = opened.into_sink(&record);
    Ok(OpenedJob { sink, trial })
}
