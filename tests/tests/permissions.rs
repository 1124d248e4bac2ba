//! Each role does its work with a user of its own, over TLS, and nothing else.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use async_nats::{ConnectOptions, Event, ServerError};
use futures::StreamExt;
use tokio::sync::mpsc;
use trommel_queue::test_server::NatsServer;
use trommel_tests::{
    Cluster, Folder, Signal, assert_each_index_once, digits, eventually, free_address, root, rows,
    send,
};

/// The roles that a job needs, each a user of its own.
const ROLES: [&str; 4] = ["ingest", "preprocess", "infer", "sink"];
const USERS: [&str; 9] = [
    "ingest",
    "preprocess",
    "infer",
    "sink",
    "worker",
    "serve",
    "camera",
    "submitter",
    "operator",
];
/// Time the server may take to refuse a subject.
const ANSWER: Duration = Duration::from_secs(20);

/// A broker with the shipped configuration, and the credentials for it.
struct Broker {
    cluster: Cluster,
    ca: PathBuf,
    _folder: Folder,
}

impl Broker {
    /// The shipped one.
    fn shipped() -> Self {
        Self::without(&[])
    }

    /// The shipped one without the lines of the permissions that hold these subjects.
    fn without(subjects: &[&str]) -> Self {
        let folder = Folder::new();
        let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
        let certified = rcgen::generate_simple_self_signed(names).unwrap();
        let (ca, key) = (folder.path("server.pem"), folder.path("key.pem"));
        fs::write(&ca, certified.cert.pem()).unwrap();
        fs::write(&key, certified.signing_key.serialize_pem()).unwrap();

        let shipped =
            |name: &str| fs::read_to_string(root().join("deploy/nats").join(name)).unwrap();
        let mut permissions = shipped("permissions.conf");
        for subject in subjects {
            let line = format!("            \"{subject}\"\n");
            assert!(
                permissions.contains(&line),
                "{subject} is permitted to nobody"
            );
            permissions = permissions.replace(&line, "");
        }
        // What the server takes from its environment comes before it here; its store is an argument.
        let mut config = format!(
            "TROMMEL_NATS_TLS_CERTIFICATE: \"{}\"\nTROMMEL_NATS_TLS_KEY: \"{}\"\n",
            ca.display(),
            key.display(),
        );
        for user in USERS {
            let name = user.to_ascii_uppercase();
            config.push_str(&format!(
                "TROMMEL_NATS_{name}_PASSWORD: \"{}\"\n",
                password(user)
            ));
        }
        let server = shipped("trommel.conf")
            .replace("  store_dir: $TROMMEL_NATS_STORE\n", "")
            .replace("include \"permissions.conf\"", &permissions);
        config.push_str(&server);
        let path = folder.path("nats.conf");
        fs::write(&path, config).unwrap();
        let server = NatsServer::start_with(&["-c", path.to_str().unwrap()]);
        let cluster =
            Cluster::on(server, Vec::new()).env("TROMMEL_BROKER__TLS_CA", ca.to_str().unwrap());
        Self {
            cluster,
            ca,
            _folder: folder,
        }
    }

    /// Processes started from now on connect as this user.
    fn act_as(&mut self, user: &str) -> &mut Cluster {
        let url = self.url(user);
        self.cluster.set_env("TROMMEL_BROKER__URL", Some(&url));
        let inbox = format!("_INBOX.{user}");
        self.cluster
            .set_env("TROMMEL_BROKER__INBOX_PREFIX", Some(&inbox));
        &mut self.cluster
    }

    fn url(&self, user: &str) -> String {
        let address = self.cluster.nats.url().replace("nats://", "");
        format!("tls://{user}:{}@{address}", password(user))
    }

    fn start_roles(&mut self) {
        for role in ROLES {
            // The streams are made by ingest.
            self.act_as(role).start(role, &[]);
            self.cluster.await_ready();
        }
    }

