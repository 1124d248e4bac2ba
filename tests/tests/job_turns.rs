//! Jobs that stall, open slowly or end their workers: which worker processes them, and who is notified of their
//! end.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio_stream::StreamExt;
use trommel_storage::testsuite::S3Server;
use trommel_tests::{Cluster, Folder, assert_each_index_once, digits_model, rows};
use trommel_types::{Content, ImageRef, ImageSize, Lane, Message, PreparedImage, Shape};

const ALL: &str = "ingest,preprocess,infer,sink";

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn submit(cluster: &Cluster, id: &str, source: &Path, output: &str) {
    let run = cluster
        .submit(text(source), output)
        .args(["--id", id])
        .run();
    cluster.assert_code(&run, 0);
}

/// What a job shows, once `is_so` holds.
fn shown(cluster: &Cluster, id: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    cluster.eventually(&format!("{id} {what}"), || {
        let run = cluster.command(["jobs", "show", id, "--json"]).run();
        let status = serde_json::from_slice(&run.stdout).ok()?;
        is_so(&status).then_some(status)
    })
}

/// Copies the shipped model to a folder of its own.
fn copy_model(to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for file in ["model.onnx", "config.json", "preprocessor_config.json"] {
        std::fs::copy(digits_model().join(file), to.join(file)).unwrap();
    }
}

/// R15: a job that ends whoever lists it took one ingest worker after the other, and the control API
/// with it.
#[test]
fn a_job_that_ends_its_workers_fails_after_ten_of_them() {
    let folder = Folder::with_digits(20);
    let server = S3Server::start();
    server.create_bucket("photos");
    server.put("photos", "images/a.jpg", b"a");
    // Its listing takes so long that each worker is killed in it.
    server.slow_down(Duration::from_secs(60));
    let mut cluster = Cluster::new()
        .s3(&server)
        .env("TROMMEL_BROKER__ACK_WAIT", "1s")
        .env("TROMMEL_SINK__LEASE", "1s");
    let worker = cluster.start(ALL, &[]);
    cluster.await_ready();
    let output = folder.path("deadly/");
    submit(
        &cluster,
        "deadly",
        Path::new("s3://photos/images/"),
        text(&output),
    );
    for starts in 1..=2 {
        let begun = || cluster.checkpoint("deadly")?["listing"]["starts"].as_u64();
        cluster.eventually("its listing begins", || {
            (begun() == Some(starts)).then_some(())
        });
        cluster.kill(worker);
        if starts == 2 {
            // As after eight more.
            let mut checkpoint = cluster.checkpoint("deadly").unwrap();
            checkpoint["listing"]["starts"] = 10.into();
            cluster.write_checkpoint("deadly", &checkpoint);
        }
        cluster.start_again(worker);
    }
    let status = shown(&cluster, "deadly", "fails", |status| {
        status["state"] == "failed"
    });
    let reason = status["reason"]["text"].as_str().unwrap();
    assert!(reason.contains("10 times"), "{reason}");
    assert_eq!(status["reason"]["kind"], "attempts");
    let output = folder.path("rows/");
    cluster.classify(text(&folder.images()), text(&output));
    assert_each_index_once(&rows(&output), 20);
    cluster.assert_all_alive();
}

/// R18: an output that takes longer than the lease to open, or to finish, went from sink to sink forever.
#[test]
fn an_output_that_opens_longer_than_the_lease_stays_with_its_sink() {
    let folder = Folder::with_digits(20);
    let server = S3Server::start();
    server.create_bucket("rows");
    // An opening is several of these, one after the other.
    server.slow_down(Duration::from_millis(800));
    let mut cluster = Cluster::new().s3(&server).env("TROMMEL_SINK__LEASE", "2s");
    for roles in ["ingest,preprocess,infer", "sink", "sink"] {
        cluster.start(roles, &[]);
    }
    cluster.await_ready();
    submit(&cluster, "slow", &folder.images(), "s3://rows/slow/");
    shown(&cluster, "slow", "completes", |status| {
        status["state"] == "complete"
    });
    let held = &cluster.checkpoint("slow").unwrap()["rows"]["digits"]["held"];
    // On a machine that stands still for seconds a lease may run out, but not each time.
    assert!(held["fence"].as_u64().unwrap() < 4, "{held}");
}

