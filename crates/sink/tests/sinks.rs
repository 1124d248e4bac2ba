//! Rows are committed once, survive crashes at any point, and read back as they were written.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{KeptClaims, Sink, open_alone, open_leased, ready};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::RowAccessor;
use trommel_sink::{
    Committed, Destination, Format, JobRecord, JsonLines, Opened, ResultRow, Retry, Reuse, Summary,
    read_rows,
};
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::{
    Classification, Column, ColumnKind, Content, ErrorKind, Failure, ImageRef, ImageSize, Lane,
    Outcome, Scalar, Scores, TopLabel,
};

#[path = "sinks/added.rs"]
mod added;
#[path = "sinks/crashes.rs"]
mod crashes;
#[path = "sinks/refusals.rs"]
mod refusals;
#[path = "sinks/retries.rs"]
mod retries;

const FORMATS: [&str; 3] = ["parquet", "jsonl", "csv"];

fn job() -> JobRecord {
    let column = |name: &str, kind| Column {
        name: name.to_owned(),
        kind,
    };
    JobRecord {
        job_id: "job-1".to_owned(),
        source: "folder photos".to_owned(),
        model: "digits".to_owned(),
        model_version: "0123456789ab".to_owned(),
        run: "0a1b2c3d".to_owned(),
        spec_hash: String::new(),
        options: BTreeMap::from([("top-k".to_owned(), "2".to_owned())]),
        format: Format::Parquet,
        columns: vec![
            column("site, \"north\"\nwing", ColumnKind::String),
            column("label", ColumnKind::Int),
            column("weight", ColumnKind::Float),
            column("seen", ColumnKind::Bool),
        ],
        logits: true,
        embedding: true,
        embedding_type: Default::default(),
        escape_formulas: false,
        retry: None,
        created_at: 1_700_000_000_000_000,
    }
}

fn uri(index: u64) -> String {
    format!("photos/{index} \"ü\",\n.jpg")
}

fn row(index: u64) -> Classification {
    let columns = vec![
        Scalar::String(format!("a,\"b\"\n{index}")),
        Scalar::Int(-(index as i64)),
        Scalar::Float(0.5),
        Scalar::Bool(index.is_multiple_of(2)),
    ];
    let label = |label: &str, class, score| TopLabel {
        label: label.into(),
        class,
        score,
    };
    let outcome = if index % 10 == 3 {
        let error = format!("{} holds no bytes", uri(index));
        Outcome::Failed(Failure {
            kind: ErrorKind::Empty,
            error,
        })
    } else {
        Outcome::Ok(Scores {
            top: vec![label("seven, \"7\"", 7, 0.9), label("one", 1, 0.1)],
            logits: Some(vec![1.5, -2.5]),
            embedding: Some(vec![0.25, 0.5, -0.75]),
        })
    };
    Classification {
        image: ImageRef {
            job: "job-1".into(),
            index,
            lane: Lane::Normal,
            uri: uri(index),
            content: Content::Whole,
            etag: index.is_multiple_of(2).then(|| "etag".to_owned()),
            size: Some(10),
            columns,
        },
        model: "digits".into(),
        model_version: "0123456789ab".into(),
        bytes: Some(10),
        original: Some(ImageSize {
            width: 8,
            height: 9,
        }),
        outcome,
        attempts: 1,
        finished_at: 1_700_000_000_000_001,
    }
}

fn rows(indices: impl IntoIterator<Item = u64>) -> Vec<Classification> {
    indices.into_iter().map(row).collect()
}

fn destination(path: &Path) -> Destination {
    Destination::parse(path.to_str().unwrap(), Format::Parquet).unwrap()
}

fn try_open(path: &Path, overwrite: bool) -> Result<Opened, StorageError> {
    let reuse = if overwrite {
        Reuse::Overwrite
    } else {
        Reuse::Resume
    };
    open_alone(destination(path), job(), reuse)
}

#[track_caller]
fn open(path: &Path) -> Sink {
    ready(try_open(path, false).unwrap())
}

fn complete(path: &Path) -> Summary {
    match try_open(path, false).unwrap() {
        Opened::Complete(summary) => *summary,
        Opened::Ready(_) => panic!("the job is not finished"),
    }
}

