//! The fleet: three nodes of a broker, every role twice, an object store and a database.

mod faults;
mod oracle;
mod setup;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use trommel_storage::testsuite::{PostgresServer, S3Server};
use trommel_tests::{
    Cluster, FlakyStore, Folder, Signal, Trommel, Wire, assert_code, digits, digits_model, get,
    stderr,
};

use faults::KINDS;
use oracle::Rows;
use setup::Releases;

/// Each of them twice.
const ROLES: [&str; 4] = ["ingest", "preprocess", "infer", "sink"];
/// Time for a job to end once nothing goes wrong any more.
const END: Duration = Duration::from_secs(300);

/// All processes, and what is expected of them.
pub(crate) struct Fleet {
    cluster: Cluster,
    wires: Vec<Wire>,
    /// The monitoring address of each node of the broker.
    health: Vec<std::net::SocketAddr>,
    server: S3Server,
    store: FlakyStore,
    database: PostgresServer,
    folder: Folder,
    expected: Rows,
    bad: Vec<u64>,
    random: StdRng,
    begun: Instant,
    counts: BTreeMap<&'static str, usize>,
    /// Workers that had ended by themselves.
    ended: usize,
    /// Workers that are stopped, and until when.
    stopped: Vec<(usize, Instant)>,
    /// Wires that are cut, and until when.
    cut: Vec<(usize, Instant)>,
    spoiled: Option<Instant>,
    releases: Releases,
    /// Workers that were upgraded so far.
    upgraded: usize,
    /// The longest time that jobs took to end once nothing went wrong any more.
    slowest: Duration,
    /// The longest time in which a job got no row then.
    stillest: Duration,
    /// Jobs that have to fail.
    hopeless: Vec<String>,
    /// How many of them work for an output that takes no rows.
    dead: usize,
    /// Jobs that have to be right, and their outputs.
    hopeful: Vec<(String, Place)>,
    number: usize,
}

/// Where rows are expected.
#[derive(Clone)]
enum Place {
    Bucket(String),
    Table(String),
}

impl Fleet {
    /// An idle fleet, and images of which some are bad.
    pub(crate) fn start(seed: u64, images: u64, bad: u64) -> Self {
        println!("SEED={seed}");
        let folder = Folder::new();
        let bad = oracle::make_images(&folder.images(), &digits(), images, bad);
        let reference = folder.path("reference.parquet");
        assert_code(&Trommel::classify(&folder.images(), &reference).run(), 0);
        let expected = Rows::of_file(&reference);

        let server = S3Server::start();
        folder.upload(&server, "photos");
        let store = FlakyStore::before(&server.endpoint(), seed);
        let database = PostgresServer::start();
        let (nodes, health) = setup::broker();
        let ports: Vec<u16> = nodes
            .iter()
            .map(|node| node.url().rsplit(':').next().unwrap().parse().unwrap())
            .collect();
        let repository = folder.path("models");
        setup::copy_model(&digits_model(), &repository.join("digits/1"));
        setup::broken_models(&repository);
        let mut cluster = Cluster::replicated_on(nodes)
            .s3(&server)
            .env("TROMMEL_S3__ENDPOINT", &store.endpoint())
            .env("PGPASSWORD", database.password())
            .env("TROMMEL_PREPROCESS__THREADS", "1")
            .env("TROMMEL_INFER__INSTANCES", "1")
            .env("TROMMEL_SINK__PART_ROWS", "150")
            // Longer than a fault, and short enough to see jobs of dead outputs end.
            .env("TROMMEL_SINK__PATIENCE", "90s")
            // Streams that are full for most of the time.
            .env("TROMMEL_BROKER__TASKS_MAX_MESSAGES", "200");
        cluster.set_repository(&repository);
        // Also what cannot be reached: an output that is refused is no dead one.
        for place in [&*database.place(), "postgres://127.0.0.1:1/x", "/proc"] {
            cluster.allow_output(place);
        }
        let wires: Vec<Wire> = ports.into_iter().map(Wire::to).collect();
        let by_wire: Vec<String> = wires
            .iter()
            .map(|wire| format!("nats://{}", wire.address()))
            .collect();
        let by_wire = by_wire.join(",");
        for role in ROLES {
            cluster.start(role, &[]);
            // The other half reaches the broker by wires that can be cut.
            cluster.start_with(role, &[], &[("TROMMEL_BROKER__URL", &by_wire)]);
        }
        cluster.await_ready();
        Self {
            cluster,
            wires,
            health,
            server,
            store,
            database,
            folder,
            expected,
            bad,
            random: StdRng::seed_from_u64(seed),
            begun: Instant::now(),
            counts: BTreeMap::new(),
            ended: 0,
            stopped: Vec::new(),
            cut: Vec::new(),
            spoiled: None,
            releases: Releases::new(),
            upgraded: 0,
            slowest: Duration::ZERO,
            stillest: Duration::ZERO,
            hopeless: Vec::new(),
            dead: 0,
            hopeful: Vec::new(),
            number: 0,
        }
    }