/// R25: a sink with room for one job looked at the oldest only, which another sink held.
#[test]
fn a_sink_with_room_takes_a_job_that_nobody_has() {
    let folder = Folder::with_digits(20);
    let mut cluster = Cluster::new().env("TROMMEL_SINK__MAX_JOBS", "1");
    // Without preprocess both jobs stand still.
    for roles in ["ingest", "sink"] {
        cluster.start(roles, &[]);
    }
    cluster.await_ready();
    let holder = |id: &str| {
        let checkpoint = cluster.checkpoint(id)?;
        let owner = checkpoint["rows"]["digits"]["held"]["owner"].as_str()?;
        (!owner.is_empty()).then(|| owner.to_owned())
    };
    submit(
        &cluster,
        "first",
        &folder.images(),
        text(&folder.path("first/")),
    );
    let first = cluster.eventually("a sink has the first job", || holder("first"));
    submit(
        &cluster,
        "second",
        &folder.images(),
        text(&folder.path("second/")),
    );
    shown(&cluster, "second", "runs", |status| {
        status["state"] == "running"
    });
    assert_eq!(holder("second"), None, "the only sink has no room");
    cluster.start("sink", &[]);
    let holder = |id: &str| {
        let checkpoint = cluster.checkpoint(id)?;
        let owner = checkpoint["rows"]["digits"]["held"]["owner"].as_str()?;
        (!owner.is_empty()).then(|| owner.to_owned())
    };
    let second = cluster.eventually("a sink has the second job", || holder("second"));
    assert_ne!(first, second);
    assert_eq!(holder("first"), Some(first));
}

/// Events by job and what happened.
type Events = BTreeMap<(String, String), Vec<Value>>;

/// The events that came so far.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Events>>);

impl Heard {
    /// Listens on a thread of its own until the test ends; returns once the broker knows.
    fn listen(url: String) -> Self {
        let heard = Self::default();
        let (all, (ready, is_ready)) = (heard.clone(), std::sync::mpsc::sync_channel(1));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(async {
                let client = async_nats::connect(url).await.unwrap();
                let mut events = client.subscribe("trommel.events.>").await.unwrap();
                client.flush().await.unwrap();
                ready.send(()).unwrap();
                while let Some(event) = events.next().await {
                    let body: Value = serde_json::from_slice(&event.payload).unwrap();
                    let what = event.subject.rsplit('.').next().unwrap().to_owned();
                    let job = body["job"].as_str().unwrap().to_owned();
                    let mut all = all.0.lock().unwrap();
                    all.entry((job, what)).or_default().push(body);
                }
            });
        });
        is_ready.recv().unwrap();
        heard
    }

    fn of(&self, job: &str, what: &str) -> Vec<Value> {
        let all = self.0.lock().unwrap();
        let key = (job.to_owned(), what.to_owned());
        all.get(&key).cloned().unwrap_or_default()
    }

    fn ends_of(&self, job: &str) -> Vec<String> {
        let ends = ["completed", "failed", "cancelled"];
        let each = ends.iter().flat_map(|what| {
            let times = self.of(job, what).len();
            std::iter::repeat_n((*what).to_owned(), times)
        });
        each.collect()
    }
}

/// R45: the end of a job was reported twice, or never; progress never.
#[test]
fn whoever_listens_hears_of_progress_and_once_of_the_end() {
    let folder = Folder::with_digits(40);
    let models = folder.path("models");
    for name in ["digits", "numbers"] {
        copy_model(&models.join(name));
    }
    let mut cluster = Cluster::new();
    cluster.set_repository(&models);
    for roles in ["ingest", "preprocess", "sink", "sink"] {
        cluster.start(roles, &[]);
    }
    cluster.await_ready();
    let heard = Heard::listen(cluster.nats.url());
    let images = folder.images();
    submit(&cluster, "stopped", &images, text(&folder.path("stopped/")));
    submit(
        &cluster,
        "broken",
        &folder.path("nowhere/"),
        text(&folder.path("broken/")),
    );
    // The last two sinks of a job with two models may end it at the same time.
    let two = cluster
        .submit(text(&images), text(&folder.path("both/")))
        .args(["--model", "numbers", "--id", "both"])
        .run();
    cluster.assert_code(&two, 0);
    // Nothing is classified yet, so it continues for as long as this takes.
    cluster.eventually("progress is reported", || {
        heard.of("stopped", "progress").pop()
    });
    for _ in 0..2 {
        let cancelled = cluster.command(["jobs", "cancel", "stopped"]).run();
        cluster.assert_code(&cancelled, 0);
    }
    cluster.start("infer", &[]);
    for (job, end) in [
        ("both", "completed"),
        ("stopped", "cancelled"),
        ("broken", "failed"),
    ] {
        cluster.eventually("its end is reported", || heard.of(job, end).pop());
    }
    // What came a second time came before the end of another job.
    submit(&cluster, "last", &images, text(&folder.path("last/")));
    cluster.eventually("its end is reported", || {
        heard.of("last", "completed").pop()
    });
    for (job, end) in [
        ("both", "completed"),
        ("stopped", "cancelled"),
        ("broken", "failed"),
    ] {
        assert_eq!(heard.ends_of(job), [end], "{job}");
    }
    let failed = &heard.of("broken", "failed")[0];
    assert_eq!(failed["state"], "failed");
    let reason = failed["reason"]["text"].as_str().unwrap();
    assert!(reason.contains("nowhere"), "{reason}");
}

