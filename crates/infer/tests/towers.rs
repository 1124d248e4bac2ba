//! Models without classes: their embeddings, and the classes that a job names, compared with what the formulas
//! of `models/README.md` give.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{
    SHAPE, assert_close, classify_all, folder, image, logits, normalised, open, open_with, options,
    runtime,
};
use trommel_infer::{Capacity, Engine, ModelOptions, Texts, Wanted};
use trommel_types::{EmbeddingType, LabelSet, Scores};

/// As in `models/make.py`, by token.
const VOCABULARY: [(&str, [f32; 3]); 8] = [
    ("<end>", [0.5, 0.0, 0.25]),
    ("red", [3.0, 0.0, 0.0]),
    ("green", [0.0, 3.0, 0.0]),
    ("blue", [0.0, 0.0, 3.0]),
    ("a", [0.5, 0.5, 0.0]),
    ("photo", [0.0, 0.25, 0.5]),
    ("of", [0.25, 0.0, 0.0]),
    ("<other>", [1.0, 1.0, -1.0]),
];
const FILLER: [f32; 3] = [4.0, 4.0, 4.0];

fn set(names: &[&str], templates: &[&str]) -> LabelSet {
    let owned = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
    LabelSet {
        names: owned(names),
        templates: owned(templates),
    }
}

fn direction(vector: [f32; 3]) -> [f32; 3] {
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    vector.map(|value| value / length)
}

/// The embedding of a sentence; where nothing says which tokens fill up, with those up to 8.
fn of_text(sentence: &str, filled: bool) -> [f32; 3] {
    let words: Vec<_> = sentence.split_whitespace().chain(["<end>"]).collect();
    let find = |word: &str| VOCABULARY.iter().find(|(known, _)| *known == word);
    let vectors = words
        .iter()
        .map(|word| find(word).unwrap_or(&VOCABULARY[7]).1);
    let fillers = std::iter::repeat_n(FILLER, if filled { 8 - words.len() } else { 0 });
    vectors.chain(fillers).fold([0.0; 3], |sum, vector| {
        [0, 1, 2].map(|place| sum[place] + vector[place])
    })
}

/// Logits of an image for labels in sentences, of which the directions are averaged.
fn of_labels(pixels: &[u8], set: &LabelSet, (scale, bias): (f32, f32), filled: bool) -> Vec<f32> {
    let image = direction(logits(pixels, normalised));
    let label = |name: &String| {
        let of = |template: &&str| direction(of_text(&template.replace("{}", name), filled));
        let templates = set.templates();
        let sum = templates
            .iter()
            .map(of)
            .fold([0.0; 3], |sum: [f32; 3], vector| {
                [0, 1, 2].map(|place| sum[place] + vector[place])
            });
        let text = direction(sum);
        let cosine: f32 = image.iter().zip(text).map(|(a, b)| a * b).sum();
        scale * cosine + bias
    };
    set.names.iter().map(label).collect()
}

async fn answers(engine: &Engine, wanted: &Arc<Wanted>) -> Vec<Scores> {
    let answers = classify_all(engine, (0..6).map(image), wanted).await;
    answers.into_iter().map(Result::unwrap).collect()
}

