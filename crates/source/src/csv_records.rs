//! Reads the records of a CSV in bounded memory.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

use csv::{ByteRecord, ReaderBuilder};

/// Bytes read ahead.
const AHEAD: u64 = 1 << 13;

/// Reads records of limited length.
pub(super) struct Records<R> {
    reader: csv::Reader<Bounded<R>>,
    /// Remaining bytes of the current record.
    left: Rc<Cell<u64>>,
    longest: u64,
    /// Whether the header is still to come.
    at_headers: bool,
}

/// An error in a record.
pub(super) enum Malformed {
    /// It exceeds the limit. It begins at this byte.
    TooLong { start: u64, longest: u64 },
    /// It is not CSV.
    Invalid(csv::Error),
}

impl<R: Read> Records<R> {
    /// For comma-separated fields.
    pub(super) fn new(input: R, has_headers: bool, longest: u64) -> Self {
        Self::between(b',', input, has_headers, longest)
    }

    /// For fields with another separator.
    pub(super) fn between(delimiter: u8, input: R, has_headers: bool, longest: u64) -> Self {
        let (input, left) = Bounded::new(input);
        let mut builder = ReaderBuilder::new();
        let builder = builder
            .delimiter(delimiter)
            .has_headers(has_headers)
            .buffer_capacity(AHEAD as usize);
        Self {
            reader: builder.from_reader(input),
            left,
            longest,
            at_headers: has_headers,
        }
    }

    /// The first record, if it is the header.
    pub(super) fn headers(&mut self) -> Result<ByteRecord, Malformed> {
        self.left.set(self.longest.saturating_add(AHEAD));
        self.at_headers = false;
        let headers = self.reader.byte_headers().cloned();
        headers.map_err(|error| self.malformed(0, error))
    }

    /// Reads the next record; `false` at the end.
    pub(super) fn next(&mut self, record: &mut ByteRecord) -> Result<bool, Malformed> {
        if self.at_headers {
            self.headers()?;
        }
        let start = self.reader.position().byte();
        // Buffered bytes belong to this record at most.
        self.left.set(self.longest.saturating_add(AHEAD));
        match self.reader.read_byte_record(record) {
            Ok(_) if record.as_slice().len() as u64 > self.longest => Err(Malformed::TooLong {
                start,
                longest: self.longest,
            }),
            Ok(more) => Ok(more),
            Err(error) => Err(self.malformed(start, error)),
        }
    }

    fn malformed(&self, start: u64, error: csv::Error) -> Malformed {
        if self.left.get() == 0 {
            return Malformed::TooLong {
                start,
                longest: self.longest,
            };
        }
        Malformed::Invalid(error)
    }
}

/// Returns no more bytes than the limit leaves.
pub(super) struct Bounded<R> {
    input: R,
    left: Rc<Cell<u64>>,
}

impl<R> Bounded<R> {
    /// Returns nothing until the limit is reset.
    pub(super) fn new(input: R) -> (Self, Rc<Cell<u64>>) {
        let left = Rc::new(Cell::new(0));
        let bounded = Self {
            input,
            left: Rc::clone(&left),
        };
        (bounded, left)
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other("the record is too long"));
        }
        let length = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.input.read(&mut buffer[..length])?;
        self.left.set(left - read as u64);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R30: the rest after a stray quote is not read.
    #[test]
    fn a_record_is_read_only_as_far_as_it_may_be_long() {
        let endless = (&b"uri\n\"a\",\n\"stray"[..]).chain(io::repeat(b'x'));
        let mut records = Records::new(endless, false, 1000);
        let mut record = ByteRecord::new();
        assert!(matches!(records.next(&mut record), Ok(true)));
        // Records differ in length afterwards, which is another error.
        assert!(matches!(
            records.next(&mut record),
            Err(Malformed::Invalid(_))
        ));
        let Err(Malformed::TooLong { start, .. }) = records.next(&mut record) else {
            panic!("an endless record was read");
        };
        assert_eq!(start, 9);
    }

    #[test]
    fn records_as_long_as_allowed_are_read_however_many() {
        let text = format!("{}\n", "x".repeat(100)).repeat(1000);
        let mut records = Records::new(text.as_bytes(), false, 100);
        let mut record = ByteRecord::new();
        for _ in 0..1000 {
            assert!(matches!(records.next(&mut record), Ok(true)));
        }
        assert!(matches!(records.next(&mut record), Ok(false)));
        let mut records = Records::new(text.as_bytes(), false, 99);
        let Err(Malformed::TooLong { start: 0, .. }) = records.next(&mut record) else {
            panic!("a record above the limit was read");
        };
    }
}
