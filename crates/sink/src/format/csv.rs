//! CSV. As in JSON Lines, the rows are the commit record.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};

use bytes::Bytes;
use csv::{ReaderBuilder, StringRecord, Terminator, WriterBuilder};
use serde_json::Value as Json;

use super::jsonl::{CommitRow, Commits};
use super::{Encoding, FieldRows, Input, MergeError, MergePart, Tail, Wanted};
use crate::JobRecord;
use crate::owner::Owner;
use crate::part::PartRecord;
use crate::row::{COLUMNS, Row, TextRow, Value};

pub(super) struct Csv;

impl Encoding for Csv {
    fn write(
        &self,
        out: &mut (dyn Write + Send),
        job: &JobRecord,
        rows: &[Row],
        _: &PartRecord,
    ) -> io::Result<()> {
        let names = job.all_names();
        let mut csv = writer(out);
        csv.write_record(&names).map_err(io_error)?;
        for row in rows {
            let values = TextRow {
                job,
                names: &names,
                row,
            }
            .values();
            for value in &values {
                let field = field(value, job.escape_formulas);
                csv.write_field(field.as_bytes()).map_err(io_error)?;
            }
            csv.write_record(None::<&[u8]>).map_err(io_error)?;
        }
        csv.flush()
    }

    fn tail(&self) -> Option<u64> {
        None
    }

    fn read_record(&self, end: Bytes, _: u64, job: &JobRecord) -> Result<Tail, String> {
        let mut commits = Commits::of(&end)?;
        let mut csv = ReaderBuilder::new().from_reader(&*end);
        let header = csv.headers().map_err(|error| error.to_string())?;
        if !header.iter().eq(job.all_names().iter().map(String::as_str)) {
            return Err("its header is not the one of this job".to_owned());
        }
        for record in csv.into_records() {
            let record = record.map_err(|error| error.to_string())?;
            let row = commit_row(&record, job.escape_formulas);
            commits.add(row.ok_or("a row has no index")?, job)?;
        }
        commits.finish()
    }

    fn rows(&self, input: Input, _: Wanted) -> Result<FieldRows, String> {
        let mut reader = csv::Reader::from_reader(BufReader::new(input.reader()));
        let header = reader.headers().map_err(|error| error.to_string())?.clone();
        Ok(Box::new(reader.into_records().map(move |record| {
            let record = record.map_err(|error| error.to_string())?;
            let fields = header.iter().zip(&record);
            Ok(fields.map(|(name, field)| json(name, field)).collect())
        })))
    }

    fn unescaped<'a>(&self, text: &'a str) -> &'a str {
        unescaped(text)
    }

    fn owner(&self, file: File) -> Owner {
        let mut csv = ReaderBuilder::new().from_reader(BufReader::new(file).take(1 << 24));
        let is_ours = csv.headers().is_ok_and(|header| {
            header.len() >= COLUMNS.len()
                && COLUMNS.iter().zip(header).all(|(own, name)| *own == name)
        });
        match (is_ours, csv.records().next()) {
            (true, None) => Owner::NoRows,
            (true, Some(Ok(record))) => {
                commit_row(&record, false).map_or(Owner::Foreign, |row| Owner::Job(row.job_id))
            }
            _ => Owner::Foreign,
        }
    }

    fn merge(
        &self,
        parts: &[MergePart],
        out: &mut (dyn Write + Send),
        job: &JobRecord,
        _: &str,
    ) -> Result<(), MergeError> {
        let mut header = Vec::new();
        self.write(&mut header, job, &[], &PartRecord::default())?;
        out.write_all(&header)?;
        for part in parts {
            let failed = |error: &dyn std::fmt::Display| MergeError::part(part, error);
            let mut input = BufReader::new(File::open(&part.path).map_err(|error| failed(&error))?);
            let mut start = vec![0; header.len()];
            input
                .read_exact(&mut start)
                .map_err(|error| failed(&error))?;
            if start != header {
                return Err(failed(&"its header is not the one of this job"));
            }
            if part.superseded.is_empty() {
                io::copy(&mut input, out)?;
                continue;
            }
            let mut csv = writer(&mut *out);
            let records = ReaderBuilder::new().has_headers(false).from_reader(input);
            for record in records.into_records() {
                let record = record.map_err(|error| failed(&error))?;
                let row =
                    commit_row(&record, false).ok_or_else(|| failed(&"a row has no index"))?;
                if !part.superseded.contains(row.index) {
                    csv.write_record(&record).map_err(io_error)?;
                }
            }
            csv.flush()?;
        }
        Ok(())
    }
}

