//! Limits concurrent requests per server: more while answers stay fast, fewer when they slow down
//! or the server refuses (additive increase, multiplicative decrease).

use std::time::Duration;

/// A window this many times slower than the fastest one is too slow.
const SLOW: f64 = 3.0;
/// Up to this many times, the server had room for all of its requests.
const FREE: f64 = 1.5;
/// Factor of the limit after a slow window, and after a refusal.
const AFTER_SLOW: f64 = 0.8;
const AFTER_REFUSAL: f64 = 0.5;

/// The limit of requests in flight to one server. Pure: no clock, no lock.
#[derive(Debug)]
pub(crate) struct Pace {
    limit: f64,
    most: usize,
    /// Quadruples with each window while the server is free, then doubles, until it is too slow.
    is_starting: bool,
    /// Times of the answers of this window, whose length is the limit.
    window: Vec<Duration>,
    /// Median of the fastest window.
    quickest: Option<f64>,
    /// Number of refusals: requests sent before the last one carry no new information.
    turn: u64,
}

impl Pace {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            limit: most.min(4) as f64,
            most,
            is_starting: true,
            window: Vec::new(),
            quickest: None,
            turn: 0,
        }
    }

    /// Limit of requests in flight, at least 1.
    pub(crate) fn limit(&self) -> usize {
        self.limit as usize
    }

    /// Recorded when a request is sent.
    pub(crate) fn turn(&self) -> u64 {
        self.turn
    }

    /// An answer arrived after this time.
    pub(crate) fn answered(&mut self, took: Duration) {
        self.window.push(took);
        if self.window.len() < self.limit() {
            return;
        }
        self.window.sort_unstable();
        let median = self.window[self.window.len() / 2].as_secs_f64();
        self.window.clear();
        let quickest = self
            .quickest
            .map_or(median, |quickest| quickest.min(median));
        self.quickest = Some(quickest);
        let most = self.most as f64;
        if median > SLOW * quickest {
            self.is_starting = false;
            if self.limit() == 1 {
                // No other request delays it: the server itself has become slower.
                self.quickest = Some(median);
            }
            self.limit = (self.limit * AFTER_SLOW).max(1.0);
        } else if self.is_starting {
            let factor = if median > FREE * quickest { 2.0 } else { 4.0 };
            self.limit = (self.limit * factor).min(most);
        } else {
            self.limit = (self.limit + 1.0).min(most);
        }
    }

    /// The server refused a request sent in this turn, or did not answer in time.
    pub(crate) fn refused(&mut self, turn: u64) {
        if turn == self.turn {
            self.turn += 1;
            self.is_starting = false;
            self.limit = (self.limit * AFTER_REFUSAL).max(1.0);
            self.window.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(pace: &mut Pace, millis: u64) {
        for _ in 0..pace.limit() {
            pace.answered(Duration::from_millis(millis));
        }
    }

    #[test]
    fn the_limit_quadruples_at_first_and_grows_by_one_after_the_first_refusal() {
        let mut pace = Pace::new(40);
        for expected in [4, 16, 40, 40] {
            assert_eq!(pace.limit(), expected);
            window(&mut pace, 100);
        }
        pace.refused(pace.turn());
        for expected in [20, 21, 22] {
            assert_eq!(pace.limit(), expected);
            window(&mut pace, 100);
        }
    }

    #[test]
    fn a_server_with_a_queue_is_approached_more_slowly_and_left_when_it_is_full() {
        let mut pace = Pace::new(64);
        for (limit, millis) in [(4, 100), (16, 200), (32, 400), (25, 100), (26, 100)] {
            assert_eq!(pace.limit(), limit);
            window(&mut pace, millis);
        }
    }

    #[test]
    fn one_burst_of_refusals_halves_it_once() {
        let mut pace = Pace::new(64);
        (0..3).for_each(|_| window(&mut pace, 10));
        let turn = pace.turn();
        (0..20).for_each(|_| pace.refused(turn));
        assert_eq!(pace.limit(), 32);
        (0..9).for_each(|_| pace.refused(pace.turn()));
        assert_eq!(pace.limit(), 1, "never nothing");
    }

    #[test]
    fn slow_answers_lower_it_and_quick_ones_raise_it_again() {
        // A server with a capacity of 8: further requests wait.
        let mut pace = Pace::new(64);
        let (mut most, mut least) = (0, usize::MAX);
        for round in 0..200 {
            let limit = pace.limit();
            if round > 20 {
                (most, least) = (most.max(limit), least.min(limit));
            }
            window(&mut pace, 100 * (limit as u64).div_ceil(8));
        }
        assert!(least >= 8 && most <= 40, "{least} to {most}");
    }

    #[test]
    fn a_server_that_has_become_slower_is_not_starved_for_ever() {
        let mut pace = Pace::new(64);
        (0..6).for_each(|_| window(&mut pace, 10));
        (0..40).for_each(|_| window(&mut pace, 1000));
        let least = pace.limit();
        (0..20).for_each(|_| window(&mut pace, 1000));
        assert!(pace.limit() >= least + 19, "{least} to {}", pace.limit());
    }
}
