use std::fmt::Display;
use std::pin::Pin;
use std::task::{Context, Poll};

use async_nats::jetstream::kv::{
    CreateErrorKind, Operation, Store, UpdateErrorKind, Watch as Watcher,
};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::warn;

use super::Broker;
use super::backoff::Backoff;
use super::streams::bucket_name;
use crate::{QueueError, QueueErrorKind};

/// Changes that a watcher may be behind by before the server has to wait.
const WATCH_BUFFER: usize = 64;
/// Time an operation is repeated before it is given up.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

/// The bucket of job records, checkpoints and leases. Keys hold ASCII letters, digits and `-/_=.`;
/// see [`subject_token`](super::subject_token).
///
/// Every operation is repeated for half a minute while the broker does not answer.
#[derive(Clone)]
pub struct Kv {
    broker: Broker,
    store: Store,
}

/// The value of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The value.
    pub value: Bytes,
    /// Grows with every change in the bucket. What a compare-and-set compares.
    pub revision: u64,
}

/// A change of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: String,
    /// The new value; `None` when the key was removed.
    pub value: Option<Bytes>,
    /// Its revision.
    pub revision: u64,
}

/// How an attempt to write ended.
enum Attempt {
    Written(u64),
    /// The key is not as expected.
    Conflict,
    /// Nobody knows.
    Unanswered(String),
}

impl Kv {
    pub(super) async fn open(broker: &Broker) -> Result<Self, QueueError> {
        let name = bucket_name(&broker.config().prefix);
        match broker.context().get_key_value(name.as_str()).await {
            Ok(store) => Ok(Self {
                broker: broker.clone(),
                store,
            }),
            Err(error) => Err(QueueError::new(
                QueueErrorKind::Misconfigured,
                format!("failed to open bucket {name}: {error}"),
            )),
        }
    }