fn writer(out: &mut (dyn Write + Send)) -> csv::Writer<&mut (dyn Write + Send)> {
    WriterBuilder::new()
        .terminator(Terminator::CRLF)
        .from_writer(out)
}

/// The cause, whose kind is lost in the conversion of `csv`.
fn io_error(error: csv::Error) -> io::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => error,
        other => io::Error::other(format!("{other:?}")),
    }
}

/// A value as a CSV field: lists as JSON text, null as an empty field.
fn field<'a>(value: &'a Value<'_>, escapes: bool) -> Cow<'a, str> {
    match value {
        Value::Null => "".into(),
        Value::Text(text) if escapes && is_formula(text) => format!("'{text}").into(),
        Value::Text(text) => Cow::Borrowed(text),
        // JSON cannot represent these.
        Value::Float(float) if !float.is_finite() => float.to_string().into(),
        Value::Score(score) if !score.is_finite() => score.to_string().into(),
        other => serde_json::to_string(other)
            .expect("numbers, booleans and lists of them")
            .into(),
    }
}

/// Whether a spreadsheet would run the text as a formula, or the text looks escaped already.
fn is_formula(text: &str) -> bool {
    let text = text.trim_start_matches('\'');
    text.starts_with(['=', '+', '-', '@', '\t', '\r'])
}

/// Undoes the escape.
fn unescaped(text: &str) -> &str {
    match text.strip_prefix('\'') {
        Some(rest) if is_formula(rest) => rest,
        _ => text,
    }
}

fn commit_row(record: &StringRecord, escapes: bool) -> Option<CommitRow> {
    let field = |name: &str| {
        let field = record.get(COLUMNS.iter().position(|column| *column == name)?)?;
        Some(if escapes { unescaped(field) } else { field })
    };
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

/// A CSV field as the JSON value it was written from; pass-through columns stay text.
fn json(name: &str, field: &str) -> (String, Json) {
    let value = match name {
        _ if field.is_empty() => Json::Null,
        "index" | "score" | "top" => serde_json::from_str(field).unwrap_or(Json::Null),
        _ => Json::String(field.to_owned()),
    };
    (name.to_owned(), value)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{job, row};
    use super::*;
    use crate::Format;

    /// R38.
    #[test]
    fn formulas_are_escaped_on_request_and_the_part_still_names_its_images() {
        let uris = [
            "=1+1", "+x", "-y", "@z", "'=quoted", "'plain", "plain", "\tt",
        ];
        let rows: Vec<_> = (0..)
            .zip(uris)
            .map(|(index, uri)| row(index, uri))
            .collect();
        let record = PartRecord::of(&rows);
        for escape_formulas in [false, true] {
            let job = JobRecord {
                escape_formulas,
                ..job(Format::Csv)
            };
            let mut part = Vec::new();
            Csv.write(&mut part, &job, &rows, &record).unwrap();
            let mut reader = csv::Reader::from_reader(&*part);
            let cells: Vec<String> = reader
                .records()
                .map(|record| record.unwrap()[2].to_owned())
                .collect();
            let expected = [
                "'=1+1",
                "'+x",
                "'-y",
                "'@z",
                "''=quoted",
                "'plain",
                "plain",
                "'\tt",
            ];
            assert_eq!(cells, if escape_formulas { expected } else { uris });
            let size = part.len() as u64;
            match Csv.read_record(part.into(), size, &job).unwrap() {
                Tail::Record(read) => assert_eq!(read, record),
                Tail::More(_) => panic!("it was given all"),
            }
        }
    }
}
