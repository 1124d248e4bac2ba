//! The time of a batch by its size.

use std::collections::BTreeMap;
use std::str::FromStr;

use anyhow::{Context, Result, bail};

/// Seconds per batch for the known sizes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Service(BTreeMap<usize, f64>);

impl Service {
    /// From pairs of size and seconds.
    ///
    /// # Errors
    /// If `times` is empty, or one of them is invalid.
    pub(crate) fn new(times: impl IntoIterator<Item = (usize, f64)>) -> Result<Self> {
        let mut known = BTreeMap::new();
        for (size, seconds) in times {
            if size == 0 {
                bail!("a batch of 0 images is invalid; use sizes from 1");
            }
            if !(seconds > 0.0 && seconds.is_finite()) {
                bail!("b{size}: give a time above 0");
            }
            if known.insert(size, seconds).is_some() {
                bail!("b{size} has two times; give it one");
            }
        }
        if known.is_empty() {
            bail!("no batch times; give them as in b1=18,b2=20,b4=24");
        }
        Ok(Self(known))
    }

    /// Reads `b1=18,b2=20ms,b4=0.024s`: numbers without a unit are milliseconds.
    ///
    /// # Errors
    /// Names the part that is invalid.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut times = Vec::new();
        for part in text.split(',').map(str::trim) {
            let wrong = || {
                format!("{part:?} is invalid: give the size and time of a batch as in b4=24 (ms)")
            };
            let (size, time) = part.split_once('=').with_context(wrong)?;
            let size = size.trim().strip_prefix('b').with_context(wrong)?;
            let size = size.parse().with_context(wrong)?;
            times.push((size, seconds(time.trim()).with_context(wrong)?));
        }
        Self::new(times)
    }

    /// The known sizes in rising order.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = usize> {
        self.0.keys().copied()
    }

    /// The largest known size, which is also the largest that a plan uses.
    pub(crate) fn largest(&self) -> usize {
        self.0.last_key_value().map_or(1, |(size, _)| *size)
    }

    /// Seconds of a batch of `images`, at least 1: interpolated between known sizes, the time of the smallest
    /// one below it, and in proportion to the largest one above it.
    pub(crate) fn seconds(&self, images: usize) -> f64 {
        let below = self.0.range(..=images).next_back();
        let above = self.0.range(images..).next();
        match (below, above) {
            (Some((low, at_low)), Some((high, at_high))) if high > low => {
                let share = (images - low) as f64 / (high - low) as f64;
                at_low + share * (at_high - at_low)
            }
            (_, Some((_, seconds))) => *seconds,
            (Some((size, seconds)), None) => seconds * images as f64 / *size as f64,
            (None, None) => f64::INFINITY,
        }
    }

    /// Images per second of one session with full batches of this size.
    pub(crate) fn rate(&self, batch: usize) -> f64 {
        batch as f64 / self.seconds(batch)
    }

    /// The smallest size with the highest throughput.
    pub(crate) fn fastest(&self) -> usize {
        let mut best = self.largest();
        for size in self.sizes() {
            if self.rate(size) > self.rate(best) {
                best = size;
            }
        }
        best
    }
}

impl FromStr for Service {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|error| format!("{error:#}"))
    }
}

/// Seconds, from a number of milliseconds or a number with a unit.
pub(crate) fn seconds(text: &str) -> Result<f64> {
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => match text.strip_suffix("us") {
            Some(number) => (number, 1e-6),
            None => text
                .strip_suffix('s')
                .map_or((text, 1e-3), |number| (number, 1.0)),
        },
    };
    match number.trim().parse::<f64>() {
        Ok(number) if number >= 0.0 && number.is_finite() => Ok(number * unit),
        _ => bail!("{text:?} is not a time: give milliseconds, or a number with us, ms or s"),
    }
}

/// [`seconds`] for arguments.
pub(crate) fn seconds_argument(text: &str) -> Result<f64, String> {
    seconds(text).map_err(|error| format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_between_known_sizes_lie_on_a_line() {
        let service = Service::parse("b1=18, b2=20ms,b4=0.024s,b8=32").unwrap();
        let millis = |images| (1e6 * service.seconds(images)).round() / 1e3;
        assert_eq!([1, 2, 3, 6, 8].map(millis), [18.0, 20.0, 22.0, 28.0, 32.0]);
        assert_eq!(millis(16), 64.0);
        assert_eq!(service.fastest(), 8);
        // A model of a fixed batch takes as long for fewer.
        assert_eq!(Service::parse("b8=32").unwrap().seconds(1), 0.032);
    }

    #[test]
    fn invalid_times_are_refused_by_name() {
        for (text, words) in [
            ("", "\"\""),
            ("b1", "\"b1\""),
            ("1=18", "\"1=18\""),
            ("b0=18", "batch of 0"),
            ("b1=0", "b1"),
            ("b1=-4", "\"b1=-4\""),
            ("b1=NaN", "\"b1=NaN\""),
            ("b1=18,b1=19", "two times"),
            ("b1=18min", "\"b1=18min\""),
        ] {
            let error = format!("{:#}", Service::parse(text).unwrap_err());
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
