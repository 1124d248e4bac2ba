//! A sink that is stopped at any request of a takeover, and continues when the output is another run's.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use trommel_storage::local::LocalStore;
use trommel_storage::s3::Object;
use trommel_types::{Classification, Content, ErrorKind, Failure, ImageRef, Lane, Outcome};

use super::*;
use crate::Format;
use crate::part_sink::{How, PartSink};
use crate::{Claim, Opened, Preconditions};

/// What happens while a sink is stopped.
type Meanwhile = fn(Destination, Arc<Turn>) -> BoxFuture<'static, ()>;

/// Whose turn it is to write, as the broker knows it. No number is claimed in these tests.
#[derive(Debug, Default)]
struct Turn(AtomicBool);

#[async_trait]
impl Claims for Turn {
    async fn hold_output(&self) -> Result<bool, StorageError> {
        Ok(!self.0.load(Ordering::Relaxed))
    }

    async fn list(&self) -> Result<Vec<Claim>, StorageError> {
        unreachable!("the store honours preconditions")
    }

    async fn open(&self, _: u64, _: Option<u64>) -> Result<u64, StorageError> {
        unreachable!("the store honours preconditions")
    }

    async fn commit(&self, _: u64, _: u64, _: &str) -> Result<(), StorageError> {
        unreachable!("the store honours preconditions")
    }

    async fn clear(&self) -> Result<(), StorageError> {
        unreachable!("the store honours preconditions")
    }
}

/// A store whose user is stopped before one of its requests.
#[derive(Debug)]
struct Stopped {
    inner: LocalStore,
    output: Destination,
    requests: AtomicUsize,
    /// Before which request.
    at: usize,
    meanwhile: Meanwhile,
    /// Whether its job still has the output.
    turn: Arc<Turn>,
}

impl Stopped {
    async fn request(&self) -> &LocalStore {
        if self.requests.fetch_add(1, Ordering::Relaxed) == self.at {
            (self.meanwhile)(self.output.clone(), Arc::clone(&self.turn)).await;
        }
        &self.inner
    }
}

#[async_trait]
impl ObjectStore for Stopped {
    fn locate(&self, key: &str) -> String {
        self.inner.locate(key)
    }

    fn within(&self, folder: &str) -> Arc<dyn ObjectStore> {
        self.inner.within(folder)
    }

    async fn get(&self, key: &str, wanted: Get) -> Result<Bytes, StorageError> {
        self.request().await.get(key, wanted).await
    }

    fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
    ) -> BoxStream<'static, Result<Object, StorageError>> {
        self.inner.list(prefix, after)
    }

    async fn put_if_absent(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.request().await.put_if_absent(key, content).await
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.request().await.put(key, content).await
    }

    async fn replace(&self, key: &str, old: &Bytes, content: Bytes) -> Result<(), StorageError> {
        self.request().await.replace(key, old, content).await
    }

    async fn delete(&self, key: &str) -> Result<(), StorageError> {
        self.request().await.delete(key).await
    }

    async fn honours_preconditions(&self, key: &str, content: Bytes) -> Result<bool, StorageError> {
        let store = self.request().await;
        store.honours_preconditions(key, content).await
    }
}

fn output(store: Arc<dyn ObjectStore>) -> Destination {
    Destination {
        store,
        folder: None,
        file: None,
        format: Format::Jsonl,
        shown: "the output".to_owned(),
    }
}

fn job(run: &str) -> JobRecord {
    JobRecord {
        job_id: format!("job-{run}"),
        run: run.to_owned(),
        spec_hash: String::new(),
        source: "folder photos".to_owned(),
        model: "digits".to_owned(),
        model_version: "0123456789ab".to_owned(),
        options: Default::default(),
        format: Format::Jsonl,
        columns: Vec::new(),
        logits: false,
        embedding: false,
        embedding_type: Default::default(),
        escape_formulas: false,
        retry: None,
        created_at: 0,
    }
}

