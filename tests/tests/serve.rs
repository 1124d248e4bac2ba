//! Requests over HTTP: rows for images, within limits; slow or malformed requests do no harm.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{Read, Write};
use std::thread;

use serde_json::Value;
use trommel_storage::testsuite::{Reply, WebServer};
use trommel_tests::{
    Folder, Serving, Signal, Trommel, assert_code, digits, digits_model, eventually, get, python,
    read_answer, request_head, stderr,
};

/// A shipped digit of this kind.
fn digit(suffix: &str) -> Vec<u8> {
    let mut files = digits().into_iter();
    let file = files.find(|file| file.extension().unwrap() == suffix);
    std::fs::read(file.unwrap()).unwrap()
}

fn png() -> Vec<u8> {
    digit("png")
}

/// A gray PNG of this size, black all over; small as a file, and a lot to decode.
fn black(side: u32) -> Vec<u8> {
    gray(side, (side as usize + 1) * side as usize)
}

/// A gray PNG of this size, whose pixels unpack to so many bytes.
fn gray(side: u32, unpacked: usize) -> Vec<u8> {
    let chunk = |kind: &[u8; 4], content: &[u8]| {
        let body = [&kind[..], content].concat();
        let length = u32::try_from(content.len()).unwrap().to_be_bytes();
        [&length[..], &body, &crc32fast::hash(&body).to_be_bytes()].concat()
    };
    let size = [side.to_be_bytes(), side.to_be_bytes()].concat();
    let rows = vec![0; unpacked];
    let mut packed = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(&rows).unwrap();
    [
        &b"\x89PNG\r\n\x1a\n"[..],
        &chunk(b"IHDR", &[&size[..], &[8, 0, 0, 0, 0]].concat()),
        &chunk(b"IDAT", &packed.finish().unwrap()),
        &chunk(b"IEND", b""),
    ]
    .concat()
}

/// An image that takes a while: 49 million pixels.
fn slow() -> Vec<u8> {
    black(7000)
}

fn form(parts: &[(&str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, content) in parts {
        let head = format!(
            "--xx\r\ncontent-disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n"
        );
        body.extend(head.as_bytes());
        body.extend(*content);
        body.extend(b"\r\n");
    }
    body.extend(b"--xx--\r\n");
    body
}

const FORM: &str = "content-type: multipart/form-data; boundary=xx";

#[test]
fn an_image_has_the_row_that_a_job_would_write() {
    let serving = Serving::start(&[], &[]);
    let file = digits().into_iter().next().unwrap();
    let image = std::fs::read(&file).unwrap();
    let rows = Trommel::new(["classify", "--quiet", "--model"])
        .arg(digits_model())
        .arg(&file)
        .run();
    assert_code(&rows, 0);
    let expected: Value = serde_json::from_slice(&rows.stdout).unwrap();
    let answer = serving.classify(&image, &["x-request-id: mine", "content-type: image/png"]);
    assert_eq!(answer.status, 200);
    assert!(
        answer.head.contains("x-request-id: mine"),
        "{}",
        answer.head
    );
    let row = answer.json();
    assert_eq!(row["job_id"], "mine");
    let names = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&row), names(&expected));
    for name in [
        "label",
        "bytes",
        "width",
        "height",
        "model",
        "model_version",
        "status",
    ] {
        assert_eq!(row[name], expected[name], "{name}");
    }
    let score = |row: &Value| row["score"].as_f64().unwrap();
    assert!((score(&row) - score(&expected)).abs() < 1e-4);

    // In the order of a line of JSON Lines.
    let text = String::from_utf8(answer.body).unwrap();
    assert!(
        text.starts_with(r#"{"job_id":"mine","index":0,"uri":"""#),
        "{text}"
    );

    let ask = |query: &str| {
        let path = format!("/v1/models/digits/classify?{query}");
        serving.send("POST", &path, &[], &image)
    };
    let row = ask("top_k=2&logits=true&uri=a%2Fb.png").json();
    assert_eq!(row["top"].as_array().unwrap().len(), 2);
    assert_eq!(row["logits"].as_array().unwrap().len(), 10);
    assert_eq!(row["uri"], "a/b.png");
    let row = ask("threshold=1").json();
    assert_eq!(row["top"].as_array().unwrap().len(), 1);
    for query in [
        "topk=2",
        "top_k=x",
        "threshold=7",
        "threshold_of=cat%3D0.5",
        "embedding=true",
    ] {
        assert_eq!(ask(query).kind(), (400, "malformed".to_owned()), "{query}");
    }

    let models = serving.send("GET", "/v1/models", &[], b"").json();
    assert_eq!(models["models"][0]["name"], "digits");
    let model = serving.send("GET", "/v1/models/digits", &[], b"").json();
    assert_eq!(model["labels"].as_array().unwrap().len(), 10);
}

