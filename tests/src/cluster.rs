//! Workers in their own processes, with a real broker.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use trommel_queue::test_server::NatsServer;
use trommel_queue::{Broker, BrokerConfig};

use trommel_storage::testsuite::S3Server;

use crate::{Folder, Trommel, assert_code, binary, root, stderr};

mod broker;

/// The roles of a whole pipeline, each in its own process, preprocess twice.
pub const PIPELINE: [&str; 5] = ["ingest", "preprocess", "preprocess", "infer", "sink"];

/// Time a command may take.
const END: Duration = Duration::from_secs(180);

/// A broker and its workers. Whatever still runs is killed when it is dropped.
pub struct Cluster {
    /// The broker.
    pub nats: NatsServer,
    /// The other nodes, where the broker is replicated.
    pub others: Vec<NatsServer>,
    /// Places that workers started from now on may read: the repository and temporary folders.
    pub sources: Vec<String>,
    /// Places that workers started from now on may write to: temporary folders.
    pub outputs: Vec<String>,
    workers: Vec<Worker>,
    folder: Folder,
    env: BTreeMap<String, String>,
    repository: PathBuf,
}

struct Worker {
    role: String,
    /// Its binary.
    binary: PathBuf,
    args: Vec<String>,
    /// Its own variables.
    env: BTreeMap<String, String>,
    child: Child,
    /// Its log since its last start.
    log: PathBuf,
    starts: usize,
}

impl Default for Cluster {
    fn default() -> Self {
        Self::new()
    }
}

impl Cluster {
    /// A broker alone.
    pub fn new() -> Self {
        Self::on(NatsServer::start(), Vec::new())
    }

    /// A broker of three nodes that replicate jobs, tasks and results.
    pub fn replicated() -> Self {
        Self::replicated_on(NatsServer::start_cluster(3))
    }

