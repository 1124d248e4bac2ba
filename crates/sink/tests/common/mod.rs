//! What tests of stores and databases begin with.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses some of it")]

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use async_trait::async_trait;
use tokio::runtime::Runtime;
use trommel_sink::{
    Claim, Claims, Committed, Existing, FailedImage, Format, JobRecord, Leased, Opened, Output,
    Preconditions, ResultSink, Reuse, Summary,
};
use trommel_storage::StorageError;
use trommel_storage::testsuite::S3Server;
use trommel_types::{Classification, Content, ErrorKind, Failure, ImageRef, Lane, Outcome};

/// A store with an empty bucket, `bucket`.
pub(crate) fn server() -> S3Server {
    let server = S3Server::start();
    server.create_bucket("bucket");
    server
}

/// Waits on the runtime that all connections of the tests live on.
pub(crate) fn wait<T>(future: impl Future<Output = T>) -> T {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| Runtime::new().unwrap());
    runtime.block_on(future)
}

/// A sink for tests that may block.
pub(crate) struct Sink(pub(crate) Box<dyn ResultSink>);

impl Deref for Sink {
    type Target = dyn ResultSink;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl Sink {
    pub(crate) fn commit(&mut self, rows: Vec<Classification>) -> Result<Committed, StorageError> {
        wait(self.0.commit(rows.into_iter().map(Arc::new).collect()))
    }

    pub(crate) fn existing(&mut self) -> Existing {
        wait(self.0.existing()).unwrap()
    }

    pub(crate) fn failed_images(&mut self) -> Vec<FailedImage> {
        wait(self.0.failed_images()).unwrap()
    }

    pub(crate) fn finish(self) -> Result<Summary, StorageError> {
        wait(self.0.finish())
    }
}

#[track_caller]
pub(crate) fn ready(opened: Opened) -> Sink {
    match opened {
        Opened::Ready(sink) => Sink(sink),
        Opened::Complete(_) => panic!("it is complete"),
    }
}

/// The job with the hash of its record.
pub(crate) fn hashed(job: JobRecord) -> JobRecord {
    JobRecord {
        spec_hash: job.hash(),
        ..job
    }
}

pub(crate) fn open_alone(
    output: impl Into<Output>,
    job: JobRecord,
    reuse: Reuse,
) -> Result<Opened, StorageError> {
    wait(output.into().open_alone(hashed(job), reuse))
}

pub(crate) fn open_leased(
    output: impl Into<Output>,
    job: JobRecord,
    overwrite: bool,
    claims: &Arc<KeptClaims>,
) -> Result<Opened, StorageError> {
    let lease = Leased {
        overwrite,
        claims: Arc::clone(claims) as Arc<dyn Claims>,
        preconditions: Preconditions::Probe,
    };
    wait(output.into().open_leased(hashed(job), lease))
}

/// Claims as a broker keeps them.
#[derive(Default)]
pub(crate) struct KeptClaims(Mutex<(u64, BTreeMap<u64, Claim>)>);

impl KeptClaims {
    pub(crate) fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, Claim>)> {
        self.0.lock().unwrap()
    }

    fn set(
        &self,
        part: u64,
        expected: Option<u64>,
        committed: Option<&str>,
    ) -> Result<u64, StorageError> {
        let mut kept = self.lock();
        if kept.1.get(&part).map(|claim| claim.revision) != expected {
            return Err(StorageError::lost_race(format!("the claim of part {part}")));
        }
        kept.0 += 1;
        let claim = Claim {
            part,
            revision: kept.0,
            committed: committed.map(str::to_owned),
        };
        kept.1.insert(part, claim);
        Ok(kept.0)
    }
}

#[async_trait]
impl Claims for KeptClaims {
    async fn list(&self) -> Result<Vec<Claim>, StorageError> {
        Ok(self.lock().1.values().cloned().collect())
    }

    async fn open(&self, part: u64, replaces: Option<u64>) -> Result<u64, StorageError> {
        self.set(part, replaces, None)
    }

    async fn commit(&self, part: u64, revision: u64, object: &str) -> Result<(), StorageError> {
        self.set(part, Some(revision), Some(object)).map(drop)
    }

    async fn clear(&self) -> Result<(), StorageError> {
        self.lock().1.clear();
        Ok(())
    }
}

pub(crate) fn image(uri: &str, content: Content) -> ImageRef {
    ImageRef {
        job: "job".into(),
        index: 0,
        lane: Lane::Normal,
        uri: uri.to_owned(),
        content,
        etag: None,
        size: None,
        columns: Vec::new(),
    }
}

pub(crate) fn record() -> JobRecord {
    JobRecord {
        job_id: "job".to_owned(),
        source: "s3://bucket/images/".to_owned(),
        model: "digits".to_owned(),
        model_version: "0123456789ab".to_owned(),
        run: "0a1b2c3d".to_owned(),
        spec_hash: String::new(),
        options: BTreeMap::from([("top-k".to_owned(), "5".to_owned())]),
        format: Format::Parquet,
        columns: Vec::new(),
        logits: false,
        embedding: false,
        embedding_type: Default::default(),
        escape_formulas: false,
        retry: None,
        created_at: 1,
    }
}

/// The row of an image that is empty.
pub(crate) fn row(index: u64, uri: &str) -> Classification {
    Classification {
        image: ImageRef {
            index,
            ..image(uri, Content::Whole)
        },
        model: "digits".into(),
        model_version: "0123456789ab".into(),
        bytes: None,
        original: None,
        outcome: Outcome::Failed(Failure {
            kind: ErrorKind::Empty,
            error: "it holds no bytes".to_owned(),
        }),
        attempts: 1,
        finished_at: 0,
    }
}
