//! What `trommel bench` measures for stages and servers. No figure is compared with a time: how fast the
//! machine is says nothing about whether it was measured.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use trommel_queue::test_server::NatsServer;
use trommel_tests::{Folder, Serving, Trommel, assert_code, digits_model, stderr};

fn bench(folder: &Folder, args: &[&str]) -> Value {
    let run = Trommel::new(["bench", "--json"])
        .arg(folder.images())
        .args(args)
        .run();
    assert_code(&run, 0);
    serde_json::from_slice(&run.stdout).unwrap()
}

#[test]
fn stages_are_measured_alone_and_together_and_a_plan_is_made_of_them() {
    let folder = Folder::with_digits(80);
    let server = NatsServer::start();
    let (output, page) = (folder.path("bench.json"), folder.path("bench.html"));
    let model = digits_model();
    let found = bench(
        &folder,
        &[
            "--model",
            model.to_str().unwrap(),
            "--batches",
            "1,2,4",
            "--nats",
            &server.url(),
            "--output",
            output.to_str().unwrap(),
            "--page",
            page.to_str().unwrap(),
        ],
    );
    let written: Value = serde_json::from_slice(&std::fs::read(&output).unwrap()).unwrap();
    assert_eq!(written, found);
    let names: Vec<_> = found["stages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|stage| stage["stage"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["fetch", "decode", "resize"]);
    for stage in found["stages"].as_array().unwrap() {
        let times = &stage["milliseconds"];
        let at = |name: &str| times[name].as_f64().unwrap();
        assert!(at("p50") <= at("p95") && at("p95") <= at("p999"), "{stage}");
        assert!(
            stage["images_per_second"].as_f64().unwrap() > 0.0,
            "{stage}"
        );
    }
    let sizes: Vec<_> = found["compute"].as_array().unwrap().iter().collect();
    assert_eq!(sizes.len(), 3, "{found}");
    let hops: Vec<_> = found["hops"]
        .as_array()
        .unwrap()
        .iter()
        .map(|hop| &hop["hop"])
        .collect();
    assert_eq!(hops, ["local", "jetstream"]);
    let pipeline = &found["pipeline"];
    let number = |name: &str| pipeline[name].as_f64().unwrap();
    let efficiency = number("images_per_second") / number("limit");
    assert!(
        (number("efficiency") - efficiency).abs() < 1e-9,
        "{pipeline}"
    );
    assert_eq!(found["sample"]["images"], 80);
    let html = std::fs::read_to_string(&page).unwrap();
    assert_eq!(html.matches("<svg").count(), 3);
    assert!(
        !html.contains("http://") || html.contains("http://www.w3.org"),
        "it loads nothing"
    );

    // The streams of the measurement are gone.
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let streams = runtime.block_on(async {
        let client = async_nats::connect(server.url()).await.unwrap();
        let context = async_nats::jetstream::new(client);
        let names = tokio_stream::StreamExt::collect::<Vec<_>>(context.stream_names());
        names
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect::<Vec<_>>()
    });
    assert_eq!(streams, Vec::<String>::new());

    let plan = Trommel::new(["plan", "--json", "--from"])
        .arg(&output)
        .args(["--rate", "5", "--price", "infer=2.10/h"])
        .run();
    assert_code(&plan, 0);
    let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert_eq!(plan["job"]["cores"], 1, "{plan}");
    assert!(plan["cost"]["an_hour"].as_f64().unwrap() >= 2.10, "{plan}");
    assert_eq!(plan["missing"], serde_json::json!([]));
}

#[test]
fn a_plan_of_another_file_is_refused_with_the_remedy() {
    let folder = Folder::new();
    let file = folder.path("bench.json");
    for (text, words) in [
        ("{}", "trommel bench --output"),
        (r#"{"version": 99}"#, "version 99"),
    ] {
        std::fs::write(&file, text).unwrap();
        let plan = Trommel::new(["plan", "--rate", "5", "--from"])
            .arg(&file)
            .run();
        assert_code(&plan, 2);
        assert!(stderr(&plan).contains(words), "{}", stderr(&plan));
    }
}

/// Every request gets one answer, which is counted once.
#[track_caller]
fn assert_all_answered(load: &Value) {
    let count = |name: &str| load[name].as_u64().unwrap();
    assert_eq!(count("sent"), count("ok") + count("refused"), "{load}");
    assert!(count("ok") > 0, "{load}");
}

#[test]
fn a_server_is_asked_over_http_and_over_nats() {
    let folder = Folder::with_digits(8);
    let server = NatsServer::start();
    let serving = Serving::start(&["--nats", &server.url()], &[]);
    let http = format!("http://{}", serving.address);
    for (address, arrivals) in [(http, "poisson"), (server.url(), "constant")] {
        let page = folder.path("load.html");
        let found = bench(
            &folder,
            &[
                "--against",
                &address,
                "--model",
                "digits",
                "--rates",
                "10,20",
                "--arrivals",
                arrivals,
                "--duration",
                "2s",
                "--warm-up",
                "500ms",
                "--page",
                page.to_str().unwrap(),
            ],
        );
        let loads = found["loads"].as_array().unwrap();
        assert_eq!(loads.len(), 2);
        loads.iter().for_each(assert_all_answered);
        if arrivals == "constant" {
            assert_eq!(loads[1]["sent"], 40);
        }
        assert!(std::fs::read_to_string(page).unwrap().contains("<svg"));
    }
}

/// Answers every request with a row that says nothing, after a delay.
fn slow_server(delay: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer_all(stream, delay));
        }
    });
    address
}

