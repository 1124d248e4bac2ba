//! Images in, exactly as many rows out, whatever the source and the format.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, BinaryArray, Int64Array, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use trommel_sink::ResultRow;
use trommel_tests::{
    Folder, Trommel, assert_code, assert_each_index_once, assert_same_rows, digits, digits_model,
    rows, stderr,
};

fn labels(rows: &[ResultRow]) -> Vec<String> {
    rows.iter()
        .map(|row| row.label.clone().unwrap_or_default())
        .collect()
}

/// Rows of a source that names the shipped digits in listing order.
fn classify(source: &Path) -> Vec<ResultRow> {
    let folder = Folder::new();
    let output = folder.path("rows.parquet");
    assert_code(&Trommel::classify(source, &output).run(), 0);
    rows(&output)
}

fn expected() -> Vec<String> {
    labels(&classify(&digits_model().join("examples")))
}

#[test]
fn the_shipped_digits_are_read_right() {
    let rows = classify(&digits_model().join("examples"));
    assert_each_index_once(&rows, digits().len());
    let right = rows.iter().filter(|row| {
        Path::new(&row.uri)
            .parent()
            .unwrap()
            .file_name()
            .unwrap()
            .to_str()
            == row.label.as_deref()
    });
    let share = right.count() as f64 / rows.len() as f64;
    assert!(share >= 0.98, "{share}");
}

#[test]
fn every_format_holds_the_same_rows() {
    let folder = Folder::with_digits(120);
    let parquet = folder.path("rows.parquet");
    assert_code(&Trommel::classify(&folder.images(), &parquet).run(), 0);
    let expected = rows(&parquet);
    assert_each_index_once(&expected, 120);
    for name in ["rows.jsonl", "rows.csv", "parts"] {
        let output = folder.path(name);
        assert_code(&Trommel::classify(&folder.images(), &output).run(), 0);
        assert_same_rows(&rows(&output), &expected);
    }
    for format in ["jsonl", "csv"] {
        let output = folder.path(&format!("parts-{format}"));
        let run = Trommel::classify(&folder.images(), &output)
            .arg("--format")
            .arg(format)
            .run();
        assert_code(&run, 0);
        assert_same_rows(&rows(&output), &expected);
    }
}

#[test]
fn a_model_that_does_all_in_its_graph_gives_the_same_rows() {
    let folder = Folder::with_digits(120);
    let run = |name: &str, fused: &str| {
        let output = folder.path(name);
        let run = Trommel::classify(&folder.images(), &output)
            .env("TROMMEL_INFER__FUSED", fused)
            .env("TROMMEL_INFER__PIN_THREADS", fused);
        assert_code(&run.run(), 0);
        rows(&output)
    };
    assert_same_rows(&run("fused.jsonl", "true"), &run("plain.jsonl", "false"));
}

#[test]
fn sessions_that_would_take_more_memory_than_they_may_are_refused() {
    let folder = Folder::with_digits(1);
    let run = |instances: &str| {
        Trommel::classify(&folder.images(), &folder.path("rows.jsonl"))
            .args(["--instances", instances])
            .env("TROMMEL_INFER__MEMORY_BUDGET", "1")
            .run()
    };
    // The weights take 0.22 MiB.
    assert_code(&run("4"), 0);
    let refused = run("5");
    assert_code(&refused, 2);
    let said = stderr(&refused);
    assert!(said.contains("infer.memory-budget"), "{said}");
}

#[test]
fn rows_without_an_output_are_json_lines_on_standard_output() {
    let folder = Folder::with_digits(30);
    let run = Trommel::new(["classify"])
        .arg(folder.images())
        .arg("--model")
        .arg(digits_model())
        .run();
    assert_code(&run, 0);
    let lines = String::from_utf8(run.stdout.clone()).unwrap();
    let mut indices: Vec<u64> = lines
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["index"]
                .as_u64()
                .unwrap()
        })
        .collect();
    indices.sort_unstable();
    assert_eq!(indices, (0..30).collect::<Vec<_>>());
    assert!(
        stderr(&run).contains("30 images: 30 ok"),
        "{}",
        stderr(&run)
    );
}

#[test]
fn a_csv_manifest_gives_the_same_labels_and_passes_its_columns_through() {
    let folder = Folder::new();
    let mut text = "camera,path,serial\n".to_owned();
    for (number, file) in digits().iter().enumerate() {
        text.push_str(&format!(
            "\"north, {}\",{},{number:05}\n",
            number % 3,
            file.display()
        ));
    }
    let manifest = folder.path("list.csv");
    fs::write(&manifest, text).unwrap();
    let rows = classify(&manifest);
    assert_eq!(labels(&rows), expected());
    assert_eq!(rows[4].columns["camera"], "north, 1");
    assert_eq!(rows[4].columns["serial"], "00004");
}

