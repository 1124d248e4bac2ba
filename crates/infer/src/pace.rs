use std::time::{Duration, Instant};

/// Time after the last live image during which batches stay small.
const LATELY: Duration = Duration::from_secs(5);
/// Sizes of batches are distinguished by powers of two, up to this one.
const CLASSES: usize = 16;
/// Weight of the newest batch in the average of its class.
const NEWEST: f64 = 0.2;

/// Tracks the time of batches by size, to limit their size while live work arrives.
///
/// Pure: the caller passes the time.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Longest time that a batch may occupy the device while live work arrives.
    hold: Duration,
    last_live: Option<Instant>,
    /// Seconds per image, averaged over batches of up to 1, 2, 4, … images.
    each: [Option<f64>; CLASSES],
}

impl Pace {
    pub(crate) fn new(hold: Duration) -> Self {
        Self {
            hold,
            last_live: None,
            each: [None; CLASSES],
        }
    }

    /// A live image arrived.
    pub(crate) fn live(&mut self, now: Instant) {
        self.last_live = Some(now);
    }

    /// A batch of `images`, at least 1, took this long.
    pub(crate) fn took(&mut self, images: usize, time: Duration) {
        let class = class(images);
        let each = time.as_secs_f64() / images.max(1) as f64;
        let known = &mut self.each[class];
        *known = Some(known.map_or(each, |known| known + NEWEST * (each - known)));
    }

    /// Largest batch, at least 1: unlimited while no live work arrives.
    pub(crate) fn most(&self, now: Instant) -> usize {
        let lately = |last: Instant| now.saturating_duration_since(last) < LATELY;
        if !self.last_live.is_some_and(lately) {
            return usize::MAX;
        }
        let hold = self.hold.as_secs_f64();
        let fits = |class: usize| {
            let each = self.expected(class)?;
            let least = 1 << class >> 1; // a class begins above half of its largest size
            let images = ((hold / each) as usize).min(1 << class);
            (images > least).then_some(images)
        };
        let nothing_known = self.each.iter().all(Option::is_none);
        match nothing_known {
            true => usize::MAX,
            false => (0..CLASSES).rev().find_map(fits).unwrap_or(1),
        }
    }

    /// Seconds per image in batches of a class: as measured, or as in the nearest smaller class, or
    /// else larger one.
    fn expected(&self, class: usize) -> Option<f64> {
        let smaller = self.each[..=class].iter().rev().flatten().next();
        let larger = || self.each[class..].iter().flatten().next();
        smaller.or_else(larger).copied()
    }
}

/// The class of a size, by power of two.
fn class(images: usize) -> usize {
    let power = images.max(1).next_power_of_two().trailing_zeros() as usize;
    power.min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn batches_are_small_only_while_live_work_comes() {
        let (mut pace, t) = (Pace::new(millis(30)), Instant::now());
        pace.took(16, millis(160));
        assert_eq!(pace.most(t), usize::MAX);
        pace.live(t);
        assert_eq!(pace.most(t), 3, "10 ms an image");
        assert_eq!(pace.most(t + LATELY - millis(1)), 3);
        assert_eq!(pace.most(t + LATELY), usize::MAX);
    }

    #[test]
    fn a_device_that_gains_by_large_batches_keeps_them() {
        let (mut pace, t) = (Pace::new(millis(30)), Instant::now());
        pace.live(t);
        assert_eq!(pace.most(t), usize::MAX, "nothing is known yet");
        pace.took(1, millis(5));
        assert_eq!(pace.most(t), 6);
        pace.took(32, millis(16));
        assert_eq!(pace.most(t), 60);
        pace.took(64, millis(40));
        assert_eq!(pace.most(t), 48, "of 64 in 40 ms");
    }

    #[test]
    fn a_slow_model_runs_images_singly() {
        let (mut pace, t) = (Pace::new(millis(30)), Instant::now());
        pace.live(t);
        pace.took(8, millis(800));
        assert_eq!(pace.most(t), 1);
        for _ in 0..50 {
            pace.took(1, millis(10));
        }
        assert_eq!(pace.most(t), 3, "it has become faster");
    }

    #[test]
    fn sizes_beyond_all_classes_are_counted_with_the_last() {
        let (mut pace, t) = (Pace::new(millis(30)), Instant::now());
        pace.live(t);
        pace.took(usize::MAX / 2, Duration::from_secs(1));
        assert!(pace.most(t) >= 1);
    }
}
