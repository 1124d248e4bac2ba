use std::error::Error as _;
use std::io::{self, Cursor};

use image::codecs::webp::WebPDecoder;
use image::codecs::{bmp::BmpDecoder, gif::GifDecoder, png::PngDecoder, tiff::TiffDecoder};
use image::error::ImageError;
use image::metadata::Orientation;
use image::{
    ColorType, DynamicImage, ExtendedColorType, ImageDecoder, ImageFormat, Limits as ImageLimits,
    RgbImage,
};
use trommel_types::{ErrorKind, ImageSize};

use crate::geometry::Window;
use crate::jpeg::Wanted;
use crate::kernel::turbo::Turbo;
use crate::resize::Source;
use crate::tiff_kinds::{self, Kind};
use crate::tiff_tags::Tags;
use crate::{Limits, PrepareError, bmp, gif, ink, jpeg, markers};

/// Decodes images of any supported format, and reuses the memory of their pixels.
pub(crate) struct Decoder {
    turbo: Option<Turbo>,
    image: RgbImage,
    /// Size of the whole image, upright, and the part of it in `image`.
    size: (u32, u32),
    window: Window,
    /// The output of decoders that do not produce 8-bit RGB.
    samples: Vec<u8>,
}

/// An image format.
#[derive(Debug, Clone, Copy)]
enum Format {
    Image(ImageFormat),
    /// JPEG XL: the bare codestream or its container.
    Jxl,
    /// HEIC or AVIF.
    Heif,
}

/// The last chunk of every PNG: its length, name and checksum.
const PNG_END: &[u8] = b"\0\0\0\0IEND\xaeB`\x82";

/// Memory limit of a decoder for headers and metadata.
const HEADER_BYTES: u64 = 16 << 20;

impl Decoder {
    pub(crate) fn new() -> Self {
        Self {
            turbo: None,
            image: RgbImage::new(0, 0),
            size: (0, 0),
            window: Window::whole((0, 0)),
            samples: Vec::new(),
        }
    }

    /// Decodes to RGB and turns the image upright. The format is detected by content. Returns the
    /// size of the stored image, upright.
    ///
    /// `wanted` returns the required region of an image with this upright `(width, height)`. The
    /// rest of a JPEG is not decoded.
    pub(crate) fn decode(
        &mut self,
        bytes: &[u8],
        limits: &Limits,
        wanted: impl FnOnce(u32, u32) -> Wanted,
    ) -> Result<ImageSize, PrepareError> {
        limits.check_bytes(bytes)?;
        let format = guess_format(bytes)?;
        let (original, orientation) = match format {
            Format::Image(ImageFormat::Jpeg) => self.decode_jpeg(bytes, limits, wanted)?,
            other => {
                let orientation = match other {
                    Format::Image(format) => self.decode_other(format, bytes, limits)?,
                    Format::Jxl => self.decode_jxl(bytes, limits)?,
                    Format::Heif => self.decode_heif(bytes, limits)?,
                };
                self.is_whole();
                (self.image.dimensions(), orientation)
            }
        };
        if orientation != Orientation::NoTransforms {
            let mut image = DynamicImage::ImageRgb8(std::mem::take(&mut self.image));
            image.apply_orientation(orientation);
            self.image = image.into_rgb8();
            self.is_whole();
        }
        let (width, height) = upright(original, orientation);
        Ok(ImageSize { width, height })
    }

    /// Bytes of memory in the buffers.
    pub(crate) fn held(&self) -> usize {
        self.image.as_raw().capacity() + self.samples.capacity()
    }

