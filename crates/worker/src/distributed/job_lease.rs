//! The right to change a part of a job's checkpoint: one worker at a time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::WorkerError;
use crate::distributed::job_store::JobStore;
use crate::distributed::record::{Holder, JobProgress};

/// A part of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    /// The listing of the job.
    Listing,
    /// The rows of this model.
    Rows(String),
}

impl Part {
    fn holder<'a>(&self, progress: &'a mut JobProgress) -> &'a mut Holder {
        match self {
            Self::Listing => &mut progress.listing.held,
            Self::Rows(model) => &mut progress.rows.entry(model.clone()).or_default().held,
        }
    }
}

/// A part of a checkpoint held by this worker. It is kept alive in the background until it is
/// dropped, independent of the holder's work.
///
/// Every change carries the fencing number of the lease: a worker that was suspended for longer
/// than the lease finds a higher one and changes nothing. A lease saves work; the commit protocol
/// prevents duplicate rows.
#[derive(Clone)]
pub(crate) struct JobLease {
    claim: Arc<Claim>,
    _kept_alive: Arc<AbortOnDropHandle<()>>,
}

struct Claim {
    store: JobStore,
    job: String,
    part: Part,
    owner: String,
    fence: u64,
    ttl: Duration,
    until: Mutex<Instant>,
    lost: CancellationToken,
}

impl JobLease {
    /// Whether this process may continue, by a clock that runs while the process is suspended.
    pub(crate) fn is_held(&self) -> bool {
        !self.claim.lost.is_cancelled() && Instant::now() < self.claim.until()
    }

    /// Fires when another worker has taken over.
    pub(crate) fn lost(&self) -> &CancellationToken {
        &self.claim.lost
    }

    /// Changes the checkpoint and returns its new state. `change` may be called several times.
    ///
    /// # Errors
    /// [`WorkerError::LeaseLost`] if another worker has taken over, others if the broker cannot be
    /// reached.
    pub(crate) async fn change(
        &self,
        change: impl Fn(&mut JobProgress),
    ) -> Result<JobProgress, WorkerError> {
        self.claim.change(change).await
    }

    /// Releases the lease, so that another worker need not wait until it expires.
    pub(crate) async fn release(&self) -> Result<(), WorkerError> {
        let part = self.claim.part.clone();
        let released = self
            .claim
            .change(move |progress| part.holder(progress).owner.clear());
        match released.await {
            Ok(_) | Err(WorkerError::LeaseLost) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

impl Claim {
    fn until(&self) -> Instant {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn change(&self, change: impl Fn(&mut JobProgress)) -> Result<JobProgress, WorkerError> {
        loop {
            // Counted from before the request: others count from when they see it.
            let asked = Instant::now();
            let (mut progress, revision) = self.store.progress_at(&self.job).await?;
            let held = self.part.holder(&mut progress);
            if held.fence != self.fence || held.owner != self.owner {
                self.lost.cancel();
                return Err(WorkerError::LeaseLost);
            }
            held.beat += 1;
            change(&mut progress);
            let set = self.store.set_progress(&self.job, &progress, revision);
            if set.await?.is_some() {
                let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
                *until = (*until).max(asked + self.ttl);
                return Ok(progress);
            }
        }
    }

    async fn keep_alive(self: Arc<Self>) {
        loop {
            sleep(self.ttl / 4).await;
            match self.change(|_| ()).await {
                Ok(_) => {}
                Err(WorkerError::LeaseLost) => return,
                Err(error) => {
                    tracing::warn!(job = self.job, %error, "a lease was not renewed");
                }
            }
        }
    }
}

/// Takes leases that are free or have expired.
///
/// A lease has expired when it was not renewed for `ttl` by this process's own clock, so that
/// clocks need not agree.
pub(crate) struct JobLeases {
    store: JobStore,
    owner: String,
    ttl: Duration,
    seen: Mutex<HashMap<(String, Part), (Holder, Instant)>>,
}

impl JobLeases {
    pub(crate) fn new(store: JobStore, owner: &str, ttl: Duration) -> Self {
        Self {
            store,
            owner: owner.to_owned(),
            ttl,
            seen: Mutex::default(),
        }
    }

    /// Takes a part of a job's checkpoint unless another process holds it.
    pub(crate) async fn take(
        &self,
        job: &str,
        part: Part,
    ) -> Result<Option<(JobLease, JobProgress)>, WorkerError> {
        let asked = Instant::now();
        let (mut progress, revision) = self.store.progress_at(job).await?;
        let held = part.holder(&mut progress);
        if !self.is_free(job, &part, held) {
            return Ok(None);
        }
        *held = Holder {
            owner: self.owner.clone(),
            fence: held.fence + 1,
            beat: 0,
        };
        let fence = held.fence;
        if part == Part::Listing {
            progress.listing.starts += 1;
        }
        let set = self.store.set_progress(job, &progress, revision).await?;
        if set.is_none() {
            return Ok(None);
        }
        self.forget(job, &part);
        let claim = Arc::new(Claim {
            store: self.store.clone(),
            job: job.to_owned(),
            part,
            owner: self.owner.clone(),
            fence,
            ttl: self.ttl,
            until: Mutex::new(asked + self.ttl),
            lost: CancellationToken::new(),
        });
        let kept_alive = tokio::spawn(Arc::clone(&claim).keep_alive());
        let lease = JobLease {
            claim,
            _kept_alive: Arc::new(AbortOnDropHandle::new(kept_alive)),
        };
        Ok(Some((lease, progress)))
    }

    /// Whether a part of a job's checkpoint is free.
    fn is_free(&self, job: &str, part: &Part, held: &Holder) -> bool {
        if held.owner.is_empty() {
            return true;
        }
        let now = Instant::now();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (job.to_owned(), part.clone());
        let last = seen.entry(key).or_insert_with(|| (held.clone(), now));
        if last.0 != *held {
            *last = (held.clone(), now);
        }
        now.duration_since(last.1) >= self.ttl
    }

    /// Takes all fences of a job that has ended, if nobody holds any part of its checkpoint;
    /// `false` if somebody does.
    pub(crate) async fn close(&self, job: &str) -> Result<bool, WorkerError> {
        let (mut progress, revision) = self.store.progress_at(job).await?;
        let models: Vec<_> = progress.rows.keys().cloned().collect();
        let parts = models.into_iter().map(Part::Rows).chain([Part::Listing]);
        let mut all_free = true;
        for part in parts {
            let held = part.holder(&mut progress);
            // All are checked each time, so that the time of each is counted.
            all_free &= self.is_free(job, &part, held);
            held.owner.clear();
            held.fence += 1;
        }
        let set = match all_free {
            true => self.store.set_progress(job, &progress, revision).await?,
            false => None,
        };
        Ok(set.is_some())
    }

    fn forget(&self, job: &str, part: &Part) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.remove(&(job.to_owned(), part.clone()));
        // Observations of jobs that ended long ago are useless.
        let ttl = self.ttl;
        seen.retain(|_, (_, at)| at.elapsed() < 100 * ttl);
    }
}
