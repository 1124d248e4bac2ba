//! Common parts of all lists of uris.

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{self, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use trommel_storage::{
    StorageError,
    cloud::CloudLocation,
    http::HttpUrl,
    s3::Location,
    uri::{remote_scheme, to_path},
};
use trommel_types::Scalar;

use crate::file::{image_at, image_of};
use crate::kinds::packing_of;
use crate::listing::{Listing, Stop, Visitor, probe};
use crate::packed::Unpacker;
use crate::stored::Stored;
use crate::{Found, SourceOptions};

/// Images examined before any work, so that a bad list is refused at once.
const PROBED: u64 = 1000;

/// A file with image names, or standard input.
pub(super) struct Manifest {
    stored: Stored,
    name: String,
    entries: Entries,
    /// Files that exist relative to the base.
    there: AtomicU64,
    /// Files that do not, but exist relative to the current folder.
    only_here: AtomicU64,
}

/// How the entries of a manifest are numbered.
#[derive(Clone, Copy)]
pub(super) enum Entries {
    /// By line, from 1.
    Lines,
    /// By row, from 0.
    Rows,
    /// By byte position, if entries may contain line ends.
    Bytes,
}

impl Manifest {
    pub(super) fn new(stored: &Stored, entries: Entries) -> Self {
        Self {
            stored: stored.clone(),
            name: stored.to_string(),
            entries,
            there: AtomicU64::new(0),
            only_here: AtomicU64::new(0),
        }
    }

    /// Its paths are relative to the current folder.
    pub(super) fn standard_input() -> Self {
        Self {
            stored: Path::new("").into(),
            name: "standard input".to_owned(),
            entries: Entries::Lines,
            there: AtomicU64::new(0),
            only_here: AtomicU64::new(0),
        }
    }

    /// Opens it at its beginning, decompressed if its name says that it is compressed.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(super) fn open(&self) -> Result<Box<dyn Read + Send>, StorageError> {
        Ok(match packing_of(&self.name) {
            None => Box::new(self.stored.open()?),
            Some(packing) => Box::new(Unpacker::open(&self.stored, packing)?),
        })
    }

    /// Lists the first images before any work, so that a bad list is refused at once.
    ///
    /// # Errors
    /// The error that ends the listing, or that none of its files exists relative to its base but
    /// some do relative to the current folder.
    pub(super) fn probe(
        &self,
        listing: &dyn Listing,
        options: &SourceOptions,
    ) -> Result<(), StorageError> {
        let found = probe(listing, options, PROBED)?;
        let here = self.only_here.load(Ordering::Relaxed);
        if here == 0 || self.there.load(Ordering::Relaxed) > 0 {
            return Ok(());
        }
        let folder = match &self.stored {
            Stored::File(list) => list.parent().unwrap_or(Path::new("")).display().to_string(),
            Stored::Object(_) => "its folder".to_owned(),
        };
        Err(self.invalid(format_args!(
            "its relative paths begin at its own folder ({folder}), where none of its first {found} files is; {here} of them are in the current folder: give --base ."
        )))
    }

    /// Passes on the image of entry `number`. A relative path starts from `options.base`, or by
    /// default from the manifest's folder; a path that is not UTF-8 is used as it is.
    pub(super) fn take(
        &self,
        number: u64,
        uri: &[u8],
        columns: Vec<Scalar>,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let found = match self.remote(uri, options) {
            Some(uri) => {
                if let Some(place) = CloudLocation::parse(&uri) {
                    let built_in = place.check_built_in();
                    built_in.map_err(|error| self.at(number, error))?;
                }
                Found {
                    columns,
                    ..image_of(uri, None)
                }
            }
            None => self.local(number, uri, columns, options)?,
        };
        let by_name = options.suffixes.is_none() || {
            let path = match HttpUrl::parse(&found.uri) {
                Ok(url) => url.path().to_owned(),
                Err(_) => found.uri.clone(),
            };
            let name = Path::new(&path).file_name();
            name.is_some_and(|name| options.takes_suffix(name))
        };
        if by_name {
            visitor.found(found)
        } else {
            visitor.skipped()
        }
    }

    /// The uri of an image in a store; `None` for a local one. An unusable uri fails when it is
    /// fetched.
    fn remote(&self, uri: &[u8], options: &SourceOptions) -> Option<String> {
        let name = str::from_utf8(uri).ok()?;
        if HttpUrl::is_url(name)
            || Location::parse(name).is_some()
            || CloudLocation::parse(name).is_some()
        {
            return Some(name.to_owned());
        }
        if !is_relative(name) {
            return None;
        }
        match &options.base {
            None => self
                .stored
                .beside(name)
                .unwrap_or_else(|_| Some(name.to_owned())),
            Some(base) if HttpUrl::is_url(base) => {
                let folder = format!("{}/", base.trim_end_matches('/'));
                let joined = HttpUrl::parse(&folder).and_then(|url| url.join(name));
                Some(joined.map_or_else(|_| format!("{folder}{name}"), |url| url.to_string()))
            }
            Some(base) if remote_scheme(base).is_some() => {
                Some(format!("{}/{name}", base.trim_end_matches('/')))
            }
            Some(_) => None,
        }
    }

    /// The local image of an entry.
    fn local(
        &self,
        number: u64,
        uri: &[u8],
        columns: Vec<Scalar>,
        options: &SourceOptions,
    ) -> Result<Found, StorageError> {
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
        let folder = match (&options.base, &self.stored) {
            (Some(base), _) => to_path(base),
            (None, Stored::File(list)) => list.parent().unwrap_or(Path::new("")).to_owned(),
            // Paths that are not relative to the list are local.
            (None, Stored::Object(_)) => PathBuf::new(),
        };
        let found = image_at(&folder.join(&path), columns);
        if options.base.is_none() && path.is_relative() {
            self.count(&found, &path);
        }
        Ok(found)
    }

    /// Counts where the first relative paths lead.
    fn count(&self, found: &Found, path: &Path) {
        let seen = |count: &AtomicU64| count.load(Ordering::Relaxed);
        if found.size.is_some() {
            self.there.fetch_add(1, Ordering::Relaxed);
        } else if seen(&self.there) == 0 && seen(&self.only_here) < PROBED && path.is_file() {
            self.only_here.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A problem with an entry.
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

    /// The line of the first text after a byte position.
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

    /// An error while reading after an entry: if the store failed, its own error, so that it can be
    /// retried.
    pub(super) fn unread(&self, number: u64, error: io::Error) -> StorageError {
        match error.downcast() {
            Ok(error) => error,
            Err(error) => self.at(number, error),
        }
    }

    /// A problem with the whole list.
    pub(super) fn invalid(&self, reason: impl Display) -> StorageError {
        StorageError::invalid_source(format!("source {}: {reason}", self.name))
    }

    /// The position of the uri column.
    ///
    /// # Errors
    /// If it is missing, or two columns have the same name.
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

/// A duplicate name.
pub(super) fn repeated<'a>(names: &[&'a str]) -> Option<&'a str> {
    let mut repeats = names.iter().enumerate();
    let repeat = repeats.find(|(position, name)| names[..*position].contains(name));
    repeat.map(|(_, name)| *name)
}

/// Whether a name is relative to a folder.
fn is_relative(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('/') && !name.contains("://")
}

/// The error for an unsupported place of images.
pub(super) fn not_read(uri: &str, scheme: &str) -> String {
    let what = match scheme {
        "s3" => "expected s3://bucket/key",
        "gs" | "gcs" => "expected gs://bucket/key",
        "az" | "azure" | "abfs" | "abfss" | "wasb" | "wasbs" => {
            "expected az://container/key, with the account in AZURE_STORAGE_ACCOUNT_NAME"
        }
        "hf" => {
            "write the https:// address of the file, or download the images first (hf download)"
        }
        _ => {
            "supported are local files, s3://, gs://, az:// and https://; download the images first"
        }
    };
    format!("{uri}: cannot be read: {what}")
}
