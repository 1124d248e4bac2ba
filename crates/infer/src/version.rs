//! The version of a model folder by content, and whether it may have changed.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, io};

use sha2::{Digest, Sha256};

use crate::config::ModelConfig;
use crate::onnx_file::{OnnxFile, hex};
use crate::towers;
use crate::{InferError, InferErrorKind, Prompt};

/// Places of the model's file in its folder, in order of preference.
const FILES: [&str; 4] = [
    "vision_model.onnx",
    "onnx/vision_model.onnx",
    "model.onnx",
    "onnx/model.onnx",
];

/// Files next to it that affect preprocessing and class names.
const SETTINGS: [&str; 4] = [
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "trommel.toml",
];

/// Hex digits of a version.
pub(crate) const VERSION_DIGITS: usize = 12;

/// The files that determine a model's version, with their metadata. Two equal fingerprints mean the
/// same content, unless somebody forges file times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint(Vec<(PathBuf, Option<Stat>)>);

/// Metadata that changes when a file is written or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Fingerprint {
    /// Whether no file has been written, replaced, added or removed since. Cheap: only reads the
    /// metadata of files.
    pub fn is_current(&self) -> bool {
        let Self(files) = self;
        files.iter().all(|(path, stat)| Stat::of(path) == *stat)
    }
}

impl Stat {
    /// `None` for a missing file.
    fn of(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        Some(Self {
            device: found.dev(),
            inode: found.ino(),
            bytes: found.size(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        })
    }
}

/// The fingerprint of the model in the folder `dir`. Blocks while it reads the model's graph, but not
/// its weights; afterwards [`Fingerprint::is_current`] is enough.
///
/// # Errors
/// If a file is missing or malformed.
pub fn fingerprint(dir: &Path) -> Result<Fingerprint, InferError> {
    check_folder(dir)?;
    if Prompt::is_in(dir) {
        let toml = seen(dir.join("trommel.toml"));
        let files = Prompt::open(dir)?.files().to_vec();
        let files = files.into_iter().map(seen);
        return Ok(Fingerprint([toml].into_iter().chain(files).collect()));
    }
    // Examined before it is read, so that concurrent changes are detected.
    let settings = SETTINGS.map(|name| seen(dir.join(name)));
    let config = ModelConfig::read(dir)?;
    let path = find_file(dir, config.file.as_deref())?;
    // A preferred file may be added.
    let models = candidates(dir, config.file.as_deref());
    let mut files: Vec<_> = settings
        .into_iter()
        .chain(models.into_iter().map(seen))
        .collect();
    files.extend(config.label_file.map(seen));
    files.extend(towers::beside(dir).map(seen));
    let folder = path.parent().unwrap_or(dir);
    let external = OnnxFile::describe(&path)?.external;
    files.extend(external.iter().map(|name| seen(folder.join(name))));
    Ok(Fingerprint(files))
}

fn seen(path: PathBuf) -> (PathBuf, Option<Stat>) {
    let stat = Stat::of(&path);
    (path, stat)
}

/// The version of the model in the folder `dir`, as in [`Model::version`](crate::Model::version),
/// without opening a session.
///
/// Blocks while it reads the files, which takes seconds for a large model: call it on a thread that
/// may block. A later call is cheap while no file has changed.
///
/// # Errors
/// If a file is missing or malformed.
pub fn version(dir: &Path) -> Result<Arc<str>, InferError> {
    type Known = HashMap<PathBuf, (Fingerprint, Arc<str>)>;
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let earlier = known().as_ref().and_then(|known| known.get(dir).cloned());
    if let Some((fingerprint, version)) = earlier
        && fingerprint.is_current()
    {
        return Ok(version);
    }
    let fingerprint = fingerprint(dir)?;
    let version = match Prompt::is_in(dir) {
        true => Arc::clone(Prompt::open(dir)?.version()),
        false => {
            let config = ModelConfig::read(dir)?;
            let path = find_file(dir, config.file.as_deref())?;
            version_of(dir, &OnnxFile::read(&path)?, &config.labels)?
        }
    };
    if fingerprint.is_current() {
        let entry = (fingerprint, Arc::clone(&version));
        known()
            .get_or_insert_default()
            .insert(dir.to_owned(), entry);
    }
    Ok(version)
}

pub(crate) fn version_of(
    dir: &Path,
    file: &OnnxFile,
    labels: &[Arc<str>],
) -> Result<Arc<str>, InferError> {
    let mut hash = Sha256::new();
    // Preceded by its length, no text can be confused with the beginning of the next one.
    let mut add = |text: &[u8]| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    add(file.hash.as_bytes());
    for name in SETTINGS {
        let path = dir.join(name);
        match fs::read(&path) {
            Ok(text) => {
                add(name.as_bytes());
                add(&text);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(InferError::new(
                    InferErrorKind::ModelMissing,
                    format_args!("{} cannot be read: {error}", path.display()),
                ));
            }
        }
    }
    labels.iter().for_each(|label| add(label.as_bytes()));
    for path in towers::beside(dir).filter(|path| path.is_file()) {
        add(&digest(&path)?);
    }
    let mut digits = hex(&hash.finalize());
    digits.truncate(VERSION_DIGITS);
    Ok(digits.into())
}

/// SHA-256 of a file.
pub(crate) fn digest(path: &Path) -> Result<Vec<u8>, InferError> {
    let mut hash = Sha256::new();
    let copied =
        fs::File::open(path).and_then(|mut file| io::copy(&mut file, &mut Hashed(&mut hash)));
    match copied {
        Ok(_) => Ok(hash.finalize().to_vec()),
        Err(error) => Err(InferError::new(
            InferErrorKind::ModelMissing,
            format_args!("{} cannot be read: {error}", path.display()),
        )),
    }
}

/// Feeds written bytes into a hash.
struct Hashed<'a>(&'a mut Sha256);

