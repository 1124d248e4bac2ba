//! Learns the best batch size from the batches that are run.
//!
//! The measurement at load is a start: on a busy machine the smallest size may have seemed the
//! fastest (N9). So a batch of half or double the size is tried occasionally, if there are images
//! for it, and its time per image is compared with that of the batches around it.

use std::time::Duration;

/// What an engine may try, and who is notified.
pub struct Learning {
    /// Whether the first size was measured on a busy machine. Then others are tried sooner.
    pub doubtful: bool,
    /// Called with each size that proves faster, by a thread that runs batches.
    pub learned: Box<dyn Fn(usize) + Send + Sync>,
}

/// Batches of the current size between two experiments, at first: if the measurement is doubtful,
/// and otherwise.
const BETWEEN: [u32; 2] = [8, 32];
/// Most batches of the current size between two experiments, once no other size proves faster.
const MOST_BETWEEN: u32 = 512;
/// Batches of another size that are compared before a decision.
const ROUND: u32 = 12;
/// Weight of the newest batch in the mean of the current size: only its neighbours in time count.
const NEWEST: f64 = 0.3;
/// Weight of the newest comparison in the gain of another size.
const NEWEST_GAIN: f64 = 0.125;
/// Minimum gain of another size, as a share.
const GAIN: f64 = 0.02;
/// Standard errors that the gain has to exceed.
const ERRORS: f64 = 2.5;
/// Least fill of a batch of the current size that counts.
const FULL_ENOUGH: f64 = 0.75;
/// Sizes are distinguished by powers of two, up to this one.
const CLASSES: usize = 16;

/// Learns the fastest size. Pure: it is given the times.
#[derive(Debug)]
pub(crate) struct Learner {
    size: usize,
    largest: usize,
    /// Logarithm of the seconds per image in batches of the current size.
    present: Option<f64>,
    /// Other sizes, compared with the current one.
    gains: [Gain; CLASSES],
    tried: Option<usize>,
    /// Batches of the current size since the last experiment.
    since: u32,
    between: u32,
}

/// The gain of a size over the current one: a logarithm, so that its noise is about the same for
/// fast and slow models.
#[derive(Debug, Clone, Copy, Default)]
struct Gain {
    mean: f64,
    variance: f64,
    /// Number of all comparisons, and of those since the last decision.
    count: u32,
    fresh: u32,
}

impl Gain {
    fn add(&mut self, gain: f64) {
        self.count += 1;
        self.fresh += 1;
        // The first ones have equal weight, so that the very first does not dominate.
        let weight = NEWEST_GAIN.max(1.0 / f64::from(self.count));
        let off = gain - self.mean;
        self.mean += weight * off;
        self.variance = (1.0 - weight) * (self.variance + weight * off * off);
    }

    /// Whether it exceeds the noise.
    fn is_clear(&self) -> bool {
        // The effective number of samples of an exponentially weighted mean.
        let worth = f64::from(self.count).min((2.0 - NEWEST_GAIN) / NEWEST_GAIN);
        let noise = ERRORS * (self.variance / (worth - 1.0).max(1.0)).sqrt();
        self.mean > GAIN.ln_1p().max(noise)
    }
}

impl Learner {
    /// Starts with `size`; no size above `largest` is ever tried.
    pub(crate) fn new(size: usize, largest: usize, doubtful: bool) -> Self {
        let mut learner = Self {
            size,
            largest,
            present: None,
            gains: [Gain::default(); CLASSES],
            tried: None,
            since: 0,
            between: BETWEEN[usize::from(!doubtful)],
        };
        learner.tried = learner.larger().or_else(|| learner.smaller());
        learner
    }

    /// No size above it is tried.
    pub(crate) fn largest(&self) -> usize {
        self.largest
    }

    /// The size to try with the next batch, if it is time.
    pub(crate) fn wants(&self) -> Option<usize> {
        self.tried.filter(|_| self.since >= self.between)
    }

    /// A batch of the tried size is in progress.
    pub(crate) fn trying(&mut self) {
        self.since = 0;
    }

    /// A batch of `images`, none of which failed, took this long. Returns another size if it has
    /// proved faster.
    pub(crate) fn took(&mut self, images: usize, time: Duration) -> Option<usize> {
        let each = (time.as_secs_f64().max(1e-9) / images.max(1) as f64).ln();
        if Some(images) == self.tried {
            let gain = &mut self.gains[class(images)];
            gain.add(self.present? - each);
            return (gain.fresh >= ROUND).then(|| self.judge(images)).flatten();
        }
        let is_full_enough = images as f64 >= FULL_ENOUGH * self.size as f64;
        if images <= self.size && is_full_enough {
            self.since += 1;
            let mean = self.present.get_or_insert(each);
            *mean += NEWEST * (each - *mean);
        }
        None
    }

    /// The device has no memory for more than this.
    pub(crate) fn limit(&mut self, largest: usize) {
        if largest >= self.largest {
            return;
        }
        self.largest = largest;
        if self.size > largest {
            self.begin(largest);
        }
        self.tried = self.larger().or_else(|| self.smaller());
    }

