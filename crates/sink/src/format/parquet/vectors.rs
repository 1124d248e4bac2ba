//! Reads embeddings from the pages of a row group, row by row.

use std::sync::Arc;

use bytes::Bytes;
use half::f16;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReader};
use parquet::basic::{Encoding, Type};
use parquet::column::page::{Page, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::schema::types::ColumnDescriptor;

use super::halves::widen;
use super::levels::{levels, taken};
use super::relabel::{Again, columns};
use super::{EMBEDDING, Floats, floats};

/// Rows decoded at once if pages cannot be read directly.
const BATCH: usize = 1024;

/// The embeddings of a row group.
pub(super) enum Vectors {
    /// Plain values, which are read directly from the pages.
    Pages(Box<Pages>),
    /// Any other encoding.
    Decoded(Box<Decoded>),
}

impl Vectors {
    pub(super) fn open<R: Again>(
        input: &R,
        metadata: &ArrowReaderMetadata,
        group: usize,
    ) -> Result<Self, ParquetError> {
        match Pages::open(input, metadata.metadata(), group)? {
            Some(pages) => Ok(Self::Pages(Box::new(pages))),
            None => {
                let reader = columns(input, metadata, group, BATCH, &[EMBEDDING])?;
                let rows = None;
                Ok(Self::Decoded(Box::new(Decoded { reader, rows })))
            }
        }
    }

    /// Writes the values of the next row to `out`, and returns their number; `None` for a row
    /// without an embedding. If the length differs from that of `out`, the output is meaningless.
    pub(super) fn next(&mut self, out: &mut [f32]) -> Result<Option<usize>, ParquetError> {
        match self {
            Self::Pages(pages) => pages.next(out),
            Self::Decoded(decoded) => decoded.next(out),
        }
    }
}

/// The column of embeddings in a file.
pub(super) fn place(metadata: &ParquetMetaData) -> Option<usize> {
    let columns = metadata.file_metadata().schema_descr().columns();
    columns.iter().position(|column| {
        column.path().parts()[0] == EMBEDDING
            && column.max_rep_level() == 1
            && column.max_def_level() <= 3
    })
}

/// The layout of values in a page.
#[derive(Clone, Copy)]
enum Kind {
    Half,
    Single,
}

impl Kind {
    fn of(column: &ColumnDescriptor) -> Option<Self> {
        match (column.physical_type(), column.type_length()) {
            (Type::FLOAT, _) => Some(Self::Single),
            (Type::FIXED_LEN_BYTE_ARRAY, 2) => Some(Self::Half),
            _ => None,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Half => size_of::<f16>(),
            Self::Single => size_of::<f32>(),
        }
    }
}

/// Values in plain pages.
pub(super) struct Pages {
    reader: Box<dyn PageReader>,
    kind: Kind,
    column: Arc<ColumnDescriptor>,
    /// The values of this page, and how many bytes of them are read.
    values: Bytes,
    read: usize,
    /// Number of values in each row of this page; `None` for null.
    rows: Vec<Option<usize>>,
    next: usize,
    /// Values before the first row that begins in this page; they belong to the previous row.
    continued: usize,
}

impl Pages {
    /// `None` if values are encoded differently.
    fn open<R: Again>(
        input: &R,
        metadata: &ParquetMetaData,
        group: usize,
    ) -> Result<Option<Self>, ParquetError> {
        let Some(place) = place(metadata) else {
            return Ok(None);
        };
        let group = metadata.row_group(group);
        let chunk = group.column(place);
        let is_plain = |encoding| matches!(encoding, Encoding::PLAIN | Encoding::RLE);
        let Some(kind) = Kind::of(chunk.column_descr()) else {
            return Ok(None);
        };
        if !chunk.encodings().all(is_plain) {
            return Ok(None);
        }
        let rows = usize::try_from(group.num_rows())?;
        let reader = SerializedPageReader::new(Arc::new(input.again()?), chunk, rows, None)?;
        Ok(Some(Self {
            reader: Box::new(reader),
            kind,
            column: chunk.column_descr_ptr(),
            values: Bytes::new(),
            read: 0,
            rows: Vec::new(),
            next: 0,
            continued: 0,
        }))
    }

    fn next(&mut self, out: &mut [f32]) -> Result<Option<usize>, ParquetError> {
        while self.next == self.rows.len() {
            if !self.load()? {
                return Err(ParquetError::EOF(
                    "there are fewer embeddings than rows".to_owned(),
                ));
            }
            if self.continued > 0 {
                return Err(ParquetError::General(
                    "a page begins within a row".to_owned(),
                ));
            }
        }
        let row = self.rows[self.next];
        self.next += 1;
        let Some(mut count) = row else {
            return Ok(None);
        };
        self.take(count, out)?;
        // Some writers split rows over pages.
        while self.next == self.rows.len() && self.load()? {
            let continued = std::mem::take(&mut self.continued);
            self.take(continued, out.get_mut(count..).unwrap_or_default())?;
            count += continued;
        }
        Ok(Some(count))
    }

    /// Takes `count` values from the page; `out` receives those that fit.
    fn take(&mut self, count: usize, out: &mut [f32]) -> Result<(), ParquetError> {
        let mut rest = &self.values[self.read..];
        let values = taken(&mut rest, count * self.kind.bytes())?;
        self.read += values.len();
        let kept = count.min(out.len());
        match self.kind {
            Kind::Half => widen(&values.as_chunks().0[..kept], &mut out[..kept]),
            Kind::Single => {
                let singles = values.as_chunks().0.iter();
                for (out, single) in out.iter_mut().zip(singles) {
                    *out = f32::from_le_bytes(*single);
                }
            }
        }
        Ok(())
    }

    /// Advances to the next page; `false` after the last one.
    fn load(&mut self) -> Result<bool, ParquetError> {
        let Some(page) = self.reader.get_next_page()? else {
            return Ok(false);
        };
        let count = page.num_values() as usize;
        let (repetitions, definitions, values) = match &page {
            Page::DataPage { buf, .. } => {
                let mut rest = &buf[..];
                let repetitions = prefixed(&mut rest)?;
                let definitions = match self.column.max_def_level() {
                    0 => &[][..],
                    _ => prefixed(&mut rest)?,
                };
                (repetitions, definitions, buf.slice_ref(rest))
            }
            Page::DataPageV2 {
                buf,
                def_levels_byte_len,
                rep_levels_byte_len,
                ..
            } => {
                let mut rest = &buf[..];
                let repetitions = taken(&mut rest, *rep_levels_byte_len as usize)?;
                let definitions = taken(&mut rest, *def_levels_byte_len as usize)?;
                (repetitions, definitions, buf.slice_ref(rest))
            }
            Page::DictionaryPage { .. } => return Ok(true), // of which no value is
        };
        (self.values, self.read) = (values, 0);
        self.next = 0;
        self.read_rows(repetitions, definitions, count)?;
        Ok(true)
    }

    /// Computes the number of values in each row of a page from its levels.
    fn read_rows(
        &mut self,
        repetitions: &[u8],
        definitions: &[u8],
        count: usize,
    ) -> Result<(), ParquetError> {
        let (mut starts, mut place) = (Vec::new(), 0);
        levels(repetitions, 1, count, |level, run| {
            if level == 0 {
                starts.extend(place..place + run);
            }
            place += run;
        })?;
        // Positions without a value, and why.
        let (mut without, mut place) = (Vec::new(), 0);
        let whole = self.column.max_def_level();
        if whole > 0 {
            let bits = if whole == 1 { 1 } else { 2 };
            levels(definitions, bits, count, |level, run| {
                if i16::from(level) < whole {
                    without.extend((place..place + run).map(|place| (place, level)));
                }
                place += run;
            })?;
        }
        let is_nullable = is_nullable(&self.column);
        let mut without = without.into_iter().peekable();
        self.continued = starts.first().copied().unwrap_or(count);
        self.rows.clear();
        let ends = starts.iter().skip(1).copied().chain([count]);
        for (start, end) in starts.iter().copied().zip(ends) {
            let row = match without.next_if(|(place, _)| *place == start) {
                None => Some(end - start),
                Some((_, 0)) if is_nullable => None,
                Some((_, level)) if level == u8::from(is_nullable) => Some(0),
                Some(_) => return Err(null_value()),
            };
            self.rows.push(row);
        }
        match without.next() {
            Some(_) => Err(null_value()),
            None => Ok(()),
        }
    }
}

/// Whether whole lists may be null: the list is one level, and nullable values are another.
fn is_nullable(column: &ColumnDescriptor) -> bool {
    let values = i16::from(column.self_type().is_optional());
    column.max_def_level() - values == 2
}

fn null_value() -> ParquetError {
    ParquetError::General("an embedding has a value that is null".to_owned())
}

/// Levels, preceded by their length in 4 bytes.
fn prefixed<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], ParquetError> {
    let length = taken(rest, 4)?;
    let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
    taken(rest, length as usize)
}

/// Values decoded in batches.
pub(super) struct Decoded {
    reader: ParquetRecordBatchReader,
    rows: Option<(Floats, usize)>,
}

impl Decoded {
    fn next(&mut self, out: &mut [f32]) -> Result<Option<usize>, ParquetError> {
        loop {
            if let Some((floats, next)) = &mut self.rows
                && *next < floats.rows.len()
            {
                let row = floats.row(*next);
                *next += 1;
                return Ok(row.map(|values| {
                    for (out, value) in out.iter_mut().zip(&*values) {
                        *out = *value;
                    }
                    values.len()
                }));
            }
            let batch = self.reader.next().transpose()?.ok_or_else(|| {
                ParquetError::EOF("there are fewer embeddings than rows".to_owned())
            })?;
            let floats = floats(batch.column(0)).map_err(ParquetError::General)?;
            self.rows = Some((floats, 0));
        }
    }
}
