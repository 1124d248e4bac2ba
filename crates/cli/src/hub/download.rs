//! Fetches one file of a repository into the cache, atomically.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};

use super::HubName;
use super::cache::Snapshot;
use super::client::{ATTEMPTS, Client, Part, RemoteFile, cut_off, pause};

/// Reports progress on standard error.
pub(super) struct Progress {
    quiet: bool,
}

impl Progress {
    pub(super) fn new(quiet: bool) -> Self {
        Self { quiet }
    }

    /// A bar for one file; a line if standard error is not a terminal.
    fn begin(&mut self, name: &HubName, path: &str, bytes: Option<u64>, there: u64) -> ProgressBar {
        let length = bytes.unwrap_or(0);
        if self.quiet {
            return ProgressBar::hidden();
        }
        if !io::stderr().is_terminal() {
            let size = indicatif::HumanBytes(length);
            let resumed = match there {
                0 => String::new(),
                there => format!(", {} already downloaded", indicatif::HumanBytes(there)),
            };
            // If this fails, nobody is listening.
            writeln!(io::stderr(), "fetching {name}: {path} ({size}{resumed})").ok();
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(length).with_message(path.to_owned());
        let style = "fetching {msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        bar.set_position(there);
        bar
    }
}

/// The path of a file's content in the cache, fetched if it is missing.
///
/// # Errors
/// If it cannot be fetched, or differs from what the hub describes.
pub(super) fn bring(
    client: &Client,
    snapshot: &Snapshot,
    name: &HubName,
    path: &str,
    file: &RemoteFile,
    progress: &mut Progress,
) -> Result<PathBuf> {
    if let Some(here) = snapshot.file(path) {
        return Ok(here);
    }
    let hash = &file.hash;
    if hash.is_empty() {
        bail!("{name}: {path} is not in the cache");
    }
    let _lock = snapshot.lock(hash)?;
    let blob = snapshot.blob(hash);
    if !blob.is_file() {
        let incomplete = blob.with_file_name(format!("{hash}.incomplete"));
        if let Some(folder) = blob.parent() {
            let made = fs::create_dir_all(folder);
            made.with_context(|| format!("failed to create {}", folder.display()))?;
        }
        let fetch = Fetch {
            client,
            name,
            commit: &snapshot.commit,
            path,
            file,
        };
        fetch.write_to(&incomplete, progress)?;
        fs::rename(&incomplete, &blob)
            .with_context(|| format!("failed to write {}", blob.display()))?;
    }
    snapshot.link(path, hash)
}

struct Fetch<'a> {
    client: &'a Client,
    name: &'a HubName,
    commit: &'a str,
    path: &'a str,
    file: &'a RemoteFile,
}

impl Fetch<'_> {
    /// Resumes from the partial file, and verifies the whole.
    fn write_to(&self, incomplete: &Path, progress: &mut Progress) -> Result<()> {
        let failed = || format!("failed to write {}", incomplete.display());
        let options = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(incomplete);
        let mut target = options.with_context(failed)?;
        let there = target.metadata().with_context(failed)?.len();
        let bar = progress.begin(self.name, self.path, self.file.bytes, there);
        let (mut attempt, mut have) = (0, there);
        while self.file.bytes != Some(have) {
            let before = have;
            let why = match self.go_on(&mut target, &mut have, &bar)? {
                None => break,
                Some(why) => why,
            };
            // It continues as long as data arrives.
            attempt = if have > before { 1 } else { attempt + 1 };
            if attempt >= ATTEMPTS {
                bail!(
                    "{}: {} stopped at {have} of {} bytes: {why}; run the same command again to resume",
                    self.name,
                    self.path,
                    self.file
                        .bytes
                        .map_or_else(|| "unknown".to_owned(), |bytes| bytes.to_string()),
                );
            }
            pause(attempt);
        }
        bar.finish_and_clear();
        target.sync_all().with_context(failed)?;
        drop(target);
        let checked = self.check(incomplete);
        if checked.is_err() {
            // The partial file is useless.
            fs::remove_file(incomplete).with_context(failed)?;
        }
        checked
    }

    /// One request. `None` if the file is complete, else why another request is needed.
    fn go_on(
        &self,
        target: &mut File,
        have: &mut u64,
        bar: &ProgressBar,
    ) -> Result<Option<String>> {
        let failed = || format!("failed to write {} to the cache", self.path);
        if self.file.bytes.is_some_and(|bytes| *have > bytes) {
            *have = 0;
        }
        let mut body = match self.client.part(self.name, self.commit, self.path, *have)? {
            Part::Later(why) => return Ok(Some(why)),
            Part::BeyondTheEnd => {
                *have = 0;
                target.set_len(0).with_context(failed)?;
                return Ok(Some(
                    "the file on the server is shorter than the downloaded part".to_owned(),
                ));
            }
            Part::From(start, _) if start > *have => bail!(
                "{}: the server sends {} from byte {start} on, and was asked from {have} on",
                self.name,
                self.path
            ),
            // A server without support for ranges starts from the beginning.
            Part::From(start, body) => {
                *have = start;
                body.into_reader()
            }
        };
        target.set_len(*have).with_context(failed)?;
        target.seek(SeekFrom::Start(*have)).with_context(failed)?;
        let mut buffer = vec![0; 256 << 10];
        loop {
            bar.set_position(*have);
            let length = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Ok(Some(cut_off(&error))),
            };
            target.write_all(&buffer[..length]).with_context(failed)?;
            *have += length as u64;
            if self.file.bytes.is_some_and(|bytes| *have > bytes) {
                return Ok(Some(
                    "the server sent more bytes than the hub's size".to_owned(),
                ));
            }
        }
        let is_whole = self.file.bytes.is_none_or(|bytes| bytes == *have);
        Ok((!is_whole).then(|| "the response ended early".to_owned()))
    }

    /// Whether the content matches the hub's hash.
    fn check(&self, incomplete: &Path) -> Result<()> {
        if !self.file.is_sha256 {
            return Ok(());
        }
        let mut hash = Sha256::new();
        let mut content = File::open(incomplete)?;
        let mut buffer = vec![0; 256 << 10];
        loop {
            match content.read(&mut buffer)? {
                0 => break,
                length => hash.update(&buffer[..length]),
            }
        }
        let digits = hash.finalize();
        let found: String = digits.iter().map(|byte| format!("{byte:02x}")).collect();
        if found != self.file.hash {
            bail!(
                "{}: {} is corrupt: its SHA-256 is {found}, but the hub's is {}; it was removed, run the command again",
                self.name,
                self.path,
                self.file.hash
            );
        }
        Ok(())
    }
}
