use std::time::{Duration, Instant};

use trommel_types::Lane;

use crate::former::Former;

/// Successive batches of live work after which a waiting batch of a job is taken.
const LIVE_IN_A_ROW: usize = 32;

/// One former per lane. A batch has items of one lane, and batches of urgent lanes come first.
#[derive(Debug)]
pub(crate) struct Lanes<T> {
    /// In the order of [`Lane::ALL`], the most urgent first.
    formers: [Former<T>; Lane::ALL.len()],
    /// Batches of jobs.
    taken: usize,
    /// Batches of live work since the last one of a job.
    live_in_a_row: usize,
}

impl<T> Lanes<T> {
    /// As [`Former::new`]; live work waits for `live_wait` instead.
    pub(crate) fn new(max_batch: usize, max_wait: Duration, live_wait: Duration) -> Self {
        Self {
            formers: Lane::ALL.map(|lane| {
                let max_wait = match lane {
                    Lane::Live => live_wait,
                    Lane::High | Lane::Normal | Lane::Low => max_wait,
                };
                Former::new(max_batch, max_wait)
            }),
            taken: 0,
            live_in_a_row: 0,
        }
    }

    /// Images that a full batch holds.
    pub(crate) fn max_batch(&self) -> usize {
        self.formers[0].max_batch()
    }

    /// As [`Former::set_max_batch`], for all lanes.
    pub(crate) fn set_max_batch(&mut self, max_batch: usize) {
        self.formers
            .iter_mut()
            .for_each(|former| former.set_max_batch(max_batch));
    }

    /// As [`Former::push`].
    pub(crate) fn push(&mut self, lane: Lane, item: T, now: Instant) -> bool {
        self.formers[lane as usize].push(item, now)
    }

    /// As [`Former::flush`], for all lanes.
    pub(crate) fn flush(&mut self) {
        self.formers.iter_mut().for_each(Former::flush);
    }

    /// As [`Former::flush`], for one lane.
    pub(crate) fn flush_lane(&mut self, lane: Lane) {
        self.formers[lane as usize].flush();
    }

    /// The next batch that is ready `now`, of at most `most` images, and its lane; a batch of a job
    /// may have `tried` images, as in [`Former::take`]. Live work comes first, then jobs in the
    /// order of [`Lane::order`]. So that jobs do not starve, one of their batches follows many of
    /// live work.
    pub(crate) fn take(
        &mut self,
        now: Instant,
        most: usize,
        tried: Option<usize>,
    ) -> Option<(Lane, Vec<T>)> {
        let is_jobs_turn = self.live_in_a_row >= LIVE_IN_A_ROW;
        let batch = match is_jobs_turn {
            false => self
                .take_live(now, most)
                .or_else(|| self.take_job(now, most, tried)),
            true => self
                .take_job(now, most, tried)
                .or_else(|| self.take_live(now, most)),
        };
        match batch {
            Some((Lane::Live, _)) => self.live_in_a_row += 1,
            Some(_) => {
                self.live_in_a_row = 0;
                self.taken += 1;
            }
            None => {}
        }
        batch
    }

    fn take_live(&mut self, now: Instant, most: usize) -> Option<(Lane, Vec<T>)> {
        let batch = self.formers[Lane::Live as usize].take(now, most, None)?;
        Some((Lane::Live, batch))
    }

    fn take_job(
        &mut self,
        now: Instant,
        most: usize,
        tried: Option<usize>,
    ) -> Option<(Lane, Vec<T>)> {
        Lane::order(self.taken).into_iter().find_map(|lane| {
            let batch = self.formers[lane as usize].take(now, most, tried)?;
            Some((lane, batch))
        })
    }

    /// Whether there is a batch to take `now`.
    pub(crate) fn is_ready(&self, now: Instant) -> bool {
        self.formers.iter().any(|former| former.is_ready(now))
    }

    /// When the first item will have waited long enough, or `None` without items.
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
    const LIVE_WAIT: Duration = Duration::from_millis(5);
    const ANY: usize = usize::MAX;

    #[test]
    fn urgent_batches_come_first_and_none_is_mixed() {
        let (mut lanes, t) = (Lanes::new(2, WAIT, LIVE_WAIT), Instant::now());
        for (lane, item) in [
            (Lane::Low, 'l'),
            (Lane::Normal, 'n'),
            (Lane::Low, 'm'),
            (Lane::High, 'h'),
            (Lane::Normal, 'o'),
            (Lane::Live, 'a'),
        ] {
            // Each begins a batch or closes one, also where another lane is due before.
            assert!(lanes.push(lane, item, t), "{item}");
        }
        assert_eq!(lanes.due(), Some(t + LIVE_WAIT));
        assert_eq!(
            lanes.take(t, ANY, None),
            Some((Lane::Normal, vec!['n', 'o']))
        );
        assert_eq!(
            lanes.take(t + LIVE_WAIT, ANY, None),
            Some((Lane::Live, vec!['a']))
        );
        assert_eq!(
            lanes.take(t + WAIT, ANY, None),
            Some((Lane::High, vec!['h']))
        );
        assert_eq!(lanes.take(t, 1, None), Some((Lane::Low, vec!['l'])));
        assert!(lanes.is_ready(t));
        assert_eq!(lanes.take(t, ANY, None), Some((Lane::Low, vec!['m'])));
        assert_eq!(lanes.take(t, ANY, None), None);
        assert_eq!((lanes.due(), lanes.is_ready(t)), (None, false));
    }

    #[test]
    fn one_lane_closes_without_the_others() {
        let (mut lanes, t) = (Lanes::new(2, WAIT, LIVE_WAIT), Instant::now());
        lanes.push(Lane::Live, 'a', t);
        lanes.push(Lane::Normal, 'n', t);
        lanes.flush_lane(Lane::Live);
        assert_eq!(lanes.take(t, ANY, None), Some((Lane::Live, vec!['a'])));
        assert_eq!(lanes.take(t, ANY, None), None);
    }

    #[test]
    fn no_lane_starves_beside_full_ones() {
        let (mut lanes, t) = (Lanes::new(1, WAIT, LIVE_WAIT), Instant::now());
        for lane in Lane::OF_JOBS {
            for item in 0..48 {
                lanes.push(lane, item, t);
            }
        }
        let taken: Vec<_> = (0..32).filter_map(|_| lanes.take(t, ANY, None)).collect();
        let of = |lane| taken.iter().filter(|batch| batch.0 == lane).count();
        assert_eq!(Lane::ALL.map(of), [0, 30, 1, 1]);
    }

    #[test]
    fn live_work_comes_first_and_leaves_jobs_a_little() {
        let (mut lanes, t) = (Lanes::new(1, WAIT, LIVE_WAIT), Instant::now());
        for item in 0..200 {
            lanes.push(Lane::Normal, item, t);
            lanes.push(Lane::Live, item, t);
        }
        let taken: Vec<_> = (0..99).filter_map(|_| lanes.take(t, ANY, None)).collect();
        let of = |lane| taken.iter().filter(|batch| batch.0 == lane).count();
        assert_eq!(of(Lane::Live), 96);
        assert_eq!(of(Lane::Normal), 3);
        assert_eq!(taken[LIVE_IN_A_ROW].0, Lane::Normal);
    }
}
