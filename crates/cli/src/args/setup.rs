//! Arguments of the commands for getting started: `demo`, `completions` and `man`.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Folder for the digits, the model, the table and the report; created if it does not exist
    #[arg(value_name = "DIR", default_value = "trommel-demo")]
    pub(crate) dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to complete for. The script is written to standard output
    #[arg(value_name = "SHELL")]
    pub(crate) shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder for the pages, one for each command; created if it does not exist
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
}
