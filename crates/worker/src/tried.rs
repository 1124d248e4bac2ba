//! Which images a process worked on when it died, told to the next run of the same job.
//!
//! A run in one process has no broker that counts the deliveries of an image. So it notes when work on an
//! image begins and when it has an outcome, one short line each, in a file that survives the process. An
//! image that was under way when the process died has counted once. Its neighbours, and a few that had just
//! ended, count too, so images that have counted twice are worked on one by one: from then on only the one
//! at fault counts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use roaring::RoaringTreemap;
use tokio::sync::watch;

use crate::WorkerError;
use crate::ingest::{Announced, Checkpoint};

/// Deaths from which on an image is worked on alone.
const ALONE_FROM: u32 = 2;
/// Bytes after which the record is rewritten with what still counts.
const LONGEST: usize = 1 << 20;

/// The record of a run.
pub(crate) struct Tried {
    path: PathBuf,
    state: Mutex<State>,
    /// Images that have an outcome.
    ended: watch::Sender<u64>,
}

struct State {
    /// None when it cannot be written: then nothing is counted.
    file: Option<File>,
    /// Bytes in it, about.
    bytes: usize,
    /// Lines about images that have an outcome, which the next write takes along.
    unwritten: Vec<u8>,
    /// How many those are.
    ended: usize,
    /// Images that are worked on now.
    under_way: BTreeSet<u64>,
    /// How often a process died while it worked on an image, by index.
    deaths: BTreeMap<u64, u32>,
    /// Images that are worked on one by one, and have no outcome yet.
    alone: BTreeSet<u64>,
    /// Images that were let in one by one.
    let_in: u64,
}

impl Tried {
    /// Reads what earlier runs have left in `path` of images that are not `committed`, and begins a record
    /// of this one.
    ///
    /// A record that cannot be read or written is logged: the job itself is not at fault.
    pub(crate) fn open(path: &Path, committed: &RoaringTreemap) -> Self {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => {
                tracing::info!(path = %path.display(), %error, "deaths of earlier runs are not counted");
                String::new()
            }
        };
        let mut deaths = deaths(&text);
        deaths.retain(|index, _| !committed.contains(*index));
        let alone = deaths.iter().filter(|(_, deaths)| **deaths >= ALONE_FROM);
        let state = State {
            file: None,
            bytes: 0,
            unwritten: Vec::new(),
            ended: 0,
            under_way: BTreeSet::new(),
            alone: alone.map(|(index, _)| *index).collect(),
            deaths,
            let_in: 0,
        };
        let tried = Self {
            path: path.to_owned(),
            state: Mutex::new(state),
            ended: watch::Sender::default(),
        };
        tried.lock().write_anew(path);
        tried
    }

    /// Notes that work on an image begins, and gives how often a process died at it.
    pub(crate) fn begin(&self, index: u64) -> u32 {
        let mut state = self.lock();
        state.under_way.insert(index);
        state.note(BEGUN, index);
        state.write(&self.path);
        state.deaths.get(&index).copied().unwrap_or_default()
    }

    /// Notes that an image has its outcome.
    pub(crate) fn end(&self, index: u64) {
        let mut state = self.lock();
        state.under_way.remove(&index);
        state.note(ENDED, index);
        state.ended += 1;
        // Work that begins takes these lines along. Where little does, no death may count for many
        // images that have an outcome.
        if state.ended > state.under_way.len() {
            state.write(&self.path);
        }
        state.alone.remove(&index);
        drop(state);
        self.ended.send_modify(|ended| *ended += 1);
    }

    /// Ends the record of a run that did not die: what was counted of images that are not `committed` stays.
    pub(crate) fn close(&self, committed: &RoaringTreemap) {
        let mut state = self.lock();
        if state.file.is_none() {
            return;
        }
        state.deaths.retain(|index, _| !committed.contains(*index));
        state.under_way.clear();
        state.unwritten.clear();
        state.write_anew(&self.path);
        if state.deaths.is_empty()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::info!(path = %self.path.display(), %error, "an empty record is left");
        }
        state.file = None;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const BEGUN: char = 'b';
const ENDED: char = 'e';
const DIED: char = 'd';

impl State {
    fn note(&mut self, what: char, index: u64) {
        writeln!(self.unwritten, "{what} {index}").expect("writing to memory does not fail");
    }

    fn write(&mut self, path: &Path) {
        let lines = std::mem::take(&mut self.unwritten);
        self.ended = 0;
        let Some(file) = &mut self.file else {
            return;
        };
        self.bytes += lines.len();
        if let Err(error) = file.write_all(&lines) {
            self.give_up(path, &error);
        } else if self.bytes > LONGEST {
            self.write_anew(path);
        }
        // Its memory serves the next lines.
        self.unwritten = lines;
        self.unwritten.clear();
    }

    /// Replaces the record by what counts of it.
    fn write_anew(&mut self, path: &Path) {
        let write = || {
            let dir = path.parent().unwrap_or(Path::new("."));
            fs::create_dir_all(dir)?;
            let mut text = Vec::new();
            for (index, deaths) in &self.deaths {
                writeln!(text, "{DIED} {index} {deaths}")?;
            }
            for index in &self.under_way {
                writeln!(text, "{BEGUN} {index}")?;
            }
            let mut file = tempfile::NamedTempFile::new_in(dir)?;
            file.write_all(&text)?;
            Ok::<_, std::io::Error>(file.persist(path)?)
        };
        match write() {
            Ok(file) => (self.file, self.bytes) = (Some(file), 0),
            Err(error) => self.give_up(path, &error),
        }
    }

