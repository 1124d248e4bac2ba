//! A fault of an image ends in its row; a fault of a job is reported before any
//! work.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use trommel_tests::{
    Folder, Trommel, assert_code, assert_each_index_once, digits, digits_model, rows, stderr,
};

/// A digit as PNG with another width and height in its header.
fn png_with_size(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = png();
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    let crc = crc32fast::hash(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&crc.to_be_bytes());
    bytes
}

fn with_suffix(suffix: &str) -> Vec<u8> {
    let file = digits()
        .into_iter()
        .find(|file| file.extension().unwrap() == suffix)
        .unwrap();
    fs::read(file).unwrap()
}

fn png() -> Vec<u8> {
    with_suffix("png")
}

fn half(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len() / 2]
}

/// A way to break an image, and the kind its row must name.
type Way = (&'static str, &'static str, fn(&Path));

/// Twelve ways to break an image.
const WAYS: [Way; 12] = [
    ("empty.jpg", "empty", |path| fs::write(path, b"").unwrap()),
    ("text.jpg", "unknown_format", |path| {
        fs::write(path, b"not an image at all\n").unwrap()
    }),
    ("page.png", "unknown_format", |path| {
        fs::write(path, b"<!DOCTYPE html><html></html>").unwrap()
    }),
    ("half.jpg", "truncated", |path| {
        fs::write(path, half(&with_suffix("jpg"))).unwrap()
    }),
    ("half.png", "truncated", |path| {
        fs::write(path, half(&png())).unwrap()
    }),
    ("damaged.png", "corrupt", |path| {
        let mut bytes = png();
        let middle = bytes.len() / 2;
        bytes[middle..middle + 40].fill(0xA5);
        fs::write(path, bytes).unwrap();
    }),
    ("tables.jpg", "corrupt", |path| {
        // A Huffman table that promises more codes than there can be.
        let mut bytes = with_suffix("jpg");
        let table = bytes
            .windows(2)
            .position(|marker| marker == [0xFF, 0xC4])
            .unwrap();
        bytes[table + 5..table + 21].fill(0xFF);
        fs::write(path, bytes).unwrap();
    }),
    ("huge.png", "too_many_pixels", |path| {
        fs::write(path, png_with_size(40_000, 40_000)).unwrap()
    }),
    ("sparse.jpg", "too_large", |path| {
        File::create(path).unwrap().set_len(300 << 20).unwrap()
    }),
    ("dangling.jpg", "not_found", |path| {
        symlink("nowhere", path).unwrap()
    }),
    ("secret.jpg", "permission_denied", |path| {
        fs::write(path, with_suffix("jpg")).unwrap();
        fs::set_permissions(path, Permissions::from_mode(0o000)).unwrap();
    }),
    ("pipe.jpg", "unreadable", |path| {
        rustix::fs::mkfifoat(rustix::fs::CWD, path, rustix::fs::Mode::RWXU).unwrap();
    }),
];

#[test]
fn sixty_of_a_thousand_images_are_broken_in_twelve_ways() {
    let folder = Folder::with_digits(940);
    for (name, _, break_it) in WAYS {
        for number in 0..5 {
            break_it(&folder.images().join(format!("{:06}-{name}", number * 200)));
        }
    }
    let output = folder.path("rows.parquet");
    let run = Trommel::classify(&folder.images(), &output).run_bound_by_permissions();
    assert_code(&run, 0);

    let rows = rows(&output);
    assert_each_index_once(&rows, 1000);
    let mut found = BTreeMap::new();
    for row in rows.iter().filter(|row| row.status == "failed") {
        let name = Path::new(&row.uri).file_name().unwrap().to_str().unwrap()[7..].to_owned();
        let kind = row.error_kind.clone().unwrap();
        assert!(
            row.error.as_ref().is_some_and(|error| !error.is_empty()),
            "{name}"
        );
        *found.entry((name, kind)).or_insert(0) += 1;
    }
    let expected: BTreeMap<_, _> = WAYS
        .iter()
        .map(|(name, kind, _)| (((*name).to_owned(), (*kind).to_owned()), 5))
        .collect();
    assert_eq!(found, expected);
    let said = stderr(&run);
    for (_, kind, _) in WAYS {
        assert!(said.contains(kind), "the summary leaves out {kind}: {said}");
    }

    let run = Trommel::classify(&folder.images(), &output)
        .arg("--fail-on-error")
        .run_bound_by_permissions();
    assert_code(&run, 3);
}

#[test]
fn a_name_that_is_not_utf_8_gets_its_row() {
    let folder = Folder::with_digits(2);
    let name = std::ffi::OsStr::from_bytes(b"caf\xe9 %.png");
    fs::write(folder.images().join(name), png()).unwrap();
    let output = folder.path("rows.jsonl");
    assert_code(&Trommel::classify(&folder.images(), &output).run(), 0);
    let rows = rows(&output);
    assert_each_index_once(&rows, 3);
    assert!(
        rows[2].uri.starts_with("file://") && rows[2].uri.ends_with("caf%E9%20%25.png"),
        "{}",
        rows[2].uri
    );
    assert_eq!(rows[2].status, "ok");
}

