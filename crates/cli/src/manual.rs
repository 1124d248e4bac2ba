//! Documentation generated from the command line: shell completions and manual pages.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Cli;
use crate::exit::Exit;

/// `trommel completions`.
pub(crate) fn completions(shell: Shell) -> Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "trommel", &mut script);
    io::stdout().write_all(&script)?;
    Ok(Exit::Success)
}

/// `trommel man`: `trommel.1`, and `trommel-COMMAND.1` for each command in the help.
pub(crate) fn pages(dir: &Path) -> Result<Exit> {
    let failed = || format!("failed to write manual pages to {}", dir.display());
    std::fs::create_dir_all(dir).with_context(failed)?;
    clap_mangen::generate_to(Cli::command(), dir).with_context(failed)?;
    Ok(Exit::Success)
}
