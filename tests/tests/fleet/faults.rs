//! The faults of a fleet, and what operators do meanwhile.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rand::Rng;
use rand::seq::IndexedRandom;
use trommel_tests::{Signal, assert_code, digits_model};

use super::setup::{copy_model, onnxruntime};
use super::{END, Fleet, Place};

/// Longer than the lease of a sink and the wait for an ack.
const STOPPED: Duration = Duration::from_secs(5);

/// A step of the script.
pub(crate) const KINDS: [&str; 14] = [
    "kill",
    "term",
    "stop",
    "node",
    "wipe",
    "cut",
    "store",
    "database",
    "roll",
    "upgrade",
    "model",
    "overwrite",
    "broken",
    "dead",
];

impl Fleet {
    pub(crate) fn fault(&mut self, kind: &'static str) {
        // Each of these jobs takes its share of the fleet.
        let is_enough = match kind {
            "overwrite" => self.hopeful.len() > 2,
            "dead" => self.dead > 1,
            _ => false,
        };
        if is_enough {
            return;
        }
        *self.counts.entry(kind).or_default() += 1;
        match kind {
            "kill" | "term" | "stop" | "roll" => {
                let awake = (0..self.cluster.workers())
                    .filter(|number| self.stopped.iter().all(|(other, _)| other != number));
                let awake: Vec<usize> = awake.collect();
                let Some(&victim) = awake.choose(&mut self.random) else {
                    return;
                };
                let role = self.cluster.role(victim).to_owned();
                self.say(&format!("{kind} {role} {victim}"));
                self.one_worker(kind, victim);
            }
            "upgrade" => self.upgrade(),
            "node" | "wipe" => self.one_node(kind == "wipe"),
            "cut" => {
                let wire = self.random.random_range(0..self.wires.len());
                self.say(&format!("cut wire {wire}"));
                self.wires[wire].cut();
                self.cut.push((wire, Instant::now() + STOPPED));
            }
            "store" => {
                let percent = self.random.random_range(5..40);
                self.say(&format!("store fails {percent} of 100 requests"));
                self.store.spoil(percent);
                self.spoiled = Some(Instant::now() + STOPPED);
            }
            "database" => {
                self.say("restart database");
                self.database.restart();
            }
            "model" => self.new_version(),
            "overwrite" => self.overwrite(),
            "broken" => {
                let model = *["garbage", "unknown"].choose(&mut self.random).unwrap();
                self.submit_hopeless(model, "s3://photos/never/");
            }
            "dead" => {
                self.dead += 1;
                let output = *["postgres://nobody@127.0.0.1:1/x?table=t", "/proc/x/"]
                    .choose(&mut self.random)
                    .unwrap();
                self.submit_hopeless("digits", output);
            }
            _ => panic!("{kind} is no kind of fault"),
        }
    }

    fn one_worker(&mut self, kind: &str, victim: usize) {
        match kind {
            "stop" => {
                if !self.cluster.has_ended(victim) {
                    self.cluster.signal(victim, Signal::STOP);
                    self.stopped.push((victim, Instant::now() + STOPPED));
                }
                return;
            }
            "kill" => self.cluster.kill(victim),
            _ => self.drain(victim),
        }
        if kind == "roll" {
            let rows = self.random.random_range(50..300).to_string();
            self.cluster
                .set_env_of(victim, "TROMMEL_SINK__PART_ROWS", &rows);
        }
        self.cluster.start_again(victim);
    }

    fn drain(&mut self, victim: usize) {
        if !self.cluster.has_ended(victim) {
            self.cluster.signal(victim, Signal::TERM);
            self.cluster.wait(victim);
        }
    }

    /// Starts the next worker from the newest release; after the last one there is another release.
    fn upgrade(&mut self) {
        let victim = self.upgraded % self.cluster.workers();
        if victim == 0 {
            self.releases.install();
        }
        self.upgraded += 1;
        let (role, release) = (self.cluster.role(victim).to_owned(), self.releases.newest);
        self.say(&format!("upgrade {role} {victim} to release {release}"));
        if let Some(place) = self.stopped.iter().position(|(other, _)| *other == victim) {
            self.stopped.remove(place);
            self.cluster.signal(victim, Signal::CONT);
        }
        self.drain(victim);
        self.cluster.set_binary_of(victim, &self.releases.path());
        if let Some(library) = onnxruntime() {
            let library = library.to_str().unwrap();
            self.cluster.set_env_of(victim, "ORT_DYLIB_PATH", library);
        }
        self.cluster.start_again(victim);
        if victim + 1 == self.cluster.workers() {
            self.releases.remove_old();
        }
    }

    /// Takes a node of the broker away, when the others are whole, and gives it back.
    fn one_node(&mut self, wipe: bool) {
        self.await_broker();
        let number = self.random.random_range(0..self.health.len());
        self.say(&format!("kill node {number}, wiped: {wipe}"));
        let node = self.cluster.nodes().nth(number).unwrap();
        node.kill();
        if wipe {
            fs::remove_dir_all(node.store().join("jetstream")).unwrap();
        }
        let away = self.random.random_range(100..2000);
        sleep(Duration::from_millis(away));
        self.cluster.nodes().nth(number).unwrap().start_again();
    }

    /// Rolls out another version of the model with the same labels.
    fn new_version(&mut self) {
        self.number += 1;
        let version = self.number + 1;
        self.say(&format!("model digits gets version {version}"));
        let ready = self.folder.path(&format!("digits-{version}"));
        copy_model(&digits_model(), &ready);
        let config = fs::read_to_string(ready.join("config.json")).unwrap();
        let config = config.replacen('{', &format!("{{\"release\": {version},"), 1);
        fs::write(ready.join("config.json"), config).unwrap();
        let place = self.folder.path(&format!("models/digits/{version}"));
        fs::rename(ready, place).unwrap();
    }

    /// Cancels a job once it has rows, and submits another one for its output at once.
    fn overwrite(&mut self) {
        self.number += 1;
        let (old, name) = (
            format!("old-{}", self.number),
            format!("again-{}", self.number),
        );
        let output = format!("s3://photos/{name}/");
        self.say(&format!("submit {old}, cancel it, submit {name} over it"));
        assert_code(&self.submit(&old, "digits", &output, false), 0);
        let deadline = Instant::now() + END;
        loop {
            self.recover(false);
            let status = self.show(&old).unwrap_or_default();
            let committed = status["models"][0]["committed"].as_u64().unwrap_or(0);
            if committed > 0 {
                break;
            }
            assert!(Instant::now() < deadline, "{old} gets no rows: {status}");
            assert!(status["state"] != "failed", "{old}: {status}");
            sleep(Duration::from_millis(50));
        }
        let has_ended = |fleet: &Self| {
            let state = fleet.show(&old).map(|status| status["state"].clone());
            state.is_some_and(|state| state == "cancelled" || state == "complete")
        };
        while !has_ended(self) {
            assert!(Instant::now() < deadline, "{old} does not end");
            drop(self.cluster.command(["jobs", "cancel", &old]).run());
            self.recover(false);
        }
        self.submit_hopeful(&name.clone(), Place::Bucket(name), true);
    }
}
