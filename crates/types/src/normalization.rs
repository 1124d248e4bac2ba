use serde::{Deserialize, Serialize};

/// The arithmetic between a pixel and a model's floating-point input, per channel:
/// `(pixel × scale − mean) ÷ std`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Normalization {
    /// Factor that takes `0..=255` to the range of `mean`; 1/255 as a rule.
    pub scale: f32,
    /// Subtracted after scaling, in the order of the tensor's channels.
    pub mean: [f32; 3],
    /// Divides last, in the order of the tensor's channels.
    pub std: [f32; 3],
}

impl Default for Normalization {
    fn default() -> Self {
        Self {
            scale: 1.0 / 255.0,
            mean: [0.0; 3],
            std: [1.0; 3],
        }
    }
}
