//! Rows in a table, in a real PostgreSQL.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "postgres/retries.rs"]
mod retries;

use std::sync::{Arc, Barrier};

use common::{KeptClaims, Sink, open_alone, open_leased, ready, row};
use trommel_sink::{JobRecord, Opened, PostgresConfig, Retry, Reuse, TableDestination};
use trommel_storage::testsuite::PostgresServer;
use trommel_storage::{StorageError, StorageErrorKind};
use trommel_types::{
    Classification, Column, ColumnKind, ErrorKind, ImageSize, Outcome, Scalar, Scores, TopLabel,
};

fn record(id: &str) -> JobRecord {
    JobRecord {
        job_id: id.to_owned(),
        ..common::record()
    }
}

/// Rows whose uris hold what COPY writes in its own way, and what PostgreSQL cannot hold.
fn rows(indices: impl IntoIterator<Item = u64>) -> Vec<Classification> {
    let row = |index| Classification {
        bytes: Some(7),
        ..row(index, &format!("photos/{index}\t\\N\0.jpg"))
    };
    indices.into_iter().map(row).collect()
}

fn table(server: &PostgresServer, name: &str) -> TableDestination {
    destination(&server.url(name))
}

fn destination(url: &str) -> TableDestination {
    TableDestination::parse(url, &PostgresConfig::default())
        .unwrap()
        .unwrap()
}

fn open(table: &TableDestination, job: JobRecord, overwrite: bool) -> Result<Opened, StorageError> {
    let claims = Arc::new(KeptClaims::default());
    open_leased(table.clone(), job, overwrite, &claims)
}

#[track_caller]
fn sink(table: &TableDestination, id: &str) -> Sink {
    ready(open(table, record(id), false).unwrap())
}

#[test]
fn rows_are_committed_once_and_a_job_is_resumed() {
    let server = PostgresServer::start();
    let table = table(&server, "labels");
    let mut first = sink(&table, "job");
    assert!(!first.is_resumed());
    assert_eq!(first.commit(rows(0..100)).unwrap().rows, 100);
    assert_eq!(first.commit(rows(50..150)).unwrap().rows, 50);
    assert_eq!(first.commit(rows(0..10)).unwrap().part, None);
    drop(first);

    let mut second = sink(&table, "job");
    assert!(second.is_resumed());
    assert_eq!(second.committed().len(), 150);
    // What is committed is compared with the listing, characters that the table cannot hold too.
    let mut check = second.source_check();
    for row in rows(0..150) {
        assert!(check.observe(row.image.index, &row.image.uri).unwrap());
    }
    second.commit(rows(151..200)).unwrap();
    let error = sink(&table, "job").finish().unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Incomplete, "{error}");
    second.commit(rows(150..151)).unwrap();
    let summary = second.finish().unwrap();
    assert_eq!((summary.images, summary.failed), (200, 200));
    assert_eq!(summary.failures["empty"].count, 200);
    assert!(matches!(
        open(&table, record("job"), false).unwrap(),
        Opened::Complete(complete) if *complete == summary
    ));
    assert_eq!(
        server.query("SELECT count(*), count(DISTINCT index), max(index) FROM labels"),
        "200|200|199"
    );
    assert_eq!(
        server.query("SELECT summary->>'images', finished_at IS NOT NULL FROM labels_jobs"),
        "200|t"
    );
    // Rows that somebody took away are made again.
    server.query("DELETE FROM labels WHERE index IN (3, 77)");
    let third = sink(&table, "job");
    assert_eq!(third.committed().len(), 198);
}

#[test]
fn every_value_arrives_with_its_type() {
    let server = PostgresServer::start();
    let column = |name: &str, kind| Column {
        name: name.to_owned(),
        kind,
    };
    let job = JobRecord {
        columns: vec![
            column("Name \"x\"", ColumnKind::String),
            column("label", ColumnKind::Int),
            column("price", ColumnKind::Float),
            column("sold", ColumnKind::Bool),
        ],
        logits: true,
        embedding: true,
        embedding_type: Default::default(),
        ..record("typed")
    };
    let mut row = rows([0]).remove(0);
    row.image.columns = vec![
        Scalar::String("a\tb\\c\nd 🙂".to_owned()),
        Scalar::Int(i64::MIN),
        Scalar::Float(f64::NAN),
        Scalar::Bool(true),
    ];
    row.original = Some(ImageSize {
        width: 640,
        height: 480,
    });
    row.finished_at = 1_700_000_000_123_456;
    row.outcome = Outcome::Ok(Scores {
        top: vec![TopLabel {
            label: "tabby \"cat\"".into(),
            class: 281,
            score: 0.75,
        }],
        logits: Some(vec![1.5, f32::NEG_INFINITY]),
        embedding: Some(vec![0.25]),
    });
    let mut nulls = rows([1]).remove(0);
    nulls.image.columns = vec![Scalar::Null];
    // A date that no calendar has.
    nulls.finished_at = i64::MAX;
    let table = table(&server, "typed");
    let mut sink = ready(open(&table, job, false).unwrap());
    sink.commit(vec![row, nulls]).unwrap();
    assert_eq!(
        server.query(
            "SELECT uri LIKE E'photos/0\\t\\\\\\\\N_.jpg', bytes, width, height, status, label, score, \
             top->0->>'label', top->0->'class', attempts, finished_at = '2023-11-14 22:13:20.123456+00', \
             \"Name \"\"x\"\"\" = E'a\\tb\\\\c\\nd 🙂', source_label, price, sold, logits[1], logits[2], embedding \
             FROM typed WHERE index = 0"
        ),
        "t|7|640|480|ok|tabby \"cat\"|0.75|tabby \"cat\"|281|1|t|t|-9223372036854775808|NaN|t|1.5|-Infinity|{0.25}"
    );
    assert_eq!(
        server.query(
            "SELECT error_kind, error, label IS NULL, top IS NULL, logits IS NULL, sold IS NULL, \
             finished_at FROM typed WHERE index = 1"
        ),
        "empty|it holds no bytes|t|t|t|t|infinity"
    );
}

