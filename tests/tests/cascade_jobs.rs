//! Cascades over a broker: the same rows as `trommel classify --agree`, whoever is killed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use trommel_queue::Stream;
use trommel_sink::ResultRow;
use trommel_storage::testsuite::S3Server;
use trommel_tests::{
    Cluster, Folder, Trommel, assert_code, assert_each_index_once, digits_model, root, rows, stderr,
};

const SAMPLE: &str = "1200";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn small_model() -> PathBuf {
    root().join("tests/models/digits-small")
}

/// A repository of the models `small` and `large`.
fn repository(folder: &Folder) -> PathBuf {
    let models = folder.path("models");
    let own = ["config.json", "preprocessor_config.json"];
    for (name, from, files) in [
        ("small", small_model(), &["trommel.toml"][..]),
        ("large", digits_model(), &own),
    ] {
        std::fs::create_dir_all(models.join(name)).unwrap();
        for file in files.iter().chain(&["model.onnx"]) {
            std::fs::copy(from.join(file), models.join(name).join(file)).unwrap();
        }
    }
    models
}

fn cluster(folder: &Folder) -> Cluster {
    let mut cluster = Cluster::new();
    cluster.set_repository(&repository(folder));
    cluster
}

/// Each role in a process of its own.
fn start(cluster: &mut Cluster) {
    for role in ["ingest", "preprocess", "infer", "sink"] {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
}

fn submit(cluster: &Cluster, source: &str, output: &str, id: &str) -> Trommel {
    cluster
        .command(["submit", source, "--output", output, "--id", id])
        .args(["--model", "small,large"])
        .args(["--agree", "0.99", "--agree-sample", SAMPLE])
}

/// The rows and the rule of `trommel classify`.
fn embedded(folder: &Folder, large: &Path) -> (Vec<ResultRow>, Value) {
    let output = folder.path("whole.parquet");
    let run = Trommel::new(["classify"])
        .arg(folder.images())
        .arg("--model")
        .arg(folder.path("models/small"))
        .arg("--model")
        .arg(large)
        .arg("--output")
        .arg(&output)
        .args(["--agree", "0.99", "--agree-sample", SAMPLE, "--json"])
        .run();
    assert_code(&run, 0);
    let summary: Value = serde_json::from_slice(&run.stdout).unwrap();
    (rows(&output), summary["run"]["cascade"].clone())
}

fn status(cluster: &Cluster, id: &str) -> Value {
    let shown = cluster.command(["jobs", "show", id, "--json"]).run();
    cluster.assert_code(&shown, 0);
    serde_json::from_slice(&shown.stdout).unwrap()
}

/// Fails unless both decided each image in the same way.
fn assert_same(found: &[ResultRow], expected: &[ResultRow]) {
    assert_each_index_once(found, expected.len());
    let word = |row: &ResultRow| row.columns.get("decided_by").cloned();
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.label, expected.label, "{found:?}");
        assert_eq!(word(found), word(expected), "{found:?}");
    }
}

fn count(rows: &[ResultRow], word: &str) -> usize {
    let is_by = |row: &&ResultRow| row.columns.get("decided_by").is_some_and(|by| by == word);
    rows.iter().filter(is_by).count()
}

#[test]
fn workers_decide_as_classify_does_and_say_what_was_saved() {
    let folder = Folder::with_digits(4000);
    std::fs::write(folder.images().join("x.jpg"), "text").unwrap();
    let mut cluster = cluster(&folder);
    let (expected, rule) = embedded(&folder, &folder.path("models/large"));
    start(&mut cluster);
    let output = folder.path("rows/");
    let submitted = submit(&cluster, text(&folder.images()), text(&output), "both").arg("--wait");
    let run = cluster.run_to_end(submitted);
    cluster.assert_code(&run, 0);
    let said = String::from_utf8(run.stdout).unwrap();
    assert!(said.contains("by the small model alone"), "{said}");
    assert!(said.contains("agreement: "), "{said}");
    let found = rows(&output);
    assert_same(&found, &expected);
    let job = status(&cluster, "both");
    assert_eq!(job["models"][0]["name"], "small+large");
    assert_eq!(job["cascade"]["learned"]["rule"], rule["rule"]);
    assert_eq!(
        job["cascade"]["decided"],
        json!({
            "sample": count(&found, "sample"),
            "small": count(&found, "small"),
            "large": count(&found, "large"),
        })
    );
    assert!(count(&found, "small") > 1000, "nothing was saved: {job}");
    let retried = cluster.command(["jobs", "retry", "both"]).run();
    assert_code(&retried, 2);
    assert!(stderr(&retried).contains("is a cascade"));
    // The same request again is the same job, and the rule is forgotten with its job only.
    let again = submit(&cluster, text(&folder.images()), text(&output), "both").run();
    assert!(stderr(&again).contains("submitted before"));
    cluster.assert_nothing_left();
}

