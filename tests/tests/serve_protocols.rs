//! The other ways to ask: Triton's client, NATS, and what the OpenAPI description says.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::client::Request;
use async_nats::{Client, HeaderMap};
use serde_json::{Value, json};
use trommel_queue::test_server::NatsServer;
use trommel_storage::testsuite::{Reply, WebServer};
use trommel_tests::{
    Collector, Serving, Signal, Traced, assert_code, digits, eventually, python, root, stderr,
};

fn png() -> Vec<u8> {
    let mut files = digits().into_iter();
    let file = files.find(|file| file.extension().unwrap() == "png");
    std::fs::read(file.unwrap()).unwrap()
}

/// Triton's own client, with the images of all kinds that it can send.
const TRITON: &str = r#"
import sys, json
import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException
client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("digits")
assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
metadata = client.get_model_metadata("digits")
version = metadata["versions"][0]
assert client.is_model_ready("digits", version)
assert metadata["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}], metadata
images = [open(path, "rb").read() for path in sys.argv[2:]]
def ask(images, outputs=None, name="image", **more):
    tensor = triton.InferInput(name, [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=np.object_))
    return client.infer("digits", [tensor], outputs=outputs, **more)
names = ["label", "score", "class", "top_labels", "top_scores", "top_classes", "row"]
for binary in [True, False]:
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
    answer = ask(images, outputs, request_id="seven", parameters={"top_k": 3}, model_version=version)
    assert answer.get_response()["id"] == "seven"
    rows = [json.loads(row) for row in answer.as_numpy("row")]
    text = lambda value: value.decode() if isinstance(value, bytes) else value
    assert [text(label) for label in answer.as_numpy("label")] == [row["label"] for row in rows]
    assert np.allclose(answer.as_numpy("score"), [row["score"] for row in rows])
    assert answer.as_numpy("top_labels").shape == (len(images), 3)
    assert answer.as_numpy("top_classes").tolist() == [[top["class"] for top in row["top"]] for row in rows]
    assert answer.as_numpy("class").tolist() == [row["top"][0]["class"] for row in rows]
assert ask(images).as_numpy("label").shape == (len(images),)
for broken, words in [
    (lambda: ask([b"no image"]), "format"),
    (lambda: ask([images[0], b""]), "image 1: "),
    (lambda: ask(images, name="pixels"), "pixels"),
    (lambda: ask(images, parameters={"odd": 1}), "odd"),
    (lambda: ask(images, [triton.InferRequestedOutput("odd")]), "odd"),
    (lambda: client.get_model_metadata("cats"), "cats"),
    (lambda: client.get_model_metadata("digits", "77"), "version"),
]:
    try:
        broken()
    except InferenceServerException as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
print(json.dumps([row["label"] for row in rows]))
"#;

#[test]
fn tritons_client_works_unchanged() {
    let serving = Serving::start(&[], &[]);
    let files: Vec<_> = digits().into_iter().step_by(97).take(5).collect();
    let address = serving.address.to_string();
    let mut args = vec![address.as_str()];
    args.extend(files.iter().map(|file| file.to_str().unwrap()));
    let run = python(TRITON, &args);
    assert_code(&run, 0);
    let labels: Vec<String> = serde_json::from_slice(&run.stdout).unwrap();
    for (file, label) in files.iter().zip(labels) {
        let image = std::fs::read(file).unwrap();
        assert_eq!(serving.classify(&image, &[]).json()["label"], label);
    }
    assert!(serving.metric("trommel_request_seconds_count", &[r#"entrance="oip""#]) > 3.0);
    assert!(serving.metric("trommel_live_batch_fill_count", &["digits"]) > 3.0);
    let stages = ["decode", "infer"];
    for stage in stages {
        let stage = format!("stage=\"{stage}\"");
        assert!(serving.metric("trommel_request_queue_seconds_count", &[&stage]) > 3.0);
        assert!(serving.metric("trommel_request_service_seconds_count", &[&stage]) > 3.0);
    }
}

#[test]
fn malformed_tensors_are_refused() {
    let serving = Serving::start(&[], &[]);
    let path = "/v2/models/digits/infer";
    let input = |shape: Value| json!({ "name": "image", "datatype": "BYTES", "shape": shape });
    let small = json!({ "inputs": [input(json!([1]))] }).to_string();
    for (headers, body) in [
        (&[][..], "no json".to_owned()),
        (&[], "{}".to_owned()),
        (&[], small.clone()),
        (&["inference-header-content-length: 9999"], small.clone()),
        (&["inference-header-content-length: -1"], small.clone()),
        (&["inference-header-content-length: 3"], small.clone()),
        (&[], "[".repeat(100_000)),
    ] {
        let answer = serving.send("POST", path, headers, body.as_bytes());
        assert_eq!(answer.status, 400, "{headers:?}");
        assert!(answer.json()["error"].is_string());
    }
    let answer = serving.send("GET", path, &[], b"");
    assert_eq!(answer.status, 405);
    serving.assert_works(&png());
}

/// Tries all that the description allows, and some that it does not.
#[test]
fn the_server_is_as_its_description_says() {
    let serving = Serving::start(&[], &[]);
    let url = format!("http://{}/openapi.json", serving.address);
    let tool = root().join(".tools/serve-venv/bin/schemathesis");
    let folder = trommel_tests::Folder::new();
    // The deadline is the client's own, so a late answer is what it wanted.
    let settings = "[checks]\nnot_a_server_error.expected-statuses = [\"2xx\", \"4xx\", \"504\"]\n";
    let config = folder.path("schemathesis.toml");
    std::fs::write(&config, settings).unwrap();
    // One worker: Python 3.11 miscounts the depth of its syntax trees when two threads build one each, and
    // then fails with "AST constructor recursion depth mismatch".
    let run = std::process::Command::new(tool)
        .arg("--config-file")
        .arg(config)
        .args(["run", &url, "--max-examples", "40", "--seed", "7", "--workers", "1"])
        .args(["--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"])
        .args(["--phases", "examples,coverage,fuzzing", "--no-color"])
        .current_dir(folder.path("."))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{said}{}", stderr(&run));
    serving.assert_works(&png());
}

fn over_nats(server: &NatsServer) -> (Serving, tokio::runtime::Runtime, Client) {
    let serving = Serving::start(&["--nats", &server.url()], &[]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = runtime.block_on(async_nats::connect(server.url())).unwrap();
    (serving, runtime, client)
}

fn headers(headers: &[(&str, &str)]) -> HeaderMap {
    let pairs = headers.iter().map(|(name, value)| {
        let name: async_nats::HeaderName = name.parse().unwrap();
        (name, async_nats::HeaderValue::from(*value))
    });
    pairs.collect()
}

const SUBJECT: &str = "trommel.classify.digits";

#[test]
fn requests_over_nats_have_rows_in_either_encoding() {
    let server = NatsServer::start();
    let (mut serving, runtime, client) = over_nats(&server);
    let image = png();
    let expected = serving.classify(&image, &[]).json();
    let ask = |with: &[(&str, &str)], payload: Vec<u8>| {
        let asked = client.request_with_headers(SUBJECT, headers(with), payload.into());
        runtime.block_on(asked).unwrap()
    };
    let row: Value = serde_json::from_slice(&ask(&[], image.clone()).payload).unwrap();
    assert_eq!(row["label"], expected["label"]);
    let with = [
        ("Accept", "application/msgpack"),
        ("Trommel-Top-K", "2"),
        ("Trommel-Uri", "a.png"),
        ("X-Request-Id", "mine"),
    ];
    let row: Value = rmp_serde::from_slice(&ask(&with, image.clone()).payload).unwrap();
    assert_eq!(row["label"], expected["label"]);
    assert_eq!(row["top"].as_array().unwrap().len(), 2);
    assert_eq!(
        (&row["uri"], &row["job_id"]),
        (&"a.png".into(), &"mine".into())
    );
    let row: Value = serde_json::from_slice(&ask(&[], b"text".to_vec()).payload).unwrap();
    assert_eq!(row["error_kind"], "unknown_format");

    for (with, code, kind) in [
        (("Trommel-Deadline-Ms", "0"), "504", "deadline"),
        (("Trommel-Top-K", "0"), "400", "malformed"),
    ] {
        let answer = ask(&[with], image.clone());
        let headers = answer.headers.unwrap();
        let of = |name| headers.get(name).unwrap().as_str();
        assert_eq!(of("Nats-Service-Error-Code"), code);
        assert!(of("Nats-Service-Error").starts_with(kind));
    }
    let nobody = client.request("trommel.classify.cats", "x".into());
    assert!(runtime.block_on(nobody).is_err());

    // `nats micro ls` finds it.
    let info = client.request("$SRV.INFO.trommel-classify", "".into());
    let info = runtime.block_on(info).unwrap();
    let info: Value = serde_json::from_slice(&info.payload).unwrap();
    assert_eq!(info["endpoints"][0]["subject"], SUBJECT);
    let stored = runtime.block_on(async {
        let context = async_nats::jetstream::new(client.clone());
        context.query_account().await.unwrap().streams
    });
    assert_eq!(stored, 0, "nothing is stored");

    serving.signal(Signal::TERM);
    assert_eq!(serving.wait(), Some(0), "{}", serving.log());
}

#[test]
fn images_may_be_named_by_urls_over_nats_and_in_tensors() {
    let content = png();
    let web = WebServer::start(move |asked| match asked.target.as_str() {
        "/photos/cat.png" => Reply::object(asked, &content, "\"1\""),
        _ => Reply::status(404),
    });
    let server = NatsServer::start();
    let (place, broker) = (web.url("/photos/"), server.url());
    let serving = Serving::start(
        &["--nats", &broker, "--allow-url", &place],
        &[("TROMMEL_HTTP__ALLOW_PRIVATE", "true")],
    );
    let expected = serving.classify(&png(), &[]).json();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let client = runtime.block_on(async_nats::connect(server.url())).unwrap();
    let json = ("Content-Type", "application/json");
    let ask = |with: &[(&str, &str)], url: &str| {
        let body = json!({ "url": url }).to_string();
        let asked = client.request_with_headers(SUBJECT, headers(with), body.into());
        runtime.block_on(asked).unwrap()
    };
    let url = web.url("/photos/cat.png");
    let row: Value = serde_json::from_slice(&ask(&[json], &url).payload).unwrap();
    assert_eq!(
        (&row["label"], &row["uri"]),
        (&expected["label"], &json!(url))
    );
    let row: Value =
        serde_json::from_slice(&ask(&[json, ("Trommel-Uri", "a.png")], &url).payload).unwrap();
    assert_eq!(row["uri"], "a.png");
    for (url, code) in [(web.url("/photos/none"), "502"), (web.url("/"), "403")] {
        let answer = ask(&[json], &url);
        let refused = answer.headers.unwrap();
        assert_eq!(
            refused.get("Nats-Service-Error-Code").unwrap().as_str(),
            code
        );
    }

    let infer = |urls: &[&str]| {
        let input =
            json!({ "name": "url", "datatype": "BYTES", "shape": [urls.len()], "data": urls });
        let outputs = json!([{ "name": "label" }, { "name": "row" }]);
        let body = json!({ "inputs": [input], "outputs": outputs }).to_string();
        serving.send("POST", "/v2/models/digits/infer", &[], body.as_bytes())
    };
    let answer = infer(&[&url, &url]);
    assert_eq!(answer.status, 200, "{:?}", answer.json());
    let outputs = &answer.json()["outputs"];
    assert_eq!(
        outputs[0]["data"],
        json!([expected["label"], expected["label"]])
    );
    let row: Value = serde_json::from_str(outputs[1]["data"][1].as_str().unwrap()).unwrap();
    assert_eq!(row["uri"], url);
    assert_eq!(infer(&[&url, &web.url("/private/cat.png")]).status, 403);
}

/// What the server has given to a process that stops is answered, also what is still on its way then.
#[test]
fn a_stop_loses_no_request_over_nats() {
    let server = NatsServer::start();
    let (_stays, runtime, client) = over_nats(&server);
    let image = png();
    let done = Arc::new(AtomicBool::new(false));
    let asking: Vec<_> = (0..16)
        .map(|_| {
            let (client, image, done) = (client.clone(), image.clone(), Arc::clone(&done));
            runtime.spawn(async move {
                let mut answers = 0;
                while !done.load(Ordering::Relaxed) {
                    let request = Request::new()
                        .payload(image.clone().into())
                        .timeout(Some(Duration::from_secs(60)));
                    let answer = client.send_request(SUBJECT, request).await;
                    let answer = answer.expect("each request is answered");
                    // Refused is an answer too.
                    assert!(!answer.payload.is_empty() || answer.headers.is_some());
                    answers += 1;
                }
                answers
            })
        })
        .collect();
    for _ in 0..4 {
        let (mut goes, ..) = over_nats(&server);
        let counted = r#"entrance="nats""#;
        eventually("requests have come", || {
            (goes.metric("trommel_request_seconds_count", &[counted]) > 20.0).then_some(())
        });
        goes.signal(Signal::TERM);
        assert_eq!(goes.wait(), Some(0), "{}", goes.log());
    }
    done.store(true, Ordering::Relaxed);
    for asking in asking {
        assert!(runtime.block_on(asking).unwrap() > 0);
    }
}

#[test]
fn nats_needs_no_jetstream() {
    let server = NatsServer::start_with(&[]);
    let (_serving, runtime, client) = over_nats(&server);
    let answer = runtime.block_on(client.request(SUBJECT, png().into()));
    let row: Value = serde_json::from_slice(&answer.unwrap().payload).unwrap();
    assert!(row["label"].is_string(), "{row}");
}

#[test]
fn processes_share_the_requests_over_nats() {
    let server = NatsServer::start();
    let (one, runtime, client) = over_nats(&server);
    let (other, ..) = over_nats(&server);
    let image = png();
    let count = |serving: &Serving| {
        serving.metric("trommel_request_seconds_count", &[r#"entrance="nats""#])
    };
    let (mut asked, mut both) = (0.0, false);
    while !both {
        assert!(asked < 500.0, "one of two has all");
        let request = client.request(SUBJECT, image.clone().into());
        runtime.block_on(request).unwrap();
        asked += 1.0;
        both = asked >= 20.0 && count(&one) > 0.0 && count(&other) > 0.0;
    }
    eventually("each request was answered once", || {
        (count(&one) + count(&other) == asked).then_some(())
    });
}

#[test]
fn a_trace_goes_from_the_header_through_the_batch() {
    let collector = Collector::grpc();
    let serving = Serving::start(&["--otlp-endpoint", &collector.url()], &[]);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let header = format!("traceparent: 00-{trace}-b7ad6b7169203331-01");
    assert_eq!(serving.classify(&png(), &[&header]).status, 200);
    let names = |name: &'static str| {
        move |spans: &[Traced]| spans.iter().any(|traced| traced.span.name == name)
    };
    let (request, batch) = (names("serve.request"), names("infer.batch"));
    let spans = collector.spans(|spans| request(spans) && batch(spans));
    for name in ["serve.request", "infer.batch"] {
        let traced = spans
            .iter()
            .find(|traced| traced.span.name == name)
            .unwrap();
        let id = traced
            .span
            .trace_id
            .iter()
            .map(|byte| format!("{byte:02x}"));
        assert_eq!(id.collect::<String>(), trace, "{name}");
    }
}