/// R47: a model was hashed where everything else of the process waits for it.
#[test]
fn a_model_that_takes_long_to_read_keeps_nobody_waiting() {
    let folder = Folder::with_digits(20);
    let models = folder.path("models");
    copy_model(&models.join("digits"));
    // One thread for all that does not block.
    let mut cluster = Cluster::new().env("TOKIO_WORKER_THREADS", "1");
    cluster.set_repository(&models);
    cluster.start(ALL, &[]);
    cluster.await_ready();
    copy_model(&models.join("endless"));
    // What is hashed includes this file, which nobody ever writes.
    let pipe = models.join("endless/config.json");
    std::fs::remove_file(&pipe).unwrap();
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let job = json!({
        "id": "endless", "sources": [text(&folder.images())], "models": ["endless"],
        "output": text(&folder.path("endless-rows/")),
    });
    cluster.publish("trommel.jobs.normal", job.to_string().as_bytes());
    cluster.eventually("its model is being read", || {
        let starts = cluster.checkpoint("endless")?["listing"]["starts"].as_u64()?;
        (starts > 0).then_some(())
    });
    let output = folder.path("rows/");
    cluster.classify(text(&folder.images()), text(&output));
    assert_each_index_once(&rows(&output), 20);
}

/// R55: a tensor of a version that is not there, or of a model outside of the repository, ended each
/// infer worker that it came to.
#[test]
fn a_tensor_of_a_model_that_nobody_has_ends_no_worker() {
    let folder = Folder::with_digits(20);
    let mut cluster = Cluster::new();
    // Without preprocess its job waits.
    for roles in ["ingest,sink", "infer"] {
        cluster.start(roles, &[]);
    }
    cluster.await_ready();
    let outside = text(&digits_model()).to_owned();
    for (id, model, version) in [("versionless", "digits", ""), ("outside", &*outside, "1")] {
        submit(
            &cluster,
            id,
            &folder.images(),
            text(&folder.path(&format!("{id}/"))),
        );
        let status = shown(&cluster, id, "runs", |status| status["state"] == "running");
        let served = status["models"][0]["version"].as_str().unwrap();
        let tensor = PreparedImage {
            image: ImageRef {
                job: id.into(),
                lane: Lane::Normal,
                index: 0,
                uri: "a.jpg".to_owned(),
                content: Content::Whole,
                etag: None,
                size: None,
                columns: Vec::new(),
            },
            model: model.into(),
            model_version: version.into(),
            pixels: vec![0; 12].into(),
            shape: Shape {
                height: 2,
                width: 2,
                channels: 3,
            },
            bytes: 1,
            original: ImageSize {
                width: 2,
                height: 2,
            },
            attempts: 1,
            due_at: None,
        };
        let subject = format!("trommel.tensors.digits=40{served}.normal.{id}");
        cluster.publish(&subject, &tensor.encode());
        shown(&cluster, id, "fails", |status| status["state"] == "failed");
    }
    cluster.start("preprocess", &[]);
    let output = folder.path("rows/");
    cluster.classify(text(&folder.images()), text(&output));
    assert_each_index_once(&rows(&output), 20);
    cluster.assert_all_alive();
}
