//! JSON Lines. Each row names its job, index and uri, so a part needs no footer to record what it
//! commits.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};

use bytes::Bytes;
use serde::Deserialize;

use super::{Encoding, FieldRows, Indices, Input, MergeError, MergePart, Tail, Wanted};
use crate::JobRecord;
use crate::owner::Owner;
use crate::part::PartRecord;
use crate::row::{Row, write_json_lines};
use crate::runs::RunsBuilder;

pub(super) struct JsonLines;

impl Encoding for JsonLines {
    fn write(
        &self,
        mut out: &mut (dyn Write + Send),
        job: &JobRecord,
        rows: &[Row],
        _: &PartRecord,
    ) -> io::Result<()> {
        write_json_lines(&mut out, job, rows)
    }

    fn tail(&self) -> Option<u64> {
        None
    }

    fn read_record(&self, end: Bytes, _: u64, job: &JobRecord) -> Result<Tail, String> {
        let mut commits = Commits::of(&end)?;
        for line in end.lines() {
            let line = line.map_err(|error| error.to_string())?;
            let row = serde_json::from_str(&line).map_err(|error| error.to_string())?;
            commits.add(row, job)?;
        }
        commits.finish()
    }

    fn rows(&self, input: Input, _: Wanted) -> Result<FieldRows, String> {
        let lines = BufReader::new(input.reader()).lines();
        Ok(Box::new(lines.map(|line| {
            let line = line.map_err(|error| error.to_string())?;
            serde_json::from_str(&line).map_err(|error| error.to_string())
        })))
    }

    fn indices(&self, input: Input) -> Result<Indices, String> {
        #[derive(Deserialize)]
        struct Index {
            index: u64,
        }
        let lines = BufReader::new(input.reader()).lines();
        Ok(Box::new(lines.map(|line| {
            let line = line.map_err(|error| error.to_string())?;
            let row: Index = serde_json::from_str(&line).map_err(|error| error.to_string())?;
            Ok(vec![row.index])
        })))
    }

    fn owner(&self, file: File) -> Owner {
        // None of our rows is this long; a foreign file may be one endless line.
        let mut line = String::new();
        match BufReader::new(file).take(1 << 24).read_line(&mut line) {
            Ok(0) => Owner::NoRows,
            Ok(_) => serde_json::from_str::<CommitRow>(&line)
                .map_or(Owner::Foreign, |row| Owner::Job(row.job_id)),
            Err(_) => Owner::Foreign,
        }
    }

    fn merge(
        &self,
        parts: &[MergePart],
        out: &mut (dyn Write + Send),
        _: &JobRecord,
        _: &str,
    ) -> Result<(), MergeError> {
        for part in parts {
            let failed = |error: &dyn std::fmt::Display| MergeError::part(part, error);
            let mut input = BufReader::new(File::open(&part.path).map_err(|error| failed(&error))?);
            if part.superseded.is_empty() {
                io::copy(&mut input, out)?;
                continue;
            }
            for line in input.lines() {
                let line = line.map_err(|error| failed(&error))?;
                let row: CommitRow = serde_json::from_str(&line).map_err(|error| failed(&error))?;
                if !part.superseded.contains(row.index) {
                    writeln!(out, "{line}")?;
                }
            }
        }
        Ok(())
    }
}

/// The commit information in a row of a text format.
#[derive(Deserialize)]
pub(super) struct CommitRow {
    pub(super) job_id: String,
    pub(super) index: u64,
    pub(super) uri: String,
    pub(super) error_kind: Option<String>,
    pub(super) error: Option<String>,
}

/// The commit of a text part.
#[derive(Default)]
pub(super) struct Commits {
    record: PartRecord,
    runs: RunsBuilder,
}

impl Commits {
    /// Reads a part with this content, which must end with a complete line.
    pub(super) fn of(content: &[u8]) -> Result<Self, String> {
        match content.last() {
            Some(b'\n') => Ok(Self::default()),
            _ => Err("its last line is cut off".to_owned()),
        }
    }

    pub(super) fn add(&mut self, row: CommitRow, job: &JobRecord) -> Result<(), String> {
        if row.job_id != job.job_id {
            return Err(format!("it holds rows of another job, {}", row.job_id));
        }
        self.record.rows += 1;
        self.runs.add(row.index, &row.uri);
        if let Some(kind) = &row.error_kind {
            let error = row.error.as_deref().unwrap_or_default();
            self.record.count_failure(kind, 1, &row.uri, error);
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Result<Tail, String> {
        let record = PartRecord {
            runs: self.runs.finish(),
            ..self.record
        };
        record.check().map(Tail::Record)
    }
}
