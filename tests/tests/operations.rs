//! The control API, and jobs that do not begin with a listing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use trommel_queue::Stream;
use trommel_storage::testsuite::S3Server;
use trommel_tests::{
    Cluster, Folder, PIPELINE, Trommel, assert_code, assert_each_index_once, digits, digits_model,
    rows, stderr,
};

fn why(cluster: &Cluster, id: &str) -> Value {
    let run = cluster.command(["jobs", "why", id, "--json"]).run();
    cluster.assert_code(&run, 0);
    serde_json::from_slice(&run.stdout).unwrap()
}

/// Asks the control API.
fn ask(cluster: &Cluster, subject: &'static str) -> Value {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let reply = runtime.block_on(async {
        let client = async_nats::connect(cluster.nats.url()).await.unwrap();
        client.request(subject, "".into()).await.unwrap()
    });
    serde_json::from_slice(&reply.payload).unwrap()
}

/// Asks until the answer is as expected.
#[track_caller]
fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// An autoscaler that starts from zero reads consumers, and treats a missing one as a huge backlog.
#[test]
fn the_consumers_that_workers_are_scaled_by_are_there_before_the_workers() {
    let folder = Folder::with_digits(40);
    let cluster = Cluster::with(&["ingest"]);
    let output = folder.path("rows/");
    let submitted = cluster
        .submit(folder.images().to_str().unwrap(), output.to_str().unwrap())
        .run();
    cluster.assert_code(&submitted, 0);
    let waiting = |stream: Stream, consumer: &str| cluster.waiting(stream, consumer);
    wait_for("tasks wait", || {
        waiting(Stream::Tasks, "preprocess-normal") == Some(40)
    });
    let inspected = Trommel::new(["model", "inspect", "--json"]).arg(digits_model());
    let inspected: Value = serde_json::from_slice(&inspected.run().stdout).unwrap();
    let version = inspected["model"]["version"].as_str().unwrap();
    for lane in ["high", "normal", "low"] {
        let consumer = format!("infer-digits=40{version}-{lane}");
        assert_eq!(waiting(Stream::Tensors, &consumer), Some(0), "{lane}");
    }
    assert_eq!(waiting(Stream::Tasks, "nobody"), None);
}

#[test]
fn a_job_that_does_not_move_is_explained() {
    let folder = Folder::with_digits(40);
    let mut cluster = Cluster::with(&["ingest", "preprocess", "sink"]);
    let output = folder.path("rows/");
    let submitted = cluster
        .submit(folder.images().to_str().unwrap(), output.to_str().unwrap())
        .args(["--id", "stuck"])
        .run();
    cluster.assert_code(&submitted, 0);
    // All images come to wait for the role that nobody has.
    let infer = |why: &Value| why["stages"][1].clone();
    wait_for("tensors wait", || {
        infer(&why(&cluster, "stuck"))["waiting"] == 40
    });
    let explained = why(&cluster, "stuck");
    let stage = infer(&explained);
    assert_eq!(
        (&stage["stage"], &stage["workers"]),
        (&json!("infer"), &json!(0))
    );
    assert_eq!(stage["oldest"].as_array().unwrap().len(), 3);
    assert!(
        stage["oldest"][0]["uri"]
            .as_str()
            .unwrap()
            .contains("images/")
    );
    let findings = explained["findings"].to_string();
    assert!(
        findings.contains("trommel worker --role infer"),
        "{findings}"
    );
    let shown = cluster.command(["jobs", "why", "stuck"]).run();
    let words = String::from_utf8(shown.stdout).unwrap();
    assert!(words.contains("0 workers, 40 waiting"), "{words}");
    // Once the role is there, the job ends and says so.
    cluster.start("infer", &[]);
    cluster.await_ready();
    cluster.assert_code(&cluster.command(["jobs", "watch", "stuck"]).run(), 0);
    assert!(
        why(&cluster, "stuck")["findings"]
            .to_string()
            .contains("complete")
    );
    assert_code(&cluster.command(["jobs", "why", "none"]).run(), 1);
}

