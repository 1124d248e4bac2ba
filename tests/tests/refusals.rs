//! A worker reads and writes only where its operator allows it, whatever a job names.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Output;

use trommel_storage::testsuite::{PostgresServer, S3Server};
use trommel_tests::{Cluster, Folder, PIPELINE, assert_each_index_once, rows, stderr};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A cluster that may read `images` and write to `rows` of the folder, and S3.
fn limited(folder: &Folder) -> Cluster {
    let mut cluster = Cluster::new();
    cluster.sources = vec![text(&folder.images()).to_owned()];
    cluster.outputs = vec![text(&folder.path("rows")).to_owned()];
    cluster
}

fn start(cluster: &mut Cluster) {
    for role in PIPELINE {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
}

/// Fails unless the job was refused with one line that names what to add.
#[track_caller]
fn assert_refused(cluster: &Cluster, run: &Output, flag: &str) {
    assert!(
        matches!(run.status.code(), Some(1 | 2)),
        "{:?}: {}",
        run.status,
        stderr(run)
    );
    let said = stderr(run);
    assert_eq!(said.matches("is not allowed").count(), 1, "{said}");
    assert!(said.contains(flag), "{said}");
    for number in 0..PIPELINE.len() {
        let log = cluster.log(number);
        assert!(!log.contains("panicked"), "{log}");
    }
}

/// R36, R52: what a job named was read and written as far as the worker's user could.
#[test]
fn places_that_are_not_allowed_are_refused_while_another_job_runs_on() {
    let folder = Folder::with_digits(2000);
    fs::create_dir(folder.path("secret")).unwrap();
    fs::write(folder.path("secret/key.png"), "key").unwrap();
    symlink(folder.path("secret"), folder.images().join("zz-link")).unwrap();
    let mut cluster = limited(&folder);
    start(&mut cluster);
    let images = folder.images();
    let good = folder.path("rows/good/");
    let beside = cluster
        .submit(text(&images.join("0*")), text(&good))
        .args(["--id", "good"])
        .run();
    cluster.assert_code(&beside, 0);

    let out = folder.path("rows/other/");
    let climbing = format!("{}/../secret", text(&images));
    let linked = format!("{}/zz-link", text(&images));
    for source in [
        "../../etc",
        "file:///etc/passwd",
        "/etc",
        "/etc/*",
        "nats://trommel.api.>",
        &climbing,
        &linked,
        text(&folder.path("imagesque")),
    ] {
        let run = cluster.submit(source, text(&out)).arg("--wait").run();
        assert_refused(&cluster, &run, "--allow-source");
    }
    assert!(!out.exists());

    let stranger = PostgresServer::start();
    let table = stranger.url_without_password("labels");
    let climbing = format!("{}/../x/", text(&folder.path("rows")));
    for output in ["../../x/", "/etc/x/", &climbing, &table] {
        let source = images.join("00000?.*");
        let run = cluster.submit(text(&source), output).arg("--wait").run();
        assert_refused(&cluster, &run, "--allow-output");
    }
    assert!(!folder.path("x").exists());
    assert_eq!(
        stranger.query("select count(*) from pg_tables where tablename = 'labels'"),
        "0"
    );

    let watched = cluster.command(["jobs", "watch", "good"]).run();
    cluster.assert_code(&watched, 0);
    assert_each_index_once(&rows(&good), 2000);
}

/// R36: a list may lie where one may read and name what one may not.
#[test]
fn images_that_are_not_allowed_get_failed_rows() {
    let folder = Folder::with_digits(1);
    let server = S3Server::start();
    folder.upload(&server, "photos");
    let image = fs::read_dir(folder.images()).unwrap().next().unwrap();
    let image = image.unwrap().path();
    fs::write(folder.path("secret.png"), fs::read(&image).unwrap()).unwrap();
    symlink(folder.path("secret.png"), folder.images().join("link.png")).unwrap();
    let forbidden = [
        "/etc/passwd".to_owned(),
        "file:///etc/passwd".to_owned(),
        "file:///etc/%70asswd".to_owned(),
        text(&folder.path("secret.png")).to_owned(),
        format!("{}/../secret.png", text(&folder.images())),
        text(&folder.images().join("link.png")).to_owned(),
    ];
    let list = |relative: &str| {
        let lines = forbidden.iter().map(String::as_str);
        let lines = lines.chain([text(&image), relative]);
        lines.collect::<Vec<_>>().join("\n")
    };
    server.put(
        "photos",
        "list.txt",
        list("s3://photos/list.txt").as_bytes(),
    );
    fs::write(folder.images().join("list.txt"), list("../secret.png")).unwrap();
    let mut cluster = limited(&folder).s3(&server);
    start(&mut cluster);
    for (name, source, denied) in [
        ("s3", "s3://photos/list.txt".to_owned(), 6),
        ("local", format!("{}/list.txt", text(&folder.images())), 7),
    ] {
        let output = folder.path(&format!("rows/{name}/"));
        cluster.classify(&source, text(&output));
        let rows = rows(&output);
        assert_each_index_once(&rows, 8);
        let kinds = rows.iter().map(|row| row.error_kind.as_deref());
        let found = kinds
            .filter(|kind| *kind == Some("permission_denied"))
            .count();
        assert_eq!(found, denied, "{name}: {rows:?}");
        assert_eq!(rows[6].status, "ok", "{name}: {rows:?}");
        for row in &rows[..6] {
            let error = row.error.as_deref().unwrap();
            assert!(error.contains("--allow-source"), "{error}");
            // R56: a row gave the first bytes of any file away.
            assert!(!error.contains("root") && !error.contains("0x"), "{error}");
        }
    }
}
