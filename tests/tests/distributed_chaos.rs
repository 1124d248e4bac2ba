//! Any role or the broker is killed at any moment, and the number of rows is still right.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]
#![allow(clippy::print_stdout, reason = "a failed test shows its seed")]

use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};
use trommel_storage::testsuite::{PostgresServer, S3Server};
use trommel_tests::{
    Cluster, Folder, LostDevice, PIPELINE, Signal, Trommel, assert_code, assert_each_index_once,
    rows, stderr,
};

const IMAGES: usize = 2000;
/// Where the images are in a store.
const BUCKET: &str = "s3://photos/images/";
/// What is killed, one after the other.
const ROLES: [&str; 4] = ["ingest", "preprocess", "infer", "sink"];

/// Starts a pipeline that works slowly enough to be caught at it.
fn slow(cluster: Cluster) -> Cluster {
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

fn seeded() -> StdRng {
    let seed = rand::rng().random();
    println!("seed {seed}");
    StdRng::seed_from_u64(seed)
}

fn submit(cluster: &Cluster, source: &str, output: &str, id: &str) -> Child {
    cluster
        .submit(source, output)
        .args(["--id", id, "--wait"])
        .spawn()
}

/// Waits for the end of the job that was submitted under this id.
#[track_caller]
fn assert_ends_well(cluster: &Cluster, id: &str, mut waiting: Child) {
    let watched = cluster.run_to_end(cluster.command(["jobs", "watch", id]));
    cluster.assert_code(&watched, 0);
    // It sees the end too, or gave up while no ingest answered.
    drop(waiting.wait());
}

/// Checks the rows of a job.
#[track_caller]
fn assert_complete(output: &Path) {
    assert_each_index_once(&rows(output), IMAGES);
    assert!(output.join("_SUCCESS").exists());
}

/// Waits until a job has rows. Once a third of them is there its store gets so slow that the job does
/// not end before the last kill, however long a restart takes.
#[track_caller]
fn await_rows_and_hold(cluster: &Cluster, server: &S3Server, id: &str) {
    if cluster.await_rows(id, 0) > IMAGES as u64 / 3 {
        server.slow_down_images(Duration::from_millis(150));
    }
}

/// Lets a job continue to its end at full speed.
fn let_go(server: &S3Server) {
    server.slow_down_images(Duration::ZERO);
}

/// Ten kills, of each role more than once, in any order. The job has not ended before the last one.
fn kill_roles(cluster: &mut Cluster, server: &S3Server, random: &mut StdRng, id: &str) {
    let mut roles: Vec<_> = ROLES.iter().cycle().take(10).collect();
    roles.shuffle(random);
    for role in roles {
        sleep(Duration::from_millis(random.random_range(50..250)));
        await_rows_and_hold(cluster, server, id);
        let victim = *cluster.of_role(role).choose(random).unwrap();
        cluster.kill_and_restart(victim);
    }
}

/// Three kills of the broker, before the job has ended.
fn kill_broker(cluster: &mut Cluster, server: &S3Server, random: &mut StdRng, id: &str) {
    for _ in 0..3 {
        sleep(Duration::from_millis(random.random_range(100..400)));
        await_rows_and_hold(cluster, server, id);
        cluster.nats.restart();
    }
    let_go(server);
}

/// A slow cluster on a store that holds the images.
fn on_bucket(folder: &Folder, server: &S3Server) -> Cluster {
    upload(folder, server);
    slow(Cluster::new().s3(server))
}

/// Puts the images into a store that takes its time, so that no job has ended before the last kill.
fn upload(folder: &Folder, server: &S3Server) {
    folder.upload(server, "photos");
    server.slow_down_images(Duration::from_millis(8));
}

#[test]
fn killing_roles_loses_nothing_and_doubles_nothing() {
    let (mut random, folder, server) = (seeded(), Folder::with_digits(IMAGES), S3Server::start());
    let mut cluster = on_bucket(&folder, &server);
    let waiting = submit(&cluster, BUCKET, "s3://photos/rows/", "killed");
    kill_roles(&mut cluster, &server, &mut random, "killed");
    let_go(&server);
    assert_ends_well(&cluster, "killed", waiting);
    assert_complete(&server.path("photos", "rows"));
}

#[test]
fn killing_the_broker_loses_nothing_and_doubles_nothing() {
    let (mut random, folder, server) = (seeded(), Folder::with_digits(IMAGES), S3Server::start());
    let mut cluster = on_bucket(&folder, &server);
    let waiting = submit(&cluster, BUCKET, "s3://photos/rows/", "broken");
    kill_broker(&mut cluster, &server, &mut random, "broken");
    assert_ends_well(&cluster, "broken", waiting);
    assert_complete(&server.path("photos", "rows"));
}

/// Each kill loses all tensors; their images are queued again.
#[test]
fn killing_a_broker_that_keeps_tensors_in_memory_loses_nothing_and_doubles_nothing() {
    let (mut random, folder, server) = (seeded(), Folder::with_digits(IMAGES), S3Server::start());
    upload(&folder, &server);
    let cluster = Cluster::new().s3(&server);
    let mut cluster = slow(cluster.env("TROMMEL_BROKER__TENSORS_IN_MEMORY", "true"));
    let waiting = submit(&cluster, BUCKET, "s3://photos/rows/", "volatile");
    kill_broker(&mut cluster, &server, &mut random, "volatile");
    assert_ends_well(&cluster, "volatile", waiting);
    assert_complete(&server.path("photos", "rows"));
}

/// Waits until the condition holds, or fails with the log of this worker.
#[track_caller]
fn until(is_so: impl Fn() -> bool, cluster: &Cluster, worker: usize) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(
            Instant::now() < deadline,
            "it is not: {}",
            cluster.log(worker)
        );
        sleep(Duration::from_millis(5));
    }
}

