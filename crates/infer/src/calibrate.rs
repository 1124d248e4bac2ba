//! Finds the best batch size by measuring.
//!
//! On CPUs small batches are often the fastest, because their tensors stay in the caches; on GPUs
//! large ones are. The difference depends on model and machine.

use std::thread;
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::{BatchRate, Device, InferError, InferErrorKind, Model};

/// Sizes to try, in order.
const SIZES: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// The largest size tried on a CPU.
const LARGEST_ON_CPU: usize = 16;
/// Duration of the measurement of a size, at least one batch.
const TRIED: Duration = Duration::from_millis(60);
/// A size that would take longer than this, judging by the best one so far, is not tried, nor are
/// larger ones.
const PATIENCE: Duration = Duration::from_secs(2);
/// Minimum advantage of a larger batch: it takes more memory, and images wait for it longer.
const GAIN: f64 = 1.01;
/// Once a batch is this much slower than the best one, larger ones are not tried.
const LOSS: f64 = 0.92;

impl Device {
    /// The largest batch that [`Model::best_batch`] returns for this device.
    pub fn largest_batch(self) -> usize {
        match self {
            Self::Cpu => LARGEST_ON_CPU,
            Self::Cuda(_) | Self::TensorRt(_) => SIZES[SIZES.len() - 1],
        }
    }
}

impl Model {
    /// The batch size at which `instances` parallel sessions classify the most images per second;
    /// among similar sizes the smallest. For a model with a fixed batch, that one.
    ///
    /// Blocks: for a third of a second with a fast model, for a few seconds with a slow one, for
    /// which large batches are skipped. Sizes that do not fit into the device's memory are skipped.
    ///
    /// # Errors
    /// If a session cannot be opened, or the model fails on a single image.
    pub fn best_batch(&self, instances: usize) -> Result<usize, InferError> {
        if let Some(fixed) = self.fixed_batch() {
            return Ok(fixed);
        }
        let largest = self.devices().first().largest_batch();
        let mut backends = self.backends(instances, largest)?;
        let sizes = SIZES.into_iter().filter(|size| *size <= largest);
        fastest(sizes, instances, |size| rate(&mut backends, size, TRIED))
    }
}

impl Model {
    /// The throughput of `instances` parallel sessions in batches of `batch`, measured for `time`;
    /// the milliseconds are those of one batch while all sessions work. Blocks.
    ///
    /// # Errors
    /// If a session cannot be opened, or the model fails on such a batch, such as for lack of
    /// memory.
    pub fn rate_side_by_side(
        &self,
        instances: usize,
        batch: usize,
        time: Duration,
    ) -> Result<BatchRate, InferError> {
        let batch = self.fixed_batch().unwrap_or(batch);
        let mut backends = self.backends(instances, batch)?;
        let images_per_second = rate(&mut backends, batch, time)?;
        let each = images_per_second / instances.max(1) as f64;
        Ok(BatchRate {
            batch,
            milliseconds: 1e3 * batch as f64 / each,
            images_per_second,
        })
    }

    fn backends(
        &self,
        instances: usize,
        largest: usize,
    ) -> Result<Vec<Box<dyn Backend>>, InferError> {
        (0..instances)
            .map(|number| match self.devices().first().is_gpu() {
                true => self.classifier().measured_backend(number, largest, None),
                false => self.backend(number, largest, None),
            })
            .collect()
    }
}

/// The smallest of the fastest sizes, which come in rising order; `rate` returns images per second
/// of all instances.
fn fastest(
    sizes: impl Iterator<Item = usize>,
    instances: usize,
    mut rate: impl FnMut(usize) -> Result<f64, InferError>,
) -> Result<usize, InferError> {
    let (mut best, mut best_rate) = (1, 0.0);
    for size in sizes {
        // Two batches, the first of which allocates memory.
        let seconds = (2 * size * instances) as f64 / best_rate;
        if best_rate > 0.0 && seconds > PATIENCE.as_secs_f64() {
            break;
        }
        let rate = match rate(size) {
            Ok(rate) => rate,
            Err(error) if best_rate > 0.0 && !error.is_fatal() => {
                if error.kind() != InferErrorKind::OutOfMemory {
                    tracing::warn!("{error}; going on with batches of {best}");
                }
                break;
            }
            Err(error) => return Err(error),
        };
        if rate > GAIN * best_rate {
            (best, best_rate) = (size, rate);
        } else if rate < LOSS * best_rate {
            break;
        }
    }
    Ok(best)
}

/// Images per second with all backends busy, after a batch that allocates memory.
fn rate(backends: &mut [Box<dyn Backend>], size: usize, time: Duration) -> Result<f64, InferError> {
    let one = |backend: &mut Box<dyn Backend>| {
        backend.blank(size)?;
        let (start, mut images) = (Instant::now(), 0);
        while images == 0 || start.elapsed() < time {
            backend.blank(size)?;
            images += size;
        }
        Ok(images as f64 / start.elapsed().as_secs_f64())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = backends
            .iter_mut()
            .map(|backend| scope.spawn(move || one(backend)))
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                let panicked = || {
                    let message = "a thread that measured the size of batches panicked";
                    Err(InferError::new(InferErrorKind::EngineStopped, message))
                };
                thread.join().unwrap_or_else(|_| panicked())
            })
            .sum()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The choice if the sizes from 1 on have these rates; 0 means out of memory.
    fn best(rates: &[f64]) -> Result<usize, InferErrorKind> {
        let rate = |size: usize| match rates[size.ilog2() as usize] {
            0.0 => Err(InferError::new(InferErrorKind::OutOfMemory, "no room")),
            rate => Ok(rate),
        };
        let sizes = SIZES.into_iter().take(rates.len());
        fastest(sizes, 2, rate).map_err(|error| error.kind())
    }

    #[test]
    fn the_smallest_of_the_fastest_sizes_is_chosen() {
        assert_eq!(best(&[100.0, 150.0, 200.0, 190.0, 201.0]), Ok(4));
        assert_eq!(best(&[100.0, 100.0, 99.0, 95.0, 104.0]), Ok(16));
        // A batch of four would take nearly three seconds.
        assert_eq!(best(&[5.0, 6.0, 100.0]), Ok(2));
        // After a clear loss nothing is tried.
        assert_eq!(best(&[100.0, 120.0, 90.0, 500.0]), Ok(2));
        assert_eq!(best(&[100.0, 200.0, 300.0, 0.0]), Ok(4));
        assert_eq!(best(&[0.0]), Err(InferErrorKind::OutOfMemory));
    }
}
