//! The search space.

use std::num::NonZeroUsize;
use std::time::Duration;

use trommel_infer::Device;
use trommel_worker::Tuned;

use crate::config::Config;

/// Images in flight per preprocess thread.
const HELD: [usize; 3] = [2, 4, 8];
/// Longest waits for a batch, in milliseconds.
const WAITS: [u64; 3] = [2, 20, 100];
/// Sessions on a GPU, of one thread each.
const ON_A_GPU: [usize; 4] = [1, 2, 3, 4];

/// The values of each setting. Settings that depend on each other are paired.
#[derive(Debug, Clone)]
pub(super) struct Space {
    pub(super) batches: Vec<usize>,
    /// Sessions, and threads per session.
    pub(super) sessions: Vec<(usize, usize)>,
    /// Preprocess threads, and images in flight.
    pub(super) prepare: Vec<(usize, usize)>,
    pub(super) waits: Vec<Duration>,
}

impl Space {
    /// The search space on this many cores. Configured settings stay fixed, and so does the batch of a model
    /// that accepts only one size (`fixed`). For requests the wait and the images in flight are not searched:
    /// requests have settings of their own.
    pub(super) fn new(
        config: &Config,
        device: Device,
        cores: usize,
        fixed: Option<usize>,
        for_requests: bool,
    ) -> Self {
        let sizes = (0..).map(|power| 1 << power);
        let batches = match fixed.or(config.infer.max_batch.map(Into::into)) {
            Some(batch) => vec![batch],
            None => sizes
                .take_while(|size| *size <= device.largest_batch())
                .collect(),
        };
        let preprocess = &config.preprocess;
        let threads = match preprocess.threads {
            Some(threads) => vec![threads.get()],
            None => distinct([cores.div_ceil(2), cores, cores + cores.div_ceil(2)]),
        };
        let held = |threads: usize| match preprocess.max_in_flight {
            Some(held) => vec![held.get()],
            None if for_requests => vec![4 * threads],
            None => HELD.map(|each| each * threads).into(),
        };
        let prepare = threads.into_iter().flat_map(|threads| {
            let held = held(threads).into_iter();
            held.map(move |held| (threads, held))
        });
        let waits = match config.infer.max_wait {
            None if !for_requests => WAITS.map(Duration::from_millis).into(),
            _ => vec![config.infer.max_wait()],
        };
        Self {
            batches,
            sessions: sessions(config, device, cores),
            prepare: prepare.collect(),
            waits,
        }
    }

    /// The number of settings in a full grid.
    pub(super) fn size(&self) -> usize {
        self.batches.len() * self.sessions.len() * self.prepare.len() * self.waits.len()
    }

    /// `base`, followed by all other settings of the grid.
    pub(super) fn all(&self, base: Tuned) -> Vec<Tuned> {
        let mut all = Vec::with_capacity(1 + self.size());
        for max_batch in &self.batches {
            for (instances, intra_threads) in &self.sessions {
                for (preprocess_threads, max_in_flight) in &self.prepare {
                    all.extend(self.waits.iter().map(|max_wait| Tuned {
                        max_batch: number(*max_batch),
                        max_wait: *max_wait,
                        instances: number(*instances),
                        intra_threads: number(*intra_threads),
                        preprocess_threads: number(*preprocess_threads),
                        max_in_flight: number(*max_in_flight),
                    }));
                }
            }
        }
        all.retain(|other| *other != base);
        all.insert(0, base);
        all
    }
}

fn sessions(config: &Config, device: Device, cores: usize) -> Vec<(usize, usize)> {
    let infer = &config.infer;
    let instances = infer.instances.map(NonZeroUsize::get);
    let intra = infer.intra_threads.map(NonZeroUsize::get);
    match (instances, intra) {
        (Some(instances), Some(intra)) => vec![(instances, intra)],
        (Some(instances), None) => vec![(instances, infer.intra_threads())],
        (None, Some(intra)) => distinct([1, 2, (cores / intra).max(1)])
            .into_iter()
            .map(|instances| (instances, intra))
            .collect(),
        (None, None) if device.is_gpu() => ON_A_GPU.map(|instances| (instances, 1)).into(),
        (None, None) => distinct([1, 2, cores / 2, cores])
            .into_iter()
            .filter(|instances| (1..=cores).contains(instances))
            .map(|instances| (instances, cores / instances))
            .collect(),
    }
}

fn distinct<const N: usize>(values: [usize; N]) -> Vec<usize> {
    let mut values = Vec::from(values);
    values.sort_unstable();
    values.dedup();
    values
}

fn number(value: usize) -> NonZeroUsize {
    NonZeroUsize::new(value).unwrap_or(NonZeroUsize::MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_configured_is_not_varied() {
        let mut config = Config::default();
        let all = Space::new(&config, Device::Cpu, 4, None, false);
        assert_eq!(all.batches, [1, 2, 4, 8, 16]);
        assert_eq!(all.sessions, [(1, 4), (2, 2), (4, 1)]);
        assert_eq!(all.prepare.len(), 9);
        assert_eq!(all.size(), 5 * 3 * 9 * 3);
        let requests = Space::new(&config, Device::Cpu, 1, Some(4), true);
        assert_eq!(requests.batches, [4]);
        assert_eq!(requests.sessions, [(1, 1)]);
        assert_eq!(requests.prepare, [(1, 4), (2, 8)]);
        assert_eq!(requests.waits.len(), 1);

        config.infer.max_batch = NonZeroUsize::new(3);
        config.infer.instances = NonZeroUsize::new(2);
        config.preprocess.threads = NonZeroUsize::new(5);
        config.preprocess.max_in_flight = NonZeroUsize::new(6);
        config.infer.max_wait = Some(Duration::from_millis(1));
        let none = Space::new(&config, Device::Cpu, 4, None, false);
        assert_eq!((none.size(), none.batches), (1, vec![3]));
        let base = Tuned::of(&config, NonZeroUsize::MIN);
        let space = Space::new(&Config::default(), Device::Cpu, 2, None, false);
        let all = space.all(base);
        assert_eq!(all.len(), 1 + space.size(), "the base is not in the space");
        assert_eq!(all[0], base);
        assert_eq!(space.all(all[7]).len(), space.size());
    }
}
