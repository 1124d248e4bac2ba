//! Folders, recursively, and patterns of paths.

use std::ffi::OsString;
use std::fs::{self, FileType, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use trommel_storage::{StorageError, uri};

use crate::file::image_of;
use crate::kinds::Kind;
use crate::listing::{Listing, Stop, Visitor, probe};
use crate::options::{is_clutter, name_others};
use crate::pattern::{Pattern, Reached};
use crate::{Found, SourceOptions};

/// Most files examined to describe a folder without images.
const LOOKED_AT: u64 = 100_000;

/// The files below a folder that match a pattern, sorted by the bytes of their names, folder by
/// folder.
///
/// Links are followed, except to a folder that contains them. Memory holds the names of one folder
/// per level. A folder that cannot be read is listed as an image whose uri ends in `/`. Hidden
/// files, and those that macOS leaves next to others, are skipped unless a pattern names them.
pub(super) struct Folder {
    root: PathBuf,
    pattern: Pattern,
    /// Whether files are selected by suffix.
    by_suffix: bool,
}

impl Folder {
    /// All files below a folder, selected by suffix.
    ///
    /// # Errors
    /// If the folder cannot be read, or has no matching files.
    pub(super) fn open(root: &Path, options: &SourceOptions) -> Result<Self, StorageError> {
        let folder = Self {
            root: root.to_owned(),
            pattern: Pattern::everything(),
            by_suffix: true,
        };
        fs::read_dir(root).map_err(|error| StorageError::source(root, error))?;
        if probe(&folder, options, 1)? == 0 {
            return Err(folder.without_images());
        }
        Ok(folder)
    }

    /// The error for a folder without images, which names the lists and archives in it.
    fn without_images(&self) -> StorageError {
        let root = self.root.display();
        let mut lists = Lists::default();
        let all = SourceOptions {
            suffixes: Some(vec!["*".to_owned()]),
            ..SourceOptions::default()
        };
        // An error of the walk matters less than what was found before it.
        drop(self.list(&all, &mut lists));
        StorageError::invalid_source(match lists.first {
            Some(first) => {
                let suffix = first.rsplit_once('.').map_or("", |(_, suffix)| suffix);
                format!(
                    "source {root} contains no images (judged by suffix), but {} lists or archives, such as {first}; name them, as in '{}/**/*.{suffix}'",
                    lists.count,
                    root.to_string().trim_end_matches('/')
                )
            }
            None => format!(
                "source {root} contains no images (judged by suffix); {}",
                name_others()
            ),
        })
    }

    /// The lists or archives that match a pattern, in order.
    ///
    /// # Errors
    /// If the pattern is malformed or matches no file.
    pub(super) fn matches(
        spec: &str,
        options: &SourceOptions,
    ) -> Result<Vec<PathBuf>, StorageError> {
        let all = SourceOptions {
            suffixes: None,
            ..options.clone()
        };
        let mut paths = Paths(Vec::new());
        match Self::matching(spec, &all)?.list(&all, &mut paths) {
            Ok(()) | Err(Stop::Unwanted) => Ok(paths.0),
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    /// The files that match a pattern. If it specifies no suffix, files are selected by suffix as
    /// in a folder.
    ///
    /// # Errors
    /// If the pattern is malformed or matches no usable file.
    pub(super) fn matching(spec: &str, options: &SourceOptions) -> Result<Self, StorageError> {
        let invalid =
            |reason: &str| StorageError::invalid_source(format!("source {spec}: {reason}"));
        let (root, pattern) = Pattern::parse(spec).map_err(|reason| invalid(&reason))?;
        let by_suffix = options.suffixes.is_some() || !pattern.names_suffix();
        let folder = Self {
            root,
            pattern,
            by_suffix,
        };
        let root = readable(&folder.root);
        fs::read_dir(root).map_err(|error| StorageError::source(root, error))?;
        if probe(&folder, options, 1)? == 0 {
            let others = name_others();
            return Err(invalid(&match by_suffix {
                true => format!("no file matches that is an image by its suffix; {others}"),
                false => "no file matches; check the pattern (*, ?, [a-z] and ** are understood)"
                    .to_owned(),
            }));
        }
        Ok(folder)
    }
}

impl Listing for Folder {
    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        let root = readable(&self.root).metadata();
        let mut walk = Walk {
            folder: self,
            options,
            visitor,
            ancestors: root.iter().map(identity).collect(),
        };
        walk.enter(&self.root, &self.pattern.start())
    }
}

/// Collects the paths of all files.
struct Paths(Vec<PathBuf>);

impl Visitor for Paths {
    fn found(&mut self, found: Found) -> Result<(), Stop> {
        self.0.push(uri::to_path(&found.uri));
        Ok(())
    }

    fn skipped(&mut self) -> Result<(), Stop> {
        Ok(())
    }
}

/// Counts lists and archives, up to a limit.
#[derive(Default)]
struct Lists {
    seen: u64,
    count: u64,
    first: Option<String>,
}

impl Visitor for Lists {
    fn found(&mut self, found: Found) -> Result<(), Stop> {
        self.seen += 1;
        if Kind::of(&found.uri).is_list() {
            self.count += 1;
            self.first.get_or_insert(found.uri);
        }
        match self.seen < LOOKED_AT {
            true => Ok(()),
            false => Err(Stop::Unwanted),
        }
    }

    fn skipped(&mut self) -> Result<(), Stop> {
        Ok(())
    }
}

/// Device and inode.
type Identity = (u64, u64);

fn identity(metadata: &Metadata) -> Identity {
    (metadata.dev(), metadata.ino())
}

/// The base folder of relative paths.
fn readable(folder: &Path) -> &Path {
    if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    }
}

struct Walk<'a> {
    folder: &'a Folder,
    options: &'a SourceOptions,
    visitor: &'a mut dyn Visitor,
    /// The current folder and its ancestors, to detect cycles of links.
    ancestors: Vec<Identity>,
}

