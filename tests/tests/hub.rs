//! Models by name, from a hub on loopback.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use trommel_tests::{
    Folder, HUB_COMMIT, Hub, Trommel, assert_code, digits_model, root, rows, stderr,
};

const NAME: &str = "hf:org/digits";

fn file(name: &str) -> Vec<u8> {
    fs::read(digits_model().join(name)).unwrap()
}

/// The shipped model as the hub's converter lays models out, in two precisions, the smaller of which is
/// another file with the same bytes but its last: a field that nobody reads.
fn digits_hub() -> Hub {
    Hub::serve(
        "org/digits",
        &[
            ("README.md", b"# Digits".to_vec()),
            ("config.json", file("config.json")),
            ("preprocessor_config.json", file("preprocessor_config.json")),
            ("onnx/model.onnx", file("model.onnx")),
            ("onnx/model_fp16.onnx", file("model.onnx")),
        ],
    )
}

/// A cache of its own for each test, for the hub's files and for Trommel's.
struct Machine {
    dir: tempfile::TempDir,
    endpoint: String,
}

impl Machine {
    fn new(hub: &Hub) -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            endpoint: hub.endpoint(),
        }
    }

    fn trommel(&self, args: &[&str]) -> Trommel {
        let path = |name: &str| self.dir.path().join(name).to_str().unwrap().to_owned();
        Trommel::new(args)
            .env("HF_ENDPOINT", &self.endpoint)
            .env("HF_HOME", &path("hf"))
            .env("HF_HUB_CACHE", "")
            .env("HF_TOKEN", "")
            .env("HF_TOKEN_PATH", "")
            .env("HF_HUB_OFFLINE", "")
            .env("XDG_CACHE_HOME", &path("cache"))
    }

    fn fetch(&self, args: &[&str]) -> Output {
        self.trommel(&[&["model", "fetch", NAME], args].concat())
            .run()
    }

    fn repository(&self) -> PathBuf {
        self.dir.path().join("hf/hub/models--org--digits")
    }
}

/// The folder that a successful `fetch` printed.
fn folder(output: &Output) -> PathBuf {
    assert_code(output, 0);
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}

fn large_requests(hub: &Hub) -> Vec<String> {
    let requests = hub.requests().into_iter();
    requests
        .filter(|request| request.starts_with("store "))
        .collect()
}

