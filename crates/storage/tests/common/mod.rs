//! What tests of stores and databases begin with.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses some of it")]

use std::sync::Arc;

use trommel_storage::testsuite::S3Server;
use trommel_storage::{Format, JobRecord, Source, SourceOptions, StorageError, open_source};
use trommel_types::{Classification, Content, ErrorKind, Failure, ImageRef, Lane, Outcome};

/// A store with an empty bucket, `bucket`.
pub(crate) fn server() -> S3Server {
    let server = S3Server::start();
    server.create_bucket("bucket");
    server
}

pub(crate) fn open(server: &S3Server, spec: &str) -> Result<Arc<dyn Source>, StorageError> {
    let options = SourceOptions {
        s3: server.config(),
        ..SourceOptions::default()
    };
    open_source(&[spec.to_owned()], &options)
}

pub(crate) fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
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
        options: "top-k=5".to_owned(),
        format: Format::Parquet,
        columns: Vec::new(),
        logits: false,
        embedding: false,
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
