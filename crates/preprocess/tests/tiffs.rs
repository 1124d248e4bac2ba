//! Kinds of TIFF that few programs write, with Pillow's pixels; and PNG that ends a chunk too early.

#![allow(
    clippy::unwrap_used,
    reason = "a fixture that is missing fails the test"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use trommel_preprocess::{Crop, Limits, Plan, PrepareError, Prepared, Preparer, Resize, Rounding};
use trommel_types::ErrorKind;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Decodes and does nothing else.
fn decode(bytes: &[u8]) -> Result<Prepared, PrepareError> {
    let plan = Arc::new(Plan::plain(Resize::None));
    Preparer::new(plan, Limits::default()).prepare(bytes)
}

/// The files of a suffix.
fn files(suffix: &str) -> Vec<PathBuf> {
    let paths = fixtures().join("tiff").read_dir().unwrap();
    let paths = paths.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|found| found == suffix))
        .collect()
}

#[test]
fn every_kind_of_tiff_has_pillows_pixels() {
    let files = files("tif");
    assert!(files.len() > 25, "run tests/fixtures/make_tiff.py");
    for path in files {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let reference = path.with_file_name(format!("{name}_tif.png"));
        let reference = image::open(reference).unwrap().into_rgb8();
        let bytes = std::fs::read(&path).unwrap();
        let found = decode(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        let size = (found.shape.width, found.shape.height);
        assert_eq!(size, reference.dimensions(), "{name}");
        assert!(found.pixels == *reference.as_raw(), "{name}");
        // Cut off or damaged anywhere, it ends with an image or an error.
        let half = decode(&bytes[..bytes.len() - 20]);
        assert!(half.is_err(), "{name}");
        for place in 0..bytes.len().min(300) {
            let mut bytes = bytes.clone();
            bytes[place] ^= 0x55;
            drop(decode(&bytes));
        }
    }
}

#[test]
fn a_tiff_that_is_not_read_says_what_it_is() {
    for (name, words) in [
        ("lzma", "LZMA compression"),
        ("zstd", "Zstandard compression"),
        ("g3", "CCITT G3"),
        ("lab", "Lab of 8+8+8 bits"),
    ] {
        let path = fixtures().join(format!("tiff/{name}.tiff"));
        let error = decode(&std::fs::read(path).unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        let message = error.to_string();
        assert!(
            message.contains(words) && message.contains("convert it"),
            "{message}"
        );
    }
}

/// As Pillow, which reads no chunk behind the pixels.
#[test]
fn a_png_without_its_end_is_whole_if_all_pixels_are_there() {
    let bytes = std::fs::read(fixtures().join("images/rgb.png")).unwrap();
    let whole = decode(&bytes).unwrap();
    for cut in [12, 8, 5] {
        let found = decode(&bytes[..bytes.len() - cut]);
        assert_eq!(found.unwrap().pixels, whole.pixels, "without {cut} bytes");
    }
    for cut in [20, 100, bytes.len() / 2] {
        let error = decode(&bytes[..bytes.len() - cut]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Truncated, "without {cut} bytes");
    }
}

/// Scaled by its shorter side a long image is huge, but only what the crop keeps is made of it.
#[test]
fn a_long_image_costs_no_more_than_its_crop() {
    let png = |width: u32, height: u32| {
        let image = image::RgbImage::from_fn(width, height, |x, _| {
            image::Rgb([(x * 255 / width) as u8, 100, 200])
        });
        let mut bytes = std::io::Cursor::new(Vec::new());
        image.write_to(&mut bytes, image::ImageFormat::Png).unwrap();
        bytes.into_inner()
    };
    let shortest = Resize::ShortestEdge(256);
    let plan = Plan {
        crop: Some(Crop {
            height: 224,
            width: 224,
            rounding: Rounding::Transformers,
            fill: [0; 3],
        }),
        ..Plan::plain(shortest)
    };
    for (width, height) in [(10_000, 20), (1, 20_000)] {
        let mut preparer = Preparer::new(Arc::new(plan.clone()), Limits::default());
        let found = preparer.prepare(&png(width, height)).unwrap();
        assert_eq!((found.shape.width, found.shape.height), (224, 224));
        assert!(
            found
                .pixels
                .as_chunks::<3>()
                .0
                .iter()
                .all(|pixel| pixel[1] == 100)
        );
    }
    let whole = Arc::new(Plan::plain(Resize::ShortestEdge(256)));
    let error = Preparer::new(whole, Limits::default()).prepare(&png(10_000, 20));
    let message = error.unwrap_err().to_string();
    assert!(message.contains("scaled to 128000×256"), "{message}");
}
