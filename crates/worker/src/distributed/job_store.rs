//! The only place that changes a job's state: one record and one checkpoint per job, by
//! compare-and-set.

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use trommel_queue::{Kv, QueueErrorKind};
use trommel_sink::Summary;
use trommel_types::{JobRequest, JobSpec, RetryOf};

use crate::WorkerError;
use crate::clock::now;
use crate::distributed::names::key;
use crate::distributed::record::{Job, JobProgress, JobState, Reason};

/// Records of jobs in the broker.
///
/// A record that cannot be read is [`WorkerError::Unreadable`], never "no job".
#[derive(Clone)]
pub struct JobStore {
    kv: Kv,
}

/// The result of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// The job is new.
    New,
    /// The same job was submitted before.
    Before,
    /// Another job has this id.
    Taken,
}

/// Which job writes to an output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub(crate) struct OutputHolder {
    pub(crate) job: String,
    /// The highest run number ever given among the rows of a job here.
    #[serde(default)]
    pub(crate) last: u32,
    /// The one given to `job`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) number: Option<u32>,
}

impl JobStore {
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
    /// If the broker cannot be reached, or the request is larger than its messages.
    pub async fn create(&self, request: &JobRequest) -> Result<Submitted, WorkerError> {
        let job = Job {
            spec: JobSpec {
                request: request.clone(),
                ..JobSpec::default()
            },
            state: JobState::Queued,
            reason: None,
            submitted_at: now(),
            started_at: None,
            finished_at: None,
            retries: 0,
        };
        let is_same = |found: &Job| found.spec.request == job.spec.request;
        if let Some(found) = self.job(&request.id).await? {
            return Ok(match is_same(&found) {
                true => Submitted::Before,
                false => Submitted::Taken,
            });
        }
        let created = self.kv.create(&key::job(&request.id), json(&job)).await;
        if created
            .map_err(|error| too_large(error, &request.id))?
            .is_some()
        {
            return Ok(Submitted::New);
        }
        Ok(match self.job(&request.id).await? {
            Some(found) if is_same(&found) => Submitted::Before,
            _ => Submitted::Taken,
        })
    }

    /// The record of a job.
    ///
    /// # Errors
    /// If the broker cannot be reached, or the record cannot be read.
    pub async fn job(&self, id: &str) -> Result<Option<Job>, WorkerError> {
        Ok(self.read(&key::job(id)).await?.map(|(job, _)| job))
    }

