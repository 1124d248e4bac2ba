//! Sources list what is there in a fixed order, and fetch it or say why not.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use tempfile::TempDir;
use trommel_source::{Found, NOT_IN_THIS_BUILD, Source, SourceOptions, open_source};
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::{Column, ColumnKind, ImageRef, Lane, Scalar};

#[path = "sources/archives.rs"]
mod archives;
#[path = "sources/files.rs"]
mod files;
#[path = "sources/manifests.rs"]
mod manifests;
#[path = "sources/packed.rs"]
mod packed;
#[path = "sources/parquet.rs"]
mod parquet;

const LIMIT: u64 = 1 << 20;

/// A folder of files for one test.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    /// A place with a file at each path, that holds its path.
    fn with(paths: &[&str]) -> Self {
        let place = Self::new();
        for path in paths {
            place.write(path, path.as_bytes());
        }
        place
    }

    fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.folder.path().join(path)
    }

    fn spec(&self, path: &str) -> String {
        self.path(path).to_str().unwrap().to_owned()
    }

    fn write(&self, path: impl AsRef<Path>, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn open(&self, path: &str) -> Arc<dyn Source> {
        self.open_with(path, SourceOptions::default())
    }

    fn open_with(&self, path: &str, options: SourceOptions) -> Arc<dyn Source> {
        open_source(&[self.spec(path)], &options).unwrap()
    }

    /// The message of the error that opening ends with.
    fn refusal(&self, path: &str) -> String {
        self.refusal_with(path, SourceOptions::default())
    }

    /// As [`Place::refusal`], of a file with this content.
    fn refusal_text(&self, path: &str, content: &str) -> String {
        self.write(path, content);
        self.refusal(path)
    }

    fn refusal_with(&self, path: &str, options: SourceOptions) -> String {
        match open_source(&[self.spec(path)], &options) {
            Ok(source) => panic!("{} was opened", source.describe()),
            Err(error) => error.to_string(),
        }
    }

    /// The uris of a listing, below this place.
    async fn uris(&self, source: &Arc<dyn Source>) -> Vec<String> {
        let prefix = format!("{}/", self.folder.path().to_str().unwrap());
        let below = |found: Found| found.uri.strip_prefix(&prefix).unwrap().to_owned();
        list(source).await.unwrap().into_iter().map(below).collect()
    }
}

async fn list(source: &Arc<dyn Source>) -> Result<Vec<Found>, StorageError> {
    source.list().try_collect().await
}

async fn fetch(source: &Arc<dyn Source>, found: &Found) -> Result<Bytes, StorageError> {
    source.fetch(&image(found), LIMIT).await
}

async fn failure(source: &Arc<dyn Source>, found: &Found) -> StorageErrorKind {
    fetch(source, found).await.unwrap_err().kind()
}

fn image(found: &Found) -> ImageRef {
    ImageRef {
        job: "job".into(),
        index: 0,
        lane: Lane::Normal,
        uri: found.uri.clone(),
        content: found.content.clone(),
        etag: found.etag.clone(),
        size: found.size,
        columns: found.columns.clone(),
    }
}

fn column(name: &str, kind: ColumnKind) -> Column {
    Column {
        name: name.to_owned(),
        kind,
    }
}

fn text(text: &str) -> Scalar {
    Scalar::String(text.to_owned())
}

/// Makes a file's time of change another.
fn touch(path: &Path) {
    let file = fs::File::options().write(true).open(path).unwrap();
    let changed = file.metadata().unwrap().modified().unwrap();
    file.set_modified(changed + std::time::Duration::from_secs(1))
        .unwrap();
}

#[track_caller]
fn assert_says(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "`{word}` is missing: {message}");
    }
}

/// Whether permissions bind this process; if not, runs the test of that name where they do.
fn permissions_bind(test: &str) -> bool {
    if !rustix::process::geteuid().is_root() || std::env::var_os("TROMMEL_TEST_BOUND").is_some() {
        return true;
    }
    let run = std::process::Command::new("setpriv")
        .arg("--bounding-set=-dac_override,-dac_read_search")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env("TROMMEL_TEST_BOUND", "1")
        .output()
        .expect("setpriv (Debian package util-linux) has to be installed");
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
    false
}

