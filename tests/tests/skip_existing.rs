//! A job into an output that holds rows classifies only the images that have none there.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use trommel_sink::ResultRow;
use trommel_storage::testsuite::{PostgresServer, S3Server};
use trommel_tests::{Cluster, Folder, PIPELINE, Trommel, assert_code, digits, rows, stderr};

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn show(cluster: &Cluster, id: &str) -> Value {
    let run = cluster.command(["jobs", "show", id, "--json"]).run();
    cluster.assert_code(&run, 0);
    serde_json::from_slice(&run.stdout).unwrap()
}

/// The rows by uri, each of which occurs once.
fn by_uri(output: &Path) -> BTreeMap<String, ResultRow> {
    let mut found = BTreeMap::new();
    let mut indices = std::collections::BTreeSet::new();
    for row in rows(output) {
        assert!(indices.insert(row.index), "index {} twice", row.index);
        let before = found.insert(row.uri.clone(), row);
        assert!(before.is_none(), "{} twice", before.unwrap().uri);
    }
    found
}

/// Copies a digit into the folder, under another name.
fn add(folder: &Folder, name: &str, digit: usize) -> PathBuf {
    let path = folder.images().join(name);
    std::fs::copy(&digits()[digit % digits().len()], &path).unwrap();
    path
}

#[test]
fn a_second_job_adds_what_is_new_and_replaces_what_has_changed() {
    let cluster = Cluster::with(&PIPELINE);
    for (kind, output) in [("folder", "rows/"), ("file", "rows.csv")] {
        let folder = Folder::with_digits(60);
        let (images, output) = (folder.images(), folder.path(output));
        let submit = |id: &str, words: &[&str]| {
            let submit = cluster.submit(text(&images), text(&output));
            let id = format!("{kind}-{id}");
            let run = submit.args(["--id", &id, "--wait"]).args(words).run();
            (run, id)
        };
        let added = |id: &str| {
            let (run, id) = submit(id, &["--skip-existing"]);
            cluster.assert_code(&run, 0);
            show(&cluster, &id)
        };
        // Nothing is there yet, so all is new.
        let first = added("first");
        assert_eq!(
            (&first["total"], &first["state"]),
            (&json!(60), &json!("complete"))
        );
        let before = by_uri(&output);
        assert_eq!(before.len(), 60);

        let new = add(&folder, &format!("000-{kind}.png"), 1);
        let uris: Vec<_> = before.keys().cloned().collect();
        std::fs::write(&uris[10], "no image any more").unwrap();
        std::fs::remove_file(&uris[20]).unwrap();
        // Without the flag it is another listing.
        let (refused, _) = submit("refused", &[]);
        assert_ne!(refused.status.code(), Some(0));
        let second = added("second");
        assert_eq!(second["total"], 2, "{second}");
        assert_eq!(second["models"][0]["committed"], 2);
        let found = by_uri(&output);
        assert_eq!(found.len(), 61);
        assert_eq!(found[text(&new)].status, "ok");
        assert_eq!(found[text(&new)].index, 60);
        for (uri, row) in &before {
            match *uri == uris[10] {
                true => {
                    assert_eq!(found[uri].status, "failed");
                    assert_eq!(found[uri].index, row.index);
                }
                false => assert_eq!(&found[uri], row, "it was classified again"),
            }
        }
        // The first job is reported as it was.
        assert_eq!(
            show(&cluster, &format!("{kind}-first"))["models"][0]["committed"],
            60
        );

        // Its failed rows can be tried again, by its own id.
        std::fs::copy(&digits()[7], &uris[10]).unwrap();
        let retried = cluster
            .command([
                "jobs",
                "retry",
                &format!("{kind}-second"),
                "--wait",
                "--fail-on-error",
            ])
            .run();
        cluster.assert_code(&retried, 0);
        let second = show(&cluster, &format!("{kind}-second"));
        let model = &second["models"][0];
        assert_eq!([&model["ok"], &model["failed"]], [&json!(2), &json!(0)]);
        assert!(by_uri(&output).values().all(|row| row.status == "ok"));

        // Nothing is new, and one process finds the same.
        assert_eq!(added("third")["total"], 0);
        let alone = Trommel::classify(&images, &output)
            .args(["--skip-existing", "--json"])
            .run();
        assert_code(&alone, 0);
        let told: Value = serde_json::from_slice(&alone.stdout).unwrap();
        assert_eq!(
            (&told["images"], &told["added"]["rows"]),
            (&json!(61), &json!(0))
        );
        add(&folder, &format!("zzz-{kind}.png"), 2);
        assert_code(
            &Trommel::classify(&images, &output)
                .arg("--skip-existing")
                .run(),
            0,
        );
        assert_eq!(by_uri(&output).len(), 62);
    }
    cluster.assert_nothing_left();
}

#[test]
fn what_cannot_be_added_to_is_refused() {
    let folder = Folder::with_digits(20);
    let cluster = Cluster::with(&PIPELINE);
    let (images, output) = (folder.images(), folder.path("rows/"));
    let submit = |words: &[&str]| {
        let submit = cluster.submit(text(&images), text(&output));
        submit.args(["--wait"]).args(words).run()
    };
    cluster.assert_code(&submit(&[]), 0);
    let before = rows(&output);
    let refused = submit(&["--skip-existing", "--logits"]);
    assert_ne!(refused.status.code(), Some(0));
    assert!(
        stderr(&refused).contains("logits was false, is true"),
        "{}",
        stderr(&refused)
    );
    assert_eq!(rows(&output), before);
    let both = submit(&["--skip-existing", "--overwrite"]);
    assert_code(&both, 2);
    // If there are more images than rows, the message names the remedy.
    add(&folder, "zzz.png", 1);
    let more = Trommel::classify(&images, &output).run();
    assert_code(&more, 2);
    assert!(
        stderr(&more).contains("--skip-existing"),
        "{}",
        stderr(&more)
    );
    cluster.assert_nothing_left();
}

