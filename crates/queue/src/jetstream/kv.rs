use async_nats::HeaderMap;
use async_nats::header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE;
use bytes::Bytes;
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::warn;

use super::answers::ErrorCode;
use super::backoff::Backoff;
use super::broker::Broker;
use super::peek::newest;
use super::publish::{Attempt, store};
use super::scan::{OPERATION, Record, Scanned, scan};
use super::streams::bucket_name;
use super::watch::Watch;
use crate::{QueueError, QueueErrorKind};

/// Time for which an operation is repeated before it fails.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

/// The bucket of job records, checkpoints and leases. Keys consist of ASCII letters, digits and
/// `-/_=.`; see [`subject_token`](super::subject_token).
///
/// [`get`](Self::get) and [`scan`](Self::scan) read the state of the leader of the bucket's stream,
/// never an older state of a replica. A partitioned leader may answer for some more seconds; a
/// compare-and-set based on its answer then fails.
///
/// Every operation is repeated for half a minute while the broker does not answer, or while the account
/// has no room.
#[derive(Clone)]
pub struct Kv {
    broker: Broker,
    bucket: String,
}

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Bytes,
    /// Grows with every change in the bucket; compared by compare-and-set.
    pub revision: u64,
}

impl Broker {
    /// The bucket of job records, checkpoints and leases.
    ///
    /// # Errors
    /// If it does not exist: call [`Broker::ensure_streams`] first.
    pub async fn kv(&self) -> Result<Kv, QueueError> {
        let kv = Kv {
            broker: self.clone(),
            bucket: bucket_name(&self.config().prefix),
        };
        let gone = [ErrorCode::STREAM_NOT_FOUND];
        let api = format!("STREAM.INFO.{}", kv.stream());
        let found: Option<Value> = self.ask(&api, &json!({}), &gone).await?;
        match found {
            Some(_) => Ok(kv),
            None => Err(QueueError::new(
                QueueErrorKind::Misconfigured,
                format!("bucket {} does not exist", kv.bucket),
            )),
        }
    }
}

impl Kv {
    /// The value of a key, if any.
    ///
    /// # Errors
    /// If the broker does not answer, or the key is invalid.
    pub async fn get(&self, key: &str) -> Result<Option<Entry>, QueueError> {
        Ok(self.newest(key).await?.ok())
    }

    /// All keys with a value below `prefix`, with their values, in order; `prefix` is empty or ends
    /// with a dot. The server makes one pass over the bucket, at about 100,000 records per second.
    /// Includes at least the contents at the start of the scan; concurrent changes may be included
    /// or not.
    ///
    /// # Errors
    /// If the broker does not answer, or the prefix is invalid.
    pub async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, QueueError> {
        let mut entries: Vec<Entry> = self.fold(prefix, Vec::push).await?;
        entries.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(entries)
    }

    /// As [`Kv::scan`], but passes each record to `fold` as it arrives, in no order, so that they
    /// are not all held at once. An interrupted scan starts again with an empty `T`.
    ///
    /// # Errors
    /// As [`Kv::scan`].
    pub async fn fold<T: Default>(
        &self,
        prefix: &str,
        fold: impl FnMut(&mut T, Entry),
    ) -> Result<T, QueueError> {
        self.scanned(prefix, false, fold).await
    }

    /// The keys with a value below `prefix`, in order; as [`Kv::scan`] without the values.
    ///
    /// # Errors
    /// As [`Kv::scan`].
    pub async fn keys(&self, prefix: &str) -> Result<Vec<String>, QueueError> {
        let add = |keys: &mut Vec<String>, entry: Entry| keys.push(entry.key);
        let mut keys = self.scanned(prefix, true, add).await?;
        keys.sort_unstable();
        Ok(keys)
    }

    /// Sets a key without a value; returns its revision, or `None` if another writer was first.
    ///
    /// If the broker's answer is lost, the key is read back: if it has exactly these bytes, they
    /// count as ours. So a value with several possible writers must name its writer.
    ///
    /// # Errors
    /// If the broker does not answer or has no room, the key is invalid, or the value too large.
    pub async fn create(&self, key: &str, value: Bytes) -> Result<Option<u64>, QueueError> {
        match self.compare_and_set(key, value.clone(), 0).await? {
            Some(revision) => Ok(Some(revision)),
            // Another writer's value, or the marker of a removed one.
            None => match self.newest(key).await? {
                Err(Some(mark)) => self.compare_and_set(key, value, mark).await,
                Err(None) | Ok(_) => Ok(None),
            },
        }
    }

