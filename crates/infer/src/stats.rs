use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// The work of an engine since it started, without warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct EngineStats {
    /// Parallel sessions.
    pub instances: usize,
    /// Current images in a full batch: fewer than requested if they do not fit into the device's
    /// memory, or another number if it was learned.
    pub max_batch: usize,
    /// Batches run.
    pub batches: u64,
    /// Images in them.
    pub images: u64,
    /// Unused places in them, because the model has a fixed batch size.
    pub padded: u64,
    /// Images that were run again alone, because their batch failed as a whole.
    pub retried: u64,
    /// Time spent on batches, from normalisation to scores, summed over the instances.
    pub compute: Duration,
    /// Idle time since the start, summed over the instances. A batch counts once it is answered.
    pub idle: Duration,
    /// Time between two batches of an instance while the next one was waiting: handing out answers
    /// and taking the batch. Summed over the instances.
    pub gaps: Duration,
    /// Images as a share of the places in full batches, 0 to 1; 0 before the first batch.
    pub fill: f64,
}

impl EngineStats {
    /// The combined statistics of two models: sessions and times of both.
    pub(crate) fn beside(self, other: &Self) -> Self {
        Self {
            instances: self.instances + other.instances,
            compute: self.compute + other.compute,
            idle: self.idle + other.idle,
            gaps: self.gaps + other.gaps,
            ..self
        }
    }
}

/// Sums over all instances.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    batches: AtomicU64,
    images: AtomicU64,
    padded: AtomicU64,
    retried: AtomicU64,
    compute: AtomicU64,
    gaps: AtomicU64,
    places: AtomicU64,
}

impl Counters {
    /// `places` is the size of a full batch.
    pub(crate) fn batch(&self, images: usize, computed: usize, places: usize, took: Duration) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.images.fetch_add(images as u64, Ordering::Relaxed);
        self.padded
            .fetch_add(computed.saturating_sub(images) as u64, Ordering::Relaxed);
        self.places.fetch_add(places as u64, Ordering::Relaxed);
        self.compute.fetch_add(nanos(took), Ordering::Relaxed);
    }

    pub(crate) fn gap(&self, took: Duration) {
        self.gaps.fetch_add(nanos(took), Ordering::Relaxed);
    }

    pub(crate) fn retry(&self) {
        self.retried.fetch_add(1, Ordering::Relaxed);
    }

    /// The sums after running for `elapsed`. Each is exact once the engine is idle; while it works
    /// they may be taken a few microseconds apart.
    pub(crate) fn read(
        &self,
        instances: usize,
        max_batch: usize,
        elapsed: Duration,
    ) -> EngineStats {
        let [batches, images, places] = [&self.batches, &self.images, &self.places].map(load);
        let compute = Duration::from_nanos(load(&self.compute));
        let all = elapsed.saturating_mul(u32::try_from(instances).unwrap_or(u32::MAX));
        EngineStats {
            instances,
            max_batch,
            batches,
            images,
            padded: load(&self.padded),
            retried: load(&self.retried),
            compute,
            idle: all.saturating_sub(compute),
            gaps: Duration::from_nanos(load(&self.gaps)),
            fill: if places == 0 {
                0.0
            } else {
                (images as f64 / places as f64).min(1.0)
            },
        }
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
