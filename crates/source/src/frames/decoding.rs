//! A stretch being decoded, and the requests for its frames.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::stretch::Stretch;
use super::{Answer, Frame, Missed, lock};
use crate::Fetched;
use crate::ffmpeg::Running;

/// Bytes of frames that a stretch keeps for later requests.
const KEPT: usize = 32 << 20;
/// Time without requests after which decoding of a stretch stops.
const IDLE: Duration = Duration::from_secs(30);

/// A stretch of a video, being decoded or finished.
pub(super) struct Decoding {
    /// The frame that it was started for.
    pub(super) frame: Frame,
    pub(super) stretch: Stretch,
    state: Mutex<State>,
    changed: Condvar,
}

pub(super) struct State {
    /// The next frame.
    next: u64,
    pub(super) kept: BTreeMap<u64, Fetched>,
    kept_bytes: usize,
    waiting: BTreeMap<u64, Vec<oneshot::Sender<Answer>>>,
    is_paused: bool,
    is_stopped: bool,
    pub(super) ended: Option<End>,
}

/// How a stretch ended.
pub(super) enum End {
    /// With its last frame.
    Complete,
    /// Early; this error applies to each remaining frame.
    Rest(Missed),
}

impl State {
    pub(super) fn is_idle(&self) -> bool {
        self.is_paused && self.waiting.is_empty()
    }
}

impl Decoding {
    /// A stretch with its first request.
    pub(super) fn new(frame: &Frame, stretch: Stretch, sender: oneshot::Sender<Answer>) -> Self {
        Self {
            frame: frame.clone(),
            stretch,
            state: Mutex::new(State {
                next: stretch.first,
                kept: BTreeMap::new(),
                kept_bytes: 0,
                waiting: BTreeMap::from([(frame.number, vec![sender])]),
                is_paused: false,
                is_stopped: false,
                ended: None,
            }),
            changed: Condvar::new(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn is_of(&self, frame: &Frame, stretch: Stretch) -> bool {
        self.stretch == stretch
            && self.frame.video == frame.video
            && self.frame.etag == frame.etag
            && self.frame.rate == frame.rate
    }

    /// Accepts a request; returns it if another decoder has to serve it.
    pub(super) fn take(
        &self,
        number: u64,
        sender: oneshot::Sender<Answer>,
    ) -> Option<oneshot::Sender<Answer>> {
        let mut state = self.state();
        if let Some(fetched) = state.kept.remove(&number) {
            state.kept_bytes -= fetched.bytes.len();
            // Requests without a receiver need no answer.
            drop(sender.send(Ok(fetched)));
            self.changed.notify_one();
            return None;
        }
        if number < state.next {
            return self.refuse(sender);
        }
        match &state.ended {
            None if state.is_stopped => return Some(sender),
            None => state.waiting.entry(number).or_default().push(sender),
            Some(End::Complete) => return self.refuse(sender),
            Some(End::Rest(missed)) => drop(sender.send(Err(missed.again()))),
        }
        self.changed.notify_one();
        None
    }

    /// A frame that was dropped from a stretch is decoded by itself, even if it was alone.
    fn refuse(&self, sender: oneshot::Sender<Answer>) -> Option<oneshot::Sender<Answer>> {
        if self.stretch.count == 1 {
            return Some(sender);
        }
        drop(sender.send(Err(Missed::Alone)));
        None
    }

    pub(super) fn stop(&self) {
        self.state().is_stopped = true;
        self.changed.notify_one();
    }

    /// Waits until a frame may be decoded. Returns whether there is a request.
    pub(super) fn may_go_on(&self, running: &Running) -> bool {
        let mut state = self.state();
        let until = Instant::now() + IDLE;
        let goes_on = loop {
            for waiting in state.waiting.values_mut() {
                waiting.retain(|sender| !sender.is_closed());
            }
            state.waiting.retain(|_, waiting| !waiting.is_empty());
            let left = until.saturating_duration_since(Instant::now());
            if state.is_stopped || left.is_zero() {
                state.is_stopped = true;
                break false;
            }
            if state.kept_bytes < KEPT || !state.waiting.is_empty() {
                break true;
            }
            state.is_paused = true;
            running.watch().pause(true);
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        state.is_paused = false;
        running.watch().pause(false);
        goes_on
    }

    /// Delivers the next frame.
    pub(super) fn hand_on(&self, fetched: Fetched) {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        if let Some(waiting) = state.waiting.remove(&number) {
            for sender in waiting {
                drop(sender.send(Ok(fetched.clone())));
            }
            return;
        }
        state.kept_bytes += fetched.bytes.len();
        state.kept.insert(number, fetched);
        while state.kept_bytes > KEPT && state.kept.len() > 1 {
            let Some((_, gone)) = state.kept.pop_first() else {
                return;
            };
            state.kept_bytes -= gone.bytes.len();
        }
    }

    /// Answers all remaining requests with the result.
    pub(super) fn end(&self, end: End) {
        let mut state = self.state();
        for sender in std::mem::take(&mut state.waiting).into_values().flatten() {
            let missed = match &end {
                End::Complete => Missed::Alone,
                End::Rest(missed) => missed.again(),
            };
            drop(sender.send(Err(missed)));
        }
        state.ended = Some(end);
    }
}
