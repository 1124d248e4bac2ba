//! The number of tokens that a vision-language model makes of an image, and the size that an image
//! is scaled to for a token budget.
//!
//! The formulas are those of the families' own processors, as published in Transformers, with the
//! limits in the published `preprocessor_config.json`.

use std::fmt;

use serde::Serialize;

use crate::Resize;

/// A family of vision-language models with a known formula.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// Qwen2-VL and Qwen2.5-VL: `smart_resize` to multiples of 28, one token per 28 × 28.
    #[serde(rename = "qwen2.5-vl")]
    Qwen2Vl,
    /// Qwen3-VL: the same with 32.
    #[serde(rename = "qwen3-vl")]
    Qwen3Vl,
    /// InternVL 2 to 3: up to 12 tiles of 448 × 448 and a thumbnail, 256 tokens each.
    #[serde(rename = "internvl")]
    InternVl,
    /// LLaVA 1.5: always 336 × 336, 576 tokens.
    #[serde(rename = "llava-1.5")]
    Llava15,
    /// Gemma 3 without pan and scan: always 896 × 896, 256 tokens.
    #[serde(rename = "gemma3")]
    Gemma3,
}

/// The names of the families.
const NAMES: [(&str, Family); 6] = [
    ("qwen2-vl", Family::Qwen2Vl),
    ("qwen2.5-vl", Family::Qwen2Vl),
    ("qwen3-vl", Family::Qwen3Vl),
    ("internvl", Family::InternVl),
    ("llava-1.5", Family::Llava15),
    ("gemma3", Family::Gemma3),
];

/// Side of an InternVL tile, tokens per tile, and the most tiles.
const TILE: u32 = 448;
const TILE_TOKENS: u32 = 256;
const MOST_TILES: u32 = 12;
/// Input sides of LLaVA 1.5 and Gemma 3.
const LLAVA: u32 = 336;
const GEMMA: u32 = 896;

/// The parameters of `smart_resize`.
struct Smart {
    factor: u32,
    min_pixels: u64,
    max_pixels: u64,
}

impl Family {
    /// The family with this name.
    pub fn named(name: &str) -> Option<Self> {
        let found = NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, family)| *family)
    }

    /// All names, for people.
    pub fn names() -> String {
        NAMES.map(|(name, _)| name).join(", ")
    }

    /// Tokens that the model makes of an image of this size, without those around it.
    pub fn tokens(self, width: u32, height: u32) -> u32 {
        match self {
            Self::Qwen2Vl | Self::Qwen3Vl => {
                let smart = self.smart();
                let (width, height) = smart.size(width, height);
                (width / smart.factor) * (height / smart.factor)
            }
            Self::InternVl => {
                let (columns, rows) = grid(width, height, MOST_TILES);
                tokens_of_tiles(columns * rows)
            }
            Self::Llava15 => 576,
            Self::Gemma3 => 256,
        }
    }

    /// The least tokens that an image can be reduced to.
    pub fn fewest(self) -> u32 {
        match self {
            Self::Qwen2Vl | Self::Qwen3Vl => {
                let Smart {
                    factor, min_pixels, ..
                } = self.smart();
                u32::try_from(min_pixels / u64::from(factor * factor)).unwrap_or(u32::MAX)
            }
            Self::InternVl => TILE_TOKENS,
            Self::Llava15 | Self::Gemma3 => self.tokens(1, 1),
        }
    }

    fn smart(self) -> Smart {
        match self {
            Self::Qwen3Vl => Smart {
                factor: 32,
                min_pixels: 65_536,
                max_pixels: 16_777_216,
            },
            _ => Smart {
                factor: 28,
                min_pixels: 3136,
                max_pixels: 12_845_056,
            },
        }
    }

    /// The size to send an image in, so that it makes at most this many tokens. Never larger than
    /// the original.
    fn within(self, tokens: u32, width: u32, height: u32) -> (u32, u32) {
        match self {
            Self::Qwen2Vl | Self::Qwen3Vl => {
                let factor = u64::from(self.smart().factor);
                self.smart_within(u64::from(tokens) * factor * factor, width, height)
            }
            Self::InternVl if self.tokens(width, height) <= tokens => (width, height),
            Self::InternVl => {
                // As many tiles as fit, plus a thumbnail if there are several.
                let tiles = (1..=MOST_TILES).rev();
                let mut tiles = tiles.filter(|tiles| tokens_of_tiles(*tiles) <= tokens);
                let (columns, rows) = grid(width, height, tiles.next().unwrap_or(1));
                (columns * TILE, rows * TILE)
            }
            Self::Llava15 if width.min(height) > LLAVA => {
                Resize::ShortestEdge(LLAVA).target(width, height)
            }
            Self::Llava15 => (width, height),
            Self::Gemma3 => (width.min(GEMMA), height.min(GEMMA)),
        }
    }

    fn smart_within(self, max_pixels: u64, width: u32, height: u32) -> (u32, u32) {
        let own = self.smart();
        let own_size = own.size(width, height);
        if u64::from(own_size.0) * u64::from(own_size.1) <= max_pixels {
            return (width, height);
        }
        let smart = Smart { max_pixels, ..own };
        smart.size(width, height)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qwen2Vl => "qwen2.5-vl",
            Self::Qwen3Vl => "qwen3-vl",
            Self::InternVl => "internvl",
            Self::Llava15 => "llava-1.5",
            Self::Gemma3 => "gemma3",
        })
    }
}