    /// The subjects that the server refuses to a user who tries these.
    fn refused(&self, user: &str, publish: &[&str], subscribe: &[&str]) -> Vec<String> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let (refusals, mut refused) = mpsc::channel(64);
            let address = self.cluster.nats.url().replace("nats://", "tls://");
            let client = ConnectOptions::with_user_and_password(user.to_owned(), password(user))
                .add_root_certificates(self.ca.clone())
                .custom_inbox_prefix(format!("_INBOX.{user}"))
                .event_callback(move |event| {
                    let refusals = refusals.clone();
                    async move {
                        if let Event::ServerError(ServerError::Other(text)) = event {
                            refusals.send(text).await.unwrap();
                        }
                    }
                })
                .connect(address)
                .await
                .unwrap();
            let mut subscriptions = Vec::new();
            for subject in subscribe {
                subscriptions.push(client.subscribe((*subject).to_owned()).await.unwrap());
            }
            for subject in publish {
                client
                    .publish((*subject).to_owned(), "".into())
                    .await
                    .unwrap();
            }
            // Refusals come in the order of what was sent; this one is the last.
            client.publish("$SYS.last", "".into()).await.unwrap();
            client.flush().await.unwrap();
            let mut subjects = Vec::new();
            loop {
                let text = tokio::time::timeout(ANSWER, refused.recv()).await;
                let text = text.expect("the server answers in time").unwrap();
                let subject = text.split('"').nth(1).unwrap_or(&text).to_owned();
                if subject == "$SYS.last" {
                    return subjects;
                }
                subjects.push(subject);
            }
        })
    }
}

fn password(user: &str) -> String {
    format!("secret-of-{user}")
}

/// R37: five users, five processes, one job.
#[test]
fn each_role_works_with_a_user_of_its_own() {
    let folder = Folder::with_digits(60);
    fs::write(folder.images().join("000000-broken.jpg"), "no image").unwrap();
    let mut broker = Broker::shipped();
    broker.start_roles();
    let output = folder.path("rows/");
    let (source, target) = (folder.images(), output.to_str().unwrap().to_owned());
    let cluster = broker.act_as("submitter");
    cluster.classify(source.to_str().unwrap(), &target);
    let rows = rows(&output);
    assert_each_index_once(&rows, 61);
    assert_eq!(rows.iter().filter(|row| row.status == "failed").count(), 1);
    for number in 0..ROLES.len() {
        let log = broker.cluster.log(number);
        assert!(!log.contains("Permissions Violation"), "{log}");
        assert!(!log.contains("does not permit"), "{log}");
    }
    // The operator may read and cancel jobs; the submitter may not.
    let list = broker.act_as("operator").command(["jobs", "list"]).run();
    broker.cluster.assert_code(&list, 0);
    let cancel = broker
        .act_as("submitter")
        .command(["jobs", "cancel", "nonesuch"])
        .run();
    assert_ne!(cancel.status.code(), Some(0));
    let said = String::from_utf8_lossy(&cancel.stderr).into_owned();
    assert!(said.contains("trommel.api.cancel"), "{said}");
}

/// Requests need two users: the one that takes them, and the one that computes.
#[test]
fn requests_go_through_with_users_of_their_own() {
    let mut broker = Broker::shipped();
    broker.act_as("ingest").start("ingest", &[]);
    broker.cluster.await_ready();
    broker
        .act_as("infer")
        .start("infer", &["--serve", "digits"]);
    let address = free_address();
    let listen = address.to_string();
    let cluster = broker.act_as("serve");
    cluster.set_env("TROMMEL_SERVE__NATS", Some("true"));
    cluster.start("serve", &["--serve", "digits", "--serve-listen", &listen]);
    cluster.await_ready();
    eventually("an infer worker is there", || {
        let ready = send(address, "GET", "/v2/health/ready", &[], b"");
        (ready.status == 200).then_some(())
    });
    let image = fs::read(&digits()[0]).unwrap();
    let answer = send(address, "POST", "/v1/models/digits/classify", &[], &image);
    assert_eq!(answer.status, 200, "{:?}", answer.json());
    for number in 0..3 {
        broker.cluster.signal(number, Signal::TERM);
        assert_eq!(broker.cluster.wait(number), Some(0));
        let log = broker.cluster.log(number);
        assert!(!log.contains("Permissions Violation"), "{log}");
        assert!(!log.contains("does not permit"), "{log}");
    }
}

