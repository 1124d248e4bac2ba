//! Claims of part numbers in the broker, for stores that ignore preconditions.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use trommel_sink::{Claim, Claims};
use trommel_storage::StorageError;

use crate::distributed::job_store::{JobStore, json};
use crate::distributed::names::key;
use crate::distributed::record::Job;

/// A claim as stored in the broker.
#[derive(Serialize, Deserialize)]
struct Stored {
    /// Distinguishes otherwise equal claims of different writers.
    writer: u64,
    /// The object that was committed.
    committed: Option<String>,
}

/// The claims of a job and model.
pub(crate) struct KvClaims {
    store: JobStore,
    prefix: String,
    job: String,
    output: String,
}

impl KvClaims {
    pub(crate) fn new(store: &JobStore, job: &Job, model: &str) -> Self {
        Self {
            store: store.clone(),
            prefix: key::claims(job.id(), model),
            job: job.id().to_owned(),
            output: job.spec.request.output.clone(),
        }
    }

    fn key(&self, part: u64) -> String {
        format!("{}{part}", self.prefix)
    }

    fn stored(committed: Option<&str>) -> bytes::Bytes {
        json(&Stored {
            writer: rand::random(),
            committed: committed.map(str::to_owned),
        })
    }
}

#[async_trait]
impl Claims for KvClaims {
    async fn hold_output(&self) -> Result<bool, StorageError> {
        let holder = self.store.output_holder(&self.output).await;
        let holder = holder.map_err(unavailable)?;
        Ok(holder.is_none_or(|(holder, _)| holder.job == self.job))
    }

    async fn list(&self) -> Result<Vec<Claim>, StorageError> {
        let kv = self.store.kv();
        let mut claims = Vec::new();
        for key in kv.keys(&self.prefix).await.map_err(unavailable)? {
            let part = key
                .strip_prefix(&self.prefix)
                .and_then(|part| part.parse().ok());
            let stored = self.store.read::<Stored>(&key).await;
            if let (Some(part), Some((stored, revision))) = (part, stored.map_err(unavailable)?) {
                claims.push(Claim {
                    part,
                    revision,
                    committed: stored.committed,
                });
            }
        }
        Ok(claims)
    }

    async fn open(&self, part: u64, replaces: Option<u64>) -> Result<u64, StorageError> {
        let (kv, key, stored) = (self.store.kv(), self.key(part), Self::stored(None));
        let claimed = match replaces {
            None => kv.create(&key, stored).await,
            Some(revision) => kv.update(&key, stored, revision).await,
        };
        claimed.map_err(unavailable)?.ok_or_else(|| lost(part))
    }

    async fn commit(&self, part: u64, revision: u64, object: &str) -> Result<(), StorageError> {
        let (key, stored) = (self.key(part), Self::stored(Some(object)));
        let committed = self.store.kv().update(&key, stored, revision).await;
        match committed.map_err(unavailable)? {
            Some(_) => Ok(()),
            None => Err(lost(part)),
        }
    }

    async fn clear(&self) -> Result<(), StorageError> {
        let removed = self.store.kv().remove(&self.prefix).await;
        removed.map(drop).map_err(unavailable)
    }
}

fn unavailable(error: impl std::fmt::Display) -> StorageError {
    StorageError::unavailable(error.to_string())
}

fn lost(part: u64) -> StorageError {
    StorageError::lost_race(format!("the claim of part {part}"))
}