impl Smart {
    /// `smart_resize` of Transformers' `Qwen2VLImageProcessor`.
    fn size(&self, width: u32, height: u32) -> (u32, u32) {
        let factor = f64::from(self.factor);
        let (width, height) = (f64::from(width), f64::from(height));
        let rounded = |side: f64| (side / factor).round_ties_even() * factor;
        let (wide, high) = (rounded(width), rounded(height));
        let (least, most) = (self.min_pixels as f64, self.max_pixels as f64);
        let (wide, high) = if wide * high > most {
            let beta = (height * width / most).sqrt();
            let cut = |side: f64| ((side / beta / factor).floor() * factor).max(factor);
            (cut(width), cut(height))
        } else if wide * high < least {
            let beta = (least / (height * width)).sqrt();
            let raised = |side: f64| (side * beta / factor).ceil() * factor;
            (raised(width), raised(height))
        } else {
            (wide, high)
        };
        (wide as u32, high as u32)
    }
}

fn tokens_of_tiles(tiles: u32) -> u32 {
    let thumbnail = u32::from(tiles > 1);
    (tiles + thumbnail) * TILE_TOKENS
}

/// Columns and rows of an image's tiles: `get_optimal_tiled_canvas` of Transformers.
fn grid(width: u32, height: u32, most: u32) -> (u32, u32) {
    let (wide, high) = (f64::from(width), f64::from(height));
    let sides = (1..=most).flat_map(|columns| (1..=most).map(move |rows| (columns, rows)));
    let mut grids: Vec<_> = sides
        .filter(|(columns, rows)| columns * rows <= most)
        .collect();
    grids.sort_by_key(|(columns, rows)| columns * rows); // stable
    let mut best = (f64::INFINITY, (1, 1));
    for (columns, rows) in grids {
        let off = (wide / high - f64::from(columns) / f64::from(rows)).abs();
        let covered = f64::from(TILE * TILE * columns * rows);
        if off < best.0 || (off == best.0 && wide * high > 0.5 * covered) {
            best = (off, (columns, rows));
        }
    }
    best.1
}

/// The size of images sent to a server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// The family of the formula.
    pub family: Option<Family>,
    /// Most tokens per image. Needs a family.
    pub image_tokens: Option<u32>,
    /// Most pixels per image.
    pub max_pixels: Option<u64>,
}