    /// The same, of nodes that were started for it.
    pub fn replicated_on(mut nodes: Vec<NatsServer>) -> Self {
        let cluster = Self::on(nodes.remove(0), nodes).env("TROMMEL_BROKER__REPLICAS", "3");
        let urls = [&cluster.nats, &cluster.others[0], &cluster.others[1]].map(NatsServer::url);
        let cluster = cluster.env("TROMMEL_BROKER__URL", &urls.join(","));
        // The nodes have to agree on a leader before they take streams.
        let config = BrokerConfig {
            url: urls.join(","),
            replicas: 3,
            tensors_max_bytes: 100_000_000,
            results_max_bytes: 100_000_000,
            ..BrokerConfig::default()
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        runtime.block_on(async {
            loop {
                let made = match Broker::connect(&config, "test").await {
                    Ok(broker) => broker.ensure_streams().await,
                    Err(error) => Err(error),
                };
                match made {
                    Ok(()) => return,
                    Err(error) => assert!(Instant::now() < deadline, "no cluster: {error}"),
                }
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        });
        cluster
    }

    /// A broker that runs already, and other nodes of it.
    pub fn on(nats: NatsServer, others: Vec<NatsServer>) -> Self {
        // Short, so that the work of a killed worker soon goes to another one.
        let env = [
            ("TROMMEL_BROKER__URL", nats.url().to_string().as_str()),
            ("TROMMEL_BROKER__ACK_WAIT", "3s"),
            // The server reserves the maximum size of a stream.
            ("TROMMEL_BROKER__TENSORS_MAX_BYTES", "100000000"),
            ("TROMMEL_BROKER__RESULTS_MAX_BYTES", "100000000"),
            ("TROMMEL_SINK__LEASE", "2s"),
            ("TROMMEL_SINK__PART_INTERVAL", "300ms"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let place = |path: PathBuf| path.to_str().unwrap().to_owned();
        Self {
            nats,
            others,
            sources: vec![place(root()), place(std::env::temp_dir())],
            outputs: vec![place(std::env::temp_dir())],
            workers: Vec::new(),
            folder: Folder::new(),
            env: env.into(),
            repository: root().join("models"),
        }
    }

    /// A broker, and each of these roles in its own process, all working.
    pub fn with(roles: &[&str]) -> Self {
        let mut cluster = Self::new();
        for role in roles {
            cluster.start(role, &[]);
        }
        cluster.await_ready();
        cluster
    }

    /// Workers started from now on reach S3 by this server.
    #[must_use]
    pub fn s3(self, server: &S3Server) -> Self {
        self.env("TROMMEL_S3__ENDPOINT", &server.endpoint())
            .env("AWS_ACCESS_KEY_ID", S3Server::ACCESS_KEY)
            .env("AWS_SECRET_ACCESS_KEY", S3Server::SECRET_KEY)
    }

    /// Workers started from now on have this variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Starts each role once, with one thread each and parts of 20 rows: a job of a thousand images can be
    /// interrupted many times.
    pub fn start_slow(self) -> Self {
        let mut cluster = self
            .env("TROMMEL_PREPROCESS__THREADS", "1")
            .env("TROMMEL_INFER__INSTANCES", "1")
            .env("TROMMEL_SINK__PART_ROWS", "20")
            .env("TROMMEL_SINK__PART_INTERVAL", "100ms")
            .env("TROMMEL_BROKER__TASKS_MAX_MESSAGES", "100");
        for role in PIPELINE {
            cluster.start(role, &[]);
        }
        cluster.await_ready();
        cluster
    }

    /// The same for a running cluster; `None` removes the variable.
    pub fn set_env(&mut self, name: &str, value: Option<&str>) {
        match value {
            Some(value) => self.env.insert(name.to_owned(), value.to_owned()),
            None => self.env.remove(name),
        };
    }

    /// Workers started from now on take their models from here.
    pub fn set_repository(&mut self, repository: &Path) {
        repository.clone_into(&mut self.repository);
    }

    /// Starts a process with these roles (commas between) and further arguments; gives its number.
    pub fn start(&mut self, roles: &str, args: &[&str]) -> usize {
        self.start_with(roles, args, &[])
    }

    /// The same, with variables of its own, which it keeps when it is started again.
    pub fn start_with(&mut self, roles: &str, args: &[&str], env: &[(&str, &str)]) -> usize {
        let number = self.workers.len();
        let log = self.folder.path(&format!("worker-{number}.0.log"));
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let env = env
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let (env, binary) = (env.collect(), binary());
        let child = self.spawn(&binary, roles, &args, &env, &log);
        self.workers.push(Worker {
            role: roles.to_owned(),
            binary,
            args,
            env,
            child,
            log,
            starts: 1,
        });
        number
    }

    fn spawn(
        &self,
        binary: &Path,
        roles: &str,
        args: &[String],
        env: &BTreeMap<String, String>,
        log: &Path,
    ) -> Child {
        self.with_env(Trommel::of(binary, ["worker", "--role", roles]))
            .args(["--log", "info,ort=off"])
            .arg("--model-repository")
            .arg(&self.repository)
            .args(
                self.sources
                    .iter()
                    .flat_map(|place| ["--allow-source", place]),
            )
            .args(
                self.outputs
                    .iter()
                    .flat_map(|place| ["--allow-output", place]),
            )
            .args(args)
            .into_command()
            .envs(env)
            .stdout(Stdio::null())
            .stderr(File::create(log).unwrap())
            .spawn()
            .unwrap()
    }

    /// A command line of the binary that knows this broker.
    pub fn command<I: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = I>) -> Trommel {
        self.with_env(Trommel::new(args))
    }

    fn with_env(&self, command: Trommel) -> Trommel {
        self.env
            .iter()
            .fold(command, |command, (name, value)| command.env(name, value))
    }

    /// Sets the binary of one worker from its next start on.
    pub fn set_binary_of(&mut self, number: usize, binary: &Path) {
        binary.clone_into(&mut self.workers[number].binary);
    }

    /// A variable of one worker, from its next start on.
    pub fn set_env_of(&mut self, number: usize, name: &str, value: &str) {
        let env = &mut self.workers[number].env;
        env.insert(name.to_owned(), value.to_owned());
    }

    /// How many workers there are.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// The roles of a worker.
    pub fn role(&self, number: usize) -> &str {
        &self.workers[number].role
    }

    /// Whether a worker has ended.
    pub fn has_ended(&mut self, number: usize) -> bool {
        self.workers[number].child.try_wait().unwrap().is_some()
    }

    /// The broker's nodes.
    pub fn nodes(&mut self) -> impl Iterator<Item = &mut NatsServer> {
        std::iter::once(&mut self.nats).chain(&mut self.others)
    }

    /// Waits until every worker has reported since its last start that it is working.
    #[track_caller]
    pub fn await_ready(&mut self) {
        for number in 0..self.workers.len() {
            let deadline = Instant::now() + Duration::from_secs(60);
            while !self.log(number).contains("working as") {
                let worker = &mut self.workers[number];
                let ended = worker.child.try_wait().unwrap();
                assert!(
                    ended.is_none() && Instant::now() < deadline,
                    "worker {number} ({}) is not ready: {}",
                    worker.role,
                    fs::read_to_string(&worker.log).unwrap()
                );
                sleep(Duration::from_millis(20));
            }
        }
    }

    /// The log of a worker since its last start.
    pub fn log(&self, number: usize) -> String {
        fs::read_to_string(&self.workers[number].log).unwrap()
    }

    /// Numbers of the workers with this role.
    pub fn of_role(&self, role: &str) -> Vec<usize> {
        (0..self.workers.len())
            .filter(|number| self.workers[*number].role == role)
            .collect()
    }

    /// Sends a signal to a worker.
    pub fn signal(&self, number: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.workers[number].child), signal).unwrap();
    }

    /// Fails with the logs if a worker has ended.
    #[track_caller]
    pub fn assert_all_alive(&mut self) {
        for number in 0..self.workers.len() {
            assert!(
                self.workers[number].child.try_wait().unwrap().is_none(),
                "worker {number} has ended: {}",
                self.log(number)
            );
        }
    }

    /// Workers started from now on may write here too.
    pub fn allow_output(&mut self, place: &str) {
        self.outputs.push(place.to_owned());
    }

    /// Kills a worker, in the middle of whatever it does, and starts it again.
    pub fn kill_and_restart(&mut self, number: usize) {
        self.kill(number);
        self.start_again(number);
    }

    /// Kills a worker, in the middle of whatever it does.
    pub fn kill(&mut self, number: usize) {
        let worker = &mut self.workers[number];
        worker.child.kill().unwrap();
        worker.child.wait().unwrap();
    }

    /// Starts a worker again after its end.
    pub fn start_again(&mut self, number: usize) {
        let worker = &self.workers[number];
        let log = format!("worker-{number}.{}.log", worker.starts);
        let log = self.folder.path(&log);
        let child = self.spawn(
            &worker.binary,
            &worker.role,
            &worker.args,
            &worker.env,
            &log,
        );
        let worker = &mut self.workers[number];
        worker.starts += 1;
        (worker.child, worker.log) = (child, log);
    }

    /// The state of a job and the number of its committed rows. Asks until a worker answers that
    /// knows the job: while the only ingest is down, none does.
    #[track_caller]
    pub fn progress(&self, id: &str) -> (String, u64) {
        let deadline = Instant::now() + END;
        loop {
            let shown = self.command(["jobs", "show", id, "--json"]).run();
            if let Ok(status) = serde_json::from_slice::<Value>(&shown.stdout) {
                let state = status["state"].as_str().unwrap().to_owned();
                let models = status["models"].as_array().into_iter().flatten();
                let committed = models.filter_map(|model| model["committed"].as_u64());
                return (state, committed.sum());
            }
            assert!(
                Instant::now() < deadline,
                "nobody answers: {}",
                stderr(&shown)
            );
        }
    }

    /// Waits until `look` finds something.
    #[track_caller]
    pub fn eventually<T>(&self, what: &str, look: impl Fn() -> Option<T>) -> T {
        let deadline = Instant::now() + END;
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}: not within {END:?}");
            sleep(Duration::from_millis(20));
        }
    }

    /// Waits until a job has more rows than this, and fails if it has ended by then.
    #[track_caller]
    pub fn await_rows(&self, id: &str, more_than: u64) -> u64 {
        let deadline = Instant::now() + END;
        loop {
            let (state, committed) = self.progress(id);
            assert!(
                ["queued", "running"].contains(&state.as_str()),
                "{id} is {state} already, with {committed} rows"
            );
            if committed > more_than {
                return committed;
            }
            assert!(Instant::now() < deadline, "{id} stands at {committed} rows");
            sleep(Duration::from_millis(20));
        }
    }

    /// Waits for a worker's end; gives its exit code.
    #[track_caller]
    pub fn wait(&mut self, number: usize) -> Option<i32> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.workers[number].child.try_wait().unwrap() {
                return status.code();
            }
            assert!(
                Instant::now() < deadline,
                "worker {number} does not end: {}",
                self.log(number)
            );
            sleep(Duration::from_millis(20));
        }
    }

    /// `trommel submit SOURCE --model digits --output DEST --wait --json`, and what follows.
    pub fn submit(&self, source: &str, output: &str) -> Trommel {
        self.command(["submit", source, "--output", output, "--model", "digits"])
    }

    /// Submits, waits, and fails unless all images got their rows.
    #[track_caller]
    pub fn classify(&self, source: &str, output: &str) -> Output {
        let run = self.submit(source, output).arg("--wait").run();
        self.assert_code(&run, 0);
        run
    }

    /// Fails with the output of the command and the workers unless it ended with this code.
    #[track_caller]
    pub fn assert_code(&self, run: &Output, code: i32) {
        if run.status.code() != Some(code) {
            self.tell();
            eprintln!("{}", stderr(run));
        }
        assert_code(run, code);
    }

    /// Runs a command to its end. Fails with the workers' logs if it does not end.
    #[track_caller]
    pub fn run_to_end(&self, command: Trommel) -> Output {
        let (ended, end) = mpsc::sync_channel(1);
        thread::spawn(move || ended.send(command.run()));
        end.recv_timeout(END).unwrap_or_else(|_| {
            self.tell();
            panic!("the command does not end");
        })
    }

    /// Copies the logs of all starts of the workers, and of the broker's nodes, to a folder.
    pub fn keep_logs(&self, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for log in fs::read_dir(self.folder.path("")).unwrap() {
            let log = log.unwrap();
            fs::copy(log.path(), to.join(log.file_name())).unwrap();
        }
        let nodes = std::iter::once(&self.nats).chain(&self.others);
        for (number, node) in nodes.enumerate() {
            let name = format!("node-{number}.log");
            fs::copy(node.store().join("server.log"), to.join(name)).unwrap();
        }
    }

    /// Prints the workers' logs.
    fn tell(&self) {
        for (number, worker) in self.workers.iter().enumerate() {
            let log = self.log(number);
            eprintln!("--- worker {number} ({})\n{log}", worker.role);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            // It may have ended already.
            drop(worker.child.kill());
            drop(worker.child.wait());
        }
    }
}
