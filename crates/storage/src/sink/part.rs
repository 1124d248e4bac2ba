use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};
use trommel_types::{Classification, Outcome};

use crate::StorageError;
use crate::sink::files::create_if_absent;
use crate::sink::row::JobRecord;
use crate::sink::runs::RunsBuilder;
use crate::sink::{Format, Runs, parquet_part, text_part};

/// What a part commits: a Parquet footer holds it, and of the text formats it is read from the
/// rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PartRecord {
    pub(super) rows: u64,
    pub(super) runs: Runs,
    pub(super) failures: BTreeMap<String, FailureSummary>,
}

/// Failures of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureSummary {
    /// How many images.
    pub count: u64,
    /// The uri of one of them.
    pub example: String,
    /// What was said about it.
    pub error: String,
}

impl PartRecord {
    /// The record of rows that are sorted by index.
    pub(super) fn of(rows: &[Classification]) -> Self {
        let mut record = Self {
            rows: rows.len() as u64,
            runs: Runs::of(
                rows.iter()
                    .map(|row| (row.image.index, row.image.uri.as_str())),
            ),
            failures: BTreeMap::new(),
        };
        for row in rows {
            if let Outcome::Failed(failure) = &row.outcome {
                record.count_failure(failure.kind.as_str(), 1, &row.image.uri, &failure.error);
            }
        }
        record
    }

    /// Reads what the part at `path` commits: of Parquet the footer alone, of the text formats the
    /// rows.
    ///
    /// # Errors
    /// [`Corrupt`](crate::StorageErrorKind::Corrupt) when it is no whole part of this job.
    pub(super) fn read(path: &Path, format: Format, job: &JobRecord) -> Result<Self, StorageError> {
        let record = match format {
            Format::Parquet => parquet_part::read_record(path, &job.job_id)?,
            Format::Jsonl | Format::Csv => Self::read_rows(path, format, job)?,
        };
        record.check(path)
    }

    /// Checks that the ranges hold as many rows as the part has.
    pub(super) fn check(self, path: &Path) -> Result<Self, StorageError> {
        let record = self;
        let mut rows = Some(0_u64);
        for (start, end) in record.runs.ranges() {
            let len = end.checked_sub(start).and_then(|len| len.checked_add(1));
            rows = rows.zip(len).and_then(|(rows, len)| rows.checked_add(len));
        }
        if rows != Some(record.rows) {
            return Err(StorageError::corrupt(
                path,
                "its rows are not the ones that it commits",
            ));
        }
        Ok(record)
    }

    fn read_rows(path: &Path, format: Format, job: &JobRecord) -> Result<Self, StorageError> {
        let mut record = Self::default();
        let mut runs = RunsBuilder::default();
        text_part::for_each_commit(path, format, job, |row| {
            if row.job_id != job.job_id {
                let reason = format!("it holds rows of another job, {}", row.job_id);
                return Err(StorageError::corrupt(path, reason));
            }
            record.rows += 1;
            runs.add(row.index, &row.uri);
            if let Some(kind) = &row.error_kind {
                let error = row.error.as_deref().unwrap_or_default();
                record.count_failure(kind, 1, &row.uri, error);
            }
            Ok(())
        })?;
        record.runs = runs.finish();
        Ok(record)
    }

    /// Adds the counts of another part.
    pub(super) fn add(&mut self, other: Self) {
        self.rows += other.rows;
        self.runs.append(other.runs);
        for (kind, failure) in other.failures {
            self.count_failure(&kind, failure.count, &failure.example, &failure.error);
        }
    }

    /// Rows without a label.
    pub(super) fn failed(&self) -> u64 {
        self.failures.values().map(|failure| failure.count).sum()
    }

    pub(super) fn count_failure(&mut self, kind: &str, count: u64, uri: &str, error: &str) {
        match self.failures.get_mut(kind) {
            Some(failure) => failure.count += count,
            None => {
                let (example, error) = (uri.to_owned(), error.to_owned());
                self.failures.insert(
                    kind.to_owned(),
                    FailureSummary {
                        count,
                        example,
                        error,
                    },
                );
            }
        }
    }
}