impl Budget {
    /// The size `(width, height)` in which an image of this size is sent.
    pub fn target(&self, width: u32, height: u32) -> (u32, u32) {
        match *self {
            Self {
                family: Some(family),
                image_tokens: Some(tokens),
                ..
            } => family.within(tokens, width, height),
            Self {
                family: Some(family @ (Family::Qwen2Vl | Family::Qwen3Vl)),
                max_pixels: Some(pixels),
                ..
            } => family.smart_within(pixels, width, height),
            Self {
                max_pixels: Some(pixels),
                ..
            } if u64::from(width) * u64::from(height) > pixels => {
                let beta = (f64::from(width) * f64::from(height) / pixels as f64).sqrt();
                let cut = |side: u32| ((f64::from(side) / beta).floor() as u32).max(1);
                let (width, height) = (cut(width), cut(height));
                // Sides are at least 1.
                let most =
                    |other: u32| u32::try_from(pixels / u64::from(other)).unwrap_or(u32::MAX);
                let width = width.min(most(height)).max(1);
                (width, height.min(most(width)).max(1))
            }
            _ => (width, height),
        }
    }

    /// Tokens of an image of this size as sent, if the family is known.
    pub fn tokens(&self, width: u32, height: u32) -> Option<u32> {
        let (width, height) = self.target(width, height);
        self.family.map(|family| family.tokens(width, height))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn within(family: Family, tokens: u32, size: (u32, u32)) -> (u32, u32) {
        let budget = Budget {
            family: Some(family),
            image_tokens: Some(tokens),
            max_pixels: None,
        };
        budget.target(size.0, size.1)
    }

    /// The numbers are those of `smart_resize` in Transformers 5.23.
    #[test]
    fn qwen_images_have_the_sizes_of_smart_resize() {
        for (size, family, expected) in [
            ((640, 480), Family::Qwen2Vl, (644, 476)),
            ((1920, 1080), Family::Qwen2Vl, (1932, 1092)),
            ((30, 20), Family::Qwen2Vl, (84, 56)),
            ((8000, 6000), Family::Qwen2Vl, (4116, 3080)),
            ((480, 320), Family::Qwen3Vl, (480, 320)),
            ((100, 100), Family::Qwen3Vl, (256, 256)),
        ] {
            let smart = family.smart();
            assert_eq!(smart.size(size.0, size.1), expected, "{size:?} {family}");
        }
        assert_eq!(Family::Qwen2Vl.tokens(640, 480), 23 * 17);
    }

    #[test]
    fn a_budget_is_kept_and_what_fits_is_left_alone() {
        for family in [Family::Qwen2Vl, Family::Qwen3Vl, Family::InternVl] {
            for size in [
                (4032, 3024),
                (3024, 4032),
                (1920, 1080),
                (5000, 400),
                (640, 480),
            ] {
                for tokens in [256, 512, 768, 1280, 3328] {
                    let sent = within(family, tokens, size);
                    let made = family.tokens(sent.0, sent.1);
                    assert!(
                        made <= tokens,
                        "{family} {size:?} {tokens}: {sent:?} {made}"
                    );
                    assert_eq!(within(family, tokens, sent), sent, "{family}: it is stable");
                }
                let whole = family.tokens(size.0, size.1);
                assert_eq!(within(family, whole, size), size);
            }
        }
        assert_eq!(within(Family::Llava15, 576, (4032, 3024)), (448, 336));
        assert_eq!(within(Family::Gemma3, 256, (4032, 600)), (896, 600));
    }

    /// 13 × 256: twelve tiles and a thumbnail, the published cost of a photo of 4:3.
    #[test]
    fn internvl_tiles_a_photo_as_its_processor_does() {
        assert_eq!(grid(4032, 3024, 12), (4, 3));
        assert_eq!(Family::InternVl.tokens(4032, 3024), 3328);
        assert_eq!(grid(480, 320, 12), (3, 2));
        assert_eq!(grid(100, 100, 12), (1, 1));
        assert_eq!(within(Family::InternVl, 512, (4032, 3024)), (448, 448));
        assert_eq!(within(Family::InternVl, 768, (4032, 1900)), (896, 448));
    }

    #[test]
    fn pixels_are_a_limit_for_every_model() {
        let budget = Budget {
            max_pixels: Some(100_000),
            ..Budget::default()
        };
        let (width, height) = budget.target(4032, 3024);
        assert!(width * height <= 100_000 && width * height > 99_000);
        assert_eq!(budget.target(300, 200), (300, 200));
        assert_eq!(budget.target(1_000_000, 1), (100_000, 1));
        assert_eq!(budget.tokens(300, 200), None);
    }
}
