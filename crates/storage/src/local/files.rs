//! Atomic file writes.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{StorageError, StorageErrorKind};

/// Creates `dir/name` with the output of `write`, unless it exists. Durable on return.
///
/// The content is first written and synced under a hidden name and then linked, which fails if the
/// name is taken: this is create-if-absent on a local file system.
///
/// # Errors
/// [`LostRace`](StorageErrorKind::LostRace) if the name is taken. Nothing is left behind then.
pub(super) fn create_if_absent(
    dir: &Path,
    name: &str,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<(), StorageError>,
) -> Result<(), StorageError> {
    let target = dir.join(name);
    let hidden = Hidden::write(dir, name, write)?;
    if !hidden.link(&target)? {
        return Err(StorageError::new(
            StorageErrorKind::LostRace,
            format!(
                "{} was written by another process meanwhile; this one stops, and its rows are kept by the other",
                target.display()
            ),
        ));
    }
    drop(hidden);
    sync_dir(dir)
}

/// A file under a hidden name, removed when dropped.
pub struct Hidden {
    path: PathBuf,
}

impl Hidden {
    /// Writes and syncs the file for `dir/name`.
    ///
    /// # Errors
    /// If it cannot be written; nothing is left behind then.
    pub fn write(
        dir: &Path,
        name: &str,
        write: impl FnOnce(&mut BufWriter<File>) -> Result<(), StorageError>,
    ) -> Result<Self, StorageError> {
        // A pid alone is not unique: one process may have two sinks, and containers that share a
        // volume count their pids separately.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let process = std::process::id();
        let (path, file) = loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = dir.join(format!(".{name}.{process}-{count}.tmp"));
            match File::create_new(&path) {
                Ok(file) => break (path, file),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(StorageError::write(&dir.join(name), error)),
            }
        };
        let hidden = Self { path };
        let failed = |error| StorageError::write(&dir.join(name), error);
        let mut out = BufWriter::with_capacity(1 << 20, file);
        write(&mut out)?;
        out.flush().map_err(failed)?;
        out.get_ref().sync_all().map_err(failed)?;
        Ok(hidden)
    }

    /// Links the file to a second name; `false` if that is taken.
    ///
    /// # Errors
    /// If the file system has no links, or refuses.
    pub fn link(&self, target: &Path) -> Result<bool, StorageError> {
        match fs::hard_link(&self.path, target) {
            Ok(()) => Ok(true),
            // NFS may lose the answer to a successful link, and repeat it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(same_file(&self.path, target))
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied
                ) =>
            {
                Err(StorageError::new(
                    StorageErrorKind::WriteFailed,
                    format!(
                        "failed to link {}: {error}; parts need a file system with hard links, choose another --output",
                        target.display()
                    ),
                ))
            }
            Err(error) => Err(StorageError::write(target, error)),
        }
    }

    /// Replaces `target`.
    ///
    /// # Errors
    /// If it cannot be renamed.
    pub fn replace(self, target: &Path) -> Result<(), StorageError> {
        fs::rename(&self.path, target).map_err(|error| StorageError::write(target, error))
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // It may have been renamed; otherwise the next run removes it.
        drop(fs::remove_file(&self.path));
    }
}

fn same_file(one: &Path, other: &Path) -> bool {
    let identity = |path| fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()));
    matches!((identity(one), identity(other)), (Ok(one), Ok(other)) if one == other)
}

/// Checks that files can be written to `dir` and linked there; leaves nothing.
///
/// # Errors
/// If they cannot.
pub fn probe(dir: &Path) -> Result<(), StorageError> {
    let probe = Hidden::write(dir, "trommel-probe", |_| Ok(()))?;
    let linked = Hidden {
        path: probe.path.with_extension("linked.tmp"),
    };
    probe.link(&linked.path).map(drop)
}

/// Makes the names in a directory durable.
///
/// # Errors
/// If it cannot be opened or synced.
pub fn sync_dir(dir: &Path) -> Result<(), StorageError> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(|error| StorageError::write(dir, error))
}

/// Removes a file, if it exists.
pub(super) fn remove(path: &Path) -> Result<(), StorageError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(StorageError::write(path, error))
        }
        _ => Ok(()),
    }
}

/// Whether a name is that of a hidden file left by a crash.
pub(super) fn is_leftover(name: &OsStr) -> bool {
    name.to_str()
        .is_some_and(|name| name.starts_with('.') && name.ends_with(".tmp"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    fn put(dir: &Path, text: &[u8]) -> Result<(), StorageError> {
        create_if_absent(dir, "x", |out| {
            out.write_all(text)
                .map_err(|error| StorageError::write(dir, error))
        })
    }

    #[test]
    fn of_many_writers_of_one_name_exactly_one_wins() {
        let dir = tempfile::tempdir().unwrap();
        let results: Vec<_> = std::thread::scope(|scope| {
            let dir = dir.path();
            let threads: Vec<_> = (0..16_u8)
                .map(|writer| scope.spawn(move || (writer, put(dir, &vec![writer; 100_000]))))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let winners: Vec<_> = results
            .iter()
            .filter(|(_, result)| result.is_ok())
            .collect();
        assert_eq!(winners.len(), 1);
        for (_, result) in &results {
            let lost = |error: &StorageError| error.kind() == StorageErrorKind::LostRace;
            assert!(result.is_ok() || result.as_ref().is_err_and(lost));
        }
        assert_eq!(
            fs::read(dir.path().join("x")).unwrap(),
            vec![winners[0].0; 100_000]
        );
        assert_eq!(names(dir.path()), ["x"]);
    }

    #[test]
    fn a_disk_that_fills_up_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let error = create_if_absent(dir.path(), "part-00000000.csv", |out| {
            out.write_all(&[0; 4096]).unwrap();
            out.flush().unwrap();
            let full = io::Error::from(io::ErrorKind::StorageFull);
            Err(StorageError::write(
                &dir.path().join("part-00000000.csv"),
                full,
            ))
        })
        .unwrap_err();
        assert_eq!(error.kind(), StorageErrorKind::NoSpace);
        assert!(error.to_string().contains("part-00000000.csv"), "{error}");
        assert!(error.to_string().contains("same command"), "{error}");
        assert!(names(dir.path()).is_empty(), "{:?}", names(dir.path()));
    }

    #[test]
    fn a_probe_leaves_nothing_and_names_what_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        probe(dir.path()).unwrap();
        assert!(names(dir.path()).is_empty());
        let error = probe(&dir.path().join("absent")).unwrap_err();
        assert!(error.to_string().contains("absent"), "{error}");
    }
}