/// Kills each role while the sample is classified, while it is waited for, and after it.
fn kill_everybody(ignores_preconditions: bool) {
    let folder = Folder::with_digits(2500);
    let server = S3Server::start();
    server.ignore_preconditions(ignores_preconditions);
    folder.upload(&server, "photos");
    let mut cluster = cluster(&folder).s3(&server);
    let (expected, _) = embedded(&folder, &folder.path("models/large"));
    cluster.set_env("TROMMEL_SINK__PART_ROWS", Some("50"));
    start(&mut cluster);
    // So that the job has not ended before the last kill.
    server.slow_down_images(Duration::from_millis(100));
    let run = submit(&cluster, "s3://photos/images/", "s3://photos/rows/", "both").run();
    cluster.assert_code(&run, 0);
    for role in ["infer", "sink", "preprocess", "ingest"] {
        cluster.await_rows("both", 0);
        let victim = cluster.of_role(role)[0];
        cluster.kill_and_restart(victim);
    }
    server.slow_down_images(Duration::from_millis(20));
    cluster.eventually("the rule is learned", || {
        let job = cluster.command(["jobs", "show", "both", "--json"]).run();
        let job: Value = serde_json::from_slice(&job.stdout).ok()?;
        job["cascade"]["learned"].is_object().then_some(())
    });
    server.slow_down_images(Duration::from_millis(100));
    for role in ["ingest", "infer", "sink", "preprocess", "ingest"] {
        let (state, _) = cluster.progress("both");
        assert_eq!(state, "running", "it was too quick to be killed");
        let victim = cluster.of_role(role)[0];
        cluster.kill_and_restart(victim);
    }
    server.slow_down_images(Duration::ZERO);
    let watched = cluster.run_to_end(cluster.command(["jobs", "watch", "both"]));
    cluster.assert_code(&watched, 0);
    let found = rows(&server.path("photos", "rows"));
    assert_same(&found, &expected);
    let decided = &status(&cluster, "both")["cascade"]["decided"];
    let all = ["sample", "small", "large"].map(|word| decided[word].as_u64().unwrap());
    assert_eq!(all.iter().sum::<u64>(), 2500);
}

#[test]
fn kills_in_every_phase_leave_one_row_each_by_one_rule() {
    kill_everybody(false);
}

#[test]
fn kills_in_every_phase_where_preconditions_are_ignored() {
    kill_everybody(true);
}

#[test]
fn a_cascade_in_a_message_runs_next_to_a_job_of_its_small_model() {
    let folder = Folder::with_digits(2000);
    let mut cluster = cluster(&folder);
    let (expected, _) = embedded(&folder, &folder.path("models/large"));
    cluster.start("ingest,sink", &[]);
    cluster.start("preprocess,infer", &["--tensor-hop", "local"]);
    cluster.await_ready();
    let (images, output) = (folder.images(), folder.path("rows/"));
    let job = json!({
        "id": "both",
        "sources": [text(&images)],
        "models": ["small", "large"],
        "output": text(&output),
        "cascade": {"agree": 0.99, "sample": 1200},
    });
    cluster.publish("trommel.jobs.normal", job.to_string().as_bytes());
    let alone = folder.path("alone/");
    let run = cluster
        .command(["submit", text(&images), "--model", "small", "--wait"])
        .args(["--output", text(&alone)])
        .run();
    cluster.assert_code(&run, 0);
    let alone = rows(&alone);
    assert_each_index_once(&alone, 2000);
    assert!(alone.iter().all(|row| row.columns.is_empty()));
    let watched = cluster.run_to_end(cluster.command(["jobs", "watch", "both"]));
    cluster.assert_code(&watched, 0);
    let found = rows(&output);
    assert_same(&found, &expected);
    for (row, small) in found.iter().zip(&alone) {
        assert_eq!(row.columns.get("small_label"), small.label.as_ref());
    }
    cluster.assert_nothing_left();
}