#[test]
fn a_model_by_its_name_gives_the_rows_of_its_folder() {
    let (hub, images) = (digits_hub(), Folder::with_digits(12));
    let machine = Machine::new(&hub);
    let output = images.path("named.jsonl");
    let source = images.images();
    let run = machine
        .trommel(&["classify", source.to_str().unwrap(), "--model", NAME])
        .args(["--output", output.to_str().unwrap()])
        .run();
    assert_code(&run, 0);
    assert!(
        stderr(&run).contains("fetching hf:org/digits: onnx/model.onnx"),
        "{}",
        stderr(&run)
    );
    let expected = images.path("folder.jsonl");
    assert_code(&Trommel::classify(&source, &expected).run(), 0);
    let labels = |path: &Path| -> Vec<_> {
        let rows = rows(path).into_iter();
        rows.map(|row| (row.uri.clone(), row.label.clone()))
            .collect()
    };
    assert_eq!(labels(&output), labels(&expected));
    let text = fs::read_to_string(&output).unwrap();
    assert!(text.contains(r#""model":"digits""#), "{text}");

    // Where Python's clients look for it.
    let repository = machine.repository();
    let commit = fs::read_to_string(repository.join("refs/main")).unwrap();
    assert_eq!(commit, HUB_COMMIT);
    let link = repository
        .join("snapshots")
        .join(commit)
        .join("onnx/model.onnx");
    assert_eq!(fs::read(&link).unwrap(), file("model.onnx"));
    assert!(fs::read_link(&link).unwrap().starts_with("../../../blobs"));
}

#[test]
fn what_is_here_is_not_fetched_again_also_offline() {
    let hub = digits_hub();
    let machine = Machine::new(&hub);
    let first = folder(&machine.fetch(&[]));
    assert_eq!(large_requests(&hub).len(), 1);
    assert_eq!(folder(&machine.fetch(&[])), first);
    assert_eq!(folder(&machine.fetch(&["--dtype", "fp32"])), first);
    assert_eq!(large_requests(&hub).len(), 1);

    let asked = hub.requests().len();
    let offline = machine
        .trommel(&["model", "fetch", NAME])
        .env("HF_HUB_OFFLINE", "1")
        .run();
    assert_eq!(folder(&offline), first);
    assert_eq!(hub.requests().len(), asked, "asked although offline");

    let inspected = machine.trommel(&["model", "inspect", NAME, "--json"]).run();
    assert_code(&inspected, 0);

    let other = machine
        .trommel(&["model", "fetch", "hf:org/other"])
        .env("HF_HUB_OFFLINE", "1")
        .run();
    assert_code(&other, 1);
    let text = stderr(&other);
    assert!(
        text.contains("HF_HUB_OFFLINE is set") && text.contains("never fetched"),
        "{text}"
    );
}

#[test]
fn a_download_that_is_cut_goes_on_where_it_ended() {
    let hub = digits_hub();
    let size = file("model.onnx").len();
    hub.cuts(size / 3, 2);
    let machine = Machine::new(&hub);
    folder(&machine.fetch(&[]));
    let requests = large_requests(&hub);
    let expected = [
        "store /onnx/model.onnx".to_owned(),
        format!("store /onnx/model.onnx from {}", size / 3),
        format!("store /onnx/model.onnx from {}", 2 * (size / 3)),
    ];
    assert_eq!(requests, expected);
}

/// A partial download is resumed, and also survives a server without ranges.
#[test]
fn a_later_command_goes_on_too() {
    for knows_ranges in [true, false] {
        let hub = digits_hub();
        let machine = Machine::new(&hub);
        let model = file("model.onnx");
        let fetched = folder(&machine.fetch(&[])).join("model.onnx");
        let blob = fetched.canonicalize().unwrap();
        // As an interrupted process would have left it.
        let incomplete = blob.with_extension("incomplete");
        fs::remove_file(&blob).unwrap();
        fs::write(&incomplete, &model[..1000]).unwrap();
        if !knows_ranges {
            hub.knows_no_ranges();
        }
        let again = folder(&machine.fetch(&[])).join("model.onnx");
        assert_eq!(fs::read(again).unwrap(), model);
        assert_eq!(
            large_requests(&hub).last().unwrap(),
            "store /onnx/model.onnx from 1000"
        );
        assert!(!incomplete.exists());
    }
}

#[test]
fn damaged_content_is_refused_and_does_not_stay() {
    let hub = digits_hub();
    hub.damages(true);
    let machine = Machine::new(&hub);
    let output = machine.fetch(&[]);
    assert_code(&output, 1);
    let text = stderr(&output);
    assert!(
        text.contains("onnx/model.onnx is corrupt: its SHA-256 is "),
        "{text}"
    );
    hub.damages(false);
    let fetched = folder(&machine.fetch(&[]));
    assert_eq!(
        fs::read(fetched.join("model.onnx")).unwrap(),
        file("model.onnx")
    );
}

#[test]
fn a_hub_that_fails_for_a_moment_is_asked_again() {
    let hub = digits_hub();
    hub.fails(2);
    let machine = Machine::new(&hub);
    folder(&machine.fetch(&[]));
}

#[test]
fn the_precision_chooses_the_file() {
    let hub = digits_hub();
    let machine = Machine::new(&hub);
    let fp16 = folder(&machine.fetch(&["--dtype", "fp16"]));
    assert!(
        fp16.ends_with(format!("org/{HUB_COMMIT}-onnx-model_fp16/digits")),
        "{fp16:?}"
    );
    let output = machine.fetch(&["--dtype", "int8"]);
    assert_code(&output, 1);
    let text = stderr(&output);
    let words = "holds no int8 file; choose one with --dtype: fp32 (onnx/model.onnx), fp16";
    assert!(text.contains(words), "{text}");
}

#[test]
fn a_repository_that_needs_a_token_says_so() {
    for (gated, words) in [
        (true, "is gated: accept its terms at http://"),
        (false, "or is private"),
    ] {
        let hub = digits_hub();
        hub.needs_token("hf_secret", gated);
        let machine = Machine::new(&hub);
        let output = machine.fetch(&[]);
        assert_code(&output, 1);
        let text = stderr(&output);
        assert!(
            text.contains(words) && text.contains("set HF_TOKEN"),
            "{text}"
        );

        let wrong = machine
            .trommel(&["model", "fetch", NAME])
            .env("HF_TOKEN", "hf_wrong")
            .run();
        assert_code(&wrong, 1);
        let text = stderr(&wrong);
        assert!(
            text.contains("has no read access") && !text.contains("hf_wrong"),
            "{text}"
        );

        // The store of large files would end the connection if it were sent the token.
        let output = machine
            .trommel(&["model", "fetch", NAME])
            .env("HF_TOKEN", "hf_secret")
            .run();
        folder(&output);
    }
}

#[test]
fn what_is_not_there_is_answered_with_the_next_step() {
    let plain = [
        ("config.json", file("config.json")),
        ("model.safetensors", vec![0; 9]),
    ];
    let hub = Hub::serve("google/vit", &plain);
    let machine = Machine::new(&hub);
    for (name, words) in [
        (
            "hf:google/vit",
            "holds no ONNX file; export it with `python models/export.py google/vit --output models/vit`",
        ),
        ("hf:google/vit@dev", "revision dev does not exist"),
        ("hf:google/none", "the repository does not exist"),
    ] {
        let output = machine.trommel(&["model", "fetch", name]).run();
        assert_code(&output, 1);
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
    let output = machine.trommel(&["model", "inspect", "google/vit"]).run();
    assert_code(&output, 2);
    let words = "for the model of that name on the Hugging Face Hub give --model hf:google/vit";
    assert!(stderr(&output).contains(words), "{}", stderr(&output));
    let path = digits_model().join("model.onnx");
    let output = machine
        .trommel(&["model", "inspect", path.to_str().unwrap()])
        .run();
    assert_code(&output, 2);
    assert!(
        stderr(&output).contains("is a file; give the folder"),
        "{}",
        stderr(&output)
    );
}

/// Weights in a file of their own are found from the folder of links, and from a copy.
#[test]
fn external_weights_come_with_the_model() {
    let external = root().join("crates/infer/tests/models/external");
    let read = |name: &str| fs::read(external.join(name)).unwrap();
    let processor =
        r#"{"image_processor_type": "ViTImageProcessor", "size": {"height": 4, "width": 5}}"#;
    let files = [
        ("config.json", read("config.json")),
        ("preprocessor_config.json", processor.into()),
        ("onnx/model.onnx", read("model.onnx")),
        ("onnx/weights.bin", read("weights.bin")),
    ];
    let hub = Hub::serve("org/digits", &files);
    let machine = Machine::new(&hub);
    let copy = machine.dir.path().join("models/copy");
    let output = machine.fetch(&["--output", copy.to_str().unwrap()]);
    assert_eq!(folder(&output), copy);
    let inspected = machine
        .trommel(&["model", "inspect", copy.to_str().unwrap()])
        .run();
    assert_code(&inspected, 0);
    let inspected = machine.trommel(&["model", "inspect", NAME]).run();
    assert_code(&inspected, 0);
    let output = machine.fetch(&["--output", copy.to_str().unwrap()]);
    assert_code(&output, 1);
    assert!(
        stderr(&output).contains("already exists"),
        "{}",
        stderr(&output)
    );

    let hub = Hub::serve("org/digits", &files[..3]);
    let machine = Machine::new(&hub);
    let output = machine.fetch(&[]);
    assert_code(&output, 1);
    let words = "keeps weights in onnx/weights.bin, which is not in the repository";
    assert!(stderr(&output).contains(words), "{}", stderr(&output));
}