/// Stops the cluster's sink past its lease of two seconds while another takes over and commits, then
/// lets it continue.
fn bury_and_wake(cluster: &mut Cluster, server: &S3Server, zombie: usize, id: &str) {
    // The job has to continue while the other sink starts and until this one wakes.
    server.slow_down_images(Duration::from_millis(50));
    cluster.signal(zombie, Signal::STOP);
    let (_, before) = cluster.progress(id);
    cluster.start("sink", &[]);
    cluster.await_ready();
    // The other one commits, so it has the lease, and rows are left for the one that wakes.
    cluster.await_rows(id, before);
    cluster.signal(zombie, Signal::CONT);
    let_go(server);
}

/// Rows that the sinks of a job hold and have not committed.
fn held(cluster: &Cluster, id: &str) -> u64 {
    let shown = cluster.command(["jobs", "show", id, "--json"]).run();
    let status: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
    let models = status["models"].as_array().into_iter().flatten();
    models.filter_map(|model| model["pending"].as_u64()).sum()
}

#[test]
fn rows_of_a_killed_sink_do_not_wait_for_their_ack_deadline() {
    let (folder, server) = (Folder::with_digits(IMAGES), S3Server::start());
    upload(&folder, &server);
    server.slow_down_images(Duration::from_millis(50));
    let mut cluster = Cluster::new()
        .s3(&server)
        .env("TROMMEL_BROKER__ACK_WAIT", "10m");
    for role in ["ingest", "preprocess", "infer"] {
        cluster.start(role, &[]);
    }
    let doomed = cluster.start_with("sink", &[], &[("TROMMEL_SINK__PART_INTERVAL", "10m")]);
    cluster.await_ready();
    let waiting = submit(&cluster, BUCKET, "s3://photos/rows/", "held");
    let holds = || Some(()).filter(|()| held(&cluster, "held") > 0);
    cluster.eventually("the sink holds rows", holds);
    cluster.kill(doomed);
    assert_eq!(cluster.progress("held"), ("running".to_owned(), 0));
    cluster.start("sink", &[]);
    let_go(&server);
    assert_ends_well(&cluster, "held", waiting);
    assert_complete(&server.path("photos", "rows"));
}

