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
mod shutdown;
mod summary;
mod worker;

use std::io::{IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{BrokerArgs, Cli, Command, S3Args, TuningArgs};
use crate::exit::Exit;

// Rows are made on one thread and freed on another, which leaves the system's allocator with twice
// the memory that is in use. `.cargo/config.toml` says how soon this one gives memory back.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = start_unreported()
        .and_then(|()| start_logging(&cli.log))
        .and_then(|()| run(cli));
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
    let load = |tuning: &TuningArgs, s3: &S3Args, broker: &BrokerArgs| {
        config::load(cli.config.as_deref(), tuning, s3, broker).context(exit::Usage)
    };
    match cli.command {
        Command::Classify(args) => {
            let config = load(&args.tuning, &args.s3, &BrokerArgs::default())?;
            classify::run(*args, config, cli.onnxruntime.as_deref())
        }
        Command::Worker(args) => {
            let config = load(&args.tuning, &args.s3, &args.broker)?;
            worker::run(*args, config, cli.onnxruntime.as_deref())
        }
        Command::Submit(args) => {
            let config = load(&TuningArgs::default(), &S3Args::default(), &args.broker)?;
            jobs::submit(*args, &config)
        }
        Command::Jobs(args) => {
            let config = load(&TuningArgs::default(), &S3Args::default(), &args.broker)?;
            jobs::run(args.command, &config)
        }
        Command::Model(command) => model::run(command, cli.onnxruntime.as_deref()),
        Command::Profile(args) => {
            let tuning = TuningArgs {
                device: args.device.clone(),
                intra_threads: args.intra_threads,
                ..TuningArgs::default()
            };
            let config = load(&tuning, &S3Args::default(), &BrokerArgs::default())?;
            profile::run(&args, &config, cli.onnxruntime.as_deref())
        }
        Command::Evaluate(args) => evaluate::run(&args),
        Command::Config(args) => {
            let config = load(&args.tuning, &S3Args::default(), &BrokerArgs::default())?;
            let text = toml::to_string(&config).context("failed to write the configuration")?;
            std::io::stdout().write_all(text.as_bytes())?;
            Ok(Exit::Success)
        }
    }
}

fn start_logging(filter: &str) -> Result<()> {
    let filter = EnvFilter::try_new(filter)
        .with_context(|| format!("invalid log filter {filter:?}; try warn, info or debug"))
        .context(exit::Usage)?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(progress_bar::LogWriter::default)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .compact()
        .init();
    Ok(())
}