    fn give_up(&mut self, path: &Path, error: &std::io::Error) {
        // The job itself is not at fault.
        tracing::info!(path = %path.display(), %error, "deaths of this run are not counted");
        self.file = None;
    }
}

/// How often a process died at each image: those that were under way at the end of the record have counted
/// again.
fn deaths(text: &str) -> BTreeMap<u64, u32> {
    let (mut deaths, mut under_way) = (BTreeMap::new(), BTreeSet::new());
    for line in text.lines() {
        let mut words = line.split(' ');
        let what = words.next().unwrap_or_default();
        // A line that was cut off when the process died says nothing.
        let Some(index) = words.next().and_then(|word| word.parse::<u64>().ok()) else {
            continue;
        };
        match what.chars().next() {
            Some(BEGUN) => {
                under_way.insert(index);
            }
            Some(ENDED) => {
                under_way.remove(&index);
            }
            Some(DIED) => {
                let count = words.next().and_then(|word| word.parse().ok());
                deaths.insert(index, count.unwrap_or(1));
            }
            _ => {}
        }
    }
    for index in under_way {
        *deaths.entry(index).or_insert(0) += 1;
    }
    deaths
}

/// Lets images in one by one as long as any of them is to be worked on alone.
#[async_trait]
impl Checkpoint for Tried {
    async fn announce(&self, _: Announced) -> Result<(), WorkerError> {
        Ok(())
    }

    async fn room(&self) -> Result<u64, WorkerError> {
        let let_in = {
            let mut state = self.lock();
            if state.alone.is_empty() {
                return Ok(u64::MAX);
            }
            state.let_in += 1;
            state.let_in - 1
        };
        let mut ended = self.ended.subscribe();
        // The sender is this one's.
        drop(ended.wait_for(|ended| *ended >= let_in).await);
        Ok(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &Path) -> Tried {
        Tried::open(path, &RoaringTreemap::new())
    }

    #[test]
    fn what_was_under_way_when_a_process_died_has_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/run");
        for deaths in 0..3 {
            let tried = open(&path);
            assert_eq!(tried.begin(7), deaths);
            assert_eq!(tried.begin(8), 0);
            tried.end(8);
            assert_eq!(tried.begin(9), deaths);
            assert_eq!(tried.lock().alone.len(), if deaths < 2 { 0 } else { 2 });
        }
        // One that has its row is forgotten, and a line that was cut off is passed over.
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str("b ");
        fs::write(&path, text).unwrap();
        let tried = Tried::open(&path, &[9].into_iter().collect());
        assert_eq!((tried.begin(9), tried.begin(7)), (0, 3));
        tried.end(7);
        tried.close(&[9].into_iter().collect());
        // It did not die, and had no row.
        assert_eq!(open(&path).begin(7), 3);
        open(&path).close(&[7].into_iter().collect());
        assert!(!path.exists());
    }

    #[test]
    fn a_death_after_the_last_outcome_counts_for_no_image() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        for _ in 0..4 {
            let tried = open(&path);
            assert!((0..100).all(|index| tried.begin(index) == 0));
            (0..100).for_each(|index| tried.end(index));
        }
        // While one image hangs, at most as many others count as are under way.
        let tried = open(&path);
        assert!((0..100).all(|index| tried.begin(index) == 0));
        (1..100).for_each(|index| tried.end(index));
        let tried = open(&path);
        assert_eq!(tried.begin(0), 1);
        assert!((1..100).filter(|index| tried.begin(*index) > 0).count() <= 1);
    }

    #[tokio::test]
    async fn images_that_have_counted_twice_are_let_in_one_by_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        fs::write(&path, "d 3 2\nd 5 2\nd 6 1\n").unwrap();
        let tried = open(&path);
        for index in [3, 4, 5] {
            assert_eq!(tried.room().await.unwrap(), 1);
            tried.begin(index);
            let mut next = Box::pin(tried.room());
            assert!(futures::poll!(&mut next).is_pending(), "{index}");
            drop(next);
            tried.lock().let_in -= 1;
            tried.end(index);
        }
        assert_eq!(tried.room().await.unwrap(), u64::MAX);
    }

    #[test]
    fn the_record_of_a_long_run_stays_short() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run");
        let tried = open(&path);
        tried.begin(7);
        for index in 100..200_000 {
            tried.begin(index);
            tried.end(index);
        }
        tried.begin(8);
        assert!(fs::metadata(&path).unwrap().len() < 2 * LONGEST as u64);
        let again = open(&path);
        assert_eq!([7, 8, 100].map(|index| again.begin(index)), [1, 1, 0]);
    }

    #[test]
    fn a_record_that_cannot_be_written_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let tried = open(&dir.path().join("file/run"));
        assert_eq!(tried.begin(1), 0);
        tried.end(1);
        tried.close(&RoaringTreemap::new());
    }
}
