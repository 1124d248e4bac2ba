use std::sync::Arc;

use trommel_types::{ErrorKind, ImageSize, Mode, Shape};

use crate::decode::Decoder;
use crate::geometry::Window;
use crate::jpeg::Wanted;
use crate::phash::phash;
use crate::resize::Scaler;
use crate::{Plan, PrepareError};

/// Limits for one image, checked against its header before memory is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Encoded bytes.
    pub max_bytes: u64,
    /// Pixels.
    pub max_pixels: u64,
    /// Longer side in pixels.
    pub max_side: u32,
}

/// The limits of Pillow (pixels) and JPEG (side), and 256 MiB.
impl Default for Limits {
    fn default() -> Self {
        Self {
            max_bytes: 256 << 20,
            max_pixels: 178_956_970,
            max_side: 65_535,
        }
    }
}

impl Limits {
    pub(crate) fn check_bytes(&self, bytes: &[u8]) -> Result<(), PrepareError> {
        if bytes.is_empty() {
            return Err(PrepareError::new(ErrorKind::Empty, "is empty"));
        }
        let length = bytes.len() as u64;
        if length > self.max_bytes {
            return Err(PrepareError::new(
                ErrorKind::TooLarge,
                format!(
                    "{length} bytes, more than preprocess.max-bytes = {} allows",
                    self.max_bytes
                ),
            ));
        }
        Ok(())
    }

    pub(crate) fn check_size(&self, width: u32, height: u32) -> Result<(), PrepareError> {
        let pixels = u64::from(width) * u64::from(height);
        if pixels == 0 {
            return Err(PrepareError::new(
                ErrorKind::Corrupt,
                "has a side of 0 pixels",
            ));
        }
        if pixels > self.max_pixels || width.max(height) > self.max_side {
            return Err(PrepareError::new(
                ErrorKind::TooManyPixels,
                format!(
                    "{width}×{height} pixels, more than preprocess.max-pixels = {} or max-side = {} allows",
                    self.max_pixels, self.max_side
                ),
            ));
        }
        Ok(())
    }

    /// Checks the size of a scaled image.
    fn check_scaled(&self, made: (u32, u32), target: (u32, u32)) -> Result<(), PrepareError> {
        let side = made.0.max(made.1);
        if u64::from(made.0) * u64::from(made.1) > self.max_pixels || side > self.max_side {
            let (width, height) = target;
            return Err(PrepareError::new(
                ErrorKind::TooManyPixels,
                format!(
                    "by its shorter side it would be scaled to {width}×{height} pixels, more than preprocess.max-pixels = {} or max-side = {} allows; cut it into pieces",
                    self.max_pixels, self.max_side
                ),
            ));
        }
        Ok(())
    }
}

/// One image as a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// `HWC u8`, not yet normalised; a file if the plan encodes it.
    pub pixels: Vec<u8>,
    /// Shape of `pixels`.
    pub shape: Shape,
    /// Size of the stored image, upright.
    pub original: ImageSize,
    /// The perceptual hash of the pixels, if requested.
    pub phash: Option<u64>,
}

/// Prepares images in sequence and reuses its buffers. One per thread.
pub struct Preparer {
    plan: Arc<Plan>,
    limits: Limits,
    mode: Mode,
    phash: bool,
    decoder: Decoder,
    scaler: Scaler,
    original: Option<ImageSize>,
}

/// Larger buffers are released after use, so that one huge image does not stay in memory.
const KEPT_BYTES: usize = 64 << 20;

impl Preparer {
    /// Prepares by `plan`, within `limits`, exactly.
    pub fn new(plan: Arc<Plan>, limits: Limits) -> Self {
        Self {
            plan,
            limits,
            mode: Mode::Exact,
            phash: false,
            decoder: Decoder::new(),
            scaler: Scaler::new(),
            original: None,
        }
    }

    /// The same in another mode.
    #[must_use]
    pub fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Switches the mode.
    pub fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    /// Switches perceptual hashes on or off.
    pub fn set_phash(&mut self, phash: bool) {
        self.phash = phash;
    }