/// A BMP of 5 × 4 pixels of one gray.
fn gray_bmp(gray: u8) -> Vec<u8> {
    let (header, pitch) = (54_u32, 16_u32);
    let mut bytes = b"BM".to_vec();
    for number in [header + 4 * pitch, 0, header, 40, 5, 4] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend([1, 0, 24, 0]); // one plane, 24 bits
    bytes.extend([0; 24]);
    bytes.extend([gray; 4 * 16]);
    bytes
}

/// The model fails on a whole batch when one of its images holds the value 255.
#[test]
fn an_image_that_the_model_fails_on_costs_its_own_row_alone() {
    const IMAGES: usize = 40;
    let folder = Folder::new();
    let (model, images) = (folder.path("poison"), folder.path("images"));
    fs::create_dir(&model).unwrap();
    fs::create_dir(&images).unwrap();
    let poison = trommel_tests::root().join("crates/infer/tests/models/poison");
    for name in ["model.onnx", "config.json"] {
        fs::copy(poison.join(name), model.join(name)).unwrap();
    }
    let processor =
        r#"{"image_processor_type": "ViTImageProcessor", "size": {"height": 4, "width": 5}}"#;
    fs::write(model.join("preprocessor_config.json"), processor).unwrap();
    for number in 0..IMAGES {
        let gray = if number == 21 { 255 } else { number as u8 };
        fs::write(images.join(format!("{number:02}.bmp")), gray_bmp(gray)).unwrap();
    }
    let output = folder.path("rows.parquet");
    let run = Trommel::new(["classify", "--model"])
        .arg(&model)
        .arg("--output")
        .arg(&output)
        .arg(&images)
        .run();
    assert_code(&run, 0);
    let rows = rows(&output);
    assert_each_index_once(&rows, IMAGES);
    let failed: Vec<_> = rows.iter().filter(|row| row.status == "failed").collect();
    let [row] = &failed[..] else {
        panic!("{failed:?}")
    };
    assert!(row.uri.ends_with("21.bmp"), "{row:?}");
    assert_eq!(row.error_kind.as_deref(), Some("model_failed"));
}

#[test]
fn a_hopeless_job_ends_early_with_what_was_done() {
    let folder = Folder::with_digits(10);
    for number in 0..400 {
        fs::write(folder.images().join(format!("a{number:06}.jpg")), "text").unwrap();
    }
    let output = folder.path("rows");
    let run = Trommel::classify(&folder.images(), &output)
        .arg("--max-failure-rate")
        .arg("0.2")
        .run();
    assert_code(&run, 4);
    let said = stderr(&run);
    assert!(
        said.contains("--max-failure-rate 0.2") && said.contains("unknown_format"),
        "{said}"
    );
    assert!(!rows(&output).is_empty(), "what was done is committed");
}

#[test]
fn a_few_failures_do_not_end_a_job_that_allows_more() {
    let folder = Folder::with_digits(50);
    for number in 0..5 {
        fs::write(folder.images().join(format!("0000{number}x.jpg")), "text").unwrap();
    }
    let output = folder.path("rows.csv");
    let run = Trommel::classify(&folder.images(), &output)
        .arg("--max-failure-rate")
        .arg("0.2")
        .run();
    assert_code(&run, 0);
}

/// Runs and expects exit code 2 and these words, and no output.
#[track_caller]
fn assert_refused(command: Trommel, output: &Path, words: &[&str]) {
    let run = command.run();
    assert_code(&run, 2);
    for word in words {
        assert!(
            stderr(&run).contains(word),
            "`{word}` is missing: {}",
            stderr(&run)
        );
    }
    assert!(!output.exists(), "{} was begun", output.display());
}

#[test]
fn what_cannot_work_is_said_before_any_work() {
    let folder = Folder::with_digits(3);
    let (images, output) = (folder.images(), folder.path("rows.parquet"));
    let classify = || Trommel::classify(&images, &output);
    let nowhere = folder.path("nowhere");
    let with_model = |model: &Path| {
        Trommel::new(["classify"])
            .arg(&images)
            .arg("--model")
            .arg(model)
            .arg("--output")
            .arg(&output)
    };

    assert_refused(
        Trommel::classify(&nowhere, &output),
        &output,
        &["nowhere", "No such file"],
    );
    assert_refused(
        with_model(&nowhere),
        &output,
        &["nowhere", "does not exist"],
    );
    assert_refused(with_model(&images), &output, &["preprocessor_config.json"]);
    assert_refused(classify().arg("--device").arg("cuda:0"), &output, &["cuda"]);
    assert_refused(classify().arg("--device").arg("gpu"), &output, &["gpu"]);
    let missing = classify().arg("--onnxruntime").arg(&nowhere);
    assert_refused(missing, &output, &["nowhere"]);

    let elsewhere = folder.path("no/such/folder/rows.parquet");
    assert_refused(
        Trommel::classify(&images, &elsewhere),
        &elsewhere,
        &["no/such/folder"],
    );
    let odd = folder.path("rows.xlsx");
    assert_refused(
        Trommel::classify(&images, &odd),
        &odd,
        &[".parquet", ".jsonl", ".csv"],
    );
    let bucket = Path::new("s3://bucket/prefix/");
    assert_refused(Trommel::classify(&images, bucket), bucket, &["s3://"]);

    fs::create_dir(folder.path("empty")).unwrap();
    let empty = Trommel::classify(&folder.path("empty"), &output);
    assert_refused(
        empty,
        &output,
        &["no images", "--suffixes", "HEIC and AVIF"],
    );
}