/// The broker loses the tasks of the sample: they are queued again.
#[test]
fn a_lost_sample_is_queued_again() {
    let folder = Folder::with_digits(600);
    let mut cluster = cluster(&folder);
    let (expected, _) = embedded(&folder, &folder.path("models/large"));
    cluster.start("ingest", &[]);
    cluster.await_ready();
    let (images, output) = (folder.images(), folder.path("rows/"));
    let run = submit(&cluster, text(&images), text(&output), "both").run();
    cluster.assert_code(&run, 0);
    cluster.eventually("the sample is listed", || {
        let checkpoint = cluster.checkpoint("both")?;
        (checkpoint["listing"]["waits"] == true).then_some(())
    });
    let why = cluster.command(["jobs", "why", "both"]).run();
    let why = String::from_utf8(why.stdout).unwrap();
    assert!(why.contains("of the cascade's sample are listed"), "{why}");
    cluster.purge(Stream::Tasks);
    cluster.start("preprocess,infer,sink", &[]);
    cluster.await_ready();
    let watched = cluster.run_to_end(cluster.command(["jobs", "watch", "both"]));
    cluster.assert_code(&watched, 0);
    assert_same(&rows(&output), &expected);
    assert_eq!(
        cluster.checkpoint("both").unwrap()["listing"]["generation"],
        1
    );
}

#[test]
fn what_workers_cannot_run_as_a_cascade_is_refused_and_its_job_only() {
    let folder = Folder::with_digits(10);
    let mut cluster = cluster(&folder);
    cluster.start("ingest,preprocess,infer,sink", &[]);
    cluster.await_ready();
    let (images, output) = (folder.images(), folder.path("rows/"));
    let with = |words: &[&str]| {
        let submit = cluster.command(["submit", text(&images), "--output", text(&output)]);
        let run = submit.args(words.iter().copied()).run();
        assert_code(&run, 2);
        stderr(&run)
    };
    for (words, said) in [
        (
            &["--model", "small", "--agree", "0.99"][..],
            "name two models",
        ),
        (&["--model", "small,large", "--agree", "1"], "below 1"),
        (
            &["--model", "small,large", "--agree", "0.9", "--logits"],
            "leave out logits",
        ),
        (
            &["--model", "small,large", "--agree-sample", "9"],
            "--agree <SHARE>",
        ),
        (&["--model", "small,none", "--agree", "0.9"], "none"),
    ] {
        let answer = with(words);
        assert!(answer.contains(said), "{words:?}: {answer}");
    }
    // By other publishers, directly into the queue.
    for (id, cascade, said) in [
        ("share", json!({"agree": 2.0}), "cascade.agree"),
        (
            "sample",
            json!({"agree": 0.9, "sample": 0}),
            "cascade.sample",
        ),
    ] {
        let job = json!({
            "id": id,
            "sources": [text(&images)],
            "models": ["small", "large"],
            "output": text(&output),
            "cascade": cascade,
        });
        cluster.publish("trommel.jobs.normal", job.to_string().as_bytes());
        cluster.eventually("the job has failed", || {
            let shown = cluster.command(["jobs", "show", id, "--json"]).run();
            let job: Value = serde_json::from_slice(&shown.stdout).ok()?;
            let reason = job["reason"]["text"].as_str()?;
            assert!(reason.contains(said), "{reason}");
            (job["state"] == "failed").then_some(())
        });
    }
    let good = folder.path("good/");
    let run = cluster
        .command(["submit", text(&images), "--model", "small", "--wait"])
        .args(["--output", text(&good)])
        .run();
    cluster.assert_code(&run, 0);
    cluster.assert_all_alive();
}
