//! Models by their names on the Hugging Face Hub, or on a compatible server.
//!
//! [`HubName`] is `hf:org/NAME[@REVISION]`. [`fetch`] asks the hub for the contents of the
//! repository, chooses the ONNX file of a precision, downloads it with its configuration into the
//! hub's own cache, which Python's clients share, and returns a folder that Trommel opens like any
//! other.
//!
//! Environment variables, as in the hub's own clients: `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`,
//! `HF_HOME`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`.

mod cache;
mod choice;
mod client;
mod download;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};

use self::cache::Snapshot;
pub(crate) use self::choice::Dtype;
use self::client::{Asked, Client, Info};
use self::download::Progress;
use crate::config::cache_folder;

/// The prefix of a name.
const SCHEME: &str = "hf:";

/// Configuration files of a model.
const SETTINGS: [&str; 6] = [
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    // For models with a text tower.
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
];

/// A model given by a flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ModelName {
    /// A folder on this machine.
    Folder(PathBuf),
    /// A repository of the hub.
    Hub(HubName),
}

/// A repository and a revision of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HubName {
    /// `org/NAME`, or `NAME` alone.
    pub(crate) repository: String,
    /// A branch, a tag or a commit.
    pub(crate) revision: String,
}

impl FromStr for ModelName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix(SCHEME) {
            Some(name) => name.parse().map(Self::Hub),
            None => Ok(Self::Folder(PathBuf::from(text))),
        }
    }
}

impl FromStr for HubName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.strip_prefix(SCHEME).unwrap_or(text);
        let (repository, revision) = text.split_once('@').unwrap_or((text, "main"));
        let is_part = |part: &str| {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            !part.is_empty() && !part.starts_with('.') && part.bytes().all(fits)
        };
        let parts: Vec<_> = repository.split('/').collect();
        if parts.len() > 2 || !parts.iter().all(|part| is_part(part)) {
            return Err(format!(
                "{SCHEME}{text} is invalid: expected hf:ORGANISATION/NAME or hf:ORGANISATION/NAME@REVISION"
            ));
        }
        if !revision.split('/').all(is_part) {
            return Err(format!(
                "the revision {revision:?} of {SCHEME}{text} is invalid"
            ));
        }
        Ok(Self {
            repository: repository.to_owned(),
            revision: revision.to_owned(),
        })
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.repository)?;
        match &*self.revision {
            "main" => Ok(()),
            revision => write!(f, "@{revision}"),
        }
    }
}

impl ModelName {
    /// The model's folder. A model of the hub is fetched first, which blocks.
    ///
    /// # Errors
    /// If the folder does not exist, with what was probably meant; or as [`fetch`].
    pub(crate) fn folder(&self, dtype: Option<Dtype>, quiet: bool) -> Result<PathBuf> {
        match (self, dtype) {
            (Self::Hub(name), _) => fetch(name, dtype, quiet),
            (Self::Folder(_), Some(_)) => bail!(
                "--dtype chooses a file of a model of the hub (hf:…); for a folder, set file = \"…\" in the section [model] of its trommel.toml"
            ),
            (Self::Folder(dir), None) if dir.is_dir() => Ok(dir.clone()),
            (Self::Folder(dir), None) => bail!("{}", not_a_folder(dir)),
        }
    }
}

/// Why a folder cannot be opened, with the next step.
fn not_a_folder(dir: &Path) -> String {
    let shown = dir.display();
    if dir.is_file() {
        let folder = dir.parent().filter(|parent| *parent != Path::new(""));
        let folder = folder.unwrap_or(Path::new("."));
        return format!(
            "model {shown} is a file; give the folder of it and config.json: --model {}",
            folder.display()
        );
    }
    let as_name = dir.to_str().and_then(|text| text.parse::<HubName>().ok());
    match as_name.filter(|name| name.repository.contains('/')) {
        Some(name) => format!(
            "model {shown} does not exist; for the model of that name on the Hugging Face Hub give --model {name}, or export it: python models/export.py {} --output {}",
            name.repository,
            folder_for(&name.repository)
        ),
        None => format!(
            "model {shown} does not exist; give a folder with model.onnx and config.json, or hf:ORGANISATION/NAME (docs/models.md)"
        ),
    }
}

/// The folder that a model of this name is exported to.
fn folder_for(repository: &str) -> String {
    let name = repository.rsplit('/').next().unwrap_or(repository);
    format!("models/{name}")
}

