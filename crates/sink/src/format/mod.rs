//! Encodings of rows: one file each, and one line each below and in `format_name.rs`.

mod csv;
mod jsonl;
mod parquet;

pub use self::parquet::{
    Answers, Classes, EncodedPart, EncodedParts, RelabelError, RelabelledGroup, RowGroup,
    RowGroups, StoredColumns,
};

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use ::bytes::{Buf, Bytes};
use roaring::RoaringTreemap;
use serde_json::{Map, Value};
use trommel_storage::StorageError;

use crate::JobRecord;
use crate::cascade_rows::ANSWER;
use crate::format_name::Format;
use crate::owner::Owner;
use crate::part::PartRecord;
use crate::read_back::NO_ROW;
use crate::row::{EMBEDDING, Row, is_vector};
use crate::stored::vector;

impl Format {
    pub(crate) fn encoding(self) -> &'static dyn Encoding {
        match self {
            Self::Parquet => &parquet::Parquet,
            Self::Jsonl => &jsonl::JsonLines,
            Self::Csv => &csv::Csv,
        }
    }

    /// Size of these rows, sorted by index, as a part of a job.
    ///
    /// # Errors
    /// If the part cannot be written.
    pub fn part_bytes(self, job: &JobRecord, rows: &[Row]) -> io::Result<u64> {
        let mut out = Vec::new();
        let record = PartRecord::of(rows);
        self.encoding().write(&mut out, job, rows, &record)?;
        Ok(out.len() as u64)
    }

    /// The owner of the file at an output's name. An unreadable file counts as foreign.
    pub(crate) fn owner_of(self, path: &Path) -> Owner {
        // A symbolic link occupies the name too, wherever it leads.
        if path.symlink_metadata().is_err() {
            return Owner::Absent;
        }
        match File::open(path) {
            Ok(file) if path.is_file() => self.encoding().owner(file),
            _ => Owner::Foreign,
        }
    }
}

/// How rows are written to and read from parts. Errors do not name the file; the caller does.
pub(crate) trait Encoding: Sync {
    /// Writes rows sorted by index as a part with this record.
    fn write(
        &self,
        out: &mut (dyn Write + Send),
        job: &JobRecord,
        rows: &[Row],
        record: &PartRecord,
    ) -> io::Result<()>;

    /// Bytes at the end of a part that usually contain its record; `None` if all are needed.
    fn tail(&self) -> Option<u64>;

    /// Reads the record from the end of a part of `size` bytes, and checks that the part belongs to
    /// this job.
    fn read_record(&self, end: Bytes, size: u64, job: &JobRecord) -> Result<Tail, String>;

    /// Reads the rows of a part or result as fields by name.
    fn rows(&self, input: Input, wanted: Wanted) -> Result<FieldRows, String>;

    /// Reads the rows of a part or result as fields by name, with their embeddings separately if
    /// requested and present.
    fn embedded_rows(&self, input: Input, wanted: Wanted) -> Result<EmbeddedRows, String> {
        let rows = self.rows(input, wanted)?;
        Ok(Box::new(rows.map(move |fields| {
            let mut fields = fields?;
            let embedding = fields.remove(EMBEDDING);
            let embedding = embedding.filter(|_| wanted == Wanted::Embedded);
            Ok((fields, vector(embedding)?))
        })))
    }

    /// Reads only the indices of the rows of a part or result, if the format allows.
    fn indices(&self, input: Input) -> Result<Indices, String> {
        let rows = self.rows(input, Wanted::Identity)?;
        Ok(Box::new(rows.map(|fields| {
            let index = fields?.get("index").and_then(Value::as_u64);
            index
                .map(|index| vec![index])
                .ok_or_else(|| NO_ROW.to_owned())
        })))
    }

    /// The job that a single file names as its own, if any.
    fn job(&self, _: File) -> Option<JobRecord> {
        None
    }

    /// Undoes the escaping of formulas in a text of this job.
    fn unescaped<'a>(&self, text: &'a str) -> &'a str {
        text
    }

    /// The owner of a result file.
    fn owner(&self, file: File) -> Owner;

    /// Merges the rows of all parts into `out`, without superseded ones.
    fn merge(
        &self,
        parts: &[MergePart],
        out: &mut (dyn Write + Send),
        job: &JobRecord,
        fingerprint: &str,
    ) -> Result<(), MergeError>;
}

/// Fields of rows by name.
pub(crate) type FieldRows = Box<dyn Iterator<Item = Result<Map<String, Value>, String>> + Send>;

/// The same, with embeddings.
pub(crate) type EmbeddedRows =
    Box<dyn Iterator<Item = Result<(Map<String, Value>, Option<Vec<f32>>), String>> + Send>;

/// Indices of rows in file order, some at a time.
pub(crate) type Indices = Box<dyn Iterator<Item = Result<Vec<u64>, String>> + Send>;

/// The result of reading the end of a part.
pub(crate) enum Tail {
    Record(PartRecord),
    /// This many bytes are needed.
    More(u64),
}

/// A readable file of rows.
pub(crate) enum Input {
    File(File),
    Bytes(Bytes),
}

impl Input {
    fn reader(self) -> Box<dyn Read + Send> {
        match self {
            Self::File(file) => Box::new(file),
            Self::Bytes(bytes) => Box::new(bytes.reader()),
        }
    }
}

