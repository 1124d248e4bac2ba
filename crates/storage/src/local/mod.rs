//! Objects as files in a folder.

mod files;

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use tokio::sync::mpsc::{self, Sender};

pub use self::files::{Hidden, probe, sync_dir};
use self::files::{create_if_absent, is_leftover, remove};
use crate::s3::Object;
use crate::{Get, ObjectStore, StorageError, StorageErrorKind};

/// Files that a listing buffers ahead of its reader.
const AHEAD: usize = 256;

/// A folder as a store: keys are paths below it. The folder is created with the first object.
#[derive(Debug, Clone)]
pub struct LocalStore {
    root: PathBuf,
}

impl LocalStore {
    /// The store in this folder.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    async fn write(
        &self,
        key: &str,
        content: Bytes,
        only_if_absent: bool,
    ) -> Result<(), StorageError> {
        let path = self.root.join(key);
        blocking(move || {
            let dir = path.parent().unwrap_or(Path::new("."));
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            create_dir(dir)?;
            let fill = |out: &mut io::BufWriter<File>| {
                out.write_all(&content)
                    .map_err(|error| StorageError::write(&path, error))
            };
            if only_if_absent {
                return create_if_absent(dir, &name, fill);
            }
            Hidden::write(dir, &name, fill)?.replace(&path)?;
            sync_dir(dir)
        })
        .await
    }
}

#[async_trait]
impl ObjectStore for LocalStore {
    fn locate(&self, key: &str) -> String {
        self.root.join(key).display().to_string()
    }

    fn within(&self, folder: &str) -> Arc<dyn ObjectStore> {
        Arc::new(Self::new(self.root.join(folder)))
    }

    async fn get(&self, key: &str, wanted: Get) -> Result<Bytes, StorageError> {
        let path = self.root.join(key);
        blocking(move || read(&path, &wanted)).await
    }

    fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
    ) -> BoxStream<'static, Result<Object, StorageError>> {
        let (sender, receiver) = mpsc::channel(AHEAD);
        let walk = Walk {
            root: self.root.clone(),
            prefix: prefix.to_owned(),
            after: after.map(str::to_owned),
            found: sender,
        };
        // It ends when the receiver is dropped.
        tokio::task::spawn_blocking(move || walk.folder(String::new()));
        futures::stream::unfold(receiver, async |mut receiver| {
            Some((receiver.recv().await?, receiver))
        })
        .boxed()
    }

    async fn put_if_absent(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.write(key, content, true).await
    }

    async fn put(&self, key: &str, content: Bytes) -> Result<(), StorageError> {
        self.write(key, content, false).await
    }

    /// Only the call itself is between the last check of the file and the rename: file systems have
    /// no compare-and-rename.
    async fn replace(&self, key: &str, old: &Bytes, content: Bytes) -> Result<(), StorageError> {
        let (path, old) = (self.root.join(key), old.clone());
        blocking(move || {
            if holds(&path, &old, &content)? {
                return Ok(());
            }
            let dir = path.parent().unwrap_or(Path::new("."));
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let hidden = Hidden::write(dir, &name, |out| {
                out.write_all(&content)
                    .map_err(|error| StorageError::write(&path, error))
            })?;
            if !holds(&path, &old, &content)? {
                hidden.replace(&path)?;
            }
            sync_dir(dir)
        })
        .await
    }

    async fn delete(&self, key: &str) -> Result<(), StorageError> {
        let path = self.root.join(key);
        blocking(move || remove(&path)).await
    }

    async fn honours_preconditions(&self, _: &str, _: Bytes) -> Result<bool, StorageError> {
        let root = self.root.clone();
        blocking(move || probe(&root)).await?;
        Ok(true)
    }

    async fn tidy(&self) -> Result<(), StorageError> {
        let root = self.root.clone();
        blocking(move || {
            let names = entries(&root)?.into_iter().map(|(name, _)| name);
            names
                .filter(|name| is_leftover(name.as_ref()))
                .try_for_each(|name| remove(&root.join(name)))
        })
        .await
    }
}

/// Whether a file already has `content` instead of `old`.
///
/// # Errors
/// [`LostRace`](StorageErrorKind::LostRace) if it has neither.
fn holds(path: &Path, old: &Bytes, content: &Bytes) -> Result<bool, StorageError> {
    match fs::read(path) {
        Ok(found) if found == *content => Ok(true),
        Ok(found) if found == *old => Ok(false),
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(StorageError::read(path.display(), error))
        }
        Ok(_) | Err(_) => Err(StorageError::lost_race(path.display())),
    }
}