fn engine(name: &str, model: &ModelOptions) -> Engine {
    let model = open_with(&folder(name), model).unwrap_or_else(|error| panic!("{name}: {error}"));
    Engine::start(model, options(1, 4)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn labelled(set: &LabelSet) -> Arc<Wanted> {
    Arc::new(Wanted {
        labels: Some(set.clone()),
        logits: true,
        ..Wanted::default()
    })
}

#[tokio::test]
async fn labels_that_a_job_names_are_scored_as_the_formulas_say() {
    let plain = set(&["red", "green", "blue"], &[]);
    let several = set(
        &["red", "green", "blue", "Red photo", "unheard"],
        &["a {}", "{} of a photo"],
    );
    let fused = ModelOptions {
        fused: Some(true),
        capacity: Capacity::from(&*labelled(&plain)),
        ..ModelOptions::default()
    };
    for (name, line, filled) in [
        ("clip", (20.0, 0.0), false),
        ("clip_both", (20.0, 0.0), false),
        ("siglip_both", (12.5, -3.0), true),
    ] {
        for model in [&ModelOptions::default(), &fused] {
            let engine = engine(name, model);
            for set in [&plain, &several] {
                let wanted = labelled(set);
                for (number, scores) in answers(&engine, &wanted).await.iter().enumerate() {
                    let mut lower = set.clone();
                    lower
                        .names
                        .iter_mut()
                        .for_each(|name| *name = name.to_lowercase());
                    let expected = of_labels(&image(number), &lower, line, filled);
                    assert_close(scores.logits.as_ref().unwrap(), &expected, 2e-3);
                    let best = &scores.top[0];
                    let highest = expected.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    assert!(
                        (expected[best.class as usize] - highest).abs() < 4e-3,
                        "{name}"
                    );
                    assert_eq!(*best.label, set.names[best.class as usize]);
                    let score = match filled {
                        true => 1.0 / (1.0 + (-highest).exp()),
                        false => {
                            1.0 / expected
                                .iter()
                                .map(|logit| (logit - highest).exp())
                                .sum::<f32>()
                        }
                    };
                    assert!(
                        (best.score - score).abs() < 2e-3,
                        "{name}: {} for {score}",
                        best.score
                    );
                    assert_eq!(scores.embedding, None);
                }
            }
        }
    }
}

#[tokio::test]
async fn embeddings_come_as_they_are_asked_for() {
    let plain = Wanted {
        embedding: true,
        ..Wanted::default()
    };
    let scaled = Wanted {
        normalize: true,
        embedding_type: EmbeddingType::Float16,
        ..plain.clone()
    };
    for fused in [false, true] {
        let model = ModelOptions {
            fused: Some(fused),
            ..ModelOptions::default()
        };
        let engine = engine("clip_both", &model);
        let (plain, scaled) = (Arc::new(plain.clone()), Arc::new(scaled.clone()));
        let (plain, scaled) = (
            answers(&engine, &plain).await,
            answers(&engine, &scaled).await,
        );
        for (number, (plain, scaled)) in plain.iter().zip(scaled).enumerate() {
            let expected = logits(&image(number), normalised);
            assert_close(plain.embedding.as_ref().unwrap(), &expected, 1e-4);
            assert!(plain.top.is_empty() && plain.logits.is_none());
            let found = scaled.embedding.unwrap();
            assert_close(&found, &direction(expected), 1e-3);
            // A half has 10 bits behind the first one.
            assert!(found.iter().all(|value| value.to_bits() & 0x1fff == 0));
        }
    }
}

#[tokio::test]
async fn the_first_token_stands_for_the_image_where_there_is_no_other_vector() {
    let engine = engine("dinov2", &ModelOptions::default());
    let wanted = Arc::new(Wanted {
        embedding: true,
        ..Wanted::default()
    });
    for (number, scores) in answers(&engine, &wanted).await.iter().enumerate() {
        let pixels = image(number);
        let row = &pixels[..3 * SHAPE.width as usize];
        let mean = |channel: usize| {
            let values = row.iter().skip(channel).step_by(3);
            values.map(|pixel| normalised(*pixel, channel)).sum::<f32>() / 5.0
        };
        assert_close(
            scores.embedding.as_ref().unwrap(),
            &[0, 1, 2].map(mean),
            1e-5,
        );
    }
}

#[test]
fn what_cannot_be_labels_or_has_none_is_refused_by_name() {
    let with = |labels: Option<LabelSet>| Wanted {
        labels,
        ..Wanted::default()
    };
    let long = "a photo of a red photo of a blue photo";
    for (name, wanted, words) in [
        ("clip", with(None), &["has no classes", "--embedding"][..]),
        (
            "dinov2",
            with(Some(set(&["red"], &[]))),
            &["dinov2 has no text tower", "text_model.onnx"],
        ),
        ("nchw_f32", with(Some(set(&["red"], &[]))), &["embeddings"]),
        (
            "clip",
            with(Some(set(&["red", "red"], &[]))),
            &["\"red\" is there twice"],
        ),
        (
            "clip",
            with(Some(set(&["red", long], &[]))),
            &[long, "longer than the 8 tokens"],
        ),
        (
            "narrow_text",
            with(Some(set(&["red"], &[]))),
            &["3 values and texts of 2"],
        ),
    ] {
        let error = open(name).unwrap().check(&wanted).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{name}: {error}");
        }
    }
}

fn copy(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder(name)).unwrap() {
        let file = entry.unwrap().path();
        std::fs::copy(&file, dir.path().join(file.file_name().unwrap())).unwrap();
    }
    dir
}

#[test]
fn a_folder_that_lacks_something_says_what() {
    let labels = set(&["red", "green"], &[]);
    let of = |dir: &Path| {
        let texts = Texts::open(&runtime(), dir, SHAPE, None);
        texts
            .and_then(|texts| texts.head(&labels))
            .unwrap_err()
            .to_string()
    };
    for (removed, words) in [
        ("trommel.toml", "logit-scale"),
        ("tokenizer.json", "tokenizer.json is missing"),
        ("text_model.onnx", "no text tower"),
        ("config.json", "names no model_type"),
    ] {
        let dir = copy("clip");
        std::fs::remove_file(dir.path().join(removed)).unwrap();
        let error = of(dir.path());
        assert!(error.contains(words), "{removed}: {error}");
    }
    let dir = copy("clip");
    let left = "{\"pad_token\": \"<pad>\", \"padding_side\": \"left\"}";
    std::fs::write(dir.path().join("tokenizer_config.json"), left).unwrap();
    assert!(of(dir.path()).contains("on the left"), "{}", of(dir.path()));
    let dir = copy("clip");
    std::fs::write(dir.path().join("tokenizer.json"), "{\"model\": 7}").unwrap();
    assert!(
        of(dir.path()).contains("tokenizer.json"),
        "{}",
        of(dir.path())
    );
    let dir = copy("clip");
    std::fs::write(
        dir.path().join("tokenizer_config.json"),
        "{\"pad_token\": \"[PAD]\"}",
    )
    .unwrap();
    assert!(of(dir.path()).contains("\"[PAD]\""), "{}", of(dir.path()));
}

