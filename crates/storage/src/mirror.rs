//! Local copies of folders in a bucket.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::s3::{Entry, Location, Object, S3};
use crate::{S3Config, StorageError, StorageErrorKind, background};

/// Bytes per request.
const PIECE: u64 = 32 << 20;
/// The file with the versions of a folder's files.
const VERSIONS: &str = ".versions.json";
const LOCK: &str = ".lock";

/// A bucket prefix whose folders are copied to this machine on demand. Several processes may share
/// the copy. Blocking.
pub struct Mirror {
    s3: S3,
    prefix: Location,
    root: PathBuf,
}

impl Mirror {
    /// Copies folders below `uri` (`s3://bucket/prefix`) to `root`; `None` if it is not in a
    /// bucket.
    pub fn of(uri: &str, root: &Path, config: &S3Config) -> Option<Self> {
        let mut prefix = Location::parse(uri)?;
        if !prefix.key.is_empty() && !prefix.key.ends_with('/') {
            prefix.key.push('/');
        }
        Some(Self {
            s3: S3::new(config),
            prefix,
            root: root.to_owned(),
        })
    }

    /// The folder of the copies.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Names of the folders directly below the prefix.
    ///
    /// # Errors
    /// If the bucket cannot be listed.
    pub fn folders(&self) -> Result<Vec<String>, StorageError> {
        let (mut folders, mut token) = (Vec::new(), None);
        loop {
            let level = background::wait(self.s3.list_level(&self.prefix, None, token))?;
            folders.extend(level.entries.iter().filter_map(|entry| match entry {
                Entry::Folder(folder) => {
                    let name = &folder[self.prefix.key.len()..];
                    Some(name.trim_end_matches('/').to_owned())
                }
                Entry::Object(_) => None,
            }));
            token = level.next;
            if token.is_none() {
                return Ok(folders);
            }
        }
    }

    /// Updates the copy of one folder to the bucket's current contents. Unchanged files are not
    /// fetched again.
    ///
    /// # Errors
    /// If the bucket cannot be read, or the copy cannot be written.
    pub fn update(&self, folder: &str) -> Result<(), StorageError> {
        let dir = self.root.join(folder);
        let failed = |error| StorageError::write(&dir, error);
        fs::create_dir_all(&dir).map_err(failed)?;
        let lock = File::create(dir.join(LOCK)).map_err(failed)?;
        lock.lock().map_err(failed)?;
        let known: BTreeMap<String, String> = fs::read(dir.join(VERSIONS))
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        let mut versions = BTreeMap::new();
        let prefix = self
            .prefix
            .with_key(format!("{}{folder}/", self.prefix.key));
        let mut token = None;
        loop {
            let page = background::wait(self.s3.list(&prefix, None, token))?;
            for object in page.objects {
                let name = object.key[prefix.key.len()..].to_owned();
                if name.is_empty() || name.ends_with('/') {
                    continue;
                }
                if name.split('/').any(|part| ["", ".", ".."].contains(&part)) {
                    return Err(StorageError::new(
                        StorageErrorKind::InvalidSource,
                        format!("{} is no name of a file", prefix.with_key(object.key).uri()),
                    ));
                }
                let version = format!("{} {}", object.size, object.etag.as_deref().unwrap_or("?"));
                let path = dir.join(&name);
                if known.get(&name) != Some(&version) || !path.exists() {
                    self.fetch(&prefix, &object, &path)?;
                }
                versions.insert(name, version);
            }
            token = page.next;
            if token.is_none() {
                break;
            }
        }
        for gone in known.keys().filter(|name| !versions.contains_key(*name)) {
            match fs::remove_file(dir.join(gone)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
                _ => {}
            }
        }
        let text = serde_json::to_vec(&versions).expect("names and versions are text");
        replace(&dir.join(VERSIONS), |out| out.write_all(&text))
    }

    fn fetch(&self, prefix: &Location, object: &Object, path: &Path) -> Result<(), StorageError> {
        let place = prefix.with_key(object.key.clone());
        replace(path, |out| {
            let mut start = 0;
            while start < object.size {
                let length = PIECE.min(object.size - start);
                let (range, etag) = (Some((start, length)), object.etag.as_deref());
                let piece = self.s3.get_version(&place, range, etag, length);
                out.write_all(&background::wait(piece).map_err(io::Error::other)?)?;
                start += length;
            }
            Ok(())
        })
    }
}

/// Writes a file atomically.
fn replace(
    path: &Path,
    write: impl FnOnce(&mut NamedTempFile) -> io::Result<()>,
) -> Result<(), StorageError> {
    let failed = |error| StorageError::write(path, error);
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir).map_err(failed)?;
    let mut file = NamedTempFile::new_in(dir).map_err(failed)?;
    write(&mut file).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}