/// Runs `work` on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StorageError> + Send + 'static,
) -> Result<T, StorageError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| {
        Err(StorageError::unavailable(
            "a request ended without an answer",
        ))
    })
}

/// Creates a folder. Its name is durable on return.
///
/// # Errors
/// If it cannot be created or synced.
pub fn create_dir(dir: &Path) -> Result<(), StorageError> {
    if dir.is_dir() {
        return Ok(());
    }
    let missing: Vec<_> = dir
        .ancestors()
        .take_while(|folder| !folder.is_dir())
        .collect();
    fs::create_dir_all(dir).map_err(|error| StorageError::write(dir, error))?;
    let parents = missing.iter().filter_map(|folder| folder.parent());
    parents
        .map(|parent| match parent.as_os_str().is_empty() {
            true => Path::new("."),
            false => parent,
        })
        .try_for_each(sync_dir)
}

fn read(path: &Path, wanted: &Get) -> Result<Bytes, StorageError> {
    let failed = |error| StorageError::read(path.display(), error);
    let mut file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if wanted.if_match.is_some() && wanted.if_match != Some(etag(&metadata)) {
        return Err(StorageError::changed(path.display()));
    }
    let size = metadata.len();
    let range = wanted.range.clone().unwrap_or(0..size);
    let length = range.end.saturating_sub(range.start);
    if let Some(limit) = wanted.at_most.filter(|limit| length > *limit) {
        return Err(StorageError::too_large(path.display(), length, limit));
    }
    if range.end > size {
        return Err(StorageError::new(
            StorageErrorKind::NotAFile,
            format!(
                "failed to read {}: it ends before the requested bytes",
                path.display()
            ),
        ));
    }
    file.seek(SeekFrom::Start(range.start)).map_err(failed)?;
    let mut content = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    file.take(length)
        .read_to_end(&mut content)
        .map_err(failed)?;
    Ok(content.into())
}

/// A file has no version; its size and time replace it.
fn etag(metadata: &fs::Metadata) -> String {
    format!(
        "{:x}-{:x}-{:x}",
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec()
    )
}

/// Names in a folder, and whether each is a folder; empty if the folder does not exist.
fn entries(dir: &Path) -> Result<Vec<(String, bool)>, StorageError> {
    let failed = |error| StorageError::read(format!("folder {}", dir.display()), error);
    let listed = match fs::read_dir(dir) {
        Ok(listed) => listed,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    listed
        .map(|entry| {
            let entry = entry.map_err(failed)?;
            let is_dir = entry.file_type().map_err(failed)?.is_dir();
            Ok((entry.file_name().to_string_lossy().into_owned(), is_dir))
        })
        .collect()
}

/// A listing in progress.
struct Walk {
    root: PathBuf,
    prefix: String,
    after: Option<String>,
    found: Sender<Result<Object, StorageError>>,
}

impl Walk {
    /// Lists a folder, whose key ends with a slash; `None` if the receiver is gone.
    fn folder(&self, folder: String) -> Option<()> {
        let mut keys: Vec<(String, bool)> = match entries(&self.root.join(&folder)) {
            Ok(entries) => entries
                .into_iter()
                .filter(|(name, _)| !is_leftover(name.as_ref()))
                .map(|(name, is_dir)| {
                    let slash = if is_dir { "/" } else { "" };
                    (format!("{folder}{name}{slash}"), is_dir)
                })
                .collect(),
            Err(error) => return self.found.blocking_send(Err(error)).ok(),
        };
        // The slash of folders gives the order of keys.
        keys.sort_unstable();
        for (key, is_dir) in keys {
            if is_dir {
                if key.starts_with(&self.prefix) || self.prefix.starts_with(&key) {
                    self.folder(key)?;
                }
            } else if key.starts_with(&self.prefix)
                && self.after.as_ref().is_none_or(|after| key > *after)
            {
                self.file(key)?;
            }
        }
        Some(())
    }

    fn file(&self, key: String) -> Option<()> {
        let path = self.root.join(&key);
        let object = match fs::symlink_metadata(&path) {
            Ok(metadata) => Ok(Object {
                key,
                size: metadata.len(),
                etag: Some(etag(&metadata)),
            }),
            // It was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Some(()),
            Err(error) => Err(StorageError::read(path.display(), error)),
        };
        self.found.blocking_send(object).ok()
    }
}
