use std::io::{self, BufReader, Read};

use trommel_storage::StorageError;
use trommel_types::{Column, Scalar};

use crate::SourceOptions;
use crate::json_array::{self, ArrayError};
use crate::json_fields::{FieldTypes, Fields, scalar, text};
use crate::lines::Lines;
use crate::listing::{Listing, Stop, Visitor};
use crate::manifest::{Entries, Manifest};
use crate::stored::Stored;

/// One JSON object per line, or an array of objects or uris. Other fields pass through, each with
/// the common type of its values; lists and objects as JSON text.
pub(super) struct JsonManifest {
    manifest: Manifest,
    shape: Shape,
    uri: String,
    columns: Vec<Column>,
}

/// The layout of the file.
#[derive(Clone, Copy)]
enum Shape {
    Lines,
    Array,
}

impl JsonManifest {
    /// Reads the file once to learn its fields and their types.
    ///
    /// # Errors
    /// If the file cannot be read, a line is not a JSON object, or no field has uris.
    pub(super) fn lines(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        let manifest = Manifest::new(stored, Entries::Lines);
        Self::open(manifest, Shape::Lines, options)
    }

    /// As [`JsonManifest::lines`], for a file that may also be an array.
    ///
    /// # Errors
    /// If it is neither.
    pub(super) fn array(stored: &Stored, options: &SourceOptions) -> Result<Self, StorageError> {
        let manifest = Manifest::new(stored, Entries::Rows);
        let read = first_byte(&manifest).map_err(|error| manifest.unread(0, error))?;
        match read {
            Some(b'{') => Self::lines(stored, options).map_err(|error| {
                let remedy = "as it begins with an object it is read as one object a line; if it is a single object, write its list to a file (jq -c '.images[]' FILE > images.jsonl)";
                StorageError::new(error.kind(), format!("{error}; {remedy}"))
            }),
            _ => Self::open(manifest, Shape::Array, options),
        }
    }

    fn open(
        manifest: Manifest,
        shape: Shape,
        options: &SourceOptions,
    ) -> Result<Self, StorageError> {
        let mut types = FieldTypes::default();
        let longest = options.max_record_bytes;
        for_each_object(&manifest, shape, longest, &mut |_, fields| {
            types.observe(fields);
            Ok(())
        })?;
        let names: Vec<&str> = types.names().collect();
        if names.is_empty() {
            return Err(manifest.invalid("it is empty; it has to hold JSON objects"));
        }
        let uri = names[manifest.uri_column(&names, options)?].to_owned();
        let columns = types
            .columns()
            .filter(|column| column.name != uri)
            .collect();
        let manifest = Self {
            manifest,
            shape,
            uri,
            columns,
        };
        if !types.is_always_text(&manifest.uri) {
            // Read again to find the number of the line.
            for_each_object(&manifest.manifest, shape, longest, &mut |line, fields| {
                manifest.uri_of(line, fields).map(|_| ())
            })?;
        }
        manifest.manifest.probe(&manifest, options)?;
        Ok(manifest)
    }

    fn uri_of(&self, line: u64, fields: &Fields<'_>) -> Result<String, StorageError> {
        fields.get(&self.uri).and_then(text).ok_or_else(|| {
            let reason = format!("field `{}` is missing or not a string", self.uri);
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
        let longest = options.max_record_bytes;
        for_each_object(&self.manifest, self.shape, longest, &mut |line, fields| {
            self.take(line, fields, options, visitor)
        })
    }
}

/// The first byte that is not white space.
fn first_byte(manifest: &Manifest) -> io::Result<Option<u8>> {
    let input = BufReader::new(manifest.open().map_err(io::Error::other)?);
    for byte in input.bytes() {
        match byte? {
            // Also skips a byte order mark, which is not valid JSON.
            b' ' | b'\t' | b'\r' | b'\n' | 0xef | 0xbb | 0xbf => {}
            byte => return Ok(Some(byte)),
        }
    }
    Ok(None)
}

fn for_each_object<E: From<StorageError>>(
    manifest: &Manifest,
    shape: Shape,
    longest: u64,
    each: &mut dyn FnMut(u64, &Fields<'_>) -> Result<(), E>,
) -> Result<(), E> {
    match shape {
        Shape::Lines => for_each_line(manifest, longest, each),
        Shape::Array => for_each_element(manifest, longest, each),
    }
}

fn for_each_line<E: From<StorageError>>(
    manifest: &Manifest,
    longest: u64,
    each: &mut dyn FnMut(u64, &Fields<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let mut lines = Lines::new(manifest.open()?, longest);
    loop {
        let line = match lines.next() {
            Ok(Some(line)) => line.to_vec(),
            Ok(None) => return Ok(()),
            Err(error) => return Err(manifest.unread(lines.number(), error).into()),
        };
        let number = lines.number();
        let text = str::from_utf8(&line).map_err(|error| manifest.at(number, error))?;
        let fields: Fields<'_> =
            serde_json::from_str(text).map_err(|error| manifest.at(number, error))?;
        each(number, &fields)?;
    }
}

fn for_each_element<E: From<StorageError>>(
    manifest: &Manifest,
    longest: u64,
    each: &mut dyn FnMut(u64, &Fields<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let input = manifest.open()?;
    let ended = json_array::for_each_element(input, longest, &mut |number, element| {
        // A string is a uri.
        let fields = match element.get().starts_with('"') {
            true => Fields::one("uri", element),
            false => {
                serde_json::from_str(element.get()).map_err(|error| manifest.at(number, error))?
            }
        };
        each(number, &fields)
    });
    ended.map_err(|error| match error {
        ArrayError::Ended(error) => error,
        ArrayError::TooLong { number, longest } => {
            let reason = format_args!("the element is longer than {longest} bytes");
            manifest.at(number, reason).into()
        }
        ArrayError::Invalid { number, error } if error.is_io() => {
            manifest.unread(number, error.into()).into()
        }
        ArrayError::Invalid { number, error } => manifest.at(number, error).into(),
    })
}
