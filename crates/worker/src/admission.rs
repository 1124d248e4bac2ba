use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Share of the budget available for waiting and processing. The rest covers what is not measured:
/// the network, and unusually slow answers.
const TARGET: f64 = 0.8;
/// Time constant of the measured rate, in seconds under load.
const MEMORY: f64 = 1.0;

/// Limits the images that are processed or waiting, so that admitted ones are answered in time.
///
/// By Little's law, an image behind N others waits as long as N answers take. The rate of answers
/// is measured only while there is enough work for all threads: a rate under less load reflects the
/// demand, not the capacity. The bound is the number of answers that this rate gives within the
/// target. It does not depend on the time of single answers, so a slow one changes nothing, and no
/// recovery is needed after a burst.
pub(crate) struct Admission {
    least: usize,
    most: usize,
    target: f64,
    /// Time under load before the rate counts, in seconds.
    warm: f64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    inside: usize,
    /// Answers given under load, decaying with [`MEMORY`].
    answers: f64,
    /// Seconds under load, decaying likewise.
    loaded: f64,
    /// End of the counted time, while there is load.
    counted: Option<Instant>,
}

/// An admitted request, for as long as this lives.
pub(crate) struct Entry {
    admission: Arc<Admission>,
    images: usize,
}

impl Admission {
    /// Admits at most `most` images, and always at least `least`, which keep all threads busy; the
    /// aim is an answer within `budget`.
    pub(crate) fn new(least: usize, most: usize, budget: Duration) -> Self {
        let most = most.max(1);
        Self {
            least: least.clamp(1, most),
            most,
            target: budget.as_secs_f64() * TARGET,
            warm: budget.as_secs_f64() / 4.0,
            state: Mutex::default(),
        }
    }

    /// Admits a request whose images are processed this many at a time, if there is room for one.
    pub(crate) fn enter(self: &Arc<Self>, images: usize, now: Instant) -> Option<Entry> {
        let mut state = self.lock();
        state.count(now);
        if state.inside >= self.limit(&state) {
            return None;
        }
        state.inside += images;
        if state.inside >= self.least {
            state.counted.get_or_insert(now);
        }
        drop(state);
        Some(Entry {
            admission: Arc::clone(self),
            images,
        })
    }

    /// Whether a request would be refused now.
    pub(crate) fn is_full(&self, now: Instant) -> bool {
        let mut state = self.lock();
        state.count(now);
        state.inside >= self.limit(&state)
    }

