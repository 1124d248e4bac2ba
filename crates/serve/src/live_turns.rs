//! Decides which frame is classified next.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use trommel_queue::LiveFrame;
use trommel_worker::LiveConfig;

/// Why a frame was not classified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// A newer one from its source arrived before its turn.
    Superseded,
    /// `live.stride` skips it.
    Stride,
    /// It exceeds `live.max-rate`.
    MaxRate,
    /// There are already `live.max-sources` sources.
    Sources,
    /// It is larger than `serve.max-body`.
    TooLarge,
    /// The model had no room for it among requests.
    Shed,
    /// The broker replaced it with a newer one before it was read.
    Replaced,
}

impl Dropped {
    pub(crate) const ALL: [Self; 7] = [
        Self::Superseded,
        Self::Stride,
        Self::MaxRate,
        Self::Sources,
        Self::TooLarge,
        Self::Shed,
        Self::Replaced,
    ];

    /// The reason in metrics.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Superseded => "superseded",
            Self::Stride => "stride",
            Self::MaxRate => "max_rate",
            Self::Sources => "sources",
            Self::TooLarge => "too_large",
            Self::Shed => "shed",
            Self::Replaced => "replaced",
        }
    }
}

/// The newest frame of each source, and whose turn it is: among sources with a frame and room, the
/// one that was served longest ago. Each has an equal share of the capacity, and the others use
/// what one leaves.
pub(crate) struct Turns {
    config: LiveConfig,
    sources: BTreeMap<String, Source>,
    turns: u64,
}

struct Source {
    waiting: Option<LiveFrame>,
    in_flight: usize,
    came: u64,
    /// When the next frame may be taken.
    next: Instant,
    last_turn: u64,
    last_came: Instant,
}

/// Time without a frame after which a source makes room for another.
const GONE: Duration = Duration::from_secs(60);

impl Turns {
    pub(crate) fn new(config: LiveConfig) -> Self {
        Self {
            config,
            sources: BTreeMap::new(),
            turns: 0,
        }
    }

    /// Adds a frame. Returns why one was dropped for it, this one or another.
    pub(crate) fn offer(&mut self, frame: LiveFrame, now: Instant) -> Option<Dropped> {
        if !self.sources.contains_key(&frame.source) {
            if self.sources.len() >= self.config.max_sources.get() {
                self.sources
                    .retain(|_, source| source.in_flight > 0 || now < source.last_came + GONE);
            }
            if self.sources.len() >= self.config.max_sources.get() {
                return Some(Dropped::Sources);
            }
        }
        let source = self
            .sources
            .entry(frame.source.clone())
            .or_insert_with(|| Source {
                waiting: None,
                in_flight: 0,
                came: 0,
                next: now,
                // After those already waiting.
                last_turn: self.turns,
                last_came: now,
            });
        source.last_came = now;
        let number = source.came;
        source.came += 1;
        if !number.is_multiple_of(self.config.stride.get() as u64) {
            return Some(Dropped::Stride);
        }
        if let Some(rate) = self.config.max_rate {
            if now < source.next {
                return Some(Dropped::MaxRate);
            }
            let interval = Duration::try_from_secs_f64(1.0 / rate).unwrap_or(Duration::MAX);
            // A slightly late frame does not delay the following ones.
            let from = now
                .checked_sub(interval)
                .map_or(now, |earliest| earliest.max(source.next));
            source.next = from.checked_add(interval).unwrap_or(now);
        }
        source.waiting.replace(frame).map(|_| Dropped::Superseded)
    }

    /// The next frame; [`Turns::done`] has to follow.
    pub(crate) fn take(&mut self) -> Option<LiveFrame> {
        let most = self.config.max_in_flight.get();
        let ready = self.sources.values_mut();
        let ready = ready.filter(|source| source.waiting.is_some() && source.in_flight < most);
        let source = ready.min_by_key(|source| source.last_turn)?;
        self.turns += 1;
        source.last_turn = self.turns;
        source.in_flight += 1;
        source.waiting.take()
    }

    /// Whether [`Turns::take`] returns a frame.
    pub(crate) fn has_ready(&self) -> bool {
        let most = self.config.max_in_flight.get();
        let mut sources = self.sources.values();
        sources.any(|source| source.waiting.is_some() && source.in_flight < most)
    }

