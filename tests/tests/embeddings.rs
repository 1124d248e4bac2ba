//! Commands that use stored embeddings: `relabel`, `fit`, `find`, `dedup`, `export --to`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use arrow_schema::DataType;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};
use trommel_sink::read_stored;
use trommel_storage::testsuite::PostgresServer;
use trommel_tests::{
    Folder, Trommel, assert_code, assert_each_index_once, assert_same_rows, digits_model, root,
    rows, stderr,
};
use trommel_types::{Classification, Outcome, Scalar};

/// A model of two towers in one file; `crates/infer/tests/models/README.md` says what it computes.
fn towers() -> PathBuf {
    root().join("crates/infer/tests/models/clip_both")
}

fn examples() -> PathBuf {
    digits_model().join("examples")
}

/// `trommel classify` of the shipped digits with the model of two towers.
fn classify(output: &Path, args: &[&str]) -> Trommel {
    Trommel::new(["classify"])
        .arg(examples())
        .arg("--model")
        .arg(towers())
        .arg("--output")
        .arg(output)
        .args(args)
}

fn relabel(results: &Path, output: &Path) -> Trommel {
    Trommel::new(["relabel"])
        .arg(results)
        .arg("--output")
        .arg(output)
}

fn stored(path: &Path) -> Vec<Classification> {
    let mut rows: Vec<_> = read_stored(path, true)
        .unwrap()
        .map(Result::unwrap)
        .collect();
    rows.sort_by_key(|row| row.image.index);
    rows
}

fn embedding(row: &Classification) -> &[f32] {
    match &row.outcome {
        Outcome::Ok(scores) => scores.embedding.as_deref().unwrap(),
        Outcome::Failed(failure) => panic!("{}", failure.error),
    }
}

fn labels_file(folder: &Folder, text: &str) -> PathBuf {
    let file = folder.path("labels.txt");
    fs::write(&file, text).unwrap();
    file
}

