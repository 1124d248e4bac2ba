//! What an ingest worker does for all jobs: it queues images again that the broker has lost, and
//! removes unneeded records.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use trommel_queue::Queue;
use trommel_types::JobRequest;

use crate::WorkerError;
use crate::clock::now;
use crate::distributed::ingest_jobs::Context;
use crate::distributed::job_lease::Part;
use crate::distributed::presence;
use crate::distributed::record::{Job, JobProgress};
use crate::distributed::status::waiting_rooms;

/// Time between two rounds.
const ROUND: Duration = Duration::from_secs(10);
/// Rounds between two checks for unneeded records.
const TIDY_EVERY: u32 = 30;

/// A job with missing rows and no messages in flight: since when, and how many rows it had.
type Quiet = HashMap<String, (Instant, u64)>;

/// Maintains all jobs until `shutdown` fires. Failures are retried in the next round.
pub(crate) async fn run(
    ctx: Arc<Context>,
    jobs: Arc<dyn Queue<JobRequest>>,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let (mut quiet, mut round) = (Quiet::new(), 0);
    while shutdown.run_until_cancelled(sleep(ROUND)).await.is_some() {
        if let Err(error) = ctx.queue_again(&*jobs, &mut quiet).await {
            tracing::warn!(%error, "lost images are looked for again later");
        }
        round += 1;
        if round % TIDY_EVERY == 0
            && let Err(error) = ctx.tidy().await
        {
            tracing::warn!(%error, "old records are removed later");
        }
    }
    Ok(())
}

impl Context {
    /// Lists jobs again whose listing has ended, which have no messages in any stream, and whose
    /// rows are incomplete: the broker has lost messages.
    async fn queue_again(
        &self,
        jobs: &dyn Queue<JobRequest>,
        quiet: &mut Quiet,
    ) -> Result<(), WorkerError> {
        let running = self.live.running();
        quiet.retain(|id, _| running.iter().any(|job| job.id() == id));
        for job in running {
            let progress = self.store.progress(job.id()).await?;
            let Some(committed) = self.lacks_rows(&job, &progress).await? else {
                quiet.remove(job.id());
                continue;
            };
            let since = quiet.entry(job.id().to_owned());
            let (since, before) = *since.or_insert_with(|| (Instant::now(), committed));
            if before != committed {
                quiet.remove(job.id());
            } else if since.elapsed() >= 2 * self.config.broker.ack_wait {
                quiet.remove(job.id());
                self.list_again(jobs, &job).await?;
            }
        }
        Ok(())
    }

    /// The number of rows of a job, if some are missing and it has no messages in flight.
    async fn lacks_rows(
        &self,
        job: &Job,
        progress: &JobProgress,
    ) -> Result<Option<u64>, WorkerError> {
        let rows = job
            .models()
            .iter()
            .map(|model| progress.rows.get(&model.name));
        let committed = rows
            .clone()
            .map(|rows| rows.map_or(0, |rows| rows.committed));
        let pending = rows.clone().flatten().any(|rows| rows.pending > 0);
        let committed = committed.min().unwrap_or_default();
        let listed = progress.listing.listed;
        // Each model of a retry replaces its own rows.
        let mut lacking = rows.map(|rows| match rows {
            Some(rows) => rows.committed < rows.wanted.unwrap_or(listed),
            None => listed > 0,
        });
        let is_listed = progress.listing.ended || progress.listing.waits;
        if !is_listed || pending || !lacking.any(|lacks| lacks) {
            return Ok(None);
        }
        for (_, stream, subject) in waiting_rooms(&self.subjects, job) {
            if self.broker.subject_count(stream, &subject).await? > 0 {
                return Ok(None);
            }
        }
        Ok(Some(committed))
    }

    async fn list_again(&self, jobs: &dyn Queue<JobRequest>, job: &Job) -> Result<(), WorkerError> {
        let Some((lease, _)) = self.leases.take(job.id(), Part::Listing).await? else {
            return Ok(()); // somebody else does it
        };
        let progress = lease.change(|progress| {
            let listing = &mut progress.listing;
            listing.generation += 1;
            listing.listed = 0;
            listing.passed = None;
            listing.ended = false;
            listing.waits = false;
            listing.starts = 0;
        });
        let generation = progress.await?.listing.generation;
        lease.release().await?;
        tracing::warn!(
            job = job.id(),
            "images without a row are in no queue: the broker has lost them; they are queued again"
        );
        let id = format!("{}-again-{generation}", job.id());
        jobs.publish(&id, job.spec.request.clone()).await?;
        Ok(())
    }

    /// Removes records of jobs that ended long ago, and of dead workers.
    async fn tidy(&self) -> Result<(), WorkerError> {
        presence::tidy(&self.store).await?;
        let kept = i64::try_from(self.config.ingest.keep_ended.as_micros()).unwrap_or(i64::MAX);
        let is_old = |at: i64| now().saturating_sub(at) > kept;
        let add = |jobs: &mut (HashSet<String>, Vec<Job>), job: Job| {
            jobs.0.insert(job.id().to_owned());
            if job.state.is_final() && job.finished_at.is_some_and(is_old) {
                jobs.1.push(job);
            }
        };
        let (ids, old) = self.store.each_job(add).await?;
        for job in &old {
            // A job is kept as long as its last retry, which counts towards it.
            if !job.last_retry().is_some_and(|retry| ids.contains(&retry)) {
                self.store.forget(job).await?;
            }
        }
        Ok(())
    }
}