fn row(job: &str, index: u64) -> Arc<Classification> {
    Arc::new(Classification {
        image: ImageRef {
            job: job.into(),
            lane: Lane::Normal,
            index,
            uri: format!("photos/{index}.jpg"),
            content: Content::Whole,
            etag: None,
            size: None,
            columns: Vec::new(),
        },
        model: "digits".into(),
        model_version: "0123456789ab".into(),
        bytes: None,
        original: None,
        outcome: Outcome::Failed(Failure {
            kind: ErrorKind::NotFound,
            error: "there is no such file".to_owned(),
        }),
        attempts: 1,
        finished_at: 0,
    })
}

async fn open(output: &Destination, run: &str, turn: Arc<Turn>) -> Result<Opened, StorageError> {
    let how = How {
        reuse: Reuse::Overwrite,
        identity: Identity::Run,
        claims: Some(turn),
        preconditions: Preconditions::Honoured,
    };
    PartSink::open(output, job(run), how).await
}

/// Opens the output for a run, commits its rows in two parts, and finishes it.
async fn complete(output: &Destination, run: &str) {
    let Opened::Ready(mut sink) = open(output, run, Arc::default()).await.unwrap() else {
        panic!("{run} is already complete");
    };
    for index in 0..2 {
        sink.commit(vec![row(run, index)]).await.unwrap();
    }
    sink.finish().await.unwrap();
}

const OLD: &str = "00000000";
const STOPPED: &str = "11111111";
const LATER: &str = "22222222";

/// Runs `meanwhile` before each request of an opening in turn, until no request is left.
async fn at_each_request(meanwhile: Meanwhile, check: impl AsyncFn(usize, Destination)) {
    for at in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let inner = LocalStore::new(folder.path());
        let plain = output(Arc::new(inner.clone()));
        complete(&plain, OLD).await;
        let stopped = Arc::new(Stopped {
            inner,
            output: plain.clone(),
            requests: AtomicUsize::new(0),
            at,
            meanwhile,
            turn: Arc::default(),
        });
        let of_stopped = output(Arc::clone(&stopped) as Arc<dyn ObjectStore>);
        // It may find that it has lost the output.
        drop(open(&of_stopped, STOPPED, Arc::clone(&stopped.turn)).await);
        if stopped.requests.load(Ordering::Relaxed) <= at {
            assert!(at > 8, "an opening takes more than {at} requests");
            return;
        }
        check(at, plain).await;
    }
}

#[tokio::test]
async fn a_stopped_takeover_harms_no_run_that_took_the_output_meanwhile() {
    let marks_lost = AtomicUsize::new(0);
    let later = |output: Destination, turn: Arc<Turn>| -> BoxFuture<'static, ()> {
        Box::pin(async move {
            turn.0.store(true, Ordering::Relaxed);
            complete(&output, LATER).await;
        })
    };
    at_each_request(later, async |at, output| {
        let stored = output.stored_job().await.unwrap().unwrap();
        assert_eq!(stored.job.run, LATER, "stopped at request {at}");
        match open(&output, LATER, Arc::default()).await.unwrap() {
            Opened::Complete(summary) => assert_eq!(summary.images, 2),
            // A mark has no run in its name: it may go if the stop falls right before its removal.
            Opened::Ready(sink) => {
                marks_lost.fetch_add(1, Ordering::Relaxed);
                assert_eq!(sink.committed().len(), 2, "stopped at request {at}");
                assert_eq!(sink.finish().await.unwrap().images, 2);
            }
        }
    })
    .await;
    assert!(marks_lost.into_inner() <= 2);
}

#[tokio::test]
async fn a_stopped_takeover_keeps_the_rows_of_another_sink_of_its_run() {
    let same_run = |output: Destination, turn: Arc<Turn>| -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if let Opened::Ready(mut sink) = open(&output, STOPPED, turn).await.unwrap() {
                sink.commit(vec![row(STOPPED, 0)]).await.unwrap();
            }
        })
    };
    at_each_request(same_run, async |at, output| {
        let opened = open(&output, STOPPED, Arc::default()).await;
        let Opened::Ready(sink) = opened.unwrap() else {
            panic!("stopped at request {at}: complete with a row of two");
        };
        assert_eq!(sink.committed().len(), 1, "stopped at request {at}");
    })
    .await;
}
