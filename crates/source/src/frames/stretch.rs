//! Splits videos into stretches that are decoded together.

use super::Frame;

/// Longest stretch in seconds and frames.
const STRETCH: (u64, u64) = (30, 256);

/// Frames that are decoded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) first: u64,
    pub(super) count: u64,
}

impl Stretch {
    /// The stretch of a frame.
    pub(super) fn of(frame: &Frame) -> Self {
        let (seconds, most) = STRETCH;
        let rate = u64::from(frame.rate.per_thousand_seconds());
        let count = (seconds * rate / 1000).clamp(1, most);
        Self {
            first: frame.number / count * count,
            count,
        }
    }

    pub(super) fn only(frame: &Frame) -> Self {
        Self {
            first: frame.number,
            count: 1,
        }
    }

    #[cfg(test)]
    fn has(self, number: u64) -> bool {
        (self.first..self.first + self.count).contains(&number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(rate: &str, number: u64) -> Frame {
        Frame {
            uri: "clip.mp4#t".to_owned(),
            video: "clip.mp4".to_owned(),
            etag: None,
            rate: rate.parse().unwrap(),
            number,
        }
    }

    #[test]
    fn stretches_begin_at_the_same_frames_for_all() {
        for (rate, number, first, count) in [
            ("1", 0, 0, 30),
            ("1", 29, 0, 30),
            ("1", 30, 30, 30),
            ("25", 300, 256, 256),
            ("0.01", 7, 7, 1),
        ] {
            let frame = frame(rate, number);
            let stretch = Stretch::of(&frame);
            assert_eq!(
                (stretch.first, stretch.count),
                (first, count),
                "{rate} {number}"
            );
            assert!(stretch.has(number) && !stretch.has(first + count));
        }
    }
}
