//! A PostgreSQL server: a cluster of its own in a folder of its own, on a free port.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::free_port;

/// Time a server may take to start.
const START: Duration = Duration::from_secs(60);
const USER: &str = "trommel";
const PASSWORD: &str = "s p&ce";
/// Who runs the server where the tests are root, which PostgreSQL refuses to be.
const NOBODY: u32 = 65534;

/// A running PostgreSQL. It is killed when dropped, and its folder removed.
#[derive(Debug)]
pub struct PostgresServer {
    child: Child,
    port: u16,
    programs: PathBuf,
    folder: tempfile::TempDir,
}

impl PostgresServer {
    /// Makes a cluster that asks for passwords, and starts it.
    ///
    /// # Panics
    /// When no PostgreSQL is found, or it does not start.
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let programs = reachable(programs(), folder.path());
        let password = folder.path().join("password");
        fs::write(&password, PASSWORD).unwrap();
        if is_root() {
            for path in [folder.path(), &password] {
                chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
        let made = command(&programs.join("initdb"))
            .args(["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"])
            .args(["--no-sync", "--username", USER, "--pwfile"])
            .arg(&password)
            .arg("--pgdata")
            .arg(folder.path().join("data"))
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", words(&made));
        let port = free_port();
        let child = spawn(&programs, folder.path(), port);
        let server = Self {
            child,
            port,
            programs,
            folder,
        };
        server.wait_until_ready();
        server
    }

    /// The address of a table, password included.
    pub fn url(&self, table: &str) -> String {
        let password = PASSWORD.replace(' ', "%20").replace('&', "%26");
        format!(
            "postgres://{USER}:{password}@127.0.0.1:{}/postgres?table={table}",
            self.port
        )
    }

    /// The database, as one allows it to workers.
    pub fn place(&self) -> String {
        format!("postgres://127.0.0.1:{}/postgres", self.port)
    }

    /// The address of a table without the password.
    pub fn url_without_password(&self, table: &str) -> String {
        format!(
            "postgres://{USER}@127.0.0.1:{}/postgres?table={table}",
            self.port
        )
    }

    /// The password.
    pub fn password(&self) -> &'static str {
        PASSWORD
    }

    /// What `psql` prints for a query: a line for each row, fields between `|`.
    ///
    /// # Panics
    /// When the query fails.
    pub fn query(&self, sql: &str) -> String {
        let output = self.psql(sql);
        assert!(output.status.success(), "{sql}: {}", words(&output));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Kills the server at once and starts it again.
    pub fn restart(&mut self) {
        // Its children end when they find it gone; SIGQUIT makes them do so now.
        kill_process(Pid::from_child(&self.child), Signal::QUIT).unwrap();
        self.child.wait().unwrap();
        self.child = spawn(&self.programs, self.folder.path(), self.port);
        self.wait_until_ready();
    }

    fn psql(&self, sql: &str) -> Output {
        Command::new(self.programs.join("psql"))
            .args(["--no-psqlrc", "--tuples-only", "--no-align", "--quiet"])
            .args([
                "--host",
                "127.0.0.1",
                "--username",
                USER,
                "--dbname",
                "postgres",
            ])
            .args(["--port", &self.port.to_string(), "--command", sql])
            .env("PGPASSWORD", PASSWORD)
            .output()
            .unwrap()
    }

    fn wait_until_ready(&self) {
        let start = Instant::now();
        while !self.psql("SELECT 1").status.success() {
            assert!(
                start.elapsed() < START,
                "PostgreSQL does not answer: {}",
                fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
            );
            sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // The fast way to stop: open connections are cut.
        kill_process(Pid::from_child(&self.child), Signal::QUIT).ok();
        drop(self.child.wait());
    }
}

fn spawn(programs: &Path, folder: &Path, port: u16) -> Child {
    let log = fs::File::options()
        .create(true)
        .append(true)
        .open(folder.join("log"))
        .unwrap();
    command(&programs.join("postgres"))
        .arg("-D")
        .arg(folder.join("data"))
        .args(["-p", &port.to_string(), "-k", ""])
        .args(["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"])
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// A program of PostgreSQL's, as another user where this one is root.
fn command(program: &Path) -> Command {
    if !is_root() {
        return Command::new(program);
    }
    let (user, mut command) = (NOBODY.to_string(), Command::new("setpriv"));
    command
        .args(["--reuid", &user, "--regid", &user, "--clear-groups", "--"])
        .arg(program);
    command
}

/// The programs where the other user can run them: those of `make setup` may lie in a folder that is
/// root's alone.
fn reachable(programs: PathBuf, folder: &Path) -> PathBuf {
    if !is_root() || !programs.starts_with(repository()) {
        return programs;
    }
    let copied = folder.join("postgresql");
    let status = Command::new("cp")
        .arg("-a")
        .args([&repository().join(".tools/postgresql"), &copied])
        .status()
        .unwrap();
    assert!(status.success(), "PostgreSQL cannot be copied");
    copied.join("bin")
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().unwrap();
    String::from_utf8(id.stdout).unwrap().trim() == "0"
}

/// The folder of PostgreSQL's programs: on the PATH, where Debian puts them, where `make setup`
/// puts them.
fn programs() -> PathBuf {
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&on_path).collect();
    if let Ok(versions) = fs::read_dir("/usr/lib/postgresql") {
        folders.extend(versions.map(|version| version.unwrap().path().join("bin")));
    }
    folders.push(repository().join(".tools/postgresql/bin"));
    let is_whole = |folder: &PathBuf| {
        ["initdb", "postgres", "psql"]
            .iter()
            .all(|program| folder.join(program).exists())
    };
    folders
        .into_iter()
        .find(is_whole)
        .expect("no PostgreSQL (initdb, postgres, psql) is found; run make setup")
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