    fn judge(&mut self, tried: usize) -> Option<usize> {
        let gain = &mut self.gains[class(tried)];
        gain.fresh = 0;
        if gain.is_clear() {
            let was = self.size;
            self.begin(tried);
            // Continue in the same direction, if possible.
            self.tried = match tried > was {
                true => self.larger().or_else(|| self.smaller()),
                false => self.smaller().or_else(|| self.larger()),
            };
            return Some(tried);
        }
        self.between = (self.between * 2).min(MOST_BETWEEN);
        self.tried = match tried > self.size {
            true => self.smaller().or_else(|| self.larger()),
            false => self.larger().or_else(|| self.smaller()),
        };
        None
    }

    /// Switches to another size, without comparisons yet.
    fn begin(&mut self, size: usize) {
        self.size = size;
        self.present = None;
        self.gains = [Gain::default(); CLASSES];
        self.since = 0;
    }

    fn larger(&self) -> Option<usize> {
        Some(2 * self.size).filter(|size| *size <= self.largest)
    }

    fn smaller(&self) -> Option<usize> {
        (self.size > 1).then_some(self.size / 2)
    }
}

fn class(images: usize) -> usize {
    (images.max(1).ilog2() as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: [usize; 0] = [];

    /// Runs batches in which an image takes `each(size, number)` seconds. Returns the sizes that
    /// were learned.
    fn run(learner: &mut Learner, batches: u32, each: impl Fn(usize, u32) -> f64) -> Vec<usize> {
        let mut learned = Vec::new();
        for number in 0..batches {
            let size = match learner.wants() {
                Some(tried) => {
                    learner.trying();
                    tried
                }
                None => learner.size,
            };
            let time = Duration::from_secs_f64(each(size, number) * size as f64);
            learned.extend(learner.took(size, time));
        }
        learned
    }

    /// A pseudorandom number between -1 and 1.
    fn noise(number: u32) -> f64 {
        let mixed =
            number.wrapping_mul(0x9E37_79B9) ^ number.wrapping_mul(0x85EB_CA6B).rotate_left(13);
        f64::from(mixed.wrapping_mul(0xC2B2_AE35) >> 8) / f64::from(1_u32 << 23) - 1.0
    }

    /// N9: a first run on a busy machine chose 1 where 4 is the fastest.
    #[test]
    fn a_size_that_was_wrong_at_first_is_left() {
        let fastest_is_4 = |size: usize, number| {
            let each = [1.0, 0.8, 0.7, 0.75, 0.9][class(size)];
            each * (1.0 + 0.1 * noise(number))
        };
        let mut learner = Learner::new(1, 16, true);
        let learned = run(&mut learner, 2000, fastest_is_4);
        assert_eq!(learned, [2, 4]);
        let mut learner = Learner::new(16, 16, false);
        let learned = run(&mut learner, 4000, fastest_is_4);
        assert_eq!(learned, [8, 4], "it goes down too");
    }

    #[test]
    fn within_the_noise_nothing_moves_and_ever_less_is_tried() {
        let mut learner = Learner::new(4, 16, true);
        let all_alike = |_, number| 1.0 + 0.3 * noise(number);
        assert_eq!(run(&mut learner, 20_000, all_alike), NOTHING);
        assert_eq!(learner.between, MOST_BETWEEN);
    }

    #[test]
    fn a_load_that_comes_and_goes_is_not_taken_for_a_size() {
        // Everything takes twice as long for a while; the sizes are all equal.
        let load = |number: u32| {
            if (number / 300).is_multiple_of(2) {
                1.0
            } else {
                2.0
            }
        };
        let mut learner = Learner::new(4, 16, true);
        let each = |_, number| load(number) * (1.0 + 0.05 * noise(number));
        assert_eq!(run(&mut learner, 10_000, each), NOTHING);
    }

    #[test]
    fn batches_that_are_far_from_full_do_not_count() {
        let mut learner = Learner::new(8, 16, true);
        for _ in 0..100 {
            assert_eq!(learner.took(5, Duration::from_secs(1)), None);
        }
        assert_eq!(learner.wants(), None);
        for _ in 0..BETWEEN[0] {
            assert_eq!(learner.took(6, Duration::from_secs(1)), None);
        }
        assert_eq!(learner.wants(), Some(16));
    }

    /// N8: a size that does not fit into memory is not tried again.
    #[test]
    fn what_there_is_no_memory_for_is_not_wanted() {
        let mut learner = Learner::new(8, 16, true);
        learner.limit(8);
        let larger_is_faster = |size: usize, _| 1.0 / size as f64;
        assert_eq!(run(&mut learner, 2000, larger_is_faster), NOTHING);
        learner.limit(3);
        assert_eq!((learner.size, learner.tried), (3, Some(1)));
        let mut alone = Learner::new(1, 1, true);
        assert_eq!(run(&mut alone, 100, larger_is_faster), NOTHING);
    }
}
