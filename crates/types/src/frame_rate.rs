use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How many frames of a video become images: frames per second, to a thousandth.
///
/// It is exact: frame `number` is the one shown `number / rate` seconds after the video's beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FrameRate(NonZeroU32);

/// Thousandths of a frame per second in one frame per second.
const UNIT: u32 = 1000;
/// Highest rate at which frames have distinct times in milliseconds.
const HIGHEST: u32 = 1000;

impl FrameRate {
    /// One frame per second.
    pub const ONE: Self = Self(NonZeroU32::new(UNIT).expect("1000 is not 0"));

    /// Frames in 1000 seconds.
    pub fn per_thousand_seconds(self) -> u32 {
        self.0.get()
    }

    /// When a frame is shown, in microseconds after the beginning, rounded down.
    pub fn micros(self, number: u64) -> u64 {
        let micros = u128::from(number) * 1_000_000_000 / u128::from(self.0.get());
        u64::try_from(micros).unwrap_or(u64::MAX)
    }

    /// The same in seconds to the millisecond, such as `12.000`.
    pub fn seconds(self, number: u64) -> String {
        let millis = self.micros(number) / 1000;
        format!("{}.{:03}", millis / 1000, millis % 1000)
    }

    /// Number of frames shown before `micros` microseconds have passed.
    pub fn frames_before(self, micros: u64) -> u64 {
        let frames = (u128::from(micros) * u128::from(self.0.get())).div_ceil(1_000_000_000);
        u64::try_from(frames).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for FrameRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (f64::from(self.0.get()) / f64::from(UNIT)).fmt(f)
    }
}

impl FromStr for FrameRate {
    type Err = String;

    /// Reads a number such as `1`, `0.5` or `29.97`.
    fn from_str(text: &str) -> Result<Self, String> {
        let rate = text.trim().parse::<f64>();
        let rate = rate.map_err(|_| format!("{text:?} is not a number of frames per second"))?;
        Self::try_from(rate)
    }
}

impl TryFrom<f64> for FrameRate {
    type Error = String;

    fn try_from(rate: f64) -> Result<Self, String> {
        let refused = || {
            format!(
                "{rate} frames per second: give a number from 0.001 to {HIGHEST}, with at most three decimals"
            )
        };
        let thousandths = rate * f64::from(UNIT);
        let whole = thousandths.round();
        let in_range = (1.0..=f64::from(HIGHEST * UNIT)).contains(&whole);
        if !in_range || (thousandths - whole).abs() > 1e-6 {
            return Err(refused());
        }
        NonZeroU32::new(whole as u32).map(Self).ok_or_else(refused)
    }
}

impl Serialize for FrameRate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(f64::from(self.0.get()) / f64::from(UNIT))
    }
}

impl<'de> Deserialize<'de> for FrameRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let rate = f64::deserialize(deserializer)?;
        Self::try_from(rate).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_exact_and_apart() {
        let rate: FrameRate = "29.97".parse().unwrap();
        assert_eq!(rate.micros(2997), 100_000_000);
        assert_eq!(rate.seconds(2997), "100.000");
        let fastest: FrameRate = "1000".parse().unwrap();
        assert_ne!(fastest.seconds(7), fastest.seconds(8));
        assert_eq!(FrameRate::ONE.seconds(3723), "3723.000");
        assert_eq!(FrameRate::ONE.frames_before(12_000_000), 12);
        assert_eq!(FrameRate::ONE.frames_before(12_000_001), 13);
        assert_eq!(FrameRate::ONE.frames_before(0), 0);
        assert_eq!(FrameRate::ONE.micros(u64::MAX), u64::MAX);
    }

    #[test]
    fn what_is_no_rate_is_refused() {
        for text in ["0", "-1", "1000.1", "0.0001", "1/3", "NaN", "inf", ""] {
            assert!(text.parse::<FrameRate>().is_err(), "{text}");
        }
        for text in ["0.001", "1", "12.5", "23.976", "1000"] {
            assert_eq!(text.parse::<FrameRate>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn json_holds_a_plain_number() {
        let rate: FrameRate = serde_json::from_str("12.5").unwrap();
        assert_eq!(serde_json::to_string(&rate).unwrap(), "12.5");
        assert_eq!(
            serde_json::from_str::<FrameRate>("1").unwrap(),
            FrameRate::ONE
        );
        assert!(serde_json::from_str::<FrameRate>("0").is_err());
    }
}
