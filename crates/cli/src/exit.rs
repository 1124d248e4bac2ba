use std::fmt;
use std::io;
use std::process::ExitCode;

use trommel_worker::WorkerError;

/// The exit codes that scripts may rely on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The command did all it was asked to.
    Success,
    /// Anything that has no code of its own.
    Error,
    /// Usage or configuration: nothing was started.
    Usage,
    /// Rows failed, or accuracy is too low, and the user asked to be told by exit code.
    Failed,
    /// Too many images failed to go on.
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
    /// The code for an error that ended a command.
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

/// Marks an error as one of usage or configuration: attach it as context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage;

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot start")
    }
}

/// Whether the reader of standard output has gone.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}
