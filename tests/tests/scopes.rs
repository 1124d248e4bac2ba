//! A fault has a scope: what one job is at fault for ends that job, and the others continue.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use trommel_queue::Stream;
use trommel_tests::{Cluster, Folder, Signal, assert_each_index_once, digits_model, rows, stderr};

const ALL: &str = "ingest,preprocess,infer,sink";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn show(cluster: &Cluster, id: &str) -> Value {
    let run = cluster.command(["jobs", "show", id, "--json"]).run();
    cluster.assert_code(&run, 0);
    serde_json::from_slice(&run.stdout).unwrap()
}

/// Waits until a job has failed; gives why.
fn failed(cluster: &Cluster, id: &str) -> String {
    let status = cluster.eventually("the job fails", || {
        let run = cluster.command(["jobs", "show", id, "--json"]).run();
        let status: Value = serde_json::from_slice(&run.stdout).ok()?;
        assert_ne!(status["state"], "complete", "{status}");
        (status["state"] == "failed").then_some(status)
    });
    status["reason"]["text"].as_str().unwrap().to_owned()
}

/// A repository with the shipped model and some that cannot be used.
fn models(folder: &Folder) -> std::path::PathBuf {
    let models = folder.path("models");
    for name in ["digits", "garbage", "malformed", "shapeless"] {
        std::fs::create_dir_all(models.join(name)).unwrap();
        for file in ["model.onnx", "config.json", "preprocessor_config.json"] {
            std::fs::copy(digits_model().join(file), models.join(name).join(file)).unwrap();
        }
    }
    let onnx = std::fs::read(digits_model().join("model.onnx")).unwrap();
    std::fs::write(models.join("garbage/model.onnx"), &onnx[..onnx.len() / 2]).unwrap();
    // An error of several lines.
    let toml = "[preprocess]\ncrop = false\n";
    std::fs::write(models.join("malformed/trommel.toml"), toml).unwrap();
    std::fs::write(
        models.join("shapeless/trommel.toml"),
        "[preprocess]\nshortest-edge = 32\n",
    )
    .unwrap();
    models
}

