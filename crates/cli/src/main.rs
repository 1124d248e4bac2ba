//! The `trommel` binary: arguments, configuration, telemetry, signals, and nothing else.

mod agreement;
mod args;
mod classify;
mod config;
mod evaluate;
mod exit;
mod jobs;
mod model;
mod profile;
mod profile_picture;
mod progress_bar;
mod report;
mod shutdown;
mod summary;
mod telemetry;
mod top;
mod worker;

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use trommel_worker::TelemetryConfig;

use crate::args::{Cli, Command, TuningArgs};
use crate::config::Flags;
use crate::exit::Exit;
use crate::telemetry::Telemetry;

// Rows are made on one thread and freed on another, which leaves the system's allocator with twice
// the memory that is in use. `.cargo/config.toml` says how soon this one gives memory back.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = start_unreported().and_then(|()| run(cli));
    match ended {
        Ok(exit) => exit.into(),
        Err(error) => {
            // A reader that has seen enough (`trommel … | head`) is no error to speak of.
            if !exit::is_broken_pipe(&error) {
                // Nowhere is left to report that standard error is closed.
                drop(writeln!(std::io::stderr(), "trommel: {error:#}"));
            }
            Exit::of(&error).into()
        }
    }
}

/// Starts this program once more, in the same process, with ONNX Runtime's own reports switched off.
///
/// Since 1.31 the library sends figures of its use to its makers unless this variable is set when it
/// is loaded, whatever is said by its API; and a process cannot safely change its own environment. One
/// who wants the reports sets the variable to 0.
fn start_unreported() -> Result<()> {
    const VARIABLE: &str = "ORT_DISABLE_TELEMETRY";
    if std::env::var_os(VARIABLE).is_some() {
        return Ok(());
    }
    let mut args = std::env::args_os();
    let mut again = std::process::Command::new(std::env::current_exe()?);
    if let Some(name) = args.next() {
        again.arg0(name);
    }
    // Comes back only when it fails.
    let error = again.args(args).env(VARIABLE, "1").exec();
    Err(error).context("failed to start with ONNX Runtime's reports switched off")
}

fn run(cli: Cli) -> Result<Exit> {
    let load = |flags| config::load(cli.config.as_deref(), flags).context(exit::Usage);
    let start = |config: &TelemetryConfig| Telemetry::start(config, &cli.log);
    let only_logs = || start(&TelemetryConfig::default());
    let flags = Flags::default();
    let library = cli.onnxruntime.as_deref();
    match cli.command {
        Command::Classify(args) => {
            let flags = flags.tuning(&args.tuning).s3(&args.s3);
            let config = load(flags.telemetry(&args.telemetry))?;
            let telemetry = start(&config.telemetry)?;
            classify::run(*args, config, library, &telemetry)
        }
        Command::Worker(args) => {
            let flags = flags.tuning(&args.tuning).s3(&args.s3).broker(&args.broker);
            let config = load(flags.telemetry(&args.telemetry))?;
            let telemetry = start(&config.telemetry)?;
            worker::run(*args, config, library, &telemetry)
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
            model::run(command, library)
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
            evaluate::run(&args)
        }
        Command::Report(args) => {
            let _logs = only_logs()?;
            report::run(&args, &load(flags.s3(&args.s3))?)
        }
        Command::Config(args) => {
            let config = load(flags.tuning(&args.tuning))?;
            let text = toml::to_string(&config).context("failed to write the configuration")?;
            std::io::stdout().write_all(text.as_bytes())?;
            Ok(Exit::Success)
        }
    }
}