#[test]
fn the_class_of_siglip_2_lowers_texts_whatever_its_tokenizer_does() {
    let (upper, lower) = (set(&["RED", "Green"], &[]), set(&["red", "green"], &[]));
    let dir = copy("siglip_both");
    let tokenizer = dir.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    let plain = text.replace("{\"type\": \"Lowercase\"}", "null");
    assert_ne!(plain, text);
    std::fs::write(&tokenizer, plain).unwrap();
    let logits = |class: &str, set: &LabelSet| {
        let config = format!(
            "{{\"model_max_length\": 8, \"pad_token\": \"<pad>\", \"tokenizer_class\": {class:?}}}"
        );
        std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
        let texts = Texts::open(&runtime(), dir.path(), SHAPE, None).unwrap();
        let mut logits = vec![0.0; 2];
        let head = texts.head(set).unwrap();
        head.logits(&[0.5, -0.25, 1.0], &mut logits);
        logits
    };
    for class in ["Siglip2Tokenizer", "Siglip2TokenizerFast"] {
        assert_eq!(logits(class, &upper), logits(class, &lower), "{class}");
    }
    assert_ne!(
        logits("GemmaTokenizer", &upper),
        logits("GemmaTokenizer", &lower)
    );
}

#[test]
fn embeddings_of_labels_are_kept_while_nothing_that_they_depend_on_changes() {
    for name in ["clip", "clip_both"] {
        let (dir, cache) = (copy(name), tempfile::tempdir().unwrap());
        let with = |set: &LabelSet, cache: Option<&Path>| {
            let texts = Texts::open(&runtime(), dir.path(), SHAPE, cache).unwrap();
            let mut logits = vec![0.0; set.names.len()];
            let head = texts.head(set).unwrap();
            head.logits(&[0.5, -0.25, 1.0], &mut logits);
            logits
        };
        let kept = |set: &LabelSet| with(set, Some(cache.path()));
        let files = || -> Vec<PathBuf> {
            let files = cache.path().join("labels").read_dir().unwrap();
            files.map(|file| file.unwrap().path()).collect()
        };
        let labels = set(&["red", "blue"], &[]);
        let expected = with(&labels, None);
        assert_eq!(kept(&labels), expected, "{name}");
        assert_eq!(kept(&labels), expected, "{name}");
        let found = files();
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        let first = &found[0];
        let content = std::fs::read(first).unwrap();

        // A file that is whole is believed, so this one stands for another one's labels.
        let others = set(&["green", "photo"], &[]);
        let of_others = kept(&others);
        assert_ne!(of_others, expected, "{name}");
        let second = files().into_iter().find(|file| file != first).unwrap();
        std::fs::copy(&second, first).unwrap();
        assert_eq!(kept(&labels), of_others, "{name}: it was computed again");

        let mut damaged = content.clone();
        damaged[60] ^= 4;
        for bad in [&damaged[..], &content[..50], b""] {
            std::fs::write(first, bad).unwrap();
            assert_eq!(kept(&labels), expected, "{name}: damage was believed");
            assert_eq!(std::fs::read(first).unwrap(), content, "{name}");
        }

        let template = set(&["red", "blue"], &["a {}"]);
        assert_eq!(kept(&template), with(&template, None), "{name}");
        assert_eq!(files().len(), 3, "{name}");
        let tokenizer = dir.path().join("tokenizer.json");
        let text = std::fs::read_to_string(&tokenizer).unwrap();
        std::fs::write(&tokenizer, text.replace("blue", "azure")).unwrap();
        assert_eq!(kept(&labels), with(&labels, None), "{name}");
        assert_ne!(kept(&labels), expected, "{name}");
        assert_eq!(files().len(), 4, "{name}");

        // Where nothing can be kept, they are computed.
        let nowhere = cache.path().join("labels").join("file");
        std::fs::write(&nowhere, "").unwrap();
        let logits = with(&labels, Some(&nowhere));
        assert_eq!(logits, with(&labels, None), "{name}");
    }
}

/// Rows of one text tower are not those of another.
#[test]
fn the_version_covers_the_tower_for_texts() {
    let dir = copy("clip");
    let first = trommel_infer::version(dir.path()).unwrap();
    let before = trommel_infer::fingerprint(dir.path()).unwrap();
    let file = dir.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("blue", "azure")).unwrap();
    assert!(!before.is_current());
    assert_ne!(first, trommel_infer::version(dir.path()).unwrap());
}

/// As Transformers: cut, and the end stays.
#[test]
fn texts_beyond_the_longest_are_cut_for_a_search() {
    let texts = Texts::open(&runtime(), &folder("clip"), SHAPE, None).unwrap();
    let long = "red ".repeat(100);
    let found = texts
        .embed(&[long, String::new(), "green 🙂 红".to_owned()])
        .unwrap();
    assert_close(
        &found[..3],
        &of_text("red red red red red red red", false),
        1e-5,
    );
    assert_close(&found[3..6], &of_text("", false), 1e-5);
    assert_close(&found[6..], &of_text("green ? ?", false), 1e-5);
}
