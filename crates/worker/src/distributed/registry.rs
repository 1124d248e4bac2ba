//! Job records in the broker: compare-and-set only.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use trommel_queue::{Kv, QueueError};
use trommel_types::JobRequest;

use crate::WorkerError;
use crate::distributed::names::key;
use crate::distributed::record::{Job, JobState, Listing, Rows};
use crate::settle::now;

/// Job records, as they are in the broker.
#[derive(Clone)]
pub struct Registry {
    kv: Kv,
}

/// What became of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// The job is new.
    New,
    /// The same job was submitted before.
    Before,
    /// Another job has this id.
    Taken,
}

impl Registry {
    /// The records in this bucket.
    pub fn new(kv: Kv) -> Self {
        Self { kv }
    }

    pub(crate) fn kv(&self) -> &Kv {
        &self.kv
    }

    /// Writes the record of a new job.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn create(&self, request: &JobRequest) -> Result<Submitted, WorkerError> {
        let job = Job {
            request: request.clone(),
            state: JobState::Queued,
            reason: None,
            submitted_at: now(),
            started_at: None,
            finished_at: None,
            source: String::new(),
            columns: Vec::new(),
            models: Vec::new(),
        };
        let created = self.kv.create(&key::job(&request.id), json(&job)).await?;
        if created.is_some() {
            return Ok(Submitted::New);
        }
        Ok(match self.job(&request.id).await? {
            Some(job) if job.request == *request => Submitted::Before,
            Some(_) => Submitted::Taken,
            None => Submitted::New,
        })
    }

    /// The record of a job.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn job(&self, id: &str) -> Result<Option<Job>, WorkerError> {
        Ok(self.read(&key::job(id)).await?.map(|(job, _)| job))
    }

    /// All jobs, the newest first.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn jobs(&self) -> Result<Vec<Job>, WorkerError> {
        let mut jobs: Vec<Job> = Vec::new();
        for key in self.kv.keys(key::JOBS).await? {
            jobs.extend(self.read(&key).await?.map(|(job, _): (Job, _)| job));
        }
        jobs.sort_by_key(|job| std::cmp::Reverse(job.submitted_at));
        Ok(jobs)
    }

    /// Changes a job's record; `change` says whether it changed anything, and may be called
    /// several times. Gives the record as it is now, or `None` if there is none.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn update(
        &self,
        id: &str,
        change: impl Fn(&mut Job) -> bool,
    ) -> Result<Option<Job>, WorkerError> {
        let key = key::job(id);
        loop {
            let Some((mut job, revision)) = self.read::<Job>(&key).await? else {
                return Ok(None);
            };
            if !change(&mut job) || self.kv.update(&key, json(&job), revision).await?.is_some() {
                return Ok(Some(job));
            }
        }
    }

    /// Ends a job that has not ended yet. Gives the record as it is now.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn end(
        &self,
        id: &str,
        state: JobState,
        reason: Option<&str>,
    ) -> Result<Option<Job>, WorkerError> {
        self.update(id, |job| {
            let ends = !job.state.is_final();
            if ends {
                job.state = state;
                job.reason = reason.map(str::to_owned);
                job.finished_at = Some(now());
            }
            ends
        })
        .await
    }

    /// How far a job is listed.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn listing(&self, id: &str) -> Result<Listing, WorkerError> {
        let read = self.read(&key::listing(id)).await?;
        Ok(read.map(|(listing, _)| listing).unwrap_or_default())
    }

    /// What is committed of a job and model.
    ///
    /// # Errors
    /// When the broker cannot be asked.
    pub async fn rows(&self, id: &str, model: &str) -> Result<Rows, WorkerError> {
        let read = self.read(&key::rows(id, model)).await?;
        Ok(read.map(|(rows, _)| rows).unwrap_or_default())
    }

    /// Writes a record that one role alone writes.
    pub(crate) async fn put(&self, key: &str, record: &impl Serialize) -> Result<(), WorkerError> {
        self.kv.put(key, json(record)).await?;
        Ok(())
    }

    /// A record and its revision. One that cannot be read is as good as absent, and is said.
    pub(crate) async fn read<T: DeserializeOwned>(
        &self,
        key: &str,
    ) -> Result<Option<(T, u64)>, QueueError> {
        let Some(entry) = self.kv.get(key).await? else {
            return Ok(None);
        };
        match serde_json::from_slice(&entry.value) {
            Ok(record) => Ok(Some((record, entry.revision))),
            Err(error) => {
                tracing::error!(key, %error, "a record in the broker cannot be read; it is passed over");
                Ok(None)
            }
        }
    }
}