    /// The image that was decoded last.
    pub(crate) fn source(&self) -> Source<'_> {
        Source {
            pixels: &self.image,
            size: self.size,
            window: &self.window,
        }
    }

    /// `image` is the whole image.
    fn is_whole(&mut self) {
        self.size = self.image.dimensions();
        self.window = Window::whole(self.size);
    }

    fn decode_jpeg(
        &mut self,
        bytes: &[u8],
        limits: &Limits,
        wanted: impl FnOnce(u32, u32) -> Wanted,
    ) -> Result<((u32, u32), Orientation), PrepareError> {
        let turbo = match &mut self.turbo {
            Some(turbo) => turbo,
            none => none.insert(jpeg::decompressor()?),
        };
        let orientation = markers::orientation(bytes);
        let mut pixels = std::mem::take(&mut self.image).into_raw();
        let check = |width, height| {
            limits.check_size(width, height)?;
            let turned = upright((width, height), orientation);
            let mut wanted = wanted(turned.0, turned.1);
            if orientation != Orientation::NoTransforms {
                // Rotating requires the whole image.
                let scaled = |side: u32| (side * wanted.eighths).div_ceil(8);
                wanted.window = Window::whole((scaled(width), scaled(height)));
            }
            Ok(wanted)
        };
        let decoded = jpeg::decode(turbo, bytes, &mut pixels, check);
        if decoded.is_err() {
            // After an error libjpeg-turbo's state is unusable: the next image would fail too.
            self.turbo = None;
        }
        let decoded = decoded?;
        let (columns, rows) = (decoded.window.columns.len(), decoded.window.rows.len());
        self.image = RgbImage::from_raw(columns as u32, rows as u32, pixels)
            .expect("the JPEG decoder has sized the buffer for these dimensions");
        (self.size, self.window) = (decoded.size, decoded.window);
        Ok((decoded.original, orientation))
    }

    fn decode_other(
        &mut self,
        format: ImageFormat,
        bytes: &[u8],
        limits: &Limits,
    ) -> Result<Orientation, PrepareError> {
        let reader = Cursor::new(bytes);
        let failed = |error| failed(format, &error);
        match format {
            ImageFormat::Png => {
                let mut read = |bytes: &[u8]| {
                    let mut header = ImageLimits::default();
                    header.max_alloc = Some(HEADER_BYTES);
                    let reader = Cursor::new(bytes);
                    let decoder = PngDecoder::with_limits(reader, header).map_err(failed)?;
                    self.run(decoder, format, limits)
                };
                let read_once = read(bytes);
                match read_once {
                    // All pixels may be present, with only the chunk after them missing.
                    Err(error) if error.kind() == ErrorKind::Truncated => {
                        read(&[bytes, PNG_END].concat()).map_err(|_| error)
                    }
                    read_once => read_once,
                }
            }
            ImageFormat::WebP => {
                let decoder = WebPDecoder::new(reader).map_err(failed)?;
                self.run(decoder, format, limits)
                    .map_err(|error| webp_failed(bytes, error))
            }
            ImageFormat::Gif => {
                let decoder = GifDecoder::new(reader).map_err(failed)?;
                let orientation = self.run(decoder, format, limits)?;
                gif::fill_around_first_frame(bytes, &mut self.image);
                Ok(orientation)
            }
            ImageFormat::Bmp => {
                let decoder = BmpDecoder::new(reader).map_err(failed)?;
                let orientation = self.run(decoder, format, limits)?;
                bmp::round_16_bit_down(bytes, &mut self.image);
                Ok(orientation)
            }
            ImageFormat::Tiff => {
                let tags = Tags::read(bytes);
                if let Some((tags, kind)) =
                    tags.as_ref().and_then(|tags| Some((tags, Kind::of(tags)?)))
                {
                    return self.decode_tiff(bytes, tags, kind, limits);
                }
                // Its own message is unhelpful.
                let failed = |error: ImageError| match (&error, &tags) {
                    (ImageError::Unsupported(_), Some(tags)) => tiff_kinds::unsupported(tags),
                    _ => failed(error),
                };
                let mut decoder = TiffDecoder::new(reader).map_err(failed)?;
                if decoder.original_color_type() == ExtendedColorType::Cmyk8 {
                    let (width, height) = decoder.dimensions();
                    limits.check_size(width, height)?;
                    let pixels = ink::decode_tiff(bytes, memory(width, height) as usize)?;
                    self.image = RgbImage::from_raw(width, height, pixels).ok_or_else(|| {
                        let message = "TIFF: inks in separate planes are not read; interleave them";
                        PrepareError::new(ErrorKind::Unsupported, message)
                    })?;
                    return Ok(orientation(&mut decoder));
                }
                let orientation = self.run(decoder, format, limits);
                orientation.map_err(|error| match (error.kind(), &tags) {
                    (ErrorKind::Unsupported, Some(tags)) => tiff_kinds::unsupported(tags),
                    _ => error,
                })
            }
            other => Err(PrepareError::new(
                ErrorKind::UnknownFormat,
                format!("{other:?} is not read; convert it to JPEG, PNG, WebP, GIF, BMP or TIFF"),
            )),
        }
    }

    /// A kind of TIFF that `image` reads differently from Pillow.
    fn decode_tiff(
        &mut self,
        bytes: &[u8],
        tags: &Tags,
        kind: Kind,
        limits: &Limits,
    ) -> Result<Orientation, PrepareError> {
        let damaged = |error: tiff::TiffError| {
            PrepareError::new(ErrorKind::Corrupt, format!("TIFF: {error}"))
        };
        let mut decoder = tiff::decoder::Decoder::new(Cursor::new(bytes)).map_err(damaged)?;
        let (width, height) = decoder.dimensions().map_err(damaged)?;
        limits.check_size(width, height)?;
        let memory = memory(width, height) as usize;
        let pixels = tiff_kinds::decode(bytes, tags, kind, (width, height), memory)?;
        self.image = RgbImage::from_raw(width, height, pixels)
            .expect("three bytes were written for every pixel");
        let turned = decoder
            .find_tag(tiff::tags::Tag::Orientation)
            .ok()
            .flatten();
        let turned = turned.and_then(|value| value.into_u16().ok());
        let turned = turned.and_then(|value| Orientation::from_exif(value.min(255) as u8));
        Ok(turned.unwrap_or(Orientation::NoTransforms))
    }

    #[cfg(feature = "jxl")]
    fn decode_jxl(&mut self, bytes: &[u8], limits: &Limits) -> Result<Orientation, PrepareError> {
        let ((width, height), color) = crate::jxl::decode(bytes, limits, &mut self.samples)?;
        let mut pixels = std::mem::take(&mut self.image).into_raw();
        if color == ColorType::Rgb8 {
            std::mem::swap(&mut pixels, &mut self.samples);
        } else {
            to_rgb(color, &self.samples, &mut pixels)?;
        }
        self.image = RgbImage::from_raw(width, height, pixels)
            .expect("three bytes were written for every pixel");
        // The decoder has rotated it; remaining EXIF data belongs to the previous image.
        Ok(Orientation::NoTransforms)
    }

    #[cfg(not(feature = "jxl"))]
    fn decode_jxl(&mut self, _: &[u8], _: &Limits) -> Result<Orientation, PrepareError> {
        Err(not_built("JPEG XL", "jxl"))
    }

    #[cfg(feature = "heif")]
    fn decode_heif(&mut self, bytes: &[u8], limits: &Limits) -> Result<Orientation, PrepareError> {
        let pixels = std::mem::take(&mut self.image).into_raw();
        self.image = crate::heif::decode(bytes, limits, pixels)?;
        // libheif has rotated it.
        Ok(Orientation::NoTransforms)
    }

    #[cfg(not(feature = "heif"))]
    fn decode_heif(&mut self, _: &[u8], _: &Limits) -> Result<Orientation, PrepareError> {
        Err(not_built("HEIC or AVIF", "heif"))
    }

    fn run(
        &mut self,
        mut decoder: impl ImageDecoder,
        format: ImageFormat,
        limits: &Limits,
    ) -> Result<Orientation, PrepareError> {
        let (width, height) = decoder.dimensions();
        limits.check_size(width, height)?;
        let mut allocation = ImageLimits::default();
        allocation.max_alloc = Some(memory(width, height));
        decoder
            .set_limits(allocation)
            .map_err(|error| failed(format, &error))?;
        let orientation = orientation(&mut decoder);

        let color = decoder.color_type();
        let mut pixels = std::mem::take(&mut self.image).into_raw();
        let samples = if color == ColorType::Rgb8 {
            &mut pixels
        } else {
            &mut self.samples
        };
        // Zeroed, so that no pixels of the previous image show where a decoder omits some.
        samples.clear();
        samples.resize(decoder.total_bytes() as usize, 0);
        decoder
            .read_image(samples)
            .map_err(|error| failed(format, &error))?;
        if color != ColorType::Rgb8 {
            to_rgb(color, &self.samples, &mut pixels)?;
        }
        self.image = RgbImage::from_raw(width, height, pixels)
            .expect("three bytes were written for every pixel");
        Ok(orientation)
    }
}

