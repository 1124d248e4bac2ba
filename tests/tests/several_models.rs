//! `trommel classify` with several models: each image is read once, and each model has its own rows.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use trommel_sink::ResultRow;
use trommel_storage::testsuite::{PostgresServer, Reply, WebServer};
use trommel_tests::{
    Folder, Trommel, assert_code, assert_each_index_once, assert_same_rows, digits, digits_model,
    eventually, root, rows, stderr,
};

/// A model with other weights and the same classes.
fn small() -> PathBuf {
    root().join("tests/models/digits-small")
}

fn both(source: &Path, output: &Path) -> Trommel {
    Trommel::classify(source, output)
        .arg("--model")
        .arg(small())
}

fn one(source: &Path, model: &Path, output: &Path) -> Trommel {
    Trommel::new(["classify"])
        .arg(source)
        .arg("--model")
        .arg(model)
        .arg("--output")
        .arg(output)
}

/// The rows of both models in a folder.
fn rows_of_both(output: &Path) -> [Vec<ResultRow>; 2] {
    ["digits", "digits-small"].map(|model| rows(&output.join(model)))
}

/// The rows as each model gives them alone.
fn rows_of_each(source: &Path, folder: &Folder) -> [Vec<ResultRow>; 2] {
    [digits_model(), small()].map(|model| {
        let name = model.file_name().unwrap().to_str().unwrap();
        let output = folder.path(&format!("alone-{name}.jsonl"));
        assert_code(&one(source, &model, &output).run(), 0);
        rows(&output)
    })
}

#[test]
fn an_image_is_fetched_once_and_each_model_gives_the_rows_that_it_gives_alone() {
    const IMAGES: usize = 60;
    let folder = Folder::new();
    let files = digits();
    let contents: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let server = WebServer::start(move |asked| {
        let number = asked.target[1..].trim_end_matches(".png");
        let number: usize = number.parse().unwrap();
        Reply::object(asked, &contents[number % contents.len()], "\"1\"")
    });
    let urls = (0..IMAGES).map(|number| server.url(&format!("/{number}.png")) + "\n");
    let (list, output) = (folder.path("urls.txt"), folder.path("rows"));
    fs::write(&list, urls.collect::<String>()).unwrap();
    let run = both(&list, &output)
        .env("TROMMEL_HTTP__ALLOW_PRIVATE", "true")
        .run();
    assert_code(&run, 0);
    assert_eq!(server.requests(), IMAGES as u64);

    let local: String = files
        .iter()
        .cycle()
        .take(IMAGES)
        .map(|file| format!("{}\n", file.display()))
        .collect();
    fs::write(folder.path("files.txt"), local).unwrap();
    let expected = rows_of_each(&folder.path("files.txt"), &folder);
    for (found, expected) in rows_of_both(&output).iter().zip(&expected) {
        assert_each_index_once(found, IMAGES);
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.label, expected.label);
            assert!((found.score.unwrap() - expected.score.unwrap()).abs() < 1e-4);
        }
    }
}

#[test]
fn killed_runs_leave_one_row_for_each_image_and_model() {
    let folder = Folder::with_digits(3000);
    fs::write(folder.images().join("000007-broken.jpg"), "text").unwrap();
    let expected = rows_of_each(&folder.images(), &folder);
    let output = folder.path("rows");
    let command = || {
        both(&folder.images(), &output)
            .args(["--preprocess-threads", "1"])
            .env("TROMMEL_SINK__PART_ROWS", "100")
    };
    let parts = |model: &str| fs::read_dir(output.join(model)).map_or(0, Iterator::count);
    let mut killed = 0;
    for wanted in [3, 9] {
        let mut run = command().spawn();
        let ended = eventually("parts of both are committed, or all is done", || {
            let ended = run.try_wait().unwrap().is_some();
            let enough = parts("digits").min(parts("digits-small")) >= wanted;
            (ended || enough).then_some(ended)
        });
        run.kill().unwrap();
        run.wait().unwrap();
        killed += u32::from(!ended);
    }
    assert!(killed > 0, "it was too quick to be killed");
    let run = command().run();
    assert_code(&run, 0);
    let text = stderr(&run);
    assert!(text.contains("3,001 images by 2 models in "), "{text}");
    assert!(text.contains("digits: 3,000 ok, 1 failed → "), "{text}");
    assert!(
        text.contains("digits-small: 3,000 ok, 1 failed → "),
        "{text}"
    );
    for (found, expected) in rows_of_both(&output).iter().zip(&expected) {
        assert_same_rows(found, expected);
    }
    let again = command().run();
    assert_code(&again, 0);
    assert!(
        stderr(&again).contains("already complete"),
        "{}",
        stderr(&again)
    );
}

