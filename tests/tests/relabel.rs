//! `trommel relabel` by column, from Parquet to Parquet, compared with rows that are read one by one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use arrow_array::builder::{FixedSizeListBuilder, Float32Builder, ListBuilder};
use arrow_array::{
    ArrayRef, Int32Array, Int64Array, RecordBatch, StringArray, TimestampMicrosecondArray,
};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::{WriterProperties, WriterVersion};
use trommel_sink::read_stored;
use trommel_tests::{
    Folder, Trommel, assert_code, assert_each_index_once, digits_model, root, rows, stderr,
};
use trommel_types::{Classification, ErrorKind, Outcome};

fn model(name: &str) -> PathBuf {
    root().join("crates/infer/tests/models").join(name)
}

fn relabel(results: &Path, output: &Path, model_name: &str, args: &[&str]) -> Trommel {
    Trommel::new(["relabel"])
        .arg(results)
        .arg("--model")
        .arg(model(model_name))
        .arg("--output")
        .arg(output)
        .args(args)
}

fn labels_file(folder: &Folder) -> String {
    let file = folder.path("labels.txt");
    fs::write(&file, "red\ngreen\nblue\na photo\n").unwrap();
    file.to_str().unwrap().to_owned()
}

/// The shipped digits, which lie in folders by what they show.
fn examples() -> Vec<PathBuf> {
    let folders = digits_model().join("examples").read_dir().unwrap();
    let folders = folders.map(|folder| folder.unwrap().path());
    let images = folders.filter(|folder| folder.is_dir()).flat_map(|folder| {
        let images = folder.read_dir().unwrap();
        images.map(|image| image.unwrap().path())
    });
    images.collect()
}

/// The rows by index, without the id of their job.
fn stored(path: &Path) -> Vec<Classification> {
    let rows = read_stored(path, true).unwrap();
    let mut rows: Vec<_> = rows
        .map(|row| {
            let mut row = row.unwrap();
            row.image.job = "".into();
            row
        })
        .collect();
    rows.sort_by_key(|row| row.image.index);
    rows
}

/// Relabels to Parquet, which goes by column, and to JSON Lines, which goes by row, and compares the two.
fn assert_both_ways(folder: &Folder, results: &Path, model_name: &str, args: &[&str]) {
    let by_column = folder.path("by-column");
    let by_row = folder.path("by-row.jsonl");
    for output in [&by_column, &by_row] {
        let run = relabel(results, output, model_name, args).arg("--overwrite");
        assert_code(&run.run(), 0);
    }
    let (found, expected) = (stored(&by_column), stored(&by_row));
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found, expected);
    }
    let record = |name: &str| -> serde_json::Value {
        let text = fs::read(by_column.join(name)).unwrap();
        serde_json::from_slice(&text).unwrap()
    };
    let job = record("_job.json");
    for row in read_stored(&by_column, false).unwrap() {
        assert_eq!(&*row.unwrap().image.job, job["job_id"]);
    }
    let failed = expected
        .iter()
        .filter(|row| matches!(row.outcome, Outcome::Failed(_)));
    assert_eq!(record("_summary.json")["failed"], failed.count());
}

#[test]
fn rows_by_column_are_those_by_row_for_all_that_a_job_writes() {
    let folder = Folder::new();
    let labels = labels_file(&folder);
    let labels = ["--labels", &*labels];
    let images = folder.path("images");
    fs::create_dir(&images).unwrap();
    let examples = examples();
    for (number, example) in examples.iter().take(60).enumerate() {
        fs::copy(example, images.join(format!("{number}.png"))).unwrap();
    }
    fs::write(images.join("0-broken.png"), "no image").unwrap();
    fs::write(images.join("5-broken.png"), "").unwrap();
    for (name, embedding) in [
        ("clip_both", "--embedding=float16"),
        ("siglip_both", "--embedding"),
    ] {
        let results = folder.path(name);
        let classify = |args: &[&str]| {
            let run = Trommel::new(["classify"])
                .arg(&images)
                .arg("--model")
                .arg(model(name))
                .arg("--output")
                .arg(&results)
                .args([embedding, "--normalize"])
                .args(args)
                .env("TROMMEL_SINK__PART_ROWS", "17");
            assert_code(&run.run(), 0);
        };
        classify(&[]);
        for more in [
            &["--top-k", "1"][..],
            &["--template", "{}", "--template", "a {}", "--top-k", "3"],
            &["--threshold", "0.3"],
        ] {
            assert_both_ways(&folder, &results, name, &[&labels[..], more].concat());
        }
        if name == "clip_both" {
            // The row of an image that was tried again counts, and not the one before.
            fs::copy(&examples[0], images.join("0-broken.png")).unwrap();
            classify(&["--retry-failed"]);
            assert_both_ways(&folder, &results, name, &labels);
        }
    }
}

