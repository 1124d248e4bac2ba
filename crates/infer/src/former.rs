use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Forms batches of pushed items. Pure: the caller passes the time; it has no lock and no thread.
///
/// Items come out in the order of their pushes; every item is in exactly one batch. A batch is
/// ready once it is full, its first item has waited long enough, or after a flush; until it is
/// taken it keeps growing up to its limit, so that items waiting for a free session are not split.
#[derive(Debug)]
pub(crate) struct Former<T> {
    max_batch: usize,
    max_wait: Duration,
    /// With their arrival times.
    items: VecDeque<(T, Instant)>,
    /// Number of leading items that need not wait for others.
    closed: usize,
}

impl<T> Former<T> {
    /// A batch holds at most `max_batch` items, at least 1.
    pub(crate) fn new(max_batch: usize, max_wait: Duration) -> Self {
        debug_assert!(max_batch > 0, "a batch of no items is never full");
        Self {
            max_batch,
            max_wait,
            items: VecDeque::new(),
            closed: 0,
        }
    }

    /// Images that a full batch holds.
    pub(crate) fn max_batch(&self) -> usize {
        self.max_batch
    }

    /// Sets the limit of batches taken from now on, at least 1.
    pub(crate) fn set_max_batch(&mut self, max_batch: usize) {
        debug_assert!(max_batch > 0, "a batch of no items is never full");
        self.max_batch = max_batch;
    }

    /// Adds an item. Returns whether it begins or fills a batch.
    pub(crate) fn push(&mut self, item: T, now: Instant) -> bool {
        self.items.push_back((item, now));
        let items = self.items.len();
        items == 1 || items.is_multiple_of(self.max_batch)
    }

    /// Makes all items ready, however few.
    pub(crate) fn flush(&mut self) {
        self.closed = self.items.len();
    }

    /// The next batch that is ready `now`. If it has more than `most` items, at least 1, only the
    /// first ones are taken: the others are ready too. If `tried` items are there, a batch may have
    /// that many even if that exceeds a full one.
    pub(crate) fn take(
        &mut self,
        now: Instant,
        most: usize,
        tried: Option<usize>,
    ) -> Option<Vec<T>> {
        debug_assert!(most > 0, "a batch holds at least one item");
        if !self.is_ready(now) {
            return None;
        }
        let items = self.items.len();
        let full = tried.filter(|tried| *tried <= items);
        let ready = items.min(full.unwrap_or(self.max_batch));
        let taken = ready.min(most);
        self.closed = match taken < ready {
            true => self.closed.max(ready) - taken,
            false => self.closed.saturating_sub(taken),
        };
        Some(self.items.drain(..taken).map(|(item, _)| item).collect())
    }

    /// Whether there is a batch to take `now`.
    pub(crate) fn is_ready(&self, now: Instant) -> bool {
        self.closed > 0
            || self.items.len() >= self.max_batch
            || self.due().is_some_and(|due| due <= now)
    }

    /// When the first item will have waited long enough; `None` without items or without a
    /// deadline.
    pub(crate) fn due(&self) -> Option<Instant> {
        let (_, since) = self.items.front()?;
        since.checked_add(self.max_wait)
    }

