//! Opening models: what is accepted, what is refused, and what is reported of them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::Path;

use common::{
    NORMALIZATION, SHAPE, all, best, engine, folder, image, open, open_with, options, runtime,
};
use trommel_infer::{
    Activation, Device, Dim, Element, Engine, EngineOptions, InferErrorKind, Layout, Model,
    ModelOptions,
};
use trommel_types::{Lane, Shape};

/// A folder of its own with the model of another and other files next to it.
fn variant(model: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(
        folder(model).join("model.onnx"),
        dir.path().join("model.onnx"),
    )
    .unwrap();
    for (name, content) in files {
        fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

fn refusal(dir: &Path) -> (InferErrorKind, String) {
    let error = open_with(dir, &ModelOptions::default()).unwrap_err();
    (error.kind(), error.to_string())
}

#[test]
fn a_model_tells_all_about_itself() {
    let model = open("nhwc_f16").unwrap();
    let info = model.inspect();
    assert_eq!(&**model.name(), "nhwc_f16");
    assert_eq!((model.version().len(), info.sha256.len()), (12, 64));
    assert_eq!(
        model
            .labels()
            .iter()
            .map(|label| &**label)
            .collect::<Vec<_>>(),
        ["red", "green", "blue"]
    );
    assert_eq!(
        (info.layout, info.fixed_batch, info.labels),
        (Layout::Nhwc, None, 3)
    );
    assert_eq!((info.parameters, &*info.precision), (20, "f16"));
    assert_eq!((info.opsets["ai.onnx"], &*info.producer), (17, "make.py"));
    assert_eq!(info.inputs[0].element, Element::F16);
    assert_eq!(info.inputs[0].shape[0], Dim::Dynamic("N".to_owned()));
    assert_eq!(info.inputs[0].shape[3], Dim::Fixed(3));
    assert_eq!(info.bytes, fs::metadata(&info.file).unwrap().len());

    let text = info.to_string();
    for words in [
        "nhwc_f16 (version ",
        "pixels: f16[N, 4, 5, 3] (NHWC)",
        "logits: f16[N, 3] (classes)",
        "softmax",
        "3 (red, green, blue)",
    ] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
    let json = serde_json::to_value(&info).unwrap();
    assert_eq!(
        json["inputs"][0]["shape"],
        serde_json::json!(["N", 4, 5, 3])
    );
    assert_eq!(json["inputs"][0]["type"], "f16");
    assert_eq!(json["device"], "cpu");
}

#[test]
fn the_version_is_of_the_content_and_not_of_the_name() {
    let config = fs::read_to_string(folder("nchw_f32").join("config.json")).unwrap();
    let copy = variant("nchw_f32", &[("config.json", &config)]);
    let copied = open_with(copy.path(), &ModelOptions::default()).unwrap();
    assert_eq!(copied.version(), open("nchw_f32").unwrap().version());
    assert_ne!(copied.version(), open("nhwc_f32").unwrap().version());
}

/// The same weights with other labels, or other sizes, give other rows.
#[test]
fn the_version_is_of_labels_and_settings_too() {
    let plain = variant("nchw_f32", &[("config.json", r#"{"num_classes": 3}"#)]);
    let labelled = r#"{"id2label": {"0": "a", "1": "b", "2": "c"}}"#;
    let labelled = variant("nchw_f32", &[("config.json", labelled)]);
    let settings = [
        ("config.json", r#"{"num_classes": 3}"#),
        ("trommel.toml", "[model]\n"),
    ];
    let set = variant("nchw_f32", &settings);
    let versions = [plain, labelled, set].map(|dir| trommel_infer::version(dir.path()).unwrap());
    assert_ne!(versions[0], versions[1]);
    assert_ne!(versions[0], versions[2]);
}

#[test]
fn external_data_counts() {
    let info = open("external").unwrap().inspect();
    assert_eq!(info.external_data, ["weights.bin"]);
    let size = |name| fs::metadata(folder("external").join(name)).unwrap().len();
    assert_eq!(info.bytes, size("model.onnx") + size("weights.bin"));
}

#[test]
fn the_layout_of_the_hub_is_found_too() {
    let dir = variant("nchw_f32", &[("config.json", r#"{"num_classes": 3}"#)]);
    fs::create_dir(dir.path().join("onnx")).unwrap();
    let below = dir.path().join("onnx/model.onnx");
    fs::rename(dir.path().join("model.onnx"), &below).unwrap();
    let model = open_with(dir.path(), &ModelOptions::default()).unwrap();
    assert_eq!(model.inspect().file, below);
}

#[test]
fn several_files_are_named_and_one_can_be_chosen() {
    let dir = variant("nchw_f32", &[("config.json", r#"{"num_classes": 3}"#)]);
    let small = dir.path().join("model_small.onnx");
    fs::rename(dir.path().join("model.onnx"), &small).unwrap();
    let (kind, message) = refusal(dir.path());
    assert_eq!(kind, InferErrorKind::ModelMissing);
    assert!(message.contains("model_small.onnx"), "{message}");

    fs::write(
        dir.path().join("trommel.toml"),
        "[model]\nfile = \"model_small.onnx\"",
    )
    .unwrap();
    let model = open_with(dir.path(), &ModelOptions::default()).unwrap();
    assert_eq!(model.inspect().file, small);
}

#[tokio::test]
async fn problem_type_makes_it_sigmoid() {
    let config = r#"{"num_classes": 3, "problem_type": "multi_label_classification"}"#;
    let dir = variant("nchw_f32", &[("config.json", config)]);
    let model = open_with(dir.path(), &ModelOptions::default()).unwrap();
    assert_eq!(model.inspect().activation, Activation::Sigmoid);
    let engine = Engine::start(model, options(1, 1)).unwrap();
    let answer = engine
        .classify(image(0), Lane::Normal, &best(1, true))
        .await;
    let scores = answer.unwrap();
    let best = scores.logits.unwrap().into_iter().fold(f32::MIN, f32::max);
    assert_eq!(scores.top.len(), 1);
    assert!((scores.top[0].score - 1.0 / (1.0 + (-best).exp())).abs() < 1e-6);
}

/// The score of the best class, and the largest value that the model gave.
async fn best_score(model: &str) -> (f32, f32, Model) {
    let model = open(model).unwrap();
    let engine = Engine::start(model.clone(), options(1, 1)).unwrap();
    let answer = engine.classify(image(0), Lane::Normal, &best(1, true));
    let scores = answer.await.unwrap();
    let raw = scores.logits.unwrap().into_iter().fold(f32::MIN, f32::max);
    (scores.top[0].score, raw, model)
}

#[tokio::test]
async fn a_graph_that_ends_in_scores_is_not_activated_again() {
    for (name, operator) in [("softmax", "Softmax"), ("sigmoid", "Sigmoid")] {
        let (score, raw, model) = best_score(name).await;
        assert!((score - raw).abs() < 1e-6, "{name}: {score} of {raw}");
        let info = model.inspect();
        assert_eq!(info.activation, Activation::None);
        let why = format!("the graph ends in {operator} (node last), so its output is scores");
        assert_eq!(info.activation_from, why);
        assert!(info.to_string().contains(&why));
    }
}

/// The softmax of a single logit is 1 for every image.
#[tokio::test]
async fn a_model_of_one_logit_gives_a_yes_or_no() {
    let (score, raw, model) = best_score("one_logit").await;
    assert!(
        (score - 1.0 / (1.0 + (-raw).exp())).abs() < 1e-6,
        "{score} of {raw}"
    );
    let info = model.inspect();
    assert_eq!(info.activation, Activation::Sigmoid);
    assert_eq!(info.labels_from, "id2label in config.json");
}

#[test]
fn missing_folders_and_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("nowhere");
    for path in [missing, folder("nchw_f32").join("model.onnx")] {
        let (kind, message) = refusal(&path);
        assert_eq!(kind, InferErrorKind::ModelMissing);
        assert!(message.contains(&path.display().to_string()), "{message}");
    }
    let (kind, message) = refusal(dir.path());
    assert_eq!(kind, InferErrorKind::ModelConfig);
    assert!(message.contains("config.json"), "{message}");
    fs::write(dir.path().join("config.json"), r#"{"num_classes": 3}"#).unwrap();
    let (kind, message) = refusal(dir.path());
    assert_eq!(kind, InferErrorKind::ModelMissing);
    assert!(message.contains("model.onnx"), "{message}");
}

#[test]
fn a_damaged_model_is_refused() {
    let dir = variant("nchw_f32", &[("config.json", r#"{"num_classes": 3}"#)]);
    let path = dir.path().join("model.onnx");
    let whole = fs::read(&path).unwrap();
    // Cut, and with an operator that does not exist.
    let cut = whole[..whole.len() / 2].to_vec();
    let mut unknown = whole;
    let name = b"ReduceMean";
    let place = unknown
        .windows(name.len())
        .position(|window| window == name)
        .unwrap();
    unknown[place..place + name.len()].copy_from_slice(b"ReduceMead");
    for damaged in [cut, unknown] {
        fs::write(&path, damaged).unwrap();
        let (kind, message) = refusal(dir.path());
        assert_eq!(kind, InferErrorKind::NotClassifier);
        assert!(message.contains("model.onnx"), "{message}");
    }
}

#[test]
fn what_is_no_classifier_is_refused_with_what_was_found() {
    for (name, found) in [
        ("text", "input attention_mask: i64[N, length]"),
        ("detector", "output boxes: f32[N, 3, 4]"),
        ("gray", "grayscale"),
    ] {
        let (kind, message) = refusal(&folder(name));
        assert_eq!(kind, InferErrorKind::NotClassifier, "{message}");
        assert!(
            message.contains("expected an image classifier"),
            "{message}"
        );
        assert!(message.contains(found), "{message}");
    }
}

#[test]
fn labels_and_shapes_that_contradict_the_model_are_refused() {
    let dir = variant("nchw_f32", &[("config.json", r#"{"num_classes": 4}"#)]);
    let (kind, message) = refusal(dir.path());
    assert_eq!(kind, InferErrorKind::ModelConfig);
    assert!(
        message.contains("3 classes") && message.contains("names 4"),
        "{message}"
    );

    let swapped = Shape {
        height: 5,
        width: 4,
        channels: 3,
    };
    let options = ModelOptions::default();
    let error = Model::open(
        &runtime(),
        &folder("nchw_f32"),
        NORMALIZATION,
        swapped,
        &options,
    );
    let error = error.unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::ModelConfig);
    assert!(error.to_string().contains("4 high"), "{error}");
}

#[test]
fn a_device_that_is_not_there_is_an_error_and_never_the_cpu() {
    for name in ["cuda:0", "tensorrt:0", "cuda:4294967295"] {
        let device = Device::parse(name).unwrap();
        let options = ModelOptions {
            devices: device.into(),
            ..ModelOptions::default()
        };
        match open_with(&folder("nchw_f32"), &options) {
            Err(error) => {
                assert_eq!(error.kind(), InferErrorKind::Device, "{error}");
                assert!(
                    error.to_string().starts_with(&format!("device {name} ")),
                    "{error}"
                );
            }
            // On a machine with such a device and a library for it.
            Ok(model) => assert_eq!(model.devices(), &device.into()),
        }
    }
}

#[test]
fn settings_without_meaning_are_refused() {
    let options = ModelOptions {
        intra_threads: 0,
        ..ModelOptions::default()
    };
    let error = open_with(&folder("nchw_f32"), &options).unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::Settings);
    for (instances, max_batch) in [(0, 1), (1, 0)] {
        let options = EngineOptions {
            max_batch,
            ..common::options(instances, max_batch)
        };
        let error = Engine::start(open("nchw_f32").unwrap(), options).unwrap_err();
        assert_eq!(error.kind(), InferErrorKind::Settings);
    }
}

#[test]
fn a_model_traced_for_one_image_fails_at_start_with_the_remedy() {
    let error = Engine::start(open("traced_for_one").unwrap(), options(2, 4)).unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::ModelFailed);
    let message = error.to_string();
    assert!(
        message.contains("batch of 4") && message.contains("largest batch of 1"),
        "{message}"
    );
    Engine::start(open("traced_for_one").unwrap(), options(2, 1)).unwrap();
}

/// N8: an enormous batch took all memory of the machine before the first row.
#[test]
fn a_batch_that_the_machine_has_no_memory_for_is_refused_with_one_that_fits() {
    let error = Engine::start(open("nchw_f32").unwrap(), options(1, 1 << 45)).unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::Settings);
    assert!(error.to_string().contains("set max-batch"), "{error}");
}

#[test]
fn classes_that_only_a_run_reveals_fail_at_start() {
    let error = Engine::start(open("hidden_classes").unwrap(), options(1, 2)).unwrap_err();
    assert!(error.to_string().contains("[2, 6]"), "{error}");
}

#[tokio::test]
async fn pixels_of_another_length_are_refused() {
    let error = engine("nchw_f32")
        .classify(vec![0; SHAPE.len() - 1], Lane::Normal, &all())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::Pixels);
    assert!(error.to_string().contains("59 bytes"), "{error}");
}
