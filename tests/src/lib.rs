//! Shared by the tests of the built binary: the binary, its model, folders of images, and a reader
//! of results.
//!
//! A [`Trommel`] is one command line; a [`Folder`] is a temporary folder that images are put into.
//! Nothing here decides what is right; the tests do.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

mod chat_server;
mod cluster;
mod collector;
mod hub;
mod lost_device;
mod proxy;
mod scrape;
mod serving;

pub use chat_server::{ChatServer, Question, Said};
pub use cluster::{Cluster, PIPELINE};
pub use collector::{Collector, Traced};
pub use hub::{COMMIT as HUB_COMMIT, Hub};
pub use lost_device::LostDevice;
pub use proxy::{FlakyStore, StoreFault, Wire};
pub use rustix::process::Signal;
pub use scrape::{free_address, get, metric, sum};
pub use serving::{Answer, Serving, eventually, python, read_answer, request_head, send};

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use trommel_sink::{ResultRow, read_rows};
use trommel_storage::testsuite::S3Server;

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// The shipped model.
pub fn digits_model() -> PathBuf {
    root().join("models/digits")
}

/// The shipped held-out digits in byte order of their paths, which is listing order.
pub fn digits() -> Vec<PathBuf> {
    let mut files = Vec::new();
    for label in fs::read_dir(digits_model().join("examples")).unwrap() {
        let label = label.unwrap().path();
        files.extend(
            fs::read_dir(label)
                .unwrap()
                .map(|file| file.unwrap().path()),
        );
    }
    files.sort();
    files
}

/// One command line of the built binary, without any configuration of this machine's.
pub struct Trommel {
    command: Command,
}

impl Trommel {
    /// `trommel` with these arguments.
    pub fn new<I: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = I>) -> Self {
        Self::of(&binary(), args)
    }

    /// The same for another file, such as an installed copy.
    pub fn of<I: AsRef<std::ffi::OsStr>>(binary: &Path, args: impl IntoIterator<Item = I>) -> Self {
        let mut command = Command::new(binary);
        command.args(args).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("TROMMEL_") {
                command.env_remove(name);
            }
        }
        // The binary sets it for itself.
        command.env_remove("ORT_DISABLE_TELEMETRY");
        command.env("XDG_CACHE_HOME", root().join("target/test-cache"));
        Self { command }
    }

    /// `trommel classify SOURCE --model models/digits --output DEST`.
    pub fn classify(source: &Path, output: &Path) -> Self {
        Self::new(["classify"])
            .arg(source)
            .arg("--model")
            .arg(digits_model())
            .arg("--output")
            .arg(output)
    }

    /// One more argument.
    pub fn arg(mut self, arg: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// More arguments.
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<std::ffi::OsStr>>) -> Self {
        self.command.args(args);
        self
    }

    /// The command itself.
    pub fn into_command(self) -> Command {
        self.command
    }

    /// A variable in its environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs in this folder.
    pub fn current_dir(mut self, dir: &Path) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Text on its standard input.
    pub fn run_with_input(mut self, input: &str) -> Output {
        use std::io::Write;
        self.command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = self.command.spawn().unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(input.as_bytes())
            .unwrap();
        child.wait_with_output().unwrap()
    }

    /// Runs to the end.
    pub fn run(mut self) -> Output {
        self.command.output().unwrap()
    }

    /// Starts it, with its output thrown away.
    pub fn spawn(mut self) -> Child {
        self.command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// Starts it, with its standard error in a file.
    pub fn spawn_logging(mut self, errors: &Path) -> Child {
        self.command
            .stdout(Stdio::null())
            .stderr(fs::File::create(errors).unwrap())
            .spawn()
            .unwrap()
    }

    /// Runs to the end without root's right to read everything, so that permissions apply.
    pub fn run_bound_by_permissions(self) -> Output {
        let mut bound = Command::new("setpriv");
        bound
            .arg("--bounding-set=-dac_override,-dac_read_search")
            .arg(self.command.get_program());
        bound.args(self.command.get_args()).stdin(Stdio::null());
        bound
            .output()
            .expect("setpriv (Debian package util-linux) has to be installed")
    }
}

/// The built binary, or the one that `TESTED_TROMMEL` names: that of another commit, to see a test fail there.
pub fn binary() -> PathBuf {
    if let Some(other) = std::env::var_os("TESTED_TROMMEL") {
        return other.into();
    }
    // This test is target/PROFILE/deps/NAME.
    let test = std::env::current_exe().unwrap();
    let binary = test.ancestors().nth(2).unwrap().join("trommel");
    assert!(
        binary.exists(),
        "{} is missing: run `cargo build` first",
        binary.display()
    );
    binary
}

/// What a command wrote to standard error.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Fails with the command's output unless it ended with this code.
#[track_caller]
pub fn assert_code(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
}

/// All rows of a result, sorted by index.
pub fn rows(result: &Path) -> Vec<ResultRow> {
    let mut rows: Vec<_> = read_rows(result).unwrap().map(Result::unwrap).collect();
    rows.sort_by_key(|row| row.index);
    rows
}

/// Fails unless the rows are those of indices `0..count`, each once.
#[track_caller]
pub fn assert_each_index_once(rows: &[ResultRow], count: usize) {
    let wrong = (0..).zip(rows).find(|(index, row)| row.index != *index);
    let wrong = wrong.map(|(index, row)| (index, row.index));
    assert_eq!(wrong, None, "(expected, found)");
    assert_eq!(rows.len(), count);
}

/// Fails unless two runs gave the same rows, whenever they did. The last bits of a score depend on
/// how large the batch was that the image happened to be in.
#[track_caller]
pub fn assert_same_rows(found: &[ResultRow], expected: &[ResultRow]) {
    const BATCHING: f32 = 1e-4;
    assert_each_index_once(found, expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let (score, other) = (found.score.unwrap_or(0.0), expected.score.unwrap_or(0.0));
        assert!(
            (score - other).abs() < BATCHING,
            "{found:?} is not {expected:?}"
        );
        assert_eq!(untimed(found), untimed(expected));
    }
}

/// The row without its time and its numbers.
fn untimed(row: &ResultRow) -> ResultRow {
    let mut row = row.clone();
    row.finished_at = None;
    row.score = row.score.map(|_| 0.0);
    row.top.truncate(1);
    for class in &mut row.top {
        class.score = 0.0;
    }
    row
}

/// A temporary folder.
pub struct Folder {
    dir: tempfile::TempDir,
}

impl Default for Folder {
    fn default() -> Self {
        Self::new()
    }
}

impl Folder {
    /// An empty one.
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// A path in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes `images/` with this many digits in it, one file after the other in listing order.
    pub fn with_digits(count: usize) -> Self {
        let folder = Self::new();
        fs::create_dir(folder.path("images")).unwrap();
        for (number, file) in digits().iter().cycle().take(count).enumerate() {
            let suffix = file.extension().unwrap().to_str().unwrap();
            fs::copy(file, folder.path(&format!("images/{number:06}.{suffix}"))).unwrap();
        }
        folder
    }

    /// Puts the images of `images/` under `images/` of a bucket.
    pub fn upload(&self, server: &S3Server, bucket: &str) {
        server.create_bucket(bucket);
        for file in fs::read_dir(self.images()).unwrap() {
            let path = file.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            server.put(bucket, &format!("images/{name}"), &fs::read(&path).unwrap());
        }
    }

    /// `images/` in it.
    pub fn images(&self) -> PathBuf {
        self.path("images")
    }
}
