//! The `trommel` binary: arguments, configuration, telemetry, signals, and nothing else.

mod args;
mod classify;
mod config;
mod evaluate;
mod exit;
mod model;
mod progress_bar;
mod shutdown;
mod summary;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command};
use crate::exit::Exit;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = start_logging(&cli.log).and_then(|()| run(cli));
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

fn run(cli: Cli) -> Result<Exit> {
    match cli.command {
        Command::Classify(args) => {
            let config = config::load(cli.config.as_deref(), &args.tuning).context(exit::Usage)?;
            classify::run(*args, config, cli.onnxruntime.as_deref())
        }
        Command::Model(command) => model::run(command, cli.onnxruntime.as_deref()),
        Command::Evaluate(args) => evaluate::run(&args),
        Command::Config(args) => {
            let config = config::load(cli.config.as_deref(), &args.tuning).context(exit::Usage)?;
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