/// R14: each of these ended every infer or preprocess worker in turn.
#[test]
fn a_model_that_cannot_be_used_ends_its_job_and_nothing_else() {
    let folder = Folder::with_digits(300);
    let models = models(&folder);
    let mut cluster = Cluster::new();
    cluster.set_repository(&models);
    for role in ["ingest,sink", "preprocess", "infer"] {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let images = folder.images();
    for model in ["garbage", "malformed", "shapeless"] {
        let submitted = cluster
            .command(["submit", text(&images), "--model", model, "--id", model])
            .args(["--output", text(&folder.path(&format!("{model}-rows/")))])
            .run();
        if submitted.status.code() == Some(0) {
            let reason = failed(&cluster, model);
            assert!(
                reason.contains(model) || reason.contains("model"),
                "{reason}"
            );
        } else {
            let said = stderr(&submitted);
            assert!(said.contains(model), "{said}");
        }
    }
    let output = folder.path("rows/");
    cluster.classify(text(&images), text(&output));
    assert_each_index_once(&rows(&output), 300);
    cluster.assert_all_alive();
}

/// R59, R17: a job whose output takes no rows says so, and the others continue.
#[test]
fn an_output_that_cannot_be_reached_holds_nobody_up_and_is_named() {
    let folder = Folder::with_digits(200);
    let mut cluster = Cluster::new().env("TROMMEL_SINK__PATIENCE", "3s");
    cluster.allow_output("postgres://127.0.0.1:1/nowhere");
    cluster.start(ALL, &[]);
    cluster.await_ready();
    let images = folder.images();
    let dead = cluster
        .submit(
            text(&images),
            "postgres://nobody@127.0.0.1:1/nowhere?table=t",
        )
        .args(["--id", "dead"])
        .run();
    cluster.assert_code(&dead, 0);
    let output = folder.path("rows/");
    cluster.classify(text(&images), text(&output));
    assert_each_index_once(&rows(&output), 200);
    let reason = failed(&cluster, "dead");
    assert!(reason.contains("127.0.0.1"), "{reason}");
    cluster.assert_all_alive();
}

/// R5: cancelled, and submitted again with --overwrite, rows of two jobs were mixed in 6 of 8 tries.
#[test]
fn a_cancelled_job_leaves_no_row_in_the_job_that_overwrites_it() {
    let folder = Folder::with_digits(6000);
    // A short queue and small parts: it is caught with some rows and not all.
    let mut cluster = Cluster::new()
        .env("TROMMEL_BROKER__TASKS_MAX_MESSAGES", "50")
        .env("TROMMEL_SINK__PART_ROWS", "50");
    for role in ["ingest,sink", "preprocess,infer"] {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let (images, output) = (folder.images(), folder.path("rows/"));
    for round in 0..3 {
        let (old, new) = (format!("old-{round}"), format!("new-{round}"));
        let submit = |id: &str| {
            let run = cluster
                .submit(text(&images), text(&output))
                .args(["--overwrite", "--id", id])
                .run();
            cluster.assert_code(&run, 0);
        };
        submit(&old);
        cluster.await_rows(&old, 0);
        let cancelled = cluster.command(["jobs", "cancel", &old]).run();
        cluster.assert_code(&cancelled, 0);
        submit(&new);
        let watched = cluster.command(["jobs", "watch", &new]).run();
        cluster.assert_code(&watched, 0);
        let found = rows(&output);
        assert_each_index_once(&found, 6000);
        assert_eq!(found.len(), 6000, "round {round}");
        // Other readers of the folder see the same.
        let parts = std::fs::read_dir(&output).unwrap().filter_map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            name.starts_with("part-").then_some(name)
        });
        let runs: std::collections::HashSet<_> = parts
            .map(|name| name.split('-').nth(2).map(str::to_owned))
            .collect();
        assert_eq!(runs.len(), 1, "{runs:?}");
    }
}

/// R6: two jobs wrote to one output at once, and one lost its parts.
#[test]
fn an_output_belongs_to_one_job_at_a_time() {
    let folder = Folder::with_digits(50);
    let mut cluster = Cluster::new();
    // Without infer the first job cannot end.
    cluster.start("ingest,preprocess,sink", &[]);
    cluster.await_ready();
    let (images, output) = (folder.images(), folder.path("rows/"));
    let submit = |id: &str| {
        let run = cluster
            .submit(text(&images), text(&output))
            .args(["--id", id, "--overwrite"])
            .run();
        cluster.assert_code(&run, 0);
    };
    submit("first");
    cluster.eventually("the first runs", || {
        (show(&cluster, "first")["state"] == "running").then_some(())
    });
    submit("second");
    let reason = failed(&cluster, "second");
    assert!(reason.contains("first"), "{reason}");
}

