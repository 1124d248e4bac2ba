//! The serve role in its own processes: it decodes, and infer workers compute.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::SocketAddr;
use std::thread;

use serde_json::Value;
use trommel_tests::{
    Cluster, Collector, Serving, Signal, Traced, assert_code, digits, eventually, free_address,
    get, python, send,
};

const PATH: &str = "/v1/models/digits/classify";
const READY: &str = "/v2/health/ready";

/// Digits of every kind, as files.
fn images(count: usize) -> Vec<Vec<u8>> {
    let step = digits().len() / count;
    let files = digits().into_iter().step_by(step).take(count);
    files.map(|file| std::fs::read(file).unwrap()).collect()
}

/// Starts a serve worker; gives where it answers. It is at work, and ready only with an infer worker.
fn start_serve(cluster: &mut Cluster, args: &[&str]) -> (usize, SocketAddr, SocketAddr) {
    let (address, telemetry) = (free_address(), free_address());
    let (listen, watched) = (address.to_string(), telemetry.to_string());
    let mut all = vec![
        "--serve",
        "digits",
        "--serve-listen",
        &listen,
        "--listen",
        &watched,
    ];
    all.extend(args);
    let worker = cluster.start("serve", &all);
    cluster.await_ready();
    (worker, address, telemetry)
}

fn start_infer(cluster: &mut Cluster) -> usize {
    let worker = cluster.start("infer", &["--serve", "digits"]);
    cluster.await_ready();
    worker
}

fn await_status(address: SocketAddr, status: u16) {
    eventually("its readiness is what it should be", || {
        (send(address, "GET", READY, &[], b"").status == status).then_some(())
    });
}

fn error(answer: &trommel_tests::Answer) -> (u16, String, String) {
    let (status, kind) = answer.kind();
    let text = answer.json()["error"].as_str().unwrap().to_owned();
    (status, kind, text)
}

