//! Kinds of images that are read behind features, compared with Pillow's pixels. `scripts/test-formats.sh`
//! runs it with all of them.

#![allow(
    clippy::unwrap_used,
    reason = "a fixture that is missing fails the test"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use trommel_preprocess::{Limits, Plan, Prepared, Preparer, Resize};
use trommel_types::ErrorKind;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/modern")
}

/// Decodes and does nothing else.
fn preparer(limits: Limits) -> Preparer {
    Preparer::new(Arc::new(Plan::plain(Resize::None)), limits)
}

/// The fixtures of a kind.
fn files(suffix: &str) -> Vec<PathBuf> {
    let paths = fixtures().read_dir().unwrap();
    let paths = paths.map(|entry| entry.unwrap().path());
    let files: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|found| found == suffix))
        .collect();
    assert!(!files.is_empty(), "run tests/fixtures/make_modern.py");
    files
}

/// Compares with Pillow's pixels: so many levels off at most, and so many on average.
fn check(suffix: &str, allowed: impl Fn(&str) -> (u8, f64)) {
    for path in files(suffix) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let reference = fixtures().join(name.replace('.', "_") + ".png");
        let reference = image::open(reference).unwrap().into_rgb8();
        let bytes = std::fs::read(&path).unwrap();
        let found = preparer(Limits::default()).prepare(&bytes);
        let Prepared { pixels, shape, .. } =
            found.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(
            (shape.width, shape.height),
            reference.dimensions(),
            "{name}"
        );
        let levels = pixels.iter().zip(reference.as_raw());
        let levels: Vec<_> = levels.map(|(a, b)| a.abs_diff(*b)).collect();
        let most = levels.iter().max().copied().unwrap();
        let mean = levels.iter().copied().map(f64::from).sum::<f64>() / levels.len() as f64;
        let allowed = allowed(name);
        assert!(most <= allowed.0, "{name}: up to {most} levels");
        assert!(mean <= allowed.1, "{name}: {mean} levels on average");
    }
}

/// Files that are cut or too large are distinguished.
fn check_bad(name: &str) {
    let bytes = std::fs::read(fixtures().join(name)).unwrap();
    let half = preparer(Limits::default()).prepare(&bytes[..bytes.len() / 2]);
    let kind = half.map(drop).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::Truncated, "{name}");
    let limits = Limits {
        max_pixels: 1000,
        ..Limits::default()
    };
    let large = preparer(limits).prepare(&bytes);
    let kind = large.map(drop).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::TooManyPixels, "{name}");
    // Whatever a byte becomes, it ends with an image or an error.
    for place in 0..bytes.len() {
        let mut bytes = bytes.clone();
        bytes[place] ^= 0x55;
        drop(preparer(Limits::default()).prepare(&bytes));
    }
}

#[test]
#[cfg(feature = "jxl")]
fn jpeg_xl_is_pillows() {
    check("jxl", |name| match name {
        "lossless.jxl" | "gray.jxl" | "alpha.jxl" => (0, 0.0),
        _ => (4, 1.0),
    });
    check_bad("lossy.jxl");
}

#[test]
#[cfg(feature = "heif")]
fn heic_and_avif_are_pillows() {
    check("heic", |_| (0, 0.0));
    // libheif brings chroma to full size in another way than Pillow's decoder: the edges of colours
    // differ where it is halved.
    check("avif", |name| match name {
        "lossless.avif" => (4, 1.0),
        _ => (80, 3.0),
    });
    check_bad("photo.heic");
    check_bad("photo.avif");
}

/// One that this build does not read names the feature that does.
#[test]
#[cfg(not(feature = "heif"))]
fn what_is_not_built_in_is_named() {
    for path in files("heic").into_iter().chain(files("avif")) {
        let bytes = std::fs::read(&path).unwrap();
        let error = preparer(Limits::default()).prepare(&bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnknownFormat);
        assert!(error.to_string().contains("--features heif"), "{error}");
    }
}
