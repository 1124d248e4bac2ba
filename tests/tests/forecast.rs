//! The forecast of a job, and its comparison with the actual figures.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Stdio;

use serde_json::{Value, json};
use trommel_tests::{
    Cluster, Folder, PIPELINE, Trommel, assert_code, assert_each_index_once, rows, stderr,
};

const PRICES: &str = "infer=2.10/h,preprocess=0.04/core-h,machine=3600/h";

fn parsed(stdout: &[u8]) -> Value {
    serde_json::from_slice(stdout).unwrap()
}

#[test]
fn a_dry_run_says_hours_bytes_and_a_price_and_the_job_is_compared_with_it() {
    let folder = Folder::with_digits(700);
    let output = folder.path("rows.parquet");
    let cache = folder.path("cache");
    let run = |args: &[&str]| {
        Trommel::classify(&folder.images(), &output)
            .env("XDG_CACHE_HOME", cache.to_str().unwrap())
            .args(args)
            .run()
    };
    let dry = run(&["--dry-run", "--json", "--price", PRICES]);
    assert_code(&dry, 0);
    let said = parsed(&dry.stdout);
    assert_eq!(
        (&said["images"], &said["all_counted"]),
        (&json!(700), &json!(true))
    );
    assert_eq!(said["sample"], json!({"ok": 512, "failed": 0}));
    let number = |name: &str| said[name].as_f64().unwrap();
    let seconds = number("eta_seconds");
    assert!(
        number("low_seconds") <= seconds && seconds <= number("high_seconds"),
        "{said}"
    );
    let expected = number("startup_seconds") + 700.0 / number("images_per_second");
    assert!((seconds - expected).abs() < 1e-6, "{said}");
    let bytes: u64 = std::fs::read_dir(folder.images())
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    let read = number("bytes_read");
    assert!((read / bytes as f64 - 1.0).abs() < 0.2, "{read} of {bytes}");
    assert!(number("bytes_written") > 0.0);
    // A machine at 3600 an hour costs as much as it takes seconds.
    let total = said["cost"]["total"].as_f64().unwrap();
    assert!(total > seconds && total < 1.1 * seconds, "{said}");
    assert!(!output.exists(), "nothing is stored");

    let job = run(&["--json", "--price", PRICES]);
    assert_code(&job, 0);
    let came = parsed(&job.stdout)["run"].clone();
    assert_eq!(came["forecast"]["said"]["images"], 700);
    let (took, off) = (&came["forecast"]["seconds"], &came["forecast"]["off"]);
    let expected = took.as_f64().unwrap() / seconds - 1.0;
    assert!((off.as_f64().unwrap() - expected).abs() < 1e-6, "{came}");
    assert!(came["cost"].as_f64().unwrap() > 0.0);
    assert_each_index_once(&rows(&output), 700);

    let shown = run(&["--overwrite", "--price", PRICES]);
    assert!(stderr(&shown).contains("forecast "), "{}", stderr(&shown));
}

#[test]
fn a_dry_run_for_people_has_a_line_for_each_answer() {
    let folder = Folder::with_digits(60);
    let output = folder.path("rows.parquet");
    let dry = Trommel::classify(&folder.images(), &output)
        .args(["--dry-run", "--price", "infer=2.10/h"])
        .run();
    assert_code(&dry, 0);
    let words = String::from_utf8(dry.stdout).unwrap();
    for line in [
        "images      60\n",
        "sample      60 ok",
        "time  ",
        "read  ",
        "cost        $",
    ] {
        assert!(words.contains(line), "{line}: {words}");
    }
}