/// Fetches a model of the hub into the cache, and returns the folder to open it from.
///
/// Blocks. A download that was cut off is resumed, in this call or a later one.
///
/// # Errors
/// If the repository does not exist, needs a token, or has no ONNX file of this precision, or if a
/// file arrives damaged; each with the next step.
pub(crate) fn fetch(name: &HubName, dtype: Option<Dtype>, quiet: bool) -> Result<PathBuf> {
    let settings = client::Settings::from_env()?;
    let cache = settings.cache.clone();
    let client = Client::new(settings)?;
    let info = match client.info(name)? {
        Asked::Hub(info) => info,
        Asked::Unreachable(why) => {
            let info = Snapshot::cached(&cache, name)
                .and_then(|snapshot| Info::of_snapshot(&snapshot))
                .with_context(|| format!("{name} is not in the cache {}, and {why}; check the network, or give a local folder", cache.display()))?;
            if !client.is_offline() {
                tracing::warn!("{name}: {why}; the copy in {} is used", cache.display());
            }
            info
        }
    };
    let names: Vec<&str> = info.files.keys().map(String::as_str).collect();
    let onnx = choice::choose(&names, dtype, name)?;
    let snapshot = Snapshot::new(&cache, name, &info.commit)?;
    let mut progress = Progress::new(quiet);
    let mut files = BTreeMap::new();
    let bring = |path: &str, progress: &mut Progress| -> Result<PathBuf> {
        let file = &info.files[path];
        download::bring(&client, &snapshot, name, path, file, progress)
    };
    for setting in SETTINGS
        .iter()
        .filter(|path| info.files.contains_key(**path))
    {
        files.insert((*setting).to_owned(), bring(setting, &mut progress)?);
    }
    let model = bring(onnx, &mut progress)?;
    let folder = onnx.rsplit_once('/').map_or("", |(folder, _)| folder);
    for data in trommel_infer::external_data(&model)? {
        let path = match folder {
            "" => data.clone(),
            folder => format!("{folder}/{data}"),
        };
        if !info.files.contains_key(&path) {
            bail!("{name}: {onnx} keeps weights in {path}, which is not in the repository");
        }
        files.insert(data, bring(&path, &mut progress)?);
    }
    files.insert("model.onnx".to_owned(), model);
    snapshot.note(name)?;
    view(name, &info.commit, onnx, &files)
}

/// A folder in Trommel's own cache with links to these files under their usual names in a model's
/// folder.
fn view(
    name: &HubName,
    commit: &str,
    onnx: &str,
    files: &BTreeMap<String, PathBuf>,
) -> Result<PathBuf> {
    let (owner, short) = name
        .repository
        .split_once('/')
        .unwrap_or(("", &name.repository));
    let stem = onnx.trim_end_matches(".onnx").replace('/', "-");
    let revision = cache_folder()
        .join("hub")
        .join(owner)
        .join(format!("{commit}-{stem}"));
    // The last component is the model's name in rows.
    let folder = revision.join(short);
    let is_whole = files
        .iter()
        .all(|(file, blob)| fs::read_link(folder.join(file)).is_ok_and(|link| link == *blob));
    if is_whole {
        return Ok(folder);
    }
    let failed = || format!("failed to write {}", folder.display());
    fs::create_dir_all(&revision).with_context(failed)?;
    let new = tempfile::tempdir_in(&revision).with_context(failed)?;
    for (file, blob) in files {
        let link = new.path().join(file);
        if let Some(parent) = link.parent() {
            fs::create_dir_all(parent).with_context(failed)?;
        }
        std::os::unix::fs::symlink(blob, link).with_context(failed)?;
    }
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(failed);
        }
        _ => {}
    }
    fs::rename(new.keep(), &folder).with_context(failed)?;
    Ok(folder)
}

/// Copies a model's folder, including the targets of its links.
///
/// # Errors
/// If `to` already exists, or cannot be written.
pub(crate) fn copy(folder: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        bail!(
            "{} already exists; give a new folder with --output",
            to.display()
        );
    }
    let parent = to.parent().filter(|parent| *parent != Path::new(""));
    let parent = parent.unwrap_or(Path::new("."));
    let failed = || format!("failed to write {}", to.display());
    fs::create_dir_all(parent).with_context(failed)?;
    let new = tempfile::tempdir_in(parent).with_context(failed)?;
    let entries = folder.read_dir();
    for entry in entries.with_context(|| format!("failed to read {}", folder.display()))? {
        let entry = entry?;
        fs::copy(entry.path(), new.path().join(entry.file_name())).with_context(failed)?;
    }
    // A folder of `tempdir` is private; the model need not be.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(new.path(), mode).with_context(failed)?;
    fs::rename(new.keep(), to).with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_shown() {
        let parse = |text: &str| text.parse::<ModelName>();
        let hub = |repository: &str, revision: &str| {
            Ok(ModelName::Hub(HubName {
                repository: repository.to_owned(),
                revision: revision.to_owned(),
            }))
        };
        assert_eq!(parse("hf:google/vit-base"), hub("google/vit-base", "main"));
        assert_eq!(parse("hf:vit@v1.0"), hub("vit", "v1.0"));
        assert_eq!(parse("hf:a/b@refs/pr/1"), hub("a/b", "refs/pr/1"));
        let folder = ModelName::Folder(PathBuf::from("models/vit"));
        assert_eq!(parse("models/vit"), Ok(folder));
        for text in [
            "hf:",
            "hf:a/b/c",
            "hf:../b",
            "hf:a/..",
            "hf:a//b",
            "hf:a/b@",
            "hf:a/b@../x",
            "hf:a/b?c",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        let name: HubName = "a/b@dev".parse().unwrap();
        assert_eq!(name.to_string(), "hf:a/b@dev");
    }

    #[test]
    fn a_folder_that_is_none_is_answered_with_the_next_step() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.onnx");
        fs::write(&file, "").unwrap();
        let said = |path: &Path| {
            let name = ModelName::Folder(path.to_owned());
            name.folder(None, true).unwrap_err().to_string()
        };
        let text = said(&file);
        assert!(
            text.ends_with(&format!("--model {}", dir.path().display())),
            "{text}"
        );
        let text = said(Path::new("google/vit-base-patch16-224"));
        for words in [
            "--model hf:google/vit-base-patch16-224",
            "models/export.py google/vit-base-patch16-224 --output models/vit-base-patch16-224",
        ] {
            assert!(text.contains(words), "{text}");
        }
        let text = said(Path::new("/nowhere/at/all"));
        assert!(text.contains("docs/models.md"), "{text}");
    }
}