/// R16, R22, R23: ids, uris and images that no message, subject or record can hold.
#[test]
fn what_no_message_can_hold_costs_a_row_or_its_job() {
    let folder = Folder::with_digits(20);
    let mut cluster = Cluster::new();
    cluster.start(ALL, &[]);
    cluster.await_ready();
    let images = folder.images();
    // Uris of 600 KB and of more than a message holds in a list of four: two failed rows.
    let one = std::fs::read_dir(&images)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let list = folder.path("list.txt");
    let (long, longer) = ("x".repeat(600_000), "y".repeat(1_048_570));
    let one = text(&one);
    std::fs::write(&list, format!("{one}\n{long}\n{longer}\n{one}\n")).unwrap();
    let output = folder.path("long/");
    cluster.classify(text(&list), text(&output));
    let mut found = rows(&output);
    assert_each_index_once(&found, 4);
    found.sort_by_key(|row| row.index);
    let failed: Vec<_> = found.iter().map(|row| row.status == "failed").collect();
    assert_eq!(failed, [false, true, true, false]);
    assert_eq!(found[2].error_kind.as_deref(), Some("too_large"));
    assert!(found[2].uri.len() < 2000, "{}", found[2].uri.len());
    // An id of 6,000 letters: a job that failed, where its sender can find it.
    let job = |id: &str, output: &str| json!({"id": id, "sources": [text(&images)], "models": ["digits"], "output": output});
    let long_id = job(&"a".repeat(6000), text(&folder.path("id/")));
    cluster.publish("trommel.jobs.normal", long_id.to_string().as_bytes());
    cluster.eventually("the job is listed as failed", || {
        let run = cluster.command(["jobs", "list", "--json"]).run();
        let jobs: Value = serde_json::from_slice(&run.stdout).ok()?;
        let mut jobs = jobs.as_array()?.iter();
        let is_it = |job: &&Value| {
            let id = job["id"].as_str().unwrap_or_default();
            id.starts_with("invalid-") && job["state"] == "failed"
        };
        jobs.find(is_it).map(|_| ())
    });
    let output = folder.path("rows/");
    cluster.classify(text(&images), text(&output));
    assert_each_index_once(&rows(&output), 20);
    cluster.assert_nothing_left();
    cluster.assert_all_alive();
}

/// What the broker has lost is found and queued again automatically.
#[test]
fn images_that_the_broker_has_lost_are_queued_again() {
    let folder = Folder::with_digits(60);
    let mut cluster = Cluster::new().env("TROMMEL_BROKER__ACK_WAIT", "2s");
    cluster.start("ingest", &[]);
    cluster.await_ready();
    let (images, output) = (folder.images(), folder.path("rows/"));
    let submitted = cluster
        .submit(text(&images), text(&output))
        .args(["--id", "lost"])
        .run();
    cluster.assert_code(&submitted, 0);
    cluster.eventually("all are listed", || {
        (show(&cluster, "lost")["total"] == 60).then_some(())
    });
    // As a broker that is restored from a backup of before.
    cluster.purge(Stream::Tasks);
    for role in ["preprocess", "infer", "sink"] {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let watched = cluster.command(["jobs", "watch", "lost"]).run();
    cluster.assert_code(&watched, 0);
    assert_each_index_once(&rows(&output), 60);
}

/// R19: lists of jobs ended for good at some 1,300 of them.
#[test]
fn thousands_of_jobs_are_listed_page_by_page() {
    const JOBS: usize = 3000;
    let cluster = Cluster::with(&["ingest"]);
    cluster.write_ended_jobs(JOBS);
    let began = Instant::now();
    let run = cluster
        .command(["jobs", "list", "--limit", "0", "--json"])
        .run();
    cluster.assert_code(&run, 0);
    let jobs: Vec<Value> = serde_json::from_slice(&run.stdout).unwrap();
    let ids: std::collections::HashSet<_> = jobs
        .iter()
        .map(|job| job["id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!((jobs.len(), ids.len()), (JOBS, JOBS));
    let first = cluster
        .command(["jobs", "list", "--limit", "7", "--json"])
        .run();
    let first: Vec<Value> = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!(first.len(), 7);
    assert_eq!(
        first[0]["id"],
        format!("ended-{}", JOBS - 1),
        "the newest first"
    );
    // A bound on a hang, not a measurement.
    assert!(began.elapsed() < Duration::from_secs(60));
}

/// R54: next to a paused ingest worker every second question was answered by nobody.
#[test]
fn a_paused_worker_does_not_keep_the_others_from_answering() {
    let mut cluster = Cluster::new();
    let paused = cluster.start("ingest", &[]);
    cluster.start("ingest", &[]);
    cluster.await_ready();
    cluster.signal(paused, Signal::STOP);
    for _ in 0..6 {
        let run = cluster.command(["jobs", "list"]).run();
        cluster.assert_code(&run, 0);
    }
    cluster.signal(paused, Signal::CONT);
}
