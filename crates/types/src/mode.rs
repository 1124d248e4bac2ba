use serde::{Deserialize, Serialize};

/// How much a tensor may differ from the reference's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Not at all, as far as the reference can be followed.
    #[default]
    Exact,
    /// A JPEG is decoded to a half, a quarter or an eighth of its size where at least twice the
    /// size that it is scaled to remains, as with Pillow's `draft`.
    Fast,
}
