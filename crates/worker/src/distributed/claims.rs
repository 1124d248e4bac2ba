//! Claims of part numbers in the broker, for stores that honour no preconditions.

use std::future::Future;

use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use trommel_queue::QueueError;
use trommel_storage::{Claim, Claims, StorageError};

use crate::distributed::names::key;
use crate::distributed::registry::{Registry, json};

/// What the broker holds of a claim.
#[derive(Serialize, Deserialize)]
struct Stored {
    /// Tells one writer's claim from another's that is the same otherwise.
    writer: u64,
    /// The object that was committed.
    committed: Option<String>,
}

/// The claims of a job and model.
pub(crate) struct KvClaims {
    registry: Registry,
    /// Where the broker's connection lives; claims are made on threads that may block.
    handle: Handle,
    prefix: String,
}

impl KvClaims {
    pub(crate) fn new(registry: &Registry, handle: Handle, job: &str, model: &str) -> Self {
        Self {
            registry: registry.clone(),
            handle,
            prefix: key::claims(job, model),
        }
    }

    fn ask<T>(
        &self,
        question: impl Future<Output = Result<T, QueueError>>,
    ) -> Result<T, StorageError> {
        self.handle
            .block_on(question)
            .map_err(|error| StorageError::unavailable(error.to_string()))
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

impl Claims for KvClaims {
    fn list(&self) -> Result<Vec<Claim>, StorageError> {
        self.ask(async {
            let mut claims = Vec::new();
            for key in self.registry.kv().keys(&self.prefix).await? {
                let part = key
                    .strip_prefix(&self.prefix)
                    .and_then(|part| part.parse().ok());
                let stored = self.registry.read::<Stored>(&key).await?;
                if let (Some(part), Some((stored, revision))) = (part, stored) {
                    claims.push(Claim {
                        part,
                        revision,
                        committed: stored.committed,
                    });
                }
            }
            Ok(claims)
        })
    }

    fn open(&self, part: u64, replaces: Option<u64>) -> Result<u64, StorageError> {
        let (key, stored) = (self.key(part), Self::stored(None));
        let claimed = self.ask(async {
            match replaces {
                None => self.registry.kv().create(&key, stored).await,
                Some(revision) => self.registry.kv().update(&key, stored, revision).await,
            }
        })?;
        claimed.ok_or_else(|| StorageError::lost_race(format!("the claim of part {part}")))
    }

    fn commit(&self, part: u64, revision: u64, object: &str) -> Result<(), StorageError> {
        let (key, stored) = (self.key(part), Self::stored(Some(object)));
        let committed = self.ask(self.registry.kv().update(&key, stored, revision))?;
        committed
            .map(drop)
            .ok_or_else(|| StorageError::lost_race(format!("the claim of part {part}")))
    }
}