impl io::Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) fn check_folder(dir: &Path) -> Result<(), InferError> {
    let problem = match fs::metadata(dir) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => "is not a folder; give the folder with model.onnx and config.json".to_owned(),
        Err(error) => format!("cannot be read: {error}"),
    };
    Err(InferError::new(
        InferErrorKind::ModelMissing,
        format_args!("model folder {} {problem}", dir.display()),
    ))
}

pub(crate) fn find_file(dir: &Path, configured: Option<&Path>) -> Result<PathBuf, InferError> {
    let candidates = candidates(dir, configured);
    if let Some(path) = candidates.iter().find(|path| path.is_file()) {
        return Ok(path.clone());
    }
    let looked: Vec<_> = candidates
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let others = other_models(dir);
    let remedy = if others.is_empty() {
        "export the model to ONNX there".to_owned()
    } else {
        format!(
            "the folder holds {}: choose one with file = \"…\" in the section [model] of its \
             trommel.toml",
            others.join(", ")
        )
    };
    Err(InferError::new(
        InferErrorKind::ModelMissing,
        format_args!("there is no model file {}; {remedy}", looked.join(" or ")),
    ))
}

/// ONNX files with other names, as in folders with several precisions of a model.
fn other_models(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = ["", "onnx"]
        .iter()
        .filter_map(|folder| fs::read_dir(dir.join(folder)).ok())
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "onnx")
        })
        .filter_map(|path| Some(path.strip_prefix(dir).ok()?.display().to_string()))
        .collect();
    names.sort();
    names
}

/// Possible locations of the model's file, in order of preference.
fn candidates(dir: &Path, configured: Option<&Path>) -> Vec<PathBuf> {
    match configured {
        Some(file) => vec![dir.join(file)],
        None => FILES.iter().map(|file| dir.join(file)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str) -> tempfile::TempDir {
        let from = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/models")
            .join(name);
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let file = entry.unwrap().path();
            fs::copy(&file, dir.path().join(file.file_name().unwrap())).unwrap();
        }
        dir
    }

    /// R10, R47: a model that was replaced in place kept its old version.
    #[test]
    fn any_file_that_decides_the_version_is_noticed() {
        let dir = model("external");
        for (name, content) in [
            ("weights.bin", None),
            ("config.json", None),
            ("model.onnx", None),
            ("trommel.toml", Some("[model]\nlabels = \"names.txt\"")),
            ("names.txt", Some("rot\ngreen\nblue")),
        ] {
            let file = dir.path().join(name);
            if name == "trommel.toml" {
                fs::write(dir.path().join("names.txt"), "red\ngreen\nblue").unwrap();
            }
            let before = fingerprint(dir.path()).unwrap();
            assert!(before.is_current());
            assert_eq!(before, fingerprint(dir.path()).unwrap());
            let content = content.map_or_else(|| fs::read(&file).unwrap(), Into::into);
            // The proper way: the new file is renamed over the old one.
            let new = dir.path().join("new");
            fs::write(&new, content).unwrap();
            fs::rename(&new, &file).unwrap();
            assert!(!before.is_current(), "{name}");
        }
    }

    #[test]
    fn a_version_is_read_again_when_a_file_was_replaced() {
        let dir = model("nchw_f32");
        let first = version(dir.path()).unwrap();
        assert!(
            Arc::ptr_eq(&first, &version(dir.path()).unwrap()),
            "it is remembered"
        );
        fs::write(dir.path().join("trommel.toml"), "[model]\nthreshold = 0.5").unwrap();
        let second = version(dir.path()).unwrap();
        assert_ne!(first, second);
        fs::remove_file(dir.path().join("trommel.toml")).unwrap();
        assert_eq!(version(dir.path()).unwrap(), first);
    }
}
