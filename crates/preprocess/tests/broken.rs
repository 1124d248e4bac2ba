//! Files that are no images: each has its kind, and none disturbs the next image.

#![allow(
    clippy::unwrap_used,
    reason = "a fixture that is missing fails the test"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use trommel_preprocess::{Limits, Mode, Plan, Preparer, Reference, Resize};
use trommel_types::ErrorKind;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn preparer(limits: Limits) -> Preparer {
    let plan = Plan::load(&fixtures().join("configs/clip"), Reference::Auto).unwrap();
    Preparer::new(Arc::new(plan), limits)
}

fn image(name: &str) -> Vec<u8> {
    fs::read(fixtures().join("images").join(name)).unwrap()
}

/// The files of `broken`, by the kind that their folder names.
fn broken() -> BTreeMap<String, Vec<PathBuf>> {
    let list = |folder: &Path| {
        let mut paths: Vec<_> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        paths.sort();
        paths
    };
    let name = |folder: &Path| folder.file_name().unwrap().to_str().unwrap().to_owned();
    let folders = list(&fixtures().join("broken"));
    folders
        .iter()
        .map(|folder| (name(folder), list(folder)))
        .collect()
}

#[test]
fn every_broken_file_has_the_kind_of_its_folder() {
    let mut preparer = preparer(Limits::default());
    let good = image("photo.jpg");
    let tensor = preparer.prepare(&good).unwrap();
    let mut wrong = Vec::new();
    for (kind, paths) in broken() {
        for path in paths {
            match preparer.prepare(&fs::read(&path).unwrap()) {
                Ok(_) => wrong.push(format!("{path:?}: no error")),
                Err(error) if error.kind().as_str() != kind => {
                    wrong.push(format!("{path:?}: {} ({error})", error.kind()));
                }
                Err(error) => {
                    let text = error.to_string();
                    let variants = ["Png", "Jpeg", "Gif", "Bmp", "Tiff"];
                    let named = variants.iter().any(|name| text.starts_with(name));
                    assert!(!text.is_empty() && !named, "{path:?}: {text}");
                }
            }
            assert_eq!(preparer.prepare(&good).unwrap(), tensor, "after {path:?}");
        }
    }
    assert!(
        wrong.is_empty(),
        "{} files:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    let kinds: Vec<_> = broken().into_keys().collect();
    let expected = [
        "corrupt",
        "empty",
        "too_many_pixels",
        "truncated",
        "unknown_format",
        "unsupported",
    ];
    assert_eq!(kinds, expected);
}

/// R56: an error told the first four bytes of any file that the worker can read.
#[test]
fn an_unknown_format_is_refused_without_a_byte_of_its_content() {
    let mut preparer = preparer(Limits::default());
    let errors = [b"root:x:0:0:root".as_slice(), b"\x13\x37secret"].map(|content| {
        let error = preparer.prepare(content).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnknownFormat);
        error.to_string()
    });
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("JPEG, PNG"), "{}", errors[0]);
}

#[test]
fn limits_are_checked_before_decoding() {
    let kind = |limits: Limits, name: &str| {
        preparer(limits)
            .prepare(&image(name))
            .map(|_| ())
            .map_err(|error| error.kind())
    };
    let standard = Limits::default();
    let length = image("photo.jpg").len() as u64;
    let too_many = Err(ErrorKind::TooManyPixels);
    assert_eq!(
        kind(
            Limits {
                max_bytes: length,
                ..standard
            },
            "photo.jpg"
        ),
        Ok(())
    );
    assert_eq!(
        kind(
            Limits {
                max_bytes: length - 1,
                ..standard
            },
            "photo.jpg"
        ),
        Err(ErrorKind::TooLarge)
    );
    // 320 × 240
    assert_eq!(
        kind(
            Limits {
                max_pixels: 76_800,
                ..standard
            },
            "photo.jpg"
        ),
        Ok(())
    );
    assert_eq!(
        kind(
            Limits {
                max_pixels: 76_799,
                ..standard
            },
            "photo.jpg"
        ),
        too_many
    );
    assert_eq!(
        kind(
            Limits {
                max_side: 319,
                ..standard
            },
            "photo.jpg"
        ),
        too_many
    );
    for name in [
        "rgb.png",
        "webp_lossy.webp",
        "gif_plain.gif",
        "bmp_rgb.bmp",
        "tiff_lzw.tif",
    ] {
        assert_eq!(
            kind(
                Limits {
                    max_pixels: 100,
                    ..standard
                },
                name
            ),
            too_many,
            "{name}"
        );
    }
}