#[test]
fn all_entrances_answer_as_one_process_does() {
    let mut cluster = Cluster::new()
        .env("TROMMEL_SERVE__NATS", "true")
        .env("TROMMEL_SERVE__MAX_FILES", "8");
    let (serve, address, telemetry) = start_serve(&mut cluster, &[]);
    // Without an infer worker it says what is missing.
    assert_eq!(send(address, "GET", READY, &[], b"").status, 503);
    let (status, text) = get(telemetry, "/readyz").unwrap();
    assert_eq!(status, 503);
    assert!(text.contains("warm model digits"), "{text}");
    let images = images(6);
    let (status, kind, text) = error(&send(address, "POST", PATH, &[], &images[0]));
    assert_eq!((status, kind.as_str()), (503, "unavailable"));
    assert!(
        text.contains("digits") && text.contains("--role infer"),
        "{text}"
    );
    let model = send(address, "GET", "/v1/models/digits", &[], b"");
    assert_eq!(model.kind(), (503, "unavailable".to_owned()));

    let infer = start_infer(&mut cluster);
    await_status(address, 200);
    let model = eventually("the labels are told", || {
        let model = send(address, "GET", "/v1/models/digits", &[], b"");
        (model.status == 200).then(|| model.json())
    });
    assert_eq!(model["labels"].as_array().unwrap().len(), 10);

    let alone = Serving::start(&[], &[]);
    let row = |answer: &trommel_tests::Answer| {
        let mut row = answer.json();
        for name in ["job_id", "finished_at", "score"] {
            row.as_object_mut().unwrap().remove(name);
        }
        row["top"] = row["top"][0]["label"].clone();
        row
    };
    for image in &images {
        let (here, there) = (
            alone.classify(image, &[]),
            send(address, "POST", PATH, &[], image),
        );
        assert_eq!(there.status, 200, "{:?}", there.json());
        assert_eq!(row(&there), row(&here));
    }
    let ask = |query: &str| send(address, "POST", &format!("{PATH}?{query}"), &[], &images[0]);
    let answer = ask("top_k=2&logits=true&threshold_of=7%3D0.5").json();
    assert_eq!(answer["logits"].as_array().unwrap().len(), 10);
    for query in ["threshold_of=cat%3D0.5", "embedding=true"] {
        assert_eq!(ask(query).kind(), (400, "malformed".to_owned()), "{query}");
    }
    let broken = send(address, "POST", PATH, &[], b"no image");
    assert_eq!(broken.kind(), (415, "unknown_format".to_owned()));
    let late = send(
        address,
        "POST",
        PATH,
        &["trommel-deadline-ms: 0"],
        &images[0],
    );
    assert_eq!(late.kind(), (504, "deadline".to_owned()));

    // Triton's client, and NATS.
    let program = "import sys, numpy as np, tritonclient.http as triton\n\
        client = triton.InferenceServerClient(sys.argv[1])\n\
        assert client.is_server_ready() and client.is_model_ready('digits')\n\
        images = [open(path, 'rb').read() for path in sys.argv[2:]]\n\
        tensor = triton.InferInput('image', [len(images)], 'BYTES')\n\
        tensor.set_data_from_numpy(np.array(images, dtype=np.object_))\n\
        labels = client.infer('digits', [tensor]).as_numpy('label')\n\
        print(' '.join(label.decode() for label in labels))";
    let files: Vec<_> = digits().into_iter().step_by(97).take(4).collect();
    let mut args = vec![address.to_string()];
    args.extend(files.iter().map(|file| file.to_str().unwrap().to_owned()));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let run = python(program, &args);
    assert_code(&run, 0);
    let labels = String::from_utf8(run.stdout).unwrap();
    for (file, label) in files.iter().zip(labels.split_whitespace()) {
        let image = std::fs::read(file).unwrap();
        assert_eq!(alone.classify(&image, &[]).json()["label"], label);
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let stored = |cluster: &Cluster| {
        runtime.block_on(async {
            let client = async_nats::connect(cluster.nats.url()).await.unwrap();
            let context = async_nats::jetstream::new(client.clone());
            let image = images[0].clone();
            let row = client.request("trommel.classify.digits", image.into());
            let row: Value = serde_json::from_slice(&row.await.unwrap().payload).unwrap();
            let mut stored = 0;
            for stream in ["TASKS", "TENSORS", "RESULTS", "DEAD", "JOBS"] {
                let stream = context.get_stream(format!("TROMMEL_{stream}")).await;
                stored += stream.unwrap().info().await.unwrap().state.last_sequence;
            }
            (row["label"].clone(), stored)
        })
    };
    let (label, count) = stored(&cluster);
    assert_eq!(label, alone.classify(&images[0], &[]).json()["label"]);
    assert_eq!(count, 0, "nothing of a request is stored");

    // An infer worker that stops finishes its requests; without any, the model is gone.
    cluster.signal(infer, Signal::TERM);
    assert_eq!(cluster.wait(infer), Some(0), "{}", cluster.log(infer));
    await_status(address, 503);
    cluster.signal(serve, Signal::TERM);
    assert_eq!(cluster.wait(serve), Some(0), "{}", cluster.log(serve));
}

/// Requests in flight at a killed worker are sent to the other one.
#[test]
fn a_killed_infer_worker_fails_no_request_that_may_wait() {
    let mut cluster = Cluster::new().env("TROMMEL_SERVE__INFER_TIMEOUT", "5s");
    let (_, address, _) = start_serve(&mut cluster, &[]);
    let (one, _other) = (start_infer(&mut cluster), start_infer(&mut cluster));
    await_status(address, 200);
    let images = images(10);
    // Stopped, it is still in its group and takes requests; killed, it is gone with them.
    cluster.signal(one, Signal::STOP);
    let answers: Vec<_> = thread::scope(|scope| {
        let asked = (0..12).map(|number| {
            let image = &images[number % images.len()];
            scope.spawn(move || send(address, "POST", PATH, &[], image))
        });
        let asked: Vec<_> = asked.collect();
        cluster.kill(one);
        asked
            .into_iter()
            .map(|asked| asked.join().unwrap())
            .collect()
    });
    for answer in &answers {
        assert_eq!(answer.status, 200, "{:?}", answer.json());
    }
    // From then on all go to the one that is left.
    for image in &images {
        assert_eq!(send(address, "POST", PATH, &[], image).status, 200);
    }
}

/// A request's deadline travels with it, and ends the wait for a worker that hangs.
#[test]
fn a_worker_that_hangs_holds_nobody_beyond_the_deadline() {
    let mut cluster = Cluster::new().env("TROMMEL_SERVE__INFER_TIMEOUT", "2s");
    let (_, address, _) = start_serve(&mut cluster, &[]);
    let infer = start_infer(&mut cluster);
    await_status(address, 200);
    cluster.signal(infer, Signal::STOP);
    let image = &images(1)[0];
    let answer = send(address, "POST", PATH, &["trommel-deadline-ms: 200"], image);
    assert_eq!(answer.kind(), (504, "deadline".to_owned()));
    let (status, kind, text) = error(&send(address, "POST", PATH, &[], image));
    assert_eq!((status, kind.as_str()), (503, "unavailable"));
    assert!(text.contains("digits"), "{text}");
    await_status(address, 503);
    cluster.signal(infer, Signal::CONT);
    await_status(address, 200);
    assert_eq!(send(address, "POST", PATH, &[], image).status, 200);
}

/// Infer workers that come and go under load: no request is lost.
#[test]
fn infer_workers_that_are_replaced_lose_no_request() {
    // Ingest answers those who look.
    let mut cluster = Cluster::with(&["ingest"]);
    let (serve, address, telemetry) = start_serve(&mut cluster, &[]);
    let mut infer = start_infer(&mut cluster);
    await_status(address, 200);
    let images = images(8);
    let done = std::sync::atomic::AtomicBool::new(false);
    let asked = thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|number| {
                let (images, done) = (&images, &done);
                scope.spawn(move || {
                    let mut asked = 0;
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        let image = &images[(number + asked) % images.len()];
                        let answer = send(address, "POST", PATH, &[], image);
                        assert_eq!(answer.status, 200, "{:?}", answer.json());
                        asked += 1;
                    }
                    asked
                })
            })
            .collect();
        for _ in 0..3 {
            let next = start_infer(&mut cluster);
            cluster.signal(infer, Signal::TERM);
            assert_eq!(cluster.wait(infer), Some(0), "{}", cluster.log(infer));
            infer = next;
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .sum::<usize>()
    });
    assert!(asked > 0);
    let metrics = get(telemetry, "/metrics").unwrap().1;
    assert!(metrics.contains("trommel_request_queue_seconds_count{stage=\"decode\"}"));
    // The screen of operators has the latency of requests.
    let shown = eventually("top shows requests", || {
        let run = cluster.command(["top", "--once"]).run();
        let text = String::from_utf8_lossy(&run.stdout).into_owned();
        (text.contains("p95") && text.contains("http")).then_some(text)
    });
    assert!(shown.contains("p50") && shown.contains("p99"), "{shown}");
    cluster.signal(serve, Signal::TERM);
    assert_eq!(cluster.wait(serve), Some(0), "{}", cluster.log(serve));
}

