//! Failed rows of an ended job are classified again, and the new rows count.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use trommel_storage::testsuite::{PostgresServer, S3Server};
use trommel_tests::{
    Cluster, Folder, PIPELINE, Trommel, assert_code, assert_each_index_once, digits, rows, stderr,
};

/// Overwrites images with text.
fn spoil(folder: &Folder, numbers: impl IntoIterator<Item = usize>) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(folder.images())
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    let spoilt: Vec<_> = numbers
        .into_iter()
        .map(|number| files[number].clone())
        .collect();
    for file in &spoilt {
        std::fs::write(file, "no image").unwrap();
    }
    spoilt
}

/// Restores spoilt images.
fn mend(spoilt: &[PathBuf]) {
    for file in spoilt {
        std::fs::copy(&digits()[0], file).unwrap();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn show(cluster: &Cluster, id: &str) -> Value {
    let run = cluster.command(["jobs", "show", id, "--json"]).run();
    cluster.assert_code(&run, 0);
    serde_json::from_slice(&run.stdout).unwrap()
}

/// Runs a command that is refused, and checks its message.
#[track_caller]
fn refused(run: Trommel, words: &str) {
    let run = run.run();
    assert_code(&run, 2);
    assert!(stderr(&run).contains(words), "{}", stderr(&run));
}

fn summary(output: &Path) -> Value {
    let text = std::fs::read(output.join("_summary.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// One after the other: some are mended, then the rest; every reader counts the new rows.
#[test]
fn failed_rows_are_replaced_by_those_of_a_retry_and_of_the_next() {
    let folder = Folder::with_digits(120);
    let spoilt = spoil(&folder, [0, 17, 55, 119]);
    let cluster = Cluster::with(&PIPELINE);
    let (images, output) = (folder.images(), folder.path("rows/"));
    let submitted = cluster
        .submit(text(&images), text(&output))
        .args(["--id", "digits", "--wait"])
        .run();
    cluster.assert_code(&submitted, 0);
    assert_eq!(summary(&output)["failed"], 4);

    mend(&spoilt[..3]);
    // A file before all others: no image is where it was.
    std::fs::copy(&digits()[1], images.join("000.png")).unwrap();
    let retry = |words: &[&str]| {
        let retry = cluster.command(["jobs", "retry", "digits"]);
        retry.args(words.iter().copied())
    };
    let first = retry(&["--kind", "decode", "--wait", "--json"]).run();
    cluster.assert_code(&first, 0);
    let status: Value = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!(status["id"], "digits-retry-1");
    assert_eq!(
        (&status["state"], &status["total"]),
        (&json!("complete"), &json!(4))
    );
    let model = &status["models"][0];
    assert_eq!(
        [&model["committed"], &model["ok"], &model["failed"]],
        [&json!(4), &json!(3), &json!(1)]
    );
    let found = rows(&output);
    assert_each_index_once(&found, 120);
    let failed: Vec<_> = found.iter().filter(|row| row.status == "failed").collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].uri, text(&spoilt[3]));
    let counted = summary(&output);
    assert_eq!(
        [&counted["images"], &counted["ok"], &counted["failed"]],
        [&json!(120), &json!(119), &json!(1)]
    );
    let job = show(&cluster, "digits");
    assert_eq!(job["state"], "complete");
    assert_eq!(job["retried_by"], "digits-retry-1");
    let model = &job["models"][0];
    assert_eq!(
        [&model["committed"], &model["ok"], &model["failed"]],
        [&json!(120), &json!(119), &json!(1)]
    );
    assert_eq!(model["failures"].as_object().unwrap().len(), 1);

    // Another run over what there is now agrees with the rows that were mended one by one.
    mend(&spoilt[3..]);
    std::fs::remove_file(images.join("000.png")).unwrap();
    let second = retry(&["--wait", "--fail-on-error"]).run();
    cluster.assert_code(&second, 0);
    let fresh = folder.path("fresh.parquet");
    assert_code(&Trommel::classify(&images, &fresh).run(), 0);
    let compared = Trommel::new([
        "evaluate",
        text(&output),
        "--min-agreement",
        "1",
        "--against",
    ])
    .arg(&fresh)
    .run();
    assert_code(&compared, 0);
    let report = folder.path("report.html");
    let reported = Trommel::new(["report", text(&output), "--output", text(&report)]).run();
    assert_code(&reported, 0);
    assert!(
        !std::fs::read_to_string(&report)
            .unwrap()
            .contains("unknown_format")
    );
    assert_eq!(summary(&output)["failed"], 0);

    let listed = cluster.command(["jobs", "list"]).run();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(listed.contains("(retry 2 of digits)"), "{listed}");
    let shown = cluster.command(["jobs", "show", "digits-retry-1"]).run();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(
        shown.contains("retry   1 of job digits: rows failed as"),
        "{shown}"
    );

    refused(retry(&[]), "no row of job digits failed");
    refused(retry(&["--kind", "slow"]), "\"slow\"");
    refused(
        cluster.command(["jobs", "retry", "nonesuch"]),
        "job nonesuch does not exist",
    );
    refused(
        cluster.command(["jobs", "retry", "digits-retry-2"]),
        "is a retry itself",
    );
    cluster.assert_nothing_left();
}

#[test]
fn a_retry_that_cannot_be_is_refused() {
    let folder = Folder::with_digits(30);
    spoil(&folder, [3]);
    let mut cluster = Cluster::new();
    cluster.start("ingest,preprocess,sink", &[]);
    cluster.await_ready();
    let (images, output) = (folder.images(), folder.path("rows/"));
    let submit = |id: &str, words: &[&str]| {
        let submit = cluster.submit(text(&images), text(&output));
        let run = submit.args(["--id", id]).args(words.iter().copied()).run();
        cluster.assert_code(&run, 0);
    };
    let retry = |words: &[&str]| {
        cluster
            .command(["jobs", "retry"])
            .args(words.iter().copied())
    };
    submit("waits", &[]);
    cluster.eventually("it runs", || {
        (show(&cluster, "waits")["state"] == "running").then_some(())
    });
    refused(retry(&["waits"]), "job waits is running");
    cluster.assert_code(&cluster.command(["jobs", "cancel", "waits"]).run(), 0);
    refused(retry(&["waits"]), "job waits was cancelled");
    cluster.start("infer", &[]);
    cluster.await_ready();
    let submit = |id: &str, words: &[&str]| {
        let submit = cluster.submit(text(&images), text(&output));
        let run = submit
            .args(["--id", id, "--overwrite"])
            .args(words.iter().copied())
            .run();
        cluster.assert_code(&run, 0);
    };
    let retry = |words: &[&str]| {
        cluster
            .command(["jobs", "retry"])
            .args(words.iter().copied())
    };
    submit("first", &["--wait"]);
    refused(
        retry(&["first", "--kind", "timeout,fetch"]),
        "no row of job first failed as",
    );
    submit("second", &["--wait"]);
    refused(retry(&["first"]), "has gone to job second");
    // Others write to the output once the retry has ended, and not before.
    let retried = retry(&["second", "--wait"]).run();
    cluster.assert_code(&retried, 0);
    submit("third", &["--wait"]);
    refused(retry(&["second"]), "has gone to job third");
    assert_each_index_once(&rows(&output), 30);
    assert!(!output.join("retry-0001").join("_SUCCESS").exists());
}

/// Kills of every role while a retry is under way; the next one then finds nothing left to do.
fn kill_while_retrying(cluster: &mut Cluster, server: &S3Server, id: &str) {
    let retried = cluster.command(["jobs", "retry", id]).run();
    cluster.assert_code(&retried, 0);
    let retry = String::from_utf8(retried.stdout).unwrap().trim().to_owned();
    for role in ["sink", "ingest", "preprocess", "infer", "sink"] {
        // It has not ended yet: this would fail otherwise.
        cluster.await_rows(&retry, 0);
        let victim = cluster.of_role(role)[0];
        cluster.kill_and_restart(victim);
    }
    refused_later(cluster, id, &retry);
    server.slow_down_images(std::time::Duration::ZERO);
    let watched = cluster.run_to_end(cluster.command(["jobs", "watch", &retry]));
    cluster.assert_code(&watched, 0);
    let status = show(cluster, &retry);
    assert_eq!(status["models"][0]["committed"], FAILED);
}

/// Only one retry runs at a time.
fn refused_later(cluster: &Cluster, id: &str, retry: &str) {
    let run = cluster.command(["jobs", "retry", id]).run();
    let (words, state) = (stderr(&run), show(cluster, retry)["state"].clone());
    if state == "running" {
        assert_code(&run, 2);
        assert!(words.contains("before the next retry"), "{words}");
    }
}

const FAILED: usize = 600;

/// A store in which every other image is spoilt, and the rows of a job over it.
fn half_failed(server: &S3Server, folder: &Folder, cluster: &Cluster, output: &str) {
    let spoilt = spoil(folder, (0..2 * FAILED).step_by(2));
    folder.upload(server, "photos");
    let run = cluster
        .submit("s3://photos/images/", output)
        .args(["--id", "half", "--wait"])
        .run();
    cluster.assert_code(&run, 0);
    mend(&spoilt);
    for file in &spoilt {
        let name = file.file_name().unwrap().to_str().unwrap();
        server.put(
            "photos",
            &format!("images/{name}"),
            &std::fs::read(file).unwrap(),
        );
    }
    // So that the retry has not ended before the last kill.
    server.slow_down_images(std::time::Duration::from_millis(150));
}

/// The job after the retry, as every reader sees it.
fn assert_mended(cluster: &Cluster) {
    let job = show(cluster, "half");
    let model = &job["models"][0];
    assert_eq!(
        [&model["committed"], &model["ok"], &model["failed"]],
        [&json!(2 * FAILED), &json!(2 * FAILED), &json!(0)]
    );
    refused(
        cluster.command(["jobs", "retry", "half"]),
        "no row of job half failed",
    );
    cluster.assert_nothing_left();
}

#[test]
fn killing_roles_while_a_retry_runs_loses_nothing_and_doubles_nothing() {
    kill_on_a_store(false);
}

#[test]
fn killing_roles_while_a_retry_runs_where_preconditions_are_ignored() {
    kill_on_a_store(true);
}

fn kill_on_a_store(ignores_preconditions: bool) {
    let (server, folder) = (S3Server::start(), Folder::with_digits(2 * FAILED));
    server.ignore_preconditions(ignores_preconditions);
    let mut cluster = Cluster::new().s3(&server).start_slow();
    half_failed(&server, &folder, &cluster, "s3://photos/rows/");
    kill_while_retrying(&mut cluster, &server, "half");
    let output = server.path("photos", "rows");
    let found = rows(&output);
    assert_each_index_once(&found, 2 * FAILED);
    assert!(found.iter().all(|row| row.status == "ok"));
    // Every row that was replaced is in the retry once, and nothing else is.
    let replaced = rows(&output.join("retry-0001"));
    let indices = replaced.iter().map(|row| row.index);
    assert!(indices.eq((0..2 * FAILED as u64).step_by(2)));
    assert_eq!(summary(&output)["ok"], 2 * FAILED);
    assert_mended(&cluster);
}

#[test]
fn killing_roles_while_rows_of_a_table_are_replaced_replaces_each_once() {
    let (server, folder) = (S3Server::start(), Folder::with_digits(2 * FAILED));
    let database = PostgresServer::start();
    let output = database.url_without_password("labels");
    let mut cluster = Cluster::new()
        .s3(&server)
        .env("PGPASSWORD", database.password());
    cluster.outputs.push(database.place());
    let mut cluster = cluster.start_slow();
    half_failed(&server, &folder, &cluster, &output);
    let before = database
        .query("SELECT count(*), sum(index), max(finished_at) FROM labels WHERE status = 'ok'");
    kill_while_retrying(&mut cluster, &server, "half");
    assert_eq!(
        database.query("SELECT status, generation, count(*), count(DISTINCT index) FROM labels GROUP BY 1, 2 ORDER BY 2"),
        format!("ok|0|{FAILED}|{FAILED}\nok|1|{FAILED}|{FAILED}")
    );
    assert_eq!(
        before,
        database.query(
            "SELECT count(*), sum(index), max(finished_at) FROM labels WHERE generation = 0"
        ),
        "a row that had not failed was touched"
    );
    assert_eq!(
        database.query(
            "SELECT job_id, summary->>'images', summary->>'failed' FROM labels_jobs ORDER BY job_id"
        ),
        format!("half|{}|0\nhalf/retry-0001|{FAILED}|0", 2 * FAILED)
    );
    assert_mended(&cluster);
}

/// A list with a column of its own, rows in a single file, two jobs of it: workers and one process.
#[test]
fn what_a_row_passes_through_is_in_the_new_one_too() {
    let folder = Folder::with_digits(40);
    let spoilt = spoil(&folder, [4, 20, 39]);
    let (images, list) = (folder.images(), folder.path("list.csv"));
    let mut files: Vec<_> = std::fs::read_dir(&images)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    let write = |files: &[&PathBuf]| {
        let line = |file: &&PathBuf| {
            let name = file.file_stem().unwrap().to_str().unwrap();
            format!("{},site {name}\n", file.display())
        };
        let lines: String = files.iter().map(line).collect();
        std::fs::write(&list, format!("uri,site\n{lines}")).unwrap();
    };
    write(&files.iter().collect::<Vec<_>>());
    let cluster = Cluster::with(&PIPELINE);
    let (output, alone) = (folder.path("rows.csv"), folder.path("alone.csv"));
    let submitted = cluster
        .submit(text(&list), text(&output))
        .args(["--id", "listed", "--wait"])
        .run();
    cluster.assert_code(&submitted, 0);
    assert_code(&Trommel::classify(&list, &alone).run(), 0);
    let columns = |path: &Path| -> Vec<_> {
        let rows = rows(path).into_iter();
        rows.map(|row| (row.uri, row.columns)).collect()
    };
    let before = columns(&output);

    // One is mended, one is unchanged, and one is no longer in the list.
    mend(&spoilt[..1]);
    write(
        &files
            .iter()
            .filter(|file| **file != spoilt[1])
            .collect::<Vec<_>>(),
    );
    let retried = cluster.command(["jobs", "retry", "listed", "--wait"]).run();
    cluster.assert_code(&retried, 0);
    let retried = Trommel::classify(&list, &alone)
        .args(["--retry-failed", "--json", "--fail-on-error"])
        .run();
    assert_code(&retried, 3);
    let told: Value = serde_json::from_slice(&retried.stdout).unwrap();
    assert_eq!((&told["images"], &told["ok"]), (&json!(40), &json!(38)));
    assert_eq!(told["retried"], json!({"rows": 3, "ok": 1, "failed": 2}));
    for path in [&output, &alone] {
        assert_eq!(columns(path), before, "{}", path.display());
        let failed = rows(path).into_iter().filter(|row| row.status == "failed");
        let failed: Vec<_> = failed
            .map(|row| (row.index, row.error_kind.unwrap()))
            .collect();
        let expected = [
            (20, "not_found".to_owned()),
            (39, "unknown_format".to_owned()),
        ];
        assert_eq!(failed, expected, "{}", path.display());
    }
    let model = &show(&cluster, "listed")["models"][0];
    assert_eq!((&model["ok"], &model["failed"]), (&json!(38), &json!(2)));
}

/// A job of the models `digits` and `other` that failed: every other one of its images is spoilt.
fn two_models_failed(folder: &Folder) -> (Cluster, Vec<PathBuf>) {
    let spoilt = spoil(folder, (0..40).step_by(2));
    let models = folder.path("models");
    for name in ["digits", "other"] {
        std::fs::create_dir_all(models.join(name)).unwrap();
        for file in ["model.onnx", "config.json", "preprocessor_config.json"] {
            let from = trommel_tests::digits_model().join(file);
            std::fs::copy(from, models.join(name).join(file)).unwrap();
        }
    }
    let mut cluster = Cluster::new();
    cluster.set_repository(&models);
    cluster.start("ingest,preprocess,infer,sink", &[]);
    cluster.await_ready();
    let (images, output) = (folder.images(), folder.path("rows/"));
    let submit = cluster.command(["submit", text(&images), "--model", "digits,other"]);
    let failed = submit
        .args(["--output", text(&output), "--id", "hopeless", "--wait"])
        .args(["--max-failure-rate", "0.1"])
        .run();
    cluster.assert_code(&failed, 4);
    (cluster, spoilt)
}

fn retry_when_its_workers_have_let_go(cluster: &Cluster) {
    let retried = cluster.eventually("its workers have let go of it", || {
        let retried = cluster
            .command(["jobs", "retry", "hopeless", "--wait"])
            .run();
        retried.status.success().then_some(retried)
    });
    cluster.assert_code(&retried, 0);
}

#[test]
fn a_job_of_two_models_that_failed_is_tried_again() {
    let folder = Folder::with_digits(40);
    let (cluster, spoilt) = two_models_failed(&folder);
    mend(&spoilt);
    retry_when_its_workers_have_let_go(&cluster);
    let job = show(&cluster, "hopeless");
    assert_eq!(job["state"], "failed");
    for (place, model) in ["digits", "other"].into_iter().enumerate() {
        let output = folder.path("rows").join(model);
        // The job may have ended because of one model before the other had any row.
        let rows = if output.exists() {
            rows(&output)
        } else {
            Vec::new()
        };
        assert!(rows.iter().all(|row| row.status == "ok"), "{model}");
        let counted = &job["models"][place];
        assert_eq!(
            (&counted["committed"], &counted["failed"]),
            (&json!(rows.len()), &json!(0))
        );
        // One model may have had all of its rows when the job ended because of the other.
        if output.join("_SUCCESS").exists() {
            assert_eq!(summary(&output)["failed"], 0);
        }
    }
}

#[test]
fn a_retry_leaves_out_a_model_without_rows() {
    let folder = Folder::with_digits(40);
    let (mut cluster, spoilt) = two_models_failed(&folder);
    mend(&spoilt);
    // As if the job had ended because of one model before the other had any row.
    let job = show(&cluster, "hopeless");
    let failed = |place: usize| job["models"][place]["failed"].as_u64().unwrap();
    let (kept, removed) = match failed(0) >= failed(1) {
        true => ("digits", "other"),
        false => ("other", "digits"),
    };
    let (kept, removed) = (
        folder.path("rows").join(kept),
        folder.path("rows").join(removed),
    );
    cluster.kill(0);
    if removed.exists() {
        std::fs::remove_dir_all(&removed).unwrap();
    }
    cluster.start_again(0);
    cluster.await_ready();
    retry_when_its_workers_have_let_go(&cluster);
    assert!(!removed.exists());
    let rows = rows(&kept);
    assert!(!rows.is_empty() && rows.iter().all(|row| row.status == "ok"));
}

/// The embedded run is killed while it tries rows again, and the same command continues.
#[test]
fn a_retry_in_one_process_goes_on_after_a_kill() {
    let folder = Folder::with_digits(2000);
    let spoilt = spoil(&folder, 0..1000);
    let (images, output) = (folder.images(), folder.path("rows/"));
    let classify = |words: &[&str]| {
        Trommel::classify(&images, &output)
            .env("TROMMEL_SINK__PART_ROWS", "20")
            .env("TROMMEL_PREPROCESS__THREADS", "1")
            .args(words.iter().copied())
    };
    refused(
        classify(&["--retry-failed"]),
        "so none of them can be tried again",
    );
    assert_code(&classify(&[]).run(), 0);
    mend(&spoilt);
    refused(classify(&["--retry-failed=slow"]), "\"slow\"");
    refused(classify(&["--retry-failed=timeout"]), "failed as timeout");
    let parts = || {
        let parts = std::fs::read_dir(output.join("retry-0001"))
            .into_iter()
            .flatten();
        let names = parts.map(|part| part.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("part-")).count()
    };
    let mut killed = classify(&["--retry-failed", "--quiet"]).spawn();
    while parts() < 3 {
        assert!(killed.try_wait().unwrap().is_none(), "it has ended already");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(!output.join("retry-0001/_SUCCESS").exists());
    // Nothing counts before the end.
    let failed = |path: &Path| {
        rows(path)
            .iter()
            .filter(|row| row.status == "failed")
            .count()
    };
    assert_eq!(failed(&output), 1000);
    assert_code(&classify(&["--retry-failed", "--quiet"]).run(), 0);
    assert_eq!(failed(&output), 0);
    assert_each_index_once(&rows(&output), 2000);
    let replaced = rows(&output.join("retry-0001"));
    assert_each_index_once(&replaced, 1000);
    assert_eq!(summary(&output)["ok"], 2000);
    let again = classify(&[]).run();
    assert!(
        stderr(&again).contains("2,000 images: 2,000 ok; already complete"),
        "{}",
        stderr(&again)
    );
    refused(classify(&["--retry-failed"]), "nothing to try again");
}
