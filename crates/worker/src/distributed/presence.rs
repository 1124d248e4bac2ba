//! Workers that are alive, and the models they hold.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::WorkerError;
use crate::distributed::names::key;
use crate::distributed::registry::Registry;
use crate::distributed::repository::Repository;
use crate::distributed::worker::Role;
use crate::settle::now;

/// Time between two signs of life.
const BEAT: Duration = Duration::from_secs(2);
/// A worker that gave none for this long is dead.
const DEAD_AFTER: Duration = Duration::from_secs(20);

/// A worker as the others see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Presence {
    /// Names the process.
    pub id: String,
    /// What it does.
    pub roles: Vec<Role>,
    /// Versions of the models in its repository, by name.
    pub models: BTreeMap<String, String>,
    /// When it was last alive, in microseconds since the Unix epoch, UTC.
    pub seen_at: i64,
    /// What it has done since its start, by role.
    #[serde(default)]
    pub work: Vec<StageWork>,
}

/// What a process has done in a role since its start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageWork {
    /// The role.
    pub role: Role,
    /// Threads that work at it.
    pub threads: usize,
    /// Images that it is done with.
    pub images: u64,
    /// Seconds that its threads worked at them, summed.
    pub busy_seconds: f64,
}

impl Presence {
    /// Makes this process known, unless it contradicts one that is alive.
    ///
    /// # Errors
    /// When another worker has another content under the same name of a model.
    pub(crate) async fn announce(
        registry: &Registry,
        roles: &[Role],
        repository: &Repository,
    ) -> Result<Self, WorkerError> {
        let mut models = BTreeMap::new();
        for name in repository.names_here() {
            // One that cannot be read is told when a job names it.
            if let Ok(model) = repository.model_here(&name) {
                models.insert(name, model.id.version.to_string());
            }
        }
        let mine = Self {
            id: uuid::Uuid::now_v7().to_string(),
            roles: roles.to_vec(),
            models,
            seen_at: now(),
            work: Vec::new(),
        };
        for key in registry.kv().keys(key::WORKERS).await? {
            let Some((other, _)) = registry.read::<Self>(&key).await? else {
                continue;
            };
            if other.is_alive() {
                mine.check(&other)?;
            } else {
                registry.kv().purge(&key).await?;
            }
        }
        registry.put(&key::worker(&mine.id), &mine).await?;
        Ok(mine)
    }

    /// Workers that gave a sign of life not long ago.
    pub(crate) async fn alive(registry: &Registry) -> Result<Vec<Self>, WorkerError> {
        let mut alive = Vec::new();
        for key in registry.kv().keys(key::WORKERS).await? {
            let worker = registry.read::<Self>(&key).await?;
            alive.extend(worker.map(|(worker, _)| worker).filter(Self::is_alive));
        }
        Ok(alive)
    }

    pub(crate) fn has(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    fn is_alive(&self) -> bool {
        let age = now().saturating_sub(self.seen_at);
        u64::try_from(age).is_ok_and(|age| Duration::from_micros(age) < DEAD_AFTER) || age < 0
    }

    fn check(&self, other: &Self) -> Result<(), WorkerError> {
        for (name, version) in &self.models {
            match other.models.get(name) {
                Some(found) if found != version => {
                    return Err(WorkerError::Settings(format!(
                        "model {name} is version {version} here but {found} at worker {}, which is alive; give all workers the same model, or new content a new folder {name}/VERSION",
                        other.id
                    )));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Gives signs of life until `shutdown` fires.
pub(crate) async fn keep(
    registry: Registry,
    presence: Presence,
    work: impl Fn() -> Vec<StageWork>,
    shutdown: CancellationToken,
) -> Result<(), WorkerError> {
    let key = key::worker(&presence.id);
    while shutdown
        .run_until_cancelled(tokio::time::sleep(BEAT))
        .await
        .is_some()
    {
        let alive = Presence {
            seen_at: now(),
            work: work(),
            ..presence.clone()
        };
        // The others count it as dead meanwhile, which only concerns versions of models.
        if let Err(error) = registry.put(&key, &alive).await {
            tracing::warn!(%error, "no sign of life was given");
        }
    }
    registry.kv().purge(&key).await?;
    Ok(())
}
