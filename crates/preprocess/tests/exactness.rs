//! Every fixture under every configuration, compared with the output of the reference processors.

#![allow(
    clippy::unwrap_used,
    reason = "a fixture that is missing fails the test"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trommel_preprocess::{Limits, Mode, Plan, Prepared, Preparer, Reference};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The files of a folder of fixtures, sorted.
fn files(folder: &str) -> Vec<PathBuf> {
    let folder = fixtures().join(folder);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(
        !files.is_empty(),
        "{folder:?} is empty: run tests/fixtures/make.py"
    );
    files
}

fn name(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

/// One preparer for each configuration, used for all of its images: buffers are reused, and
/// nothing of one image may show in the next.
fn preparers() -> BTreeMap<String, Preparer> {
    let load = |dir: &PathBuf| {
        let plan =
            Plan::load(dir, Reference::Auto).unwrap_or_else(|error| panic!("{dir:?}: {error}"));
        (
            name(dir).to_owned(),
            Preparer::new(Arc::new(plan), Limits::default()),
        )
    };
    files("configs").iter().map(load).collect()
}

#[derive(Default)]
struct Difference {
    images: u32,
    largest: u8,
    equal: u64,
    values: u64,
}

impl Difference {
    fn add(&mut self, found: &[u8], expected: &[u8]) -> u8 {
        let levels = || {
            found
                .iter()
                .zip(expected)
                .map(|(found, other)| found.abs_diff(*other))
        };
        let largest = levels().max().unwrap_or(0);
        self.images += 1;
        self.largest = self.largest.max(largest);
        self.equal += levels().filter(|level| *level == 0).count() as u64;
        self.values += found.len() as u64;
        largest
    }
}

#[test]
fn every_tensor_is_the_references() {
    let mut preparers = preparers();
    let images: BTreeMap<String, PathBuf> = files("images")
        .into_iter()
        .map(|path| (name(&path).replace('.', "_"), path))
        .collect();
    let mut table = BTreeMap::<String, Difference>::new();
    let mut wrong = Vec::new();
    for path in files("expected") {
        let (stem, rest) = name(&path).split_once('.').unwrap();
        let config = rest.strip_suffix(".png").unwrap();
        let reference = image::open(&path).unwrap().into_rgb8();
        let preparer = preparers.get_mut(config).unwrap();
        let case = format!("{stem} under {config}");
        match preparer.prepare(&fs::read(&images[stem]).unwrap()) {
            Err(error) => wrong.push(format!("{case}: {error}")),
            Ok(Prepared { shape, pixels, .. })
                if (shape.width, shape.height) != reference.dimensions()
                    || pixels.len() != shape.len() =>
            {
                wrong.push(format!(
                    "{case}: {shape:?}, expected {:?}",
                    reference.dimensions()
                ));
            }
            Ok(prepared) => {
                let differences = table.entry(config.to_owned()).or_default();
                let largest = differences.add(&prepared.pixels, reference.as_raw());
                if largest > 0 {
                    wrong.push(format!("{case}: up to {largest} levels"));
                }
            }
        }
    }

    println!(
        "{:<14}{:>8}{:>10}{:>10}",
        "config", "images", "largest", "equal"
    );
    for (
        config,
        Difference {
            images,
            largest,
            equal,
            values,
        },
    ) in &table
    {
        let share = 100.0 * *equal as f64 / *values as f64;
        println!("{config:<14}{images:>8}{largest:>10}{share:>9.3}%");
    }
    assert!(
        wrong.is_empty(),
        "{} cases are wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert_eq!(
        table.len(),
        preparers.len(),
        "a configuration without an expected tensor"
    );
    let seen: u32 = table["decode"].images;
    assert_eq!(
        seen as usize,
        images.len(),
        "an image without an expected tensor"
    );
}

#[test]
fn the_original_size_is_the_upright_one() {
    let mut preparers = preparers();
    let preparer = preparers.get_mut("clip").unwrap();
    for (file, width, height) in [
        ("tall.jpg", 41, 90),
        ("jpeg_exif_3.jpg", 41, 90),
        ("jpeg_exif_6.jpg", 90, 41),
    ] {
        let bytes = fs::read(fixtures().join("images").join(file)).unwrap();
        let original = preparer.prepare(&bytes).unwrap().original;
        assert_eq!((original.width, original.height), (width, height), "{file}");
    }
}

#[test]
fn decode_and_resize_are_the_two_halves_of_prepare() {
    let mut preparers = preparers();
    let preparer = preparers.get_mut("vit").unwrap();
    let bytes = fs::read(fixtures().join("images/photo.jpg")).unwrap();
    let whole = preparer.prepare(&bytes).unwrap();
    preparer.decode(&bytes).unwrap();
    assert_eq!(preparer.resize().unwrap(), whole);
}

/// Large JPEGs are decoded smaller, so tensors differ, but by little on average; what is no JPEG, or
/// not large enough, is prepared exactly.
#[test]
fn fast_tensors_are_close_and_exact_where_nothing_is_saved() {
    let plan = Arc::new(Plan::load(&fixtures().join("configs/vit"), Reference::Auto).unwrap());
    let preparer = |mode| Preparer::new(Arc::clone(&plan), Limits::default()).with_mode(mode);
    let (mut exact, mut fast) = (preparer(Mode::Exact), preparer(Mode::Fast));
    for (file, is_smaller) in [
        ("photo.jpg", true), // 320 × 240 for 32 × 32
        ("jpeg_exif_6.jpg", false),
        ("jpeg_420.jpg", false),
        ("rgb.png", false),
    ] {
        let bytes = fs::read(fixtures().join("images").join(file)).unwrap();
        let (exact, fast) = (
            exact.prepare(&bytes).unwrap(),
            fast.prepare(&bytes).unwrap(),
        );
        assert_eq!((exact.shape, exact.original), (fast.shape, fast.original));
        let levels = exact.pixels.iter().zip(&fast.pixels);
        let sum: u64 = levels.map(|(a, b)| u64::from(a.abs_diff(*b))).sum();
        let mean = sum as f64 / exact.pixels.len() as f64;
        assert_eq!(mean > 0.0, is_smaller, "{file}: {mean}");
        assert!(mean < 2.0, "{file}: {mean}");
    }
}