#[test]
fn sinks_that_race_store_no_row_twice() {
    let server = PostgresServer::start();
    let table = table(&server, "raced");
    let barrier = Arc::new(Barrier::new(4));
    let writers: Vec<_> = (0..4)
        .map(|_| {
            let (table, barrier) = (table.clone(), Arc::clone(&barrier));
            std::thread::spawn(move || {
                barrier.wait();
                // They race for the tables too.
                let mut rows_sink = sink(&table, "job");
                for start in (0..1000).step_by(100) {
                    while let Err(error) = rows_sink.commit(rows(start..start + 100)) {
                        assert_eq!(error.kind(), StorageErrorKind::LostRace, "{error}");
                        rows_sink = sink(&table, "job");
                    }
                }
                rows_sink.committed().len()
            })
        })
        .collect();
    for writer in writers {
        assert_eq!(writer.join().unwrap(), 1000);
    }
    assert_eq!(server.query("SELECT count(*) FROM raced"), "1000");
}

#[test]
fn many_jobs_share_a_table() {
    let server = PostgresServer::start();
    server.query("CREATE SCHEMA ml");
    let table = table(&server, "ml.labels");
    sink(&table, "one").commit(rows(0..5)).unwrap();
    sink(&table, "two").commit(rows(0..7)).unwrap();
    let other = JobRecord {
        source: "elsewhere".to_owned(),
        run: "0b0b0b0b".to_owned(),
        ..record("one")
    };
    let error = open(&table, other.clone(), false).err().unwrap();
    assert_eq!(error.kind(), StorageErrorKind::OutputOfAnotherJob);
    assert!(
        error.to_string().contains("source was s3://bucket/images/"),
        "{error}"
    );
    let replaced = ready(open(&table, other.clone(), true).unwrap());
    assert_eq!(replaced.committed().len(), 0);
    drop(replaced);
    // A second sink of the job that overwrites continues with what the first one wrote.
    let mut again = ready(open(&table, other.clone(), true).unwrap());
    again.commit(rows(0..3)).unwrap();
    let again = ready(open(&table, other, true).unwrap());
    assert_eq!(again.committed().len(), 3);
    assert_eq!(
        server.query("SELECT job_id, count(*) FROM ml.labels GROUP BY job_id ORDER BY job_id"),
        "one|3\ntwo|7"
    );
}

#[test]
fn a_command_that_is_repeated_finds_its_job_and_one_works_at_a_time() {
    let server = PostgresServer::start();
    let table = table(&server, "labels");
    let alone = |id: &str, reuse| open_alone(table.clone(), record(id), reuse);
    let mut first = ready(alone("first", Reuse::Resume).unwrap());
    first.commit(rows(0..5)).unwrap();
    let error = alone("second", Reuse::Resume).err().unwrap();
    assert_eq!(error.kind(), StorageErrorKind::Locked, "{error}");
    drop(first);
    let resumed = ready(retry_while_locked(|| alone("third", Reuse::Resume)).unwrap());
    assert_eq!(
        (resumed.job().job_id.as_str(), resumed.committed().len()),
        ("first", 5)
    );
    drop(resumed);
    let fresh = ready(retry_while_locked(|| alone("fourth", Reuse::Overwrite)).unwrap());
    assert_eq!(
        (fresh.job().job_id.as_str(), fresh.committed().len()),
        ("first", 0)
    );
}

