//! Jobs that add rows to existing ones, for images that have none (`skip_existing`).
//!
//! Such a job has its own run among those of its base, the job that was there first, like a retry
//! of failed rows: its rows count once it is complete, in addition to those of its base, and in
//! place of those of changed images. The rows that count when it begins do not change until it
//! ends.

use trommel_sink::Existing;
use trommel_types::{JobBase, JobModel, JobSpec};

use crate::WorkerError;
use crate::distributed::ingest_jobs::Context;
use crate::distributed::record::Job;
use crate::distributed::request::{output_of, record};

/// The base of a job that was begun as `spec`; `None` if there are no rows yet.
pub(crate) async fn base(ctx: &Context, spec: &JobSpec) -> Result<Option<JobBase>, WorkerError> {
    let mut base: Option<Option<JobBase>> = None;
    for model in &spec.models {
        let output = output_of(&spec.request, &model.name, &ctx.config)?;
        let found = output.base(&record(spec, model, 0), None).await;
        let found = found.map_err(refused)?.map(|found| JobBase {
            job: found.job_id,
            run: found.run,
            number: found.last,
        });
        base = match (base, found) {
            (None, found) => Some(found),
            (Some(None), None) => Some(None),
            (Some(Some(one)), Some(other)) if one.job == other.job && one.run == other.run => {
                let number = one.number.max(other.number);
                Some(Some(JobBase { number, ..one }))
            }
            _ => {
                return Err(WorkerError::Request(format!(
                    "the rows of the models {} in {} are not those of one job, so no index would be right for all of them; submit a job for each model",
                    spec.request.models.join(", "),
                    spec.request.output
                )));
            }
        };
    }
    let Some(found) = base.flatten() else {
        return Ok(None);
    };
    still(ctx, &found.job).await?;
    let number = next_number(ctx, spec, found.number).await?;
    Ok(Some(JobBase { number, ..found }))
}

/// Refuses a base whose rows may still change.
async fn still(ctx: &Context, job: &str) -> Result<(), WorkerError> {
    let mut id = Some(job.to_owned());
    while let Some(job) = match id.take() {
        None => None,
        Some(id) => ctx.store.job(&id).await?,
    } {
        if !job.state.is_final() {
            return Err(WorkerError::Request(format!(
                "job {} writes to {}; wait for its end, or cancel it",
                job.id(),
                job.spec.request.output
            )));
        }
        id = job.last_retry();
    }
    Ok(())
}

/// The number of a run that adds rows to a job, where `last` is the last one with rows there: above
/// all numbers ever given at the output, and the same if it is requested again.
pub(crate) async fn next_number(
    ctx: &Context,
    spec: &JobSpec,
    last: u32,
) -> Result<u32, WorkerError> {
    let (output, id) = (&spec.request.output, spec.id());
    loop {
        let Some((mut holder, revision)) = ctx.store.output_holder(output).await? else {
            return Ok(last + 1); // a table, which nobody holds
        };
        if holder.job != id {
            let (output, job) = (output.clone(), holder.job);
            return Err(WorkerError::OutputBusy { output, job });
        }
        if let Some(number) = holder.number {
            return Ok(number);
        }
        let number = holder.last.max(last) + 1;
        (holder.last, holder.number) = (number, Some(number));
        if ctx.store.set_holder(output, &holder, revision).await? {
            return Ok(number);
        }
    }
}

/// The models of a job that have rows at its output, and the number of the last run with rows there.
/// A job may have ended before one of its models had any.
pub(crate) async fn models_with_rows(
    ctx: &Context,
    job: &Job,
) -> Result<(Vec<JobModel>, u32), WorkerError> {
    let (mut models, mut last) = (Vec::new(), 0);
    for model in job.models() {
        let output = output_of(&job.spec.request, &model.name, &ctx.config)?;
        let record = record(&job.spec, model, 0);
        let found = output.base(&record, Some(&record.job_id)).await;
        if let Some(found) = found.map_err(refused)? {
            models.push(model.clone());
            last = found.last.max(last);
        }
    }
    Ok((models, last))
}

/// The images that have valid rows next to those of a job; with several models, rows of all of
/// them.
pub(crate) async fn existing(ctx: &Context, job: &Job) -> Result<Existing, WorkerError> {
    let known = ctx.store.progress(job.id()).await?.rows;
    let mut all: Option<Existing> = None;
    for model in job.models() {
        let rows = known.get(&model.name);
        let preconditions = rows.map(|rows| rows.preconditions).unwrap_or_default();
        let mut opened = (ctx.open)(job, model, preconditions).await?;
        let own = opened.sink.existing().await?;
        all = Some(match all {
            None => own,
            Some(all) => all.and(own),
        });
    }
    Ok(all.unwrap_or_default())
}

/// A problem with an output is not the source's fault.
fn refused(error: trommel_storage::StorageError) -> WorkerError {
    match crate::fault::is_transient(&error) {
        true => error.into(),
        false => WorkerError::Request(error.to_string()),
    }
}