fn parts_of(path: &Path) -> PathBuf {
    destination(path).parts().to_owned()
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn read(path: &Path) -> BTreeMap<u64, ResultRow> {
    let mut found = BTreeMap::new();
    for row in read_rows(path).unwrap() {
        let row = row.unwrap();
        assert!(
            found.insert(row.index, row).is_none(),
            "an index stands twice"
        );
    }
    found
}

fn indices(path: &Path) -> Vec<u64> {
    read(path).into_keys().collect()
}

#[test]
fn rows_of_every_format_read_back_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let mut results = Vec::new();
    for format in FORMATS {
        let file = dir.path().join(format!("rows.{format}"));
        let folder = dir.path().join(format!("{format}/?format={format}"));
        for path in [&file, &folder] {
            let mut sink = open(path);
            sink.commit(rows([5, 3, 4])).unwrap();
            sink.commit(rows([0, 1, 2])).unwrap();
            let summary = sink.finish().unwrap();
            assert_eq!((summary.images, summary.ok, summary.failed), (6, 5, 1));
            assert_eq!(summary.failures["empty"].example, uri(3));
        }
        results.push(read(&file));
        results.push(read(&dir.path().join(format)));
    }
    for other in &results {
        assert_eq!(other, &results[0]);
    }
    let good = &results[0][&4];
    assert_eq!(
        (good.uri.as_str(), good.status.as_str()),
        (uri(4).as_str(), "ok")
    );
    assert_eq!(
        (good.label.as_deref(), good.score),
        (Some("seven, \"7\""), Some(0.9))
    );
    assert_eq!(
        good.top[1],
        TopLabel {
            label: "one".into(),
            class: 1,
            score: 0.1
        }
    );
    assert_eq!(good.columns["source_label"], "-4");
    assert_eq!(good.columns["site, \"north\"\nwing"], "a,\"b\"\n4");
    assert_eq!(
        (
            good.columns["weight"].as_str(),
            good.columns["seen"].as_str()
        ),
        ("0.5", "true")
    );
    let bad = &results[0][&3];
    assert_eq!(
        (bad.status.as_str(), bad.error_kind.as_deref()),
        ("failed", Some("empty"))
    );
    assert!(bad.error.as_deref().unwrap().contains("no bytes"));
    assert_eq!(
        (bad.label.as_ref(), bad.score, bad.top.len()),
        (None, None, 0)
    );
}

#[test]
fn a_score_that_is_no_number_stops_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for format in FORMATS {
        let path = dir.path().join(format!("rows.{format}"));
        let mut odd = row(0);
        let Outcome::Ok(scores) = &mut odd.outcome else {
            panic!("row 0 has a label")
        };
        scores.top[0].score = f32::NAN;
        open(&path).commit(vec![odd]).unwrap();
        let sink = open(&path);
        assert_eq!(sink.committed().len(), 1, "{format}");
        sink.finish().unwrap();
        let row = read(&path).remove(&0).unwrap();
        assert!(
            row.score.unwrap().is_nan() && row.top[0].score.is_nan(),
            "{format}"
        );
        assert_eq!(row.top.len(), 2);
    }
}

#[test]
fn parquet_says_in_its_footer_what_it_is_and_has_the_documented_schema() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let mut sink = open(&path);
    sink.commit(rows([9, 2, 0, 1])).unwrap();
    let footer = |path: &Path| -> BTreeMap<String, String> {
        let file = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
        let pairs = file
            .metadata()
            .file_metadata()
            .key_value_metadata()
            .unwrap()
            .clone();
        pairs
            .into_iter()
            .map(|pair| (pair.key, pair.value.unwrap_or_default()))
            .collect()
    };
    let part = footer(&parts_of(&path).join("part-00000000-0a1b2c3d.parquet"));
    let ranges: serde_json::Value = serde_json::from_str(&part["trommel.ranges"]).unwrap();
    assert_eq!(
        (&ranges[0]["start"], &ranges[0]["end"]),
        (&0.into(), &2.into())
    );
    assert_eq!(
        (&ranges[1]["start"], &ranges[1]["end"]),
        (&9.into(), &9.into())
    );
    assert_eq!(ranges[0]["hash"].as_str().unwrap().len(), 16);
    let job: JobRecord = serde_json::from_str(&part["trommel.job"]).unwrap();
    assert_eq!(&job, sink.job());

    sink.commit(rows(3..9)).unwrap();
    sink.finish().unwrap();
    let whole = footer(&path);
    assert_eq!(whole["trommel.job"], part["trommel.job"]);
    assert_eq!(whole["trommel.fingerprint"].len(), 16);
    assert!(!whole.contains_key("trommel.ranges"));

    let file = SerializedFileReader::new(File::open(&path).unwrap()).unwrap();
    assert_eq!(file.num_row_groups(), 2);
    let schema = file.metadata().file_metadata().schema_descr();
    let columns: Vec<_> = schema
        .root_schema()
        .get_fields()
        .iter()
        .map(|f| f.name())
        .collect();
    let expected = [
        "job_id",
        "index",
        "uri",
        "etag",
        "bytes",
        "width",
        "height",
        "status",
        "error_kind",
        "error",
        "label",
        "score",
        "top",
        "model",
        "model_version",
        "attempts",
        "finished_at",
        "site, \"north\"\nwing",
        "source_label",
        "weight",
        "seen",
        "logits",
        "embedding",
    ];
    assert_eq!(columns, expected);
    let read: Vec<_> = file
        .get_row_iter(None)
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let order: Vec<_> = read.iter().map(|row| row.get_long(1).unwrap()).collect();
    assert_eq!(order, [0, 1, 2, 9, 3, 4, 5, 6, 7, 8]);
    assert_eq!(
        read[0].get_timestamp_micros(16).unwrap(),
        1_700_000_000_000_001
    );
    assert_eq!(read[0].get_list(21).unwrap().len(), 2);
    assert_eq!(read[0].get_list(22).unwrap().len(), 3);
    assert_eq!(read[0].get_string(0).unwrap(), "job-1");
}

