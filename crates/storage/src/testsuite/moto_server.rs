//! moto's S3 server, a second make of store: it honours `If-None-Match` without help and knows
//! multipart uploads, but checks no signatures. `moto_server.py` has it answer for Google Cloud Storage
//! and Azure Blob Storage too.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::free_port;
use crate::{CloudConfig, S3Config};

/// Time the server may take to start.
const START: Duration = Duration::from_secs(60);

/// A running moto server. It is killed when dropped, and its objects are gone.
#[derive(Debug)]
pub struct MotoServer {
    child: Child,
    port: u16,
}

impl MotoServer {
    /// Starts a store without buckets.
    ///
    /// # Panics
    /// When moto is not there, or does not start.
    pub fn start() -> Self {
        let program =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/moto-venv/bin/python");
        assert!(program.exists(), "moto is not there; run make setup");
        let port = free_port();
        let child = Command::new(program)
            .args(["-c", include_str!("moto_server.py"), &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Self { child, port };
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let ended = server.child.try_wait().unwrap();
            assert!(ended.is_none(), "moto ended: {ended:?}");
            assert!(start.elapsed() < START, "moto does not answer");
            sleep(Duration::from_millis(50));
        }
        server
    }

    /// How to reach it.
    pub fn config(&self) -> S3Config {
        let config = S3Config {
            endpoint: Some(format!("http://127.0.0.1:{}", self.port)),
            ..S3Config::default()
        };
        config.with_credentials("any", "any")
    }

    /// How to reach it as Google Cloud Storage, and as Azure Blob Storage.
    pub fn clouds(&self) -> CloudConfig {
        let base = format!("http://127.0.0.1:{}", self.port);
        let options = [
            ("google_base_url", base.clone()),
            ("google_bearer_token", "any".to_owned()),
            ("azure_storage_endpoint", format!("{base}/azure")),
            ("azure_storage_account_name", "any".to_owned()),
            ("azure_skip_signature", "true".to_owned()),
            ("azure_allow_http", "true".to_owned()),
        ];
        let options = options.map(|(name, value)| (name.to_owned(), value));
        CloudConfig {
            options: options.to_vec(),
            ..CloudConfig::default()
        }
    }

    /// Makes a bucket.
    ///
    /// # Panics
    /// When the server refuses.
    pub fn create_bucket(&self, bucket: &str) {
        self.request("PUT", bucket, b"");
    }

    /// Puts an object into a bucket.
    ///
    /// # Panics
    /// When the server refuses.
    pub fn put(&self, bucket: &str, key: &str, content: &[u8]) {
        self.request("PUT", &format!("{bucket}/{key}"), content);
    }

    /// The bytes of an object.
    ///
    /// # Panics
    /// If it is missing.
    pub fn get(&self, bucket: &str, key: &str) -> Vec<u8> {
        self.request("GET", &format!("{bucket}/{key}"), b"")
    }

    /// A request as any HTTP client makes it; gives the body of the answer.
    fn request(&self, method: &str, path: &str, body: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let length = body.len();
        let head = format!(
            "{method} /{path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = Vec::new();
        // The server may cut the connection instead of closing it, once it has answered.
        drop(stream.read_to_end(&mut answer));
        let end = answer
            .windows(4)
            .position(|bytes| bytes == b"\r\n\r\n")
            .unwrap();
        let head = String::from_utf8_lossy(&answer[..end]).into_owned();
        let status = head.split(' ').nth(1).unwrap();
        assert!(matches!(status, "200" | "201"), "{path}: {head}");
        answer.split_off(end + 4)
    }
}

impl Drop for MotoServer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
