//! Explains why a watched job makes no progress.

use std::time::{Duration, Instant};

use trommel_worker::{Client, JobStatus, WorkerError};

/// Time without progress before the reason is requested.
const LOOK_AFTER: Duration = Duration::from_secs(5);

/// How long a job has made no progress.
pub(crate) struct Standstill {
    seen: (u64, u64),
    since: Instant,
    is_explained: bool,
}

impl Standstill {
    pub(crate) fn new() -> Self {
        Self {
            seen: (0, 0),
            since: Instant::now(),
            is_explained: false,
        }
    }

    /// The reasons, one sentence each, once per standstill.
    ///
    /// # Errors
    /// If the workers cannot be asked; a worker that does not answer only delays the reasons.
    pub(crate) async fn explain(
        &mut self,
        client: &Client,
        status: &JobStatus,
    ) -> Result<Vec<String>, WorkerError> {
        let rows = status.models.iter().map(|model| model.ok + model.failed);
        let seen = (status.listed, rows.sum());
        if seen != self.seen {
            (self.seen, self.since, self.is_explained) = (seen, Instant::now(), false);
        }
        if self.is_explained || self.since.elapsed() < LOOK_AFTER {
            return Ok(Vec::new());
        }
        self.since = Instant::now();
        let findings = match client.why(&status.id).await {
            Ok(why) => why.findings,
            Err(WorkerError::NobodyAnswers) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        self.is_explained = !findings.is_empty();
        Ok(findings)
    }
}