/// The columns to read, if the format allows a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// All except vectors, which are far larger than everything else and which readers of rows do
    /// not need.
    All,
    /// The same, with embeddings.
    Embedded,
    /// The columns that identify an image.
    Identity,
    /// The columns of a failed row.
    Failure,
    /// The answer of a cascade.
    Cascade,
}

impl Wanted {
    fn column(self, name: &str) -> bool {
        match self {
            Self::All => !is_vector(name),
            Self::Embedded => !is_vector(name) || name == EMBEDDING,
            Self::Identity => ["index", "uri", "etag", "status"].contains(&name),
            Self::Failure => !is_vector(name) && !["top", "label", "score"].contains(&name),
            Self::Cascade => ["index", "label"].contains(&name) || ANSWER.contains(&name),
        }
    }
}

/// A file whose rows are merged.
pub(crate) struct MergePart {
    pub(crate) path: PathBuf,
    /// Indices whose rows are superseded by a later generation.
    pub(crate) superseded: RoaringTreemap,
}

/// Why parts cannot be merged.
pub(crate) enum MergeError {
    /// A part is damaged.
    Part(PathBuf, String),
    /// The file cannot be written.
    Out(io::Error),
}

impl MergeError {
    fn part(part: &MergePart, error: impl fmt::Display) -> Self {
        Self::Part(part.path.clone(), error.to_string())
    }

    /// The same error about a file that was to become `target`.
    pub(crate) fn named(self, target: &Path) -> StorageError {
        match self {
            Self::Part(path, reason) => StorageError::corrupt(&path, reason),
            Self::Out(error) => StorageError::write(target, error),
        }
    }
}

impl From<io::Error> for MergeError {
    fn from(error: io::Error) -> Self {
        Self::Out(error)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use trommel_types::{
        Classification, Content, ErrorKind, Failure, ImageRef, Lane, Outcome, Scores,
    };

    use super::*;

    /// A disk with limited space.
    struct NearlyFull(usize);

    impl Write for NearlyFull {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.0);
            self.0 -= taken;
            if taken == 0 {
                Err(io::ErrorKind::StorageFull.into())
            } else {
                Ok(taken)
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    pub(super) fn row(index: u64, uri: &str) -> Row {
        Arc::new(Classification {
            image: ImageRef {
                job: "job".into(),
                index,
                lane: Lane::Normal,
                uri: uri.to_owned(),
                content: Content::Whole,
                etag: None,
                size: None,
                columns: Vec::new(),
            },
            model: "digits".into(),
            model_version: "0123456789ab".into(),
            bytes: None,
            original: None,
            outcome: Outcome::Failed(Failure {
                kind: ErrorKind::Empty,
                error: "photos/1.jpg holds no bytes".to_owned(),
            }),
            attempts: 1,
            finished_at: 0,
        })
    }

    pub(super) fn job(format: Format) -> JobRecord {
        JobRecord {
            job_id: "job".to_owned(),
            run: "0a1b2c3d".to_owned(),
            spec_hash: String::new(),
            source: "photos".to_owned(),
            model: "digits".to_owned(),
            model_version: "0123456789ab".to_owned(),
            options: Default::default(),
            format,
            columns: Vec::new(),
            logits: false,
            embedding: false,
            embedding_type: Default::default(),
            escape_formulas: false,
            retry: None,
            created_at: 0,
        }
    }

    #[test]
    fn a_full_disk_is_reported_as_such_wherever_it_fills_up() {
        let rows: Vec<_> = (0..50)
            .map(|index| row(index, &format!("photos/{index}.jpg")))
            .collect();
        let record = PartRecord::of(&rows);
        for format in Format::ALL {
            let (encoding, job) = (format.encoding(), job(*format));
            let mut whole = Vec::new();
            encoding.write(&mut whole, &job, &rows, &record).unwrap();
            for room in [0, 1, 100, whole.len() / 2, whole.len() - 1] {
                let mut disk = NearlyFull(room);
                let error = encoding.write(&mut disk, &job, &rows, &record).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{format} {room}");
            }
        }
    }

    #[test]
    fn embeddings_of_two_lengths_are_refused_in_one_part() {
        let with_embedding = |index, length| {
            let mut row = Classification::clone(&row(index, "a.jpg"));
            row.outcome = Outcome::Ok(Scores {
                embedding: Some(vec![0.5; length]),
                ..Scores::default()
            });
            Arc::new(row)
        };
        let job = JobRecord {
            embedding: true,
            ..job(Format::Parquet)
        };
        let write = |rows: &[Row]| {
            let record = PartRecord::of(rows);
            let encoding = Format::Parquet.encoding();
            encoding.write(&mut Vec::new(), &job, rows, &record)
        };
        write(&[with_embedding(0, 3), row(1, "b.jpg"), with_embedding(2, 3)]).unwrap();
        let error = write(&[with_embedding(0, 3), with_embedding(1, 4)]).unwrap_err();
        assert!(error.to_string().contains("one length"), "{error}");
    }

    #[test]
    fn names_of_formats_are_read_and_others_refused_with_a_list() {
        assert_eq!("NDJSON".parse::<Format>().unwrap(), Format::Jsonl);
        let error = "xml".parse::<Format>().unwrap_err().to_string();
        assert!(error.contains("parquet, jsonl or csv"), "{error}");
    }
}
