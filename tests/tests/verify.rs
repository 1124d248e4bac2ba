//! Checks of a model before it is used: which reference its tensors follow, and whether they match.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use trommel_tests::{Folder, Trommel, assert_code, digits_model, stderr};

/// A folder with the shipped model's files, but for a processor's and a `config.json` with this version.
fn model(folder: &Folder, version: &str, processor: &str) -> PathBuf {
    let dir = folder.path("model");
    fs::create_dir_all(&dir).unwrap();
    fs::copy(digits_model().join("model.onnx"), dir.join("model.onnx")).unwrap();
    let config = fs::read_to_string(digits_model().join("config.json")).unwrap();
    let with_version = format!(r#"{{"transformers_version": "{version}","#);
    fs::write(
        dir.join("config.json"),
        config.replacen('{', &with_version, 1),
    )
    .unwrap();
    fs::write(dir.join("preprocessor_config.json"), processor).unwrap();
    dir
}

const VIT: &str =
    r#"{"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}"#;

/// A substitute for Python: a script that runs this in the folder of the given program.
fn python(folder: &Folder, does: &str) -> PathBuf {
    let path = folder.path("python");
    fs::write(
        &path,
        format!("#!/bin/sh\nfolder=$(dirname \"$1\")\n{does}\n"),
    )
    .unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Writes a verdict with these differences, in levels.
fn verdict(folder: &Folder, levels: &[&str]) -> PathBuf {
    let images = levels.iter().enumerate();
    let images = images.map(|(number, levels)| {
        format!(r#"{{"image": "/photos/{number}.jpg", "levels": {levels}, "shape": [3, 32, 32]}}"#)
    });
    let images: Vec<_> = images.collect();
    let verdict = format!(
        r#"{{"processor": "ViTImageProcessor", "transformers": "5.23.0", "images": [{}]}}"#,
        images.join(",")
    );
    python(folder, &format!("echo '{verdict}' > $folder/verdict.json"))
}

fn verify(model: &Path, images: &Path, output: &Path, python: &Path) -> Trommel {
    Trommel::new(["model", "verify"])
        .arg(model)
        .arg(images)
        .arg("--output")
        .arg(output)
        .arg("--python")
        .arg(python)
}

fn stdout(output: &std::process::Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_verdict_decides_the_exit_code() {
    let folder = Folder::with_digits(3);
    let model = model(&folder, "5.23.0", VIT);
    let (images, out) = (folder.images(), folder.path("out"));
    let equal = verify(
        &model,
        &images,
        &out,
        &verdict(&folder, &["0.0", "0.001", "0"]),
    )
    .run();
    assert_code(&equal, 0);
    let text = stdout(&equal);
    for words in [
        "reference   Torchvision: config.json was written by Transformers 5.23.0",
        "compared    ViTImageProcessor of Transformers 5.23.0",
        "equal in all 3 images",
    ] {
        assert!(text.contains(words), "{text}");
    }
    let tensor = fs::read(out.join("tensors/00000.npy")).unwrap();
    assert!(tensor.starts_with(b"\x93NUMPY"));
    assert_eq!(
        tensor.len() % 64,
        0,
        "32 × 32 × 3 and a header of 128 bytes"
    );
    let program = fs::read_to_string(out.join("compare.py")).unwrap();
    assert!(program.contains("AutoImageProcessor.from_pretrained(task[\"model\"])"));
    assert!(
        program.lines().filter(|line| !line.is_empty()).count() <= 25,
        "it is to be read"
    );

    let different = verify(
        &model,
        &images,
        &out,
        &verdict(&folder, &["0", "2.0", "null"]),
    )
    .run();
    assert_code(&different, 3);
    let text = stdout(&different);
    assert!(
        text.contains("2 of 3 images differ") && text.contains("by up to 2.0"),
        "{text}"
    );
}

#[test]
fn what_cannot_be_compared_is_answered_with_the_next_step() {
    let folder = Folder::with_digits(2);
    let model = model(&folder, "5.23.0", VIT);
    let (images, out) = (folder.images(), folder.path("out"));
    let without = python(
        &folder,
        "echo \"ModuleNotFoundError: No module named 'transformers'\" >&2; exit 1",
    );
    let output = verify(&model, &images, &out, &without).run();
    assert_code(&output, 1);
    for words in ["No module named 'transformers'", "--python"] {
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
    let output = verify(&model, &images, &out, Path::new("/nowhere/python")).run();
    assert_code(&output, 1);
    assert!(stderr(&output).contains("--python"), "{}", stderr(&output));
    let short = verdict(&folder, &["0"]);
    let output = verify(&model, &images, &out, &short).run();
    assert_code(&output, 1);
    assert!(
        stderr(&output).contains("lacks 1 of 2"),
        "{}",
        stderr(&output)
    );
    let output = verify(&model, &images, &folder.images(), &short).run();
    assert_code(&output, 2);
    assert!(
        stderr(&output).contains("contains other files"),
        "{}",
        stderr(&output)
    );
}

/// The two references scale differently, and either can be requested.
#[test]
fn the_reference_is_chosen_by_folder_configuration_and_flag() {
    let folder = Folder::with_digits(1);
    let equal = verdict(&folder, &["0"]);
    // To a half, both would give the same.
    let odd = VIT.replace("\"width\": 32", "\"width\": 27");
    let tensor = |version: &str, more: &dyn Fn(Trommel) -> Trommel| {
        let model = model(&folder, version, &odd);
        let out = folder.path("out");
        let output = more(verify(&model, &folder.images(), &out, &equal)).run();
        assert_code(&output, 0);
        fs::read(out.join("tensors/00000.npy")).unwrap()
    };
    let plain = |trommel: Trommel| trommel;
    let (old, new) = (tensor("4.57.1", &plain), tensor("5.23.0", &plain));
    assert!(old != new, "the references are distinguished by nothing");
    let flag = |trommel: Trommel| trommel.args(["--reference", "pillow"]);
    assert!(tensor("5.23.0", &flag) == old, "by a flag");
    let environment =
        |trommel: Trommel| trommel.env("TROMMEL_PREPROCESS__REFERENCE", "torchvision");
    assert!(tensor("4.57.1", &environment) == new, "by the environment");
    let both = |trommel: Trommel| flag(environment(trommel));
    assert!(tensor("4.57.1", &both) == old, "the flag comes first");
}

#[test]
fn inspect_says_what_was_inferred_and_from_what() {
    let folder = Folder::new();
    let dir = model(&folder, "4.57.1", VIT);
    let output = Trommel::new(["model", "inspect"]).arg(&dir).run();
    assert_code(&output, 0);
    let text = stdout(&output);
    for words in [
        "scores      softmax: problem_type in config.json",
        "from id2label in config.json",
        "preprocess  ViTImageProcessor: resize to 32×32 (bilinear), RGB",
        "from preprocessor_config.json",
        "reference   Pillow: config.json was written by Transformers 4.57.1",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let output = Trommel::new(["model", "inspect", "--json"]).arg(&dir).run();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["preprocess"]["arithmetic"], "pillow");
    assert_eq!(json["model"]["labels_from"], "id2label in config.json");

    fs::write(
        dir.join("preprocessor_config.json"),
        VIT.replace("ViTImage", "DonutImage"),
    )
    .unwrap();
    let output = Trommel::new(["model", "inspect"]).arg(&dir).run();
    assert_code(&output, 2);
    let text = stderr(&output);
    assert!(
        text.contains("\"DonutImageProcessor\", which is not followed"),
        "{text}"
    );
}

/// What shapes rows is part of a job: a worker that would be asked to ignore it does not start.
#[test]
fn a_worker_with_a_reference_of_its_own_does_not_start() {
    let output = Trommel::new(["worker", "--role", "preprocess"])
        .env("TROMMEL_PREPROCESS__REFERENCE", "pillow")
        .run();
    assert_code(&output, 2);
    assert!(
        stderr(&output).contains("trommel submit --reference"),
        "{}",
        stderr(&output)
    );
    let output = Trommel::new(["classify", "x", "--reference", "opencv"]).run();
    assert_code(&output, 2);
    assert!(
        stderr(&output).contains("auto, pillow or torchvision"),
        "{}",
        stderr(&output)
    );
}
