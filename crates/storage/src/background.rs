//! Network requests on their own threads, for blocking and async callers.

use std::future::Future;
use std::sync::OnceLock;

use tokio::runtime::{Builder, Runtime};

use crate::StorageError;

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("trommel-requests")
            .enable_all()
            .build()
            .expect("a process that cannot start two threads cannot do anything else either")
    })
}

/// Waits for a request on a thread that may block.
pub fn wait<T>(request: impl Future<Output = T>) -> T {
    runtime().handle().block_on(request)
}

/// Runs a request on this module's threads, from any thread.
pub async fn run<T: Send + 'static>(
    request: impl Future<Output = Result<T, StorageError>> + Send + 'static,
) -> Result<T, StorageError> {
    let answer = runtime().spawn(request).await;
    answer.unwrap_or_else(|_| Err(unanswered()))
}

/// Starts work without waiting for it.
pub fn spawn(work: impl Future<Output = ()> + Send + 'static) {
    runtime().spawn(work);
}

/// A request in progress.
pub struct Pending<T>(tokio::task::JoinHandle<Result<T, StorageError>>);

/// Starts a request, which continues while its caller does something else.
pub fn start<T: Send + 'static>(
    request: impl Future<Output = Result<T, StorageError>> + Send + 'static,
) -> Pending<T> {
    Pending(runtime().spawn(request))
}

impl<T> Pending<T> {
    /// Waits for the result, on a thread that may block.
    pub fn wait(self) -> Result<T, StorageError> {
        wait(self.0).unwrap_or_else(|_| Err(unanswered()))
    }
}

fn unanswered() -> StorageError {
    StorageError::unavailable("a request ended without an answer")
}
