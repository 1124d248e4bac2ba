//! Sizes and offsets, rounded like the reference processors.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::Budget;

/// A part of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) columns: Range<u32>,
    pub(crate) rows: Range<u32>,
}

impl Window {
    /// The whole image of `(width, height)`.
    pub(crate) fn whole((width, height): (u32, u32)) -> Self {
        Self {
            columns: 0..width,
            rows: 0..height,
        }
    }

    /// Whether this one contains another window.
    pub(crate) fn holds(&self, other: &Self) -> bool {
        let holds = |a: &Range<u32>, b: &Range<u32>| a.start <= b.start && b.end <= a.end;
        holds(&self.columns, &other.columns) && holds(&self.rows, &other.rows)
    }

    /// The smallest window that contains both.
    pub(crate) fn and(self, other: Self) -> Self {
        let both = |a: Range<u32>, b: Range<u32>| a.start.min(b.start)..a.end.max(b.end);
        Self {
            columns: both(self.columns, other.columns),
            rows: both(self.rows, other.rows),
        }
    }
}

/// How an image is resized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resize {
    /// Not at all.
    None,
    /// To this size, regardless of the aspect ratio.
    Exact {
        /// Rows.
        height: u32,
        /// Columns.
        width: u32,
    },
    /// Scales the shorter side to this length; the longer one is rounded down.
    ShortestEdge(u32),
    /// To the smallest size with the same aspect ratio that covers this one.
    Cover {
        /// Rows.
        height: u32,
        /// Columns.
        width: u32,
    },
    /// To the largest size with the same aspect ratio that fits into this one.
    Fit {
        /// Rows.
        height: u32,
        /// Columns.
        width: u32,
    },
    /// To the size for a server.
    Budget(Budget),
}

impl Resize {
    /// The size `(width, height)` after resizing an image of this size.
    ///
    /// The longer side is `int(edge × long ÷ short)`, as in Transformers'
    /// `get_resize_output_image_size` and torchvision's `Resize`; `Cover` and `Fit` round halves to
    /// even, like timm's `ResizeKeepRatio`. Sides are at least 1.
    pub fn target(self, width: u32, height: u32) -> (u32, u32) {
        let longer = |edge: u32, long: u32, short: u32| {
            (f64::from(edge) * f64::from(long) / f64::from(short)) as u32
        };
        let ratios = |to_height, to_width| {
            let ratio = |from: u32, to: u32| f64::from(from) / f64::from(to);
            (ratio(height, to_height), ratio(width, to_width))
        };
        let divided = |ratio: f64| {
            let side = |from: u32| ((f64::from(from) / ratio).round_ties_even() as u32).max(1);
            (side(width), side(height))
        };
        match self {
            Self::None => (width, height),
            Self::Budget(budget) => budget.target(width, height),
            Self::Exact { height, width } => (width, height),
            Self::ShortestEdge(edge) if width <= height => (edge, longer(edge, height, width)),
            Self::ShortestEdge(edge) => (longer(edge, width, height), edge),
            Self::Cover { height, width } => {
                let (vertical, horizontal) = ratios(height, width);
                divided(vertical.min(horizontal))
            }
            Self::Fit { height, width } => {
                let (vertical, horizontal) = ratios(height, width);
                divided(vertical.max(horizontal))
            }
        }
    }
}

/// A centre crop, padded if the image is smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Crop {
    /// Rows.
    pub height: u32,
    /// Columns.
    pub width: u32,
    /// Which rounding the offsets follow.
    pub rounding: Rounding,
    /// Red, green and blue of the padding.
    pub fill: [u8; 3],
}

/// The rounding of crop offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// `(size − crop) // 2`, with the larger half of a padding first.
    Transformers,
    /// `(size − crop) // 2`, with the smaller half of a padding first: Transformers' processors
    /// with torchvision.
    TransformersFast,
    /// `round((size − crop) ÷ 2)`, halves to even, with the smaller half of a padding first.
    Torchvision,
}

/// The start of a crop along one axis, in an image of `size` of which `crop` are kept.
///
/// A negative number is the padding before the image.
pub(crate) fn crop_offset(size: u32, crop: u32, rounding: Rounding) -> i64 {
    let spare = i64::from(size) - i64::from(crop);
    match rounding {
        // Padding before the image is ceil(missing / 2), which flooring gives here.
        Rounding::Transformers => spare.div_euclid(2),
        Rounding::TransformersFast => spare / 2,
        Rounding::Torchvision if spare < 0 => -(-spare / 2),
        Rounding::Torchvision => {
            let half = spare / 2;
            if spare % 2 == 0 || half % 2 == 0 {
                half
            } else {
                half + 1
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_side_is_rounded_down() {
        let resize = Resize::ShortestEdge(256);
        assert_eq!(resize.target(500, 375), (341, 256));
        assert_eq!(resize.target(375, 500), (256, 341));
        assert_eq!(resize.target(100, 100), (256, 256));
        assert_eq!(
            Resize::Exact {
                height: 2,
                width: 3
            }
            .target(9, 9),
            (3, 2)
        );
    }

    #[test]
    fn covering_and_fitting_keep_the_aspect_ratio() {
        let (cover, fit) = (
            Resize::Cover {
                height: 256,
                width: 320,
            },
            Resize::Fit {
                height: 256,
                width: 320,
            },
        );
        // timm: ratios 375/256 and 500/320; 500 / 1.46484375 = 341.33, 375 / 1.5625 = 240.
        assert_eq!(cover.target(500, 375), (341, 256));
        assert_eq!(fit.target(500, 375), (320, 240));
        assert_eq!(fit.target(1, 5000), (1, 256));
    }

    #[test]
    fn offsets_follow_the_family() {
        // Python: (341 - 224) // 2 = 58; round(58.5) = 58; (343 - 224) / 2 = 59.5 → 60.
        assert_eq!(crop_offset(341, 224, Rounding::Transformers), 58);
        assert_eq!(crop_offset(341, 224, Rounding::Torchvision), 58);
        assert_eq!(crop_offset(343, 224, Rounding::Transformers), 59);
        assert_eq!(crop_offset(343, 224, Rounding::Torchvision), 60);
    }

    #[test]
    fn a_smaller_image_is_padded() {
        assert_eq!(crop_offset(7, 10, Rounding::Transformers), -2);
        assert_eq!(crop_offset(7, 10, Rounding::TransformersFast), -1);
        assert_eq!(crop_offset(7, 10, Rounding::Torchvision), -1);
    }
}