pub(crate) fn json(record: &impl Serialize) -> bytes::Bytes {
    serde_json::to_vec(record)
        .expect("records hold text, numbers and lists")
        .into()
}

/// All job records, kept up to date by a watch.
pub(crate) struct LiveJobs {
    registry: Registry,
    jobs: Arc<RwLock<HashMap<Arc<str>, Arc<Job>>>>,
    changed: watch::Receiver<u64>,
    _watching: AbortOnDropHandle<()>,
}

impl LiveJobs {
    /// Watches the records; those that are there already come first.
    pub(crate) async fn watch(registry: Registry) -> Result<Self, WorkerError> {
        let jobs: Arc<RwLock<HashMap<Arc<str>, Arc<Job>>>> = Arc::default();
        for job in registry.jobs().await? {
            insert(&jobs, job);
        }
        let mut changes = registry.kv.watch(key::JOBS).await?;
        let (sender, changed) = watch::channel(0);
        let known = Arc::clone(&jobs);
        let watching = tokio::spawn(async move {
            while let Some(change) = changes.next().await {
                let Some(value) = change.value else { continue };
                match serde_json::from_slice::<Job>(&value) {
                    Ok(job) => insert(&known, job),
                    Err(error) => {
                        tracing::error!(key = change.key, %error, "a job record cannot be read");
                    }
                }
                sender.send_modify(|count| *count += 1);
            }
        });
        Ok(Self {
            registry,
            jobs,
            changed,
            _watching: AbortOnDropHandle::new(watching),
        })
    }

    /// Changes with every change of a record.
    pub(crate) fn changed(&self) -> watch::Receiver<u64> {
        self.changed.clone()
    }

    /// A job; asked for in the broker if the watch has not brought it yet.
    pub(crate) async fn find(&self, id: &str) -> Result<Option<Arc<Job>>, WorkerError> {
        if let Some(job) = self.known(id) {
            return Ok(Some(job));
        }
        let Some(job) = self.registry.job(id).await? else {
            return Ok(None);
        };
        insert(&self.jobs, job);
        Ok(self.known(id))
    }

    /// A job that the watch has brought.
    pub(crate) fn known(&self, id: &str) -> Option<Arc<Job>> {
        let jobs = self.jobs.read().unwrap_or_else(PoisonError::into_inner);
        jobs.get(id).cloned()
    }

    /// Jobs that have ended at this time or later, in microseconds since the Unix epoch, UTC.
    pub(crate) fn ended_since(&self, since: i64) -> Vec<Arc<Job>> {
        let jobs = self.jobs.read().unwrap_or_else(PoisonError::into_inner);
        let ended = jobs.values().filter(|job| job.state.is_final());
        let recent = ended.filter(|job| job.finished_at.is_some_and(|at| at >= since));
        recent.cloned().collect()
    }

    /// Jobs whose images are on their way.
    pub(crate) fn running(&self) -> Vec<Arc<Job>> {
        let jobs = self.jobs.read().unwrap_or_else(PoisonError::into_inner);
        let running = jobs.values().filter(|job| job.state == JobState::Running);
        running.cloned().collect()
    }
}

/// Keeps the newer of two records of a job: a state that is final stays.
fn insert(jobs: &RwLock<HashMap<Arc<str>, Arc<Job>>>, job: Job) {
    let mut jobs = jobs.write().unwrap_or_else(PoisonError::into_inner);
    let id: Arc<str> = job.request.id.as_str().into();
    match jobs.get(&id) {
        Some(known) if known.state.is_final() && !job.state.is_final() => {}
        _ => {
            jobs.insert(id, Arc::new(job));
        }
    }
}
