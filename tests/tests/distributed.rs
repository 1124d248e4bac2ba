//! The roles in their own processes, with a real broker.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use serde_json::{Value, json};
use trommel_sink::{ResultRow, read_stored};
use trommel_storage::testsuite::S3Server;
use trommel_tests::{
    Cluster, Folder, PIPELINE, Signal, Trommel, assert_code, assert_each_index_once,
    assert_same_rows, digits_model, free_address, get, rows, stderr,
};
use trommel_types::Scalar;

/// The rows of the embedded run.
fn embedded(folder: &Folder) -> Vec<ResultRow> {
    let output = folder.path("embedded.parquet");
    assert_code(&Trommel::classify(&folder.images(), &output).run(), 0);
    rows(&output)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn five_processes_give_the_rows_of_the_embedded_run() {
    let folder = Folder::with_digits(2000);
    for number in [3, 700, 1999] {
        std::fs::write(folder.images().join(format!("x{number:06}.jpg")), "text").unwrap();
    }
    let cluster = Cluster::with(&PIPELINE);
    let output = folder.path("rows/");
    let run = cluster
        .submit(text(&folder.images()), text(&output))
        .args(["--wait", "--json"])
        .run();
    cluster.assert_code(&run, 0);
    let status: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(status["state"], "complete");
    assert_eq!(status["total"], 2003);
    assert_eq!(status["models"][0]["committed"], 2003);
    assert_eq!(status["models"][0]["failed"], 3);
    assert_same_rows(&rows(&output), &embedded(&folder));
    assert!(output.join("_SUCCESS").exists() && output.join("_summary.json").exists());
    cluster.assert_nothing_left();
}

#[test]
fn a_bucket_is_classified_into_a_bucket() {
    let folder = Folder::with_digits(2000);
    std::fs::write(folder.images().join("x.jpg"), "text").unwrap();
    let server = S3Server::start();
    folder.upload(&server, "photos");
    let mut cluster = Cluster::new().s3(&server);
    for role in PIPELINE {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    cluster.classify("s3://photos/images/", "s3://photos/rows/");
    let found = rows(&server.path("photos", "rows"));
    let mut expected = embedded(&folder);
    for row in &mut expected {
        let name = Path::new(&row.uri).file_name().unwrap().to_str().unwrap();
        row.uri = format!("s3://photos/images/{name}");
        row.etag = None; // this store lists none
    }
    assert_same_rows(&found, &expected);
    assert!(server.path("photos", "rows/_SUCCESS").exists());
    cluster.assert_nothing_left();

    let unknown = cluster
        .submit("s3://nonesuch/images/", "s3://photos/other/")
        .arg("--wait")
        .run();
    cluster.assert_code(&unknown, 1);
    assert!(
        stderr(&unknown).contains("the bucket does not exist"),
        "{}",
        stderr(&unknown)
    );
    let embedded = cluster
        .command(["classify", "s3://photos/images/0000", "--output"])
        .arg(folder.path("few.parquet"))
        .arg("--model")
        .arg(digits_model())
        .run();
    assert_code(&embedded, 0);
    assert_each_index_once(&rows(&folder.path("few.parquet")), 100);
}

#[test]
fn tensors_may_stay_in_the_process() {
    let folder = Folder::with_digits(500);
    let mut cluster = Cluster::new();
    cluster.start("ingest,sink", &[]);
    cluster.start("preprocess,infer", &["--tensor-hop", "local"]);
    cluster.await_ready();
    let output = folder.path("rows/");
    cluster.classify(text(&folder.images()), text(&output));
    assert_same_rows(&rows(&output), &embedded(&folder));

    let refused = cluster
        .command(["worker", "--role", "preprocess", "--tensor-hop", "local"])
        .arg("--model-repository")
        .arg(digits_model().parent().unwrap())
        .run();
    assert_code(&refused, 2);
    assert!(
        stderr(&refused).contains("preprocess and infer"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn the_same_submission_again_is_the_same_job() {
    let folder = Folder::with_digits(50);
    let cluster = Cluster::with(&["ingest,preprocess,infer,sink"]);
    let output = folder.path("rows/");
    let submit = || {
        cluster
            .submit(text(&folder.images()), text(&output))
            .args(["--id", "digits-1", "--wait"])
            .run()
    };
    cluster.assert_code(&submit(), 0);
    let again = submit();
    cluster.assert_code(&again, 0);
    assert!(
        stderr(&again).contains("submitted before"),
        "{}",
        stderr(&again)
    );
    assert_each_index_once(&rows(&output), 50);

    let other = cluster
        .submit(text(&folder.images()), text(&folder.path("elsewhere/")))
        .args(["--id", "digits-1", "--wait"])
        .run();
    assert_code(&other, 2);
    assert!(stderr(&other).contains("digits-1"), "{}", stderr(&other));

    let listed = cluster.command(["jobs", "list", "--json"]).run();
    assert_code(&listed, 0);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["id"], "digits-1");
    let shown = cluster.command(["jobs", "show", "digits-1"]).run();
    assert!(String::from_utf8_lossy(&shown.stdout).contains("complete"));
    let models = cluster.command(["jobs", "models"]).run();
    assert!(String::from_utf8_lossy(&models.stdout).contains("digits"));
}

#[test]
fn what_cannot_be_done_is_told_to_the_submitter() {
    let folder = Folder::with_digits(5);
    let images = folder.images();
    let taken = folder.path("taken");
    std::fs::create_dir(&taken).unwrap();
    std::fs::write(taken.join("letter.txt"), "mine").unwrap();
    let cluster = Cluster::with(&["ingest,preprocess,infer,sink"]);
    let submit = |source: &Path, output: &Path, model: &str| {
        cluster
            .command([
                "submit",
                text(source),
                "--output",
                text(output),
                "--model",
                model,
            ])
            .arg("--wait")
            .run()
    };
    let rows = folder.path("rows/");
    for (run, code, words) in [
        (
            submit(&images, &rows, "nonesuch"),
            2,
            &["nonesuch", "digits"][..],
        ),
        (submit(&images, &rows, "../digits"), 2, &["models"]),
        (
            submit(&folder.path("nowhere"), &rows, "digits"),
            1,
            &["nowhere"],
        ),
        (
            submit(&images, &folder.path("x.xlsx"), "digits"),
            1,
            &["x.xlsx"],
        ),
        (
            submit(&images, &taken, "digits"),
            1,
            &["taken", "files that trommel did not write"],
        ),
    ] {
        cluster.assert_code(&run, code);
        for word in words {
            assert!(stderr(&run).contains(word), "{word}: {}", stderr(&run));
        }
    }
    assert!(!rows.exists());
    // None of it has hurt the workers.
    cluster.classify(text(&images), text(&rows));
}

#[test]
fn a_job_can_be_cancelled_and_keeps_what_is_committed() {
    let folder = Folder::with_digits(8000);
    // A short queue and small parts: it is caught with some rows and not all.
    let mut cluster = Cluster::new()
        .env("TROMMEL_BROKER__TASKS_MAX_MESSAGES", "50")
        .env("TROMMEL_SINK__PART_ROWS", "20");
    cluster.start("ingest,preprocess,sink", &[]);
    let infer = cluster.start("infer", &[]);
    cluster.await_ready();
    let output = folder.path("rows/");
    let submitted = cluster
        .submit(text(&folder.images()), text(&output))
        .args(["--id", "endless"])
        .run();
    cluster.assert_code(&submitted, 0);
    assert_eq!(String::from_utf8_lossy(&submitted.stdout).trim(), "endless");
    cluster.await_rows("endless", 0);
    // Without infer the job cannot end by itself.
    cluster.kill(infer);
    let cancelled = cluster.command(["jobs", "cancel", "endless"]).run();
    cluster.assert_code(&cancelled, 0);
    let watched = cluster.command(["jobs", "watch", "endless"]).run();
    cluster.assert_code(&watched, 1);
    assert!(
        stderr(&watched).contains("cancelled"),
        "{}",
        stderr(&watched)
    );
    let again = cluster.command(["jobs", "cancel", "nonesuch"]).run();
    assert_code(&again, 1);
    assert!(stderr(&again).contains("nonesuch"), "{}", stderr(&again));
    assert!(!output.join("_SUCCESS").exists());
    // The sink commits what it holds, and then notes it.
    let kept = cluster.eventually("the rows are counted", || {
        let (state, committed) = cluster.progress("endless");
        assert_eq!(state, "cancelled");
        let kept = rows(&output);
        (kept.len() as u64 == committed).then_some(kept)
    });
    assert!((1..8000).contains(&kept.len()), "{} rows", kept.len());
    // The next job is not held up by what the cancelled one has left.
    cluster.start_again(infer);
    cluster.await_ready();
    let next = folder.path("next/");
    cluster.classify(text(&folder.images()), text(&next));
    assert_each_index_once(&rows(&next), 8000);
}

#[test]
fn a_job_that_is_hopeless_or_late_ends_early() {
    let folder = Folder::with_digits(10);
    for number in 0..400 {
        std::fs::write(folder.images().join(format!("a{number:06}.jpg")), "text").unwrap();
    }
    let mut cluster = Cluster::with(&["ingest,preprocess,infer,sink"]);
    let hopeless = cluster
        .submit(text(&folder.images()), text(&folder.path("hopeless/")))
        .args(["--wait", "--max-failure-rate", "0.2"])
        .run();
    cluster.assert_code(&hopeless, 4);
    assert!(stderr(&hopeless).contains("0.2"), "{}", stderr(&hopeless));

    // No infer worker is left.
    cluster.signal(0, Signal::TERM);
    assert_eq!(cluster.wait(0), Some(0), "{}", cluster.log(0));
    cluster.start("ingest,preprocess,sink", &[]);
    cluster.await_ready();
    let late = cluster
        .submit(text(&folder.images()), text(&folder.path("late/")))
        .args(["--wait", "--max-runtime", "1s"])
        .run();
    cluster.assert_code(&late, 1);
    assert!(
        stderr(&late).contains("longer than 1 second"),
        "{}",
        stderr(&late)
    );
}

#[test]
fn a_drained_worker_leaves_its_work_to_the_others() {
    let folder = Folder::with_digits(12_000);
    // Small parts: it is caught with some rows and not all.
    let mut cluster = Cluster::new().env("TROMMEL_SINK__PART_ROWS", "100");
    for roles in ["ingest,preprocess,infer,sink"; 2] {
        cluster.start(roles, &[]);
    }
    cluster.await_ready();
    let output = folder.path("rows/");
    let mut waiting = cluster
        .submit(text(&folder.images()), text(&output))
        .args(["--id", "drained", "--wait"])
        .into_command();
    let mut waiting = waiting.spawn().unwrap();
    cluster.await_rows("drained", 0);
    cluster.signal(0, Signal::TERM);
    assert_eq!(cluster.wait(0), Some(0), "{}", cluster.log(0));
    assert!(waiting.wait().unwrap().success(), "{}", cluster.log(1));
    assert_each_index_once(&rows(&output), 12_000);
}

#[test]
fn one_image_is_decoded_once_for_several_models() {
    let folder = Folder::with_digits(100);
    let repository = folder.path("repository");
    for version in ["one", "two/1"] {
        let dir = repository.join(version);
        std::fs::create_dir_all(&dir).unwrap();
        for file in ["model.onnx", "config.json", "preprocessor_config.json"] {
            std::fs::copy(digits_model().join(file), dir.join(file)).unwrap();
        }
    }
    let mut cluster = Cluster::new();
    cluster.set_repository(&repository);
    let address = free_address();
    let listen = address.to_string();
    cluster.start("ingest,preprocess,infer,sink", &["--listen", &listen]);
    cluster.await_ready();
    let output = folder.path("rows/");
    let run = cluster
        .command(["submit", text(&folder.images()), "--output", text(&output)])
        .args(["--model", "one,two", "--wait"])
        .run();
    cluster.assert_code(&run, 0);
    let (_, metrics) = get(address, "/metrics").unwrap();
    let decoded = metrics
        .lines()
        .find_map(|line| line.strip_prefix("trommel_decode_seconds_count "));
    assert_eq!(decoded, Some("100"), "{metrics}");
    let expected = embedded(&folder);
    for model in ["one", "two"] {
        let found = rows(&output.join(model));
        assert_same_rows(&found, &expected);
    }
}

#[test]
fn perceptual_hashes_come_over_a_broker_as_from_one_process() {
    let folder = Folder::with_digits(20);
    std::fs::write(folder.images().join("x.jpg"), "text").unwrap();
    let cluster = Cluster::with(&PIPELINE);
    let output = folder.path("rows/");
    let run = cluster
        .submit(text(&folder.images()), text(&output))
        .args(["--phash", "--wait"])
        .run();
    cluster.assert_code(&run, 0);
    let one = folder.path("one.parquet");
    assert_code(
        &Trommel::classify(&folder.images(), &one)
            .arg("--phash")
            .run(),
        0,
    );
    let hashes = |path: &Path| {
        let rows = read_stored(path, false).unwrap().map(Result::unwrap);
        let mut hashes: Vec<_> = rows
            .map(|row| (row.image.index, row.image.columns))
            .collect();
        hashes.sort_by_key(|(index, _)| *index);
        hashes
    };
    let (found, expected) = (hashes(&output), hashes(&one));
    assert_eq!(found, expected);
    let hashed = |(_, columns): &&(u64, Vec<Scalar>)| matches!(&columns[..], [Scalar::String(_)]);
    assert_eq!(found.iter().filter(hashed).count(), 20, "{found:?}");
}

#[test]
fn workers_with_different_models_of_one_name_do_not_mix() {
    let folder = Folder::new();
    let repository = folder.path("repository");
    let dir = repository.join("digits");
    std::fs::create_dir_all(&dir).unwrap();
    for file in ["config.json", "preprocessor_config.json"] {
        std::fs::copy(digits_model().join(file), dir.join(file)).unwrap();
    }
    let other = digits_model()
        .parent()
        .unwrap()
        .parent()
        .unwrap()
        .join("crates/infer/tests/models/nchw_f32/model.onnx");
    std::fs::copy(other, dir.join("model.onnx")).unwrap();
    let mut cluster = Cluster::with(&["ingest,preprocess,sink"]);
    cluster.set_repository(&repository);
    cluster.start("infer", &[]);
    cluster.await_ready();
    let images = Folder::with_digits(3);
    let ended = cluster.submit(text(&images.images()), text(&folder.path("rows/")));
    let ended = ended.arg("--wait").run();
    // R14: the worker continues; the job ends, as nobody has its version.
    cluster.assert_code(&ended, 1);
    let said = stderr(&ended);
    assert!(said.contains("model digits has version"), "{said}");
}

#[test]
fn a_missing_broker_and_a_missing_worker_are_told() {
    let cluster = Cluster::new();
    let nobody = cluster.submit("photos", "rows/").run();
    assert_code(&nobody, 2);
    assert!(
        stderr(&nobody).contains("--role ingest"),
        "{}",
        stderr(&nobody)
    );
    let absent = Trommel::new(["jobs", "list", "--nats", "nats://127.0.0.1:1"]).run();
    assert_code(&absent, 2);
    assert!(
        stderr(&absent).contains("127.0.0.1:1"),
        "{}",
        stderr(&absent)
    );
}

#[test]
fn a_worker_whose_device_is_not_there_does_not_start() {
    let mut cluster = Cluster::new();
    // The library that the tests load is built for processors alone.
    let worker = cluster.start("infer", &["--device", "cuda:0,cuda:1"]);
    assert_eq!(cluster.wait(worker), Some(2));
    let log = cluster.log(worker);
    assert!(log.contains("device cuda:0 is not available"), "{log}");
    assert!(!log.contains("working as"), "{log}");
}

#[test]
fn images_travel_in_requests_no_more() {
    let folder = Folder::new();
    let cluster = Cluster::with(&["ingest"]);
    let request = json!({
        "id": "inline",
        "images": [{"uri": "a", "bytes": [1, 2, 3]}],
        "models": ["digits"],
        "output": text(&folder.path("rows/")),
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let answer = runtime.block_on(async {
        let client = async_nats::connect(cluster.nats.url()).await.unwrap();
        let asked = client.request("trommel.api.submit", request.to_string().into());
        asked.await.unwrap()
    });
    let headers = answer.headers.unwrap();
    let of = |name| headers.get(name).unwrap().as_str().to_owned();
    assert_eq!(of("Nats-Service-Error-Code"), "400");
    let said = of("Nats-Service-Error");
    assert!(
        said.contains("sources") && said.contains("trommel serve"),
        "{said}"
    );
}

/// An image whose deadline passes before it is worked on has a row that says so, and costs no more.
#[test]
fn images_that_wait_beyond_their_deadline_expire() {
    let folder = Folder::with_digits(30);
    let mut cluster = Cluster::with(&["ingest", "sink"]);
    let output = folder.path("rows/");
    let submitted = cluster
        .submit(text(&folder.images()), text(&output))
        .args(["--id", "late", "--image-deadline", "1ms"])
        .run();
    cluster.assert_code(&submitted, 0);
    cluster.start("preprocess,infer", &[]);
    let watched = cluster.command(["jobs", "watch", "late"]).run();
    // Every image failed.
    cluster.assert_code(&watched, 3);
    let late = rows(&output);
    assert_each_index_once(&late, 30);
    for row in &late {
        assert_eq!(
            row.error_kind.as_deref(),
            Some("expired"),
            "{:?}",
            row.error_kind
        );
    }
    // With time enough none does; the failed ones can be tried again.
    let output = folder.path("in-time/");
    let submitted = cluster
        .submit(text(&folder.images()), text(&output))
        .args(["--id", "in-time", "--image-deadline", "1h"])
        .run();
    cluster.assert_code(&submitted, 0);
    cluster.assert_code(&cluster.command(["jobs", "watch", "in-time"]).run(), 0);
    let rows = rows(&output);
    assert_each_index_once(&rows, 30);
    assert!(rows.iter().all(|row| row.status == "ok"));
}