/// A sink in a bucket is considered dead and comes back.
fn wake_the_dead(ignore_preconditions: bool) {
    let folder = Folder::with_digits(IMAGES);
    let server = S3Server::start();
    server.ignore_preconditions(ignore_preconditions);
    let mut cluster = on_bucket(&folder, &server);
    let zombie = cluster.of_role("sink")[0];
    let output = server.path("photos", "rows");
    let waiting = submit(&cluster, BUCKET, "s3://photos/rows/", "undead");
    // It has begun to commit and holds rows.
    let has_parts = || {
        let names = std::fs::read_dir(&output).into_iter().flatten().flatten();
        names
            .filter_map(|entry| entry.file_name().into_string().ok())
            .any(|name| name.starts_with("part-"))
    };
    until(has_parts, &cluster, zombie);
    bury_and_wake(&mut cluster, &server, zombie, "undead");
    assert_ends_well(&cluster, "undead", waiting);
    assert_complete(&output);
    // It has noticed that another sink has the job.
    until(
        || cluster.log(zombie).contains("another sink"),
        &cluster,
        zombie,
    );
}

#[test]
fn a_sink_back_from_the_dead_commits_nothing_twice() {
    wake_the_dead(false);
}

#[test]
fn a_sink_back_from_the_dead_commits_nothing_twice_where_preconditions_are_ignored() {
    wake_the_dead(true);
}

/// A slow cluster on a store that holds the images, whose rows go to this database.
fn on_bucket_into(database: &PostgresServer, folder: &Folder, server: &S3Server) -> Cluster {
    upload(folder, server);
    let mut cluster = Cluster::new().s3(server);
    cluster.outputs.push(database.place());
    slow(cluster.env("PGPASSWORD", database.password()))
}

/// Checks the rows of the job of this id in the table `labels`.
#[track_caller]
fn assert_complete_in(database: &PostgresServer, id: &str) {
    assert_eq!(
        database.query(&format!(
            "SELECT count(*), count(DISTINCT index), min(index), max(index), \
             count(*) FILTER (WHERE status = 'ok') FROM labels WHERE job_id = '{id}'"
        )),
        format!("{IMAGES}|{IMAGES}|0|{}|{IMAGES}", IMAGES - 1)
    );
    assert_eq!(
        database.query("SELECT summary->>'images' FROM labels_jobs"),
        IMAGES.to_string()
    );
}

#[test]
fn killing_roles_and_the_database_loses_nothing_and_doubles_nothing() {
    let (mut random, folder, server) = (seeded(), Folder::with_digits(IMAGES), S3Server::start());
    let mut database = PostgresServer::start();
    let mut cluster = on_bucket_into(&database, &folder, &server);
    let output = database.url_without_password("labels");
    let waiting = submit(&cluster, BUCKET, &output, "killed");
    kill_roles(&mut cluster, &server, &mut random, "killed");
    for _ in 0..2 {
        sleep(Duration::from_millis(random.random_range(50..300)));
        await_rows_and_hold(&cluster, &server, "killed");
        database.restart();
    }
    let_go(&server);
    assert_ends_well(&cluster, "killed", waiting);
    assert_complete_in(&database, "killed");
}

#[test]
fn killing_the_broker_beside_a_database_loses_nothing_and_doubles_nothing() {
    let (mut random, folder, server) = (seeded(), Folder::with_digits(IMAGES), S3Server::start());
    let database = PostgresServer::start();
    let mut cluster = on_bucket_into(&database, &folder, &server);
    let output = database.url_without_password("labels");
    let waiting = submit(&cluster, BUCKET, &output, "broken");
    kill_broker(&mut cluster, &server, &mut random, "broken");
    assert_ends_well(&cluster, "broken", waiting);
    assert_complete_in(&database, "broken");
}