    /// Sets a key that is still at `revision`; returns the new revision, or `None` if another
    /// writer was first. A lost answer is resolved as for [`Kv::create`].
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

    /// Sets a key unconditionally; returns the new revision.
    ///
    /// # Errors
    /// As [`Kv::create`].
    pub async fn put(&self, key: &str, value: Bytes) -> Result<u64, QueueError> {
        self.set(key, value, HeaderMap::new()).await
    }

    /// Removes a key's value and leaves a marker that watchers see.
    ///
    /// # Errors
    /// As [`Kv::create`].
    pub async fn delete(&self, key: &str) -> Result<(), QueueError> {
        let mut headers = HeaderMap::new();
        headers.insert(OPERATION, "DEL");
        self.set(key, Bytes::new(), headers).await.map(drop)
    }

    /// Removes a key, or all keys below a prefix that ends with a dot, without a marker: watchers
    /// see nothing, and the bucket shrinks. Returns how many records were removed, including
    /// markers.
    ///
    /// # Errors
    /// If the broker does not answer, or key or prefix are invalid.
    pub async fn remove(&self, prefix_or_key: &str) -> Result<u64, QueueError> {
        let filter = match prefix_or_key.strip_suffix('.') {
            Some(prefix) => {
                check(prefix)?;
                format!("{prefix}.>")
            }
            None => {
                check(prefix_or_key)?;
                prefix_or_key.to_owned()
            }
        };
        self.broker
            .purge(&self.stream(), &self.subject(&filter))
            .await
    }

    /// Watches the keys below `prefix`, which is empty or ends with a dot: first their current
    /// values, then every change. After a lost connection it reports the changes meanwhile; of
    /// several changes of one key it may report only the last. Removals by [`Kv::remove`] are not
    /// reported.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) if the prefix does not end with a dot, and
    /// if the broker does not answer.
    pub async fn watch(&self, prefix: &str) -> Result<Watch, QueueError> {
        let filter = below(prefix)?;
        Watch::open(&self.broker, &self.bucket, filter).await
    }

    /// The entry of a key; without a value, the revision of the marker of a removed one.
    async fn newest(&self, key: &str) -> Result<Result<Entry, Option<u64>>, QueueError> {
        check(key)?;
        let held = newest(&self.broker, &self.stream(), &self.subject(key)).await?;
        Ok(match held {
            None => Err(None),
            Some(held) if held.headers.get(OPERATION).is_some() => Err(Some(held.sequence)),
            Some(held) => Ok(Entry {
                key: key.to_owned(),
                value: held.payload,
                revision: held.sequence,
            }),
        })
    }

    async fn scanned<T: Default>(
        &self,
        prefix: &str,
        keys_only: bool,
        mut fold: impl FnMut(&mut T, Entry),
    ) -> Result<T, QueueError> {
        let (stream, subject) = (self.stream(), self.subject(&below(prefix)?));
        let bucket = self.subject("");
        let mut add = |(seen, all): &mut (Option<u64>, T), record: Record| {
            *seen = (*seen).max(Some(record.sequence));
            let Some(key) = record.subject.strip_prefix(&bucket) else {
                return;
            };
            if !record.is_mark {
                let entry = Entry {
                    key: key.to_owned(),
                    value: record.payload,
                    revision: record.sequence,
                };
                fold(all, entry);
            }
        };
        let mut patience = Patience::new(prefix, "scan");
        loop {
            // The leader's state; a lagging replica may serve the scan.
            let Some(newest) = newest(&self.broker, &stream, &subject).await? else {
                return Ok(T::default());
            };
            match scan(&self.broker, &stream, &subject, keys_only, &mut add).await? {
                Scanned::Whole((seen, all)) if seen.is_some_and(|seen| seen >= newest.sequence) => {
                    return Ok(all);
                }
                Scanned::Whole(_) => {
                    let reason = "a replica lags, or records were removed meanwhile";
                    patience.wait(reason).await?;
                }
                Scanned::Broken(reason) => patience.wait(reason).await?,
            }
        }
    }

