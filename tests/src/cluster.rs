//! Workers in processes of their own, around a real broker.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use trommel_queue::test_server::NatsServer;
use trommel_queue::{Broker, BrokerConfig, StreamName};

use trommel_storage::testsuite::S3Server;

use crate::{Folder, Trommel, assert_code, root, stderr};

/// The roles of a whole pipeline, each in a process of its own, preprocess twice.
pub const PIPELINE: [&str; 5] = ["ingest", "preprocess", "preprocess", "infer", "sink"];

/// Time a command may take.
const END: Duration = Duration::from_secs(180);

/// A broker and its workers. Whatever still runs is killed when it is dropped.
pub struct Cluster {
    /// The broker.
    pub nats: NatsServer,
    /// The other nodes, where the broker is replicated.
    pub others: Vec<NatsServer>,
    workers: Vec<Worker>,
    folder: Folder,
    env: BTreeMap<String, String>,
    repository: PathBuf,
}

struct Worker {
    role: String,
    args: Vec<String>,
    child: Child,
    log: PathBuf,
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
        let mut nodes = NatsServer::start_cluster(3);
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

    fn on(nats: NatsServer, others: Vec<NatsServer>) -> Self {
        // Short enough that what a killed worker held is soon another's.
        let env = [
            ("TROMMEL_BROKER__URL", nats.url().to_string().as_str()),
            ("TROMMEL_BROKER__ACK_WAIT", "3s"),
            // The server sets aside what a stream may hold.
            ("TROMMEL_BROKER__TENSORS_MAX_BYTES", "100000000"),
            ("TROMMEL_BROKER__RESULTS_MAX_BYTES", "100000000"),
            ("TROMMEL_SINK__LEASE", "2s"),
            ("TROMMEL_SINK__PART_INTERVAL", "300ms"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        Self {
            nats,
            others,
            workers: Vec::new(),
            folder: Folder::new(),
            env: env.into(),
            repository: root().join("models"),
        }
    }

    /// A broker, and each of these roles in a process of its own, all working.
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

    /// The same of a cluster that is at work; without a value they have it no more.
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
        let number = self.workers.len();
        let log = self.folder.path(&format!("worker-{number}.log"));
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let child = self.spawn(roles, &args, &log);
        self.workers.push(Worker {
            role: roles.to_owned(),
            args,
            child,
            log,
        });
        number
    }

    fn spawn(&self, roles: &str, args: &[String], log: &Path) -> Child {
        let log = File::options().create(true).append(true).open(log).unwrap();
        self.command(["worker", "--role", roles, "--log", "info,ort=off"])
            .arg("--model-repository")
            .arg(&self.repository)
            .args(args)
            .into_command()
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    /// A command line of the binary that knows this broker.
    pub fn command<I: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = I>) -> Trommel {
        let command = Trommel::new(args);
        self.env
            .iter()
            .fold(command, |command, (name, value)| command.env(name, value))
    }

    /// Waits until every worker says that it works.
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

    /// What a worker has logged.
    pub fn log(&self, number: usize) -> String {
        fs::read_to_string(&self.workers[number].log).unwrap()
    }

    /// Numbers of the workers with this role.
    pub fn of_role(&self, role: &str) -> Vec<usize> {
        (0..self.workers.len())
            .filter(|number| self.workers[*number].role == role)
            .collect()
    }

    /// Sends a signal such as `STOP`.
    pub fn signal(&self, number: usize, signal: &str) {
        let pid = self.workers[number].child.id().to_string();
        let sent = Command::new("kill")
            .arg(format!("-{signal}"))
            .arg(pid)
            .status();
        assert!(sent.unwrap().success());
    }

    /// Kills a worker, in the middle of whatever it does, and starts it anew.
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

    /// Starts a worker anew after [`Cluster::kill`].
    pub fn start_again(&mut self, number: usize) {
        let worker = &self.workers[number];
        let (role, args, log) = (worker.role.clone(), worker.args.clone(), worker.log.clone());
        self.workers[number].child = self.spawn(&role, &args, &log);
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

    /// Waits until nothing is left in the streams of the pipeline. The last words to the broker are
    /// on their way when a job ends.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.left_in_broker() > 0 {
            assert!(
                Instant::now() < deadline,
                "{} messages are left in the broker",
                self.left_in_broker()
            );
            sleep(Duration::from_millis(50));
        }
    }

    fn left_in_broker(&self) -> u64 {
        self.ask(async |broker| {
            let mut left = 0;
            for stream in [
                StreamName::Jobs,
                StreamName::Tasks,
                StreamName::Tensors,
                StreamName::Results,
            ] {
                left += broker.stream_stats(stream).await.unwrap().unwrap().messages;
            }
            left
        })
    }

    /// Publishes bytes to a subject.
    pub fn publish(&self, subject: &str, payload: &[u8]) {
        self.ask(async |broker| {
            let payload = payload.to_vec().into();
            let headers = Default::default();
            broker
                .publish_event(subject, payload, headers)
                .await
                .unwrap();
            broker.flush().await.unwrap();
        });
    }

    /// Messages that wait for a consumer; `None` when there is no such consumer.
    pub fn waiting(&self, stream: StreamName, consumer: &str) -> Option<u64> {
        self.ask(async |broker| {
            let stats = broker.consumer_stats(stream, consumer).await.unwrap();
            stats.map(|stats| stats.waiting)
        })
    }

    fn ask<T>(&self, question: impl AsyncFnOnce(Broker) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let config = BrokerConfig {
                url: self.nats.url(),
                ..BrokerConfig::default()
            };
            question(Broker::connect(&config, "test").await.unwrap()).await
        })
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

    /// Fails with what the command and the workers said unless it ended with this code.
    #[track_caller]
    pub fn assert_code(&self, run: &Output, code: i32) {
        if run.status.code() != Some(code) {
            self.tell();
            eprintln!("{}", stderr(run));
        }
        assert_code(run, code);
    }

    /// Runs a command to its end. Fails with what the workers said if it does not end.
    #[track_caller]
    pub fn run_to_end(&self, command: Trommel) -> Output {
        let (ended, end) = mpsc::sync_channel(1);
        thread::spawn(move || ended.send(command.run()));
        end.recv_timeout(END).unwrap_or_else(|_| {
            self.tell();
            panic!("the command does not end");
        })
    }

    /// Prints what the workers said.
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