#[test]
fn a_sink_back_from_the_dead_inserts_nothing_twice() {
    let (folder, server) = (Folder::with_digits(IMAGES), S3Server::start());
    let database = PostgresServer::start();
    let mut cluster = on_bucket_into(&database, &folder, &server);
    let zombie = cluster.of_role("sink")[0];
    let output = database.url_without_password("labels");
    let waiting = submit(&cluster, BUCKET, &output, "undead");
    let has_rows = || {
        database.query("SELECT to_regclass('labels') IS NOT NULL") == "t"
            && database.query("SELECT EXISTS (SELECT FROM labels)") == "t"
    };
    until(has_rows, &cluster, zombie);
    bury_and_wake(&mut cluster, &server, zombie, "undead");
    assert_ends_well(&cluster, "undead", waiting);
    assert_complete_in(&database, "undead");
}

#[test]
fn killing_nodes_of_a_replicated_broker_loses_nothing_and_doubles_nothing() {
    let (mut random, folder) = (seeded(), Folder::with_digits(IMAGES));
    let server = S3Server::start();
    upload(&folder, &server);
    let mut cluster = slow(Cluster::replicated().s3(&server));
    let waiting = submit(&cluster, BUCKET, "s3://photos/rows/", "replicated");
    // One after the other, whichever of them leads; a majority is always there.
    for node in [0, 1, 2] {
        sleep(Duration::from_millis(random.random_range(300..900)));
        await_rows_and_hold(&cluster, &server, "replicated");
        let node = match node {
            0 => &mut cluster.nats,
            other => &mut cluster.others[other - 1],
        };
        node.kill();
        sleep(Duration::from_millis(random.random_range(200..1500)));
        node.start_again();
        // It catches up before the next one goes.
        sleep(Duration::from_secs(3));
    }
    let_go(&server);
    assert_ends_well(&cluster, "replicated", waiting);
    assert_complete(&server.path("photos", "rows"));
}

#[test]
fn a_process_whose_device_is_lost_ends_and_another_does_its_work() {
    let folder = Folder::with_digits(500);
    let device = LostDevice::new();
    let mut cluster = Cluster::with(&["ingest", "preprocess", "sink"]);
    cluster.set_env("TROMMEL_INFER__INSTANCES", Some("1"));
    cluster.set_env("TROMMEL_INFER__MAX_BATCH", Some("4"));
    for (name, value) in device.after(10) {
        cluster.set_env(name, Some(&value));
    }
    let doomed = cluster.start("infer", &[]);
    cluster.await_ready();
    let output = folder.path("rows/");
    let images = folder.images();
    let waiting = submit(
        &cluster,
        images.to_str().unwrap(),
        output.to_str().unwrap(),
        "lost",
    );
    assert_eq!(cluster.wait(doomed), Some(1));
    let (state, committed) = cluster.progress("lost");
    assert_eq!(state, "running");
    assert!(committed < 500, "it had ended before the device was lost");
    let log = cluster.log(doomed);
    assert!(
        log.contains("device cpu is lost: CUDA failure 700"),
        "{log}"
    );

    for (name, _) in device.after(10) {
        cluster.set_env(name, None);
    }
    cluster.start_again(doomed);
    assert_ends_well(&cluster, "lost", waiting);
    let rows = rows(&output);
    assert_each_index_once(&rows, 500);
    let failed: Vec<_> = rows.iter().filter(|row| row.status != "ok").collect();
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn an_embedded_run_whose_device_is_lost_ends_and_goes_on_when_it_is_started_again() {
    let folder = Folder::with_digits(500);
    let output = folder.path("rows.parquet");
    let classify = || {
        Trommel::classify(&folder.images(), &output)
            .args(["--instances", "1", "--max-batch", "4"])
            .env("TROMMEL_SINK__PART_ROWS", "20")
    };
    let device = LostDevice::new();
    let lost = device
        .after(50)
        .iter()
        .fold(classify(), |command, (name, value)| {
            command.env(name, value)
        })
        .run();
    assert_code(&lost, 1);
    assert!(stderr(&lost).contains("is lost"), "{}", stderr(&lost));
    assert!(!output.exists());
    assert_code(&classify().run(), 0);
    let rows = rows(&output);
    assert_each_index_once(&rows, 500);
    assert!(rows.iter().all(|row| row.status == "ok"));
}
