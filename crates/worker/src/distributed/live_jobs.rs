//! Job records kept up to date by a watch.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::WorkerError;
use crate::clock::now;
use crate::distributed::job_store::JobStore;
use crate::distributed::names::key;
use crate::distributed::record::{Job, JobState};

/// Time for which an ended job is remembered: repeats of its images may still arrive.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// Most ended jobs remembered; for others the broker is queried.
const MOST_ENDED: usize = 1000;

/// The jobs that have not ended, and the last ones that have, so that its size does not grow with
/// the total number of jobs.
pub(crate) struct LiveJobs {
    store: JobStore,
    known: Arc<RwLock<Known>>,
    changed: watch::Receiver<u64>,
    _watching: AbortOnDropHandle<()>,
}

#[derive(Default)]
struct Known {
    jobs: HashMap<Arc<str>, Arc<Job>>,
    /// The ended ones, by the time of their end.
    ended: BTreeSet<(i64, Arc<str>)>,
    /// Keys of records that cannot be read.
    unreadable: HashSet<String>,
}

impl LiveJobs {
    /// Watches the records, existing ones first.
    pub(crate) async fn watch(store: JobStore) -> Result<Self, WorkerError> {
        let known: Arc<RwLock<Known>> = Arc::default();
        store
            .each_job(|(): &mut (), job| write(&known).insert(job))
            .await?;
        let mut changes = store.kv().watch(key::JOBS).await?;
        let (sender, changed) = watch::channel(0);
        let all = Arc::clone(&known);
        let watching = tokio::spawn(async move {
            while let Some(change) = changes.next().await {
                write(&all).change(change.key, change.value.as_deref());
                sender.send_modify(|count| *count += 1);
            }
        });
        Ok(Self {
            store,
            known,
            changed,
            _watching: AbortOnDropHandle::new(watching),
        })
    }

    /// Changes with every change of a record.
    pub(crate) fn changed(&self) -> watch::Receiver<u64> {
        self.changed.clone()
    }

    /// A job; queried from the broker if the watch has not reported it, or it had not begun then.
    ///
    /// # Errors
    /// [`WorkerError::Unreadable`] if a record cannot be read: that is not "no job".
    pub(crate) async fn find(&self, id: &str) -> Result<Option<Arc<Job>>, WorkerError> {
        match self.known(id) {
            Some(job) if job.state != JobState::Queued => return Ok(Some(job)),
            _ => {}
        }
        let Some(job) = self.store.job(id).await? else {
            return Ok(None);
        };
        let job = Arc::new(job);
        write(&self.known).insert_shared(Arc::clone(&job));
        Ok(Some(job))
    }

    /// A job reported by the watch.
    pub(crate) fn known(&self, id: &str) -> Option<Arc<Job>> {
        self.read().jobs.get(id).cloned()
    }

    /// Whether a job has ended, as far as is known here.
    pub(crate) fn is_over(&self, id: &str) -> bool {
        self.known(id).is_some_and(|job| job.state.is_final())
    }

    /// Recently ended jobs.
    pub(crate) fn ended(&self) -> Vec<Arc<Job>> {
        let known = self.read();
        let ended = known.jobs.values().filter(|job| job.state.is_final());
        ended.cloned().collect()
    }

    /// Jobs with images in flight, oldest first.
    pub(crate) fn running(&self) -> Vec<Arc<Job>> {
        let known = self.read();
        let running = known.jobs.values();
        let running = running.filter(|job| job.state == JobState::Running);
        let mut running: Vec<_> = running.cloned().collect();
        running.sort_by_key(|job| job.submitted_at);
        running
    }

    fn read(&self) -> RwLockReadGuard<'_, Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }
}

fn write(known: &RwLock<Known>) -> std::sync::RwLockWriteGuard<'_, Known> {
    known.write().unwrap_or_else(PoisonError::into_inner)
}

impl Known {
    fn change(&mut self, key: String, value: Option<&[u8]>) {
        let Some(value) = value else {
            self.unreadable.remove(&key);
            if let Some(id) = key.strip_prefix(key::JOBS) {
                self.forget(id);
            }
            return;
        };
        match serde_json::from_slice::<Job>(value) {
            Ok(job) => {
                self.unreadable.remove(&key);
                self.insert(job);
            }
            Err(error) => {
                if self.unreadable.insert(key.clone()) {
                    tracing::error!(key, %error, "a job's record cannot be read; its images wait until it can");
                }
            }
        }
    }

    fn insert(&mut self, job: Job) {
        self.insert_shared(Arc::new(job));
    }

    /// Keeps the newer of two records of a job: a final state stays.
    fn insert_shared(&mut self, job: Arc<Job>) {
        let since = now() - i64::try_from(REMEMBERED.as_micros()).unwrap_or(i64::MAX);
        while let Some((at, id)) = self.ended.first().cloned()
            && (at < since || self.ended.len() > MOST_ENDED)
        {
            self.ended.remove(&(at, Arc::clone(&id)));
            self.jobs.remove(&id);
        }
        if let Some(known) = self.jobs.get(job.id())
            && known.state.is_final()
            && !job.state.is_final()
        {
            return;
        }
        self.forget(job.id());
        let id: Arc<str> = job.id().into();
        if job.state.is_final() {
            let at = job.finished_at.unwrap_or_default();
            let is_among_the_last = self.ended.len() < MOST_ENDED
                || self.ended.first().is_some_and(|(first, _)| *first < at);
            if at < since || !is_among_the_last {
                return;
            }
            self.ended.insert((at, Arc::clone(&id)));
        }
        self.jobs.insert(id, job);
    }

    fn forget(&mut self, id: &str) {
        if let Some((id, job)) = self.jobs.remove_entry(id) {
            self.ended
                .remove(&(job.finished_at.unwrap_or_default(), id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trommel_types::{JobRequest, JobSpec};

    fn job(id: &str, finished_at: Option<i64>) -> Job {
        Job {
            spec: JobSpec {
                request: JobRequest {
                    id: id.to_owned(),
                    ..JobRequest::default()
                },
                ..JobSpec::default()
            },
            state: match finished_at {
                None => JobState::Running,
                Some(_) => JobState::Complete,
            },
            reason: None,
            submitted_at: 0,
            started_at: None,
            finished_at,
            retries: 0,
        }
    }

    #[test]
    fn jobs_that_have_ended_are_remembered_up_to_a_number() {
        let (mut known, start) = (Known::default(), now());
        known.insert(job("running", None));
        for number in 0..20_000 {
            known.insert(job(&format!("job-{number}"), Some(start + number)));
        }
        // In any order.
        known.insert(job("early", Some(start - 1)));
        assert!(known.jobs.len() <= MOST_ENDED + 2, "{}", known.jobs.len());
        assert_eq!(known.ended.len() + 1, known.jobs.len());
        assert!(known.jobs.contains_key("running") && known.jobs.contains_key("job-19999"));
        assert!(!known.jobs.contains_key("job-0") && !known.jobs.contains_key("early"));
        // An ended job does not run again, and a removed one is forgotten.
        known.insert(job("job-19999", None));
        assert_eq!(known.jobs["job-19999"].state, JobState::Complete);
        known.change(key::job("job-19999"), None);
        assert!(!known.jobs.contains_key("job-19999"));
        assert_eq!(known.ended.len() + 1, known.jobs.len());
        known.insert(job("running", Some(start)));
        known.insert(job("old", Some(start - 2 * 3_600_000_000)));
        assert!(!known.jobs.contains_key("old"));
    }
}
