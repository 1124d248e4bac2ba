use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Forms batches of what is pushed. Pure: it is told the time and holds no lock and no thread.
///
/// Batches come out in the order in which their first items went in, items within one in the order
/// of their pushes; every item is in exactly one batch.
#[derive(Debug)]
pub(crate) struct Former<T> {
    max_batch: usize,
    max_wait: Duration,
    forming: Vec<T>,
    /// When the first item of `forming` came.
    since: Option<Instant>,
    formed: VecDeque<Vec<T>>,
}

impl<T> Former<T> {
    /// A batch holds at most `max_batch` items, at least 1.
    pub(crate) fn new(max_batch: usize, max_wait: Duration) -> Self {
        debug_assert!(max_batch > 0, "a batch of no items never closes");
        Self {
            max_batch,
            max_wait,
            forming: Vec::new(),
            since: None,
            formed: VecDeque::new(),
        }
    }

    /// Images that a full batch holds.
    pub(crate) fn max_batch(&self) -> usize {
        self.max_batch
    }

    /// Makes batches that close from now on hold fewer items, at least 1.
    pub(crate) fn limit(&mut self, max_batch: usize) {
        debug_assert!(max_batch > 0, "a batch of no items never closes");
        self.max_batch = self.max_batch.min(max_batch);
        if self.forming.len() >= self.max_batch {
            self.flush();
        }
    }

    /// Takes an item. Closes the batch that it fills.
    pub(crate) fn push(&mut self, item: T, now: Instant) {
        self.close_due(now);
        if self.forming.is_empty() {
            self.since = Some(now);
            self.forming.reserve_exact(self.max_batch);
        }
        self.forming.push(item);
        if self.forming.len() >= self.max_batch {
            self.flush();
        }
    }

    /// Closes the batch in hand, however small.
    pub(crate) fn flush(&mut self) {
        self.since = None;
        if !self.forming.is_empty() {
            self.formed.push_back(std::mem::take(&mut self.forming));
        }
    }

    /// The next closed batch, counting one that is due `now`.
    pub(crate) fn take(&mut self, now: Instant) -> Option<Vec<T>> {
        self.close_due(now);
        self.formed.pop_front()
    }

    /// When the batch in hand closes by itself, or nothing while there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.since
            .and_then(|since| since.checked_add(self.max_wait))
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.since = None;
        self.forming.clear();
        self.formed.clear();
    }

    fn close_due(&mut self, now: Instant) {
        if self.due().is_some_and(|due| due <= now) {
            self.flush();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WAIT: Duration = Duration::from_millis(10);

    fn after(start: Instant, millis: u64) -> Instant {
        start + Duration::from_millis(millis)
    }

    #[test]
    fn a_full_batch_closes_at_once() {
        let (mut former, t) = (Former::new(2, WAIT), Instant::now());
        former.push('a', t);
        assert_eq!(former.take(t), None);
        former.push('b', t);
        former.push('c', t);
        assert_eq!(former.take(t), Some(vec!['a', 'b']));
        assert_eq!(former.take(t), None);
    }

    #[test]
    fn the_wait_counts_from_the_first_item() {
        let (mut former, t) = (Former::new(8, WAIT), Instant::now());
        former.push('a', t);
        former.push('b', after(t, 9));
        assert_eq!(former.due(), Some(after(t, 10)));
        assert_eq!(former.take(after(t, 9)), None);
        assert_eq!(former.take(after(t, 10)), Some(vec!['a', 'b']));
        assert_eq!(former.due(), None);
    }

    #[test]
    fn an_item_that_comes_when_a_batch_is_due_starts_the_next() {
        let (mut former, t) = (Former::new(8, WAIT), Instant::now());
        former.push('a', t);
        former.push('b', after(t, 10));
        assert_eq!(former.take(after(t, 10)), Some(vec!['a']));
        assert_eq!(former.due(), Some(after(t, 20)));
    }

    #[test]
    fn a_flush_closes_what_there_is_and_makes_no_empty_batch() {
        let (mut former, t) = (Former::new(8, WAIT), Instant::now());
        former.flush();
        assert_eq!(former.take(t), None);
        former.push('a', t);
        former.flush();
        former.flush();
        assert_eq!(former.take(t), Some(vec!['a']));
        assert_eq!(former.take(t), None);
    }

    #[test]
    fn no_wait_means_batches_of_one() {
        let (mut former, t) = (Former::new(8, Duration::ZERO), Instant::now());
        former.push('a', t);
        former.push('b', t);
        assert_eq!(former.take(t), Some(vec!['a']));
        assert_eq!(former.take(t), Some(vec!['b']));
    }

    #[test]
    fn a_wait_without_end_does_not_overflow() {
        let (mut former, t) = (Former::new(2, Duration::MAX), Instant::now());
        former.push('a', t);
        assert_eq!(former.due(), None);
        assert_eq!(former.take(after(t, 1_000_000)), None);
        former.push('b', t);
        assert_eq!(former.take(t), Some(vec!['a', 'b']));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push,
        Flush,
        Take,
        Pass(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => Just(Step::Push),
            1 => Just(Step::Flush),
            3 => Just(Step::Take),
            3 => (0u64..12).prop_map(Step::Pass),
        ];
        prop::collection::vec(step, 0..200)
    }

    proptest! {
        #[test]
        fn every_item_is_in_one_batch_in_order_in_time(steps in steps(), max in 1usize..6) {
            let mut former = Former::new(max, WAIT);
            let mut now = Instant::now();
            let (mut pushed, mut taken) = (0u32, Vec::new());
            let mut came = Vec::new();
            let check = |batch: Vec<u32>, taken: &mut Vec<u32>| {
                prop_assert!(!batch.is_empty() && batch.len() <= max);
                taken.extend(batch);
                Ok(())
            };
            for step in steps {
                match step {
                    Step::Push => {
                        former.push(pushed, now);
                        came.push(now);
                        pushed += 1;
                    }
                    Step::Flush => former.flush(),
                    Step::Pass(millis) => now = after(now, millis),
                    Step::Take => {
                        while let Some(batch) = former.take(now) {
                            check(batch, &mut taken)?;
                        }
                        // Nothing that is still inside has waited as long as it may.
                        for &at in &came[taken.len()..] {
                            prop_assert!(now < at + WAIT);
                        }
                    }
                }
            }
            former.flush();
            while let Some(batch) = former.take(now) {
                check(batch, &mut taken)?;
            }
            prop_assert_eq!(taken, (0..pushed).collect::<Vec<_>>());
        }
    }
}
