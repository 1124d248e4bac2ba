//! Labels that requests bring, for a model with a tower for texts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::PathBuf;

use trommel_tests::{
    Answer, Cluster, Folder, Serving, Trommel, assert_code, digits, eventually, free_address, root,
    rows, send,
};

const PATH: &str = "/v1/models/clip_both/classify";

/// A model of two towers in one file; `crates/infer/tests/models/README.md` says what it computes.
fn towers() -> PathBuf {
    root().join("crates/infer/tests/models/clip_both")
}

fn image() -> Vec<u8> {
    fs::read(&digits()[0]).unwrap()
}

/// The classes of an answer with their scores.
fn top(answer: &Answer) -> Vec<(String, f64)> {
    let json = answer.json();
    let top = json["top"].as_array().unwrap_or_else(|| panic!("{json}"));
    top.iter()
        .map(|one| {
            let label = one["label"].as_str().unwrap().to_owned();
            (label, one["score"].as_f64().unwrap())
        })
        .collect()
}

#[test]
fn labels_of_a_request_are_classes_as_in_a_job() {
    let folder = Folder::new();
    fs::write(folder.path("a.png"), image()).unwrap();
    fs::write(folder.path("labels.txt"), "red car\nblue\ngreen\n").unwrap();
    let output = folder.path("rows.jsonl");
    let run = Trommel::new(["classify"])
        .arg(folder.path("a.png"))
        .arg("--model")
        .arg(towers())
        .arg("--output")
        .arg(&output)
        .arg("--labels")
        .arg(folder.path("labels.txt"))
        .args(["--template", "a {}", "--template", "the {}"])
        .run();
    assert_code(&run, 0);
    let expected = rows(&output).pop().unwrap();

    let model = towers();
    let serving = Serving::start(&["--model", model.to_str().unwrap()], &[]);
    let ask = |query: &str| serving.send("POST", &format!("{PATH}?{query}"), &[], &image());
    let query = "labels=red%20car,blue,green&template=a%20%7B%7D&template=the%20%7B%7D";
    // The second time they are known.
    for _ in 0..2 {
        let found = top(&ask(query));
        assert_eq!(found.len(), expected.top.len());
        for ((label, score), expected) in found.iter().zip(&expected.top) {
            assert_eq!(*label, *expected.label);
            assert!((score - f64::from(expected.score)).abs() < 1e-5, "{label}");
        }
    }
    let without = ask("");
    assert_eq!(without.kind(), (400, "malformed".to_owned()));
    // More sets than are remembered.
    for number in 0..12 {
        assert_eq!(top(&ask(&format!("labels=one,{number}"))).len(), 2);
    }
    for (query, words) in [
        ("labels=red,blue,red", "\"red\" is there twice"),
        ("labels=red,,blue", "label 2 is empty"),
        ("labels=red&template=a%20photo", "\"a photo\""),
        ("template=a%20%7B%7D", "no labels"),
        (
            &format!("labels={}", vec!["x"; 1001].join(",")),
            "1001 labels",
        ),
    ] {
        let answer = ask(query);
        assert_eq!(answer.kind(), (400, "malformed".to_owned()), "{query:.60}");
        let error = answer.json()["error"].as_str().unwrap().to_owned();
        assert!(error.contains(words), "{error}");
    }
    let other = serving.send(
        "POST",
        "/v1/models/digits/classify?labels=cat",
        &[],
        &image(),
    );
    assert_eq!(other.status, 400);
    let error = other.json()["error"].as_str().unwrap().to_owned();
    assert!(error.contains("embeddings"), "{error}");
}

#[test]
fn infer_workers_take_the_labels_of_requests() {
    let folder = Folder::new();
    let copy = folder.path("models/clip_both");
    fs::create_dir_all(&copy).unwrap();
    for file in towers().read_dir().unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
    let mut cluster = Cluster::new();
    cluster.set_repository(&folder.path("models"));
    let address = free_address();
    let listen = address.to_string();
    cluster.start(
        "serve",
        &["--serve", "clip_both", "--serve-listen", &listen],
    );
    cluster.start("infer", &["--serve", "clip_both"]);
    cluster.await_ready();
    let ask = |query: &str| send(address, "POST", &format!("{PATH}?{query}"), &[], &image());
    let there = eventually("an infer worker answers", || {
        let answer = ask("labels=red,blue");
        (answer.status == 200).then_some(answer)
    });
    let alone = Serving::start(&["--model", towers().to_str().unwrap()], &[]);
    let here = alone.send("POST", &format!("{PATH}?labels=red,blue"), &[], &image());
    assert_eq!(top(&there), top(&here));
    let answer = ask("labels=red,red");
    assert_eq!(answer.kind(), (400, "malformed".to_owned()));
}