    /// Passes all jobs to `fold`, in no order, and returns its result. Unreadable records are
    /// logged and left out. An interrupted pass starts again with an empty `T`.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub(crate) async fn each_job<T: Default>(
        &self,
        mut fold: impl FnMut(&mut T, Job),
    ) -> Result<T, WorkerError> {
        let fold =
            |all: &mut T, entry: trommel_queue::Entry| match serde_json::from_slice(&entry.value) {
                Ok(job) => fold(all, job),
                Err(error) => tracing::error!(%error, "a job's record cannot be read"),
            };
        Ok(self.kv.fold(key::JOBS, fold).await?)
    }

    /// Changes a job's record; `change` returns whether it changed anything, and may be called
    /// several times. Returns the current record, or `None` if there is no such job.
    ///
    /// # Errors
    /// If the broker cannot be reached, or the record cannot be read.
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
            if !change(&mut job) || self.set(&key, &job, revision).await?.is_some() {
                return Ok(Some(job));
            }
        }
    }

    /// Marks a queued job as running, with its final spec. Returns the record if the job is running
    /// now, whoever began it.
    ///
    /// # Errors
    /// As [`JobStore::update`].
    pub(crate) async fn begin(&self, spec: &JobSpec) -> Result<Option<Job>, WorkerError> {
        let job = self.update(spec.id(), |job| {
            let begins = job.state == JobState::Queued;
            if begins {
                job.state = JobState::Running;
                job.reason = None;
                job.started_at = Some(now());
                job.spec = spec.clone();
            }
            begins
        });
        Ok(job.await?.filter(|job| job.state == JobState::Running))
    }

    /// Ends a job that has not ended yet. Returns its record if this call ended it.
    ///
    /// # Errors
    /// As [`JobStore::update`].
    pub async fn end(
        &self,
        id: &str,
        state: JobState,
        reason: Option<Reason>,
    ) -> Result<Option<Job>, WorkerError> {
        let key = key::job(id);
        loop {
            let Some((mut job, revision)) = self.read::<Job>(&key).await? else {
                return Ok(None);
            };
            if job.state.is_final() {
                return Ok(None);
            }
            job.state = state;
            job.reason.clone_from(&reason);
            job.finished_at = Some(now());
            if self.set(&key, &job, revision).await?.is_some() {
                return Ok(Some(job));
            }
        }
    }

    /// The progress of a job.
    ///
    /// # Errors
    /// If the broker cannot be reached, or the checkpoint cannot be read.
    pub async fn progress(&self, id: &str) -> Result<JobProgress, WorkerError> {
        Ok(self.progress_at(id).await?.0)
    }

    /// The checkpoint and its revision, 0 before the first one.
    pub(crate) async fn progress_at(&self, id: &str) -> Result<(JobProgress, u64), WorkerError> {
        Ok(self.read(&key::progress(id)).await?.unwrap_or_default())
    }

    /// Writes a checkpoint that is still at `revision`; `None` if another writer was first.
    pub(crate) async fn set_progress(
        &self,
        id: &str,
        progress: &JobProgress,
        revision: u64,
    ) -> Result<Option<u64>, WorkerError> {
        self.set(&key::progress(id), progress, revision).await
    }

    /// Counts the rows of a finished retry among those of its job, unless a later one was counted.
    /// The job has ended, so only other retries change its checkpoint.
    pub(crate) async fn recount(
        &self,
        retry: &RetryOf,
        model: &str,
        summary: &Summary,
    ) -> Result<(), WorkerError> {
        let Some(whole) = &summary.whole else {
            return Ok(());
        };
        let key = key::progress(&retry.job);
        loop {
            // Without a checkpoint the job's record has expired.
            let Some((mut progress, revision)) = self.read::<JobProgress>(&key).await? else {
                return Ok(());
            };
            let is_alone = whole.images <= progress.listing.listed;
            let rows = progress.rows.entry(model.to_owned()).or_default();
            let is_news = match is_alone {
                true => rows.count_retried(retry.number, whole),
                // Rows of other jobs are next to its own.
                false => rows.count_replaced(retry, summary),
            };
            if !is_news || self.set(&key, &progress, revision).await?.is_some() {
                return Ok(());
            }
        }
    }

    /// Which job writes to an output, and the revision of that record.
    pub(crate) async fn output_holder(
        &self,
        output: &str,
    ) -> Result<Option<(OutputHolder, u64)>, WorkerError> {
        self.read(&key::output(output)).await
    }

    /// Records who has an output, if its record is still at `revision` (0: no record yet).
    pub(crate) async fn set_holder(
        &self,
        output: &str,
        holder: &OutputHolder,
        revision: u64,
    ) -> Result<bool, WorkerError> {
        let set = self.set(&key::output(output), holder, revision).await?;
        Ok(set.is_some())
    }

    /// Removes everything stored about a job.
    pub(crate) async fn forget(&self, job: &Job) -> Result<(), WorkerError> {
        let (id, output) = (job.id(), &job.spec.request.output);
        if let Some((holder, _)) = self.output_holder(output).await?
            && holder.job == id
        {
            self.kv.remove(&key::output(output)).await?;
        }
        for key in [key::rule(id), key::progress(id), key::job(id)] {
            self.kv.remove(&key).await?;
        }
        Ok(())
    }

    /// Counts that work on a message begins, and returns how often it has.
    pub(crate) async fn try_again(
        &self,
        stage: &str,
        job: &str,
        message: &str,
    ) -> Result<u32, WorkerError> {
        let key = key::tried(stage, job, message);
        loop {
            let (tried, revision) = self.read::<u32>(&key).await?.unwrap_or_default();
            let tried = tried.saturating_add(1);
            if self.set(&key, &tried, revision).await?.is_some() {
                return Ok(tried);
            }
        }
    }

    /// A record and its revision.
    pub(crate) async fn read<T: DeserializeOwned>(
        &self,
        key: &str,
    ) -> Result<Option<(T, u64)>, WorkerError> {
        let Some(entry) = self.kv.get(key).await? else {
            return Ok(None);
        };
        let record =
            serde_json::from_slice(&entry.value).map_err(|error| unreadable(key, error))?;
        Ok(Some((record, entry.revision)))
    }

    /// Writes a record that is still at `revision`, or absent for 0; `None` if another writer was
    /// first.
    pub(crate) async fn set(
        &self,
        key: &str,
        record: &impl Serialize,
        revision: u64,
    ) -> Result<Option<u64>, WorkerError> {
        let set = match revision {
            0 => self.kv.create(key, json(record)).await,
            revision => self.kv.update(key, json(record), revision).await,
        };
        set.map_err(|error| too_large(error, key))
    }
}

fn unreadable(key: &str, error: impl std::fmt::Display) -> WorkerError {
    WorkerError::Unreadable {
        key: key.to_owned(),
        reason: error.to_string(),
    }
}

/// If it does not fit into a message, the request is at fault.
fn too_large(error: trommel_queue::QueueError, object: &str) -> WorkerError {
    if error.kind() == QueueErrorKind::TooLarge {
        return WorkerError::Request(format!(
            "{object}: the request is larger than the broker's messages may be ({error}); name a manifest instead of many sources, or raise max_payload in nats-server's configuration"
        ));
    }
    error.into()
}

pub(crate) fn json(record: &impl Serialize) -> Bytes {
    serde_json::to_vec(record)
        .expect("records hold text, numbers and lists")
        .into()
}
