//! What tests of stores begin with.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test file uses some of it")]

use std::sync::Arc;

use trommel_source::{Source, SourceOptions, open_source};
use trommel_storage::StorageError;
use trommel_storage::testsuite::S3Server;
use trommel_types::{Content, ImageRef, Lane};

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