/// The name of a part.
pub(super) fn name(number: u64, format: Format) -> String {
    format!("part-{number:08}.{}", format.extension())
}

/// The name of a part whose number was claimed, with the claim's revision.
pub(super) fn claimed_name(number: u64, revision: u64, format: Format) -> String {
    format!("part-{number:08}-r{revision}.{}", format.extension())
}

/// The number in the name of a part whose number was claimed; `None` for any other name.
pub(super) fn claimed_number(name: &str, format: Format) -> Option<u64> {
    let (stem, rest) = name.split_once("-r")?;
    let revision = rest.strip_suffix(format.extension())?.strip_suffix('.')?;
    revision.parse::<u64>().ok()?;
    number(&format!("{stem}.{}", format.extension()), format)
}

/// The number in a part's name; `None` for the name of anything else.
pub(super) fn number(name: &str, format: Format) -> Option<u64> {
    let digits = name
        .strip_prefix("part-")?
        .strip_suffix(format.extension())?
        .strip_suffix('.')?;
    (digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit()))
        .then(|| digits.parse().ok())
        .flatten()
}

/// Commits rows that are sorted by index as the part of this name.
pub(super) fn commit(
    dir: &Path,
    name: &str,
    format: Format,
    job: &JobRecord,
    rows: &[Classification],
    record: &PartRecord,
) -> Result<(), StorageError> {
    let path = dir.join(name);
    create_if_absent(dir, name, |out| {
        write(out, &path, format, job, rows, record)
    })
}

/// Writes rows that are sorted by index, as the part at `path`.
pub(super) fn write(
    out: &mut (impl Write + Send),
    path: &Path,
    format: Format,
    job: &JobRecord,
    rows: &[Classification],
    record: &PartRecord,
) -> Result<(), StorageError> {
    match format {
        Format::Parquet => parquet_part::write(out, path, job, rows, record),
        Format::Jsonl => text_part::write_jsonl(out, path, job, rows),
        Format::Csv => text_part::write_csv(out, path, job, rows),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use trommel_types::{Content, ErrorKind, Failure, ImageRef, Lane};

    use super::*;
    use crate::StorageErrorKind;

    /// A disk with room for some bytes.
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

    fn row(index: u64) -> Classification {
        Classification {
            image: ImageRef {
                job: "job".into(),
                index,
                lane: Lane::Normal,
                uri: format!("photos/{index}.jpg"),
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
        }
    }

    #[test]
    fn a_full_disk_is_told_as_such_wherever_it_fills_up() {
        let rows: Vec<_> = (0..50).map(row).collect();
        let record = PartRecord::of(&rows);
        for format in Format::ALL {
            let job = JobRecord {
                job_id: "job".to_owned(),
                source: "photos".to_owned(),
                model: "digits".to_owned(),
                model_version: "0123456789ab".to_owned(),
                options: String::new(),
                format,
                columns: Vec::new(),
                logits: false,
                embedding: false,
                created_at: 0,
            };
            let path = Path::new("out").join(name(7, format));
            let mut whole = Vec::new();
            write(&mut whole, &path, format, &job, &rows, &record).unwrap();
            for room in [0, 1, 100, whole.len() / 2, whole.len() - 1] {
                let mut disk = NearlyFull(room);
                let error = write(&mut disk, &path, format, &job, &rows, &record).unwrap_err();
                assert_eq!(
                    error.kind(),
                    StorageErrorKind::NoSpace,
                    "{format} {room}: {error}"
                );
                assert!(error.to_string().contains("out/part-00000007"), "{error}");
            }
        }
    }

    #[test]
    fn only_names_of_parts_have_numbers() {
        assert_eq!(number(&name(42, Format::Csv), Format::Csv), Some(42));
        assert_eq!(
            number("part-123456789.jsonl", Format::Jsonl),
            Some(123_456_789)
        );
        for other in [
            "part-00000042.csv.bak",
            "part-0042.csv",
            "part-0000004x.csv",
            "part-.csv",
        ] {
            assert_eq!(number(other, Format::Csv), None, "{other}");
        }
        assert_eq!(number("part-00000042.parquet", Format::Csv), None);
    }
}