#[test]
fn several_images_have_a_list_of_answers_each_with_an_error_of_its_own() {
    let serving = Serving::start(&[], &[("TROMMEL_SERVE__MAX_FILES", "3")]);
    let (png, jpg) = (png(), digit("jpg"));
    let parts = [("a.png", &png[..]), ("text", b"no image"), ("b.jpg", &jpg)];
    let answer = serving.classify(&form(&parts), &[FORM]);
    assert_eq!(answer.status, 200);
    let rows = answer.json();
    let of = |name: &str| -> Vec<Value> {
        let rows = rows.as_array().unwrap();
        rows.iter().map(|row| row[name].clone()).collect()
    };
    assert_eq!(of("index"), [0, 1, 2]);
    assert_eq!(of("uri"), ["a.png", "text", "b.jpg"]);
    assert_eq!(of("status"), ["ok", "failed", "ok"]);
    assert_eq!(of("error_kind")[1], "unknown_format");

    let four = [parts[0], parts[1], parts[2], parts[0]];
    let answer = serving.classify(&form(&four), &[FORM]);
    assert_eq!(answer.kind(), (413, "too_large".to_owned()));
    for (body, kind) in [
        (form(&[]), FORM),
        (b"--xx\r\n".to_vec(), FORM),
        (form(&parts), "content-type: multipart/form-data"),
    ] {
        let answer = serving.classify(&body, &[kind]);
        assert_eq!(answer.kind(), (400, "malformed".to_owned()), "{kind}");
    }
}