/// R37: what one role may do, the others may not.
#[test]
fn each_role_is_refused_what_is_not_its_own() {
    let broker = Broker::shipped();
    // A user, a subject it may use, one it must not publish to, and one it must not subscribe to.
    let table: [(&str, &str, &[&str], &[&str]); 9] = [
        (
            "ingest",
            "trommel.tasks.normal.job",
            &[
                "trommel.tensors.m.normal.job",
                "trommel.api.submit",
                "$JS.API.STREAM.DELETE.TROMMEL_JOBS",
                "$JS.API.STREAM.UPDATE.TROMMEL_JOBS",
                "$JS.API.CONSUMER.MSG.NEXT.TROMMEL_TENSORS.x",
                "$JS.ACK.TROMMEL_RESULTS.x",
                "elsewhere",
            ],
            &["trommel.tasks.>", ">", "_INBOX.>", "_INBOX.sink.>"],
        ),
        (
            "preprocess",
            "trommel.tensors.m.normal.job",
            &[
                "trommel.tasks.normal.job",
                "trommel.jobs.high",
                "trommel.api.cancel",
                "trommel.dead.infer.job",
                "$JS.API.STREAM.CREATE.TROMMEL_TASKS",
                "$JS.API.STREAM.PURGE.TROMMEL_TASKS",
                "$JS.API.CONSUMER.MSG.NEXT.TROMMEL_RESULTS.x",
                "$KV.trommel-jobs.progress.job",
            ],
            &["trommel.api.*", "trommel.results.>", "_INBOX.ingest.>"],
        ),
        (
            "infer",
            "trommel.results.job.m",
            &[
                "trommel.tensors.m.normal.job",
                "trommel.tasks.normal.job",
                "$JS.API.CONSUMER.MSG.NEXT.TROMMEL_TASKS.x",
                "$JS.API.STREAM.PURGE.TROMMEL_TENSORS",
                "$JS.ACK.TROMMEL_TASKS.x",
                "$KV.trommel-jobs.output.hash",
                "trommel.infer.m",
            ],
            &["trommel.tensors.>", "trommel.api.*", "trommel.classify.*"],
        ),
        (
            "sink",
            "$KV.trommel-jobs.progress.job",
            &[
                "trommel.results.job.m",
                "trommel.tasks.normal.job",
                "trommel.jobs.high",
                "$JS.API.STREAM.DELETE.TROMMEL_RESULTS",
                "$JS.API.STREAM.DELETE.KV_trommel-jobs",
                "$JS.ACK.TROMMEL_TENSORS.x",
            ],
            &["trommel.results.>", "trommel.api.*"],
        ),
        (
            "worker",
            "trommel.tasks.normal.job",
            &["trommel.api.submit", "$JS.API.STREAM.DELETE.TROMMEL_JOBS"],
            &[">"],
        ),
        (
            "serve",
            "trommel.infer.m",
            &[
                "trommel.tasks.normal.job",
                "trommel.tensors.m.normal.job",
                "trommel.classify.m",
                "$KV.trommel-jobs.job.x",
            ],
            &[
                "trommel.api.*",
                "trommel.infer.*",
                "trommel.>",
                "_INBOX.sink.>",
            ],
        ),
        (
            "camera",
            "trommel.live.cam1",
            &[
                "trommel.live.results.cam1",
                "trommel.tasks.normal.job",
                "trommel.classify.m",
                "$JS.API.CONSUMER.CREATE.TROMMEL_LIVE.x",
                "$JS.API.STREAM.PURGE.TROMMEL_LIVE",
            ],
            &["trommel.live.*", "trommel.>", "_INBOX.serve.>"],
        ),
        (
            "submitter",
            "trommel.api.submit",
            &[
                "trommel.api.cancel",
                "trommel.jobs.high",
                "trommel.results.job.m",
                "$KV.trommel-jobs.job.x",
                "$JS.API.STREAM.INFO.TROMMEL_JOBS",
                "$JS.API.STREAM.MSG.GET.TROMMEL_TASKS",
            ],
            &["trommel.api.*", "trommel.>", "$KV.>", "_INBOX.operator.>"],
        ),
        (
            "operator",
            "trommel.api.cancel",
            &["trommel.jobs.high", "$KV.trommel-jobs.job.x"],
            &["trommel.tasks.>", "$KV.>"],
        ),
    ];
    for (user, own, publish, subscribe) in table {
        let expected: Vec<&str> = subscribe.iter().chain(publish).copied().collect();
        let tried: Vec<&str> = [own].into_iter().chain(publish.iter().copied()).collect();
        assert_eq!(broker.refused(user, &tried, subscribe), expected, "{user}");
    }
}

/// No connection without a password, or without TLS.
#[test]
fn strangers_are_refused() {
    let mut broker = Broker::shipped();
    let address = broker.cluster.nats.url().replace("nats://", "");
    for (url, ca) in [
        (format!("tls://{address}"), true),
        (format!("tls://ingest:wrong@{address}"), true),
        (format!("tls://root:secret-of-ingest@{address}"), true),
        (broker.url("ingest"), false),
    ] {
        let ca = ca.then(|| broker.ca.to_str().unwrap().to_owned());
        broker
            .cluster
            .set_env("TROMMEL_BROKER__TLS_CA", ca.as_deref());
        broker.cluster.set_env("TROMMEL_BROKER__URL", Some(&url));
        let models = trommel_tests::digits_model();
        let models = models.parent().unwrap().to_str().unwrap();
        let run = broker
            .cluster
            .command(["worker", "--role", "ingest", "--model-repository", models])
            .run();
        broker.cluster.assert_code(&run, 2);
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(said.contains("failed to connect to the broker"), "{said}");
        assert!(!said.contains("secret-of"), "{said}");
    }
}

