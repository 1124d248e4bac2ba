//! Cascades: a small model decides what it is certain of, and nearly all labels are the large model's.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use trommel_sink::ResultRow;
use trommel_tests::{
    ChatServer, Folder, Said, Trommel, assert_code, assert_each_index_once, digits, digits_model,
    eventually, root, rows, stderr,
};

fn small() -> PathBuf {
    root().join("tests/models/digits-small")
}

/// `trommel classify` of the folder's images by both models.
fn cascade(folder: &Folder, large: &Path, output: &str) -> Trommel {
    Trommel::new(["classify"])
        .arg(folder.images())
        .arg("--model")
        .arg(small())
        .arg("--model")
        .arg(large)
        .arg("--output")
        .arg(folder.path(output))
        .args(["--agree", "0.99", "--agree-sample", "1200", "--json"])
        .env("TROMMEL_SINK__PART_INTERVAL", "200ms")
}

fn by<'a>(rows: &'a [ResultRow], word: &str) -> Vec<&'a ResultRow> {
    let is_by = |row: &&ResultRow| row.columns.get("decided_by").is_some_and(|by| by == word);
    rows.iter().filter(is_by).collect()
}

fn summary(output: &[u8]) -> Value {
    serde_json::from_slice(output).unwrap()
}

/// The labels of the large model alone.
fn labels_of_large(folder: &Folder) -> Vec<Option<String>> {
    let output = folder.path("large.parquet");
    assert_code(&Trommel::classify(&folder.images(), &output).run(), 0);
    rows(&output).into_iter().map(|row| row.label).collect()
}

#[test]
fn nearly_all_labels_are_the_large_models_and_most_images_are_spared_it() {
    let folder = Folder::with_digits(6000);
    fs::write(folder.images().join("x.jpg"), "text").unwrap();
    let run = cascade(&folder, &digits_model(), "rows.parquet").run();
    assert_code(&run, 0);
    let rows = rows(&folder.path("rows.parquet"));
    assert_each_index_once(&rows, 6001);
    let (sample, small, large) = (by(&rows, "sample"), by(&rows, "small"), by(&rows, "large"));
    assert_eq!(
        sample.len() + small.len() + large.len(),
        6000,
        "one is no image"
    );
    assert!((1000..1400).contains(&sample.len()), "{}", sample.len());
    let expected = labels_of_large(&folder);
    let same = rows
        .iter()
        .zip(&expected)
        .filter(|(row, label)| row.label == **label);
    let agreement = same.count() as f64 / 6001.0;
    assert!(agreement >= 0.99, "{agreement}");
    for row in sample.iter().chain(&large) {
        assert_eq!(row.label, expected[row.index as usize]);
    }
    for row in &small {
        assert_eq!(row.label.as_ref(), row.columns.get("small_label"));
    }
    let report = &summary(&run.stdout)["run"]["cascade"];
    let cost = (sample.len() + large.len()) as f64 / 6000.0;
    assert!(
        (report["saved"].as_f64().unwrap() - (1.0 - cost)).abs() < 1e-6,
        "{report}"
    );
    assert!(cost < 0.6, "{cost}: {report}");
    assert_eq!(report["shifted"], false);
    let low = report["rule"]["interval"][0].as_f64().unwrap();
    let high = report["rule"]["interval"][1].as_f64().unwrap();
    let measured = report["rule"]["agreement"].as_f64().unwrap();
    assert!(
        low <= measured && measured <= high && low > 0.97,
        "{report}"
    );
}

#[test]
fn a_killed_cascade_goes_on_by_the_same_rule() {
    let folder = Folder::with_digits(3000);
    let whole = cascade(&folder, &digits_model(), "whole.parquet").run();
    assert_code(&whole, 0);
    let mut killed = 0;
    for parts in [1, 3] {
        let mut run = cascade(&folder, &digits_model(), "rows.parquet").spawn();
        let at = folder.path("rows.parquet.parts");
        let ended = eventually("parts are committed, or all is done", || {
            let names = fs::read_dir(&at).into_iter().flatten().flatten();
            let count =
                names.filter(|name| name.file_name().to_string_lossy().starts_with("part-"));
            let ended = run.try_wait().unwrap().is_some();
            (ended || count.count() >= parts).then_some(ended)
        });
        run.kill().unwrap();
        run.wait().unwrap();
        killed += u32::from(!ended);
    }
    assert!(killed > 0, "it was too quick to be killed");
    assert_code(&cascade(&folder, &digits_model(), "rows.parquet").run(), 0);
    let (found, expected) = (
        rows(&folder.path("rows.parquet")),
        rows(&folder.path("whole.parquet")),
    );
    assert_each_index_once(&found, 3000);
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.label, expected.label);
        assert_eq!(
            found.columns["decided_by"], expected.columns["decided_by"],
            "{found:?}"
        );
    }
}

