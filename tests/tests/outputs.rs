//! Rows in a database and in a bucket, from one process and from many.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::path::Path;

use trommel_sink::ResultRow;
use trommel_storage::testsuite::{PostgresServer, S3Server};
use trommel_tests::{
    Cluster, Folder, PIPELINE, Trommel, assert_code, assert_each_index_once, assert_same_rows,
    rows, stderr,
};

/// The rows that a file gets.
fn expected(folder: &Folder) -> Vec<ResultRow> {
    let output = folder.path("expected.parquet");
    assert_code(&Trommel::classify(&folder.images(), &output).run(), 0);
    rows(&output)
}

/// Adds a file that is no image.
fn break_one(folder: &Folder) {
    std::fs::write(folder.images().join("broken.jpg"), "text").unwrap();
}

/// Index, uri, status, label and score with three digits, a line each.
fn lines(rows: &[ResultRow]) -> String {
    let lines: Vec<_> = rows
        .iter()
        .map(|row| {
            format!(
                "{}|{}|{}|{}|{:.3}",
                row.index,
                row.uri,
                row.status,
                row.label.as_deref().unwrap_or_default(),
                row.score.unwrap_or_default()
            )
        })
        .collect();
    lines.join("\n")
}

fn lines_of(database: &PostgresServer, table: &str) -> String {
    database.query(&format!(
        "SELECT index, uri, status, coalesce(label, ''), coalesce(score, 0)::numeric(4, 3) FROM {table} ORDER BY index"
    ))
}

fn into_table(folder: &Folder, database: &PostgresServer, table: &str) -> Trommel {
    let url = database.url_without_password(table);
    Trommel::classify(&folder.images(), Path::new(&url)).env("PGPASSWORD", database.password())
}

#[test]
fn one_process_fills_a_table_and_goes_on_after_a_kill() {
    let folder = Folder::with_digits(6000);
    break_one(&folder);
    let expected = expected(&folder);
    let database = PostgresServer::start();
    let committed = || {
        let is_there = database.query("SELECT to_regclass('labels') IS NOT NULL") == "t";
        match is_there {
            true => database
                .query("SELECT count(*) FROM labels")
                .parse()
                .unwrap(),
            false => 0,
        }
    };
    for _ in 0..3 {
        let before: usize = committed();
        let mut killed = into_table(&folder, &database, "labels")
            .args(["--preprocess-threads", "1", "--instances", "1"])
            .env("TROMMEL_SINK__PART_ROWS", "50")
            .env("TROMMEL_SINK__PART_INTERVAL", "50ms")
            .spawn();
        // It has committed some rows of its own, and not all.
        while committed() == before {
            assert!(killed.try_wait().unwrap().is_none(), "it ended by itself");
        }
        killed.kill().unwrap();
        assert_eq!(killed.wait().unwrap().code(), None, "it ended by itself");
        assert!(committed() < 6000);
    }
    let run = into_table(&folder, &database, "labels").run();
    assert_code(&run, 0);
    assert_eq!(lines_of(&database, "labels"), lines(&expected));
    assert!(
        !stderr(&run).contains(database.password()),
        "{}",
        stderr(&run)
    );
    // Once more: there is nothing to do.
    assert_code(&into_table(&folder, &database, "labels").run(), 0);
    assert_eq!(
        database.query("SELECT count(DISTINCT job_id) FROM labels"),
        "1"
    );
    // What is new is added to it.
    std::fs::write(folder.images().join("0-new.jpg"), "text").unwrap();
    assert_code(
        &into_table(&folder, &database, "labels")
            .arg("--skip-existing")
            .run(),
        0,
    );
    assert_eq!(
        database.query("SELECT count(DISTINCT index), max(index) FROM labels"),
        "6002|6001"
    );
    // A second job next to it.
    let more = into_table(&folder, &database, "labels")
        .args(["--sample", "100"])
        .run();
    assert_code(&more, 0);
    assert_eq!(
        database.query("SELECT count(*) FROM labels GROUP BY job_id ORDER BY 1"),
        "100\n6002"
    );
    let without = into_table(&folder, &database, "labels")
        .env("PGPASSWORD", "")
        .run();
    assert_code(&without, 2);
    assert!(
        stderr(&without).contains("password"),
        "{}",
        stderr(&without)
    );
}

#[test]
fn one_process_fills_a_bucket_that_honours_preconditions() {
    let folder = Folder::with_digits(300);
    let expected = expected(&folder);
    let server = S3Server::start();
    server.create_bucket("out");
    let classify = || {
        Trommel::classify(&folder.images(), Path::new("s3://out/rows/"))
            .env("TROMMEL_S3__ENDPOINT", &server.endpoint())
            .env("AWS_ACCESS_KEY_ID", S3Server::ACCESS_KEY)
            .env("AWS_SECRET_ACCESS_KEY", S3Server::SECRET_KEY)
            .env("TROMMEL_SINK__PART_ROWS", "100")
    };
    assert_code(&classify().run(), 0);
    assert_same_rows(&rows(&server.path("out", "rows")), &expected);
    assert_code(&classify().run(), 0);
    std::fs::write(folder.images().join("0-new.jpg"), "text").unwrap();
    assert_code(&classify().arg("--skip-existing").run(), 0);
    assert_each_index_once(&rows(&server.path("out", "rows")), 301);
    assert_code(&classify().args(["--sample", "10"]).run(), 2);
    assert_code(&classify().args(["--sample", "10", "--overwrite"]).run(), 0);
    assert_each_index_once(&rows(&server.path("out", "rows")), 10);
    server.ignore_preconditions(true);
    let refused = classify().args(["--sample", "20", "--overwrite"]).run();
    assert_code(&refused, 2);
    assert!(
        stderr(&refused).contains("submit the job"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn five_processes_fill_a_table_for_two_models() {
    let folder = Folder::with_digits(500);
    break_one(&folder);
    let expected = expected(&folder);
    let database = PostgresServer::start();
    let repository = folder.path("models");
    std::fs::create_dir(&repository).unwrap();
    for name in ["a", "b"] {
        std::os::unix::fs::symlink(trommel_tests::digits_model(), repository.join(name)).unwrap();
    }
    let mut cluster = Cluster::new().env("PGPASSWORD", database.password());
    cluster.outputs.push(database.place());
    cluster.set_repository(&repository);
    for role in PIPELINE {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    let submit = |output: &str| {
        cluster
            .command(["submit"])
            .arg(folder.images())
            .args(["--model", "a,b", "--wait", "--output", output])
            .run()
    };
    cluster.assert_code(&submit(&database.url_without_password("labels")), 0);
    for model in ["a", "b"] {
        let view = format!("(SELECT * FROM labels WHERE model = '{model}') AS one");
        assert_eq!(lines_of(&database, &view), lines(&expected));
    }
    let refused = submit(&database.url("labels"));
    cluster.assert_code(&refused, 2);
    assert!(
        stderr(&refused).contains("PGPASSWORD"),
        "{}",
        stderr(&refused)
    );
    assert!(!stderr(&refused).contains(database.password()));
}
