//! A running `ffmpeg`: started, watched, and ended when it stalls.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::log::{Log, Said};

/// Interval between checks of a process.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A running process, until this is dropped.
pub(crate) struct Running {
    child: Arc<Mutex<Child>>,
    log: Arc<Mutex<Log>>,
    watch: Arc<Watch>,
}

/// Tracks the activity of a process.
#[derive(Default)]
pub(crate) struct Watch {
    moved: AtomicU64,
    is_paused: AtomicBool,
    has_ended: AtomicBool,
    was_stuck: AtomicBool,
}

impl Watch {
    /// Records activity.
    pub(crate) fn moved(&self) {
        self.moved.fetch_add(1, Relaxed);
    }

    /// Pauses or resumes the watch.
    pub(crate) fn pause(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Relaxed);
        self.moved();
    }
}

impl Running {
    /// Starts a command; returns its output too. A process without activity for `patience` is
    /// ended.
    ///
    /// # Errors
    /// If the system cannot start it.
    pub(crate) fn start(
        mut command: Command,
        patience: Duration,
    ) -> Result<(Self, ChildStdout), String> {
        let program = command.get_program().display().to_string();
        let failed = |error: io::Error| format!("{program} cannot be started: {error}");
        let (stream, theirs) = UnixStream::pair().map_err(failed)?;
        stream.set_nonblocking(true).map_err(failed)?;
        let started = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(OwnedFd::from(theirs))
            .spawn();
        // Holds the other end of the log.
        drop(command);
        let mut child = started.map_err(failed)?;
        let Some(stdout) = child.stdout.take() else {
            return Err(format!("{program} has no output"));
        };
        let running = Self {
            child: Arc::new(Mutex::new(child)),
            log: Arc::new(Mutex::new(Log::of(stream))),
            watch: Arc::default(),
        };
        let (log, watch) = (Arc::clone(&running.log), Arc::clone(&running.watch));
        let child = Arc::clone(&running.child);
        let thread = thread::Builder::new().name("trommel-ffmpeg".to_owned());
        let thread = thread.spawn(move || attend(&log, &watch, &child, patience));
        thread.map_err(failed)?;
        Ok((running, stdout))
    }

    /// The log so far, up to the output that was read.
    pub(crate) fn said(&self) -> Said {
        let mut log = lock(&self.log);
        log.drain();
        log.said.clone()
    }

    /// Runs `read` on the log.
    pub(crate) fn ask<T>(&self, question: impl FnOnce(&Said) -> T) -> T {
        let mut log = lock(&self.log);
        log.drain();
        question(&log.said)
    }

    /// A handle to end it from another thread.
    pub(crate) fn killer(&self) -> Killer {
        Killer(Arc::clone(&self.child))
    }

    /// Its activity watch.
    pub(crate) fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// Waits for the end of a process whose output has ended; returns its exit status and its whole
    /// log.
    pub(crate) fn end(self) -> Ended {
        let status = loop {
            match lock(&self.child).try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => break Some(status),
                Err(_) => break None,
            }
            thread::sleep(LOOK_EVERY);
        };
        Ended {
            status,
            said: self.said(),
            was_stuck: self.watch.was_stuck.load(Relaxed),
        }
    }
}

/// Ends a process from any thread.
pub struct Killer(Arc<Mutex<Child>>);

impl Killer {
    /// Ends it, unless it has ended.
    pub fn kill(&self) {
        drop(lock(&self.0).kill());
    }
}

/// How a process ended.
pub(crate) struct Ended {
    pub(crate) status: Option<ExitStatus>,
    pub(crate) said: Said,
    /// It was ended because it stalled.
    pub(crate) was_stuck: bool,
}

impl Ended {
    pub(crate) fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// Whether something other than the video ended it, such as the system's out-of-memory killer.
    pub(crate) fn was_killed(&self) -> bool {
        self.status.is_none_or(|status| status.code().is_none())
    }

    /// Its own error message.
    pub(crate) fn reason(&self) -> String {
        match (&self.said.error, self.status) {
            (Some(error), _) => format!("ffmpeg reports: {error}"),
            (None, Some(status)) => format!("ffmpeg ended with {status}"),
            (None, None) => "ffmpeg was lost".to_owned(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.watch.has_ended.store(true, Relaxed);
        let mut child = lock(&self.child);
        // One that has ended already cannot be ended again.
        drop(child.kill());
        drop(child.wait());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the log of a process until it ends, and ends a stalled process.
fn attend(log: &Mutex<Log>, watch: &Watch, child: &Mutex<Child>, patience: Duration) {
    let (mut seen, mut since) = (0, Instant::now());
    while !watch.has_ended.load(Relaxed) {
        if lock(log).drain() == Some(true) {
            watch.moved();
        }
        let moved = watch.moved.load(Relaxed);
        if moved != seen || watch.is_paused.load(Relaxed) {
            (seen, since) = (moved, Instant::now());
        } else if since.elapsed() >= patience {
            watch.was_stuck.store(true, Relaxed);
            // One that has ended already cannot be ended again.
            drop(lock(child).kill());
            return;
        }
        thread::sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_process_that_does_nothing_is_ended() {
        let mut command = Command::new("sleep");
        command.arg("1000");
        let (running, mut stdout) = Running::start(command, Duration::from_millis(1)).unwrap();
        let mut output = Vec::new();
        stdout.read_to_end(&mut output).unwrap();
        let ended = running.end();
        assert!(ended.was_stuck && ended.was_killed() && !ended.succeeded());
    }
}
