use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use trommel_types::Outcome;

use crate::row::Row;
use crate::{Format, Runs};

/// The record of a part: in Parquet it is in the footer, in text formats it is read from the rows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PartRecord {
    pub(crate) rows: u64,
    pub(crate) runs: Runs,
    pub(crate) failures: BTreeMap<String, FailureSummary>,
}

/// Failures of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureSummary {
    /// How many images.
    pub count: u64,
    /// The uri of one of them.
    pub example: String,
    /// The error in its row.
    pub error: String,
}

impl PartRecord {
    /// The record of rows sorted by index.
    pub(crate) fn of(rows: &[Row]) -> Self {
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

    /// Checks that the ranges add up to the number of rows.
    pub(crate) fn check(self) -> Result<Self, String> {
        let mut rows = Some(0_u64);
        for (start, end) in self.runs.ranges() {
            let len = end.checked_sub(start).and_then(|len| len.checked_add(1));
            rows = rows.zip(len).and_then(|(rows, len)| rows.checked_add(len));
        }
        match rows == Some(self.rows) {
            true => Ok(self),
            false => Err("its rows are not the ones that it commits".to_owned()),
        }
    }

    /// Adds the counts of another part.
    pub(crate) fn add(&mut self, other: Self) {
        self.rows += other.rows;
        self.runs.append(other.runs);
        for (kind, failure) in other.failures {
            self.count_failure(&kind, failure.count, &failure.example, &failure.error);
        }
    }

    /// Failed rows.
    pub(crate) fn failed(&self) -> u64 {
        self.failures.values().map(|failure| failure.count).sum()
    }

    pub(crate) fn count_failure(&mut self, kind: &str, count: u64, uri: &str, error: &str) {
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

/// The name of a part, which identifies its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PartName {
    pub(crate) number: u64,
    /// [`JobRecord::run`](crate::JobRecord::run).
    pub(crate) run: String,
    /// The revision of its claim, if numbers are claimed.
    pub(crate) revision: Option<u64>,
    pub(crate) format: Format,
}

impl PartName {
    /// Parses a name; `None` if it is not that of a part.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (stem, suffix) = name.strip_prefix("part-")?.split_once('.')?;
        let format = Format::ALL
            .iter()
            .find(|format| format.extension() == suffix)?;
        let mut fields = stem.split('-');
        let (number, run, revision) = (fields.next()?, fields.next()?, fields.next());
        let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let is_hex = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        let revision = match revision {
            None => None,
            Some(text) => {
                let digits = text.strip_prefix('r').filter(|text| is_digits(text))?;
                Some(digits.parse().ok()?)
            }
        };
        let is_ours = number.len() >= 8
            && is_digits(number)
            && run.len() == 8
            && run.bytes().all(is_hex)
            && fields.next().is_none();
        is_ours
            .then(|| {
                Some(Self {
                    number: number.parse().ok()?,
                    run: run.to_owned(),
                    revision,
                    format: *format,
                })
            })
            .flatten()
    }
}

impl fmt::Display for PartName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part-{:08}-{}", self.number, self.run)?;
        if let Some(revision) = self.revision {
            write!(f, "-r{revision}")?;
        }
        write!(f, ".{}", self.format.extension())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_read_as_they_are_written() {
        for (revision, text) in [
            (None, "part-00000042-0a1b2c3d.csv"),
            (Some(7), "part-00000042-0a1b2c3d-r7.csv"),
        ] {
            let name = PartName {
                number: 42,
                run: "0a1b2c3d".to_owned(),
                revision,
                format: Format::Csv,
            };
            assert_eq!(name.to_string(), text);
            assert_eq!(PartName::parse(text), Some(name));
        }
        let large = PartName::parse("part-123456789-00000000.jsonl").unwrap();
        assert_eq!((large.number, large.format), (123_456_789, Format::Jsonl));
        for other in [
            "part-00000042.csv",
            "part-00000042-0a1b2c3d.csv.bak",
            "part-0042-0a1b2c3d.csv",
            "part-0000004x-0a1b2c3d.csv",
            "part-00000042-0A1B2C3D.csv",
            "part-00000042-0a1b2c3d-7.csv",
            "part-00000042-0a1b2c3d-r7-8.csv",
            "part-.csv",
        ] {
            assert_eq!(PartName::parse(other), None, "{other}");
        }
    }
}
