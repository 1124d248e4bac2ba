//! The async runtimes of commands.

use anyhow::{Context, Result};
use tokio::runtime::{Builder, Runtime};

/// A runtime with one thread per core.
pub(crate) fn on_all_cores() -> Result<Runtime> {
    start(&mut Builder::new_multi_thread())
}

/// A runtime with this many threads, if other threads do the work.
pub(crate) fn on_threads(threads: usize) -> Result<Runtime> {
    start(Builder::new_multi_thread().worker_threads(threads))
}

/// A runtime that only runs while its caller waits.
pub(crate) fn on_this_thread() -> Result<Runtime> {
    start(&mut Builder::new_current_thread())
}

fn start(builder: &mut Builder) -> Result<Runtime> {
    let runtime = builder.enable_all().build();
    runtime.context("failed to start the async runtime")
}