#[test]
fn what_was_last_said_of_an_image_is_told() {
    let server = S3Server::start();
    let folder = Folder::with_digits(30);
    folder.upload(&server, "photos");
    let mut cluster = Cluster::new()
        .s3(&server)
        .env("TROMMEL_S3__ATTEMPTS", "1")
        .env("TROMMEL_RETRY__BASE", "3s")
        .env("TROMMEL_RETRY__MAX_ATTEMPTS", "9");
    cluster.start("ingest", &[]);
    cluster.await_ready();
    let output = folder.path("rows/");
    let submitted = cluster
        .submit("s3://photos/images/", output.to_str().unwrap())
        .args(["--id", "said"])
        .run();
    cluster.assert_code(&submitted, 0);
    let tasks = || why(&cluster, "said")["stages"][0]["waiting"].clone();
    wait_for("all are listed", || tasks() == 30);
    server.be_unavailable(25);
    for role in ["preprocess", "infer", "sink"] {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let said = || why(&cluster, "said")["put_off"].clone();
    let mut words = Value::Null;
    wait_for("something is said", || {
        words = said();
        words.as_array().is_some_and(|said| !said.is_empty())
    });
    assert_eq!(words[0]["stage"], "preprocess", "{words}");
    let error = words[0]["error"].as_str().unwrap();
    assert!(error.contains("s3://photos/"), "{words}");
    cluster.assert_code(&cluster.command(["jobs", "watch", "said"]).run(), 0);
    assert_each_index_once(&rows(&output), 30);
}

#[test]
fn a_dry_run_counts_and_measures_and_stores_nothing() {
    let folder = Folder::with_digits(700);
    let cluster = Cluster::with(&PIPELINE);
    let output = folder.path("rows/");
    let dry = cluster
        .submit(folder.images().to_str().unwrap(), output.to_str().unwrap())
        .args(["--dry-run", "--json"])
        .run();
    cluster.assert_code(&dry, 0);
    let told: Value = serde_json::from_slice(&dry.stdout).unwrap();
    assert_eq!(
        (&told["images"], &told["all_counted"]),
        (&json!(700), &json!(true))
    );
    assert_eq!(told["sample"][0]["ok"], 512);
    assert!(told["images_per_second"].as_f64().unwrap() > 0.0, "{told}");
    let eta = told["eta_seconds"].as_f64().unwrap();
    assert!((eta - 700.0 / told["images_per_second"].as_f64().unwrap()).abs() < 1e-6);
    assert!(!output.exists(), "nothing is stored");
    let shown = cluster
        .submit(folder.images().to_str().unwrap(), output.to_str().unwrap())
        .arg("--dry-run")
        .run();
    let words = String::from_utf8(shown.stdout).unwrap();
    assert!(
        words.contains("images      700") && words.contains("bottleneck"),
        "{words}"
    );
    // The job itself continues as if nothing had been.
    cluster.classify(folder.images().to_str().unwrap(), output.to_str().unwrap());
    assert_each_index_once(&rows(&output), 700);
}

#[test]
fn a_dry_run_that_no_worker_serves_says_what_is_missing() {
    let folder = Folder::with_digits(20);
    let mut cluster = Cluster::with(&["ingest"]);
    let output = folder.path("rows/");
    let mut dry = cluster
        .submit(folder.images().to_str().unwrap(), output.to_str().unwrap())
        .args(["--dry-run", "--json"])
        .spawn_logging(&folder.path("errors"));
    wait_for("the dry run says what is missing", || {
        let said = std::fs::read_to_string(folder.path("errors")).unwrap();
        said.contains("trommel worker --role preprocess")
    });
    for role in ["preprocess", "infer", "sink"] {
        cluster.start(role, &[]);
    }
    assert!(dry.wait().unwrap().success());
}

/// A notification as S3-compatible stores publish it.
fn notification(key: &str) -> String {
    json!({
        "EventName": "s3:ObjectCreated:Put",
        "Key": format!("photos/{key}"),
        "Records": [{
            "eventName": "s3:ObjectCreated:Put",
            "eventTime": "2026-11-21T08:00:00.000Z",
            "s3": {"bucket": {"name": "photos"}, "object": {"key": key, "size": 100}},
        }],
    })
    .to_string()
}

#[test]
fn new_objects_are_classified_as_their_events_come() {
    let server = S3Server::start();
    server.create_bucket("photos");
    let mut cluster = Cluster::new().s3(&server);
    cluster.sources.push("nats://bucket.events".to_owned());
    let roles: Vec<usize> = PIPELINE
        .iter()
        .map(|role| cluster.start(role, &[]))
        .collect();
    cluster.await_ready();
    cluster.create_stream("BUCKET", "bucket.events");
    let run = cluster
        .submit("nats://bucket.events", "s3://photos/rows/")
        .args(["--id", "standing"])
        .run();
    cluster.assert_code(&run, 0);
    let put = |number: usize| {
        let key = format!("new/{number:03}.png");
        let image = &digits()[number % digits().len()];
        server.put("photos", &key, &std::fs::read(image).unwrap());
        key
    };
    let committed = |cluster: &Cluster| {
        let run = cluster
            .command(["jobs", "show", "standing", "--json"])
            .run();
        let status: Value = serde_json::from_slice(&run.stdout).unwrap_or_default();
        status["models"][0]["committed"].as_u64().unwrap_or(0)
    };
    wait_for("the job runs", || {
        let run = cluster
            .command(["jobs", "show", "standing", "--json"])
            .run();
        String::from_utf8_lossy(&run.stdout).contains("\"running\"")
    });
    for number in 0..20 {
        cluster.publish("bucket.events", notification(&put(number)).as_bytes());
    }
    cluster.publish("bucket.events", b"no notification");
    wait_for("the first rows", || committed(&cluster) == 20);
    // What comes while nobody lists is not lost, nor is what was listed done again.
    cluster.kill(roles[0]);
    for number in 20..50 {
        cluster.publish("bucket.events", notification(&put(number)).as_bytes());
    }
    cluster.start_again(roles[0]);
    cluster.await_ready();
    wait_for("all rows", || committed(&cluster) == 50);
    cluster.assert_code(&cluster.command(["jobs", "cancel", "standing"]).run(), 0);
    let rows = rows(&server.path("photos", "rows"));
    assert_each_index_once(&rows, 50);
    let mut uris: Vec<_> = rows.iter().map(|row| row.uri.as_str()).collect();
    uris.sort_unstable();
    uris.dedup();
    assert_eq!(uris.len(), 50);
    assert!(rows.iter().all(|row| row.status == "ok"));
    assert_eq!(rows[0].columns["event_name"], "s3:ObjectCreated:Put");
}

#[test]
fn models_come_from_a_bucket() {
    let server = S3Server::start();
    server.create_bucket("models");
    let upload = |version: &str| {
        for file in ["model.onnx", "config.json", "preprocessor_config.json"] {
            let content = std::fs::read(digits_model().join(file)).unwrap();
            server.put("models", &format!("all/digits/{version}/{file}"), &content);
        }
    };
    upload("1");
    let folder = Folder::with_digits(100);
    let mut cluster = Cluster::new().s3(&server).env(
        "TROMMEL_MODEL_CACHE",
        folder.path("cache").to_str().unwrap(),
    );
    cluster.set_repository("s3://models/all".as_ref());
    for role in PIPELINE {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let output = folder.path("rows/");
    cluster.classify(folder.images().to_str().unwrap(), output.to_str().unwrap());
    assert_each_index_once(&rows(&output), 100);
    let listed = cluster.command(["jobs", "models"]).run();
    assert!(String::from_utf8_lossy(&listed.stdout).contains("digits"));
    // Nothing that is not under the prefix is considered a model.
    let wrong = cluster
        .command([
            "worker",
            "--role",
            "preprocess",
            "--model-repository",
            "s3://models/none/",
        ])
        .run();
    assert_code(&wrong, 2);
    assert!(
        stderr(&wrong).contains("has no models"),
        "{}",
        stderr(&wrong)
    );
}

#[test]
fn a_tensor_that_no_message_can_hold_ends_its_job_and_no_worker() {
    let folder = Folder::new();
    let models = folder.path("models");
    std::fs::create_dir_all(models.join("large")).unwrap();
    for file in ["model.onnx", "config.json", "preprocessor_config.json"] {
        std::fs::copy(digits_model().join(file), models.join("large").join(file)).unwrap();
    }
    std::fs::write(
        models.join("large/trommel.toml"),
        "[preprocess]\nresize = [1200, 1200]\n",
    )
    .unwrap();
    let mut cluster = Cluster::new();
    cluster.set_repository(&models);
    for file in ["model.onnx", "config.json", "preprocessor_config.json"] {
        std::fs::create_dir_all(models.join("digits")).unwrap();
        std::fs::copy(digits_model().join(file), models.join("digits").join(file)).unwrap();
    }
    cluster.start("ingest,sink", &[]);
    cluster.start("preprocess", &[]);
    cluster.await_ready();
    let images = Folder::with_digits(3);
    let images = images.images();
    let images = images.to_str().unwrap();
    let large = cluster
        .command(["submit", images, "--model", "large", "--wait", "--output"])
        .arg(folder.path("large/"))
        .run();
    cluster.assert_code(&large, 1);
    let words = stderr(&large);
    assert!(
        words.contains("max_payload") && words.contains("4320000"),
        "{words}"
    );
    // R47: it stopped every preprocess worker, whatever the jobs were.
    cluster.start("infer", &[]);
    cluster.await_ready();
    cluster.classify(images, folder.path("rows/").to_str().unwrap());
}

#[test]
fn top_shows_jobs_stages_and_what_to_turn() {
    let folder = Folder::with_digits(200);
    let cluster = Cluster::with(&["ingest", "preprocess", "sink"]);
    let top = || {
        let run = cluster.command(["top", "--once"]).run();
        cluster.assert_code(&run, 0);
        String::from_utf8(run.stdout).unwrap()
    };
    assert!(top().contains("no job is running"));
    let output = folder.path("rows/");
    let submitted = cluster
        .submit(folder.images().to_str().unwrap(), output.to_str().unwrap())
        .args(["--id", "photos"])
        .run();
    cluster.assert_code(&submitted, 0);
    let shown = top();
    for words in [
        "photos",
        "running",
        "preprocess",
        "no worker has the role infer",
    ] {
        assert!(shown.contains(words), "{words}:\n{shown}");
    }
    let preprocess = shown
        .lines()
        .find(|line| line.contains("preprocess"))
        .unwrap();
    let workers = preprocess.split_whitespace().nth(1);
    assert_eq!(workers, Some("1"), "{shown}");
}

/// A job keeps the version that it began with; the next one takes the newest. Nobody is restarted.
#[test]
fn a_new_version_of_a_model_is_taken_into_use_while_a_job_of_the_old_one_goes_on() {
    let folder = Folder::with_digits(2000);
    let repository = folder.path("repository");
    let add = |version: &str, from: &str, to: &str| {
        let dir = repository.join("digits").join(version);
        std::fs::create_dir_all(&dir).unwrap();
        for file in ["model.onnx", "preprocessor_config.json"] {
            std::fs::copy(digits_model().join(file), dir.join(file)).unwrap();
        }
        let config = std::fs::read_to_string(digits_model().join("config.json")).unwrap();
        std::fs::write(dir.join("config.json"), config.replace(from, to)).unwrap();
    };
    add("1", "", "");
    let mut cluster = Cluster::new();
    cluster.set_repository(&repository);
    for role in PIPELINE {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let submit = |id: &str| {
        let output = folder.path(&format!("{id}/"));
        let images = folder.images();
        let run = cluster
            .submit(images.to_str().unwrap(), output.to_str().unwrap())
            .args(["--id", id])
            .run();
        cluster.assert_code(&run, 0);
    };
    submit("old");
    wait_for("the job begins", || {
        let shown = cluster.command(["jobs", "show", "old", "--json"]).run();
        let status: Value = serde_json::from_slice(&shown.stdout).unwrap();
        status["state"] != "queued"
    });
    add("2", "\"3\": \"3\"", "\"3\": \"three\"");
    submit("new");
    // Every worker reports both versions.
    cluster.eventually("all workers tell of the new version", || {
        let told = ask(&cluster, "trommel.api.workers");
        let workers = told.as_array().unwrap();
        let has_both = |worker: &Value| worker["models"]["digits"].as_array().unwrap().len() == 2;
        (workers.len() == PIPELINE.len() && workers.iter().all(has_both)).then_some(())
    });
    for id in ["old", "new"] {
        cluster.assert_code(&cluster.command(["jobs", "watch", id]).run(), 0);
    }
    let labels = |id: &str| {
        let rows = rows(&folder.path(&format!("{id}/")));
        assert_each_index_once(&rows, 2000);
        let labels = rows.into_iter().map(|row| row.label.unwrap());
        labels.collect::<Vec<_>>()
    };
    let (old, new) = (labels("old"), labels("new"));
    assert!(old.iter().any(|label| label == "3") && !old.iter().any(|label| label == "three"));
    let renamed = old.iter().map(|label| match label.as_str() {
        "3" => "three".to_owned(),
        label => label.to_owned(),
    });
    let differ = renamed.zip(&new).filter(|(old, new)| old != *new);
    assert_eq!(differ.collect::<Vec<_>>(), []);
}
