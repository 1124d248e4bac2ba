//! The `trommel` binary: only arguments, configuration, telemetry and signals.

mod args;
mod bench;
mod cascade;
mod classify;
mod config;
mod demo;
#[cfg(test)]
mod documented;
mod embeddings;
mod evaluate;
mod exit;
mod export;
mod feed;
mod forecast;
mod hub;
mod job_models;
mod jobs;
mod labelling;
mod lines;
mod manual;
mod model;
mod originals;
mod paths;
mod plan;
mod plot;
mod profile;
mod profile_picture;
mod profile_report;
mod progress_bar;
mod report;
mod results;
mod runtime;
mod serve;
mod shutdown;
mod standstill;
mod summary;
mod telemetry;
mod top;
mod tune;
mod verify;
mod worker;

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use trommel_worker::TelemetryConfig;

use crate::args::{Cli, Command, TuningArgs};
use crate::config::Flags;
use crate::exit::Exit;
use crate::telemetry::Telemetry;

// Rows are allocated on one thread and freed on another, which leaves the system's allocator with
// twice the memory in use. `.cargo/config.toml` sets how soon this one returns memory.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let ended = switch_reports_off().and_then(|()| run(args::parse()));
    match ended {
        Ok(exit) => exit.into(),
        Err(error) => {
            // A reader that has seen enough (`trommel … | head`) is not an error.
            if !exit::is_broken_pipe(&error) {
                // Standard error is closed, so this cannot be reported.
                drop(writeln!(
                    std::io::stderr(),
                    "trommel: {}",
                    exit::words(&error)
                ));
            }
            Exit::of(&error).into()
        }
    }
}

/// Disables ONNX Runtime's telemetry, unless the user has set the variable.
///
/// Since 1.31 the library sends usage data to its vendor unless this variable is set when it is
/// loaded, whatever the API requests. To enable telemetry, set it to 0.
fn switch_reports_off() -> Result<()> {
    // Sound only while there is no other thread, so `main` calls this first. `dotenvy` makes the
    // call, which is denied in this workspace, and does not change a variable that is set.
    dotenvy::from_read("ORT_DISABLE_TELEMETRY=1".as_bytes())
        .context("failed to disable ONNX Runtime's telemetry; set ORT_DISABLE_TELEMETRY=1")
}

fn run(cli: Cli) -> Result<Exit> {
    let load = |flags| config::load(cli.config.as_deref(), flags).context(exit::Usage);
    let start = |config: &TelemetryConfig| Telemetry::start(config, &cli.log);
    let only_logs = || start(&TelemetryConfig::default());
    let flags = Flags::default();
    let library = cli.onnxruntime.as_deref();
    match cli.command {
        Command::Demo(args) => {
            let config = load(flags)?;
            let telemetry = start(&config.telemetry)?;
            demo::run(&args, &config, library, &telemetry)
        }
        Command::Classify(args) => {
            let flags = flags.tuning(&args.tuning).s3(&args.s3);
            let config = load(flags.telemetry(&args.telemetry))?;
            let telemetry = start(&config.telemetry)?;
            classify::run(*args, config, library, &telemetry)
        }
        Command::Worker(args) => {
            let flags = flags.tuning(&args.tuning).s3(&args.s3).broker(&args.broker);
            let flags = flags.access(&args.access).serve_listen(args.serve_listen);
            let config = load(flags.telemetry(&args.telemetry))?;
            let telemetry = start(&config.telemetry)?;
            worker::run(*args, config, library, &telemetry)
        }
        Command::Serve(args) => {
            let config = load(flags.tuning(&args.tuning).serve(&args))?;
            let telemetry = start(&config.telemetry)?;
            serve::run(*args, config, library, &telemetry)
        }
        Command::Feed(args) => {
            let config = load(flags.broker(&args.broker).telemetry(&args.telemetry))?;
            let telemetry = start(&config.telemetry)?;
            feed::run(&args, &config, &telemetry)
        }
        Command::Submit(args) => {
            let _logs = only_logs()?;
            let config = load(flags.broker(&args.broker))?;
            jobs::submit(*args, &config)
        }
        Command::Jobs(args) => {
            let _logs = only_logs()?;
            let config = load(flags.broker(&args.broker))?;
            jobs::run(args.command, &config)
        }
        Command::Top(args) => {
            let _logs = only_logs()?;
            let config = load(flags.broker(&args.broker))?;
            top::run(&args, &config)
        }
        Command::Model(command) => {
            let _logs = only_logs()?;
            model::run(command, &load(flags)?, library)
        }
        Command::Profile(args) => {
            let _logs = only_logs()?;
            let tuning = TuningArgs {
                device: args.device.clone(),
                intra_threads: args.intra_threads,
                ..TuningArgs::default()
            };
            profile::run(&args, &load(flags.tuning(&tuning))?, library)
        }
        Command::Evaluate(args) => {
            let _logs = only_logs()?;
            evaluate::run(&args, &load(flags.s3(&args.s3))?)
        }
        Command::Report(args) => {
            let _logs = only_logs()?;
            report::run(&args, &load(flags.s3(&args.s3))?)
        }
        Command::Export(args) => {
            let _logs = only_logs()?;
            export::run(&args, &load(flags.s3(&args.s3))?)
        }
        Command::Relabel(args) => {
            let _logs = only_logs()?;
            embeddings::relabel(&args, &load(flags.s3(&args.s3))?, library)
        }
        Command::Fit(args) => {
            let _logs = only_logs()?;
            embeddings::fit(&args, &load(flags.s3(&args.s3))?)
        }
        Command::Find(args) => {
            let _logs = only_logs()?;
            embeddings::find(&args, &load(flags.s3(&args.s3))?, library)
        }
        Command::Dedup(args) => {
            let _logs = only_logs()?;
            embeddings::dedup(&args, &load(flags.s3(&args.s3))?)
        }
        Command::Config(args) => {
            let config = load(flags.tuning(&args.tuning))?;
            std::io::stdout().write_all(config::printed(&config)?.as_bytes())?;
            Ok(Exit::Success)
        }
        Command::NatsPermissions(args) => {
            let broker = load(flags.prefix(args.prefix.as_deref()))?.broker;
            let text = trommel_worker::nats_permissions(&broker.prefix, &args.feed);
            std::io::stdout().write_all(text.as_bytes())?;
            Ok(Exit::Success)
        }
        Command::Plan(args) => plan::run(&args),
        Command::Bench(args) => {
            let flags = flags.tuning(&args.tuning).s3(&args.s3);
            let _logs = only_logs()?;
            bench::run(&args, load(flags)?, library)
        }
        Command::Tune(args) => {
            let flags = flags.tuning(&args.tuning).s3(&args.s3);
            let _logs = only_logs()?;
            tune::run(&args, load(flags)?, library)
        }
        Command::Completions(args) => manual::completions(args.shell),
        Command::Man(args) => manual::pages(&args.dir),
    }
}