/// The server notices a moment later that a connection is closed.
fn retry_while_locked(
    open: impl Fn() -> Result<Opened, StorageError>,
) -> Result<Opened, StorageError> {
    for _ in 0..200 {
        match open() {
            Err(error) if error.kind() == StorageErrorKind::Locked => {
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            opened => return opened,
        }
    }
    panic!("it stays locked");
}

#[test]
fn what_stands_in_the_way_is_named_with_a_way_on() {
    let server = PostgresServer::start();
    let opened = |url: &str| {
        let error = open(&destination(url), record("job"), false).err().unwrap();
        (error.kind(), error.to_string())
    };
    let url = server.url("labels");
    server.query("CREATE TABLE partial (job_id text, model text, index bigint, uri text)");
    server.query("CREATE TABLE keyless AS SELECT 1 AS nothing");
    server.query("CREATE ROLE guest LOGIN PASSWORD 'guest'");
    server.query("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0");
    let as_guest = url.replace("trommel:s%20p%26ce", "guest:guest");
    let wrong = url.replace("s%20p%26ce", "wrong");
    for (url, kind, hint) in [
        (
            &server.url("partial"),
            StorageErrorKind::InvalidDestination,
            "ALTER TABLE \"partial\" ADD \"etag\" text",
        ),
        (
            &server.url("none.labels"),
            StorageErrorKind::InvalidDestination,
            "create it first",
        ),
        (
            &url.replace("/postgres?", "/nonesuch?"),
            StorageErrorKind::InvalidDestination,
            "nonesuch",
        ),
        (
            &url.replace("/postgres?", "/latin?"),
            StorageErrorKind::InvalidDestination,
            "UTF8",
        ),
        (
            &wrong,
            StorageErrorKind::PermissionDenied,
            "check user and password",
        ),
        (
            &server.url_without_password("labels"),
            StorageErrorKind::PermissionDenied,
            "PGPASSWORD",
        ),
        (&as_guest, StorageErrorKind::PermissionDenied, "grant"),
        (
            &format!("{url}&sslmode=require"),
            StorageErrorKind::InvalidDestination,
            "sslmode=disable",
        ),
        (
            &format!("{url}&sslrootcert=none.pem&sslmode=prefer"),
            StorageErrorKind::InvalidDestination,
            "none.pem",
        ),
        (
            &"postgres://u@127.0.0.1:1/db?table=t".to_owned(),
            StorageErrorKind::Unreadable,
            "127.0.0.1:1",
        ),
    ] {
        let (found, words) = opened(url);
        assert_eq!(found, kind, "{words}");
        assert!(words.contains(hint), "{words}");
        assert!(
            !words.contains("s p&ce") && !words.contains("wrong"),
            "{words}"
        );
    }
    // Nothing was left behind by those that failed.
    assert_eq!(server.query("SELECT to_regclass('labels') IS NULL"), "t");
}

#[test]
fn a_server_that_goes_away_is_come_back_to() {
    let mut server = PostgresServer::start();
    let table = table(&server, "labels");
    let mut before = sink(&table, "job");
    before.commit(rows(0..50)).unwrap();
    server.restart();
    let error = before.commit(rows(50..100)).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::Unreadable, "{error}");
    let mut after = sink(&table, "job");
    assert_eq!(after.committed().len(), 50);
    after.commit(rows(0..100)).unwrap();
    assert_eq!(after.finish().unwrap().images, 100);
}

/// R27: reading what is committed may take longer than an insert.
#[test]
fn a_large_table_is_read_again_however_long_it_takes() {
    let server = PostgresServer::start();
    let owner = table(&server, "slow");
    let mut first = sink(&owner, "job");
    first.commit(rows(0..20)).unwrap();
    drop(first);
    server.query("CREATE ROLE guest LOGIN PASSWORD 'guest'");
    server.query("GRANT ALL ON slow, slow_jobs TO guest");
    server.query("ALTER TABLE slow ENABLE ROW LEVEL SECURITY");
    server.query("CREATE POLICY reads ON slow FOR SELECT USING (pg_sleep(0.05) IS NOT NULL)");
    server.query("CREATE POLICY writes ON slow FOR INSERT WITH CHECK (true)");
    let url = server
        .url("slow")
        .replace("trommel:s%20p%26ce", "guest:guest");
    let access = PostgresConfig {
        statement_timeout: std::time::Duration::from_millis(300),
        ..PostgresConfig::default()
    };
    let guest = TableDestination::parse(&url, &access).unwrap().unwrap();
    assert_eq!(sink(&guest, "job").committed().len(), 20);
}

/// R35.
#[test]
fn a_password_goes_only_to_the_host_it_is_for() {
    let access = |host: Option<&str>| PostgresConfig {
        password: Some("secret".to_owned()),
        host: host.map(str::to_owned),
        ..PostgresConfig::default()
    };
    let url = "postgres://trommel@db.example/labels?table=rows";
    let error = TableDestination::parse(url, &access(None)).unwrap_err();
    assert_eq!(error.kind(), StorageErrorKind::PermissionDenied, "{error}");
    for hint in ["db.example", "postgres.host", "PGHOST"] {
        assert!(error.to_string().contains(hint), "{error}");
    }
    assert!(TableDestination::parse(url, &access(Some("other"))).is_err());
    assert!(TableDestination::parse(url, &access(Some("other, db.example"))).is_ok());
    let local = "postgres://trommel@127.0.0.1/labels?table=rows";
    assert!(TableDestination::parse(local, &access(None)).is_ok());
    let own = "postgres://trommel:mine@db.example/labels?table=rows";
    assert!(TableDestination::parse(own, &access(None)).is_ok());
}