#[test]
fn json_lines_and_text_manifests_name_files_relative_to_themselves() {
    let folder = Folder::with_digits(20);
    let names: Vec<_> = fs::read_dir(folder.images())
        .unwrap()
        .map(|entry| format!("images/{}", entry.unwrap().file_name().to_str().unwrap()))
        .collect();
    let lines: String = names
        .iter()
        .map(|name| format!("{{\"n\":{},\"uri\":\"{name}\"}}\n", name.len()))
        .collect();
    fs::write(folder.path("list.jsonl"), lines).unwrap();
    fs::write(folder.path("list.txt"), names.join("\n")).unwrap();
    for manifest in ["list.jsonl", "list.txt"] {
        let rows = classify(&folder.path(manifest));
        assert_each_index_once(&rows, 20);
        assert!(rows.iter().all(|row| row.status == "ok"), "{manifest}");
    }
    assert_eq!(
        classify(&folder.path("list.jsonl"))[0].columns["n"],
        names[0].len().to_string()
    );
}

#[test]
fn images_in_a_parquet_column_give_the_same_labels() {
    let folder = Folder::new();
    let files = digits();
    let bytes: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let columns: [(&str, ArrayRef); 3] = [
        (
            "serial",
            Arc::new(Int64Array::from_iter_values(0..files.len() as i64)),
        ),
        ("image", Arc::new(BinaryArray::from_iter_values(&bytes))),
        (
            "camera",
            Arc::new(StringArray::from_iter_values(files.iter().map(|_| "south"))),
        ),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let table = folder.path("table.parquet");
    let mut writer =
        ArrowWriter::try_new(File::create(&table).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();

    let rows = classify(&table);
    assert_eq!(labels(&rows), expected());
    assert_eq!(
        (
            rows[9].columns["serial"].as_str(),
            rows[9].columns["camera"].as_str()
        ),
        ("9", "south")
    );
}

#[test]
fn a_webdataset_shard_gives_the_same_labels_with_its_json() {
    let folder = Folder::new();
    let shard = folder.path("shard-000.tar");
    let mut archive = tar::Builder::new(File::create(&shard).unwrap());
    for (number, file) in digits().iter().enumerate() {
        let mut add = |suffix: &str, bytes: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            archive
                .append_data(&mut header, format!("s/{number:06}.{suffix}"), bytes)
                .unwrap();
        };
        // The text comes before the image in one half and behind it in the other.
        let text = format!("{{\"serial\":{number}}}");
        if number % 2 == 0 {
            add("json", text.as_bytes());
        }
        add(
            file.extension().unwrap().to_str().unwrap(),
            &fs::read(file).unwrap(),
        );
        if number % 2 == 1 {
            add("json", text.as_bytes());
        }
    }
    archive.finish().unwrap();

    let rows = classify(&shard);
    assert_eq!(labels(&rows), expected());
    for number in [8, 9] {
        assert_eq!(
            rows[number].columns["json"],
            format!("{{\"serial\":{number}}}")
        );
    }
}

#[test]
fn standard_input_names_files_one_a_line() {
    let folder = Folder::new();
    let list: String = digits()
        .iter()
        .map(|file| format!("{}\n", file.display()))
        .collect();
    let output = folder.path("rows.csv");
    let run = Trommel::classify(Path::new("-"), &output).run_with_input(&list);
    assert_code(&run, 0);
    assert_eq!(labels(&rows(&output)), expected());
}

#[test]
fn a_glob_and_a_sample_take_some() {
    let folder = Folder::with_digits(100);
    let output = folder.path("glob.csv");
    assert_code(
        &Trommel::classify(&folder.path("images/00001?.*"), &output).run(),
        0,
    );
    assert_each_index_once(&rows(&output), 10);

    let sample = |seed: &str, name: &str| {
        let output = folder.path(name);
        let run = Trommel::classify(&folder.images(), &output)
            .arg("--sample")
            .arg("25")
            .arg("--sample-seed")
            .arg(seed)
            .run();
        assert_code(&run, 0);
        rows(&output)
            .into_iter()
            .map(|row| row.uri)
            .collect::<Vec<_>>()
    };
    let first = sample("1", "a.csv");
    assert_eq!(first.len(), 25);
    assert_eq!(
        first,
        sample("1", "b.csv"),
        "the same seed takes the same images"
    );
    assert_ne!(first, sample("2", "c.csv"), "another seed takes others");
}

#[test]
fn logits_are_added_on_request() {
    let folder = Folder::with_digits(3);
    let output = folder.path("rows.jsonl");
    let run = Trommel::classify(&folder.images(), &output)
        .arg("--logits")
        .arg("--top-k")
        .arg("2")
        .run();
    assert_code(&run, 0);
    let text = fs::read_to_string(&output).unwrap();
    let row: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(row["logits"].as_array().unwrap().len(), 10);
    assert_eq!(row["top"].as_array().unwrap().len(), 2);
}

#[test]
fn the_fastest_batch_is_measured_once_and_remembered() {
    let folder = Folder::with_digits(3);
    let (output, cache) = (folder.path("rows.jsonl"), folder.path("cache"));
    let max_batch = |args: &[&str]| {
        let run = Trommel::classify(&folder.images(), &output)
            .args(["--overwrite", "--json"])
            .args(args)
            .env("XDG_CACHE_HOME", cache.to_str().unwrap())
            .run();
        assert_code(&run, 0);
        let summary: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
        summary["engine"]["max_batch"].as_u64().unwrap()
    };
    let batches = cache.join("trommel/batches");
    assert_eq!(max_batch(&["--max-batch", "3"]), 3);
    assert!(!batches.exists(), "nothing had to be measured");
    let is_measured = |batch| [1, 2, 4, 8, 16].contains(&batch);
    assert!(is_measured(max_batch(&[])));
    let files = fs::read_dir(batches).unwrap();
    let files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    fs::write(&files[0], "{\"max_batch\":5,\"quiet\":true}").unwrap();
    assert_eq!(max_batch(&[]), 5);
}

#[test]
fn nothing_but_our_own_is_left_in_the_cache() {
    let folder = Folder::with_digits(3);
    let cache = folder.path("cache");
    let run = Trommel::classify(&folder.images(), &folder.path("rows.csv"))
        .env("XDG_CACHE_HOME", cache.to_str().unwrap())
        .run();
    assert_code(&run, 0);
    // ONNX Runtime would keep its reports there until they are sent.
    let entries = fs::read_dir(cache).into_iter().flatten();
    let names = entries.map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| name == "trommel"));
}

