use std::pin::Pin;
use std::task::{Context, Poll};

use async_nats::jetstream::kv::{Operation, Watch as Watcher};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::sync::mpsc;
use tokio::time::{Duration, Instant};
use tracing::warn;

use super::backoff::Backoff;
use super::broker::Broker;
use super::connect::Begun;
use crate::{QueueError, QueueErrorKind};

/// Buffered changes before the server has to wait.
const BUFFER: usize = 64;
/// Time limit for establishing the first watch.
const PATIENCE: Duration = Duration::from_secs(30);

/// A change of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: String,
    /// The new value; `None` when the key was deleted.
    pub value: Option<Bytes>,
    /// Its revision.
    pub revision: u64,
}

/// Changes of watched keys; see [`Kv::watch`](super::Kv::watch). Dropping it ends the watch.
#[derive(Debug)]
pub struct Watch {
    changes: mpsc::Receiver<Change>,
}

impl Watch {
    pub(super) async fn open(
        broker: &Broker,
        bucket: &str,
        filter: String,
    ) -> Result<Self, QueueError> {
        let watched = Watched {
            broker: broker.clone(),
            bucket: bucket.to_owned(),
            filter,
        };
        let give_up = Instant::now() + PATIENCE;
        let mut backoff = Backoff::new();
        let opened = loop {
            let reason = match watched.open().await? {
                Ok(opened) => break opened,
                Err(reason) => reason,
            };
            if Instant::now() >= give_up {
                let text = format!("failed to watch {}: {reason}", watched.filter);
                return Err(QueueError::new(QueueErrorKind::Unreachable, text));
            }
            backoff.wait().await;
        };
        let (sender, changes) = mpsc::channel(BUFFER);
        tokio::spawn(watched.follow(opened, sender));
        Ok(Self { changes })
    }

    /// The next change; `None` once the broker is drained. Cancel-safe.
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

/// The parameters of a watch.
struct Watched {
    broker: Broker,
    bucket: String,
    filter: String,
}

impl Watched {
    /// Starts watching, or returns why that failed.
    async fn open(&self) -> Result<Result<(Begun, Watcher), String>, QueueError> {
        let begun = self.broker.link().up().await;
        let opened = async {
            let store = self.broker.context().get_key_value(&*self.bucket).await;
            let store = store.map_err(|error| error.to_string())?;
            let watcher = store.watch_with_history(&self.filter).await;
            let watcher = watcher.map_err(|error| error.to_string())?;
            Ok((begun, watcher))
        };
        let stream = format!("KV_{}", self.bucket);
        let opened = self.broker.uninterrupted(begun, &stream, opened).await?;
        Ok(opened.unwrap_or_else(|| Err("the connection was lost".to_owned())))
    }

    /// Watches again after each lost connection, and reports nothing twice.
    async fn follow(self, opened: (Begun, Watcher), changes: mpsc::Sender<Change>) {
        let (mut begun, mut watcher) = opened;
        let stream = format!("KV_{}", self.bucket);
        let mut reported = 0;
        let mut backoff = Backoff::new();
        loop {
            let passed = pass_on(watcher, &mut reported, &changes);
            let mut reason = tokio::select! {
                passed = self.broker.uninterrupted(begun, &stream, passed) => match passed {
                    Ok(Some(reason)) => reason,
                    Ok(None) => String::new(), // reported where the connection is
                    Err(error) => error.to_string(),
                },
                () = changes.closed() => return,
            };
            (begun, watcher) = loop {
                if !reason.is_empty() && backoff.warn_now() {
                    warn!(
                        filter = self.filter,
                        reason, "the watch ended, watching again"
                    );
                }
                let opened = tokio::select! {
                    opened = self.open() => opened,
                    () = changes.closed() => return,
                };
                reason = match opened {
                    Ok(Ok(opened)) => break opened,
                    Ok(Err(reason)) => reason,
                    Err(error) => error.to_string(),
                };
                backoff.wait().await;
            };
        }
    }
}

/// Passes changes on until the watch breaks; returns the reason.
async fn pass_on(
    mut watcher: Watcher,
    reported: &mut u64,
    changes: &mpsc::Sender<Change>,
) -> String {
    while let Some(entry) = watcher.next().await {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => return error.to_string(),
        };
        // History comes in order of revision, so older changes were already reported.
        if entry.revision <= *reported {
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
        *reported = entry.revision;
    }
    "it ended".to_owned()
}
