//! Live workers, and the models they hold.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use trommel_types::{JobModel, Role};

use crate::clock::now;
use crate::distributed::job_store::{JobStore, json};
use crate::distributed::names::key;
use crate::distributed::repository::Repository;
use crate::reports::PutOff;
use crate::request_times::RequestWork;
use crate::{TimeCounts, WorkerError};

/// Time between two heartbeats.
const BEAT: Duration = Duration::from_secs(2);
/// A worker without a heartbeat for this long is dead.
const DEAD_AFTER: Duration = Duration::from_secs(20);

/// A worker as the others see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Presence {
    /// Names the process.
    pub id: String,
    /// Its roles.
    pub roles: Vec<Role>,
    /// Versions of the models in its repository, by name, newest first.
    pub models: BTreeMap<String, Vec<String>>,
    /// Its last heartbeat, in microseconds since the Unix epoch, UTC.
    pub seen_at: i64,
    /// Its work since its start, by role.
    #[serde(default)]
    pub work: Vec<StageWork>,
    /// Times of its work since its start, by kind of work.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub times: BTreeMap<String, TimeCounts>,
    /// Its last report about postponed images, for each job and stage.
    #[serde(default)]
    pub put_off: Vec<PutOff>,
    /// Times of requests, by entrance.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestWork>,
}

/// The work of a process in a role since its start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageWork {
    /// The role.
    pub role: Role,
    /// Its threads.
    pub threads: usize,
    /// Finished images.
    pub images: u64,
    /// Busy time of its threads in seconds, summed.
    pub busy_seconds: f64,
}

/// Removes the records of dead workers.
pub(crate) async fn tidy(store: &JobStore) -> Result<(), WorkerError> {
    for entry in store.kv().scan(key::WORKERS).await? {
        let worker = serde_json::from_slice::<Presence>(&entry.value);
        if worker.is_ok_and(|worker| !worker.is_alive()) {
            store.kv().remove(&entry.key).await?;
        }
    }
    Ok(())
}

/// The live workers.
pub(crate) async fn alive(store: &JobStore) -> Result<Vec<Presence>, WorkerError> {
    let mut alive = Vec::new();
    for entry in store.kv().scan(key::WORKERS).await? {
        match serde_json::from_slice::<Presence>(&entry.value) {
            Ok(worker) if worker.is_alive() => alive.push(worker),
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the record of a worker cannot be read"),
        }
    }
    Ok(alive)
}

impl Presence {
    /// Registers this process.
    ///
    /// # Errors
    /// If the broker cannot be reached.
    pub(crate) async fn announce(
        store: &JobStore,
        roles: &[Role],
        repository: &Repository,
    ) -> Result<Self, WorkerError> {
        let mine = Self {
            id: uuid::Uuid::now_v7().to_string(),
            roles: roles.to_vec(),
            models: repository.versions_here(),
            seen_at: now(),
            work: Vec::new(),
            times: BTreeMap::new(),
            put_off: Vec::new(),
            requests: Vec::new(),
        };
        mine.write(store).await?;
        Ok(mine)
    }

    async fn write(&self, store: &JobStore) -> Result<(), WorkerError> {
        store.kv().put(&key::worker(&self.id), json(self)).await?;
        Ok(())
    }

    /// Whether it holds a role.
    pub fn has(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }

    /// Whether its repository holds this version of a model.
    pub(crate) fn has_model(&self, model: &JobModel) -> bool {
        let versions = self.models.get(&model.name);
        versions.is_some_and(|versions| versions.contains(&model.version))
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    fn is_alive(&self) -> bool {
        let age = now().saturating_sub(self.seen_at);
        u64::try_from(age).is_ok_and(|age| Duration::from_micros(age) < DEAD_AFTER) || age < 0
    }
}

/// Sends heartbeats until `shutdown` fires, with the models present at the time.
pub(crate) async fn keep(
    store: JobStore,
    mut presence: Presence,
    repository: Arc<Repository>,
    latest: impl Fn(&mut Presence) + Send,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    // Reading a new model takes longer than a heartbeat.
    let look = || {
        let repository = Arc::clone(&repository);
        tokio::task::spawn_blocking(move || repository.versions_here())
    };
    let mut looking = look();
    while shutdown
        .run_until_cancelled(tokio::time::sleep(BEAT))
        .await
        .is_some()
    {
        if looking.is_finished() {
            match looking.await {
                Ok(models) => presence.models = models,
                Err(error) => tracing::warn!(%error, "the models are looked at again"),
            }
            looking = look();
        }
        let mut alive = Presence {
            seen_at: now(),
            ..presence.clone()
        };
        latest(&mut alive);
        // The others count it as dead meanwhile, which only concerns versions of models.
        if let Err(error) = alive.write(&store).await {
            tracing::warn!(%error, "no sign of life was given");
        }
    }
    Ok(store.kv().delete(&key::worker(&presence.id)).await?)
}
