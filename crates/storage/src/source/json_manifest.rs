use trommel_types::{Column, Scalar};

use crate::StorageError;
use crate::source::SourceOptions;
use crate::source::json_fields::{FieldTypes, Fields, scalar, text};
use crate::source::lines::Lines;
use crate::source::listing::{Listing, Stop, Visitor, probe};
use crate::source::manifest::{Entries, Manifest, PROBED};
use crate::source::stored::{Reader, Stored};

/// One JSON object a line. Other fields pass through, each with the one type that holds all its
/// values; lists and objects as the JSON text they are.
pub(super) struct JsonManifest {
    manifest: Manifest,
    uri: String,
    columns: Vec<Column>,
}

impl JsonManifest {
    /// Reads the file once, to learn its fields and their types.
    ///
    /// # Errors
    /// When the file cannot be read, a line is no JSON object, or no field holds the uris.
    pub(super) fn open(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        let manifest = Manifest::new(stored, Entries::Lines);
        let mut types = FieldTypes::default();
        for_each_object(&manifest, &mut |_, fields| {
            types.observe(fields);
            Ok(())
        })?;
        let names: Vec<&str> = types.names().collect();
        if names.is_empty() {
            return Err(manifest.invalid("it is empty; each line has to be a JSON object"));
        }
        let uri = names[manifest.uri_column(&names, options)?].to_owned();
        let columns = types
            .columns()
            .filter(|column| column.name != uri)
            .collect();
        let manifest = Self {
            manifest,
            uri,
            columns,
        };
        if !types.is_always_text(&manifest.uri) {
            // Once more, for the number of the line.
            for_each_object(&manifest.manifest, &mut |line, fields| {
                manifest.uri_of(line, fields).map(|_| ())
            })?;
        }
        probe(&manifest, options, PROBED)?;
        Ok(manifest)
    }

    fn uri_of(&self, line: u64, fields: &Fields<'_>) -> Result<String, StorageError> {
        fields.get(&self.uri).and_then(text).ok_or_else(|| {
            let reason = format!("field `{}` is missing or is no text", self.uri);
            self.manifest.at(line, reason)
        })
    }

    fn take(
        &self,
        line: u64,
        fields: &Fields<'_>,
        options: &SourceOptions,
        visitor: &mut dyn Visitor,
    ) -> Result<(), Stop> {
        let uri = self.uri_of(line, fields)?;
        let values = self
            .columns
            .iter()
            .map(|column| match fields.get(&column.name) {
                Some(value) => {
                    scalar(value, column.kind).map_err(|error| self.manifest.at(line, error))
                }
                None => Ok(Scalar::Null),
            });
        let values = values.collect::<Result<_, _>>()?;
        self.manifest
            .take(line, uri.as_bytes(), values, options, visitor)
    }
}

impl Listing for JsonManifest {
    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn list(&self, options: &SourceOptions, visitor: &mut dyn Visitor) -> Result<(), Stop> {
        for_each_object(&self.manifest, &mut |line, fields| {
            self.take(line, fields, options, visitor)
        })
    }
}

fn for_each_object<E: From<StorageError>>(
    manifest: &Manifest,
    each: &mut dyn FnMut(u64, &Fields<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let mut lines: Lines<Reader> = Lines::new(manifest.open()?);
    loop {
        let line = match lines.next() {
            Ok(Some(line)) => line.to_vec(),
            Ok(None) => return Ok(()),
            Err(error) => return Err(manifest.at(lines.number(), error).into()),
        };
        let number = lines.number();
        let text = str::from_utf8(&line).map_err(|error| manifest.at(number, error))?;
        let fields: Fields<'_> =
            serde_json::from_str(text).map_err(|error| manifest.at(number, error))?;
        each(number, &fields)?;
    }
}
