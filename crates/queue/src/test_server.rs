//! A NATS server for tests: a child process on a free port, with a store folder of its own.

#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test fails by panicking"
)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::jetstream::version::ServerVersion;

/// Time a server may take to start.
const START: Duration = Duration::from_secs(30);

/// A running nats-server. It is killed when dropped, and its folder removed.
#[derive(Debug)]
pub struct NatsServer {
    child: Child,
    port: u16,
    arguments: Vec<String>,
    folder: tempfile::TempDir,
}

impl NatsServer {
    /// Starts a server with JetStream.
    ///
    /// # Panics
    /// When no nats-server 2.10 or newer is found, or it does not start.
    pub fn start() -> Self {
        Self::start_with(&["-js"])
    }

    /// Starts a server with other arguments than `-js`.
    ///
    /// # Panics
    /// As [`NatsServer::start`].
    pub fn start_with(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let arguments: Vec<_> = arguments.iter().map(|&argument| argument.into()).collect();
        let port = free_port();
        let child = spawn(folder.path(), port, &arguments);
        let mut server = Self {
            child,
            port,
            arguments,
            folder,
        };
        server.wait_until_ready();
        server
    }

    /// Starts servers that replicate each other's streams.
    ///
    /// # Panics
    /// As [`NatsServer::start`].
    pub fn start_cluster(nodes: usize) -> Vec<Self> {
        let routes: Vec<String> = (0..nodes)
            .map(|_| format!("nats://127.0.0.1:{}", free_port()))
            .collect();
        let all = routes.join(",");
        let node = |(number, own): (usize, &String)| {
            let name = format!("node-{number}");
            Self::start_with(&[
                "-js",
                "-n",
                &name,
                "--cluster_name",
                "trommel-test",
                "--cluster",
                own,
                "--routes",
                &all,
            ])
        };
        routes.iter().enumerate().map(node).collect()
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it stores its streams.
    pub fn store(&self) -> &Path {
        self.folder.path()
    }

    /// Kills it at once (SIGKILL).
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Kills it and starts it again on the same port and store.
    pub fn restart(&mut self) {
        self.kill();
        self.start_again();
    }

    /// Starts it again after [`NatsServer::kill`], on the same port and store.
    pub fn start_again(&mut self) {
        self.child = spawn(self.folder.path(), self.port, &self.arguments);
        self.wait_until_ready();
    }

    /// Until it greets, and until it has read its streams if it has any.
    fn wait_until_ready(&mut self) {
        let end = Instant::now() + START;
        while !greets(self.port) {
            let ended = self.child.try_wait().unwrap().is_some();
            assert!(
                !ended && Instant::now() < end,
                "nats-server does not start: {}",
                std::fs::read_to_string(self.folder.path().join("server.log")).unwrap_or_default()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        // It may have ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn spawn(folder: &Path, port: u16, arguments: &[String]) -> Child {
    Command::new(program())
        .args(["-a", "127.0.0.1", "-p", &port.to_string()])
        .arg("--store_dir")
        .arg(folder)
        .arg("--log")
        .arg(folder.join("server.log"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("nats-server starts")
}

/// A port that no server listens on, and that no connection going out is given while the server is
/// down.
fn free_port() -> u16 {
    portpicker::pick_unused_port().expect("a port is free")
}

/// Whether a server on this port sends its first line.
fn greets(port: u16) -> bool {
    use std::io::Read;
    let Ok(mut stream) = std::net::TcpStream::connect(("127.0.0.1", port)) else {
        return false;
    };
    let mut greeting = [0; 5];
    stream
        .set_read_timeout(Some(Duration::from_secs(1)))
        .is_ok()
        && stream.read_exact(&mut greeting).is_ok()
        && &greeting == b"INFO "
}

/// The first nats-server that is new enough: in the workspace's `.tools/bin`, else on PATH.
fn program() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2);
    let tools = workspace.map(|workspace| workspace.join(".tools/bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    tools
        .into_iter()
        .chain(std::env::split_paths(&path))
        .map(|folder| folder.join("nats-server"))
        .find(|program| version(program).is_some_and(|version| version >= ServerVersion::OLDEST))
        .expect("no nats-server 2.10 or newer in .tools/bin or on PATH: run `make setup`")
}

fn version(program: &Path) -> Option<ServerVersion> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    ServerVersion::parse(text.split_whitespace().last()?)
}
