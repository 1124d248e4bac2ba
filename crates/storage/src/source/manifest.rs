//! What all lists of uris have in common.

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use trommel_types::Scalar;

use crate::StorageError;
use crate::s3::Location;
use crate::source::file::{image_at, image_of};
use crate::source::listing::{Stop, Visitor};
use crate::source::stored::{Reader, Stored};
use crate::source::{Found, SourceOptions};
use crate::uri::{remote_scheme, to_path};

/// Images that are looked at before any work, so that a bad list is refused at once.
pub(super) const PROBED: u64 = 1000;

/// A file that names images, or standard input.
pub(super) struct Manifest {
    stored: Stored,
    name: String,
    entries: Entries,
}

/// How the entries of a manifest are numbered.
#[derive(Clone, Copy)]
pub(super) enum Entries {
    /// By line, from 1.
    Lines,
    /// By row, from 0.
    Rows,
    /// By the byte before them, where entries may hold line ends.
    Bytes,
}

impl Manifest {
    pub(super) fn new(stored: &Stored, entries: Entries) -> Self {
        Self {
            stored: stored.clone(),
            name: stored.to_string(),
            entries,
        }
    }

    /// Its paths are relative to the current folder.
    pub(super) fn standard_input() -> Self {
        Self {
            stored: Path::new("").into(),
            name: "standard input".to_owned(),
            entries: Entries::Lines,
        }
    }

    pub(super) fn open(&self) -> Result<Reader, StorageError> {
        self.stored.open()
    }

    /// Hands on the image that entry `number` names. A relative path begins at the
    /// manifest's folder, or at the folder of its key; one that is not UTF-8 is taken as it
    /// stands.
    pub(super) fn take(
        &self,
        number: u64,
        uri: &[u8],
        columns: Vec<Scalar>,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let found = match str::from_utf8(uri) {
            Ok(uri) if Location::parse(uri).is_some() => Found {
                columns,
                ..image_of(uri.to_owned(), None)
            },
            Ok(name) => match self.beside(name) {
                Some(uri) => Found {
                    columns,
                    ..image_of(uri, None)
                },
                None => image_at(&self.path_of(number, uri)?, columns),
            },
            Err(_) => image_at(&self.path_of(number, uri)?, columns),
        };
        let by_name = options.suffixes.is_none()
            || Path::new(&found.uri)
                .file_name()
                .is_some_and(|name| options.takes_suffix(name));
        if by_name {
            visitor.found(found)
        } else {
            visitor.skipped()
        }
    }

    /// The uri of a relative name in a list that lies in S3.
    fn beside(&self, name: &str) -> Option<String> {
        let is_relative = !name.is_empty() && !name.starts_with('/') && !name.contains("://");
        let place = is_relative.then(|| self.stored.beside(name))?;
        place.map(|place| place.uri())
    }

    fn path_of(&self, number: u64, uri: &[u8]) -> Result<PathBuf, StorageError> {
        if uri.is_empty() {
            return Err(self.at(number, "the uri is empty"));
        }
        let path = match str::from_utf8(uri) {
            Ok(uri) => match remote_scheme(uri) {
                Some(scheme) => return Err(self.at(number, not_read(uri, scheme))),
                None => to_path(uri),
            },
            Err(_) => PathBuf::from(OsStr::from_bytes(uri)),
        };
        match &self.stored {
            Stored::File(list) => Ok(list.parent().unwrap_or(Path::new("")).join(path)),
            // What is not relative to the list is a path of this machine.
            Stored::Object(_) => Ok(path),
        }
    }

    /// What is wrong with an entry.
    pub(super) fn at(&self, number: u64, reason: impl Display) -> StorageError {
        let place = match self.entries {
            Entries::Lines => number.to_string(),
            Entries::Rows => format!(" row {number}"),
            Entries::Bytes => match self.line_behind(number) {
                Ok(line) => line.to_string(),
                Err(_) => format!(" byte {number}"),
            },
        };
        StorageError::invalid_source(format!("source {}:{place}: {reason}", self.name))
    }

    /// The line of the first text behind a byte.
    fn line_behind(&self, byte: u64) -> io::Result<u64> {
        let mut line = 1;
        let input = BufReader::new(self.open().map_err(io::Error::other)?);
        for (position, read) in (0..).zip(input.bytes()) {
            match read? {
                b'\n' => line += 1,
                b'\r' => {}
                _ if position >= byte => break,
                _ => {}
            }
        }
        Ok(line)
    }

    /// What is wrong with the whole.
    pub(super) fn invalid(&self, reason: impl Display) -> StorageError {
        StorageError::invalid_source(format!("source {}: {reason}", self.name))
    }

    /// The place of the column that holds uris.
    ///
    /// # Errors
    /// When there is none, or two columns have the same name.
    pub(super) fn uri_column(
        &self,
        names: &[&str],
        options: &SourceOptions,
    ) -> Result<usize, StorageError> {
        if let Some(name) = repeated(names) {
            return Err(self.invalid(format_args!(
                "two columns are called `{name}`; rename one of them"
            )));
        }
        options.uri_column(names).ok_or_else(|| {
            let what = match &options.uri_column {
                Some(wanted) => format!("has no column `{wanted}` (--uri-column)"),
                None => "no column has a usual name for uris, name it with --uri-column".to_owned(),
            };
            self.invalid(format_args!("{what}; its columns: {}", names.join(", ")))
        })
    }
}

/// A name that stands twice.
pub(super) fn repeated<'a>(names: &[&'a str]) -> Option<&'a str> {
    let mut repeats = names.iter().enumerate();
    let repeat = repeats.find(|(position, name)| names[..*position].contains(name));
    repeat.map(|(_, name)| *name)
}

/// Says that images are not read from there.
pub(super) fn not_read(uri: &str, scheme: &str) -> String {
    let what = if scheme == "s3" {
        "expected s3://bucket/key"
    } else {
        "only local files and s3 are read; download the images first"
    };
    format!("{uri}: no such {scheme}:// source is read: {what}")
}
