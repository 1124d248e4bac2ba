//! Whose the file at an output's name is.

use std::path::Path;

use crate::sink::text_part::{FirstRow, first_row};
use crate::sink::{Format, parquet_part};

/// Whose the file at an output's name is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Owner {
    /// There is none.
    Absent,
    /// It holds the rows of this job of Trommel's.
    Job(String),
    /// It is a result of Trommel's without a row, of which text formats do not tell the job.
    NoRows,
    /// It is anyone else's.
    Foreign,
}

impl Owner {
    /// Looks at the file. What cannot be read counts as someone else's.
    pub(super) fn of(path: &Path, format: Format) -> Self {
        // A symbolic link takes the name too, wherever it leads.
        if path.symlink_metadata().is_err() {
            return Self::Absent;
        }
        if !path.is_file() {
            return Self::Foreign;
        }
        match format {
            Format::Parquet => parquet_part::job_of(path).map_or(Self::Foreign, Self::Job),
            Format::Jsonl | Format::Csv => match first_row(path, format) {
                FirstRow::Job(job_id) => Self::Job(job_id),
                FirstRow::None => Self::NoRows,
                FirstRow::Foreign => Self::Foreign,
            },
        }
    }

    /// Whether it is the result of this job.
    pub(super) fn is_result_of(&self, job_id: &str) -> bool {
        match self {
            Self::Job(id) => id == job_id,
            Self::NoRows => true,
            Self::Absent | Self::Foreign => false,
        }
    }
}