    /// Drops everything.
    pub(crate) fn clear(&mut self) {
        self.items.clear();
        self.closed = 0;
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

    /// A batch of any size.
    fn take<T>(former: &mut Former<T>, now: Instant) -> Option<Vec<T>> {
        former.take(now, usize::MAX, None)
    }

    #[test]
    fn a_full_batch_is_ready_at_once() {
        let (mut former, t) = (Former::new(2, WAIT), Instant::now());
        assert!(former.push('a', t), "it begins a batch");
        assert_eq!(take(&mut former, t), None);
        assert!(former.push('b', t), "it fills one");
        assert!(!former.push('c', t));
        assert_eq!(take(&mut former, t), Some(vec!['a', 'b']));
        assert_eq!(take(&mut former, t), None);
    }

    #[test]
    fn the_wait_counts_from_the_first_item() {
        let (mut former, t) = (Former::new(8, WAIT), Instant::now());
        former.push('a', t);
        former.push('b', after(t, 9));
        assert_eq!(former.due(), Some(after(t, 10)));
        assert_eq!(take(&mut former, after(t, 9)), None);
        assert_eq!(take(&mut former, after(t, 10)), Some(vec!['a', 'b']));
        assert_eq!(former.due(), None);
    }

    #[test]
    fn a_batch_that_nobody_can_take_goes_on_growing_up_to_its_limit() {
        let (mut former, t) = (Former::new(3, WAIT), Instant::now());
        former.push('a', t);
        former.push('b', after(t, 25));
        former.push('c', after(t, 26));
        former.push('d', after(t, 27));
        assert_eq!(take(&mut former, after(t, 30)), Some(vec!['a', 'b', 'c']));
        assert_eq!(take(&mut former, after(t, 30)), None, "it has not waited");
        assert_eq!(former.due(), Some(after(t, 37)));
        assert_eq!(take(&mut former, after(t, 37)), Some(vec!['d']));
    }

    #[test]
    fn a_flush_makes_what_there_is_ready_and_makes_no_empty_batch() {
        let (mut former, t) = (Former::new(8, WAIT), Instant::now());
        former.flush();
        assert_eq!(take(&mut former, t), None);
        former.push('a', t);
        former.flush();
        former.flush();
        assert_eq!(take(&mut former, t), Some(vec!['a']));
        assert_eq!(take(&mut former, t), None);
        former.push('b', t);
        assert_eq!(take(&mut former, t), None, "the flush was before it came");
    }

    #[test]
    fn a_batch_that_is_cut_goes_on_in_the_next() {
        let (mut former, t) = (Former::new(5, WAIT), Instant::now());
        for item in 0..7 {
            former.push(item, t);
        }
        let cut = |former: &mut Former<_>| former.take(t, 2, None);
        assert_eq!(cut(&mut former), Some(vec![0, 1]));
        assert_eq!(cut(&mut former), Some(vec![2, 3]));
        assert_eq!(cut(&mut former), Some(vec![4, 5]));
        assert_eq!(cut(&mut former), Some(vec![6]));
        assert_eq!(cut(&mut former), None);
    }

    #[test]
    fn another_size_is_tried_where_there_are_items_for_it() {
        let (mut former, t) = (Former::new(2, WAIT), Instant::now());
        for item in 0..9 {
            former.push(item, t);
        }
        let tried = |former: &mut Former<_>| former.take(t, usize::MAX, Some(4));
        assert_eq!(tried(&mut former), Some(vec![0, 1, 2, 3]));
        assert_eq!(former.take(t, usize::MAX, Some(1)), Some(vec![4]));
        assert_eq!(tried(&mut former), Some(vec![5, 6, 7, 8]));
        former.push(9, t);
        former.push(10, t);
        assert_eq!(tried(&mut former), Some(vec![9, 10]), "there are no four");
        former.set_max_batch(3);
        assert_eq!((tried(&mut former), former.max_batch()), (None, 3));
    }

    #[test]
    fn no_wait_means_whatever_there_is() {
        let (mut former, t) = (Former::new(8, Duration::ZERO), Instant::now());
        former.push('a', t);
        assert_eq!(take(&mut former, t), Some(vec!['a']));
        former.push('b', t);
        former.push('c', t);
        assert_eq!(take(&mut former, t), Some(vec!['b', 'c']));
    }

    #[test]
    fn a_wait_without_end_does_not_overflow() {
        let (mut former, t) = (Former::new(2, Duration::MAX), Instant::now());
        former.push('a', t);
        assert_eq!(former.due(), None);
        assert_eq!(take(&mut former, after(t, 1_000_000)), None);
        former.push('b', t);
        assert_eq!(take(&mut former, t), Some(vec!['a', 'b']));
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
                        while let Some(batch) = take(&mut former, now) {
                            check(batch, &mut taken)?;
                        }
                        // Nothing inside has waited long enough.
                        for &at in &came[taken.len()..] {
                            prop_assert!(now < at + WAIT);
                        }
                    }
                }
            }
            former.flush();
            while let Some(batch) = take(&mut former, now) {
                check(batch, &mut taken)?;
            }
            prop_assert_eq!(taken, (0..pushed).collect::<Vec<_>>());
        }
    }
}
