//! How many images of a job may be in flight, so that no job fills the shared streams, and the
//! checkpoint of its listing, which waits for that room.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::sleep;
use trommel_queue::{Broker, BrokerConfig, Stream};

use crate::WorkerError;
use crate::distributed::job_lease::JobLease;
use crate::ingest::{Announced, Checkpoint};

/// Images of a job that are always allowed in flight.
const AT_LEAST: u64 = 32;
/// Share of a stream's free space that a job may take: `FREE_SHARE` of 1 / `FREE_SHARE`.
const FREE_SHARE: u64 = 4;
/// Shortest and longest time between two checks.
const LOOK: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// Assumed bytes of a row.
const ROW: u64 = 1024;

/// The room of a job in the streams between the stages.
///
/// A job may take a quarter of the free space of each stream, the dynamic threshold of Choudhury
/// and Hahne ("Dynamic queue length thresholds for shared-memory packet switches", 1998): a single
/// job gets a fifth of the stream, and however many jobs are stalled, there is always room for the
/// next one.
pub(crate) struct Room {
    pub(crate) broker: Broker,
    pub(crate) config: BrokerConfig,
    /// Subjects of the job in each stream.
    pub(crate) tasks: String,
    pub(crate) tensors: String,
    pub(crate) results: String,
    /// Bytes of an image's tensors, for all models together.
    pub(crate) tensor_bytes: u64,
}

impl Room {
    /// Waits until there is room for more images, and returns how many.
    pub(crate) async fn wait(&self) -> Result<u64, WorkerError> {
        let (mut pause, longest) = LOOK;
        loop {
            let room = self.look().await?;
            if room > 0 {
                return Ok(room);
            }
            sleep(pause).await;
            pause = (2 * pause).min(longest);
        }
    }

    /// Number of additional images that there is room for now.
    pub(crate) async fn look(&self) -> Result<u64, WorkerError> {
        let tasks = self.count(Stream::Tasks, &self.tasks).await?;
        let tensors = self.count(Stream::Tensors, &self.tensors).await?;
        let results = self.count(Stream::Results, &self.results).await?;
        let all_tasks = self.held(Stream::Tasks).await?.0;
        let all_tensors = self.held(Stream::Tensors).await?.1;
        let (rows, row_bytes) = self.held(Stream::Results).await?;
        let row = row_bytes.checked_div(rows).unwrap_or(ROW).max(1);
        // All tasks may become tensors, and these rows, before the next check.
        let room = [
            share(self.config.tasks_max_messages, all_tasks, 1).saturating_sub(tasks),
            share(
                self.config.tensors_max_bytes,
                all_tensors,
                self.tensor_bytes,
            )
            .saturating_sub(tasks + tensors),
            share(self.config.results_max_bytes, row_bytes, row)
                .saturating_sub(tasks + tensors + results),
        ];
        Ok(room.into_iter().min().unwrap_or_default())
    }

    async fn count(&self, stream: Stream, subject: &str) -> Result<u64, WorkerError> {
        Ok(self.broker.subject_count(stream, subject).await?)
    }

    /// Messages and bytes of a stream.
    async fn held(&self, stream: Stream) -> Result<(u64, u64), WorkerError> {
        let stats = self.broker.stream_stats(stream).await?;
        Ok(stats.map_or((0, 0), |stats| (stats.messages, stats.bytes)))
    }
}

/// Number of images of `each` bytes that a job may have in a stream with `used` of `limit`.
fn share(limit: u64, used: u64, each: u64) -> u64 {
    let at_least = AT_LEAST.min(limit / FREE_SHARE / each).max(1);
    (limit.saturating_sub(used) / FREE_SHARE / each).max(at_least)
}

/// The checkpoint of a listing in the broker.
pub(crate) struct Noted {
    lease: JobLease,
    room: Room,
    /// Whether the listing has waited for room.
    has_waited: AtomicBool,
}

impl Noted {
    pub(crate) fn new(lease: &JobLease, room: Room) -> Self {
        Self {
            lease: lease.clone(),
            room,
            has_waited: AtomicBool::new(false),
        }
    }
}

#[async_trait]
impl Checkpoint for Noted {
    async fn announce(&self, to: Announced) -> Result<(), WorkerError> {
        let noted = self
            .lease
            .change(|progress| progress.listing.announced = to);
        noted.await.map(drop)
    }

    async fn room(&self) -> Result<u64, WorkerError> {
        let room = self.room.look().await?;
        if room > 0 {
            return Ok(room);
        }
        // A listing that waits for others is not the cause of crashes.
        if !self.has_waited.swap(true, Ordering::Relaxed) {
            let waits = self.lease.change(|progress| progress.listing.starts = 0);
            waits.await?;
        }
        self.room.wait().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_that_stand_still_leave_room_for_the_next() {
        // R17: one job without workers filled the stream of all.
        let (limit, tensor) = (2_u64 << 30, 150_528);
        let mut used = 0;
        for job in 0..20 {
            let mut held = 0;
            while held < share(limit, used, tensor) {
                held += 1;
                used += tensor;
            }
            assert!(held >= AT_LEAST, "job {job} has room for {held} images");
        }
        assert!(used < limit);
    }

    #[test]
    fn a_job_alone_has_a_fifth() {
        let (limit, mut used) = (1_u64 << 30, 0);
        while used / 1000 < share(limit, used, 1000) {
            used += 1000;
        }
        assert!(
            (limit / 5).abs_diff(used) < limit / 100,
            "{used} of {limit}"
        );
    }
}