    /// Runs job after job under faults for this long, and judges each.
    pub(crate) fn torment(&mut self, time: Duration) {
        let wanted = std::env::var("FAULTS").unwrap_or_else(|_| KINDS.join(","));
        let kinds = KINDS
            .into_iter()
            .filter(|kind| wanted.split(',').any(|wanted| wanted == *kind));
        let kinds: Vec<&'static str> = kinds.collect();
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.server.slow_down(Duration::from_millis(8));
            self.begin_round();
            while Instant::now() < end && !self.hopeful_have_ended() {
                let kind = *kinds.choose(&mut self.random).unwrap();
                self.fault(kind);
                let pause = self.random.random_range(100..900);
                sleep(Duration::from_millis(pause));
                self.recover(false);
            }
            self.calm();
            self.judge();
        }
        self.sum_up();
    }

    /// Runs two jobs through these faults, one at a time, and judges them.
    pub(crate) fn survive(&mut self, kinds: &[&'static str]) {
        // So slow that no job ends before the last fault.
        self.server.slow_down_images(Duration::from_millis(60));
        self.begin_round();
        for kind in kinds {
            self.fault(kind);
            while !(self.stopped.is_empty() && self.cut.is_empty() && self.spoiled.is_none()) {
                sleep(Duration::from_millis(100));
                self.recover(false);
            }
            self.recover(true);
        }
        self.calm();
        self.judge();
        self.sum_up();
    }

    /// Submits a job for a bucket and one for a table.
    fn begin_round(&mut self) {
        self.number += 1;
        let round = self.number;
        let ignores = self.random.random();
        self.server.ignore_preconditions(ignores);
        self.say(&format!("a round, preconditions ignored: {ignores}"));
        let bucket = Place::Bucket(format!("rows-{round}"));
        self.submit_hopeful(&format!("bucket-{round}"), bucket, false);
        let table = Place::Table(format!("labels_{round}"));
        self.submit_hopeful(&format!("table-{round}"), table, false);
    }

    fn sum_up(&self) {
        let of_store = self.store.counts();
        let all = self.counts.values().sum::<usize>() + of_store.values().sum::<usize>();
        println!("faults: {:?}", self.counts);
        println!("of the store: {of_store:?}");
        println!("workers that had ended by themselves: {}", self.ended);
        println!("slowest end: {:.1} s", self.slowest.as_secs_f64());
        println!("longest standstill: {:.1} s", self.stillest.as_secs_f64());
        println!("{all} faults in all");
    }

    fn say(&self, what: &str) {
        println!("{:7.1}s {what}", self.begun.elapsed().as_secs_f64());
    }

    /// Waits until every node has caught up.
    #[track_caller]
    fn await_broker(&self) {
        let deadline = Instant::now() + END;
        let is_whole = |address| get(address, "/healthz").is_some_and(|(code, _)| code == 200);
        while !self.health.iter().copied().all(is_whole) {
            assert!(Instant::now() < deadline, "the broker does not catch up");
            sleep(Duration::from_millis(100));
        }
    }

    /// Ends faults whose time is over, or all; starts workers that have ended by themselves.
    fn recover(&mut self, all: bool) {
        let now = Instant::now();
        for (number, until) in std::mem::take(&mut self.stopped) {
            if all || until < now {
                self.cluster.signal(number, Signal::CONT);
            } else {
                self.stopped.push((number, until));
            }
        }
        for (wire, until) in std::mem::take(&mut self.cut) {
            if all || until < now {
                self.wires[wire].mend();
            } else {
                self.cut.push((wire, until));
            }
        }
        if all || self.spoiled.is_some_and(|until| until < now) {
            self.store.spoil(0);
            self.spoiled = None;
        }
        for number in 0..self.cluster.workers() {
            if self.cluster.has_ended(number) {
                let log = self.cluster.log(number);
                let reason = log.lines().last().unwrap_or_default().to_owned();
                self.say(&format!("worker {number} had ended: {reason}"));
                assert!(!log.contains("panicked at"), "{log}");
                // R14: what is wrong with a job's model is no reason for a worker to end.
                let of_job = ["models/garbage", "models/unknown"];
                assert!(
                    !of_job.iter().any(|model| reason.contains(model)),
                    "{reason}"
                );
                self.ended += 1;
                self.cluster.start_again(number);
            }
        }
    }

    /// Ends all faults.
    fn calm(&mut self) {
        self.say("calm");
        self.recover(true);
        self.server.slow_down(Duration::ZERO);
        self.await_broker();
    }

    #[track_caller]
    fn judge(&mut self) {
        let (begun, deadline) = (Instant::now(), Instant::now() + END);
        for id in std::mem::take(&mut self.hopeless) {
            self.await_state(&id, "failed", deadline);
        }
        self.dead = 0;
        for (id, _) in &self.hopeful.clone() {
            let status = self.show(id).unwrap_or_default();
            let committed = &status["models"][0]["committed"];
            self.say(&format!("{id} has {committed} rows"));
        }
        for (id, place) in std::mem::take(&mut self.hopeful) {
            self.await_state(&id, "complete", deadline);
            let rows = match place {
                Place::Bucket(name) => Rows::of_folder(&self.server.path("photos", &name)),
                Place::Table(table) => Rows::of_table(&self.database, &table, &id),
            };
            rows.assert_are(&self.expected, &self.bad, &id);
            self.say(&format!("{id} is right"));
        }
        self.slowest = self.slowest.max(begun.elapsed());
        self.cluster.assert_nothing_left();
    }

    #[track_caller]
    fn await_state(&mut self, id: &str, wanted: &str, deadline: Instant) {
        let mut moved = (Instant::now(), None);
        loop {
            self.recover(true);
            let status = self.show(id);
            let state = status.as_ref().and_then(|status| status["state"].as_str());
            let committed = status
                .as_ref()
                .and_then(|status| status["models"][0]["committed"].as_u64());
            if committed != moved.1 {
                moved = (Instant::now(), committed);
            }
            self.stillest = self.stillest.max(moved.0.elapsed());
            if state == Some(wanted) {
                return;
            }
            let may_come = state.is_none_or(|state| ["queued", "running"].contains(&state));
            if !may_come || Instant::now() > deadline {
                let why = self.cluster.command(["jobs", "why", id]).run();
                let why = String::from_utf8_lossy(&why.stdout).into_owned();
                panic!("{id} is {state:?} and not {wanted}: {why}");
            }
            sleep(Duration::from_millis(200));
        }
    }

    fn show(&self, id: &str) -> Option<Value> {
        let shown = self.cluster.command(["jobs", "show", id, "--json"]).run();
        serde_json::from_slice(&shown.stdout).ok()
    }

    fn hopeful_have_ended(&self) -> bool {
        self.hopeful.iter().all(|(id, _)| {
            self.show(id)
                .is_some_and(|status| status["state"] == "complete")
        })
    }

    /// Submits until a worker answers: the same id is the same job.
    fn submit(&mut self, id: &str, model: &str, output: &str, overwrite: bool) -> Output {
        let deadline = Instant::now() + END;
        loop {
            let mut command = self
                .cluster
                .command(["submit", "s3://photos/images/", "--id", id])
                .args(["--model", model, "--output", output]);
            if overwrite {
                command = command.arg("--overwrite");
            }
            let run = command.run();
            // Refused for good, or accepted.
            if matches!(run.status.code(), Some(0 | 2)) {
                return run;
            }
            assert!(Instant::now() < deadline, "{id}: {}", stderr(&run));
            self.recover(false);
        }
    }

    fn submit_hopeful(&mut self, id: &str, place: Place, overwrite: bool) {
        let output = match &place {
            Place::Bucket(name) => format!("s3://photos/{name}/"),
            Place::Table(table) => self.database.url_without_password(table),
        };
        self.say(&format!("submit {id}"));
        let run = self.submit(id, "digits", &output, overwrite);
        assert_code(&run, 0);
        self.hopeful.push((id.to_owned(), place));
    }

    /// A job that cannot work is refused, or fails.
    fn submit_hopeless(&mut self, model: &str, output: &str) {
        self.number += 1;
        let id = format!("hopeless-{}", self.number);
        self.say(&format!("submit {id}: {model} to {output}"));
        if self.submit(&id, model, output, false).status.success() {
            self.hopeless.push(id);
        }
    }
}

impl Drop for Fleet {
    /// Keeps the logs of a run that failed.
    fn drop(&mut self) {
        if let (true, Some(folder)) = (std::thread::panicking(), std::env::var_os("LOGS")) {
            self.cluster.keep_logs(Path::new(&folder));
        }
    }
}