    async fn compare_and_set(
        &self,
        key: &str,
        value: Bytes,
        revision: u64,
    ) -> Result<Option<u64>, QueueError> {
        let mut headers = HeaderMap::new();
        headers.insert(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, revision.to_string());
        let mut patience = Patience::new(key, "set");
        let mut unanswered = false;
        loop {
            match self.attempt(key, &headers, &value).await? {
                Attempt::Stored { sequence, .. } => return Ok(Some(sequence)),
                Attempt::Conflict if !unanswered => return Ok(None),
                // An earlier attempt may have succeeded.
                Attempt::Conflict => {
                    let found = self.get(key).await?;
                    let ours = found.filter(|found| found.value == value);
                    return Ok(ours
                        .filter(|found| found.revision > revision)
                        .map(|found| found.revision));
                }
                failed => {
                    unanswered |= matches!(failed, Attempt::Unanswered(_));
                    patience.wait_after(failed).await?;
                }
            }
        }
    }

    async fn set(&self, key: &str, value: Bytes, headers: HeaderMap) -> Result<u64, QueueError> {
        let mut patience = Patience::new(key, "set");
        loop {
            match self.attempt(key, &headers, &value).await? {
                Attempt::Stored { sequence, .. } => return Ok(sequence),
                failed => patience.wait_after(failed).await?,
            }
        }
    }

    async fn attempt(
        &self,
        key: &str,
        headers: &HeaderMap,
        value: &Bytes,
    ) -> Result<Attempt, QueueError> {
        check(key)?;
        store(&self.broker, &self.subject(key), headers, value).await
    }

    /// The stream of the bucket.
    fn stream(&self) -> String {
        format!("KV_{}", self.bucket)
    }

    fn subject(&self, key: &str) -> String {
        format!("$KV.{}.{key}", self.bucket)
    }
}

/// The filter of all keys below a prefix.
fn below(prefix: &str) -> Result<String, QueueError> {
    if let Some(tokens) = prefix.strip_suffix('.') {
        check(tokens)?;
    } else if !prefix.is_empty() {
        return Err(QueueError::new(
            QueueErrorKind::Misconfigured,
            format!("prefix {prefix:?} of keys does not end with a dot"),
        ));
    }
    Ok(format!("{prefix}>"))
}

/// Refuses at once what would fail at every repeat.
fn check(key: &str) -> Result<(), QueueError> {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-/_=.".contains(&byte);
    let dots = key.starts_with('.') || key.ends_with('.') || key.contains("..");
    if key.is_empty() || dots || !key.bytes().all(valid) {
        return Err(QueueError::new(
            QueueErrorKind::Misconfigured,
            format!("key {key:?} is invalid: it may hold ASCII letters, digits and -/_=."),
        ));
    }
    Ok(())
}

/// How long an operation has been without an answer.
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

    async fn wait(&mut self, reason: impl Into<String>) -> Result<(), QueueError> {
        let reason = reason.into();
        if Instant::now() >= self.give_up {
            let Self { key, what, .. } = self;
            let text = format!("failed to {what} {key}: {reason}");
            return Err(QueueError::new(QueueErrorKind::Unreachable, text));
        }
        self.pause(reason).await;
        Ok(())
    }

    async fn wait_after(&mut self, failed: Attempt) -> Result<(), QueueError> {
        match failed {
            Attempt::AccountLimit(error) if Instant::now() >= self.give_up => Err(error),
            Attempt::AccountLimit(error) => {
                self.pause(error.to_string()).await;
                Ok(())
            }
            Attempt::Unanswered(reason) => self.wait(reason).await,
            Attempt::Full => self.wait("the bucket is full").await,
            Attempt::Conflict | Attempt::Stored { .. } => self.wait("unexpected answer").await,
        }
    }

    async fn pause(&mut self, reason: String) {
        if self.backoff.warn_now() {
            let Self { key, what, .. } = self;
            warn!(
                key,
                operation = what,
                reason,
                "the bucket did not do it, trying again"
            );
        }
        self.backoff.wait().await;
    }
}
