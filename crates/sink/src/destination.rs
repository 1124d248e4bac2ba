use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trommel_storage::local::LocalStore;
use trommel_storage::s3::{Location, S3Store};
use trommel_storage::uri::remote_scheme;
use trommel_storage::{ObjectStore, S3Config, StorageError, StorageErrorKind};

use crate::Format;

/// A folder of parts, in a file system or a bucket, and the single file that they may be merged
/// into.
#[derive(Debug, Clone)]
pub struct Destination {
    /// The parts.
    pub(crate) store: Arc<dyn ObjectStore>,
    /// The folder with the parts, if it is local.
    pub(crate) folder: Option<PathBuf>,
    /// The single file that the parts are merged into.
    pub(crate) file: Option<PathBuf>,
    pub(crate) format: Format,
    /// How it is shown to the user.
    pub(crate) shown: String,
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl Destination {
    /// Parses a user's output: `x.parquet`, `x.jsonl` (or `.ndjson`) and `x.csv` are single files;
    /// a name that ends with `/`, has no suffix or is an existing folder is a folder of parts in
    /// `part_format`, unless it is followed by another format, as in `folder/?format=jsonl`.
    ///
    /// # Errors
    /// [`InvalidDestination`](StorageErrorKind::InvalidDestination) if rows cannot be written
    /// there.
    pub fn parse(text: &str, part_format: Format) -> Result<Self, StorageError> {
        let invalid = |reason: &str| {
            let message = format!("output {text}: {reason}");
            StorageError::new(StorageErrorKind::InvalidDestination, message)
        };
        if text.is_empty() {
            return Err(StorageError::new(
                StorageErrorKind::InvalidDestination,
                "the output has no name; use a file such as results.parquet or a folder",
            ));
        }
        if remote_scheme(text).is_some() {
            return Err(invalid(
                "is not a valid output; give a local file or folder, s3://bucket/prefix/ or postgres://host/database?table=name",
            ));
        }
        if let Some((folder, name)) = text.rsplit_once("?format=")
            && folder.ends_with('/')
        {
            let format = name.parse().map_err(|error| invalid(&format!("{error}")))?;
            return Ok(Self::local(folder.into(), None, format));
        }
        let path = PathBuf::from(text);
        if text.ends_with('/') || path.is_dir() || path.extension().is_none() {
            return Ok(Self::local(path, None, part_format));
        }
        let format = Format::of_path(&path).ok_or_else(|| {
            let suffix = path.extension().unwrap_or_default().display();
            invalid(&format!(
                "rows are not written as .{suffix}; use .parquet, .jsonl (.ndjson) or .csv, or end the name of a folder with /"
            ))
        })?;
        let mut parts = path.clone().into_os_string();
        parts.push(".parts");
        Ok(Self::local(parts.into(), Some(path), format))
    }

    /// Parses `s3://bucket/prefix/`; `None` if it is not in a bucket. Parts are written in
    /// `part_format`, unless another format follows, as in `s3://bucket/prefix/?format=jsonl`.
    ///
    /// # Errors
    /// [`InvalidDestination`](StorageErrorKind::InvalidDestination) for a single object: only a
    /// file system can merge the parts at the end.
    pub fn in_bucket(
        text: &str,
        part_format: Format,
        config: &S3Config,
    ) -> Result<Option<Self>, StorageError> {
        let invalid = |reason: &str| {
            let message = format!("output {text}: {reason}");
            StorageError::new(StorageErrorKind::InvalidDestination, message)
        };
        if !text.starts_with("s3://") {
            return Ok(None);
        }
        let (text, format) = match text.rsplit_once("?format=") {
            None => (text, part_format),
            Some((text, name)) => {
                let format = name.parse().map_err(|error| invalid(&format!("{error}")))?;
                (text, format)
            }
        };
        let place = Location::parse(text).ok_or_else(|| invalid("expected s3://bucket/prefix/"))?;
        if !place.key.is_empty() && !place.key.ends_with('/') {
            return Err(invalid(
                "an output in s3 is a folder of parts; end its name with /",
            ));
        }
        Ok(Some(Self {
            shown: place.uri(),
            store: Arc::new(S3Store::new(config, place)),
            folder: None,
            file: None,
            format,
        }))
    }

    fn local(parts: PathBuf, file: Option<PathBuf>, format: Format) -> Self {
        Self {
            store: Arc::new(LocalStore::new(&parts)),
            shown: file.as_ref().unwrap_or(&parts).display().to_string(),
            folder: Some(parts),
            file,
            format,
        }
    }

    /// What the user sees: the file, or the folder.
    pub fn path(&self) -> &Path {
        Path::new(&self.shown)
    }

    /// The local folder with the parts and the job's record.
    pub fn parts(&self) -> &Path {
        self.folder.as_deref().unwrap_or(self.path())
    }

    /// Encoding of the rows.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The folder with the single file.
    pub(crate) fn parent_of(file: &Path) -> &Path {
        file.parent()
            .filter(|parent| !parent.as_os_str().is_empty())
            .unwrap_or(Path::new("."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Destination {
        Destination::parse(text, Format::Parquet).unwrap()
    }

    #[test]
    fn a_suffix_makes_a_file() {
        for (text, format) in [
            ("out/rows.CSV", Format::Csv),
            ("rows.parquet", Format::Parquet),
            ("rows.jsonl", Format::Jsonl),
            ("rows.ndjson", Format::Jsonl),
        ] {
            let file = parse(text);
            assert_eq!(file.format(), format);
            assert_eq!(file.path(), Path::new(text));
            assert_eq!(file.parts(), Path::new(&format!("{text}.parts")));
        }
    }

    #[test]
    fn anything_else_that_can_be_one_is_a_folder() {
        let existing = tempfile::tempdir().unwrap();
        let existing = existing.path().join("old.parquet");
        std::fs::create_dir(&existing).unwrap();
        for text in [
            "out",
            "out/v1.2/",
            "out.parquet/",
            existing.to_str().unwrap(),
        ] {
            let folder = parse(text);
            assert_eq!(
                (folder.format(), folder.file.clone()),
                (Format::Parquet, None),
                "{text}"
            );
            assert_eq!(folder.path(), Path::new(text));
        }
        let folder = Destination::parse("out", Format::Csv).unwrap();
        assert_eq!(folder.format(), Format::Csv);
        let folder = parse("out/?format=jsonl");
        assert_eq!(
            (folder.format(), folder.path()),
            (Format::Jsonl, Path::new("out/"))
        );
    }

    #[test]
    fn what_rows_cannot_go_to_is_refused_with_a_way_on() {
        for (wrong, hint) in [
            ("", "results.parquet"),
            ("rows.xlsx", ".parquet, .jsonl (.ndjson) or .csv"),
            ("gs://bucket/x", "s3://bucket/prefix/"),
            ("out/?format=xml", "parquet, jsonl or csv"),
        ] {
            let error = Destination::parse(wrong, Format::Parquet).unwrap_err();
            assert_eq!(
                error.kind(),
                StorageErrorKind::InvalidDestination,
                "{error}"
            );
            assert!(error.to_string().contains(hint), "{error}");
        }
    }
}
