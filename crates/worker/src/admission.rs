use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Share of the budget that requests may take before fewer are let in.
const TARGET: f64 = 0.75;
/// What is left of the limit when they take longer.
const CUT: f64 = 0.85;

/// Bounds the requests that are worked on or wait, so that what is let in is answered in time.
///
/// The bound follows what answers take: it grows by one for as many answers as it lets in, while these
/// come in time and it is reached, and falls by a share once they do not (additive increase,
/// multiplicative decrease).
pub(crate) struct Admission {
    least: f64,
    most: f64,
    target: Duration,
    state: Mutex<State>,
}

struct State {
    inside: usize,
    limit: f64,
    last_cut: Option<Instant>,
}

/// A request that was let in, for as long as this lives.
pub(crate) struct Entry {
    admission: Arc<Admission>,
    since: Instant,
}

impl Admission {
    /// At most `most` requests, and always as many as `least`; the aim is an answer within `budget`.
    pub(crate) fn new(least: usize, most: usize, budget: Duration) -> Self {
        let most = most.max(1) as f64;
        let least = (least.max(1) as f64).min(most);
        Self {
            least,
            most,
            target: budget.mul_f64(TARGET),
            state: Mutex::new(State {
                inside: 0,
                limit: most,
                last_cut: None,
            }),
        }
    }

    /// Lets a request in, if there is room; what its answer takes is counted from `now` on.
    pub(crate) fn enter(self: &Arc<Self>, now: Instant) -> Option<Entry> {
        let mut state = self.lock();
        if state.inside as f64 >= state.limit.floor() {
            return None;
        }
        state.inside += 1;
        drop(state);
        Some(Entry {
            admission: Arc::clone(self),
            since: now,
        })
    }

    /// Whether a request would be turned away now.
    pub(crate) fn is_full(&self) -> bool {
        let state = self.lock();
        state.inside as f64 >= state.limit.floor()
    }

    fn took(&self, time: Duration, now: Instant) {
        let mut state = self.lock();
        if time <= self.target {
            if state.inside as f64 + 1.0 >= state.limit {
                state.limit = (state.limit + 1.0 / state.limit).min(self.most);
            }
            return;
        }
        // Requests that were let in before the last cut say nothing about what it has changed.
        let since_cut = state.last_cut.map(|cut| now.saturating_duration_since(cut));
        if since_cut.is_none_or(|since| since > time) {
            // The bound may be far above what has come.
            let reached = state.limit.min(state.inside as f64);
            state.limit = (reached * CUT).max(self.least);
            state.last_cut = Some(now);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// The request was answered. One that is dropped otherwise tells nothing of the time answers take.
    pub(crate) fn answered(self, now: Instant) {
        let took = now.saturating_duration_since(self.since);
        self.admission.took(took, now);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.admission.lock().inside -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Duration = Duration::from_millis(100);

    /// Serves a queue whose server takes 5 ms a request, while more come than it can serve; gives the
    /// bound that it settles at.
    fn settles_at(service: Duration) -> f64 {
        let admission = Arc::new(Admission::new(2, 256, BUDGET));
        let mut queue = std::collections::VecDeque::new();
        let mut now = Instant::now();
        for _ in 0..20_000 {
            while let Some(entry) = admission.enter(now) {
                queue.push_back(entry);
            }
            now += service;
            queue.pop_front().unwrap().answered(now);
        }
        admission.lock().limit
    }

    #[test]
    fn as_many_are_let_in_as_are_answered_in_time() {
        for (millis, room) in [(1, 75.0), (5, 15.0), (10, 7.5)] {
            let limit = settles_at(Duration::from_millis(millis));
            assert!(
                (0.5 * room..=1.2 * room).contains(&limit),
                "{millis} ms: {limit}"
            );
        }
        let least = settles_at(Duration::from_millis(500));
        assert!((2.0..3.5).contains(&least), "{least}");
    }

    #[test]
    fn who_leaves_makes_room() {
        let admission = Arc::new(Admission::new(1, 2, BUDGET));
        let now = Instant::now();
        let (first, second) = (admission.enter(now).unwrap(), admission.enter(now).unwrap());
        assert!(admission.is_full() && admission.enter(now).is_none());
        drop(first);
        let third = admission.enter(now).unwrap();
        second.answered(now);
        assert!(!admission.is_full());
        drop(third);
        assert_eq!(admission.lock().inside, 0);
    }

    #[test]
    fn one_slow_request_costs_little() {
        let admission = Arc::new(Admission::new(1, 100, BUDGET));
        let now = Instant::now();
        let inside: Vec<_> = (0..40).filter_map(|_| admission.enter(now)).collect();
        let late = now + 2 * BUDGET;
        inside.into_iter().for_each(|entry| entry.answered(late));
        assert_eq!(admission.lock().limit, 34.0, "of 40, cut once");
    }
}
