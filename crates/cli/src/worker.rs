use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::time::timeout;
use trommel_types::RowOptions;
use trommel_worker::{HopKind, Role, Worker, WorkerOptions};

use crate::args::{HopArg, RoleArg, WorkerArgs};
use crate::config::{Config, cache_folder};
use crate::exit::{Exit, Usage};
use crate::progress_bar::LogWriter;
use crate::serve::{self, FLUSH, Front};
use crate::shutdown;
use crate::telemetry::Telemetry;

/// `trommel worker`: runs roles until it is stopped.
pub(crate) fn run(
    args: WorkerArgs,
    config: Config,
    onnxruntime: Option<&Path>,
    telemetry: &Telemetry,
) -> Result<Exit> {
    if !config.preprocess.reference.is_auto() {
        return Err(anyhow::anyhow!(
            "preprocess.reference = {:?} is set, but it is part of a job: give it to `trommel submit --reference` and leave it out of the worker's configuration",
            config.preprocess.reference.to_string()
        ))
        .context(Usage);
    }
    let mut roles: Vec<_> = args.role.iter().copied().map(Role::from).collect();
    roles.sort_unstable();
    roles.dedup();
    let fronts = answers_requests(&roles, &args).context(Usage)?;
    let options = WorkerOptions {
        model_cache: args
            .model_cache
            .unwrap_or_else(|| cache_folder().join("models")),
        model_repository: args.model_repository,
        tensor_hop: match args.tensor_hop {
            HopArg::Jetstream => HopKind::Jetstream,
            HopArg::Local => HopKind::Local,
        },
        serve: args.serve.clone(),
        onnxruntime: onnxruntime.map(Path::to_owned),
        roles,
    };
    let names: Vec<_> = options.roles.iter().map(|role| role.as_str()).collect();
    let names = names.join(", ");
    let runtime = crate::runtime::on_all_cores()?;
    let ended = runtime.block_on(async {
        let stop = shutdown::on_signal()?;
        telemetry.health.watch();
        let worker = Worker::start(config.clone(), options)
            .await
            .context(Usage)?;
        telemetry.health.has(worker.readiness());
        let ready = || say(&format!("working as {names}"));
        if !fronts {
            return Ok(worker.run(stop, ready).await?);
        }
        let token = serve::token(&config).context(Usage)?;
        let answers = worker.answers(&args.serve, &RowOptions::default()).await;
        let answers = Arc::new(answers.context(Usage)?);
        let (readiness, broker) = (worker.readiness(), worker.broker().clone());
        let front = Front::open(answers, &config, &readiness, token, Some(&broker));
        let front = front.await.context(Usage)?;
        front.announce();
        let requests = front.run(config.shutdown.drain_timeout, stop.clone());
        // Whichever ends first stops the other.
        let jobs = async {
            let ended = worker.run(stop.clone(), ready).await;
            stop.cancel();
            ended
        };
        let (answered, worked) = tokio::join!(requests, jobs);
        // The last answers may still be on their way.
        drop(timeout(FLUSH, broker.flush()).await);
        answered?;
        Ok(worked?)
    });
    // A thread may still wait for a store; it has no state to keep.
    runtime.shutdown_background();
    ended.map(|()| Exit::Success)
}

/// Whether a process with these roles accepts requests from clients.
///
/// # Errors
/// If it cannot do so, or has a role with nothing to do.
fn answers_requests(roles: &[Role], args: &WorkerArgs) -> Result<bool> {
    let has = |role| roles.contains(&role);
    let fronts = has(Role::Serve) || (has(Role::Preprocess) && has(Role::Infer));
    if has(Role::Serve) && args.serve.is_empty() {
        anyhow::bail!("the role serve needs models; give them with --serve");
    }
    if !args.serve.is_empty() && !fronts && !has(Role::Infer) {
        anyhow::bail!(
            "--serve needs --role serve, preprocess and infer, or infer (to run models for processes with the role serve)"
        );
    }
    if args.serve_listen.is_some() && !fronts {
        anyhow::bail!("--serve-listen needs --role serve, or preprocess and infer");
    }
    Ok(fronts && !args.serve.is_empty())
}

fn say(what: &str) {
    // Standard error is closed, so this cannot be reported.
    drop(writeln!(LogWriter, "trommel: {what}"));
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Ingest => Self::Ingest,
            RoleArg::Preprocess => Self::Preprocess,
            RoleArg::Infer => Self::Infer,
            RoleArg::Sink => Self::Sink,
            RoleArg::Serve => Self::Serve,
        }
    }
}
