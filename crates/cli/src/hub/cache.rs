//! The hub's cache on this machine, in the layout of the hub's own clients:
//!
//! ```text
//! models--org--NAME/refs/REVISION            the commit that a branch or a tag was at
//! models--org--NAME/blobs/HASH               the files by their hashes
//! models--org--NAME/snapshots/COMMIT/PATH    links to them
//! ```

use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::HubName;

/// One commit of a repository in the cache.
#[derive(Debug)]
pub(super) struct Snapshot {
    /// The repository's folder.
    root: PathBuf,
    /// The folder of locks, next to the repositories.
    locks: PathBuf,
    pub(super) commit: String,
}

impl Snapshot {
    /// # Errors
    /// If the commit is not a valid folder name.
    pub(super) fn new(cache: &Path, name: &HubName, commit: &str) -> Result<Self> {
        if commit.is_empty() || !commit.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            bail!("{name}: the hub returned the invalid commit {commit:?}");
        }
        let folder = format!("models--{}", name.repository.replace('/', "--"));
        Ok(Self {
            root: cache.join(&folder),
            locks: cache.join(".locks").join(folder),
            commit: commit.to_owned(),
        })
    }

    /// The commit of a revision when it was last fetched, or the revision itself.
    ///
    /// # Errors
    /// If it was never fetched.
    pub(super) fn cached(cache: &Path, name: &HubName) -> Result<Self> {
        let unknown = Self::new(cache, name, "unknown")?;
        let noted = fs::read_to_string(unknown.root.join("refs").join(&name.revision));
        let commit = noted.map_or_else(|_| name.revision.clone(), |text| text.trim().to_owned());
        let snapshot = Self::new(cache, name, &commit)?;
        match snapshot.folder().is_dir() {
            true => Ok(snapshot),
            false => bail!("revision {} was never fetched", name.revision),
        }
    }

    /// The folder of links.
    pub(super) fn folder(&self) -> PathBuf {
        self.root.join("snapshots").join(&self.commit)
    }

    /// The target of a file's link, if it is complete.
    pub(super) fn file(&self, path: &str) -> Option<PathBuf> {
        self.folder()
            .join(path)
            .canonicalize()
            .ok()
            .filter(|path| path.is_file())
    }

    /// The path of the content with this hash.
    pub(super) fn blob(&self, hash: &str) -> PathBuf {
        self.root.join("blobs").join(hash)
    }

    /// Locks the content with a hash, so that only one process fetches it. Blocks.
    pub(super) fn lock(&self, hash: &str) -> Result<File> {
        let path = self.locks.join(format!("{hash}.lock"));
        let failed = || format!("failed to lock {}", path.display());
        fs::create_dir_all(&self.locks).with_context(failed)?;
        let file = File::create(&path).with_context(failed)?;
        file.lock().with_context(failed)?;
        Ok(file)
    }

    /// Links a file to its content, and returns the content's path.
    pub(super) fn link(&self, path: &str, hash: &str) -> Result<PathBuf> {
        let link = self.folder().join(path);
        let failed = || format!("failed to write {}", link.display());
        let depth = Path::new(path).components().count() + 1;
        let mut target: PathBuf = std::iter::repeat_n("..", depth).collect();
        target.push("blobs");
        target.push(hash);
        if let Some(parent) = link.parent() {
            fs::create_dir_all(parent).with_context(failed)?;
        }
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(failed);
            }
            _ => {}
        }
        match std::os::unix::fs::symlink(&target, &link) {
            // Another process was faster, with the same content.
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(failed);
            }
            _ => {}
        }
        let blob = self.blob(hash);
        blob.canonicalize()
            .with_context(|| format!("failed to find {}", blob.display()))
    }

    /// Records the commit of the revision.
    pub(super) fn note(&self, name: &HubName) -> Result<()> {
        if name.revision == self.commit {
            return Ok(());
        }
        let path = self.root.join("refs").join(&name.revision);
        let failed = || format!("failed to write {}", path.display());
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(failed)?;
        }
        fs::write(&path, &self.commit).with_context(failed)
    }

    /// Paths of all files present, relative to the folder of links.
    pub(super) fn paths(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        list(&self.folder(), "", &mut found)?;
        Ok(found)
    }
}

fn list(folder: &Path, before: &str, found: &mut Vec<String>) -> Result<()> {
    let entries = folder.read_dir();
    for entry in entries.with_context(|| format!("failed to read {}", folder.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{before}{name}");
        match entry.file_type()?.is_dir() {
            true => list(&entry.path(), &format!("{path}/"), found)?,
            false => found.push(path),
        }
    }
    Ok(())
}

/// Whether a path stays within the repository.
pub(super) fn is_within(path: &str) -> bool {
    let mut parts = Path::new(path).components();
    !path.is_empty() && parts.all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_lie_where_the_hubs_clients_look_for_them() {
        let cache = tempfile::tempdir().unwrap();
        let name: HubName = "org/vit@refs/pr/1".parse().unwrap();
        assert!(Snapshot::cached(cache.path(), &name).is_err());
        let snapshot = Snapshot::new(cache.path(), &name, "c0ffee").unwrap();
        let root = cache.path().join("models--org--vit");
        fs::create_dir_all(root.join("blobs")).unwrap();
        fs::write(snapshot.blob("abc"), "content").unwrap();
        let blob = snapshot.link("onnx/model.onnx", "abc").unwrap();
        assert!(blob.ends_with("models--org--vit/blobs/abc"));
        let link = root.join("snapshots/c0ffee/onnx/model.onnx");
        assert_eq!(
            fs::read_link(&link).unwrap(),
            Path::new("../../../blobs/abc")
        );
        assert_eq!(fs::read_to_string(&link).unwrap(), "content");
        snapshot.note(&name).unwrap();
        assert_eq!(
            fs::read_to_string(root.join("refs/refs/pr/1")).unwrap(),
            "c0ffee"
        );
        let again = Snapshot::cached(cache.path(), &name).unwrap();
        assert_eq!(again.paths().unwrap(), ["onnx/model.onnx"]);
        assert_eq!(again.file("onnx/model.onnx"), Some(blob));
        assert_eq!(again.file("config.json"), None);
    }

    #[test]
    fn what_would_leave_the_cache_is_refused() {
        for path in ["", "/etc/passwd", "../x", "a/../../x", "./x"] {
            assert!(!is_within(path), "{path}");
        }
        assert!(is_within("onnx/model.onnx"));
        let name: HubName = "org/vit".parse().unwrap();
        for commit in ["", "..", "a/b"] {
            assert!(Snapshot::new(Path::new("cache"), &name, commit).is_err());
        }
    }
}