    fn limit(&self, state: &State) -> usize {
        if state.loaded < self.warm {
            return self.most;
        }
        let rate = state.answers / state.loaded;
        ((rate * self.target) as usize).clamp(self.least, self.most)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Counts the time until `now`, if there was load.
    fn count(&mut self, now: Instant) {
        let Some(counted) = &mut self.counted else {
            return;
        };
        let passed = now.saturating_duration_since(*counted).as_secs_f64();
        *counted = now.max(*counted);
        let kept = (-passed / MEMORY).exp();
        self.answers *= kept;
        self.loaded = self.loaded * kept + MEMORY * (1.0 - kept);
    }
}

impl Entry {
    /// An image of the request was answered.
    pub(crate) fn answered(&self, now: Instant) {
        let mut state = self.admission.lock();
        state.count(now);
        if state.counted.is_some() {
            state.answers += 1.0;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut state = self.admission.lock();
        state.inside -= self.images;
        if state.inside < self.admission.least {
            state.counted = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const BUDGET: Duration = Duration::from_millis(120);

    /// A server that processes up to eight images at once, and the time.
    struct Simulated {
        admission: Arc<Admission>,
        random: StdRng,
        begin: Instant,
        now: f64,
        arrival: f64,
        waiting: VecDeque<(f64, Entry)>,
        working: Vec<(f64, Entry)>,
        done: f64,
        /// Seconds per batch, and per image in it.
        batch: f64,
        image: f64,
    }

    #[derive(Debug, Default)]
    struct Seen {
        offered: usize,
        refused: usize,
        /// Times of answers in seconds.
        times: Vec<f64>,
    }

    impl Simulated {
        fn new() -> Self {
            Self {
                admission: Arc::new(Admission::new(12, 256, BUDGET)),
                random: StdRng::seed_from_u64(7),
                begin: Instant::now(),
                now: 0.0,
                arrival: 0.0,
                waiting: VecDeque::new(),
                working: Vec::new(),
                done: f64::INFINITY,
                batch: 0.002,
                image: 0.001,
            }
        }

        /// Answers a second with full batches.
        fn capacity(&self) -> f64 {
            8.0 / (self.batch + 8.0 * self.image)
        }

        /// Requests at random times: the rate per second, and the duration in seconds.
        fn load(&mut self, rate: f64, seconds: f64) -> Seen {
            let (end, mut seen) = (self.now + seconds, Seen::default());
            self.arrival = self.now + self.gap(rate);
            loop {
                self.now = self.arrival.min(self.done);
                if self.now >= end {
                    self.now = end;
                    return seen;
                }
                let now = self.begin + Duration::from_secs_f64(self.now);
                if self.done <= self.arrival {
                    self.done = f64::INFINITY;
                    for (since, entry) in self.working.drain(..) {
                        seen.times.push(self.now - since);
                        entry.answered(now);
                    }
                } else {
                    self.arrival += self.gap(rate);
                    seen.offered += 1;
                    match self.admission.enter(1, now) {
                        Some(entry) => self.waiting.push_back((self.now, entry)),
                        None => seen.refused += 1,
                    }
                }
                if self.working.is_empty() && !self.waiting.is_empty() {
                    let images = self.waiting.len().min(8);
                    self.working.extend(self.waiting.drain(..images));
                    self.done = self.now + self.batch + self.image * images as f64;
                }
            }
        }

        fn gap(&mut self, rate: f64) -> f64 {
            -(1.0 - self.random.random::<f64>()).ln() / rate
        }
    }

    impl Seen {
        fn p95(&mut self) -> f64 {
            self.times.sort_by(f64::total_cmp);
            self.times[self.times.len() * 95 / 100]
        }

        fn in_time(&self) -> usize {
            let budget = BUDGET.as_secs_f64();
            self.times.iter().filter(|time| **time <= budget).count()
        }
    }

    #[test]
    fn nobody_is_turned_away_below_capacity() {
        let mut server = Simulated::new();
        for share in [0.3, 0.7, 0.9, 0.95] {
            let seen = server.load(share * server.capacity(), 60.0);
            let refused = seen.refused as f64 / seen.offered as f64;
            assert!(refused < 0.001, "{refused} at {share} of capacity");
        }
    }

    #[test]
    fn overload_costs_neither_answers_nor_time() {
        for (batch, image) in [(0.002, 0.001), (0.02, 0.002), (0.0002, 0.0005)] {
            let mut server = Simulated::new();
            (server.batch, server.image) = (batch, image);
            let capacity = server.capacity();
            let mut seen = server.load(3.0 * capacity, 30.0);
            let goodput = seen.in_time() as f64 / 30.0;
            assert!(goodput > 0.95 * capacity, "{goodput} of {capacity}");
            let p95 = seen.p95();
            assert!(p95 <= BUDGET.as_secs_f64(), "p95 {p95} at {capacity}");
        }
    }

    #[test]
    fn after_a_burst_everybody_is_let_in_again() {
        let mut server = Simulated::new();
        let capacity = server.capacity();
        for _ in 0..10 {
            assert!(server.load(10.0 * capacity, 1.0).refused > 0);
            // Requests left over from the burst are answered within the budget.
            server.load(0.5 * capacity, 0.3);
            assert_eq!(server.load(0.8 * capacity, 5.0).refused, 0);
        }
    }

    #[test]
    fn a_server_that_becomes_slower_or_faster_is_followed() {
        let mut server = Simulated::new();
        for slower in [1.0, 3.0, 1.0] {
            (server.batch, server.image) = (0.002 * slower, 0.001 * slower);
            let rate = 3.0 * server.capacity();
            server.load(rate, 3.0);
            let mut seen = server.load(rate, 5.0);
            let p95 = seen.p95();
            let budget = BUDGET.as_secs_f64();
            assert!((0.7 * budget..=budget).contains(&p95), "{p95} at {slower}");
        }
    }

    #[test]
    fn where_no_answer_is_in_time_all_threads_have_work() {
        let mut server = Simulated::new();
        (server.batch, server.image) = (4.0, 0.1);
        server.load(50.0, 60.0);
        assert_eq!(server.admission.lock().inside, 12);
    }

    #[test]
    fn who_leaves_makes_room() {
        let admission = Arc::new(Admission::new(1, 6, BUDGET));
        let now = Instant::now();
        let first = admission.enter(4, now).unwrap();
        let second = admission.enter(4, now).unwrap();
        assert!(admission.is_full(now) && admission.enter(1, now).is_none());
        drop(first);
        let third = admission.enter(1, now).unwrap();
        second.answered(now);
        drop(second);
        assert!(!admission.is_full(now));
        drop(third);
        assert_eq!(admission.lock().inside, 0);
        assert!(admission.lock().counted.is_none());
    }
}
