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

/// Time an operation is repeated before it is given up.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

/// The bucket of job records, checkpoints and leases. Keys hold ASCII letters, digits and `-/_=.`;
/// see [`subject_token`](super::subject_token).
///
/// [`get`](Self::get) and [`scan`](Self::scan) read what the leader of the bucket's stream holds, never
/// an older state from a replica that lags. A leader that was cut off from the others may answer for
/// some seconds more; a compare-and-set on what it said then fails.
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
    /// Grows with every change in the bucket. What a compare-and-set compares.
    pub revision: u64,
}

impl Broker {
    /// The bucket of job records, checkpoints and leases.
    ///
    /// # Errors
    /// When it is not there: call [`Broker::ensure_streams`] first.
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
    /// The value of a key, if it exists.
    ///
    /// # Errors
    /// When the broker does not answer, or the key is invalid.
    pub async fn get(&self, key: &str) -> Result<Option<Entry>, QueueError> {
        Ok(self.newest(key).await?.ok())
    }

    /// All keys below `prefix` that have a value, with it, in order; `prefix` is empty or ends with a
    /// dot. One pass of the server over the bucket, whatever their number: some 100,000 records a
    /// second. Holds at least what the bucket held when the scan began; what changes meanwhile may be
    /// seen or not.
    ///
    /// # Errors
    /// When the broker does not answer, or the prefix is invalid.
    pub async fn scan(&self, prefix: &str) -> Result<Vec<Entry>, QueueError> {
        let mut entries: Vec<Entry> = self.fold(prefix, Vec::push).await?;
        entries.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        Ok(entries)
    }

    /// As [`Kv::scan`], each record handed to `fold` as it comes, in no order, so that not all of them are
    /// held at once. A scan that is interrupted begins again with an empty `T`.
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

    /// The keys below `prefix` that have a value, in order; as [`Kv::scan`] without the values.
    ///
    /// # Errors
    /// As [`Kv::scan`].
    pub async fn keys(&self, prefix: &str) -> Result<Vec<String>, QueueError> {
        let add = |keys: &mut Vec<String>, entry: Entry| keys.push(entry.key);
        let mut keys = self.scanned(prefix, true, add).await?;
        keys.sort_unstable();
        Ok(keys)
    }

    /// Sets a key that has no value; gives its revision, or `None` when another was first.
    ///
    /// When the broker's answer is lost, the key is read back: if it holds these very bytes, they
    /// count as ours. So a value that several may write at once must name its writer.
    ///
    /// # Errors
    /// When the broker does not answer or has no room, the key is invalid, or the value too large.
    pub async fn create(&self, key: &str, value: Bytes) -> Result<Option<u64>, QueueError> {
        match self.compare_and_set(key, value.clone(), 0).await? {
            Some(revision) => Ok(Some(revision)),
            // Another's value, or the mark that a removed one has left.
            None => match self.newest(key).await? {
                Err(Some(mark)) => self.compare_and_set(key, value, mark).await,
                Err(None) | Ok(_) => Ok(None),
            },
        }
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
    /// As [`Kv::create`].
    pub async fn put(&self, key: &str, value: Bytes) -> Result<u64, QueueError> {
        self.set(key, value, HeaderMap::new()).await
    }

    /// Removes a key's value and leaves a mark that watchers see.
    ///
    /// # Errors
    /// As [`Kv::create`].
    pub async fn delete(&self, key: &str) -> Result<(), QueueError> {
        let mut headers = HeaderMap::new();
        headers.insert(OPERATION, "DEL");
        self.set(key, Bytes::new(), headers).await.map(drop)
    }

    /// Removes a key, or all keys below a prefix that ends with a dot, and leaves no mark: watchers see
    /// nothing, and the bucket gets smaller. Returns how many records went, marks included.
    ///
    /// # Errors
    /// When the broker does not answer, or key or prefix are invalid.
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

    /// Follows the keys below `prefix`, which is empty or ends with a dot: first what they hold, then
    /// every change. After the connection was lost it reports what changed meanwhile; of several
    /// changes of one key only the last may be reported. What [`Kv::remove`] removes is not.
    ///
    /// # Errors
    /// [`Misconfigured`](QueueErrorKind::Misconfigured) when the prefix does not end with a dot, and
    /// when the broker does not answer.
    pub async fn watch(&self, prefix: &str) -> Result<Watch, QueueError> {
        let filter = below(prefix)?;
        Watch::open(&self.broker, &self.bucket, filter).await
    }

    /// The entry of a key; if it has none, the revision of the mark that a removed one has left.
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
            // What the leader has; a replica that lags may serve the scan.
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
                // An earlier attempt may have been the one that won.
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

    /// The stream that the bucket is.
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