/// Images of the first job, those that come later, and those of the first that have changed by then.
const FIRST: usize = 800;
const MORE: usize = 1200;
const CHANGED: usize = FIRST / 10;

/// A folder of which a first job has classified some images; the others are there by now, between them in
/// the listing, and some of the first have changed.
fn grown(folder: &Folder, cluster: &Cluster, output: &str) {
    let mut files: Vec<_> = std::fs::read_dir(folder.images())
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    files.sort();
    let aside = folder.path("aside");
    std::fs::create_dir(&aside).unwrap();
    let (first, more): (Vec<_>, Vec<_>) = (0..files.len()).partition(|number| number % 5 < 2);
    assert_eq!((first.len(), more.len()), (FIRST, MORE));
    let waits = |number: usize| aside.join(files[number].file_name().unwrap());
    for number in &more {
        std::fs::rename(&files[*number], waits(*number)).unwrap();
    }
    let run = cluster
        .submit(text(&folder.images()), output)
        .args(["--id", "first", "--wait"])
        .run();
    cluster.assert_code(&run, 0);
    for number in &more {
        std::fs::rename(waits(*number), &files[*number]).unwrap();
    }
    for number in first.iter().step_by(FIRST / CHANGED) {
        // Another modification time is another version, even of the same bytes.
        let other = std::fs::read(&files[(number + 1) % files.len()]).unwrap();
        std::fs::write(&files[*number], other).unwrap();
    }
}

/// Kills of every role while a job adds what is new.
fn kill_while_adding(cluster: &mut Cluster, folder: &Folder, output: &str) {
    let run = cluster
        .submit(text(&folder.images()), output)
        .args(["--id", "second", "--skip-existing"])
        .run();
    cluster.assert_code(&run, 0);
    for role in ["sink", "ingest", "preprocess", "infer", "ingest", "sink"] {
        // It has not ended yet: this would fail otherwise.
        cluster.await_rows("second", 0);
        let victim = cluster.of_role(role)[0];
        cluster.kill_and_restart(victim);
    }
    let watched = cluster.run_to_end(cluster.command(["jobs", "watch", "second"]));
    cluster.assert_code(&watched, 0);
    let status = show(cluster, "second");
    assert_eq!(status["models"][0]["committed"], MORE + CHANGED);
    assert_eq!(status["total"], MORE + CHANGED);
    cluster.assert_nothing_left();
}

#[test]
fn killing_roles_while_rows_are_added_loses_nothing_and_doubles_nothing() {
    kill_on_a_store(false);
}

#[test]
fn killing_roles_while_rows_are_added_where_preconditions_are_ignored() {
    kill_on_a_store(true);
}

fn kill_on_a_store(ignores_preconditions: bool) {
    let (server, folder) = (S3Server::start(), Folder::with_digits(FIRST + MORE));
    server.create_bucket("photos");
    server.ignore_preconditions(ignores_preconditions);
    let mut cluster = Cluster::new().s3(&server).start_slow();
    grown(&folder, &cluster, "s3://photos/rows/");
    let output = server.path("photos", "rows");
    let before = by_uri(&output);
    // So that the second job has not ended before the last kill.
    server.slow_down(Duration::from_millis(60));
    kill_while_adding(&mut cluster, &folder, "s3://photos/rows/");
    let found = by_uri(&output);
    assert_eq!(found.len(), FIRST + MORE);
    let kept = before.iter().filter(|(uri, row)| found[*uri] == **row);
    assert_eq!(
        kept.count(),
        FIRST - CHANGED,
        "rows that were not to be touched"
    );
    // The rows are those of a run over what there is now.
    let fresh = folder.path("fresh/");
    assert_code(&Trommel::classify(&folder.images(), &fresh).run(), 0);
    for (uri, row) in by_uri(&fresh) {
        assert_eq!(
            (&found[&uri].label, &found[&uri].etag),
            (&row.label, &row.etag)
        );
    }
}

#[test]
fn killing_roles_while_rows_are_added_to_a_table_adds_each_once() {
    let folder = Folder::with_digits(FIRST + MORE);
    let database = PostgresServer::start();
    let output = database.url_without_password("labels");
    let mut cluster = Cluster::new().env("PGPASSWORD", database.password());
    cluster.outputs.push(database.place());
    let mut cluster = cluster.start_slow();
    grown(&folder, &cluster, &output);
    // Whoever inserts rows waits a little, so that the job has not ended before the last kill.
    database.query("CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.005); RETURN NEW; END'");
    database
        .query("CREATE TRIGGER wait BEFORE INSERT ON labels FOR EACH ROW EXECUTE FUNCTION wait()");
    kill_while_adding(&mut cluster, &folder, &output);
    assert_eq!(
        database.query(
            "SELECT count(*), count(DISTINCT uri), count(DISTINCT index), max(index) FROM labels"
        ),
        format!("{0}|{0}|{0}|{1}", FIRST + MORE, FIRST + MORE - 1)
    );
    assert_eq!(
        database.query("SELECT generation, status, count(*) FROM labels GROUP BY 1, 2 ORDER BY 1"),
        format!("0|ok|{}\n1|ok|{}", FIRST - CHANGED, MORE + CHANGED)
    );
    assert_eq!(
        database.query("SELECT job_id, summary->>'images' FROM labels_jobs ORDER BY job_id"),
        format!(
            "first|{}\nfirst/retry-0001|{}",
            FIRST + MORE,
            MORE + CHANGED
        )
    );
}