#[test]
fn results_of_another_job_are_never_touched_unasked() {
    let folder = Folder::with_digits(5);
    let output = folder.path("rows.csv");
    fs::write(&output, "precious").unwrap();
    let run = Trommel::classify(&folder.images(), &output).run();
    assert_code(&run, 2);
    assert!(stderr(&run).contains("rows.csv"), "{}", stderr(&run));
    assert_eq!(fs::read_to_string(&output).unwrap(), "precious");

    // Not even by --overwrite, which is for Trommel's own results.
    assert_code(
        &Trommel::classify(&folder.images(), &output)
            .arg("--overwrite")
            .run(),
        2,
    );
    assert_eq!(fs::read_to_string(&output).unwrap(), "precious");

    let output = folder.path("own.csv");
    assert_code(&Trommel::classify(&folder.images(), &output).run(), 0);
    assert_each_index_once(&rows(&output), 5);

    let other = Trommel::classify(&folder.images(), &output)
        .arg("--top-k")
        .arg("2")
        .run();
    assert_code(&other, 2);
    assert!(
        stderr(&other).contains("top-k was 5, is 2"),
        "{}",
        stderr(&other)
    );

    assert_each_index_once(&rows(&output), 5);
    let replaced = folder.path("images/000009.png");
    fs::write(&replaced, png()).unwrap();
    let overwrite = Trommel::classify(&folder.images(), &output)
        .arg("--overwrite")
        .run();
    assert_code(&overwrite, 0);
    assert_each_index_once(&rows(&output), 6);

    // The same command again finds its work done.
    let again = Trommel::classify(&folder.images(), &output).run();
    assert_code(&again, 0);
    assert!(
        stderr(&again).contains("already complete"),
        "{}",
        stderr(&again)
    );

    // It does not call done what lacks an image.
    fs::write(folder.path("images/000010.png"), png()).unwrap();
    let more = Trommel::classify(&folder.images(), &output).run();
    assert_code(&more, 2);
    let said = stderr(&more);
    assert!(said.contains("the source lists 7 images"), "{said}");
    assert!(said.contains("--skip-existing"), "{said}");
    assert_each_index_once(&rows(&output), 6);
}

#[test]
fn an_unwritable_folder_is_said_before_any_work() {
    let folder = Folder::with_digits(2);
    let closed = folder.path("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, Permissions::from_mode(0o555)).unwrap();
    let output = closed.join("rows.parquet");
    let run = Trommel::classify(&folder.images(), &output).run_bound_by_permissions();
    assert_code(&run, 2);
    assert!(
        stderr(&run).contains("not allowed to write"),
        "{}",
        stderr(&run)
    );
}

#[test]
fn a_full_disk_keeps_what_is_committed_and_leaves_nothing_half_written() {
    // A limit on the size of files stands in for the disk: writing beyond it fails in the same place.
    let folder = Folder::with_digits(300);
    let output = folder.path("rows");
    let command = format!(
        "trap '' XFSZ; ulimit -f 24; exec {} classify {} --model {} --output {} --format jsonl",
        std::env::current_exe()
            .unwrap()
            .ancestors()
            .nth(2)
            .unwrap()
            .join("trommel")
            .display(),
        folder.images().display(),
        digits_model().display(),
        output.display(),
    );
    let run = std::process::Command::new("bash")
        .args(["-c", &command])
        .output()
        .unwrap();
    assert_code(&run, 1);
    assert!(stderr(&run).contains("failed to write"), "{}", stderr(&run));
    let left: Vec<_> = fs::read_dir(&output)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.contains("part-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");

    let again = Trommel::classify(&folder.images(), &output)
        .arg("--format")
        .arg("jsonl")
        .run();
    assert_code(&again, 0);
    assert_each_index_once(&rows(&output), 300);
}

#[test]
fn all_problems_of_a_configuration_are_told_at_once() {
    let folder = Folder::with_digits(1);
    let run = Trommel::classify(&folder.images(), &folder.path("rows.csv"))
        .env("TROMMEL_PREPROCESS__MAX_BYTES", "0")
        .env("TROMMEL_SINK__PART_INTERVAL", "0s")
        .env("TROMMEL_INFER__DEVICE", "toaster")
        .run();
    assert_code(&run, 2);
    for word in ["max-bytes", "part-interval", "toaster"] {
        assert!(stderr(&run).contains(word), "{}", stderr(&run));
    }
}