    /// The value of a key; `None` when it has none.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub async fn get(&self, key: &str) -> Result<Option<Entry>, QueueError> {
        let mut patience = Patience::new(key, "get");
        loop {
            match self.store.entry(key).await {
                Ok(entry) => {
                    let put = entry.filter(|entry| entry.operation == Operation::Put);
                    return Ok(put.map(|entry| Entry {
                        value: entry.value,
                        revision: entry.revision,
                    }));
                }
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    /// Sets a key that has no value; gives its revision, or `None` when another was first.
    ///
    /// When the broker's answer is lost, the key is read back: if it holds these very bytes, they
    /// count as ours. So a value that several may write at once must name its writer.
    ///
    /// # Errors
    /// When the broker does not answer, or the key is none.
    pub async fn create(&self, key: &str, value: Bytes) -> Result<Option<u64>, QueueError> {
        self.compare_and_set(key, value, 0).await
    }

    /// Sets a key that is still at `revision`; gives the new one, or `None` when another was first.
    /// A lost answer is resolved as for [`Kv::create`].
    ///
    /// # Errors
    /// As [`Kv::create`].
    pub async fn update(
        &self,
        key: &str,
        value: Bytes,
        revision: u64,
    ) -> Result<Option<u64>, QueueError> {
        self.compare_and_set(key, value, revision).await
    }

    /// Sets a key, whatever it holds; gives the new revision.
    ///
    /// # Errors
    /// When the broker does not answer, or the key is none.
    pub async fn put(&self, key: &str, value: Bytes) -> Result<u64, QueueError> {
        check(key)?;
        let mut patience = Patience::new(key, "put");
        loop {
            self.broker.link().up().await;
            match self.store.put(key, value.clone()).await {
                Ok(revision) => return Ok(revision),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    /// Removes a key's value and leaves a mark that watchers see.
    ///
    /// # Errors
    /// When the broker does not answer, or the key is none.
    pub async fn delete(&self, key: &str) -> Result<(), QueueError> {
        check(key)?;
        let mut patience = Patience::new(key, "delete");
        loop {
            self.broker.link().up().await;
            match self.store.delete(key).await {
                Ok(()) => return Ok(()),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    /// Removes a key's value and history, and leaves a mark that watchers see.
    ///
    /// # Errors
    /// When the broker does not answer, or the key is none.
    pub async fn purge(&self, key: &str) -> Result<(), QueueError> {
        check(key)?;
        let mut patience = Patience::new(key, "purge");
        loop {
            self.broker.link().up().await;
            match self.store.purge(key).await {
                Ok(()) => return Ok(()),
                Err(error) => patience.wait(error).await?,
            }
        }
    }

    /// The keys that have a value and begin with `prefix`, in order. Reads the whole bucket's keys.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub async fn keys(&self, prefix: &str) -> Result<Vec<String>, QueueError> {
        let mut patience = Patience::new(prefix, "list keys");
        'again: loop {
            let mut listed = match self.store.keys().await {
                Ok(listed) => listed,
                Err(error) => {
                    patience.wait(error).await?;
                    continue;
                }
            };
            let mut keys = Vec::new();
            while let Some(key) = listed.next().await {
                match key {
                    Ok(key) if key.starts_with(prefix) => keys.push(key),
                    Ok(_) => {}
                    Err(error) => {
                        patience.wait(error).await?;
                        continue 'again;
                    }
                }
            }
            keys.sort_unstable();
            keys.dedup();
            return Ok(keys);
        }
    }

    /// Follows the keys below `prefix`, which is empty or ends with a dot: first what they hold, then
    /// every change. After the connection was lost it tells of what changed meanwhile; of several
    /// changes of one key only the last may be told.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) when the prefix does not end with a dot.
    pub async fn watch(&self, prefix: &str) -> Result<Watch, QueueError> {
        if !prefix.is_empty() && !prefix.ends_with('.') {
            return Err(QueueError::new(
                QueueErrorKind::Misconfigured,
                format!("watched prefix {prefix:?} does not end with a dot"),
            ));
        }
        let (sender, changes) = mpsc::channel(WATCH_BUFFER);
        tokio::spawn(follow(self.clone(), format!("{prefix}>"), sender));
        Ok(Watch { changes })
    }

    async fn compare_and_set(
        &self,
        key: &str,
        value: Bytes,
        revision: u64,
    ) -> Result<Option<u64>, QueueError> {
        check(key)?;
        let mut patience = Patience::new(key, "set");
        let mut unanswered = false;
        loop {
            self.broker.link().up().await;
            match self.attempt(key, value.clone(), revision).await {
                Attempt::Written(revision) => return Ok(Some(revision)),
                Attempt::Conflict if !unanswered => return Ok(None),
                // An earlier attempt may have been the one that won.
                Attempt::Conflict => {
                    let found = self.get(key).await?;
                    let ours = found.filter(|found| found.value == value);
                    return Ok(ours
                        .filter(|found| found.revision > revision)
                        .map(|found| found.revision));
                }
                Attempt::Unanswered(reason) => {
                    unanswered = true;
                    patience.wait(reason).await?;
                }
            }
        }
    }

    async fn attempt(&self, key: &str, value: Bytes, revision: u64) -> Attempt {
        if revision == 0 {
            return match self.store.create(key, value).await {
                Ok(revision) => Attempt::Written(revision),
                Err(error) if error.kind() == CreateErrorKind::AlreadyExists => Attempt::Conflict,
                Err(error) => Attempt::Unanswered(error.to_string()),
            };
        }
        match self.store.update(key, value, revision).await {
            Ok(revision) => Attempt::Written(revision),
            Err(error) if error.kind() == UpdateErrorKind::WrongLastRevision => Attempt::Conflict,
            Err(error) => Attempt::Unanswered(error.to_string()),
        }
    }
}

/// Refuses at once what would fail at every repeat.
fn check(key: &str) -> Result<(), QueueError> {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-/_=.".contains(&byte);
    let dots = key.starts_with('.') || key.ends_with('.') || key.contains("..");
    if key.is_empty() || dots || !key.bytes().all(valid) {
        return Err(QueueError::new(
            QueueErrorKind::Misconfigured,
            format!("key {key:?} is none: it may hold ASCII letters, digits and -/_=."),
        ));
    }
    Ok(())
}

/// How long an operation has gone without an answer.
struct Patience<'a> {
    key: &'a str,
    what: &'static str,
    give_up: Instant,
    backoff: Backoff,
}

impl<'a> Patience<'a> {
    fn new(key: &'a str, what: &'static str) -> Self {
        Self {
            key,
            what,
            give_up: Instant::now() + PATIENCE,
            backoff: Backoff::new(),
        }
    }

    async fn wait(&mut self, reason: impl Display) -> Result<(), QueueError> {
        let Self { key, what, .. } = self;
        if Instant::now() >= self.give_up {
            return Err(QueueError::new(
                QueueErrorKind::Unreachable,
                format!("failed to {what} {key}: {reason}"),
            ));
        }
        if self.backoff.warn_now() {
            warn!(key, operation = what, %reason, "no answer from the bucket, asking again");
        }
        self.backoff.wait().await;
        Ok(())
    }
}

/// The changes of watched keys; see [`Kv::watch`]. Dropping it ends the watch.
#[derive(Debug)]
pub struct Watch {
    changes: mpsc::Receiver<Change>,
}

impl Watch {
    /// The next change; `None` when the broker was drained. Cancel-safe.
    pub async fn next(&mut self) -> Option<Change> {
        self.changes.recv().await
    }
}

impl Stream for Watch {
    type Item = Change;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Change>> {
        self.changes.poll_recv(cx)
    }
}

/// Watches anew whenever the connection was lost, and tells nothing twice.
async fn follow(kv: Kv, filter: String, changes: mpsc::Sender<Change>) {
    let link = kv.broker.link().clone();
    let mut told = 0;
    let mut backoff = Backoff::new();
    loop {
        let losses = link.up().await;
        let opened = tokio::select! {
            opened = kv.store.watch_with_history(&filter) => opened,
            () = changes.closed() => return,
        };
        let reason = match opened {
            Ok(watcher) => {
                tokio::select! {
                    reason = tell(watcher, &mut told, &changes) => reason,
                    () = link.lost(losses) => continue,
                    () = changes.closed() => return,
                }
            }
            Err(error) => error.to_string(),
        };
        if backoff.warn_now() {
            warn!(filter, reason, "the watch ended, watching again");
        }
        backoff.wait().await;
    }
}

/// Passes changes on until the watch breaks; says why it did.
async fn tell(mut watcher: Watcher, told: &mut u64, changes: &mpsc::Sender<Change>) -> String {
    while let Some(entry) = watcher.next().await {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => return error.to_string(),
        };
        // History comes in the order of revisions, so what is older was told.
        if entry.revision <= *told {
            continue;
        }
        let change = Change {
            value: (entry.operation == Operation::Put).then_some(entry.value),
            key: entry.key,
            revision: entry.revision,
        };
        if changes.send(change).await.is_err() {
            break;
        }
        *told = entry.revision;
    }
    "it ended".to_owned()
}
