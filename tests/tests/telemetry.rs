//! Metrics, health, traces and logs of the processes of a pipeline.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::Value;
use trommel_storage::testsuite::S3Server;
use trommel_tests::{
    Cluster, Collector, Folder, Traced, Trommel, assert_code, free_address, get, root, rows,
    stderr, sum,
};

const ROLES: [&str; 4] = ["ingest", "preprocess", "infer", "sink"];

/// A process for each role, and where each answers.
fn listening(mut cluster: Cluster) -> (Cluster, BTreeMap<&'static str, SocketAddr>) {
    let mut addresses = BTreeMap::new();
    for role in ROLES {
        let address = free_address();
        cluster.start(role, &["--listen", &address.to_string()]);
        addresses.insert(role, address);
    }
    cluster.await_ready();
    (cluster, addresses)
}

/// The metrics of `docs/metrics.md`: name, kind and the roles that have it from the first job on.
fn documented() -> Vec<(String, String, Vec<String>)> {
    let text = std::fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let cells = |line: &str| -> Vec<String> {
        line.split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let rows = text.lines().filter(|line| line.starts_with("| `trommel_"));
    rows.map(|line| {
        let cells = cells(line);
        let roles = cells[4].split(' ').map(str::to_owned);
        let roles = match cells[4].as_str() {
            "on demand" => Vec::new(),
            _ => roles.collect(),
        };
        (
            cells[1].trim_matches('`').to_owned(),
            cells[2].clone(),
            roles,
        )
    })
    .collect()
}

#[test]
fn every_documented_metric_is_at_its_role_and_counts_what_it_says() {
    let folder = Folder::with_digits(300);
    std::fs::write(folder.images().join("broken.jpg"), "text").unwrap();
    let (cluster, addresses) = listening(Cluster::new());
    let output = folder.path("rows/");
    let run = cluster.classify(folder.images().to_str().unwrap(), output.to_str().unwrap());
    cluster.assert_code(&run, 0);

    let metrics: BTreeMap<_, _> = addresses
        .iter()
        .map(|(role, address)| (*role, get(*address, "/metrics").unwrap().1))
        .collect();
    let documented = documented();
    assert!(documented.len() > 20, "{documented:?}");
    for (name, kind, roles) in &documented {
        for role in roles {
            let found = &metrics[role.as_str()];
            let declared = format!("# TYPE {name} {kind}\n");
            assert!(
                found.contains(&declared),
                "{name} is no {kind} at {role}:\n{found}"
            );
        }
    }
    let known: BTreeSet<_> = documented.iter().map(|(name, ..)| name.as_str()).collect();
    for (role, metrics) in &metrics {
        for line in metrics
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
        {
            let name = line.split(' ').next().unwrap();
            assert!(known.contains(name), "{name} of {role} is not documented");
        }
    }

    let done = r#"disposition="done""#;
    assert_eq!(
        sum(&metrics["ingest"], "trommel_listed_images_total", &[]),
        301.0
    );
    let preprocess = &metrics["preprocess"];
    assert_eq!(sum(preprocess, "trommel_deliveries_total", &[done]), 300.0);
    let dead = r#"disposition="dead_letter""#;
    assert_eq!(sum(preprocess, "trommel_deliveries_total", &[dead]), 1.0);
    assert_eq!(sum(preprocess, "trommel_decode_seconds_count", &[]), 301.0);
    assert!(sum(preprocess, "trommel_fetched_bytes_total", &[]) > 100_000.0);
    assert_eq!(sum(preprocess, "trommel_in_flight", &[]), 0.0);
    let infer = &metrics["infer"];
    assert_eq!(
        sum(infer, "trommel_batch_size_sum", &[r#"model="digits""#]),
        300.0
    );
    assert_eq!(sum(infer, "trommel_model_loads_total", &[]), 1.0);
    let sink = &metrics["sink"];
    assert_eq!(sum(sink, "trommel_rows_total", &[r#"status="ok""#]), 300.0);
    assert_eq!(
        sum(sink, "trommel_rows_total", &[r#"status="failed""#]),
        1.0
    );
    assert_eq!(
        sum(
            sink,
            "trommel_failures_total",
            &[r#"kind="unknown_format""#]
        ),
        1.0
    );
    assert_eq!(sum(sink, "trommel_committed_rows_total", &[]), 301.0);
    assert_eq!(sum(sink, "trommel_queue_wait_seconds_count", &[]), 301.0);
    assert_eq!(rows(&output).len(), 301);
}

#[test]
fn a_process_is_ready_while_its_broker_is_there_and_its_model_is_warm() {
    let mut cluster = Cluster::new().env("TROMMEL_INFER__PRELOAD", r#"["digits"]"#);
    let address = free_address();
    cluster.start("infer", &["--listen", &address.to_string()]);
    cluster.await_ready();
    assert_eq!(get(address, "/healthz").unwrap(), (200, "ok\n".to_owned()));
    assert_eq!(get(address, "/readyz").unwrap(), (200, "ok\n".to_owned()));
    let metrics = get(address, "/metrics").unwrap().1;
    assert_eq!(
        sum(
            &metrics,
            "trommel_model_loads_total",
            &[r#"model="digits""#]
        ),
        1.0
    );
    assert_eq!(get(address, "/elsewhere").unwrap().0, 404);

    cluster.nats.kill();
    await_readiness(address, 503, "the broker is away");
    assert_eq!(get(address, "/healthz").unwrap().0, 200);
    cluster.nats.restart();
    await_readiness(address, 200, "ok");
}

#[track_caller]
fn await_readiness(address: SocketAddr, status: u16, text: &str) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let (found, body) = get(address, "/readyz").unwrap();
        if found == status && body.contains(text) {
            return;
        }
        assert!(Instant::now() < deadline, "{found}: {body}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_model_that_is_to_be_preloaded_and_is_not_there_is_named_at_start() {
    let mut cluster = Cluster::new().env("TROMMEL_INFER__PRELOAD", r#"["cats"]"#);
    let number = cluster.start("infer", &[]);
    assert_ne!(cluster.wait(number), Some(0));
    assert!(
        cluster.log(number).contains("cats"),
        "{}",
        cluster.log(number)
    );
}

#[test]
fn an_address_that_is_taken_is_an_error_at_start() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let folder = Folder::with_digits(1);
    let run = Trommel::classify(&folder.images(), &folder.path("x.parquet"))
        .args(["--listen", &address])
        .run();
    assert_code(&run, 2);
    assert!(stderr(&run).contains(&format!("telemetry.listen = {address}")));
    assert!(!folder.path("x.parquet").exists());
}

/// The traces of a job over four processes: each image in one, each with its batch.
fn check_traces(collector: &Collector, protocol: &str) {
    const IMAGES: usize = 60;
    let folder = Folder::with_digits(IMAGES);
    let mut cluster = Cluster::new()
        .env("TROMMEL_TELEMETRY__OTLP_ENDPOINT", &collector.url())
        .env("TROMMEL_TELEMETRY__OTLP_PROTOCOL", protocol)
        .env("TROMMEL_TELEMETRY__SAMPLE", "1");
    for role in ROLES {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let output = folder.path("rows/");
    let run = cluster.classify(folder.images().to_str().unwrap(), output.to_str().unwrap());
    cluster.assert_code(&run, 0);

    let is = |name: &'static str| move |found: &&Traced| found.span.name == name;
    let all = |spans: &[Traced]| {
        let images = [
            "ingest.image",
            "preprocess.image",
            "infer.image",
            "sink.image",
        ];
        images
            .iter()
            .all(|name| spans.iter().filter(is(name)).count() >= IMAGES)
    };
    let spans = collector.spans(all);
    let batches: BTreeSet<_> = spans
        .iter()
        .filter(is("infer.batch"))
        .map(|batch| batch.span.span_id.clone())
        .collect();
    assert!(!batches.is_empty());
    let mut traces = BTreeMap::<Vec<u8>, Vec<&Traced>>::new();
    for span in &spans {
        traces
            .entry(span.span.trace_id.clone())
            .or_default()
            .push(span);
    }
    assert_eq!(traces.len(), IMAGES, "one trace an image");
    for trace in traces.values() {
        let one = |name: &'static str| {
            let found: Vec<_> = trace.iter().copied().filter(is(name)).collect();
            assert_eq!(found.len(), 1, "{name} in {trace:?}");
            found[0]
        };
        let [ingest, preprocess, infer, sink] = [
            "ingest.image",
            "preprocess.image",
            "infer.image",
            "sink.image",
        ]
        .map(one);
        let processes: BTreeSet<_> = [ingest, preprocess, infer, sink]
            .map(|span| span.process)
            .into();
        assert_eq!(processes.len(), 4, "four processes");
        assert!(ingest.span.parent_span_id.is_empty());
        for (child, parent) in [(preprocess, ingest), (infer, preprocess), (sink, infer)] {
            assert_eq!(child.span.parent_span_id, parent.span.span_id);
            assert_eq!(child.attribute("image_id"), ingest.attribute("image_id"));
        }
        let links = &infer.span.links;
        assert_eq!(links.len(), 1, "one batch: {infer:?}");
        assert!(batches.contains(&links[0].span_id));
    }
}

#[test]
fn one_image_is_one_trace_over_four_processes() {
    check_traces(&Collector::grpc(), "grpc");
}

#[test]
fn traces_are_sent_over_http_too() {
    check_traces(&Collector::http(), "http");
}

#[test]
fn a_collector_that_is_away_stops_no_job() {
    let folder = Folder::with_digits(50);
    let output = folder.path("rows.parquet");
    let run = Trommel::classify(&folder.images(), &output)
        .args(["--otlp-endpoint", &format!("http://{}", free_address())])
        .env("TROMMEL_TELEMETRY__SAMPLE", "1")
        .run();
    assert_code(&run, 0);
    assert_eq!(rows(&output).len(), 50);
}

#[test]
fn log_lines_as_json_name_the_image_and_its_trace() {
    let collector = Collector::grpc();
    let folder = Folder::with_digits(20);
    let server = S3Server::start();
    folder.upload(&server, "photos");
    let names = folder.images().read_dir().unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let list: String = names
        .map(|name| format!("s3://photos/images/{name}\n"))
        .collect();
    std::fs::write(folder.path("list.txt"), list).unwrap();
    let mut cluster = Cluster::new()
        .s3(&server)
        .env("TROMMEL_TELEMETRY__LOG_FORMAT", "json")
        .env("TROMMEL_TELEMETRY__OTLP_ENDPOINT", &collector.url())
        .env("TROMMEL_TELEMETRY__SAMPLE", "1")
        .env("TROMMEL_S3__ATTEMPTS", "1");
    for role in ROLES {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    server.be_unavailable(3);
    let (list, output) = (folder.path("list.txt"), folder.path("rows/"));
    let run = cluster.classify(list.to_str().unwrap(), output.to_str().unwrap());
    cluster.assert_code(&run, 0);

    let log = cluster.log(cluster.of_role("preprocess")[0]);
    let lines = log.lines().filter(|line| line.starts_with('{'));
    let lines = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
    let put_off: Vec<_> = lines
        .filter(|line| line["message"] == "will be tried again")
        .collect();
    assert!(!put_off.is_empty(), "{log}");
    let text = |line: &Value, field: &str| line["span"][field].as_str().unwrap().to_owned();
    let spans = collector.spans(|spans| {
        let of_sink = spans.iter().filter(|found| found.span.name == "sink.image");
        of_sink.count() == 20
    });
    for line in put_off {
        let trace = text(&line, "trace_id");
        let image = spans.iter().find(|found| {
            let id: String = found
                .span
                .trace_id
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            found.span.name == "ingest.image" && id == trace
        });
        let image = image.and_then(|found| found.attribute("image_id"));
        assert_eq!(image, Some(text(&line, "image_id")));
    }
}
