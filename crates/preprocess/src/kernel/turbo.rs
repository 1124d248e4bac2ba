//! The used part of TurboJPEG, including a call that the `turbojpeg` crate lacks: decoding a region
//! of an image.
//!
//! Errors are TurboJPEG's texts. Its error code is useless: an error after a warning has the code
//! of the warning.

use std::ffi::CStr;
use std::ptr::NonNull;

use turbojpeg::{PixelFormat, ScalingFactor, raw};

/// A decompressor of libjpeg-turbo, with the flags of Pillow.
pub(crate) struct Turbo {
    handle: NonNull<std::ffi::c_void>,
}

/// The contents of a file's header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Header {
    pub(crate) width: usize,
    pub(crate) height: usize,
    /// Its channels are inks (CMYK or YCCK).
    pub(crate) has_ink: bool,
    /// Width and height of the file's blocks (iMCU); `None` if a region cannot be decoded.
    pub(crate) block: Option<(usize, usize)>,
}

/// The region to decode, in pixels of the scaled image. Its first column is a multiple of the width
/// of a scaled block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

// SAFETY: a handle is used by one thread at a time, which `&mut self` sees to, and libjpeg-turbo
// binds it to none.
#[allow(unsafe_code)]
unsafe impl Send for Turbo {}

#[allow(unsafe_code)]
impl Turbo {
    pub(crate) fn new() -> Result<Self, String> {
        // SAFETY: the call has no precondition.
        let handle = unsafe { raw::tj3Init(raw::TJINIT_TJINIT_DECOMPRESS as i32) };
        NonNull::new(handle)
            .map(|handle| Self { handle })
            .ok_or_else(|| last_error(std::ptr::null_mut()))
    }

    pub(crate) fn read_header(&mut self, bytes: &[u8]) -> Result<Header, String> {
        // SAFETY: the handle is open, and the bytes are read during the call alone.
        let result = unsafe {
            raw::tj3DecompressHeader(
                self.handle.as_ptr(),
                bytes.as_ptr(),
                bytes.len() as raw::size_t,
            )
        };
        self.checked(result)?;
        let size = |parameter| usize::try_from(self.get(parameter)).unwrap_or(0);
        let block = match self.get(raw::TJPARAM_TJPARAM_LOSSLESS) {
            0 => block(self.get(raw::TJPARAM_TJPARAM_SUBSAMP)),
            _ => None,
        };
        let inks = [raw::TJCS_TJCS_CMYK, raw::TJCS_TJCS_YCCK];
        Ok(Header {
            width: size(raw::TJPARAM_TJPARAM_JPEGWIDTH),
            height: size(raw::TJPARAM_TJPARAM_JPEGHEIGHT),
            has_ink: inks.contains(&(self.get(raw::TJPARAM_TJPARAM_COLORSPACE) as raw::TJCS)),
            block,
        })
    }

    /// Decodes a region into `pixels`, row after row. Progressive files with more than `scans`
    /// scans are refused.
    ///
    /// # Panics
    /// If the length of `pixels` is not that of the region.
    pub(crate) fn decode(
        &mut self,
        bytes: &[u8],
        (scaling, region): (ScalingFactor, Region),
        scans: u32,
        format: PixelFormat,
        pixels: &mut [u8],
    ) -> Result<(), String> {
        let header = self.read_header(bytes)?;
        let size = (scaling.scale(header.width), scaling.scale(header.height));
        let whole = Region {
            x: 0,
            y: 0,
            width: size.0,
            height: size.1,
        };
        // The whole image, whatever its kind.
        let uncropped = raw::tjregion {
            x: 0,
            y: 0,
            w: 0,
            h: 0,
        };
        let cropping = match region == whole {
            true => uncropped,
            false => raw::tjregion {
                x: region.x as i32,
                y: region.y as i32,
                w: region.width as i32,
                h: region.height as i32,
            },
        };
        let pitch = region.width * format.size();
        assert!(
            region.width > 0 && region.height > 0,
            "a region of no pixels"
        );
        assert_eq!(pixels.len(), pitch * region.height, "bytes of the region");
        let factor = raw::tjscalingfactor {
            num: scaling.num() as i32,
            denom: scaling.denom() as i32,
        };
        let handle = self.handle.as_ptr();
        let limit = raw::TJPARAM_TJPARAM_SCANLIMIT as i32;
        // SAFETY: the handle is open. TurboJPEG writes `pitch` bytes for every row of the region,
        // which is as many as `pixels` holds. It takes the sizes from the header of the same bytes,
        // and refuses a region that is not within the scaled image.
        unsafe {
            self.checked(raw::tj3SetCroppingRegion(handle, uncropped))?;
            self.checked(raw::tj3SetScalingFactor(handle, factor))?;
            self.checked(raw::tj3SetCroppingRegion(handle, cropping))?;
            self.checked(raw::tj3Set(handle, limit, scans as i32))?;
            self.checked(raw::tj3Decompress8(
                handle,
                bytes.as_ptr(),
                bytes.len() as raw::size_t,
                pixels.as_mut_ptr(),
                pitch as i32,
                format as i32,
            ))
        }
    }

    fn get(&self, parameter: raw::TJPARAM) -> i32 {
        // SAFETY: the handle is open.
        unsafe { raw::tj3Get(self.handle.as_ptr(), parameter as i32) }
    }

    fn checked(&self, result: i32) -> Result<(), String> {
        match result {
            0 => Ok(()),
            _ => Err(last_error(self.handle.as_ptr())),
        }
    }
}

impl Drop for Turbo {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the handle is open, and nobody else has it.
        unsafe { raw::tj3Destroy(self.handle.as_ptr()) }
    }
}

#[allow(unsafe_code)]
fn last_error(handle: raw::tjhandle) -> String {
    // SAFETY: TurboJPEG gives a string of its own, for a null handle too, which stays until the next
    // call.
    let text = unsafe { CStr::from_ptr(raw::tj3GetErrorStr(handle)) };
    text.to_string_lossy().into_owned()
}

/// `tjMCUWidth` and `tjMCUHeight` of a subsampling.
fn block(subsampling: i32) -> Option<(usize, usize)> {
    match subsampling {
        raw::TJSAMP_TJSAMP_444 | raw::TJSAMP_TJSAMP_GRAY => Some((8, 8)),
        raw::TJSAMP_TJSAMP_422 => Some((16, 8)),
        raw::TJSAMP_TJSAMP_420 => Some((16, 16)),
        raw::TJSAMP_TJSAMP_440 => Some((8, 16)),
        raw::TJSAMP_TJSAMP_411 => Some((32, 8)),
        raw::TJSAMP_TJSAMP_441 => Some((8, 32)),
        _ => None,
    }
}
