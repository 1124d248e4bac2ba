//! Commands beside `classify`, and what scripts rely on.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs;

use serde_json::Value;
use trommel_tests::{Folder, Trommel, assert_code, digits_model, stderr};

fn stdout(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn help_names_every_command_and_the_exit_codes() {
    let help = stdout(&Trommel::new(["--help"]).run());
    for command in ["classify", "model", "evaluate", "config"] {
        assert!(help.contains(command), "{help}");
    }
    let help = stdout(&Trommel::new(["classify", "--help"]).run());
    for flag in [
        "--model",
        "--output",
        "--sample",
        "--fail-on-error",
        "Exit codes: 0",
    ] {
        assert!(help.contains(flag), "{flag} is missing: {help}");
    }
    assert_code(&Trommel::new(["clasify"]).run(), 2);
}

#[test]
fn flags_stand_above_the_environment_and_that_above_the_file() {
    let folder = Folder::new();
    fs::write(
        folder.path("trommel.toml"),
        "[infer]\nmax-batch = 2\ntop-k = 2\nmax-wait = \"5ms\"\n[sink]\npart-rows = 7\n",
    )
    .unwrap();
    let run = Trommel::new(["config", "--max-batch", "4"])
        .current_dir(folder.path("").as_path())
        .env("TROMMEL_INFER__MAX_BATCH", "3")
        .env("TROMMEL_INFER__TOP_K", "3")
        .run();
    assert_code(&run, 0);
    let config = stdout(&run);
    for line in [
        "max-batch = 4",
        "top-k = 3",
        "max-wait = \"5ms\"",
        "part-rows = 7",
    ] {
        assert!(config.contains(line), "{line} is missing: {config}");
    }
}

#[test]
fn an_unknown_setting_is_refused_by_name() {
    let folder = Folder::new();
    fs::write(folder.path("trommel.toml"), "[infer]\nbatchsize = 2\n").unwrap();
    let run = Trommel::new(["config"])
        .current_dir(folder.path("").as_path())
        .run();
    assert_code(&run, 2);
    assert!(stderr(&run).contains("batchsize"), "{}", stderr(&run));
}

#[test]
fn a_model_is_inspected() {
    let run = Trommel::new(["model", "inspect"]).arg(digits_model()).run();
    assert_code(&run, 0);
    for word in [
        "pixel_values",
        "NCHW",
        "softmax",
        "ViTImageProcessor",
        "resize to 32×32",
    ] {
        assert!(
            stdout(&run).contains(word),
            "{word} is missing: {}",
            stdout(&run)
        );
    }
    let run = Trommel::new(["model", "inspect", "--json"])
        .arg(digits_model())
        .run();
    let info: Value = serde_json::from_str(&stdout(&run)).unwrap();
    assert_eq!(info["preprocess"]["resample"], "bilinear");
}

#[test]
fn results_are_evaluated_from_folders_and_from_a_file() {
    let folder = Folder::new();
    let output = folder.path("rows.parquet");
    let examples = digits_model().join("examples");
    assert_code(&Trommel::classify(&examples, &output).run(), 0);

    let by_folder = Trommel::new(["evaluate", "--labels-from", "folders", "--json"])
        .arg(&output)
        .run();
    assert_code(&by_folder, 0);
    let by_folder: Value = serde_json::from_str(&stdout(&by_folder)).unwrap();
    assert!(
        by_folder["accuracy"].as_f64().unwrap() >= 0.98,
        "{by_folder}"
    );
    assert_eq!(by_folder["classes"].as_array().unwrap().len(), 10);

    // Against labels of which each is a seven, only the sevens are right.
    let rows = trommel_tests::rows(&output);
    let sevens = rows
        .iter()
        .filter(|row| row.label.as_deref() == Some("7"))
        .count();
    let text: String = rows.iter().map(|row| format!("{},7\n", row.uri)).collect();
    fs::write(folder.path("truth.csv"), format!("uri,label\n{text}")).unwrap();
    let run = Trommel::new(["evaluate", "--json", "--min-accuracy", "0.9", "--labels"])
        .arg(folder.path("truth.csv"))
        .arg(&output)
        .run();
    assert_code(&run, 3);
    let by_file: Value = serde_json::from_str(&stdout(&run)).unwrap();
    let expected = sevens as f64 / rows.len() as f64;
    assert!(
        (by_file["accuracy"].as_f64().unwrap() - expected).abs() < 1e-9,
        "{by_file}"
    );
}

#[test]
fn the_summary_is_json_on_request_and_silence_is_kept() {
    let folder = Folder::with_digits(5);
    let run = Trommel::classify(&folder.images(), &folder.path("a.csv"))
        .arg("--json")
        .run();
    let summary: Value = serde_json::from_str(&stdout(&run)).unwrap();
    assert_eq!(
        (summary["images"].as_u64(), summary["failed"].as_u64()),
        (Some(5), Some(0))
    );
    assert!(summary["run"]["bottleneck"].is_string(), "{summary}");

    let run = Trommel::classify(&folder.images(), &folder.path("b.csv"))
        .arg("--quiet")
        .run();
    assert_eq!((stdout(&run), stderr(&run)), (String::new(), String::new()));
}