/// Reads requests until the connection ends.
fn answer_all(mut stream: TcpStream, delay: Duration) {
    let mut read = Vec::new();
    let mut buffer = [0; 8192];
    loop {
        while let Some(length) = whole(&read) {
            read.drain(..length);
            thread::sleep(delay);
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
            if stream.write_all(answer).is_err() {
                return;
            }
        }
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(count) => read.extend_from_slice(&buffer[..count]),
        }
    }
}

/// Bytes of the first request, if all of it is there.
fn whole(read: &[u8]) -> Option<usize> {
    let end = read.windows(4).position(|bytes| bytes == b"\r\n\r\n")? + 4;
    let head = String::from_utf8_lossy(&read[..end]).to_lowercase();
    let (_, length) = head.split_once("content-length: ")?;
    let length: usize = length.lines().next()?.trim().parse().ok()?;
    (read.len() >= end + length).then_some(end + length)
}

#[test]
fn no_answer_counts_as_faster_than_it_was() {
    let folder = Folder::with_digits(4);
    let address = slow_server(Duration::from_millis(150));
    let found = bench(
        &folder,
        &[
            "--against",
            &format!("http://{address}"),
            "--model",
            "any",
            "--rates",
            "20",
            "--duration",
            "2s",
            "--warm-up",
            "0s",
            "--deadline",
            "140ms",
        ],
    );
    let load = &found["loads"][0];
    assert_all_answered(load);
    assert!(
        load["milliseconds"]["p50"].as_f64().unwrap() >= 149.0,
        "{load}"
    );
    // All of them came too late to be of use.
    assert_eq!(load["goodput"], 0.0);
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let folder = Folder::with_digits(1);
    let refused = |args: &[&str], code: i32, words: &str| {
        let run = Trommel::new(["bench"])
            .arg(folder.images())
            .args(args)
            .run();
        assert_code(&run, code);
        assert!(stderr(&run).contains(words), "{}", stderr(&run));
    };
    let nobody = [
        "--against",
        "http://127.0.0.1:9",
        "--model",
        "m",
        "--warm-up",
        "0s",
    ];
    let asked = [&nobody[..], &["--rates", "20", "--duration", "1s"]].concat();
    refused(&asked, 1, "answered none of");
    refused(&nobody, 2, "--rates");
    refused(
        &["--against", "ftp://there", "--model", "m", "--rates", "1"],
        2,
        "http://127.0.0.1:8080",
    );
    refused(&[], 2, "--model");
}