/// A row as another program may write it: index, uri, and the embedding of an image that was classified.
type Foreign = (i64, String, Option<Vec<f32>>);

/// How other programs write embeddings.
#[derive(Clone, Copy, PartialEq)]
enum Written {
    Plain,
    Dictionary,
    /// Lists of any length, in pages of the newer kind.
    Lists,
}

/// Writes rows of this version of a model, every column of which may be null.
fn write(path: &Path, rows: &[Foreign], version: &str, written: Written) {
    let text = |of: &dyn Fn(&Foreign) -> Option<String>| -> ArrayRef {
        Arc::new(rows.iter().map(of).collect::<StringArray>())
    };
    let number = |of: &dyn Fn(&Foreign) -> i64| -> ArrayRef {
        Arc::new(rows.iter().map(|row| Some(of(row))).collect::<Int64Array>())
    };
    let count = |count: i32| -> ArrayRef {
        Arc::new(rows.iter().map(|_| Some(count)).collect::<Int32Array>())
    };
    let failed = |word: &'static str| move |row: &Foreign| row.2.is_none().then(|| word.to_owned());
    let times = TimestampMicrosecondArray::from(vec![1_700_000_000_000_000; rows.len()]);
    let embedding: ArrayRef = match written {
        Written::Lists => {
            let mut column = ListBuilder::new(Float32Builder::new());
            for (_, _, embedding) in rows {
                let values = embedding.iter().flatten().map(|value| Some(*value));
                column.values().extend(values);
                column.append(embedding.is_some());
            }
            Arc::new(column.finish())
        }
        _ => {
            let mut column = FixedSizeListBuilder::new(Float32Builder::new(), 3);
            for (_, _, embedding) in rows {
                let values = embedding.clone().unwrap_or(vec![0.0; 3]);
                column.values().append_slice(&values);
                column.append(embedding.is_some());
            }
            Arc::new(column.finish())
        }
    };
    let columns = [
        ("job_id", text(&|_| Some("job".to_owned()))),
        ("index", number(&|row| row.0)),
        ("uri", text(&|row| Some(row.1.clone()))),
        (
            "etag",
            text(&|row| (row.0 % 2 == 0).then(|| format!("v{}", row.0))),
        ),
        ("bytes", number(&|row| 1000 + row.0)),
        ("width", count(32)),
        ("height", count(16)),
        (
            "status",
            text(&|row| Some(row.2.as_ref().map_or("failed", |_| "ok").to_owned())),
        ),
        ("error_kind", text(&failed("empty"))),
        ("error", text(&failed("it holds no bytes"))),
        ("model", text(&|_| Some("towers".to_owned()))),
        ("model_version", text(&|_| Some(version.to_owned()))),
        ("attempts", count(2)),
        ("finished_at", Arc::new(times.with_timezone("UTC"))),
        ("site", number(&|row| row.0 * 7)),
        ("embedding", embedding),
    ];
    let batch = RecordBatch::try_from_iter_with_nullable(
        columns.map(|(name, column)| (name, column, true)),
    );
    let batch = batch.unwrap();
    let properties = WriterProperties::builder()
        .set_dictionary_enabled(written == Written::Dictionary)
        .set_max_row_group_row_count(Some(40))
        .set_data_page_row_count_limit(9)
        .set_write_batch_size(9)
        .set_writer_version(match written {
            Written::Lists => WriterVersion::PARQUET_2_0,
            _ => WriterVersion::PARQUET_1_0,
        })
        .build();
    let file = fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn foreign(index: i64) -> Foreign {
    let value = |place: i64| ((index * 31 + place * 17) % 13) as f32 / 6.0 - 1.0;
    let embedding = (index % 11 != 5).then(|| (0..3).map(value).collect());
    (index, format!("s3://photos/{index}.jpg"), embedding)
}

/// The version of a model as its rows have it.
fn version(folder: &Folder, name: &str) -> String {
    let results = folder.path("version.jsonl");
    let run = Trommel::new(["classify"])
        .arg(digits_model().join("examples"))
        .arg("--model")
        .arg(model(name))
        .arg("--output")
        .arg(&results)
        .arg("--embedding");
    assert_code(&run.run(), 0);
    stored(&results)[0].model_version.to_string()
}

#[test]
fn rows_by_column_are_those_by_row_for_files_of_other_programs() {
    let folder = Folder::new();
    let labels = labels_file(&folder);
    let labels = ["--labels", &*labels];
    let version = version(&folder, "clip_both");
    let results = folder.path("foreign.parquet");
    // In no order, and one whose scores are no numbers.
    let mut all: Vec<Foreign> = (0..120).rev().chain([120]).map(foreign).collect();
    all[7].2 = Some(vec![f32::NAN; 3]);
    for written in [Written::Plain, Written::Dictionary, Written::Lists] {
        write(&results, &all, &version, written);
        assert_both_ways(&folder, &results, "clip_both", &labels);
    }
    let rows = stored(&folder.path("by-column"));
    let kinds: Vec<ErrorKind> = rows
        .iter()
        .filter_map(|row| match &row.outcome {
            Outcome::Failed(failure) => Some(failure.kind),
            Outcome::Ok(_) => None,
        })
        .collect();
    assert!(kinds.contains(&ErrorKind::ModelFailed) && kinds.contains(&ErrorKind::Empty));
    assert_eq!(rows.len(), 121);
}

#[test]
fn what_does_not_fit_is_refused_in_the_same_words() {
    let folder = Folder::new();
    let labels = labels_file(&folder);
    let labels = ["--labels", &*labels];
    let version = version(&folder, "clip_both");
    let results = folder.path("results");
    fs::create_dir(&results).unwrap();
    let part = |number: usize| results.join(format!("part-{number:08}-0a1b2c3d.parquet"));
    let good: Vec<Foreign> = (0..60).map(foreign).collect();
    write(&part(0), &good, &version, Written::Plain);
    let mut wide: Vec<Foreign> = (60..90).map(foreign).collect();
    wide[9].2 = Some(vec![1.0; 4]);
    let bad: [(&[Foreign], &str, &str); 2] = [
        (&wide, &version, "69.jpg has 4 values"),
        (
            &wide[..5],
            "ba9876543210",
            "60.jpg has an embedding of the model towers",
        ),
    ];
    for (rows, version, words) in bad {
        write(&part(1), rows, version, Written::Lists);
        let said = ["new/", "new.jsonl"].map(|output| {
            let run = relabel(&results, &folder.path(output), "clip_both", &labels);
            let run: Output = run.arg("--overwrite").run();
            assert_code(&run, 1);
            stderr(&run)
        });
        assert!(said[0].contains(words), "{words}: {}", said[0]);
        assert_eq!(said[0], said[1]);
    }
}

#[test]
fn indices_that_are_missing_or_there_twice_are_refused_at_the_start() {
    let folder = Folder::new();
    let labels = labels_file(&folder);
    let labels = ["--labels", &*labels];
    let version = version(&folder, "clip_both");
    let results = folder.path("results");
    fs::create_dir(&results).unwrap();
    let part = |number: usize| results.join(format!("part-{number:08}-0a1b2c3d.parquet"));
    let write_parts = |first: &[i64], second: &[i64]| {
        for (number, indices) in [first, second].into_iter().enumerate() {
            let rows: Vec<Foreign> = indices.iter().map(|index| foreign(*index)).collect();
            write(&part(number), &rows, &version, Written::Plain);
        }
    };
    let run = |output: &str| relabel(&results, &folder.path(output), "clip_both", &labels).run();
    for (first, second, words) in [
        (&[0, 1, 2, 4][..], &[5, 7][..], "has no row of index 3"),
        (&[2, 1], &[4, 3], "has no row of index 0"),
        (
            &[0, 1, 2],
            &[3, 1, 4],
            "part-00000001-0a1b2c3d.parquet: two rows have the index 1",
        ),
        (
            &[0, 2, 2, 1],
            &[3],
            "part-00000000-0a1b2c3d.parquet: two rows have the index 2",
        ),
    ] {
        write_parts(first, second);
        for output in ["new/", "new.jsonl"] {
            let refused = run(output);
            assert_code(&refused, 2);
            let said = stderr(&refused);
            assert!(said.contains(words), "{words}: {said}");
            assert!(
                said.contains(results.to_str().unwrap()) && !said.contains("same command"),
                "{said}"
            );
        }
        assert!(!folder.path("new").exists() && !folder.path("new.jsonl").exists());
    }

    // Standard output takes rows with gaps, as the message says, and none that are there twice.
    let to_stream = || {
        let stream = Trommel::new(["relabel"]).arg(&results).arg("--model");
        stream.arg(model("clip_both")).args(labels).run()
    };
    assert_code(&to_stream(), 2);
    write_parts(&[0, 1, 2, 4], &[9]);
    let found = to_stream();
    assert_code(&found, 0);
    let lines = String::from_utf8(found.stdout).unwrap();
    assert_eq!(lines.lines().count(), 5, "{lines}");

    // Text is read by the same rule.
    let text = folder.path("rows.jsonl");
    fs::write(&text, &lines).unwrap();
    let refused = relabel(&text, &folder.path("new.csv"), "clip_both", &labels).run();
    assert_code(&refused, 2);
    let said = stderr(&refused);
    assert!(said.contains("rows.jsonl has no row of index 3"), "{said}");
}

/// The names of the parts in a folder.
fn parts(folder: &Path) -> Vec<String> {
    let names = folder.read_dir().unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut parts: Vec<String> = names.filter(|name| name.starts_with("part-")).collect();
    parts.sort();
    parts
}

#[test]
fn a_relabel_that_is_killed_goes_on_behind_its_last_part() {
    let folder = Folder::new();
    let labels = labels_file(&folder);
    let labels = ["--labels", &*labels];
    let version = version(&folder, "clip_both");
    let results = folder.path("results");
    fs::create_dir(&results).unwrap();
    // Where the indices start over, a new part begins. The second one exceeds the limit of the process.
    for (number, first, length) in [(0, 200, 1), (1, 0, 1), (2, 100, 8192)] {
        let rows: Vec<Foreign> = (first..first + 100)
            .map(|index| {
                let (index, uri, embedding) = foreign(index);
                (index, format!("{uri}?{}", "x".repeat(length)), embedding)
            })
            .collect();
        let part = results.join(format!("part-{number:08}-0a1b2c3d.parquet"));
        write(&part, &rows, &version, Written::Plain);
    }
    let last: Vec<Foreign> = (300..340).map(foreign).collect();
    write(
        &results.join("part-00000003-0a1b2c3d.parquet"),
        &last,
        &version,
        Written::Plain,
    );
    let output = folder.path("new");
    let run = relabel(&results, &output, "clip_both", &labels).into_command();
    let mut killed = Command::new("sh");
    killed
        .args(["-c", "ulimit -f 400; exec \"$@\"", "sh"])
        .arg(run.get_program())
        .args(run.get_args());
    let ended = killed.output().unwrap();
    assert!(!ended.status.success(), "it wrote more than it may");
    let before = parts(&output);
    assert_eq!(before.len(), 1, "{before:?}");
    assert!(!output.join("_SUCCESS").exists());

    assert_code(&relabel(&results, &output, "clip_both", &labels).run(), 0);
    let after = parts(&output);
    assert!(after.len() > 1 && after[0] == before[0], "{after:?}");
    assert_each_index_once(&rows(&output), 340);
    let whole = folder.path("whole.jsonl");
    assert_code(&relabel(&results, &whole, "clip_both", &labels).run(), 0);
    assert_eq!(stored(&output), stored(&whole));

    let again = relabel(&results, &output, "clip_both", &labels).run();
    assert!(
        stderr(&again).contains("finished before"),
        "{}",
        stderr(&again)
    );
    let other = ["--labels", labels[1], "--top-k", "1"];
    let refused = relabel(&results, &output, "clip_both", &other).run();
    assert_code(&refused, 2);
    let replaced = relabel(&results, &output, "clip_both", &other).arg("--overwrite");
    assert_code(&replaced.run(), 0);
    assert_each_index_once(&rows(&output), 340);
}

#[test]
fn the_tower_for_texts_runs_once_for_labels_and_templates() {
    let folder = Folder::with_digits(6);
    let labels = labels_file(&folder);
    let labels = ["--labels", &*labels];
    let results = folder.path("results.parquet");
    let cached = |run: Trommel| {
        let run = run.args(["--log", "info"]);
        let run = run.env("XDG_CACHE_HOME", folder.path("cache").to_str().unwrap());
        let run = run.run();
        assert_code(&run, 0);
        let said = stderr(&run);
        let computed = said.contains("computing the embeddings of labels");
        let taken = said.contains("taking the embeddings of labels from the cache");
        (computed, taken, said)
    };
    let classify = Trommel::new(["classify"])
        .arg(folder.images())
        .arg("--model")
        .arg(model("clip_both"))
        .arg("--output")
        .arg(&results)
        .arg("--embedding")
        .args(labels);
    let (computed, taken, said) = cached(classify);
    assert!(computed && !taken, "{said}");
    let again = |output: &str, args: &[&str]| {
        let args = [&labels[..], args].concat();
        cached(relabel(&results, &folder.path(output), "clip_both", &args))
    };
    let (computed, taken, said) = again("second.jsonl", &[]);
    assert!(!computed && taken, "{said}");
    let (computed, taken, said) = again("other.jsonl", &["--template", "a {}"]);
    assert!(computed && !taken, "{said}");

    let kept = folder.path("cache/trommel/labels").read_dir().unwrap();
    for file in kept {
        let file = file.unwrap().path();
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, bytes).unwrap();
    }
    let (computed, taken, said) = again("third.jsonl", &[]);
    assert!(computed && !taken && said.contains("is damaged"), "{said}");
    assert_eq!(
        stored(&folder.path("second.jsonl")),
        stored(&folder.path("third.jsonl"))
    );
}