    /// A frame of a source was processed.
    pub(crate) fn done(&mut self, source: &str) {
        if let Some(source) = self.sources.get_mut(source) {
            source.in_flight = source.in_flight.saturating_sub(1);
        }
    }

    /// Number of known sources.
    pub(crate) fn sources(&self) -> usize {
        self.sources.len()
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    fn frame(source: &str, sequence: u64) -> LiveFrame {
        LiveFrame {
            source: source.to_owned(),
            sequence,
            stored_at: 0,
            headers: Default::default(),
            payload: Default::default(),
            replaced: 0,
        }
    }

    fn config(max_in_flight: usize) -> LiveConfig {
        LiveConfig {
            max_in_flight: NonZeroUsize::new(max_in_flight).unwrap(),
            ..LiveConfig::default()
        }
    }

    #[test]
    fn the_newest_frame_is_the_one_that_is_taken() {
        let (mut turns, now) = (Turns::new(config(1)), Instant::now());
        assert_eq!(turns.offer(frame("a", 1), now), None);
        assert_eq!(turns.offer(frame("a", 2), now), Some(Dropped::Superseded));
        assert_eq!(turns.take().unwrap().sequence, 2);
        assert_eq!(turns.offer(frame("a", 3), now), None);
        assert!(
            !turns.has_ready() && turns.take().is_none(),
            "one at a time"
        );
        turns.done("a");
        assert_eq!(turns.take().unwrap().sequence, 3);
    }

    /// One source sends a hundred times as often as the others, and one rarely.
    #[test]
    fn shares_are_fair_whoever_sends_most() {
        let (mut turns, now) = (Turns::new(config(1)), Instant::now());
        let mut served = BTreeMap::<String, u32>::new();
        for round in 0..3000u64 {
            for burst in 0..100 {
                turns.offer(frame("loud", round * 100 + burst), now);
            }
            for source in ["b", "c", "d"] {
                turns.offer(frame(source, round), now);
            }
            if round % 100 == 0 {
                turns.offer(frame("rare", round), now);
            }
            // There is time for two frames per round.
            for _ in 0..2 {
                let frame = turns.take().unwrap();
                *served.entry(frame.source.clone()).or_default() += 1;
                turns.done(&frame.source);
            }
        }
        assert_eq!(served["rare"], 30, "less than its share: all of it");
        let share = (6000 - 30) / 4;
        for source in ["loud", "b", "c", "d"] {
            assert!(served[source].abs_diff(share) <= 30, "{source}: {served:?}");
        }
    }

    #[test]
    fn strides_and_rates_thin_out_each_source_for_itself() {
        let every_third = LiveConfig {
            stride: NonZeroUsize::new(3).unwrap(),
            ..LiveConfig::default()
        };
        let (mut turns, now) = (Turns::new(every_third), Instant::now());
        let offered: Vec<_> = (0..5)
            .map(|number| turns.offer(frame("a", number), now))
            .collect();
        let stride = Some(Dropped::Stride);
        assert_eq!(
            offered,
            [None, stride, stride, Some(Dropped::Superseded), stride]
        );
        assert_eq!(turns.offer(frame("b", 0), now), None);

        let slow = LiveConfig {
            max_rate: Some(10.0),
            ..LiveConfig::default()
        };
        let mut turns = Turns::new(slow);
        let mut taken = 0;
        // 25 frames per second for ten seconds.
        for number in 0..250u32 {
            let at = now + number * Duration::from_millis(40);
            if turns.offer(frame("a", number.into()), at) != Some(Dropped::MaxRate) {
                taken += 1;
            }
            if turns.take().is_some() {
                turns.done("a");
            }
        }
        assert!((95..=101).contains(&taken), "{taken}");
    }

    #[test]
    fn no_more_sources_are_held_than_allowed() {
        let two = LiveConfig {
            max_sources: NonZeroUsize::new(2).unwrap(),
            ..LiveConfig::default()
        };
        let (mut turns, now) = (Turns::new(two), Instant::now());
        turns.offer(frame("a", 0), now);
        turns.offer(frame("b", 0), now);
        assert_eq!(turns.offer(frame("c", 0), now), Some(Dropped::Sources));
        let later = now + GONE;
        turns.offer(frame("b", 1), later);
        assert_eq!(turns.offer(frame("c", 0), later), None, "a has gone");
        assert_eq!(turns.sources(), 2);
    }
}
