//! A worker that answers requests next to its jobs, on the same threads and the same engine.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::Value;
use trommel_tests::{
    Cluster, Folder, Signal, assert_each_index_once, digits, free_address, get, rows, send,
};

const ALL: &str = "ingest,preprocess,infer,sink";
const PATH: &str = "/v1/models/digits/classify";

#[test]
fn requests_are_answered_while_a_job_runs_and_the_job_is_complete() {
    let folder = Folder::with_digits(1500);
    let mut cluster = Cluster::new().env("TROMMEL_SERVE__NATS", "true");
    let (telemetry, address) = (free_address(), free_address());
    let worker = cluster.start(
        ALL,
        &[
            "--listen",
            &telemetry.to_string(),
            "--serve",
            "digits",
            "--serve-listen",
            &address.to_string(),
        ],
    );
    cluster.await_ready();
    assert_eq!(
        send(address, "GET", "/v2/health/ready", &[], b"").status,
        200
    );
    let files: Vec<_> = digits().into_iter().step_by(61).take(10).collect();
    let images: Vec<_> = files
        .iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect();
    let output = folder.path("rows/");
    let source = folder.images();
    let (source, target) = (source.to_str().unwrap(), output.to_str().unwrap());
    let mut asked = 0;
    let answers = std::thread::scope(|scope| {
        let job = scope.spawn(|| cluster.classify(source, target));
        let mut answers = Vec::new();
        while !job.is_finished() || answers.len() < images.len() {
            let image = &images[asked % images.len()];
            let answer = send(address, "POST", PATH, &[], image);
            assert_eq!(answer.status, 200, "{:?}", answer.json());
            answers.push(answer.json()["label"].clone());
            asked += 1;
        }
        cluster.assert_code(&job.join().unwrap(), 0);
        answers
    });
    let rows = rows(&output);
    assert_each_index_once(&rows, 1500);
    assert!(rows.iter().all(|row| row.label.is_some()));
    // The same label whatever is classified next to it.
    for (number, label) in answers.iter().enumerate() {
        assert_eq!(*label, answers[number % images.len()]);
    }

    let metrics = get(telemetry, "/metrics").unwrap().1;
    let value = |line: &str| {
        let found = metrics.lines().find(|found| found.starts_with(line));
        let found = found.unwrap_or_else(|| panic!("no {line}: {metrics}"));
        found.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert_eq!(
        value("trommel_model_loads_total"),
        1.0,
        "one engine for both"
    );
    assert!(value("trommel_live_batch_fill_count") > 0.0);
    let images = value("trommel_batch_size_sum");
    assert_eq!(images, (1500 + asked) as f64);

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let row = runtime.block_on(async {
        let client = async_nats::connect(cluster.nats.url()).await.unwrap();
        let image = std::fs::read(&files[0]).unwrap();
        let subject = "trommel.classify.digits";
        client.request(subject, image.into()).await.unwrap()
    });
    let row: Value = serde_json::from_slice(&row.payload).unwrap();
    assert_eq!(row["label"], answers[0]);

    cluster.signal(worker, Signal::TERM);
    assert_eq!(cluster.wait(worker), Some(0), "{}", cluster.log(worker));
}

#[test]
fn who_cannot_answer_says_so_at_start() {
    let mut cluster = Cluster::new();
    for (roles, model, words) in [
        ("ingest,infer", "digits", "preprocess and infer"),
        (ALL, "cats", "cats"),
    ] {
        let address = free_address().to_string();
        let worker = cluster.start(roles, &["--serve", model, "--serve-listen", &address]);
        assert_eq!(cluster.wait(worker), Some(2));
        assert!(
            cluster.log(worker).contains(words),
            "{}",
            cluster.log(worker)
        );
    }
}