impl Walk<'_> {
    fn enter(&mut self, path: &Path, reached: &Reached) -> Result<(), Stop> {
        let Ok(entries) = sorted_entries(readable(path)) else {
            return self.unreadable(path);
        };
        for (name, file_type) in entries {
            let pattern = &self.folder.pattern;
            let reached = pattern.step(reached, &name);
            let (complete, goes_on) = (pattern.is_complete(&reached), pattern.goes_on(&reached));
            if !complete && !goes_on {
                continue;
            }
            let path = path.join(&name);
            if is_clutter(&name.to_string_lossy()) && !pattern.names_hidden() {
                let is_folder = file_type.is_some_and(|file_type| file_type.is_dir());
                if !is_folder && complete {
                    self.visitor.skipped()?;
                }
                continue;
            }
            let is_file = file_type.is_some_and(|file_type| file_type.is_file());
            let by_name = !self.folder.by_suffix || self.options.takes_suffix(&name);
            if is_file && complete && !by_name {
                self.visitor.skipped()?; // without a look at it
                continue;
            }
            match path.metadata() {
                Ok(metadata) if metadata.is_dir() => {
                    if goes_on {
                        self.enter_inner(&path, &metadata, &reached)?;
                    }
                }
                Err(_) if file_type.is_some_and(|file_type| file_type.is_dir()) => {
                    if goes_on {
                        self.unreadable(&path)?;
                    }
                }
                _ if !complete => {}
                _ if !by_name => self.visitor.skipped()?,
                // A file that cannot be examined is listed anyway, and fails with its name.
                metadata => {
                    let image = image_of(uri::of_path(&path), metadata.ok().as_ref());
                    self.visitor.found(image)?;
                }
            }
        }
        Ok(())
    }

    fn enter_inner(
        &mut self,
        path: &Path,
        metadata: &Metadata,
        reached: &Reached,
    ) -> Result<(), Stop> {
        let identity = identity(metadata);
        if self.ancestors.contains(&identity) {
            tracing::warn!(path = %path.display(), "skipped a symbolic link to a folder that contains it");
            return self.visitor.skipped();
        }
        self.ancestors.push(identity);
        let ended = self.enter(path, reached);
        self.ancestors.pop();
        ended
    }

    /// The images in the folder are unknown, but the failure must be visible: it becomes an image
    /// that cannot be fetched.
    fn unreadable(&mut self, path: &Path) -> Result<(), Stop> {
        let mut uri = uri::of_path(path);
        uri.push('/');
        self.visitor.found(image_of(uri, None))
    }
}

fn sorted_entries(path: &Path) -> io::Result<Vec<(OsString, Option<FileType>)>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        entries.push((entry.file_name(), entry.file_type().ok()));
    }
    entries.sort_unstable_by(|(first, _), (second, _)| first.cmp(second));
    Ok(entries)
}