/// R57: a role that lacked a permission neither started nor ended.
#[test]
fn a_role_that_lacks_a_permission_ends_and_names_the_subject() {
    let folder = Folder::with_digits(5);
    for (role, lacking, named) in [
        (
            "ingest",
            "$JS.API.STREAM.CREATE.TROMMEL_TASKS",
            "$JS.API.STREAM.CREATE.TROMMEL_TASKS",
        ),
        ("ingest", "trommel.api.*", "trommel.api."),
        (
            "preprocess",
            "$JS.API.CONSUMER.MSG.NEXT.TROMMEL_TASKS.*",
            "$JS.API.CONSUMER.MSG.NEXT.TROMMEL_TASKS.",
        ),
        (
            "infer",
            "$KV.trommel-jobs.worker.*",
            "$KV.trommel-jobs.worker.",
        ),
        (
            "sink",
            "$JS.API.CONSUMER.CREATE.TROMMEL_RESULTS.>",
            "$JS.API.CONSUMER.CREATE.TROMMEL_RESULTS.",
        ),
    ] {
        let mut broker = Broker::without(&[lacking]);
        if role != "ingest" {
            broker.act_as("ingest").start("ingest", &[]);
            broker.cluster.await_ready();
        }
        let number = broker.act_as(role).start(role, &[]);
        if role == "sink" {
            // It asks for results once there is a job.
            broker.cluster.await_ready();
            let output = folder.path("rows/");
            let submitter = broker.act_as("submitter");
            let images = folder.images();
            let submitted = submitter
                .submit(images.to_str().unwrap(), output.to_str().unwrap())
                .run();
            broker.cluster.assert_code(&submitted, 0);
        }
        let code = broker.cluster.wait(number);
        let log = broker.cluster.log(number);
        assert_ne!(code, Some(0), "{role} without {lacking}: {log}");
        assert!(log.contains(named), "{role} without {lacking}: {log}");
    }
}

/// A camera publishes, another process classifies, and a third user follows.
#[test]
fn live_sources_work_with_users_of_their_own() {
    let folder = Folder::new();
    let clip = folder.path("clip.mp4");
    let made = Command::new("ffmpeg")
        .args([
            "-v",
            "error",
            "-nostdin",
            "-f",
            "lavfi",
            "-i",
            "testsrc2=size=64x64:rate=5:duration=1",
        ])
        .arg(&clip)
        .status();
    assert!(made.expect("ffmpeg is on PATH: make setup").success());
    let mut broker = Broker::shipped();
    let log = folder.path("log");
    let mut serving = broker
        .act_as("serve")
        .command(["serve", "--listen", "127.0.0.1:0", "--live", "*", "--model"])
        .arg(trommel_tests::digits_model())
        .args(["--nats", &broker.url("serve")])
        .spawn_logging(&log);
    let said = || fs::read_to_string(&log).unwrap_or_default();
    trommel_tests::eventually("it answers", || {
        let has_ended = serving.try_wait().unwrap().is_some();
        assert!(!has_ended, "{}", said());
        said().contains("answering on").then_some(())
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (client, mut results) = runtime.block_on(async {
        let client =
            ConnectOptions::with_user_and_password("submitter".to_owned(), password("submitter"))
                .add_root_certificates(broker.ca.clone())
                .custom_inbox_prefix("_INBOX.submitter")
                .connect(broker.cluster.nats.url().replace("nats://", "tls://"))
                .await
                .unwrap();
        let results = client.subscribe("trommel.live.results.*").await.unwrap();
        client.flush().await.unwrap();
        (client, results)
    });
    let clip = clip.to_str().unwrap().to_owned();
    let fed = broker
        .act_as("camera")
        .command(["feed", &clip, "--as", "cam1"])
        .run();
    broker.cluster.assert_code(&fed, 0);
    let result = runtime.block_on(async { tokio::time::timeout(ANSWER, results.next()).await });
    let result = result.expect("a result comes").unwrap();
    assert_eq!(result.subject.as_str(), "trommel.live.results.cam1");
    drop(client);
    serving.kill().unwrap();
    serving.wait().unwrap();
    for said in [said(), String::from_utf8_lossy(&fed.stderr).into_owned()] {
        assert!(!said.contains("Permissions Violation"), "{said}");
        assert!(!said.contains("does not permit"), "{said}");
    }
}
