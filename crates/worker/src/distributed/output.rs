//! The outputs of jobs.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::runtime::Handle;
use trommel_storage::{FailureSummary, JobRecord, Opened, Summary};
use trommel_types::{Classification, Outcome};

use crate::distributed::claims::KvClaims;
use crate::distributed::record::{Job, JobModel};
use crate::distributed::registry::Registry;
use crate::distributed::request::{output_of, record_of};
use crate::distributed::sink_jobs::OpenJob;
use crate::rows::{CommittedRows, JobRows};
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
    let output = output_of(&job.request, &model.name, config)?;
    if job.request.options.dry_run {
        return Ok(Box::new(DryRun::new(record_of(job, model, config))));
    }
    let claims = KvClaims::new(registry, handle.clone(), &job.request.id, &model.name);
    let opened = output.open_leased(
        record_of(job, model, config),
        job.request.options.overwrite,
        Arc::new(claims),
    )?;
    Ok(match opened {
        Opened::Ready(sink) => Box::new(CommittedRows(sink)),
        Opened::Complete(summary) => Box::new(Finished(*summary)),
    })
}

/// Rows that are counted and thrown away.
struct DryRun {
    summary: Summary,
    /// Which rows have come, and when they were known.
    seen: BTreeMap<u64, i64>,
}

impl DryRun {
    fn new(job: JobRecord) -> Self {
        let summary = Summary {
            job_id: job.job_id,
            source: job.source,
            model: job.model,
            model_version: job.model_version,
            images: 0,
            ok: 0,
            failed: 0,
            failures: BTreeMap::new(),
            parts: Vec::new(),
        };
        Self {
            summary,
            seen: BTreeMap::new(),
        }
    }
}

impl crate::rows::Rows for DryRun {
    fn commit(&mut self, rows: Vec<Arc<Classification>>) -> Result<u64, WorkerError> {
        let before = self.seen.len();
        for row in rows {
            if self.seen.insert(row.image.index, row.finished_at).is_some() {
                continue;
            }
            self.summary.images += 1;
            match &row.outcome {
                Outcome::Ok(_) => self.summary.ok += 1,
                Outcome::Failed(failure) => {
                    self.summary.failed += 1;
                    let kind = failure.kind.as_str().to_owned();
                    let failures = self.summary.failures.entry(kind);
                    let failures = failures.or_insert_with(|| FailureSummary {
                        count: 0,
                        example: row.image.uri.clone(),
                        error: failure.error.clone(),
                    });
                    failures.count += 1;
                }
            }
        }
        Ok((self.seen.len() - before) as u64)
    }

    fn committed(&self) -> u64 {
        self.seen.len() as u64
    }
}

impl JobRows for DryRun {
    fn summary(&self) -> Summary {
        self.summary.clone()
    }

    /// Without the first fifth, in which models are loaded and queues filled.
    fn rate(&self) -> Option<f64> {
        let mut times: Vec<i64> = self.seen.values().copied().collect();
        times.sort_unstable();
        let counted = &times[times.len() / 5..];
        let seconds = (counted.last()? - counted.first()?) as f64 / 1e6;
        (seconds > 0.0).then(|| (counted.len() - 1) as f64 / seconds)
    }

    fn finish(self: Box<Self>) -> Result<Summary, WorkerError> {
        Ok(self.summary)
    }
}

/// Rows of a job whose end was reached before its record said so.
struct Finished(Summary);

impl crate::rows::Rows for Finished {
    fn commit(&mut self, _: Vec<Arc<Classification>>) -> Result<u64, WorkerError> {
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
