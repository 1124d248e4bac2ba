use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use trommel_worker::WorkerError;

/// The exit codes that scripts can rely on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The command succeeded.
    Success,
    /// Any error without its own code.
    Error,
    /// Usage or configuration: nothing was started.
    Usage,
    /// All rows failed; or the user requested this code for some failures or low accuracy.
    Failed,
    /// Too many images failed.
    Hopeless,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Success => 0,
            Exit::Error => 1,
            Exit::Usage => 2,
            Exit::Failed => 3,
            Exit::Hopeless => 4,
        })
    }
}

impl Exit {
    /// The exit code of an error.
    pub(crate) fn of(error: &anyhow::Error) -> Self {
        if error.downcast_ref::<Usage>().is_some() {
            return Self::Usage;
        }
        match error.downcast_ref::<WorkerError>() {
            Some(WorkerError::TooManyFailures { .. }) => Self::Hopeless,
            _ => Self::Error,
        }
    }
}

/// Marks an error as one of usage or configuration when attached as context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage;

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot start")
    }
}

/// An error with its causes, each printed once: many errors include their cause.
pub(crate) fn words(error: &anyhow::Error) -> String {
    let mut words = String::new();
    for cause in error.chain().map(ToString::to_string) {
        match words.contains(&cause) {
            true => {}
            false if words.is_empty() => words = cause,
            false => words = format!("{words}: {cause}"),
        }
    }
    words
}

/// Writes a line to standard error, in red on a terminal with colours.
pub(crate) fn warn_in_red(line: &str) -> io::Result<()> {
    let red = Style::new().bold().fg_color(Some(AnsiColor::Red.into()));
    writeln!(
        AutoStream::auto(io::stderr()),
        "{red}trommel: {line}{red:#}"
    )
}

/// Whether standard error is a terminal with colours that the user has not disabled (`NO_COLOR`).
pub(crate) fn colours() -> bool {
    AutoStream::choice(&io::stderr()) != anstream::ColorChoice::Never
}

/// Whether the reader of standard output has closed it.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// N30: system errors were printed twice.
    #[test]
    fn a_cause_that_an_error_names_itself_is_said_once() {
        let cause = || io::Error::from(io::ErrorKind::NotFound);
        let error = trommel_storage::StorageError::read("a.jpg", cause());
        let error = anyhow::Error::from(error).context(Usage);
        let words = words(&error);
        assert!(
            words.starts_with("cannot start: failed to read a.jpg: "),
            "{words}"
        );
        assert_eq!(words.matches(&cause().to_string()).count(), 1, "{words}");
    }
}