/// Memory limit for decoding: 8 bytes per pixel (16-bit RGBA), twice for the decoder's own buffers.
fn memory(width: u32, height: u32) -> u64 {
    16 * u64::from(width) * u64::from(height) + HEADER_BYTES
}

fn orientation(decoder: &mut impl ImageDecoder) -> Orientation {
    match decoder.orientation() {
        Ok(Orientation::NoTransforms) | Err(_) => {}
        Ok(orientation) => return orientation,
    }
    let packet = decoder.xmp_metadata().ok().flatten();
    packet
        .as_deref()
        .and_then(markers::xmp_orientation)
        .unwrap_or(Orientation::NoTransforms)
}

/// To 8-bit RGB like Pillow's `convert("RGB")`; see the crate's documentation.
fn to_rgb(color: ColorType, samples: &[u8], pixels: &mut Vec<u8>) -> Result<(), PrepareError> {
    let word = |high: u8, low: u8| u16::from_ne_bytes([high, low]);
    let high = |a: u8, b: u8| (word(a, b) >> 8) as u8;
    match color {
        ColorType::L8 => convert(samples, pixels, |&[gray]| [gray; 3]),
        ColorType::La8 => convert(samples, pixels, |&[gray, _]| [gray; 3]),
        ColorType::Rgba8 => convert(samples, pixels, |&[red, green, blue, _]| [red, green, blue]),
        ColorType::L16 => convert(samples, pixels, |&[a, b]| [word(a, b).min(255) as u8; 3]),
        ColorType::La16 => convert(samples, pixels, |&[a, b, _, _]| [high(a, b); 3]),
        ColorType::Rgb16 => {
            convert(samples, pixels, |&[a, b, c, d, e, f]| {
                [high(a, b), high(c, d), high(e, f)]
            });
        }
        ColorType::Rgba16 => convert(samples, pixels, |&[a, b, c, d, e, f, _, _]| {
            [high(a, b), high(c, d), high(e, f)]
        }),
        other => {
            return Err(PrepareError::new(
                ErrorKind::Unsupported,
                format!("its pixels are {other:?}; convert it to 8 bits a channel"),
            ));
        }
    }
    Ok(())
}

