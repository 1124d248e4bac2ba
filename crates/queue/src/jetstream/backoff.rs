use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Waits that double up to a limit, with a warning at the first one and then every ten seconds.
pub(super) struct Backoff {
    next: Duration,
    warned: Option<Instant>,
}

const FIRST: Duration = Duration::from_millis(50);
const CEILING: Duration = Duration::from_secs(1);
const WARN_EVERY: Duration = Duration::from_secs(10);

impl Backoff {
    pub(super) fn new() -> Self {
        Self {
            next: FIRST,
            warned: None,
        }
    }

    /// The next wait.
    pub(super) fn step(&mut self) -> Duration {
        let step = self.next;
        self.next = (self.next * 2).min(CEILING);
        step
    }

    pub(super) async fn wait(&mut self) {
        let step = self.step();
        sleep(step).await;
    }

    /// Whether a warning is due now.
    pub(super) fn warn_now(&mut self) -> bool {
        let now = Instant::now();
        let due = self.warned.is_none_or(|at| now - at >= WARN_EVERY);
        if due {
            self.warned = Some(now);
        }
        due
    }
}
