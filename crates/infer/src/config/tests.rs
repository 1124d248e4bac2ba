use super::*;

fn read(files: &[(&str, &str)]) -> Result<ModelConfig, InferError> {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(dir.path().join(name), content).unwrap();
    }
    ModelConfig::read(dir.path())
}

fn labels(config: &ModelConfig) -> Vec<&str> {
    config.labels.iter().map(|label| &**label).collect()
}

fn error(files: &[(&str, &str)]) -> String {
    let error = read(files).unwrap_err();
    assert_eq!(error.kind(), InferErrorKind::ModelConfig);
    error.to_string()
}

#[test]
fn id2label_is_in_the_order_of_the_numbers() {
    let names: Vec<String> = (0..12).map(|i| format!("\"{i}\": \"class {i}\"")).collect();
    let json = format!(
        r#"{{"id2label": {{{}}}, "model_type": "vit"}}"#,
        names.join(",")
    );
    let config = read(&[("config.json", &json)]).unwrap();
    assert_eq!(config.labels.len(), 12);
    assert_eq!(&*config.labels[10], "class 10");
    assert_eq!(config.activation(None).0, Activation::Softmax);
    assert_eq!(config.labels_from, "id2label in config.json");
}

#[test]
fn problem_type_chooses_the_activation() {
    for (problem, activation) in [
        ("null", Activation::Softmax),
        (r#""single_label_classification""#, Activation::Softmax),
        (r#""multi_label_classification""#, Activation::Sigmoid),
    ] {
        let json = format!(r#"{{"id2label": {{"0": "a", "1": "b"}}, "problem_type": {problem}}}"#);
        let config = read(&[("config.json", &json)]).unwrap();
        assert_eq!(config.activation(None).0, activation);
    }
    let json = r#"{"id2label": {"0": "a"}, "problem_type": "regression"}"#;
    assert!(error(&[("config.json", json)]).contains("regression"));
}

/// As the pipeline of Transformers: softmax of one logit would be 1 for every image.
#[test]
fn a_single_class_is_a_yes_or_no() {
    for problem in ["null", r#""single_label_classification""#] {
        let json = format!(r#"{{"id2label": {{"0": "a"}}, "problem_type": {problem}}}"#);
        let config = read(&[("config.json", &json)]).unwrap();
        let (activation, why) = config.activation(None);
        assert_eq!(activation, Activation::Sigmoid);
        assert!(why.contains("single class"), "{why}");
    }
}

#[test]
fn a_graph_that_ends_in_scores_is_not_activated_again() {
    let json =
        r#"{"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}"#;
    let ending = Ending {
        operator: "Softmax".to_owned(),
        node: "last".to_owned(),
    };
    let of = |toml: &str| {
        let config = read(&[("config.json", json), ("trommel.toml", toml)]).unwrap();
        config.activation(Some(&ending))
    };
    let (activation, why) = of("");
    assert_eq!(activation, Activation::None);
    assert!(
        why.contains("the graph ends in Softmax (node last)"),
        "{why}"
    );
    let (activation, why) = of("[model]\nactivation = \"softmax\"");
    assert_eq!(activation, Activation::Softmax);
    assert!(why.contains("trommel.toml says so, though"), "{why}");
}

#[test]
fn thresholds_are_for_all_classes_or_by_label() {
    let json = r#"{"id2label": {"0": "a", "1": "b"}}"#;
    let thresholds = |toml: &str| {
        let config = read(&[("config.json", json), ("trommel.toml", toml)]).unwrap();
        config.thresholds.map(|thresholds| thresholds.to_vec())
    };
    assert_eq!(thresholds("[model]"), None);
    assert_eq!(thresholds("[model]\nthreshold = 0.5"), Some(vec![0.5, 0.5]));
    let one = "[model]\nthresholds = { b = 0.25 }";
    assert_eq!(thresholds(one), Some(vec![0.0, 0.25]));
    for (toml, named) in [
        ("[model]\nthresholds = { c = 0.5 }", "\"c\""),
        ("[model]\nthreshold = 50", "50"),
    ] {
        let text = error(&[("config.json", json), ("trommel.toml", toml)]);
        assert!(
            text.contains(named) && text.contains("trommel.toml"),
            "{text}"
        );
    }
}

#[test]
fn timm_gives_names_or_a_number() {
    let json = r#"{"architecture": "x", "num_classes": 2, "label_names": ["n01", "n02"]}"#;
    assert_eq!(
        labels(&read(&[("config.json", json)]).unwrap()),
        ["n01", "n02"]
    );
    let json = r#"{"architecture": "x", "num_classes": 3, "pretrained_cfg": {}}"#;
    assert_eq!(
        labels(&read(&[("config.json", json)]).unwrap()),
        ["0", "1", "2"]
    );
}

#[test]
fn trommel_toml_wins() {
    let json = r#"{"id2label": {"0": "a"}, "problem_type": "multi_label_classification"}"#;
    let toml = "[preprocess]\nwhatever = 1\n[model]\nactivation = \"none\"\nlabels = [\"b\"]";
    let config = read(&[("config.json", json), ("trommel.toml", toml)]).unwrap();
    assert_eq!(labels(&config), ["b"]);
    assert_eq!(config.activation(None).0, Activation::None);
    assert_eq!(config.labels_from, "labels in trommel.toml");
}

#[test]
fn labels_may_stand_in_a_file() {
    let toml = "[model]\nlabels = \"names.txt\"";
    let config = read(&[("trommel.toml", toml), ("names.txt", "cat\ndog\n")]).unwrap();
    assert_eq!(labels(&config), ["cat", "dog"]);
    assert!(error(&[("trommel.toml", toml)]).contains("names.txt"));
}

#[test]
fn what_is_wrong_is_said_with_the_file() {
    for (json, words) in [
        ("{", "EOF"),
        (r#"{"id2label": {}}"#, "empty"),
        (r#"{"id2label": {"1": "a"}}"#, "numbered from 0"),
        (r#"{"id2label": {"0": "a", "00": "b"}}"#, "numbered from 0"),
        (r#"{"id2label": {"0": []}}"#, "no text"),
        (r#"{"label_names": [null]}"#, "something other than text"),
    ] {
        let message = error(&[("config.json", json)]);
        assert!(message.contains(words), "{json}: {message}");
    }
}

#[test]
fn a_model_without_names_of_classes_says_why() {
    for (files, words) in [
        (
            &[("config.json", "{}")][..],
            "no id2label, label_names or num_classes",
        ),
        (
            &[("config.json", r#"{"num_classes": 0}"#)],
            "no id2label, label_names or num_classes",
        ),
        (&[], "config.json: the file does not exist"),
    ] {
        let config = read(files).unwrap();
        assert!(config.labels.is_empty());
        let why = config.unlabelled.unwrap().to_string();
        assert!(why.contains(words), "{why}");
    }
}

#[test]
fn an_unknown_key_for_the_model_is_refused() {
    let message = error(&[("trommel.toml", "[model]\nactivaton = \"softmax\"")]);
    assert!(
        message.contains("trommel.toml") && message.contains("activaton"),
        "{message}"
    );
}