fn convert<const N: usize>(
    samples: &[u8],
    pixels: &mut Vec<u8>,
    to_rgb: impl Fn(&[u8; N]) -> [u8; 3],
) {
    let (samples, _) = samples.as_chunks::<N>();
    pixels.resize(3 * samples.len(), 0);
    for (pixel, sample) in pixels.as_chunks_mut::<3>().0.iter_mut().zip(samples) {
        *pixel = to_rgb(sample);
    }
}

/// `(width, height)` after rotation.
fn upright((width, height): (u32, u32), orientation: Orientation) -> (u32, u32) {
    match orientation {
        Orientation::Rotate90
        | Orientation::Rotate270
        | Orientation::Rotate90FlipH
        | Orientation::Rotate270FlipH => (height, width),
        _ => (width, height),
    }
}

fn guess_format(bytes: &[u8]) -> Result<Format, PrepareError> {
    // BigTIFF, which `image` supports but does not detect.
    if bytes.starts_with(b"II\x2B\0") || bytes.starts_with(b"MM\0\x2B") {
        return Ok(Format::Image(ImageFormat::Tiff));
    }
    if bytes.starts_with(b"\xff\x0a") || bytes.starts_with(b"\0\0\0\x0cJXL \r\n\x87\n") {
        return Ok(Format::Jxl);
    }
    if let Some(b"ftyp") = bytes.get(4..8)
        && let Some(b"avif" | b"avis" | b"heic" | b"heix" | b"hevc" | b"mif1" | b"msf1") =
            bytes.get(8..12)
    {
        return Ok(Format::Heif);
    }
    let format = image::guess_format(bytes).map_err(|_| unknown())?;
    Ok(Format::Image(format))
}