    /// Changes the limits.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Decodes and resizes.
    ///
    /// # Errors
    /// See [`Preparer::decode`].
    pub fn prepare(&mut self, bytes: &[u8]) -> Result<Prepared, PrepareError> {
        self.decode(bytes)?;
        self.resize()
    }

    /// The first half of [`Preparer::prepare`]: decodes, to be resized next.
    ///
    /// # Errors
    /// If the bytes are not a supported image, are damaged, or exceed the limits.
    pub fn decode(&mut self, bytes: &[u8]) -> Result<(), PrepareError> {
        let plan = Arc::clone(&self.plan);
        self.decode_for(bytes, [&*plan])
    }

    /// The same for several plans, for [`Preparer::resize_by`] with each.
    ///
    /// # Errors
    /// As [`Preparer::decode`].
    pub fn decode_for<'a>(
        &mut self,
        bytes: &[u8],
        plans: impl IntoIterator<Item = &'a Plan>,
    ) -> Result<(), PrepareError> {
        self.original = None;
        if self.decoder.held() + self.scaler.held() > KEPT_BYTES {
            self.decoder = Decoder::new();
            self.scaler = Scaler::new();
        }
        let (mode, scaler) = (self.mode, &self.scaler);
        let plans: Vec<_> = plans.into_iter().collect();
        let wanted = |width: u32, height: u32| {
            let eighths = match mode {
                Mode::Exact => None,
                Mode::Fast => plans.iter().map(|plan| eighths(plan, width, height)).max(),
            };
            let eighths = eighths.unwrap_or(8);
            let scaled = |side: u32| (side * eighths).div_ceil(8);
            let size = (scaled(width), scaled(height));
            let needs = |plan: &&Plan| scaler.needs(size, target(plan, width, height), plan);
            let window = plans.iter().map(needs).reduce(Window::and);
            Wanted {
                eighths,
                window: window.unwrap_or_else(|| Window::whole(size)),
            }
        };
        self.original = Some(self.decoder.decode(bytes, &self.limits, wanted)?);
        Ok(())
    }

    /// The second half: resizes and crops what was decoded last.
    ///
    /// # Errors
    /// When the last [`Preparer::decode`] failed, or there was none.
    pub fn resize(&mut self) -> Result<Prepared, PrepareError> {
        let plan = Arc::clone(&self.plan);
        self.resize_by(&plan)
    }

    /// Resizes and crops what was decoded last by another plan, for another model.
    ///
    /// # Errors
    /// As [`Preparer::resize`].
    ///
    /// # Panics
    /// When the image was not decoded for this plan: what it looks at may be left out.
    pub fn resize_by(&mut self, plan: &Plan) -> Result<Prepared, PrepareError> {
        let original = self
            .original
            .ok_or_else(|| PrepareError::new(ErrorKind::Corrupt, "nothing was decoded"))?;
        let target = target(plan, original.width, original.height);
        // A very long image would be scaled up without limit by its shorter side; the part outside
        // the crop is not computed.
        let made = self.scaler.makes(target, plan);
        self.limits.check_scaled(made, target)?;
        let source = self.decoder.source();
        let needs = self.scaler.needs(source.size, target, plan);
        assert!(
            source.window.holds(&needs),
            "the image was decoded for other plans"
        );
        let (pixels, shape) = self.scaler.run(&source, target, plan);
        let phash = self.phash.then(|| phash(&pixels, shape));
        let pixels = plan.encoding.encode(pixels, shape)?;
        Ok(Prepared {
            pixels,
            shape,
            original,
            phash,
        })
    }
}

/// The size `(width, height)` after resizing.
fn target(plan: &Plan, width: u32, height: u32) -> (u32, u32) {
    let (width, height) = plan.resize.target(width, height);
    (width.max(1), height.max(1))
}

/// The smallest scale in eighths at which the image has twice the target size; 1, 2, 4 or 8, for
/// which libjpeg-turbo has fast code.
fn eighths(plan: &Plan, width: u32, height: u32) -> u32 {
    let target = target(plan, width, height);
    let suffices = |eighths: &u32| {
        let is_left = |from: u32, to: u32| from.div_ceil(8 / eighths) >= 2 * to;
        is_left(width, target.0) && is_left(height, target.1)
    };
    [1, 2, 4].into_iter().find(suffices).unwrap_or(8)
}