#[test]
fn a_shift_of_the_classes_is_noticed_and_sampled_again() {
    // Digits 0 to 4 at first, 8 and 9 later.
    let folder = Folder::new();
    fs::create_dir(folder.images()).unwrap();
    let copy = |from: &[&str], count: usize, prefix: &str| {
        let chosen = digits().into_iter().filter(|file| {
            let label = file
                .parent()
                .unwrap()
                .file_name()
                .unwrap()
                .to_str()
                .unwrap();
            from.contains(&label)
        });
        let chosen: Vec<_> = chosen.collect();
        for (number, file) in chosen.iter().cycle().take(count).enumerate() {
            let suffix = file.extension().unwrap().to_str().unwrap();
            fs::copy(
                file,
                folder
                    .images()
                    .join(format!("{prefix}{number:06}.{suffix}")),
            )
            .unwrap();
        }
    };
    copy(&["0", "1", "2", "3", "4"], 2500, "a");
    let run = cascade(&folder, &digits_model(), "rows/").run();
    assert_code(&run, 0);
    assert_eq!(summary(&run.stdout)["run"]["cascade"]["shifted"], false);
    copy(&["8", "9"], 2500, "b");
    let run = cascade(&folder, &digits_model(), "rows/")
        .arg("--skip-existing")
        .run();
    assert_code(&run, 0);
    let report = summary(&run.stdout)["run"]["cascade"].clone();
    assert_eq!(report["shifted"], true, "{report}");
    let rows = rows(&folder.path("rows"));
    assert_each_index_once(&rows, 5000);
    let expected = labels_of_large(&folder);
    let later = rows.iter().zip(&expected).skip(2500);
    let same = later.filter(|(row, label)| row.label == **label).count();
    assert!(same as f64 / 2500.0 >= 0.99, "{same} of 2500");
    let sampled = by(&rows, "sample")
        .into_iter()
        .filter(|row| row.index >= 2500)
        .count();
    assert!(
        (1000..1400).contains(&sampled),
        "{sampled} were sampled again"
    );
}

#[test]
fn the_large_model_may_be_a_prompt() {
    let server = ChatServer::start(|_| Said::Text("7".to_owned()));
    let folder = Folder::with_digits(40);
    let prompt = folder.path("asked");
    fs::create_dir(&prompt).unwrap();
    let choices: Vec<_> = (0..10).map(|digit| digit.to_string()).collect();
    let text = format!(
        "[prompt]\nurl = {:?}\nmodel = \"tiny\"\ntext = \"Which digit?\"\nchoices = {choices:?}\nconstrain = \"regex\"\n",
        server.url()
    );
    fs::write(prompt.join("trommel.toml"), text).unwrap();
    assert_code(&cascade(&folder, &prompt, "rows.parquet").run(), 0);
    let rows = rows(&folder.path("rows.parquet"));
    assert_each_index_once(&rows, 40);
    // So few are all sampled.
    assert_eq!(by(&rows, "sample").len(), 40);
    assert!(rows.iter().all(|row| row.label.as_deref() == Some("7")));
    assert!(rows.iter().all(|row| row.columns["prompt_tokens"] == "100"));
}

#[test]
fn what_is_no_cascade_is_refused_with_the_remedy() {
    let folder = Folder::with_digits(2);
    let base = |models: &[&Path]| {
        let mut run = Trommel::new(["classify"]).arg(folder.images());
        for model in models {
            run = run.arg("--model").arg(model);
        }
        run.arg("--output").arg(folder.path("rows.parquet"))
    };
    let (small, large) = (small(), digits_model());
    for (run, words) in [
        (
            base(&[&small, &large]),
            "several models cannot write one file",
        ),
        (base(&[&small]).args(["--agree", "0.9"]), "two models"),
        (
            base(&[&small, &large, &large]).args(["--agree", "0.9"]),
            "two models",
        ),
        (
            base(&[&small, &large]).args(["--agree", "1.5"]),
            "0.5 to below 1",
        ),
        (
            base(&[&small, &large]).args(["--agree", "0.9", "--logits"]),
            "--logits",
        ),
    ] {
        let run = run.run();
        let said = stderr(&run);
        assert!(
            !run.status.success() && said.contains(words),
            "{words}: {said}"
        );
        assert!(!folder.path("rows.parquet").exists());
        assert!(!folder.path("rows.parquet.parts").exists());
    }
}