/// A format that this build has no decoder for.
#[cfg(not(all(feature = "jxl", feature = "heif")))]
fn not_built(name: &str, feature: &str) -> PrepareError {
    PrepareError::new(
        ErrorKind::UnknownFormat,
        format!(
            "{name} is not read by this build; build it with `--features {feature}`, or convert the image"
        ),
    )
}

/// Reveals nothing about the bytes: they may come from any file that the worker can read.
fn unknown() -> PrepareError {
    let mut formats = vec!["JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF"];
    if cfg!(feature = "jxl") {
        formats.push("JPEG XL");
    }
    if cfg!(feature = "heif") {
        formats.push("HEIC and AVIF");
    }
    PrepareError::new(
        ErrorKind::UnknownFormat,
        format!(
            "unknown format; supported formats are {}",
            formats.join(", ")
        ),
    )
}

fn failed(format: ImageFormat, error: &ImageError) -> PrepareError {
    let kind = match error {
        ImageError::Limits(_) => ErrorKind::TooManyPixels,
        ImageError::Unsupported(_) => ErrorKind::Unsupported,
        error if ends_early(error) => ErrorKind::Truncated,
        _ => ErrorKind::Corrupt,
    };
    PrepareError::new(kind, format!("{}: {error}", name(format)))
}

/// The name of a format as its users write it.
fn name(format: ImageFormat) -> String {
    match format {
        ImageFormat::WebP => "WebP".to_owned(),
        format => format!("{format:?}").to_uppercase(),
    }
}

/// For a truncated file the decoder only reports invalid data; the stated file size reveals it.
fn webp_failed(bytes: &[u8], error: PrepareError) -> PrepareError {
    // The RIFF header: its name, then the number of following bytes.
    let stated = bytes.get(4..8).and_then(|size| size.first_chunk());
    let stated = stated.map_or(0, |size| 8 + u64::from(u32::from_le_bytes(*size)));
    if error.kind() == ErrorKind::Corrupt && stated > bytes.len() as u64 {
        let message = format!("WebP of {} bytes ends before its image does", bytes.len());
        return PrepareError::new(ErrorKind::Truncated, message);
    }
    error
}

fn ends_early(error: &ImageError) -> bool {
    let mut cause = match error {
        ImageError::IoError(error) => return error.kind() == io::ErrorKind::UnexpectedEof,
        other => other.source(),
    };
    while let Some(error) = cause {
        let eof = error
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof);
        if eof {
            return true;
        }
        cause = error.source();
    }
    // The decoders of GIF and TIFF hide the cause in their text.
    let text = error.to_string().to_lowercase();
    text.contains("unexpected end")
        || text.contains("unexpected eof")
        || text.contains("failed to fill")
}
