//! A server under test, and a client that sends exactly the bytes that it is given.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{Folder, Trommel, digits_model, free_address, metric, root};

/// Time that anything may take.
const END: Duration = Duration::from_secs(60);

/// `trommel serve` with the shipped model. Killed when it is dropped.
pub struct Serving {
    /// Where it answers.
    pub address: SocketAddr,
    /// Its address for metrics and health.
    pub telemetry: SocketAddr,
    child: Child,
    log: PathBuf,
    _folder: Folder,
}

/// An answer over HTTP.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    /// Its head, in lower case.
    pub head: String,
    /// Its body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        let text = String::from_utf8_lossy(&self.body);
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}: {text}", self.status))
    }

    /// The kind of the error.
    #[track_caller]
    pub fn kind(&self) -> (u16, String) {
        let kind = self.json()["error_kind"].as_str().map(str::to_owned);
        (self.status, kind.unwrap_or_default())
    }
}

impl Serving {
    /// Starts it with these settings and waits until it is ready.
    pub fn start(args: &[&str], env: &[(&str, &str)]) -> Self {
        let folder = Folder::new();
        let log = folder.path("log");
        let telemetry = free_address();
        let mut command = Trommel::new(["serve", "--listen", "127.0.0.1:0", "--model"])
            .arg(digits_model())
            .args(["--telemetry-listen", &telemetry.to_string()])
            .args(args);
        for (name, value) in env {
            command = command.env(name, value);
        }
        let child = command
            .into_command()
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut serving = Self {
            address: telemetry,
            telemetry,
            child,
            log,
            _folder: folder,
        };
        serving.address = eventually("it answers", || {
            let log = serving.log();
            let (_, rest) = log.split_once("answering on ")?;
            let (_, address) = rest.split_once("://")?;
            address.lines().next()?.parse().ok()
        });
        serving
    }

    /// What it has written to standard error.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// The value of a metric, summed over the lines that hold all of `labels`.
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        metric(self.telemetry, name, labels)
    }

    /// A new connection.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(END)).unwrap();
        stream
    }

    /// Sends a request with these lines of headers, and reads the answer.
    pub fn send(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Answer {
        send(self.address, method, path, headers, body)
    }

    /// Classifies an image.
    pub fn classify(&self, image: &[u8], headers: &[&str]) -> Answer {
        self.send("POST", "/v1/models/digits/classify", headers, image)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Option<i32> {
        let deadline = Instant::now() + END;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "it does not end: {}", self.log());
            sleep(Duration::from_millis(20));
        }
    }

    /// Fails unless an image is classified now.
    #[track_caller]
    pub fn assert_works(&self, image: &[u8]) {
        let answer = self.classify(image, &[]);
        let text = String::from_utf8_lossy(&answer.body);
        assert_eq!(answer.status, 200, "{text}");
        assert!(!answer.json()["label"].is_null());
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Sends a request with these lines of headers, and reads the answer.
pub fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[&str],
    body: &[u8],
) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(END)).unwrap();
    let mut head = request_head(method, path, headers);
    head += &format!("content-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    // A client that is refused early may find the connection closed, but can still read the answer.
    stream.write_all(body).ok();
    read_answer(&mut stream)
}

/// The first lines of a request, which the length of a body or an empty line follows.
pub fn request_head(method: &str, path: &str, headers: &[&str]) -> String {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
    for header in headers {
        head += header;
        head += "\r\n";
    }
    head
}

/// Reads an answer up to the end of its connection.
#[track_caller]
pub fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut all = Vec::new();
    // One that was refused before all was sent may be reset after the answer.
    let ended = stream.read_to_end(&mut all);
    let end = all.windows(4).position(|four| four == b"\r\n\r\n");
    let end =
        end.unwrap_or_else(|| panic!("no answer: {ended:?} {:?}", String::from_utf8_lossy(&all)));
    let head = String::from_utf8_lossy(&all[..end]).to_lowercase();
    Answer {
        status: head.split(' ').nth(1).unwrap().parse().unwrap(),
        head,
        body: all[end + 4..].to_vec(),
    }
}

/// Polls until there is a result, and returns it.
#[track_caller]
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + END;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "it never happens that {what}");
        sleep(Duration::from_millis(20));
    }
}

/// Runs a program of Python with the clients that `make setup` fetches.
pub fn python(program: &str, args: &[&str]) -> Output {
    let python = root().join(".tools/serve-venv/bin/python");
    assert!(
        python.exists(),
        "{} is missing: run `make setup`",
        python.display()
    );
    Command::new(python)
        .args(["-c", program])
        .args(args)
        .output()
        .unwrap()
}