#[test]
fn what_cannot_be_foretold_is_refused_with_the_remedy() {
    let folder = Folder::with_digits(1);
    let output = folder.path("rows.parquet");
    let refused = |args: &[&str], words: &str| {
        let run = Trommel::classify(&folder.images(), &output)
            .args(args)
            .run();
        assert_code(&run, 2);
        assert!(stderr(&run).contains(words), "{}", stderr(&run));
    };
    refused(&["--max-cost", "3"], "give them with --price");
    refused(&["--price", "gpu=3/h"], "infer=2.10/h");
    refused(&["--price", "infer=3/h,infer=4/h"], "two prices");
    refused(&["--dry-run", "-"], "give the list as a file");
    let run = Trommel::classify(&folder.images(), &output)
        .arg("--dry-run")
        .run();
    assert_code(&run, 1);
    assert!(stderr(&run).contains("too few images"), "{}", stderr(&run));
}

/// Starts a job whose list never ends, and returns what it said when it was ended.
fn ended_by(folder: &Folder, args: &[&str]) -> String {
    let mut command = Trommel::new(["classify", "-", "--model"])
        .arg(trommel_tests::digits_model())
        .arg("--output")
        .arg(folder.path("rows.parquet"))
        .args(args)
        .into_command();
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let open = child.stdin.take();
    let ended = child.wait_with_output().unwrap();
    drop(open);
    assert_code(&ended, 1);
    stderr(&ended)
}

#[test]
fn time_and_money_end_a_job_of_this_machine() {
    let folder = Folder::new();
    let said = ended_by(&folder, &["--max-runtime", "1s"]);
    assert!(said.contains("reached --max-runtime 1s"), "{said}");
    assert!(
        said.contains("run the same command again to resume"),
        "{said}"
    );
    let said = ended_by(
        &folder,
        &["--max-cost", "1", "--price", "machine=3600000/h"],
    );
    assert!(said.contains("reached --max-cost $1.00"), "{said}");
}

#[test]
fn money_ends_a_job_of_the_fleet() {
    let folder = Folder::with_digits(20);
    // Nobody infers, so that the job does not end before.
    let cluster = Cluster::with(&["ingest", "preprocess", "sink"]);
    let output = folder.path("rows/");
    let job = cluster
        .submit(folder.images().to_str().unwrap(), output.to_str().unwrap())
        .args([
            "--id",
            "dear",
            "--wait",
            "--max-cost",
            "0.01",
            "--price",
            "sink=36000/h",
        ]);
    let job = cluster.run_to_end(job);
    cluster.assert_code(&job, 1);
    assert!(
        stderr(&job).contains("cost as much as it may: 0.01"),
        "{}",
        stderr(&job)
    );
    let shown = cluster.command(["jobs", "show", "dear", "--json"]).run();
    let shown = parsed(&shown.stdout);
    assert_eq!(shown["reason"]["kind"], "max_cost");
    assert!(shown["cost"].as_f64().unwrap() >= 0.01, "{shown}");
}

#[test]
fn a_job_of_the_fleet_is_compared_with_its_dry_run() {
    let folder = Folder::with_digits(120);
    let mut cluster = Cluster::with(&PIPELINE);
    let cache = folder.path("cache");
    cluster.set_env("XDG_CACHE_HOME", cache.to_str());
    let output = folder.path("rows/");
    let submit = |args: &[&str]| {
        let (source, output) = (folder.images(), output.to_str().unwrap());
        let command = cluster.submit(source.to_str().unwrap(), output);
        cluster.run_to_end(command.args(["--price", "infer=2.10/h"]).args(args))
    };
    let dry = submit(&["--dry-run", "--json"]);
    cluster.assert_code(&dry, 0);
    let said = parsed(&dry.stdout);
    assert!(said["cost"]["total"].as_f64().unwrap() > 0.0, "{said}");
    let job = submit(&["--id", "real", "--wait", "--json"]);
    cluster.assert_code(&job, 0);
    let came = parsed(&job.stdout);
    assert_eq!(came["forecast"]["seconds"], said["eta_seconds"]);
    assert!(came["cost"].as_f64().is_some(), "{came}");
    let shown = cluster.command(["jobs", "show", "real"]).run();
    let words = String::from_utf8(shown.stdout).unwrap();
    assert!(words.contains("forecast "), "{words}");
}
