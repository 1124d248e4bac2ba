use csv::ByteRecord;
use trommel_types::{Column, ColumnKind, Scalar};

use crate::StorageError;
use crate::source::SourceOptions;
use crate::source::listing::{Listing, Stop, Visitor, probe};
use crate::source::manifest::{Entries, Manifest, PROBED};
use crate::source::stored::Stored;

/// CSV with a header. Other columns pass through as text: no type is guessed, so that `007` stays.
pub(super) struct CsvManifest {
    manifest: Manifest,
    uri: usize,
    columns: Vec<Column>,
}

impl CsvManifest {
    /// # Errors
    /// When the file cannot be read, has no column with uris, or one of its first records is
    /// malformed.
    pub(super) fn open(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        let manifest = Manifest::new(stored, Entries::Bytes);
        let mut reader = csv::Reader::from_reader(manifest.open()?);
        let header = reader
            .headers()
            .map_err(|error| malformed(&manifest, &error))?;
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
            uri,
            columns,
        };
        probe(&manifest, options, PROBED)?;
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
        let mut reader = csv::Reader::from_reader(self.manifest.open()?);
        let mut record = ByteRecord::new();
        loop {
            match reader.read_byte_record(&mut record) {
                Ok(true) => self.take(&record, options, visitor)?,
                Ok(false) => return Ok(()),
                Err(error) => return Err(malformed(&self.manifest, &error).into()),
            }
        }
    }
}

fn malformed(manifest: &Manifest, error: &csv::Error) -> StorageError {
    let start = error.position().map(csv::Position::byte);
    match (error.kind(), start) {
        (
            csv::ErrorKind::UnequalLengths {
                expected_len, len, ..
            },
            Some(start),
        ) => manifest.at(
            start,
            format_args!("fields: {len}, but {expected_len} in the header"),
        ),
        (_, Some(start)) => manifest.at(start, error),
        (_, None) => manifest.invalid(error),
    }
}