fn json_lines(output: &std::process::Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn embeddings_are_columns_of_a_fixed_width_in_the_type_that_was_asked_for() {
    let folder = Folder::new();
    for (flag, kind) in [
        ("--embedding=float16", DataType::Float16),
        ("--embedding", DataType::Float32),
    ] {
        let output = folder.path(&format!("{kind}.parquet"));
        assert_code(&classify(&output, &[flag, "--normalize"]).run(), 0);
        let file = fs::File::open(&output).unwrap();
        let schema = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
        let field = schema
            .schema()
            .field_with_name("embedding")
            .unwrap()
            .clone();
        match field.data_type() {
            DataType::FixedSizeList(item, 3) => assert_eq!(*item.data_type(), kind),
            other => panic!("{other}"),
        }
        for row in stored(&output) {
            let length: f32 = embedding(&row).iter().map(|value| value * value).sum();
            assert!((length - 1.0).abs() < 2e-3, "{length}");
            assert!(
                row.original.is_some() && row.bytes.is_some(),
                "the other columns stay"
            );
        }
        assert!(
            rows(&output)
                .iter()
                .all(|row| row.label.is_none() && row.top.is_empty())
        );
    }
    let refused = classify(&folder.path("none.parquet"), &[]).run();
    assert_code(&refused, 2);
    assert!(
        stderr(&refused).contains("--embedding"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn new_labels_from_stored_embeddings_are_those_of_a_new_job_in_every_format() {
    let folder = Folder::new();
    let labels = labels_file(&folder, "red\ngreen\nblue\na photo\n");
    let labels = [
        "--labels",
        labels.to_str().unwrap(),
        "--template",
        "{}",
        "--template",
        "a {}",
    ];
    let direct = folder.path("direct.jsonl");
    assert_code(&classify(&direct, &labels).run(), 0);
    let expected = rows(&direct);
    assert!(expected.iter().all(|row| row.top.len() == 4));
    for from in ["rows.parquet", "rows.jsonl", "rows.csv", "parts"] {
        let results = folder.path(from);
        assert_code(&classify(&results, &["--embedding"]).run(), 0);
        for to in ["new.parquet", "new.jsonl", "new.csv", "new-parts"] {
            let output = folder.path(&format!("{}-{to}", from.replace('.', "-")));
            let run = || {
                relabel(&results, &output)
                    .arg("--model")
                    .arg(towers())
                    .args(labels)
                    .run()
            };
            assert_code(&run(), 0);
            assert_same_rows(&rows(&output), &expected);
            let again = run();
            assert_code(&again, 0);
            assert!(
                stderr(&again).contains("finished before"),
                "{}",
                stderr(&again)
            );
        }
    }
}

#[test]
fn a_table_is_relabelled_too() {
    let server = PostgresServer::start();
    let folder = Folder::new();
    let labels = labels_file(&folder, "red\ngreen\n");
    let table = |name: &str| server.url(name);
    let named = |text: String| PathBuf::from(text);
    let classified = classify(&named(table("first")), &["--embedding"]);
    assert_code(&classified.run(), 0);
    let relabelled = relabel(&named(table("first")), &named(table("second")));
    let relabelled = relabelled
        .arg("--model")
        .arg(towers())
        .arg("--labels")
        .arg(&labels);
    assert_code(&relabelled.run(), 0);
    let back = folder.path("back.jsonl");
    let relabelled = relabel(&named(table("first")), &back);
    let relabelled = relabelled
        .arg("--model")
        .arg(towers())
        .arg("--labels")
        .arg(&labels);
    assert_code(&relabelled.run(), 0);
    assert_each_index_once(&rows(&back), stored(&back).len());
    let evaluated = Trommel::new(["evaluate", &table("second"), "--against"])
        .arg(&back)
        .arg("--json")
        .run();
    assert_code(&evaluated, 0);
    let told: Value = serde_json::from_slice(&evaluated.stdout).unwrap();
    assert_eq!(told["agreement"].as_f64(), Some(1.0), "{told}");
}

#[test]
fn what_does_not_go_together_is_refused_before_a_row_is_written() {
    let folder = Folder::new();
    let results = folder.path("rows.parquet");
    assert_code(&classify(&results, &["--embedding"]).run(), 0);
    let plain = folder.path("plain.parquet");
    assert_code(&Trommel::classify(&examples(), &plain).run(), 0);
    let other = root().join("crates/infer/tests/models/siglip_both");
    let output = folder.path("new.parquet");
    for (from, model, labels, words) in [
        (&results, towers(), "red\nred\n", "\"red\" is there twice"),
        (&results, towers(), "red\n\nblue\n", "label 2 is empty"),
        (&results, towers(), "", "no labels"),
        (
            &results,
            towers(),
            "a photo of a photo of a photo of red\n",
            "longer than the 8 tokens",
        ),
        (
            &results,
            other,
            "red\n",
            "give the model that made the embeddings",
        ),
        (&results, digits_model(), "red\n", "no text tower"),
        (
            &plain,
            towers(),
            "red\n",
            "give the model that made the embeddings",
        ),
    ] {
        let labels = labels_file(&folder, labels);
        let run = relabel(from, &output)
            .arg("--model")
            .arg(&model)
            .arg("--labels")
            .arg(labels)
            .run();
        assert_ne!(run.status.code(), Some(0), "{words}");
        assert!(stderr(&run).contains(words), "{words}: {}", stderr(&run));
        assert!(!output.exists(), "{words}");
    }
}

/// Rows with embeddings around three directions, which other programs could have written.
fn clusters(folder: &Folder, count: usize) -> PathBuf {
    let mut text = String::new();
    for index in 0..count {
        let mut vector: Vec<f64> = (0..6)
            .map(|place| ((index * 31 + place * 17) % 13) as f64 / 60.0)
            .collect();
        vector[index % 3] += 1.0;
        let row = json!({
            "job_id": "job", "index": index, "uri": format!("{}/{index}.jpg", ["a", "b", "c"][index % 3]),
            "status": "ok", "label": "x", "score": 0.5, "model": "towers", "model_version": "0123456789ab",
            "top": [{"label": "x", "class": 0, "score": 0.5}, {"label": "y", "class": 1, "score": 0.1 + (index % 7) as f64 / 20.0}],
            "attempts": 1, "finished_at": "2026-01-01T00:00:00.000000Z", "site": index * 2,
            "embedding": vector,
        });
        writeln!(text, "{row}").unwrap();
    }
    let results = folder.path("clusters.jsonl");
    fs::write(&results, text).unwrap();
    results
}

#[test]
fn what_was_learned_from_examples_labels_the_rest() {
    let folder = Folder::new();
    let results = clusters(&folder, 90);
    let truth = folder.path("truth.csv");
    let lines: String = (0..45)
        .map(|index| {
            format!(
                "{}/{index}.jpg,kind {}\n",
                ["a", "b", "c"][index % 3],
                index % 3
            )
        })
        .collect();
    fs::write(&truth, format!("uri,label\n{lines}")).unwrap();
    let head = folder.path("head.json");
    let fit = |args: &[&str]| {
        Trommel::new(["fit"])
            .arg(&results)
            .arg("--output")
            .arg(&head)
            .args(args)
            .run()
    };
    let fitted = fit(&["--labels", truth.to_str().unwrap(), "--json"]);
    assert_code(&fitted, 0);
    let told: Value = serde_json::from_slice(&fitted.stdout).unwrap();
    assert_eq!(
        (told["accuracy"].as_f64(), told["examples"].as_u64()),
        (Some(1.0), Some(45))
    );
    let output = folder.path("new.parquet");
    assert_code(
        &relabel(&results, &output).arg("--head").arg(&head).run(),
        0,
    );
    let relabelled = rows(&output);
    assert_each_index_once(&relabelled, 90);
    for row in &relabelled {
        assert_eq!(
            row.label.as_deref(),
            Some(&*format!("kind {}", row.index % 3))
        );
        assert_eq!(row.columns["site"], (row.index * 2).to_string());
    }
    // Of other embeddings.
    let others = fs::read_to_string(&results)
        .unwrap()
        .replace("0123456789ab", "ba9876543210");
    let other = folder.path("others.jsonl");
    fs::write(&other, others).unwrap();
    let refused = relabel(&other, &folder.path("no.parquet"))
        .arg("--head")
        .arg(&head)
        .run();
    assert_ne!(refused.status.code(), Some(0));
    assert!(
        stderr(&refused).contains("version 0123456789ab"),
        "{}",
        stderr(&refused)
    );
    let few = fit(&["--labels-from", "folders", "--folds", "31"]);
    assert_code(&few, 2);
    assert!(stderr(&few).contains("has 30 examples"), "{}", stderr(&few));
}

#[test]
fn the_images_most_like_a_text_come_first() {
    let folder = Folder::new();
    let results = folder.path("rows.parquet");
    assert_code(&classify(&results, &["--embedding"]).run(), 0);
    let find = |query: &str| {
        let found = Trommel::new(["find"])
            .arg(&results)
            .arg(query)
            .arg("--model")
            .arg(towers());
        let found = found.args(["--top", "5"]).run();
        assert_code(&found, 0);
        json_lines(&found)
    };
    // As the model has it: red is [3, 0, 0], and the end of a text [0.5, 0, 0.25].
    let query = [3.5f32, 0.0, 0.25];
    let cosine = |vector: &[f32]| {
        let length = |vector: &[f32]| vector.iter().map(|value| value * value).sum::<f32>().sqrt();
        let product: f32 = vector.iter().zip(query).map(|(a, b)| a * b).sum();
        product / (length(vector) * length(&query))
    };
    let mut expected: Vec<f32> = stored(&results)
        .iter()
        .map(|row| cosine(embedding(row)))
        .collect();
    expected.sort_by(|a, b| b.total_cmp(a));
    let found = find("red");
    let scores: Vec<f32> = found
        .iter()
        .map(|row| row["score"].as_f64().unwrap() as f32)
        .collect();
    assert_eq!(scores.len(), 5);
    for (score, expected) in scores.iter().zip(&expected) {
        assert!(
            (score - expected).abs() < 1e-5,
            "{scores:?} for {expected:?}"
        );
    }
    assert!(found.iter().all(|row| row["label"] == "red"));
    // An image is most similar to itself.
    let image = &stored(&results)[17].image.uri;
    let found = find(image);
    assert!(
        (found[0]["score"].as_f64().unwrap() - 1.0).abs() < 1e-5,
        "{}",
        found[0]
    );
}

#[test]
fn images_that_repeat_others_are_found_in_groups() {
    let folder = Folder::new();
    let results = clusters(&folder, 39);
    let mut text = fs::read_to_string(&results).unwrap();
    // Copies of the rows 3 and 8, the latter of another brightness.
    for (index, of, factor) in [(39, 3, 1.0), (40, 8, 2.5), (41, 8, 1.0)] {
        let mut row: Value = serde_json::from_str(text.lines().nth(of).unwrap()).unwrap();
        row["index"] = json!(index);
        row["uri"] = json!(format!("copy/{index}.jpg"));
        let vector = row["embedding"].as_array().unwrap().iter();
        let vector: Vec<f64> = vector
            .map(|value| factor * value.as_f64().unwrap())
            .collect();
        row["embedding"] = json!(vector);
        writeln!(text, "{row}").unwrap();
    }
    fs::write(&results, text).unwrap();
    let found = Trommel::new(["dedup"])
        .arg(&results)
        .args(["--threshold", "0.99999"])
        .run();
    assert_code(&found, 0);
    let found = json_lines(&found);
    let groups: Vec<_> = found
        .iter()
        .map(|row| (row["uri"].as_str().unwrap(), row["label"].as_str().unwrap()))
        .collect();
    assert_eq!(
        groups,
        [
            ("a/3.jpg", "a/3.jpg"),
            ("copy/39.jpg", "a/3.jpg"),
            ("c/8.jpg", "c/8.jpg"),
            ("copy/40.jpg", "c/8.jpg"),
            ("copy/41.jpg", "c/8.jpg"),
        ]
    );
}

/// The perceptual hashes of rows, by the name of their images.
fn hashes(results: &Path) -> BTreeMap<String, String> {
    let rows = stored(results).into_iter().map(|row| {
        let hash = match row.image.columns.as_slice() {
            [Scalar::String(hash)] => hash.clone(),
            other => panic!("{other:?} of {}", row.image.uri),
        };
        (row.image.uri.rsplit('/').next().unwrap().to_owned(), hash)
    });
    rows.collect()
}

#[test]
fn perceptual_hashes_are_a_column_of_every_format_and_find_duplicates_without_embeddings() {
    let folder = Folder::with_digits(5);
    let images = folder.images();
    let first = fs::read_dir(&images)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .min()
        .unwrap();
    fs::copy(&first, images.join("zz-copy.jpg")).unwrap();
    let classify = |name: &str| {
        let output = folder.path(name);
        assert_code(&Trommel::classify(&images, &output).arg("--phash").run(), 0);
        output
    };
    let results = classify("rows.parquet");
    let expected = hashes(&results);
    assert_eq!(expected.len(), 6);
    for (name, hash) in &expected {
        let is_hash = hash.len() == 16 && u64::from_str_radix(hash, 16).is_ok();
        assert!(is_hash, "{hash} of {name}");
    }
    for name in ["rows.jsonl", "rows.csv", "parts"] {
        assert_eq!(hashes(&classify(name)), expected, "{name}");
    }

    let dedup =
        |results: &Path, args: &[&str]| Trommel::new(["dedup"]).arg(results).args(args).run();
    let found = dedup(&results, &["--distance", "0"]);
    assert_code(&found, 0);
    let found = json_lines(&found);
    let copy = found
        .iter()
        .find(|row| row["uri"].as_str().unwrap().ends_with("zz-copy.jpg"));
    let copy = copy.unwrap();
    assert!(
        copy["label"]
            .as_str()
            .unwrap()
            .ends_with(first.file_name().unwrap().to_str().unwrap())
    );
    assert_eq!(copy["score"], 1.0);
    // Without embeddings hashes are compared, a few bits of which may differ.
    let near = dedup(&results, &[]);
    assert_code(&near, 0);
    assert!(json_lines(&near).len() >= found.len());

    let plain = folder.path("plain.parquet");
    assert_code(&Trommel::classify(&images, &plain).run(), 0);
    for flags in [&["--distance", "4"][..], &[]] {
        let refused = dedup(&plain, flags);
        assert_code(&refused, 2);
        assert!(stderr(&refused).contains("--phash"), "{}", stderr(&refused));
    }

    let manifest = folder.path("images.csv");
    fs::write(&manifest, format!("uri,phash\n{},1\n", first.display())).unwrap();
    let refused = Trommel::classify(&manifest, &folder.path("taken.parquet"))
        .arg("--phash")
        .run();
    assert_code(&refused, 2);
    assert!(
        stderr(&refused).contains("phash already"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn a_person_gets_the_images_that_the_model_is_least_sure_of() {
    let folder = Folder::new();
    let results = clusters(&folder, 70);
    let export = |name: &str, args: &[&str]| {
        let output = folder.path(name);
        let run = Trommel::new(["export"])
            .arg(&results)
            .arg("--output")
            .arg(&output)
            .args(args)
            .run();
        assert_code(&run, 0);
        output
    };
    let list = export("list.csv", &["--to", "csv", "--least-sure", "10"]);
    let list = fs::read_to_string(list).unwrap();
    let indices: Vec<usize> = list
        .lines()
        .skip(1)
        .map(|line| line.rsplit(',').next().unwrap().parse().unwrap())
        .collect();
    // The second class is nearest to the first one where index % 7 is 6.
    assert_eq!(indices, [6, 13, 20, 27, 34, 41, 48, 55, 62, 69]);
    let diverse = export(
        "diverse.csv",
        &["--to", "csv", "--least-sure", "6", "--diverse"],
    );
    let diverse = fs::read_to_string(diverse).unwrap();
    let kinds: std::collections::BTreeSet<_> = diverse
        .lines()
        .skip(1)
        .map(|line| line.chars().next())
        .collect();
    assert_eq!(kinds.len(), 3, "{diverse}");
    let tasks = export("tasks.json", &["--to", "label-studio", "--per-class", "4"]);
    let tasks: Vec<Value> = serde_json::from_slice(&fs::read(tasks).unwrap()).unwrap();
    assert_eq!(tasks.len(), 4);
    assert_eq!(
        tasks[0]["predictions"][0]["result"][0]["value"]["choices"],
        json!(["x"])
    );
    let other = folder.path("other.jsonl");
    let text = fs::read_to_string(&results).unwrap();
    let changed = text.lines().enumerate().map(|(place, line)| match place {
        5 | 9 => line.replace("\"label\":\"x\"", "\"label\":\"z\""),
        _ => line.to_owned(),
    });
    fs::write(&other, changed.collect::<Vec<_>>().join("\n")).unwrap();
    let other = other.to_str().unwrap();
    let folder_of = export("fiftyone", &["--to", "fiftyone", "--disagree", other]);
    let labels: Value =
        serde_json::from_slice(&fs::read(folder_of.join("labels.json")).unwrap()).unwrap();
    let ids: Vec<_> = labels["labels"].as_object().unwrap().keys().collect();
    assert_eq!(ids, ["000000005", "000000009"]);
    assert_eq!(labels["classes"], json!(["x"]));
}
