use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use tokio::runtime::Builder;
use trommel_worker::{HopKind, Role, Worker, WorkerOptions};

use crate::args::{HopArg, RoleArg, WorkerArgs};
use crate::config::{Config, cache_folder};
use crate::exit::{Exit, Usage};
use crate::progress_bar::LogWriter;
use crate::shutdown;
use crate::telemetry::Telemetry;

/// `trommel worker`: holds roles until it is told to stop.
pub(crate) fn run(
    args: WorkerArgs,
    config: Config,
    onnxruntime: Option<&Path>,
    telemetry: &Telemetry,
) -> Result<Exit> {
    let mut roles: Vec<_> = args.role.into_iter().map(Role::from).collect();
    roles.sort_unstable();
    roles.dedup();
    let options = WorkerOptions {
        model_cache: args
            .model_cache
            .unwrap_or_else(|| cache_folder().join("models")),
        model_repository: args.model_repository,
        tensor_hop: match args.tensor_hop {
            HopArg::Jetstream => HopKind::Jetstream,
            HopArg::Local => HopKind::Local,
        },
        onnxruntime: onnxruntime.map(Path::to_owned),
        roles,
    };
    let names: Vec<_> = options.roles.iter().map(|role| role.as_str()).collect();
    let names = names.join(", ");
    let runtime = Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("failed to start the async runtime")?;
    let ended = runtime.block_on(async {
        let stop = shutdown::on_signal()?;
        telemetry.health.watch();
        let worker = Worker::start(config, options).await.context(Usage)?;
        telemetry.health.has(worker.readiness());
        let ready = || say(&format!("working as {names}"));
        Ok(worker.run(stop, ready).await?)
    });
    // A thread may still wait for a store; it holds nothing that has to be kept.
    runtime.shutdown_background();
    ended.map(|()| Exit::Success)
}

fn say(what: &str) {
    // Nowhere is left to report that standard error is closed.
    drop(writeln!(LogWriter, "trommel: {what}"));
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Ingest => Self::Ingest,
            RoleArg::Preprocess => Self::Preprocess,
            RoleArg::Infer => Self::Infer,
            RoleArg::Sink => Self::Sink,
        }
    }
}
