//! Limits concurrent requests per host, and pauses busy hosts.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::Rng;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// Number of remembered hosts above which idle ones are forgotten.
const HOSTS: usize = 4096;
/// Successive answers after which a busy host gets one more concurrent request.
const CALM: u32 = 20;
/// The first pause of a busy host that named no time.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// The gates of all hosts.
pub(super) struct Gates {
    most: usize,
    longest: Duration,
    hosts: Mutex<HashMap<String, Arc<Gate>>>,
}

impl Gates {
    /// At most `most` concurrent requests per host, and pauses of at most `longest`.
    pub(super) fn new(most: usize, longest: Duration) -> Self {
        Self {
            most,
            longest,
            hosts: Mutex::default(),
        }
    }

    /// Waits until a request to a host may be sent. Dropping the pass admits the next one.
    pub(super) async fn enter(&self, host: &str) -> Pass {
        let gate = self.gate(host);
        loop {
            let freed = gate.freed.notified();
            tokio::pin!(freed);
            // From here on no returned pass is missed.
            freed.as_mut().enable();
            let closed_until = {
                let mut state = gate.state();
                match state.closed_until {
                    Some(until) if until > Instant::now() => Some(until),
                    _ if state.passes < state.limit => {
                        state.passes += 1;
                        break;
                    }
                    _ => None,
                }
            };
            match closed_until {
                Some(until) => sleep_until(until).await,
                None => freed.await,
            }
        }
        Pass {
            gate,
            most: self.most,
            longest: self.longest,
        }
    }

    fn gate(&self, host: &str) -> Arc<Gate> {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gate) = hosts.get(host) {
            return Arc::clone(gate);
        }
        if hosts.len() >= HOSTS {
            hosts.retain(|_, gate| Arc::strong_count(gate) > 1 || gate.state().is_closed());
        }
        let gate = Arc::new(Gate {
            state: Mutex::new(State {
                passes: 0,
                limit: self.most,
                closed_until: None,
                refusals: 0,
                answers: 0,
            }),
            freed: Notify::new(),
        });
        hosts.insert(host.to_owned(), Arc::clone(&gate));
        gate
    }
}

struct Gate {
    state: Mutex<State>,
    freed: Notify,
}

struct State {
    /// Requests in flight.
    passes: usize,
    /// Current limit.
    limit: usize,
    closed_until: Option<Instant>,
    /// Successive times that the host was busy.
    refusals: u32,
    /// Answers since then.
    answers: u32,
}

impl State {
    fn is_closed(&self) -> bool {
        self.closed_until
            .is_some_and(|until| until > Instant::now())
    }
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request to a host.
pub(super) struct Pass {
    gate: Arc<Gate>,
    most: usize,
    longest: Duration,
}

impl Pass {
    /// The host has answered: after a while its limit rises again.
    pub(super) fn answered(&self) {
        let mut state = self.gate.state();
        state.refusals = 0;
        state.answers += 1;
        if state.answers >= CALM && state.limit < self.most {
            state.answers = 0;
            state.limit += 1;
            drop(state);
            self.gate.freed.notify_waiters();
        }
    }

    /// The host is busy: it is not contacted for the time that it named, or for a growing time, and
    /// then gets half as many concurrent requests. Requests that were refused together count once.
    pub(super) fn refused(&self, wanted: Option<Duration>) {
        let mut state = self.gate.state();
        if !state.is_closed() {
            state.refusals += 1;
            state.limit = (state.limit / 2).max(1);
            state.answers = 0;
        }
        let wait = wanted.unwrap_or_else(|| {
            let grown = FIRST_WAIT.saturating_mul(1 << state.refusals.saturating_sub(1).min(16));
            grown.mul_f64(rand::rng().random_range(0.5..1.0))
        });
        let until = Instant::now() + wait.min(self.longest);
        if state.closed_until.is_none_or(|before| before < until) {
            state.closed_until = Some(until);
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gate.state().passes -= 1;
        self.gate.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const LONGEST: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn a_host_gets_so_many_requests_and_others_as_many() {
        let gates = Gates::new(2, LONGEST);
        let (first, second) = (gates.enter("a").await, gates.enter("a").await);
        assert!(gates.enter("a").now_or_never().is_none());
        assert!(gates.enter("b").now_or_never().is_some());
        let waiting = gates.enter("a");
        tokio::pin!(waiting);
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(first);
        let third = waiting.await;
        assert!(gates.enter("a").now_or_never().is_none());
        drop((second, third));
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_host_is_left_alone_for_as_long_as_it_wants() {
        let gates = Gates::new(4, LONGEST);
        let start = Instant::now();
        let passes = [gates.enter("a").await, gates.enter("a").await];
        for pass in &passes {
            pass.refused(Some(Duration::from_secs(7)));
        }
        drop(passes);
        let first = gates.enter("a").await;
        assert_eq!(start.elapsed(), Duration::from_secs(7));
        // Refused together, they have halved the limit once.
        let second = gates.enter("a").await;
        assert!(gates.enter("a").now_or_never().is_none());
        for _ in 0..2 * CALM {
            first.answered();
        }
        let all = [gates.enter("a").await, gates.enter("a").await];
        drop((first, second, all));
    }

    #[tokio::test(start_paused = true)]
    async fn waits_grow_and_stay_bounded() {
        let gates = Gates::new(4, LONGEST);
        let mut waits = Vec::new();
        for _ in 0..12 {
            let before = Instant::now();
            let pass = gates.enter("a").await;
            waits.push(before.elapsed());
            pass.refused(None);
        }
        assert_eq!(waits[0], Duration::ZERO);
        assert!(
            waits[1] <= FIRST_WAIT && waits[4] >= 4 * FIRST_WAIT,
            "{waits:?}"
        );
        assert!(waits.iter().all(|wait| *wait <= LONGEST), "{waits:?}");
        gates.enter("a").await.refused(Some(Duration::MAX));
        let before = Instant::now();
        drop(gates.enter("a").await);
        assert!(before.elapsed() <= LONGEST);
    }

    #[tokio::test(start_paused = true)]
    async fn hosts_that_nobody_asks_are_forgotten() {
        let gates = Gates::new(1, LONGEST);
        gates.enter("busy").await.refused(Some(LONGEST));
        for number in 0..2 * HOSTS {
            drop(gates.enter(&number.to_string()).await);
        }
        let hosts = gates.hosts.lock().unwrap();
        assert!(hosts.len() <= HOSTS && hosts.contains_key("busy"));
    }
}