#[test]
fn text_has_the_documented_shape() {
    let dir = tempfile::tempdir().unwrap();
    let (jsonl, csv) = (dir.path().join("rows.jsonl"), dir.path().join("rows.csv"));
    for path in [&jsonl, &csv] {
        let mut sink = open(path);
        sink.commit(rows(0..4)).unwrap();
        sink.finish().unwrap();
    }
    let text = fs::read_to_string(&jsonl).unwrap();
    let mut stream = Vec::new();
    let shared: Vec<_> = rows(0..4).into_iter().map(Arc::new).collect();
    JsonLines::write_rows(&mut stream, &job(), &shared).unwrap();
    assert_eq!(
        text.as_bytes(),
        stream,
        "a stream has the same rows as a file"
    );
    let failed: serde_json::Value = serde_json::from_str(text.lines().nth(3).unwrap()).unwrap();
    assert_eq!(failed.as_object().unwrap().len(), 23);
    assert!(failed["label"].is_null() && failed["embedding"].is_null() && failed["etag"].is_null());
    assert_eq!(failed["finished_at"], "2023-11-14T22:13:20.000001Z");

    let text = fs::read_to_string(&csv).unwrap();
    assert!(text.starts_with("job_id,index,uri,etag,bytes,") && text.ends_with("\r\n"));
    let mut reader = csv::Reader::from_path(&csv).unwrap();
    let top = reader
        .headers()
        .unwrap()
        .iter()
        .position(|name| name == "top")
        .unwrap();
    let record = reader.records().next().unwrap().unwrap();
    let top: serde_json::Value = serde_json::from_str(&record[top]).unwrap();
    assert_eq!(
        (&top[0]["label"], &top[1]["class"]),
        (&"seven, \"7\"".into(), &1.into())
    );
}

#[test]
fn repeats_are_dropped_and_nothing_is_no_part() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.jsonl");
    let mut sink = open(&path);
    assert!(!sink.is_resumed());
    let first = sink.commit(rows([1, 0, 1, 1])).unwrap();
    let part = Some("part-00000000-0a1b2c3d.jsonl".to_owned());
    assert_eq!(
        first,
        Committed {
            part,
            rows: 2,
            duplicates_dropped: 2
        }
    );
    let again = sink.commit(rows([0, 1])).unwrap();
    assert_eq!(
        again,
        Committed {
            part: None,
            rows: 0,
            duplicates_dropped: 2
        }
    );
    assert_eq!(sink.commit(Vec::new()).unwrap().part, None);
    assert_eq!(sink.commit(rows([1, 2])).unwrap().rows, 1);
    sink.finish().unwrap();
    assert_eq!(indices(&path), [0, 1, 2]);
}

#[test]
fn the_same_command_resumes_and_then_finds_the_job_finished() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "rows.parquet",
        "rows.jsonl",
        "rows.csv",
        "a/b/?format=csv",
        "c/",
    ] {
        let path = dir.path().join(name);
        open(&path).commit(rows([0, 1, 4])).unwrap();
        let later = JobRecord {
            job_id: "job-2".to_owned(),
            created_at: 7,
            ..job()
        };
        let mut sink = ready(open_alone(destination(&path), later, Reuse::Resume).unwrap());
        assert!(sink.is_resumed());
        assert_eq!(sink.job().job_id, "job-1");
        assert_eq!(sink.committed().iter().collect::<Vec<_>>(), [0, 1, 4]);
        assert_eq!(
            sink.ledger().runs().ranges().collect::<Vec<_>>(),
            [(0, 1), (4, 4)]
        );
        let mut check = sink.source_check();
        for index in 0..5 {
            let committed = [0, 1, 4].contains(&index);
            assert_eq!(check.observe(index, &uri(index)).unwrap(), committed);
        }
        check.finish(5).unwrap();
        sink.commit(rows(0..5)).unwrap();
        let summary = sink.finish().unwrap();
        assert_eq!(complete(&path), summary, "{name}");
        assert_eq!(
            summary
                .parts
                .iter()
                .map(|part| part.rows)
                .collect::<Vec<_>>(),
            [3, 2]
        );
        let result = destination(&path).path().to_owned();
        assert_eq!(indices(&result), [0, 1, 2, 3, 4], "{name}");
    }
    let parts = names(&parts_of(&dir.path().join("rows.csv")));
    assert_eq!(parts, ["_SUCCESS", "_job.json", "_lock", "_summary.json"]);
}

#[test]
fn a_job_with_a_gap_is_not_finished() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.csv");
    let mut sink = open(&path);
    sink.commit(rows([0, 1, 3])).unwrap();
    let error = sink.finish().unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Incomplete);
    assert!(error.to_string().contains("index 2"), "{error}");
    assert!(!path.exists() && !parts_of(&path).join("_SUCCESS").exists());
}

#[test]
fn a_job_without_images_ends_too() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["rows.parquet", "rows.jsonl", "rows.csv", "folder/"] {
        let path = dir.path().join(name);
        open(&path).finish().unwrap();
        assert_eq!(complete(&path).images, 0);
        assert_eq!(indices(&path), [0_u64; 0], "{name}");
    }
}