#[tokio::test]
async fn several_sources_are_listed_one_after_another() {
    let place = Place::with(&["b/1.jpg", "a/1.jpg", "c.jpg"]);
    place.write("list.csv", "uri,site,shot\nc.jpg,north,7\n");
    place.write(
        "list.jsonl",
        r#"{"shot": 8, "path": "c.jpg", "dark": true}"#,
    );
    let specs = ["b", "list.csv", "a", "list.jsonl"].map(|spec| place.spec(spec));
    let source = open_source(&specs, &SourceOptions::default()).unwrap();
    assert_eq!(
        place.uris(&source).await,
        ["b/1.jpg", "c.jpg", "a/1.jpg", "c.jpg"]
    );
    let expected = [
        column("site", ColumnKind::String),
        column("shot", ColumnKind::String), // text in one, integers in the other
        column("dark", ColumnKind::Bool),
    ];
    assert_eq!(source.columns(), expected);
    let rows: Vec<_> = list(&source)
        .await
        .unwrap()
        .into_iter()
        .map(|found| found.columns)
        .collect();
    let nothing = vec![Scalar::Null, Scalar::Null, Scalar::Null];
    assert_eq!(rows[0], nothing);
    assert_eq!(rows[1], [text("north"), text("7"), Scalar::Null]);
    assert_eq!(rows[2], nothing);
    assert_eq!(rows[3], [Scalar::Null, text("8"), Scalar::Bool(true)]);
    assert_eq!(source.describe(), specs.join(" "));
}

#[tokio::test]
async fn a_sample_is_the_same_every_time_and_even() {
    let names: Vec<String> = (0..1000).map(|number| format!("{number:04}.jpg")).collect();
    let paths: Vec<&str> = names.iter().map(String::as_str).collect();
    let place = Place::with(&paths);
    let sample = |count, seed| {
        let options = SourceOptions {
            sample: Some(count),
            sample_seed: seed,
            ..SourceOptions::default()
        };
        place.open_with("", options)
    };
    // The place itself is the source, whose spec ends in a slash.
    let first = place.uris(&sample(100, 0)).await;
    assert_eq!(first.len(), 100);
    assert!(first.is_sorted(), "a sample keeps the order of the listing");
    assert_eq!(place.uris(&sample(100, 0)).await, first);
    assert_ne!(place.uris(&sample(100, 1)).await, first);
    let early = first.iter().filter(|name| name.as_str() < "0500").count();
    assert!(
        (30..70).contains(&early),
        "{early} of 100 are of the first half"
    );
    // A smaller sample is part of a larger one.
    let small = place.uris(&sample(10, 0)).await;
    assert!(small.iter().all(|name| first.contains(name)));
    assert_eq!(place.uris(&sample(5000, 0)).await, names);
    assert!(place.uris(&sample(0, 0)).await.is_empty());
    assert_ne!(sample(100, 0).describe(), sample(100, 1).describe());
}

#[tokio::test]
async fn sizes_choose_images() {
    let place = Place::new();
    for size in [0, 1, 10, 100] {
        place.write(format!("{size:03}.jpg"), vec![b'x'; size]);
    }
    let options = SourceOptions {
        min_size: Some(1),
        max_size: Some(10),
        ..SourceOptions::default()
    };
    let source = place.open_with("", options);
    assert_eq!(place.uris(&source).await, ["001.jpg", "010.jpg"]);
    assert_eq!(source.skipped(), 2);
    list(&source).await.unwrap();
    assert_eq!(source.skipped(), 2, "each listing counts again");
    // R41: counting ahead disturbs no listing.
    assert_eq!((source.count().await.unwrap(), source.skipped()), (2, 2));
}

#[test]
fn what_is_no_source_is_refused_with_a_remedy() {
    let place = Place::with(&["a.jpg", "list.xlsx", "all.rar", "all.tar.xz"]);
    assert_says(
        &place.refusal("nowhere"),
        &["nowhere", "No such file", "spelling"],
    );
    assert_says(&place.refusal("list.xlsx"), &["list.xlsx", ".csv"]);
    assert_says(&place.refusal("all.rar"), &["all.rar", ".tar"]);
    assert_says(&place.refusal("all.tar.xz"), &["all.tar.xz", "decompress"]);
    for suffix in ["tar", ".zip", "gz", "parquet"] {
        let options = SourceOptions {
            suffixes: Some(vec!["jpg".to_owned(), suffix.to_owned()]),
            ..SourceOptions::default()
        };
        let refusal = place.refusal_with("", options);
        assert_says(&refusal, &["--suffixes", suffix, "name them"]);
    }
    let open = |specs: &[&str]| {
        let specs: Vec<String> = specs.iter().map(|spec| (*spec).to_owned()).collect();
        open_source(&specs, &SourceOptions::default())
            .map(|_| ())
            .unwrap_err()
    };
    assert_says(&open(&[]).to_string(), &["no source"]);
    assert_says(&open(&[""]).to_string(), &["empty", "name a file"]);
    for (spec, remedy) in [
        ("gs:///prefix", "gs://bucket/key"),
        ("abfss://container/a.jpg", "az://container/key"),
        ("ftp://host/a.jpg", "download"),
    ] {
        assert_says(&open(&[spec]).to_string(), &[spec, remedy]);
    }
    assert_says(&open(&["-", "-"]).to_string(), &["twice"]);
    assert_eq!(open(&["-", "-"]).kind(), StorageErrorKind::InvalidSource);
    assert_eq!(open(&["no/such/file"]).kind(), StorageErrorKind::NotFound);
}
