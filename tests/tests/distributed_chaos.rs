//! Kill any role, or the broker, at any moment, and the row count is still right.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]
#![allow(clippy::print_stdout, reason = "a failed test shows its seed")]

use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use trommel_storage::testsuite::S3Server;
use trommel_tests::{Cluster, Folder, PIPELINE, assert_each_index_once, rows};

const IMAGES: usize = 2000;

/// A cluster that works slowly enough to be caught at it.
fn slow_cluster(server: Option<&S3Server>) -> Cluster {
    let cluster = Cluster::new();
    let cluster = match server {
        None => cluster,
        Some(server) => cluster.s3(server),
    };
    let mut cluster = cluster
        .env("TROMMEL_PREPROCESS__THREADS", "1")
        .env("TROMMEL_INFER__INSTANCES", "1")
        .env("TROMMEL_SINK__PART_ROWS", "150")
        .env("TROMMEL_SINK__PART_INTERVAL", "100ms")
        // A short queue, so that the job lasts as long as its slowest stage.
        .env("TROMMEL_BROKER__TASKS_MAX_MESSAGES", "200");
    for role in PIPELINE {
        cluster.start(role, &[]);
    }
    cluster.await_ready();
    cluster
}

fn seeded() -> (u64, StdRng) {
    let seed = rand::rng().random();
    println!("seed {seed}");
    (seed, StdRng::seed_from_u64(seed))
}

fn submit(cluster: &Cluster, source: &str, output: &str, id: &str) -> Child {
    cluster
        .submit(source, output)
        .args(["--id", id, "--wait"])
        .spawn()
}

/// Waits for the job that was submitted under this id and checks its rows.
#[track_caller]
fn assert_complete(cluster: &Cluster, id: &str, output: &Path) {
    let watched = cluster.command(["jobs", "watch", id]).run();
    cluster.assert_code(&watched, 0);
    assert_each_index_once(&rows(output), IMAGES);
    assert!(output.join("_SUCCESS").exists());
}

#[test]
fn killing_roles_loses_nothing_and_doubles_nothing() {
    let (seed, mut random) = seeded();
    let folder = Folder::with_digits(IMAGES);
    let server = S3Server::start();
    folder.upload(&server, "photos");
    let mut cluster = slow_cluster(Some(&server));
    let mut waiting = submit(
        &cluster,
        "s3://photos/images/",
        "s3://photos/rows/",
        "killed",
    );
    for _ in 0..10 {
        sleep(Duration::from_millis(random.random_range(50..600)));
        let role = PIPELINE.choose(&mut random).unwrap();
        let victim = *cluster.of_role(role).choose(&mut random).unwrap();
        cluster.kill_and_restart(victim);
    }
    println!("seed {seed}: killed ten times");
    // It may have given up while no ingest answered.
    drop(waiting.wait());
    assert_complete(&cluster, "killed", &server.path("photos", "rows"));
}

#[test]
fn killing_the_broker_loses_nothing_and_doubles_nothing() {
    let (_, mut random) = seeded();
    let folder = Folder::with_digits(IMAGES);
    let mut cluster = slow_cluster(None);
    let (images, output) = (folder.images(), folder.path("rows/"));
    let (source, to) = (images.to_str().unwrap(), output.to_str().unwrap());
    let mut waiting = submit(&cluster, source, to, "broken");
    for _ in 0..3 {
        sleep(Duration::from_millis(random.random_range(200..900)));
        cluster.nats.restart();
    }
    drop(waiting.wait());
    assert_complete(&cluster, "broken", &output);
}

/// Stops a sink past its lease while another takes over, then lets it go on.
fn wake_the_dead(ignore_preconditions: bool) {
    let folder = Folder::with_digits(IMAGES);
    let server = S3Server::start();
    server.ignore_preconditions(ignore_preconditions);
    folder.upload(&server, "photos");
    let mut cluster = slow_cluster(Some(&server));
    let zombie = cluster.of_role("sink")[0];
    let output = server.path("photos", "rows");
    let mut waiting = submit(
        &cluster,
        "s3://photos/images/",
        "s3://photos/rows/",
        "undead",
    );
    // It has begun to commit and holds rows.
    let has_parts = || {
        let names = std::fs::read_dir(&output).into_iter().flatten().flatten();
        names
            .filter_map(|entry| entry.file_name().into_string().ok())
            .any(|name| name.starts_with("part-"))
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !has_parts() {
        assert!(
            Instant::now() < deadline,
            "nothing is committed: {}",
            cluster.log(zombie)
        );
        sleep(Duration::from_millis(5));
    }
    cluster.signal(zombie, "STOP");
    let heir = cluster.start("sink", &[]);
    cluster.await_ready();
    // The lease is two seconds; the heir commits parts of its own.
    sleep(Duration::from_secs(4));
    cluster.signal(zombie, "CONT");
    drop(waiting.wait());
    assert_complete(&cluster, "undead", &output);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !cluster.log(zombie).contains("another sink") {
        assert!(
            Instant::now() < deadline,
            "the zombie kept its job: {}{}",
            cluster.log(zombie),
            cluster.log(heir)
        );
        sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_sink_back_from_the_dead_commits_nothing_twice() {
    wake_the_dead(false);
}

#[test]
fn a_sink_back_from_the_dead_commits_nothing_twice_where_preconditions_are_ignored() {
    wake_the_dead(true);
}