#[test]
fn embeddings_of_a_model_without_them_are_refused_at_start() {
    let folder = Folder::with_digits(3);
    let output = folder.path("rows.jsonl");
    let run = Trommel::classify(&folder.images(), &output)
        .arg("--embedding")
        .run();
    assert_code(&run, 2);
    let said = stderr(&run);
    assert!(said.contains("expected an output of embeddings"), "{said}");
    assert!(!output.exists());
}

#[test]
fn new_and_changed_images_are_added_to_the_rows_that_are_there() {
    let folder = Folder::with_digits(60);
    let output = folder.path("rows/");
    let classify = |args: &[&str]| {
        Trommel::classify(&folder.images(), &output)
            .args(args)
            .run()
    };
    assert_code(&classify(&[]), 0);
    // One comes before all others, one is another image now, one is gone.
    let first = rows(&output);
    let images = folder.images();
    fs::copy(&digits()[0], images.join("0-new.png")).unwrap();
    fs::write(&first[10].uri, "no image any more").unwrap();
    fs::remove_file(&first[20].uri).unwrap();
    assert_code(&classify(&["--skip-existing"]), 0);
    let mut all = rows(&output);
    all.sort_by_key(|row| row.index);
    assert_each_index_once(&all, 61);
    for (row, before) in all[..60].iter().zip(&first) {
        match row.index {
            10 => assert_eq!((&row.uri, row.status.as_str()), (&before.uri, "failed")),
            _ => assert_eq!(row, before),
        }
    }
    assert_eq!(all[60].uri, images.join("0-new.png").display().to_string());
    assert_eq!(all[60].status, "ok");
    assert!(output.join("_SUCCESS").exists());
    // Nothing is new the next time, and the same command without the flag finds all of it.
    assert_code(&classify(&["--skip-existing"]), 0);
    assert_code(&classify(&[]), 0);
    assert!(!output.join("retry-0002/_job.json").exists());
    assert_eq!(rows(&output).len(), 61);
    // A finished file is added to as well.
    let file = folder.path("rows.csv");
    assert_code(&Trommel::classify(&images, &file).run(), 0);
    fs::copy(&digits()[1], images.join("1-new.png")).unwrap();
    let added = Trommel::classify(&images, &file)
        .args(["--skip-existing", "--json"])
        .run();
    assert_code(&added, 0);
    let told: serde_json::Value = serde_json::from_slice(&added.stdout).unwrap();
    assert_eq!(
        (&told["images"], &told["added"]["rows"]),
        (&61.into(), &1.into())
    );
    assert_each_index_once(&rows(&file), 61);
    assert!(!folder.path("rows.csv.parts/retry-0001/_lock").exists());
}
