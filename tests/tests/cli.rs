//! Commands other than `classify`, and what scripts rely on.

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
        "[infer]\nmax-batch = 2\nmax-models = 2\nmax-wait = \"5ms\"\n[sink]\npart-rows = 7\n",
    )
    .unwrap();
    let run = Trommel::new(["config", "--max-batch", "4"])
        .current_dir(folder.path("").as_path())
        .env("TROMMEL_INFER__MAX_BATCH", "3")
        .env("TROMMEL_INFER__MAX_MODELS", "3")
        .run();
    assert_code(&run, 0);
    let config = stdout(&run);
    for line in [
        "max-batch = 4",
        "max-models = 3",
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

/// What was printed was the parser's and the standard library's: `number would be zero for non-zero type`.
#[test]
fn a_number_that_cannot_be_is_refused_by_its_name_wherever_it_is_given() {
    let folder = Folder::new();
    fs::write(folder.path("own.toml"), "[sink]\npart-rows = 0\n").unwrap();
    let own = folder.path("own.toml");
    let variable = ("TROMMEL_INFER__MAX_BATCH", "many");
    for (run, words) in [
        (
            Trommel::new(["classify", "photos", "--top-k", "0"]).run(),
            "--top-k must be at least 1",
        ),
        (
            Trommel::new(["config", "--config", own.to_str().unwrap()]).run(),
            "own.toml: sink.part-rows must be a whole number of at least 1, but is 0",
        ),
        (
            Trommel::new(["config"]).env(variable.0, variable.1).run(),
            "TROMMEL_INFER__MAX_BATCH must be a whole number of at least 1, but is \"many\"",
        ),
    ] {
        assert_code(&run, 2);
        assert!(stderr(&run).contains(words), "{}", stderr(&run));
    }
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
fn a_model_without_classes_is_inspected_too() {
    let towers = trommel_tests::root().join("crates/infer/tests/models/clip_both");
    let run = Trommel::new(["model", "inspect"]).arg(towers).run();
    assert_code(&run, 0);
    assert!(stdout(&run).contains("image_embeds"), "{}", stdout(&run));
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
    let bins = by_folder["calibration"].as_array().unwrap().iter();
    let binned: u64 = bins.map(|bin| bin["images"].as_u64().unwrap()).sum();
    assert_eq!(Some(binned), by_folder["images"].as_u64(), "{by_folder}");
    let off = by_folder["calibration_error"].as_f64().unwrap();
    assert!((0.0..0.1).contains(&off), "{by_folder}");

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
    // The scores are near 1, and few of the labels are right.
    let off = by_file["calibration_error"].as_f64().unwrap();
    assert!(off > 0.5, "{by_file}");
}

/// The rows of a run, and of another over the same images whose scores and labels have moved.
fn two_runs(folder: &Folder) {
    let top = |best: (&str, f64), next: (&str, f64)| {
        serde_json::json!([
            {"class": 0, "label": best.0, "score": best.1},
            {"class": 1, "label": next.0, "score": next.1},
        ])
    };
    let row = |index: u64, best: (&str, f64), next: (&str, f64)| {
        serde_json::json!({
            "job_id": "j", "index": index, "uri": format!("{index}.jpg"), "status": "ok",
            "label": best.0, "score": best.1, "top": top(best, next),
        })
    };
    let failed = |index: u64| {
        serde_json::json!({
            "job_id": "j", "index": index, "uri": format!("{index}.jpg"), "status": "failed",
            "error_kind": "corrupt", "error": "damaged",
        })
    };
    let write = |name: &str, rows: &[Value]| {
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        fs::write(folder.path(name), lines).unwrap();
    };
    let plain = [
        row(0, ("cat", 0.9), ("dog", 0.1)),
        row(1, ("cat", 0.6), ("dog", 0.4)),
        row(2, ("dog", 0.75), ("cat", 0.25)),
        failed(3),
        failed(4),
        row(5, ("dog", 0.5), ("cat", 0.5)),
    ];
    let quantised = [
        row(0, ("cat", 0.8), ("dog", 0.2)),
        row(1, ("dog", 0.7), ("cat", 0.3)),
        row(2, ("dog", 0.75), ("cat", 0.25)),
        failed(3),
        row(4, ("cat", 0.9), ("dog", 0.1)),
        row(6, ("cat", 0.9), ("dog", 0.1)),
    ];
    write("plain.jsonl", &plain);
    write("int8.jsonl", &quantised);
}

#[test]
fn two_runs_are_compared_label_by_label() {
    let folder = Folder::new();
    two_runs(&folder);
    let compare = |least: &str| {
        Trommel::new(["evaluate", "--json", "--min-agreement", least, "--against"])
            .arg(folder.path("plain.jsonl"))
            .arg(folder.path("int8.jsonl"))
            .run()
    };
    let run = compare("0.5");
    assert_code(&run, 0);
    let found: Value = serde_json::from_str(&stdout(&run)).unwrap();
    // Of 0, 1, 2 and 4, the first and the third have the same label.
    assert_eq!(found["images"], 4);
    assert_eq!(found["agreement"], 0.5);
    assert_eq!(found["worst_score_change"]["uri"], "1.jpg");
    assert_eq!(found["worst_score_change"]["label"], "cat");
    let near = |value: &Value, expected: f64| (value.as_f64().unwrap() - expected).abs() < 1e-6;
    // 0.1, 0.3 and 0.
    assert!(near(&found["mean_score_change"], 0.4 / 3.0), "{found}");
    assert_eq!(found["failed_in_both"], 1);
    assert_eq!(found["failed_there"], 1);
    assert_eq!(found["only_here"], 1);
    assert_eq!(found["only_there"], 1);
    let cat = &found["classes"][0];
    assert_eq!((&cat["label"], &cat["images"]), (&"cat".into(), &2.into()));
    assert!(near(&cat["worst_score_change"], 0.3), "{found}");
    let changed: Vec<_> = found["changed"].as_array().unwrap().iter().collect();
    assert_eq!(changed.len(), 2, "{found}");

    assert_code(&compare("0.6"), 3);
    let nothing = Trommel::new(["evaluate", "--against"])
        .arg(folder.path("plain.jsonl"))
        .arg(folder.path("missing.jsonl"))
        .run();
    assert_code(&nothing, 2);
}

#[test]
fn a_profile_tells_where_a_models_time_goes_and_draws_it() {
    let folder = Folder::new();
    let picture = folder.path("digits.svg");
    let run = Trommel::new([
        "profile",
        "--json",
        "--runs",
        "3",
        "--batches",
        "1,4",
        "--model",
    ])
    .arg(digits_model())
    .arg("--picture")
    .arg(&picture)
    .run();
    assert_code(&run, 0);
    let report: Value = serde_json::from_str(&stdout(&run)).unwrap();
    let nodes = report["nodes"].as_array().unwrap();
    let time = |of: &Value| of["milliseconds"].as_f64().unwrap();
    let in_nodes: f64 = nodes.iter().map(time).sum();
    assert!(
        nodes.iter().any(|node| node["operator"] == "Gemm"),
        "{report}"
    );
    assert!(in_nodes > 0.0 && in_nodes <= time(&report), "{report}");
    let operators = report["operators"].as_array().unwrap();
    let by_operator: f64 = operators.iter().map(time).sum();
    assert!((by_operator - in_nodes).abs() < 1e-9, "{report}");
    let batches = report["throughput"].as_array().unwrap().iter();
    let batches: Vec<_> = batches
        .map(|rate| rate["batch"].as_u64().unwrap())
        .collect();
    assert_eq!(batches, [1, 4]);

    let drawn = fs::read_to_string(picture).unwrap();
    assert!(
        drawn.starts_with("<svg") && drawn.ends_with("</svg>"),
        "{drawn}"
    );
    for operator in operators {
        assert!(drawn.contains(operator["operator"].as_str().unwrap()));
    }
    assert_eq!(drawn.matches("<title>").count(), nodes.len());
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

#[test]
fn a_file_that_does_not_exist_is_named_with_what_to_give() {
    let folder = Folder::with_digits(2);
    let results = folder.path("results.csv");
    assert_code(&Trommel::classify(&folder.images(), &results).run(), 0);
    let path = |name: &str| folder.path(name).to_str().unwrap().to_owned();
    let (missing, found) = (path("result.csv"), path("results.csv"));
    let model = digits_model();
    let model = model.to_str().unwrap();
    let refused = |args: &[&str], named: &str, remedy: &str| {
        let run = Trommel::new(args).run();
        assert_code(&run, 2);
        let said = stderr(&run);
        for words in [&format!("{named} does not exist; "), remedy] {
            assert!(said.contains(words), "{words} is missing: {said}");
        }
    };
    for args in [
        &["evaluate", &missing, "--labels-from", "folders"][..],
        &["evaluate", &found, "--against", &missing],
        &["report", &missing],
        &["export", &missing, "--by-label", &path("sorted")],
        &[
            "export",
            &found,
            "--to",
            "csv",
            "--output",
            &path("list.csv"),
            "--disagree",
            &missing,
        ],
        &["fit", &missing, "--labels-from", "folders"],
        &["find", &missing, "a cat", "--model", model],
        &["dedup", &missing],
        &["relabel", &missing, "--head", &path("head.json")],
    ] {
        refused(args, &missing, &format!("did you mean {found}?"));
    }
    let none = path("none");
    for (args, remedy) in [
        (
            &["evaluate", &found, "--labels", &none][..],
            "columns uri and label",
        ),
        (&["fit", &found, "--labels", &none], "columns uri and label"),
        (
            &["report", &found, "--summary", &none],
            "trommel classify --json",
        ),
        (
            &["relabel", &found, "--model", model, "--labels", &none],
            "one label a line",
        ),
        (&["relabel", &found, "--head", &none], "trommel fit"),
    ] {
        refused(args, &none, remedy);
    }
}

#[test]
fn labels_in_another_format_are_refused_with_what_is_read() {
    let folder = Folder::with_digits(2);
    let results = folder.path("results.csv");
    assert_code(&Trommel::classify(&folder.images(), &results).run(), 0);
    for (name, text, words) in [
        (
            "a.txt",
            "a cat",
            "unknown format of labels; give a CSV file",
        ),
        (
            "b.csv",
            "path;label\n",
            "there is no column uri; the columns are path;label",
        ),
        (
            "c.jsonl",
            "{\"uri\": \"a\", \"label\": 1}\na cat\n",
            "line 2",
        ),
    ] {
        let labels = folder.path(name);
        fs::write(&labels, text).unwrap();
        let run = Trommel::new(["evaluate", results.to_str().unwrap(), "--labels"])
            .arg(&labels)
            .run();
        assert_code(&run, 2);
        let said = stderr(&run);
        assert!(said.contains(words) && said.contains(name), "{said}");
    }
}

#[test]
fn a_file_to_write_needs_its_folder_before_any_work() {
    let folder = Folder::with_digits(2);
    let results = folder.path("results.csv");
    assert_code(&Trommel::classify(&folder.images(), &results).run(), 0);
    let (results, page) = (results.to_str().unwrap(), folder.path("no/page"));
    let page = page.to_str().unwrap();
    for args in [
        &["report", results, "--output", page][..],
        &["fit", results, "--labels-from", "folders", "--output", page],
        &["export", results, "--to", "csv", "--output", page],
    ] {
        let run = Trommel::new(args).run();
        assert_code(&run, 2);
        assert!(stderr(&run).contains("create it first"), "{}", stderr(&run));
    }
}
