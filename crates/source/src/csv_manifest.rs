use csv::{ByteRecord, StringRecord};
use trommel_storage::StorageError;
use trommel_types::{Column, ColumnKind, Scalar};

use crate::SourceOptions;
use crate::csv_records::{Malformed, Records};
use crate::listing::{Listing, Stop, Visitor};
use crate::manifest::{Entries, Manifest};
use crate::stored::Stored;

/// CSV or TSV with a header. Other columns pass through as text, without guessing types, so that
/// `007` stays.
pub(super) struct CsvManifest {
    manifest: Manifest,
    delimiter: u8,
    uri: usize,
    columns: Vec<Column>,
}

impl CsvManifest {
    /// # Errors
    /// If the file cannot be read, has no uri column, or one of its first records is malformed.
    pub(super) fn open(
        stored: &Stored,
        delimiter: u8,
        options: &SourceOptions,
    ) -> Result<Self, StorageError> {
        let manifest = Manifest::new(stored, Entries::Bytes);
        let longest = options.max_record_bytes;
        let mut records = Records::between(delimiter, manifest.open()?, true, longest);
        let header = records
            .headers()
            .map_err(|error| malformed(&manifest, error))?;
        let header = StringRecord::from_byte_record(header).map_err(|_| {
            manifest.invalid("the names of its columns are not UTF-8; convert the file")
        })?;
        if header.is_empty() {
            return Err(manifest.invalid("it is empty; its first line has to name its columns"));
        }
        let names: Vec<&str> = header.iter().collect();
        let uri = manifest.uri_column(&names, options)?;
        let others = names.iter().enumerate().filter(|(place, _)| *place != uri);
        let columns = others
            .map(|(_, name)| Column {
                name: (*name).to_owned(),
                kind: ColumnKind::String,
            })
            .collect();
        let manifest = Self {
            manifest,
            delimiter,
            uri,
            columns,
        };
        manifest.manifest.probe(&manifest, options)?;
        Ok(manifest)
    }

    fn take(
        &self,
        record: &ByteRecord,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let start = record.position().map_or(0, csv::Position::byte);
        let uri = record.get(self.uri).unwrap_or_default();
        let others = record
            .iter()
            .enumerate()
            .filter(|(place, _)| *place != self.uri);
        let text = |(field, column): ((usize, &[u8]), &Column)| match str::from_utf8(field.1) {
            Ok(text) => Ok(Scalar::String(text.to_owned())),
            Err(_) => {
                let reason = format!("column `{}` is not UTF-8; convert the file", column.name);
                Err(self.manifest.at(start, reason))
            }
        };
        let columns = others
            .zip(&self.columns)
            .map(text)
            .collect::<Result<_, _>>()?;
        self.manifest.take(start, uri, columns, options, visitor)
    }
}

impl Listing for CsvManifest {
    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        let input = self.manifest.open()?;
        let longest = options.max_record_bytes;
        let mut records = Records::between(self.delimiter, input, true, longest);
        let mut record = ByteRecord::new();
        loop {
            match records.next(&mut record) {
                Ok(true) => self.take(&record, options, visitor)?,
                Ok(false) => return Ok(()),
                Err(error) => return Err(malformed(&self.manifest, error).into()),
            }
        }
    }
}

fn malformed(manifest: &Manifest, error: Malformed) -> StorageError {
    let error = match error {
        Malformed::Invalid(error) => error,
        Malformed::TooLong { start, longest } => {
            let reason = format_args!(
                "the record is longer than {longest} bytes; close the quote that opens in it"
            );
            return manifest.at(start, reason);
        }
    };
    let start = error.position().map(csv::Position::byte);
    if let csv::ErrorKind::UnequalLengths {
        expected_len, len, ..
    } = error.kind()
        && let Some(start) = start
    {
        let reason = format_args!("fields: {len}, but {expected_len} in the header");
        return manifest.at(start, reason);
    }
    let words = error.to_string();
    match error.into_kind() {
        csv::ErrorKind::Io(error) => manifest.unread(start.unwrap_or(0), error),
        _ => manifest.invalid(words),
    }
}
