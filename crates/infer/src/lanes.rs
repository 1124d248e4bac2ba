use std::time::{Duration, Instant};

use trommel_types::Lane;

use crate::former::Former;

/// A former for each lane. A batch holds items of one lane, and batches of urgent lanes come first.
#[derive(Debug)]
pub(crate) struct Lanes<T> {
    /// In the order of [`Lane::ALL`], the most urgent first.
    formers: [Former<T>; Lane::ALL.len()],
    taken: usize,
}

impl<T> Lanes<T> {
    /// As [`Former::new`].
    pub(crate) fn new(max_batch: usize, max_wait: Duration) -> Self {
        Self {
            formers: Lane::ALL.map(|_| Former::new(max_batch, max_wait)),
            taken: 0,
        }
    }

    /// Images that a full batch holds.
    pub(crate) fn max_batch(&self) -> usize {
        self.formers[0].max_batch()
    }

    /// As [`Former::limit`], of all lanes.
    pub(crate) fn limit(&mut self, max_batch: usize) {
        self.formers
            .iter_mut()
            .for_each(|former| former.limit(max_batch));
    }

    /// As [`Former::push`]. Tells whether a batch has closed or one has begun.
    pub(crate) fn push(&mut self, lane: Lane, item: T, now: Instant) -> bool {
        let former = &mut self.formers[lane as usize];
        let before = former.due();
        former.push(item, now);
        former.due() != before || before.is_none()
    }

    /// As [`Former::flush`], of all lanes.
    pub(crate) fn flush(&mut self) {
        self.formers.iter_mut().for_each(Former::flush);
    }

    /// The next closed batch in the order of [`Lane::order`], counting those that are due `now`, and its
    /// lane.
    pub(crate) fn take(&mut self, now: Instant) -> Option<(Lane, Vec<T>)> {
        let batch = Lane::order(self.taken).into_iter().find_map(|lane| {
            let batch = self.formers[lane as usize].take(now)?;
            Some((lane, batch))
        });
        self.taken += usize::from(batch.is_some());
        batch
    }

    /// When the next of the batches in hand closes by itself, or nothing while there is none.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.formers.iter().filter_map(Former::due).min()
    }

    /// Drops everything.
    pub(crate) fn clear(&mut self) {
        self.formers.iter_mut().for_each(Former::clear);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_millis(10);

    #[test]
    fn urgent_batches_come_first_and_none_is_mixed() {
        let (mut lanes, t) = (Lanes::new(2, WAIT), Instant::now());
        for (lane, item) in [
            (Lane::Low, 'l'),
            (Lane::Normal, 'n'),
            (Lane::Low, 'm'),
            (Lane::High, 'h'),
            (Lane::Normal, 'o'),
        ] {
            // Each begins a batch or closes one, also where another lane is due before.
            assert!(lanes.push(lane, item, t), "{item}");
        }
        assert_eq!(lanes.due(), Some(t + WAIT));
        assert_eq!(lanes.take(t), Some((Lane::Normal, vec!['n', 'o'])));
        assert_eq!(lanes.take(t + WAIT), Some((Lane::High, vec!['h'])));
        assert_eq!(lanes.take(t), Some((Lane::Low, vec!['l', 'm'])));
        assert_eq!(lanes.take(t), None);
        assert_eq!(lanes.due(), None);
    }

    #[test]
    fn no_lane_starves_beside_full_ones() {
        let (mut lanes, t) = (Lanes::new(1, WAIT), Instant::now());
        for lane in Lane::ALL {
            for item in 0..48 {
                lanes.push(lane, item, t);
            }
        }
        let taken: Vec<_> = (0..32).filter_map(|_| lanes.take(t)).collect();
        let of = |lane| taken.iter().filter(|batch| batch.0 == lane).count();
        assert_eq!(Lane::ALL.map(of), [30, 1, 1]);
    }
}