#[test]
fn what_is_wrong_with_a_request_is_said_by_its_status() {
    let limits = [
        ("TROMMEL_SERVE__MAX_BODY", "100000000"),
        ("TROMMEL_SERVE__BODY_TIMEOUT", "1s"),
    ];
    let serving = Serving::start(&[], &limits);
    let png = png();
    let jpg = digit("jpg");
    let kinds: [(&[u8], u16, &str); 5] = [
        (b"", 400, "empty"),
        (b"not an image at all", 415, "unknown_format"),
        (&png[..png.len() / 2], 400, "truncated"),
        (&jpg[..jpg.len() / 2], 400, "truncated"),
        (&black(8000), 413, "too_many_pixels"),
    ];
    for (body, status, kind) in kinds {
        let answer = serving.classify(body, &[]);
        assert_eq!(answer.kind(), (status, kind.to_owned()));
    }
    let row = serving.classify(b"text", &[]).json();
    assert_eq!(
        (&row["status"], &row["label"]),
        (&"failed".into(), &Value::Null)
    );

    for (header, status, kind) in [
        ("content-type: text/html", 415, "unsupported_type"),
        ("content-type: application/json", 415, "unsupported_type"),
        ("content-encoding: gzip", 415, "unsupported_type"),
        ("trommel-deadline-ms: soon", 400, "malformed"),
        ("trommel-deadline-ms: 0", 504, "deadline"),
    ] {
        let answer = serving.classify(&png, &[header]);
        assert_eq!(answer.kind(), (status, kind.to_owned()), "{header}");
    }
    for (method, path, status, kind) in [
        ("POST", "/v1/models/cats/classify", 404, "unknown_model"),
        ("GET", "/v1/models/cats", 404, "unknown_model"),
        ("GET", "/nowhere", 404, "unknown_path"),
        ("GET", "/v1/models/digits/classify", 405, "unknown_method"),
    ] {
        let answer = serving.send(method, path, &[], b"");
        assert_eq!(answer.kind(), (status, kind.to_owned()), "{method} {path}");
    }

    // 200 MB, announced and not.
    let large = vec![7; 200_000_000];
    let answer = serving.classify(&large, &[]);
    assert_eq!(answer.kind(), (413, "too_large".to_owned()));
    let mut stream = serving.connect();
    let path = "/v1/models/digits/classify";
    let head = request_head("POST", path, &["transfer-encoding: chunked"]);
    write!(stream, "{head}\r\n").unwrap();
    for chunk in large.chunks(1_000_000) {
        let sent = write!(stream, "{:x}\r\n", chunk.len())
            .and_then(|()| stream.write_all(chunk))
            .and_then(|()| stream.write_all(b"\r\n"));
        if sent.is_err() {
            break;
        }
    }
    stream.write_all(b"0\r\n\r\n").ok();
    let answer = read_answer(&mut stream);
    assert_eq!(answer.kind(), (413, "too_large".to_owned()));

    // A body that ends too soon, or comes too slowly.
    let head = request_head("POST", path, &["content-length: 1000"]);
    let mut stream = serving.connect();
    write!(stream, "{head}\r\nbegin").unwrap();
    assert_eq!(read_answer(&mut stream).kind(), (408, "timeout".to_owned()));
    let mut stream = serving.connect();
    write!(stream, "{head}\r\nbegin").unwrap();
    drop(stream);
    serving.assert_works(&png);
    assert_eq!(
        serving.metric("trommel_requests_expired_total", &["http"]),
        1.0
    );
    let seconds = "trommel_request_seconds_count";
    assert!(serving.metric(seconds, &["http", r#"outcome="refused""#]) >= 5.0);
    assert!(serving.metric(seconds, &["http", r#"outcome="failed""#]) >= 5.0);
}

#[test]
fn an_image_may_be_named_by_a_url_of_an_allowed_place() {
    let png = png();
    let content = png.clone();
    let web = WebServer::start(move |asked| match asked.target.as_str() {
        "/photos/cat.png" => Reply::object(asked, &content, "\"1\""),
        "/photos/large" => Reply::object(asked, &vec![7; 200_000], "\"1\""),
        "/photos/text" => Reply::object(asked, b"no image", "\"1\""),
        "/photos/away" => Reply::with(302, "location", "/private/cat.png"),
        "/photos/stalls" => Reply::Stall(vec![7; 100]),
        "/private/cat.png" => Reply::object(asked, &content, "\"1\""),
        _ => Reply::status(404),
    });
    let place = web.url("/photos/");
    let limits = [
        ("TROMMEL_HTTP__ALLOW_PRIVATE", "true"),
        ("TROMMEL_SERVE__MAX_BODY", "100000"),
    ];
    let serving = Serving::start(&["--allow-url", &place], &limits);
    let ask = |serving: &Serving, url: &str, headers: &[&str]| {
        let body = serde_json::json!({ "url": url }).to_string();
        let mut all = vec!["content-type: application/json"];
        all.extend(headers);
        serving.classify(body.as_bytes(), &all)
    };
    let url = web.url("/photos/cat.png");
    let row = ask(&serving, &url, &[]).json();
    assert_eq!(row["label"], serving.classify(&png, &[]).json()["label"]);
    assert_eq!(row["uri"], url);
    let text = ask(&serving, &web.url("/photos/text"), &[]);
    assert_eq!(text.kind(), (415, "unknown_format".to_owned()));
    let deadline = ["trommel-deadline-ms: 300"];
    for (target, headers, status, kind) in [
        ("/photos/none.png", &[][..], 502, "unreadable"),
        ("/photos/large", &[], 413, "too_large"),
        ("/photos/away", &[], 403, "permission_denied"),
        ("/private/cat.png", &[], 403, "permission_denied"),
        ("/photos/../private/cat.png", &[], 403, "permission_denied"),
        ("/photos/stalls", &deadline, 504, "deadline"),
    ] {
        let answer = ask(&serving, &web.url(target), headers);
        assert_eq!(answer.kind(), (status, kind.to_owned()), "{target}");
    }
    for url in ["file:///etc/passwd", "s3://bucket/key", "/etc/passwd", ""] {
        let answer = ask(&serving, url, &[]);
        assert_eq!(answer.kind(), (400, "malformed".to_owned()), "{url}");
    }
    for body in ["{", "{}", r#"{"url":7}"#, r#"{"url":"x","odd":1}"#] {
        let answer = serving.classify(body.as_bytes(), &["content-type: application/json"]);
        assert_eq!(answer.kind(), (400, "malformed".to_owned()), "{body}");
    }
    serving.assert_works(&png);

    // An allowed name does not open private addresses.
    let requests = web.requests();
    let careful = Serving::start(&["--allow-url", &place], &[]);
    let (status, kind) = ask(&careful, &url, &[]).kind();
    assert_eq!((status, kind.as_str()), (403, "permission_denied"));
    assert_eq!(web.requests(), requests);
}

#[test]
fn broken_bodies_and_bombs_leave_all_room_to_others() {
    let limits = [
        ("TROMMEL_SERVE__MAX_BODY", "4000000"),
        // Room for one body at a time: one that kept it would keep everybody out.
        ("TROMMEL_SERVE__MAX_BYTES_IN_FLIGHT", "4000000"),
        ("TROMMEL_SERVE__BODY_TIMEOUT", "1s"),
        ("TROMMEL_SERVE__QUEUE", "1"),
    ];
    let serving = Serving::start(&[], &limits);
    let png = png();
    let works = || {
        eventually("there is room again", || {
            (serving.classify(&png, &[]).status == 200).then_some(())
        });
    };
    let path = "/v1/models/digits/classify";
    let head = request_head("POST", path, &["content-length: 4000000"]);
    for _ in 0..5 {
        // Gone in the middle of a body.
        let mut stream = serving.connect();
        write!(stream, "{head}\r\nbegin").unwrap();
        drop(stream);
        works();
    }
    // An endless body is too slow; it takes up room until it is dropped.
    let mut stream = serving.connect();
    write!(stream, "{head}\r\nbegin").unwrap();
    assert_eq!(read_answer(&mut stream).kind(), (408, "timeout".to_owned()));
    works();
    // 64 pixels that unpack to 300 MB.
    let bomb = gray(8, 300_000_000);
    let answer = serving.classify(&bomb, &[]);
    assert!([200, 400].contains(&answer.status), "{}", answer.status);
    works();
}

#[test]
fn a_full_queue_sheds_and_who_leaves_makes_room() {
    let serving = Serving::start(&[], &[("TROMMEL_SERVE__QUEUE", "1")]);
    let slow = slow();
    let answers: Vec<_> = thread::scope(|scope| {
        let asked = (0..8).map(|_| scope.spawn(|| serving.classify(&slow, &[])));
        let asked: Vec<_> = asked.collect();
        asked
            .into_iter()
            .map(|asked| asked.join().unwrap())
            .collect()
    });
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    let (ok, shed): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.status == 200);
    assert!(!ok.is_empty() && !shed.is_empty(), "{statuses:?}");
    for answer in &shed {
        assert_eq!(answer.kind(), (429, "full".to_owned()));
        assert!(answer.head.contains("retry-after: 1"), "{}", answer.head);
    }
    let counted = serving.metric("trommel_requests_shed_total", &["http"]);
    assert_eq!(counted, shed.len() as f64);

    // A deadline passes while the image is decoded.
    let answer = serving.classify(&slow, &["trommel-deadline-ms: 5"]);
    assert_eq!(answer.kind(), (504, "deadline".to_owned()));

    // When a client disconnects, its work is dropped.
    let gone = || {
        let mut stream = serving.connect();
        let head = request_head("POST", "/v1/models/digits/classify", &[]);
        let length = slow.len();
        write!(stream, "{head}content-length: {length}\r\n\r\n").unwrap();
        stream.write_all(&slow).unwrap();
    };
    eventually("a client that has gone is noticed", || {
        gone();
        let outcome = [r#"outcome="gone""#];
        (serving.metric("trommel_request_seconds_count", &outcome) > 0.0).then_some(())
    });
    eventually("there is room again", || {
        (serving.classify(&png(), &[]).status == 200).then_some(())
    });
}

#[test]
fn idle_connections_keep_nobody_out_for_long() {
    let limits = [
        ("TROMMEL_SERVE__MAX_CONNECTIONS", "2000"),
        ("TROMMEL_SERVE__HEADER_TIMEOUT", "10s"),
    ];
    let serving = Serving::start(&[], &limits);
    let png = png();
    // Idle connections, and some that send only the beginning of a head.
    let mut idle: Vec<_> = (0..1900).map(|_| serving.connect()).collect();
    for stream in idle.iter_mut().step_by(2) {
        stream
            .write_all(b"POST /v1/models/digits/classify HT")
            .unwrap();
    }
    serving.assert_works(&png);
    // Full: refused at once, with a reason.
    let full = eventually("all connections are open", || {
        idle.extend((0..100).map(|_| serving.connect()));
        let mut last = serving.connect();
        last.write_all(request_head("GET", "/v1/models", &[]).as_bytes())
            .ok();
        last.write_all(b"\r\n").ok();
        let answer = read_answer(&mut last);
        (answer.status == 503).then_some(answer)
    });
    assert_eq!(full.kind(), (503, "connections".to_owned()));
    eventually("idle connections are closed", || {
        (serving.send("GET", "/v1/models", &[], b"").status == 200).then_some(())
    });
    serving.assert_works(&png);
    let mut end = [0; 1];
    let first = idle[0].read(&mut end);
    assert!(matches!(first, Ok(0) | Err(_)), "{first:?}");
}

#[test]
fn who_does_not_read_is_left() {
    let serving = Serving::start(&[], &[("TROMMEL_SERVE__WRITE_TIMEOUT", "500ms")]);
    let mut stream = serving.connect();
    let request = b"GET /openapi.json HTTP/1.1\r\nhost: test\r\n\r\n".repeat(100);
    // Answers queue up until the server drops this client.
    let gone = (0..100_000).find_map(|_| stream.write_all(&request).err());
    assert!(gone.is_some());
    serving.assert_works(&png());
}

#[test]
fn only_who_brings_the_token_is_answered() {
    let folder = Folder::new();
    let file = folder.path("token");
    std::fs::write(&file, "s3cret\n").unwrap();
    let file = file.to_str().unwrap();
    for (args, env) in [
        (&["--token-file", file][..], &[][..]),
        (&[], &[("TROMMEL_SERVE_TOKEN", "s3cret")]),
    ] {
        let serving = Serving::start(args, env);
        let png = png();
        for headers in [&[][..], &["authorization: Bearer other"]] {
            let answer = serving.classify(&png, headers);
            assert_eq!(answer.kind(), (401, "unauthorized".to_owned()));
            assert!(answer.head.contains("www-authenticate: bearer"));
        }
        let answer = serving.classify(&png, &["authorization: Bearer s3cret"]);
        assert_eq!(answer.status, 200);
        for (path, status) in [("/v2/health/ready", 200), ("/v2", 401), ("/v1/models", 401)] {
            assert_eq!(serving.send("GET", path, &[], b"").status, status, "{path}");
        }
        assert!(!serving.log().contains("s3cret"));
    }
}

#[test]
fn over_tls_nothing_is_said_in_the_clear() {
    let folder = Folder::new();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (certificate, key) = (folder.path("cert.pem"), folder.path("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let (certificate, key) = (certificate.to_str().unwrap(), key.to_str().unwrap());
    let files = ["--tls-certificate", certificate, "--tls-key", key];
    let serving = Serving::start(&files, &[]);
    let program = "import ssl, sys, urllib.request\n\
        context = ssl.create_default_context(cafile=sys.argv[1])\n\
        print(urllib.request.urlopen(sys.argv[2], context=context).read().decode())";
    let url = format!("https://localhost:{}/v1/models", serving.address.port());
    let run = python(program, &[certificate, &url]);
    assert_code(&run, 0);
    assert!(String::from_utf8_lossy(&run.stdout).contains("digits"));
    let mut plain = serving.connect();
    write!(plain, "{}\r\n", request_head("GET", "/v1/models", &[])).unwrap();
    let mut answer = Vec::new();
    plain.read_to_end(&mut answer).ok();
    assert!(!String::from_utf8_lossy(&answer).contains("HTTP"));
    let half = Trommel::new(["serve", "--tls-key", key, "--model"])
        .arg(digits_model())
        .run();
    assert_code(&half, 2);
    assert!(
        stderr(&half).contains("tls-certificate"),
        "{}",
        stderr(&half)
    );
}

#[test]
fn a_stop_loses_no_request_in_flight() {
    let mut serving = Serving::start(&[], &[]);
    assert_eq!(get(serving.telemetry, "/readyz").unwrap().0, 200);
    let png = png();
    let length = format!("content-length: {}", png.len());
    let head = request_head(
        "POST",
        "/v1/models/digits/classify",
        &[&length, "expect: 100-continue"],
    );
    // Each has begun: the server asks for its body.
    let mut begun: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = serving.connect();
            write!(stream, "{head}\r\n").unwrap();
            let mut word = [0; 25];
            stream.read_exact(&mut word).unwrap();
            assert_eq!(&word, b"HTTP/1.1 100 Continue\r\n\r\n");
            stream
        })
        .collect();
    let idle = serving.connect();
    serving.signal(Signal::TERM);
    eventually("it is not ready any more", || {
        let (status, text) = get(serving.telemetry, "/readyz")?;
        (status == 503 && text.contains("stopping")).then_some(())
    });
    eventually("nobody new is let in", || {
        std::net::TcpStream::connect(serving.address).err()
    });
    for stream in &mut begun {
        stream.write_all(&png).unwrap();
    }
    for stream in &mut begun {
        let answer = read_answer(stream);
        assert_eq!(answer.status, 200, "{}", answer.head);
        assert!(!answer.json()["label"].is_null());
    }
    drop(idle);
    assert_eq!(serving.wait(), Some(0), "{}", serving.log());
}

#[test]
fn what_cannot_be_served_is_said_at_start() {
    let refused = |args: &[&str], words: &str| {
        let run = Trommel::new(["serve"]).args(args).run();
        assert_code(&run, 2);
        assert!(stderr(&run).contains(words), "{}", stderr(&run));
    };
    let model = digits_model();
    let model = model.to_str().unwrap();
    refused(&["--model", "nowhere"], "nowhere");
    refused(
        &["--model", model, "--model", model],
        "two models are called digits",
    );
    refused(&["--model", model, "--token-file", "/no/file"], "/no/file");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    refused(&["--model", model, "--listen", &taken], &taken);
}