#[test]
fn a_model_whose_rows_are_complete_is_not_run_again() {
    let folder = Folder::with_digits(40);
    let (output, of_small) = (folder.path("rows"), folder.path("rows/digits-small/"));
    assert_code(&one(&folder.images(), &small(), &of_small).run(), 0);
    let files = || -> Vec<_> {
        let names = fs::read_dir(&of_small).unwrap();
        let mut names: Vec<_> = names.map(|name| name.unwrap().path()).collect();
        names.retain(|name| !name.ends_with("_lock")); // has the id of the last process
        names.sort();
        let read = |path: PathBuf| (fs::read(&path).unwrap(), path);
        names.into_iter().map(read).collect()
    };
    let before = files();
    let run = both(&folder.images(), &output).arg("--json").run();
    assert_code(&run, 0);
    let summary: Value = serde_json::from_slice(&run.stdout).unwrap();
    let model = |index: usize| &summary["models"][index];
    assert_eq!(model(0)["model"], "digits");
    assert_eq!(model(0)["engine"]["images"], 40);
    assert_eq!(model(1)["model"], "digits-small");
    assert_eq!(model(1)["engine"], Value::Null);
    assert_eq!((&model(0)["ok"], &model(1)["ok"]), (&40.into(), &40.into()));
    assert!(files() == before, "its files have changed");
    assert_each_index_once(&rows(&output.join("digits")), 40);
}

#[test]
fn rows_of_both_models_go_to_standard_output_or_into_one_table() {
    let folder = Folder::with_digits(50);
    let run = Trommel::new(["classify"])
        .arg(folder.images())
        .arg("--model")
        .arg(digits_model())
        .arg("--model")
        .arg(small())
        .run();
    assert_code(&run, 0);
    let lines = String::from_utf8(run.stdout).unwrap();
    let rows: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for model in ["digits", "digits-small"] {
        let own = rows.iter().filter(|row| row["model"] == model);
        let mut indices: Vec<_> = own.map(|row| row["index"].as_u64().unwrap()).collect();
        indices.sort_unstable();
        assert_eq!(indices, (0..50).collect::<Vec<_>>(), "{model}");
    }
    assert_eq!(rows.len(), 100);

    let database = PostgresServer::start();
    let url = database.url_without_password("labels");
    let run = both(&folder.images(), Path::new(&url))
        .env("PGPASSWORD", database.password())
        .run();
    assert_code(&run, 0);
    assert_eq!(
        database.query(
            "SELECT model, count(*), count(DISTINCT index) FROM labels GROUP BY model ORDER BY model"
        ),
        "digits|50|50\ndigits-small|50|50"
    );
}

#[test]
fn a_dry_run_estimates_both() {
    let folder = Folder::with_digits(60);
    let run = both(&folder.images(), &folder.path("rows"))
        .args(["--dry-run", "--json"])
        .run();
    assert_code(&run, 0);
    let expected: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(expected["images"], 60);
    assert!(
        expected["images_per_second"].as_f64().unwrap() > 0.0,
        "{expected}"
    );
    assert!(!folder.path("rows").exists());
}

#[test]
fn what_would_mix_rows_is_refused_by_name() {
    let folder = Folder::with_digits(3);
    let same = folder.path("other/digits");
    fs::create_dir_all(&same).unwrap();
    for file in fs::read_dir(small()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), same.join(file.file_name())).unwrap();
    }
    let output = folder.path("rows");
    let refused = |run: Trommel, expected: &[&str]| {
        let run = run.run();
        assert_code(&run, 2);
        let text = stderr(&run);
        for expected in expected {
            assert!(text.contains(expected), "{text} lacks {expected}");
        }
    };
    let twice = Trommel::classify(&folder.images(), &output).arg("--model");
    refused(
        twice.arg(&same),
        &["two models are called digits", "rename the folder"],
    );
    refused(
        both(&folder.images(), &folder.path("rows.parquet")),
        &[
            "rows.parquet",
            "several models cannot write one file",
            "ends with /",
        ],
    );
    refused(
        both(&folder.images(), &output).arg("--skip-existing"),
        &[
            "--skip-existing works for one model at a time",
            "rows/digits-small",
        ],
    );
    refused(
        both(&folder.images(), &output).args(["--retry-failed"]),
        &[
            "--retry-failed works for one model at a time",
            "rows/digits",
        ],
    );
    refused(
        both(&folder.images(), &output)
            .arg("--model")
            .arg(&same)
            .args(["--agree", "0.99"]),
        &["--agree needs two models"],
    );
    assert!(!output.exists());
}