#[test]
fn one_trace_goes_from_the_header_through_both_processes() {
    let collector = Collector::grpc();
    let mut cluster = Cluster::new().env("TROMMEL_TELEMETRY__OTLP_ENDPOINT", &collector.url());
    let (_, address, _) = start_serve(&mut cluster, &[]);
    start_infer(&mut cluster);
    await_status(address, 200);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let header = format!("traceparent: 00-{trace}-b7ad6b7169203331-01");
    let answer = send(address, "POST", PATH, &[&header], &images(1)[0]);
    assert_eq!(answer.status, 200);
    let hex = |bytes: &[u8]| {
        let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
        digits.collect::<String>()
    };
    let names = ["serve.request", "infer.request", "infer.batch"];
    let found = |spans: &[Traced], name: &str| {
        let mut of_trace = spans
            .iter()
            .filter(|traced| hex(&traced.span.trace_id) == trace);
        of_trace.find(|traced| traced.span.name == name).cloned()
    };
    let spans = collector.spans(|spans| names.iter().all(|name| found(spans, name).is_some()));
    let [serve, request, batch] = names.map(|name| found(&spans, name).unwrap());
    assert_ne!(serve.process, request.process);
    assert_eq!(request.process, batch.process);
    assert_eq!(request.span.parent_span_id, serve.span.span_id);
}

#[test]
fn a_process_that_cannot_serve_says_so_at_start() {
    let mut cluster = Cluster::new();
    for (roles, args, words) in [
        ("serve", &[][..], "--serve"),
        ("serve", &["--serve", "cats"], "cats"),
        ("sink", &["--serve", "digits"], "--role serve"),
        (
            "infer",
            &["--serve", "digits", "--serve-listen", "127.0.0.1:0"],
            "--serve-listen",
        ),
        ("infer", &["--serve", "cats"], "cats"),
    ] {
        let worker = cluster.start(roles, args);
        assert_ne!(cluster.wait(worker), Some(0), "{roles} {args:?}");
        let log = cluster.log(worker);
        assert!(log.contains(words), "{roles} {args:?}: {log}");
    }
}