#[test]
fn a_thin_image_is_not_scaled_up_without_bound() {
    let preparer = |max_pixels| {
        let limits = Limits {
            max_pixels,
            ..Limits::default()
        };
        Preparer::new(Arc::new(Plan::plain(Resize::ShortestEdge(40))), limits)
    };
    // 301 × 29 becomes 415 × 40, and within these limits no larger image may arise.
    assert!(preparer(20_000).prepare(&image("wide.jpg")).is_ok());
    let error = preparer(16_000).prepare(&image("wide.jpg")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooManyPixels);
    assert!(error.to_string().contains("scaled to 415×40"), "{error}");
}

#[test]
fn resizing_without_an_image_is_an_error() {
    let mut preparer = preparer(Limits::default());
    assert!(preparer.resize().is_err());
    preparer.decode(&image("photo.jpg")).unwrap();
    assert!(preparer.decode(b"no image").is_err());
    assert!(preparer.resize().is_err());
}

/// Each scan costs as much time as a whole image, and few bytes.
#[test]
fn a_jpeg_of_very_many_scans_is_refused() {
    let bytes = image("jpeg_progressive.jpg");
    let is_scan = |place: &usize| bytes[*place..].starts_with(&[0xff, 0xda]);
    let last = (0..bytes.len()).rfind(is_scan).unwrap();
    let (before, scan) = bytes[..bytes.len() - 2].split_at(last);
    let with_scans = |count| [before, &scan.repeat(count), &[0xff, 0xd9]].concat();
    let mut preparer = preparer(Limits::default());
    assert!(preparer.prepare(&with_scans(1)).is_ok());
    let error = preparer.prepare(&with_scans(600)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

/// Cuts, changed bytes and pieces of other files at many places, 20,000 files and more: an image or an
/// error, and never a panic. What the slowest took is printed, and the most memory of this process.
#[test]
fn no_damage_panics() {
    let limits = Limits {
        max_pixels: 1 << 20,
        ..Limits::default()
    };
    let mut preparers = [Mode::Exact, Mode::Fast].map(|mode| preparer(limits).with_mode(mode));
    let mut state = 0x5EED_u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let files: Vec<Vec<u8>> = fs::read_dir(fixtures().join("images"))
        .unwrap()
        .map(|entry| fs::read(entry.unwrap().path()).unwrap())
        .collect();
    let (mut images, mut errors, mut slowest) = (0, 0, Duration::ZERO);
    for bytes in &files {
        for round in 0..260 {
            let mut damaged = bytes.clone();
            match round % 4 {
                0 => damaged.truncate(random(bytes.len())),
                1 => {
                    let other = &files[random(files.len())];
                    let (from, to) = (random(other.len()), random(bytes.len()));
                    damaged.truncate(to);
                    damaged.extend_from_slice(&other[from..]);
                }
                kind => {
                    let end = if kind == 2 {
                        bytes.len()
                    } else {
                        bytes.len().min(64)
                    };
                    for _ in 0..=random(4) {
                        damaged[random(end)] = random(256) as u8;
                    }
                }
            }
            let start = Instant::now();
            match preparers[round / 4 % 2].prepare(&damaged) {
                Ok(_) => images += 1,
                Err(_) => errors += 1,
            }
            slowest = slowest.max(start.elapsed());
        }
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let memory = status.lines().find(|line| line.starts_with("VmHWM"));
    println!("{images} images, {errors} errors, {slowest:?} at most, {memory:?}");
    assert!(images > 1000 && errors > 1000 && images + errors > 20_000);
}
