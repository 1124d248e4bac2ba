//! Parts as JSON Lines and CSV. Each row names its job, index and uri, so a part needs no footer to
//! say what it commits: the one file is rows and commit record at once.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use csv::{ReaderBuilder, StringRecord, Terminator, WriterBuilder};
use serde::Deserialize;
use trommel_types::Classification;

use crate::StorageError;
use crate::sink::Format;
use crate::sink::row::{COLUMNS, JobRecord, TextRow, Value, write_json_lines};

pub(super) fn write_jsonl(
    out: &mut impl Write,
    path: &Path,
    job: &JobRecord,
    rows: &[Classification],
) -> Result<(), StorageError> {
    write_json_lines(out, job, rows).map_err(|error| StorageError::write(path, error))
}

pub(super) fn write_csv(
    out: &mut impl Write,
    path: &Path,
    job: &JobRecord,
    rows: &[Classification],
) -> Result<(), StorageError> {
    let failed = |error: csv::Error| StorageError::write(path, io_error(error));
    let names = job.all_names();
    let mut csv = WriterBuilder::new()
        .terminator(Terminator::CRLF)
        .from_writer(out);
    csv.write_record(&names).map_err(failed)?;
    for row in rows {
        let values = TextRow {
            job,
            names: &names,
            row,
        }
        .values();
        csv.write_record(values.iter().map(field)).map_err(failed)?;
    }
    csv.flush()
        .map_err(|error| StorageError::write(path, error))
}

/// The header of a job's CSV, as it stands at the start of each part.
pub(super) fn csv_header(job: &JobRecord) -> Vec<u8> {
    let mut header = Vec::new();
    write_csv(&mut header, Path::new("a header"), job, &[]).expect("a Vec takes every byte");
    header
}

/// The cause, whose kind the conversion of `csv` would lose.
fn io_error(error: csv::Error) -> io::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error,
        other => io::Error::other(format!("{other:?}")),
    }
}

/// A value as a CSV field: lists as JSON text, null as nothing.
fn field(value: &Value<'_>) -> String {
    match value {
        Value::Null => String::new(),
        Value::Text(text) => text.to_string(),
        // JSON has no word for these.
        Value::Float(float) if !float.is_finite() => float.to_string(),
        Value::Score(score) if !score.is_finite() => score.to_string(),
        other => serde_json::to_string(other).expect("numbers, booleans and lists of them"),
    }
}

/// What a row says about its commit.
#[derive(Deserialize)]
pub(super) struct CommitRow {
    pub(super) job_id: String,
    pub(super) index: u64,
    pub(super) uri: String,
    pub(super) error_kind: Option<String>,
    pub(super) error: Option<String>,
}

/// Reads what the rows of a part commit. Every line must be whole, and a CSV's header the job's.
pub(super) fn for_each_commit(
    path: &Path,
    format: Format,
    job: &JobRecord,
    mut each: impl FnMut(CommitRow) -> Result<(), StorageError>,
) -> Result<(), StorageError> {
    let read = |error| StorageError::read(path.display(), error);
    let mut file = File::open(path).map_err(read)?;
    if !ends_with_a_line_break(&mut file).map_err(read)? {
        return Err(StorageError::corrupt(path, "its last line is cut off"));
    }
    let damaged = |error: &dyn std::fmt::Display| StorageError::corrupt(path, error);
    let input = BufReader::new(file);
    if format == Format::Jsonl {
        for line in input.lines() {
            let line = line.map_err(|error| damaged(&error))?;
            each(serde_json::from_str(&line).map_err(|error| damaged(&error))?)?;
        }
        return Ok(());
    }
    let mut csv = ReaderBuilder::new().from_reader(input);
    let header = csv.headers().map_err(|error| damaged(&error))?;
    if !header.iter().eq(job.all_names().iter().map(String::as_str)) {
        return Err(StorageError::corrupt(
            path,
            "its header is not the one of this job",
        ));
    }
    for record in csv.into_records() {
        let record = record.map_err(|error| damaged(&error))?;
        each(commit_row(&record).ok_or_else(|| damaged(&"a row has no index"))?)?;
    }
    Ok(())
}

fn commit_row(record: &StringRecord) -> Option<CommitRow> {
    let field = |name: &str| record.get(COLUMNS.iter().position(|column| *column == name)?);
    let text = |name| {
        field(name)
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
    };
    Some(CommitRow {
        job_id: field("job_id")?.to_owned(),
        index: field("index")?.parse().ok()?,
        uri: field("uri")?.to_owned(),
        error_kind: text("error_kind"),
        error: text("error"),
    })
}

fn ends_with_a_line_break(file: &mut File) -> io::Result<bool> {
    let mut last = [0];
    if file.metadata()?.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        file.rewind()?;
    }
    Ok(last == *b"\n")
}

/// The id of the job whose rows a file holds.
pub(super) enum FirstRow {
    /// Rows of this job.
    Job(String),
    /// No row.
    None,
    /// Something else.
    Foreign,
}

/// Looks at the first row of a file.
pub(super) fn first_row(path: &Path, format: Format) -> FirstRow {
    let Ok(file) = File::open(path) else {
        return FirstRow::Foreign;
    };
    let input = BufReader::new(file);
    if format == Format::Jsonl {
        // No row of ours is this long; a foreign file may be one endless line.
        let mut line = String::new();
        return match input.take(1 << 24).read_line(&mut line) {
            Ok(0) => FirstRow::None,
            Ok(_) => serde_json::from_str::<CommitRow>(&line)
                .map_or(FirstRow::Foreign, |row| FirstRow::Job(row.job_id)),
            Err(_) => FirstRow::Foreign,
        };
    }
    let mut csv = ReaderBuilder::new().from_reader(input.take(1 << 24));
    let is_ours = csv.headers().is_ok_and(|header| {
        header.len() >= COLUMNS.len() && COLUMNS.iter().zip(header).all(|(own, name)| *own == name)
    });
    match (is_ours, csv.records().next()) {
        (true, None) => FirstRow::None,
        (true, Some(Ok(record))) => {
            commit_row(&record).map_or(FirstRow::Foreign, |row| FirstRow::Job(row.job_id))
        }
        _ => FirstRow::Foreign,
    }
}
